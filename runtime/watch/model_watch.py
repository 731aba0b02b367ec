"""Watch over the model between two calls of the user.

The pipeline trains the model's own Parameters and buffers, so their values may be changed between
calls, and a buffer may be replaced.  What the stages were made from (other modules, hooks,
attributes that forward reads, dtypes, modes) would be passed over in silence: changes of it are
refused.  So is everything that would hit an update in flight.  docs/between_calls.md lists all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.compiled import Compiled
from pdcompile.eager import digest
from pdcompile.eager.gradients import gradient_hooks
from pdcompile.eager.modes import modes_after_switch, modes_in
from pdcompile.errors import ConfigError
from pdcompile.runtime.watch.attribute_watch import AttributeWatch
from pdcompile.runtime.watch.optimizer_watch import in_flight_error
from pdcompile.weights.source import registered

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KINDS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
          "_forward_hooks_always_called")  # fmt: skip
_ANEW = "compile the changed model anew"
_TABLES = ("other submodules", "other parameters", "other buffers")  # a state consists of these
_BUFFER = "register it as a buffer, which may be written in place; or compile the model anew"
_FREEZE = (
    "requires_grad_(True) again, and to leave it as it is take it out of its group in "
    "pipe.optimizer.param_groups (after pipe.flush()); or compile the changed model anew"
)
_UNFREEZE = (
    "requires_grad_(False) again goes on without training it; to train it, compile the changed "
    "model anew: the stages compute no gradient of it"
)
_VALUES = (
    "change values in place (p.copy_ under torch.no_grad, or load_state_dict), or "
    "compile the changed model anew"
)
Rebind = Callable[[str, Tensor], None]  # (FQN of a buffer, the tensor that took its place)


class ModelWatch:
    """The model as its stages were made from it, and its values as the last call left them.

    Args:
        model: the one that is trained.
        loss_fn: watched too where it is a module.
        tied: names of parameters that several stages hold; none where no other process does.
        several: True if there are other processes.

    Raises:
        ConfigError: an attribute shares memory with weights that have a second copy.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Any, compiled: Compiled, tied: Collection[str],
        *, several: bool,
    ) -> None:  # fmt: skip
        capture = compiled.capture
        self._model = model
        self._tied = frozenset(tied)
        self._modules = [(path, module, _form(module)) for path, module in model.named_modules()]
        loss = nn.ModuleDict({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})
        self._losses = [(path, module, _form(module)) for path, module in loss.named_modules()]
        self._of_loss = [one for one in registered(loss, shared=False) if one.is_buffer]
        every = [*registered(model, shared=False)]
        self._parameters = [one for one in every if not one.is_buffer]
        self._buffers = [one for one in every if one.is_buffer]
        self._forms = [_text(tensor) for *_, tensor in self._buffers]
        self._several = several
        self._traits = [(_text(t), t.requires_grad) for *_, t in self._parameters]
        self._hooks = self._gradient_hooks()
        self._attributes = AttributeWatch(model, loss_fn, compiled)
        if several or compiled.overlaps:  # updates go to other memory
            self._attributes.refuse_aliases(
                {name: t for *_, name, t in self._parameters if t.requires_grad}
            )
        self._asked = {place[0] for place in capture.attributes if place[1:] == ("training",)}
        self._asked |= {p for p, _, _ in self._modules if self._attributes.runs_whole(p)}
        self._modes = {training: modes_in(model, training) for training in (True, False)}
        self._switched = {mode: modes_after_switch(model, mode) for mode in (True, False)}
        named = [(name, tensor) for *_, name, tensor in (*self._parameters, *self._buffers)]
        self._read = {
            name: digest.digest_here(tensor) for name, tensor in named if name in capture.numbers
        }
        self._values: dict[str, digest.WriteState] = {}
        self._older: list[tuple[str, Tensor, tuple[int, int]]] = []
        self._default_dtype = torch.get_default_dtype()

    def remember(
        self,
        *,
        in_flight: bool,
        fresh_copies: bool,
        older: Iterable[tuple[str, Tensor]] = (),
        one_update: bool = False,
    ) -> None:
        """A call ends: the values are the pipeline's from here on.

        `in_flight`: microbatches wait for a later call; `fresh_copies`: other processes have the
        present values of tied parameters; `older`: versions of parameters that later minibatches
        are computed on, with the names of the parameters; `one_update`: at most one was made
        since the last call, so that what is older now was not written.
        """
        seen = [was[1:] for was in self._values.values()] + [was for *_, was in self._older]
        known = {address: bits for address, bits in seen if address} if one_update else {}
        self._older = [
            (name, tensor, (at, known[at] if at in known else digest.digest_here(tensor)))
            for name, tensor, at in ((n, t, digest.address(t)) for n, t in older)
        ]
        self._hooks = self._gradient_hooks() if in_flight else []
        self._values = {
            name: digest.write_state(tensor)
            for name, tensor in self._second_copies(in_flight, fresh_copies)
        }

    def check(self, *, training: bool | None, in_flight: bool, rebind: Rebind) -> None:
        """Take over what may be taken over, and raise ConfigError for what may not.

        `training`: the mode that the call runs in, None where no module begins to run.
        """
        self._check_parameters(training)
        self._check_structure(_TABLES if training is None else ())
        if training is not None:
            self._attributes.check(self._model.training)
            self._check_modes(training)
        replaced = self._replaced_buffers()
        if in_flight and replaced:
            raise in_flight_error(replaced[0][2], "replaced by another tensor", "a buffer")
        if in_flight and self._gradient_hooks() != self._hooks:
            pairs = zip_longest(self._hooks, self._gradient_hooks())
            name = next((new or old)[0] for old, new in pairs if old != new)
            raise in_flight_error(name, "given another gradient hook", "a parameter")
        self._check_values(in_flight)
        for at, tensor, name in replaced:
            old = self._buffers[at]
            if old.tensor.is_meta:  # another process has the stage that holds it
                old.table[old.leaf] = old.tensor
                continue
            rebind(name, tensor)
            self._buffers[at] = old._replace(tensor=tensor)

    # -- what the stages were made from -------------------------------------------------------

    def _check_structure(self, only: Collection[str]) -> None:
        """Compare all that modules are, or what they hold `only` (what a state consists of)."""
        for path, module, form in (*self._modules, *(() if only else self._losses)):
            now = _form(module)
            if now == form:
                continue
            changed = [what for what in only or form if now[what] != form[what]]
            if changed:
                raise _changed(path, f"got {changed[0]}", "a module", _ANEW)
        if torch.get_default_dtype() != self._default_dtype:
            raise ConfigError(
                f"torch's default dtype is {torch.get_default_dtype()}, and was "
                f"{self._default_dtype} when the model was captured",
                remedy="set it back around the call, or compile the model anew",
            )

    def _check_parameters(self, training: bool | None) -> None:
        found = zip(self._parameters, self._traits, strict=True)
        for (table, leaf, *_, name, tensor), (form, trained) in found:
            if table.get(leaf) is not tensor:
                raise _changed(name, "was replaced by another tensor")
            if (now := _text(tensor)) != form:
                raise _changed(name, f"was {form} and is {now}, converted")
            if training and tensor.requires_grad != trained:
                what, remedy = ("frozen", _FREEZE) if trained else ("made trainable", _UNFREEZE)
                raise _changed(name, f"was {what}", remedy=remedy)

    def _check_modes(self, training: bool) -> None:
        """Compare the modes that the call would run in with those that were captured.

        A model in the call's mode keeps it, modules that were switched apart too; one in the
        other mode is switched as by ``model.train()`` or ``model.eval()``.
        """
        expected = self._modes[training]
        switches = self._model.training != training
        for path, module, _ in self._modules:
            mode = self._switched[training][module] if switches else module.training
            if path in self._asked and mode != expected[module]:
                now, was = ("training" if one else "evaluation" for one in (mode, expected[module]))
                raise ConfigError(
                    f"this module is in {now} mode"
                    + (f" after model.{'train' if training else 'eval'}()" if switches else "")
                    + f", and was in {was} mode when the model was captured",
                    where=path or "the model",
                    remedy="switch it back as it was (after model.train() or model.eval() too), "
                    "or compile the model anew",
                )

    def _replaced_buffers(self) -> list[tuple[int, Tensor, str]]:
        """(index, new tensor, name) of buffers that have another tensor now."""
        found = []
        for table, leaf, *_, name, old in self._of_loss:
            if table.get(leaf) is not old:
                raise _changed(name, "was replaced by another tensor", "a buffer")
        for at, (table, leaf, *_, name, old) in enumerate(self._buffers):
            new = table.get(leaf)
            if new is old and _text(new) != self._forms[at]:
                raise _changed(name, f"was {self._forms[at]} and is {_text(new)}", "a buffer")
            if new is old:
                continue
            if not isinstance(new, Tensor) or not _alike(old, new):
                raise _changed(name, f"was {_text(old)} and is {_text(new)}", "a buffer")
            if new.requires_grad:
                raise _changed(name, "was replaced by a tensor that requires gradients", "a buffer")
            if sum(tensor is old for *_, tensor in self._buffers) > 1:
                raise _changed(name, "has several names, and was replaced under one", "a buffer")
            found.append((at, new, name))
        return found

    # -- values -------------------------------------------------------------------------------

    def _second_copies(self, in_flight: bool, fresh_copies: bool) -> list[tuple[str, Tensor]]:
        """Tensors that somebody else has a copy of, or that microbatches in flight need."""
        if in_flight:
            return self._tensors()
        found = [(n, t) for *_, n, t in self._parameters if fresh_copies and n in self._tied]
        # What lies in a container is the captured tensor's copy where it came from another process.
        return found + (self._attributes.tensors(inside=True) if self._several else [])

    def _check_values(self, in_flight: bool) -> None:
        for name, tensor, then in self._older:
            if (digest.address(tensor), digest.digest_here(tensor)) != then:
                raise ConfigError(
                    "an older version of this parameter was written, on which the next minibatch "
                    "is computed; a view that was taken before the last update shows it",
                    where=name,
                    remedy="take .data, detach() and numpy() anew after each step",
                )
        if not (self._read or self._values):
            return
        present = dict(self._tensors())
        for name, number in self._read.items():
            if digest.digest_here(present[name]) != number:
                raise ConfigError(
                    "forward turns the value of this tensor into a Python number, which is part "
                    "of the stages, and the value was changed",
                    where=name,
                    remedy="keep it in tensors in forward (no item(), int() or if), or " + _ANEW,
                )
        for name, was in self._values.items():
            if digest.write_state(present[name]) == was:
                continue
            if in_flight:
                raise in_flight_error(name, "changed", "a parameter or buffer")
            if name not in self._tied:
                raise _changed(name, "was written", "a tensor in a container", _BUFFER)
            raise ConfigError(
                "a parameter was changed that other ranks hold copies of (tied weights), or that "
                "all ranks of a host read in one memory (weights once a host)",
                where=name,
                remedy="call pipe.load_state_dict({name: value}) on every rank instead of writing "
                "to it; this pipeline takes no further call: go on from a checkpoint",
            )

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of all that stages may read."""
        registered = [(name, t) for *_, name, t in (*self._parameters, *self._buffers)]
        of_loss = [(name, buffer) for *_, name, buffer in self._of_loss]
        return registered + of_loss + self._attributes.tensors()

    def _gradient_hooks(self) -> list[tuple[str, Any]]:
        return [(n, hook) for *_, n, tensor in self._parameters for hook in gradient_hooks(tensor)]


def _text(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return repr(tensor)[:40]
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _alike(old: Tensor, new: Tensor) -> bool:
    """True if one may take the other's place (meta: another process has the values)."""
    same = (new.shape, new.dtype) == (old.shape, old.dtype)
    return same and (old.is_meta or new.device == old.device)


def _form(module: nn.Module) -> dict[str, Any]:
    """Parts of a module that its stages were made from, by words that say what has changed."""
    kind, own = type(module), vars(module)
    hooks = [h for name in _HOOKS if own.get(name) for h in _named_hooks(own, name)]
    return {
        "another class": kind,
        "another forward": (kind.forward, own.get("forward")),
        "other submodules": list(module._modules.items()),
        "other parameters": list(module._parameters),
        "other buffers": [(name, buffer is None) for name, buffer in module._buffers.items()],
        "other hooks": hooks,
    }


def _named_hooks(attributes: Mapping[str, Any], name: str) -> list[tuple[Any, ...]]:
    """Hooks in their order, and how each is called; those of ours are left out."""
    found = []
    for key, hook in attributes[name].items():
        if not str(getattr(hook, "__module__", "")).startswith("pdcompile."):
            how = tuple(kind for kind in _KINDS if key in attributes.get(kind, ()))
            found.append((name, hook, how))
    return found


def _changed(
    name: str, what: str, thing: str = "a parameter", remedy: str = _VALUES
) -> ConfigError:
    return ConfigError(
        f"{thing} {what} after the pipeline was prepared: its stages were made before",
        where=name or "the model",
        remedy=remedy,
    )
