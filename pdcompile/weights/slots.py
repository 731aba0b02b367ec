"""The tensors of a model under all of their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pdcompile.ir.stage_interface import submodule_of


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter or buffer.

    `fqn` is its first name in the model, `names` are all of them (tied tensors have several);
    `persistent` is False for a buffer that state_dict leaves out under every name.
    """

    fqn: str
    names: tuple[str, ...]
    tensor: Tensor
    persistent: bool


def slots(model: nn.Module) -> dict[str, Slot]:
    """Every parameter, then every buffer, by its first name and in the order of the model."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    kept: set[int] = set()
    for registry in ("_parameters", "_buffers"):
        for path, module in model.named_modules(remove_duplicate=False):
            for leaf, tensor in vars(module)[registry].items():
                if tensor is None:
                    continue
                tensors.setdefault(id(tensor), tensor)
                names.setdefault(id(tensor), []).append(f"{path}.{leaf}" if path else leaf)
                if registry == "_parameters" or leaf not in module._non_persistent_buffers_set:
                    kept.add(id(tensor))
    return {
        found[0]: Slot(found[0], tuple(found), tensors[key], key in kept)
        for key, found in names.items()
    }


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a tensor into a module under a dotted name: parameter, buffer or attribute as before."""
    path, _, leaf = name.rpartition(".")
    home = submodule_of(module, path)
    registries: tuple[dict[str, Any], ...] = (home._parameters, home._buffers)
    for registry in registries:
        if leaf in registry:
            registry[leaf] = tensor
            return
    setattr(home, leaf, tensor)


def put(model: nn.Module, slot: Slot, value: Tensor) -> None:
    """Gives a tensor its value under all of its names; one with memory is written in place."""
    old = slot.tensor
    if not old.is_meta:
        old.detach().copy_(value)
        return
    new = value
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(value, requires_grad=old.requires_grad)
    vars(new).update(vars(old))  # attributes that the user or a library set on it
    for name in slot.names:
        set_tensor(model, name, new)
