"""Attributes that forward read when the model was captured, compared at every call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from operator import is_
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
    of_class,
    restore,
    roots,
    snapshot,
)
from pdcompile.errors import ConfigError
from pdcompile.runtime.watch.reached import Reach
from pdcompile.warn import warn

_AS_TENSOR = "pass it as a tensor, to the model or in the target"


class AttributeWatch:
    """Values of the attributes that forward reads, in each mode of the model, and of the variables
    that the functions of model and loss can read."""

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
        modules = {  # alike ones once
            (type(module), vars(module).get("forward")): (f"the model's {path}".rstrip(), module)
            for path, module in model.named_modules() if not self.runs_whole(path)
        }  # fmt: skip
        tables = [t for m in model.modules() for t in (m._forward_hooks, m._forward_pre_hooks)]
        hooks = [("a hook", hook) for table in tables for hook in table.values()]
        noted = [one for one in roots(model, loss_fn).values() if isinstance(one, nn.Module)]
        reach = Reach([("loss_fn", loss_fn), *modules.values(), *hooks], noted)
        self._reached = {one[:2]: (one, snapshot(one.value(), 2)) for one in reach.found}

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
            found = difference(was, now, path, is_)
            if found is not None:
                reader = "loss_fn" if path.startswith("loss_fn.") else "forward"
                way = "make it a buffer (register_buffer), which may be written in place; or "
                if reader == "loss_fn" and not isinstance(owner, nn.Module):
                    way = f"{_AS_TENSOR}; or "
                own = not type(owner).__module__.startswith("torch.")
                raise ConfigError(
                    f"{reader} reads this attribute, which was {_shown(was)} when the model was "
                    f"captured and is {_shown(now)} now: its value is part of the stages",
                    where=found,
                    remedy=(way if own else "") + "compile the changed model anew",
                )
        for key, (one, was) in [*self._reached.items()]:
            now = one.value()
            if now is was or (isinstance(was, Contents) and not was.content):
                continue
            found = difference(was, now, one.name, is_)
            if found is not None:
                del self._reached[key]  # told once
                warn(
                    f"{found} was {_shown(was)} when the stages were made and is {_shown(now)} "
                    f"now; {one.function} names it, and the stages keep the former value. To "
                    f"change it from call to call {_AS_TENSOR}; else compile the model anew"
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
    known = roots(model, loss_fn)
    for root, *names in places:
        owner = known.get(root, MISSING)
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
