"""Sources of weights, files and a function of the user: checked, read, put into a model.

Buffers that the model computes when it is built are in no file, and on the meta device they have no
value.  Libraries that build models there have a method that fills the buffers of one module in
place; its result is used only if it wrote all of it, which two runs on different memory show.  The
constructor is never called again, because its arguments are not known.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pdcompile.eager.digest import flat_bytes
from pdcompile.eager.randomness import preserved_rng, reseed, seed_of
from pdcompile.errors import ConfigError, errors_as, some
from pdcompile.ir.stage_interface import submodule_of
from pdcompile.warn import warn
from pdcompile.weights.tensor_files import TensorFiles


class Registered(NamedTuple):
    """A parameter or buffer under one of its names: `table` of a module has it as `leaf`; state
    dicts have it if it is `kept`."""

    table: dict[str, Any]
    leaf: str
    is_buffer: bool
    kept: bool
    name: str
    tensor: Tensor


def registered(model: nn.Module, *, shared: bool = True) -> Iterator[Registered]:
    """Parameters and buffers, module by module; hooks that rename them are not asked.

    `shared`: those of a module with several names under all of them.
    """
    for path, module in model.named_modules(remove_duplicate=not shared):
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            is_buffer = table is module._buffers
            for leaf, tensor in table.items():
                if tensor is not None:
                    kept = not is_buffer or leaf not in module._non_persistent_buffers_set
                    name = f"{path}.{leaf}" if path else leaf
                    yield Registered(table, leaf, is_buffer, kept, name, tensor)


@contextmanager
def replaced(pairs: Iterable[tuple[Registered, Tensor]]) -> Iterator[None]:
    """Context in which a module has other tensors in the places of some of its own."""
    listed = [(one.table, one.leaf, one.table[one.leaf], tensor) for one, tensor in pairs]
    try:
        for table, leaf, _, tensor in listed:
            table[leaf] = tensor
        yield
    finally:
        for table, leaf, own, _ in listed:
            table[leaf] = own


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
    found: dict[int, list[Registered]] = {}
    for one in sorted(registered(model), key=attrgetter("is_buffer")):
        found.setdefault(id(one.tensor), []).append(one)
    made = (
        Slot(held[0].name, tuple(n for *_, n, _ in held), held[0].tensor, any(o.kept for o in held))
        for held in found.values()
    )
    return {slot.fqn: slot for slot in made}


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


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """The value, as a parameter where the tensor is one, with what a user or library set on it."""
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        vars(value).update(vars(tensor))
    return value


def put(model: nn.Module, slot: Slot, value: Tensor) -> None:
    """Gives a tensor its value under all of its names; one with memory is written in place."""
    old = slot.tensor
    if not old.is_meta:
        old.detach().copy_(value)
        return
    new = like(old, value)
    for name in slot.names:
        set_tensor(model, name, new)


def recomputed(
    model: nn.Module, path: str, leaves: Sequence[str], seed: int
) -> tuple[dict[str, Tensor], str]:
    """Values of some buffers of the module at `path`, and "" or the reason why there are none.

    The model is not changed: a copy without parameters is filled.
    """
    reasons = []
    for name, fill in _ways(model, path):
        try:
            first, second = (
                _filled(model.get_submodule(path), leaves, fill, k, seed_of(seed, 0, 0, path, 0))
                for k in (0, 1)
            )
        except Exception as error:  # of any class: it is the model's code
            reasons.append(f"{name} raised {type(error).__name__}: {error}")
            continue
        short = [leaf for leaf in leaves if not _same(first[leaf], second[leaf])]
        if not short:
            return first, ""
        reasons.append(f"{name} does not fill {', '.join(short)}")
    return {}, "; ".join(reasons) or "its module has no method that computes it"


def _ways(model: nn.Module, path: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The methods of libraries that may fill the buffers, each as a function of the module."""
    module = model.get_submodule(path)
    for name in ("init_non_persistent_buffers", "reset_parameters"):
        if callable(getattr(module, name, None)):
            yield f"{type(module).__name__}.{name}", methodcaller(name)
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):  # the innermost model around it
        owner: Any = model.get_submodule(".".join(parts[:count]))
        if callable(getattr(owner, "_init_weights", None)):
            yield f"{type(owner).__name__}._init_weights", owner._init_weights
            return


def _filled(
    module: nn.Module, leaves: Sequence[str], fill: Callable[[Any], Any], before: int, seed: int
) -> dict[str, Tensor]:
    """The buffers after `fill` ran on a copy of the module whose buffers held `before`."""
    memo: dict[int, Any] = {
        id(one): like(one, torch.empty_like(one, device="meta")) for one in module.parameters()
    }
    twin = copy.deepcopy(module, memo)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set:
            twin._buffers[name] = torch.full_like(buffer, before, device="cpu")
    with preserved_rng(), torch.no_grad(), torch.device("cpu"):
        reseed(seed)
        fill(twin)
    found = {}
    for leaf in leaves:
        buffer, wanted = twin._buffers[leaf], module._buffers[leaf]
        assert wanted is not None
        if buffer is None or buffer.shape != wanted.shape or buffer.dtype != wanted.dtype:
            raise TypeError(f"{leaf} became another tensor")
        found[leaf] = buffer.detach()
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal to the last bit; False on the meta device."""
    if one.is_meta or other.is_meta:
        return False
    return torch.equal(flat_bytes(one), flat_bytes(other))


Fill: TypeAlias = Callable[[str, Tensor], Any]

_NAN_KINDS = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Source:
    """The source of values: files first, then `fill` for names that it does not have.

    `fill(name, tensor)` writes one tensor of the model in place.  torch's default generator is
    seeded by `seed` and the name before each call, so that every plan gets the same values.
    """

    stored_in: TensorFiles
    fill: Fill | None
    seed: int

    def stored(self, slot: Slot) -> list[str]:
        """Names under which the checkpoint has a tensor of the model's state_dict."""
        return [n for n in slot.names if n in self.stored_in.files] if slot.persistent else []


def open_source(given: Any, *, seed: int = 0) -> Source:
    """A source for a path, a function, or a list of paths and one function.

    Raises:
        ConfigError: it is another value, or a file is missing or unreadable.
    """
    parts = list(given) if isinstance(given, list | tuple) else [given]
    places = [part for part in parts if isinstance(part, str | os.PathLike)]
    functions = [part for part in parts if callable(part)]
    if len(places) + len(functions) != len(parts) or not parts or len(functions) > 1:
        raise ConfigError(
            f"weights={given!r} is not a source of weights"[:300],
            remedy="a .safetensors file, a folder or a list of such files, a function (name, "
            "tensor) that fills one tensor in place, or a list of files and one function",
        )
    for function in functions:
        said = "the function given as weights cannot be called with (name, tensor)"
        remedy = "def fill(name, tensor): torch.nn.init.normal_(tensor, std=0.02)"
        with errors_as(ConfigError, said, "weights", remedy, Exception):
            inspect.signature(function).bind("name", None)
    return Source(TensorFiles(places), next(iter(functions), None), seed)


def read(
    model: nn.Module, source: Source, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The values of some of the model's tensors, one after the other, each in new CPU memory.

    Args:
        names: of parameters and buffers, any name of a tied one; None: all.

    Yields (first name in the model, value) in the order of the files.  Tensors that have values
    already are left out, unless the checkpoint has them.  The model is not changed.

    Raises:
        ConfigError: names are missing in the checkpoint; shape or dtype do not fit; `fill` raises
            or leaves values unfilled; a buffer that the model computes cannot be recomputed.
    """
    wanted = list(slots(model).values())
    _refuse_missing(wanted, source)
    if names is not None:
        asked = set(names)
        wanted = [slot for slot in wanted if not asked.isdisjoint(slot.names)]
    stored = [slot for slot in wanted if source.stored(slot)]
    stored.sort(key=lambda slot: str(source.stored_in.files[source.stored(slot)[0]]))
    for slot in stored:
        yield slot.fqn, _from_checkpoint(slot, source)
    bare = [slot for slot in wanted if slot.tensor.is_meta and not source.stored(slot)]
    computed = _computed([slot for slot in bare if not slot.persistent], model, source.seed)
    for slot in bare:
        value = computed.pop(slot.fqn, "")
        if isinstance(value, Tensor):
            yield slot.fqn, value
        elif source.fill is not None:
            yield slot.fqn, _from_fill(slot, source.fill, source.seed)
        else:
            raise ConfigError(
                f"the buffer {slot.fqn} is in no checkpoint: the model computes it when it is "
                f"built, which leaves no values on the meta device, and {value}",
                where=slot.fqn,
                remedy="give its class a method reset_parameters() that fills its buffers in "
                "place, build that module on the CPU (with torch.device('cpu'): …), or add a "
                "function (name, tensor) that fills it: weights=[files, function]",
            )


def materialise(
    model: nn.Module, source: Source, names: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Gives some of the model's tensors (None: all) their values; returns their first names.

    A tensor on the meta device is replaced under all of its names, one with memory is written.
    At most one tensor is in memory besides those of the model.

    Raises:
        ConfigError: as `read`.
    """
    found = slots(model)
    done = []
    for fqn, value in read(model, source, names):
        put(model, found[fqn], value)
        done.append(fqn)
    return tuple(done)


def check(model: nn.Module, source: Source) -> None:
    """Compares names as load_state_dict does, of all tensors, without reading values.

    Warns of names that the model does not have, and of those left to `fill` beside files.

    Raises:
        ConfigError: names are missing, or a function is given and no tensor needs it.
    """
    found = list(slots(model).values())
    _refuse_missing(found, source)
    alone = source.fill is not None and not source.stored_in.files
    if alone and not any(slot.tensor.is_meta for slot in found):
        raise ConfigError(
            "weights= is a function, and every tensor of the model has its values",
            remedy="leave it out, or build the model on the meta device: "
            "with torch.device('meta'): …",
        )
    if unexpected := _unexpected(found, source):
        warn(f"weights: not in the model, and left unread: {some(unexpected, 5)}", RuntimeWarning)
    left = [s.fqn for s in found if s.persistent and s.tensor.is_meta and not source.stored(s)]
    if source.stored_in.files and left:
        said = f"weights: not in the checkpoint, and left to the function: {some(left, 5)}"
        warn(said, RuntimeWarning)


def _refuse_missing(found: list[Slot], source: Source) -> None:
    if source.fill is not None:
        return
    saved = [slot for slot in found if slot.persistent]
    missing = [slot.fqn for slot in saved if not source.stored(slot)]
    if not missing:
        return
    unexpected = _unexpected(found, source)
    also = f"; it has {len(unexpected)} that the model does not: " if unexpected else ""
    raise ConfigError(
        f"{len(missing)} of {len(saved)} parameters and buffers are missing in the "
        f"checkpoint: {some(missing, 5)}{also}{some(unexpected, 5)}",
        where="weights",
        remedy="give the checkpoint of this model, or add a function (name, tensor) for what it "
        "does not have: weights=[files, function]",
    )


def _unexpected(found: list[Slot], source: Source) -> list[str]:
    known = {name for slot in found if slot.persistent for name in slot.names}
    return [name for name in source.stored_in.files if name not in known]


def _from_checkpoint(slot: Slot, source: Source) -> Tensor:
    first, *others = source.stored(slot)
    value = source.stored_in.tensor(first, slot.tensor)
    for name in others:
        if not torch.equal(value, source.stored_in.tensor(name, slot.tensor)):
            raise ConfigError(
                f"{first} and {name} are one tensor in the model, and differ in the checkpoint",
                where=str(source.stored_in.files[name]),
                remedy="untie them in the model, or leave one out of the checkpoint",
            )
    return value


def _computed(bare: list[Slot], model: nn.Module, seed: int) -> dict[str, Tensor | str]:
    """Values of buffers that the model computes, or the reason why there is none, by name."""
    of_module: dict[str, list[Slot]] = {}
    for slot in bare:
        of_module.setdefault(slot.fqn.rpartition(".")[0], []).append(slot)
    found: dict[str, Tensor | str] = {}
    for path, members in of_module.items():
        leaves = [slot.fqn.rpartition(".")[2] for slot in members]
        values, reason = recomputed(model, path, leaves, seed)
        for slot, leaf in zip(members, leaves, strict=True):
            found[slot.fqn] = values.get(leaf, reason)
    return found


def _from_fill(slot: Slot, fill: Fill, seed: int) -> Tensor:
    """Runs the user's function on new memory, and checks that it wrote all of it."""
    kind = slot.tensor.dtype
    value = _run(fill, slot, seed, float("nan") if kind in _NAN_KINDS else 0)
    if kind in _NAN_KINDS:
        parts = torch.split(value.flatten(), _CHUNK)
        complete = not any(bool(part.isnan().any()) for part in parts)
    else:
        complete = torch.equal(value, _run(fill, slot, seed, 1))
    if not complete:
        raise ConfigError(
            f"the function given as weights leaves {slot.fqn} {tuple(slot.tensor.shape)} "
            "without values",
            where=slot.fqn,
            remedy="write every element in place, for example tensor.normal_(std=0.02) or "
            "tensor.copy_(value); what it returns is not looked at",
        )
    return value


def _run(fill: Fill, slot: Slot, seed: int, before: float) -> Tensor:
    value = torch.full_like(slot.tensor, before, device="cpu", requires_grad=False)
    with preserved_rng(), torch.no_grad():
        reseed(seed_of(seed, 0, 0, slot.fqn, 0))
        said = "the function given as weights fails"
        remedy = "it is called once for every tensor that has no values, with (name, tensor)"
        with errors_as(ConfigError, said, slot.fqn, remedy, Exception):
            fill(slot.fqn, value)
    return value
