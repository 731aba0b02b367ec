"""Attributes that forward read when the model was captured, compared at every call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from pdcompile.compiled import Compiled
from pdcompile.eager.digest import address
from pdcompile.eager.modes import in_mode, overrides_train
from pdcompile.eager.snapshot import (
    MISSING,
    Contents,
    attribute,
    difference,
    identical,
    of_class,
    restore,
    snapshot,
)
from pdcompile.errors import ConfigError


class AttributeWatch:
    """Values of the attributes that forward reads, in each mode of the model."""

    def __init__(self, model: nn.Module, loss_fn: Any, compiled: Compiled) -> None:
        self._opaque = [path for one in compiled.interfaces for path in one.opaque]
        self._owners = [
            (owner, name, path, self.runs_whole(root))
            for owner, name, path, root in owners(model, loss_fn, compiled.capture.attributes)
        ]
        parameters = {id(one) for one in model.parameters()}
        self._tensors: list[tuple[str, bool, Tensor]] = []  # `check` sees to it that they stay so
        for owner, name, path, shared in self._owners:
            value = attribute(owner, name)
            follows = not shared or isinstance(owner, nn.RNNBase)  # it renews its list of weights
            for place, found in _tensors_in(snapshot(value), path):
                if not (follows and id(found) in parameters):  # a stage has its own parameter there
                    self._tensors.append((place, isinstance(value, Tensor), found))
        self._values = {model.training: self._present()}
        other = not model.training
        self._values[other] = self._values[model.training]
        if overrides_train(model):
            before = [snapshot(vars(module)) for module in model.modules()]
            with in_mode(model, other):
                self._values[other] = self._present()
            for one in before:
                restore(one)

    def runs_whole(self, path: str) -> bool:
        """True if a module is opaque, or inside of one: it shares containers with the model's."""
        return any(path == one or path.startswith(f"{one}.") for one in self._opaque)

    def tensors(self, *, inside: bool = False) -> list[tuple[str, Tensor]]:
        """Path and value of the attributes that are tensors, and of tensors in containers (those
        alone: `inside`)."""
        return [(path, tensor) for path, own, tensor in self._tensors if not (inside and own)]

    def refuse_aliases(self, versioned: Mapping[str, Tensor]) -> None:
        """An attribute cannot follow a parameter whose update goes to other memory.

        Raises:
            ConfigError: a tensor lies in the memory of one of these parameters, by name.
        """
        places = {t.untyped_storage().data_ptr(): n for n, t in versioned.items() if address(t)}
        for name, tensor in self.tensors():
            at = tensor.untyped_storage().data_ptr() if address(tensor) else None
            if at in places:
                raise ConfigError(
                    f"this tensor, which forward reads, lies in the memory of the parameter "
                    f"{places[at]}, whose updates go to other memory under older versions of the "
                    "weights and on other ranks",
                    where=name,
                    remedy="use the parameter itself in forward (detach() there), or a clone()",
                )

    def check(self, training: bool) -> None:
        once = cache(of_class)  # layers are alike: most look into the same few classes
        for (owner, name, path, _), was in zip(self._owners, self._values[training], strict=True):
            now = attribute(owner, name, once)
            if now is was:
                continue
            if isinstance(was, Contents) and not was.content:
                continue  # it was empty, and is filled in by calls
            found = difference(was, now, path, identical)
            if found is not None:
                buffer = "make it a buffer (register_buffer), which may be written in place; or "
                own = not type(owner).__module__.startswith("torch.")
                raise ConfigError(
                    f"forward reads this attribute, which was {_shown(was)} when the model was "
                    f"captured and is {_shown(now)} now: its value is part of the stages",
                    where=found,
                    remedy=(buffer if own else "") + "compile the changed model anew",
                )

    def _present(self) -> list[Any]:
        return [
            snapshot(attribute(owner, name), 0 if shared else 4)
            for owner, name, _, shared in self._owners
        ]


def owners(
    model: nn.Module, loss_fn: Any, places: Iterable[tuple[str, ...]]
) -> Iterator[tuple[Any, str, str, str]]:
    """The object of each place, the attribute's name, the whole path, and the module's."""
    roots: dict[str, Any] = dict(model.named_modules())
    if isinstance(loss_fn, nn.Module):
        named = loss_fn.named_modules()
        roots |= {f"loss_fn.{path}" if path else "loss_fn": one for path, one in named}
    for root, *names in places:
        owner = roots.get(root, MISSING)
        for name in names[:-1]:
            owner = attribute(owner, name)
        if owner is not MISSING and names[-1] != "training":
            yield owner, names[-1], ".".join([root, *names] if root else names), root


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Contents) and isinstance(value.content, dict | list):
        content = value.content
        for key, item in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _tensors_in(item, f"{path}[{key!r}]")


def _shown(value: Any) -> str:
    return "not there" if value is MISSING else repr(value).partition("\n")[0][:60]
