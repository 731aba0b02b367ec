"""Values of tensors that the model's Python reads, and what makes it sound to go on after one.

Fake tensors have no values, so ``if tensor:`` cannot know where to go.  Most such reads only
validate: `if not valid.all(): raise ValueError`, an assert, torch._check, the constraints of
torch.distributions.  They are recognised by trying: the model runs up to the read and goes on
once with False and once with True, for a few operators.  Where one of the two raises (a raise or
an assert in Python, not a failure of an operator), the model only ever goes on with the other
value; the read becomes an operator ``torch._assert`` of the graph, which raises for a microbatch
where the model would have raised.

A branch where both ways go on is a decision.  If the value depends on integer or bool inputs
alone, and is the same for every sample of the example, the capture is made for that value, and
the ``torch._assert`` refuses every other one; a warning says so.  A module with few parameters
is kept whole instead, because then it works for all values.  Everything else stays refused: a
capture that holds for one value of an activation would fail in the middle of a training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Ref
from pdcompile.ir.value_checks import CAPTURED
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.assumptions import Assumptions, Findings, Key, Site
from pdcompile.passes.trace.opaque.opaque_modules import OPAQUE_SHARE, held_share
from pdcompile.passes.trace.tape.observer import locate
from pdcompile.passes.trace.values.constants import evaluate, read
from pdcompile.passes.trace.values.examples import Examples
from pdcompile.passes.trace.values.scalars import Scalar

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape

DIFFERS = "; it is not the same for all samples of the example"
MAX_OPS = 8  # that may come between a read and the exception that it leads to
MAX_BRANCHES = 64  # on values that only a run can tell, in one call of the model
_BRANCHES = frozenset(("__bool__", "is_nonzero"))
_NUMBERS = frozenset(("item", "__int__", "__index__", "__float__"))


@dataclass(frozen=True, slots=True)
class Decision:
    """A branch on a value that only a run can tell, and the op that reads it as a bool."""

    key: Key
    op: str


class Undecided(TraceError):
    """The model reads a value at a place where nobody has tried yet what comes of it."""

    site: Site = ()


class Loops(Undecided):
    """Forward goes through the indices that a mask chooses at `site`."""


class GoesOn(BaseException):
    """Nothing was raised soon after a read.  No Exception: forward must not catch it."""


class Reading:
    """The reads of one run.

    Args:
        examples: values that the example gives to the call; None where nobody may rely on any.
        outcomes: of decisions that only a run can tell.
    """

    def __init__(
        self,
        assumed: Assumptions,
        findings: Findings,
        examples: Examples | None = None,
        outcomes: Mapping[Key, bool] | None = None,
    ) -> None:
        self.assumed = assumed
        self.examples = examples
        self._findings = findings
        self._outcomes = outcomes or {}
        self._visits: dict[Site, int] = {}
        self.handed_out: TraceError | None = None  # for a number that Python holds unknown
        self.decisions: list[Decision] = []

    def recorded(self) -> None:
        """An operator was recorded: a trial ends when nothing is raised soon."""
        trial = self.assumed.trial
        if trial is not None and trial.begun:
            trial.ops += 1
            if trial.ops > MAX_OPS:
                raise GoesOn

    def answer(self, tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call that reads values returns to the model.

        Raises:
            Undecided: a trial has to tell.
            TraceError: the value is not known and decides something.
        """
        known = read(func, args, kwargs, tape.ops, tape.fakes)
        if known is not None:
            return known[0]
        name = str(func.__name__)
        refusal = refusals.error(refusals.REFUSED[name], name, tape.where())
        trial = self.assumed.trial
        if trial is not None and trial.begun:
            if name in _NUMBERS and not self._branches(func, args):
                return _some_number(name, args[0].dtype)  # for the text of an error
            raise GoesOn
        if name in _NUMBERS and not self._branches(func, args) and not kwargs:
            return self._number(tape, func, args[0], refusal)
        if tape.fakes.mode is None:  # an eager run, to be compared with a capture
            value = func(*args, **kwargs)
            if self._branches(func, args):
                tape.check(args[0], "", holds=bool(value))
            return value
        if self.examples is None or kwargs:
            raise refusal
        if self._branches(func, args):
            return self._branch(tape, args[0], refusal)
        raise refusal

    def _number(self, tape: Tape, func: Any, tensor: Tensor, refusal: TraceError) -> Any:
        """The number in a tensor of one element, or what stands for it."""

        def number() -> Any:
            trial = self.assumed.trial
            if trial is not None and trial.begun:
                return _some_number(func.__name__, tensor.dtype)
            with torch._C.DisableTorchFunction():
                if tape.fakes.mode is None:
                    return func(tensor)
                if self.examples is None or tensor.dtype.is_floating_point:
                    raise refusal
                value = self._specialised(
                    tape, tensor, refusal, floats=self.assumed.sizes_of_example
                )
                place = _place(refusal.where)
                same = tape.call(torch.eq, (tensor, value))
                tape.check(same, f"{place}: {CAPTURED} this value is {value}")
                self._findings.specialised[refusal.where or place] = str(value)
            return float(value) if func.__name__ == "__float__" else value

        if func.__name__ != "item" or tensor.numel() != 1:
            return number()
        self.handed_out = refusal
        return Scalar(tensor, number)

    @staticmethod
    def _branches(func: Any, args: Any) -> bool:
        name = func.__name__
        return name in _BRANCHES or (name == "item" and args[0].dtype is torch.bool)

    def _branch(self, tape: Tape, tensor: Tensor, refusal: TraceError) -> bool:
        if tensor.numel() != 1:
            raise refusal
        site = tape.site()
        visits = self._visits[site] = self._visits.get(site, 0) + 1
        trial = self.assumed.trial
        if trial is not None and trial.site == site:
            trial.begun = True
            return trial.value
        if site not in self.assumed.reads:
            undecided = Undecided(refusal.message, where=refusal.where, remedy=refusal.remedy)
            undecided.site = site
            raise undecided
        expected = self.assumed.reads[site]
        if expected is not None:
            place = _place(refusal.where)
            tape.check(tensor, f"{place}: {expected.text(visits)}", holds=expected.value)
            return expected.value
        try:
            value = self._specialised(tape, tensor, refusal)
        except TraceError:
            if site in self.assumed.one_way:
                raise
            return self._either(tape, tensor, site)
        place = _place(refusal.where)
        message = f"{place}: {CAPTURED} this value is {bool(value)}"
        tape.check(tensor, message, holds=bool(value))
        self._findings.specialised[refusal.where or place] = str(bool(value))
        return bool(value)

    def _either(self, tape: Tape, tensor: Tensor, site: Site) -> bool:
        """The outcome to be recorded of a decision that only a run can tell."""
        op, path, call = tape.decision(tensor)
        visits = sum(decision.key[:3] == (path, call, site) for decision in self.decisions)
        key = (path, call, site, visits)
        if len(self.decisions) > MAX_BRANCHES:
            raise refusals.error(refusals.READ, "__bool__, again and again", locate(None)[0])
        self.decisions.append(Decision(key, op))
        return self._outcomes.get(key, False)

    def _specialised(
        self, tape: Tape, tensor: Tensor, refusal: TraceError, *, floats: bool = False
    ) -> Any:
        """The value on the example; raises the refusal where it may vary, or need not be known."""
        name = tape.fakes.name(tensor)
        if not isinstance(name, Ref) or may_be_opaque(tape):
            raise refusal
        values = []
        for given in self.examples.calls(floats=floats) if self.examples is not None else ():
            found = evaluate(name.name, tape.ops, tape.fakes, given)
            if found is None:
                raise refusal
            with _disable_current_modes():
                values.append(found.item())
        if any(value != values[0] for value in values):
            refusal.message = f"{refusal.message.removesuffix(DIFFERS)}{DIFFERS}"
            raise refusal
        return values[0]


def may_be_opaque(tape: Tape) -> bool:
    """Whether the running module and its like hold so little that they may be one op each."""
    path, table = tape.path, tape.table
    root = not path or path not in table.modules  # or loss_fn
    if root or any(tensor.is_meta for tensor in table.objects.values()):
        return False
    kind = type(table.modules[path])
    alike = [module for module in table.modules.values() if type(module) is kind]
    return held_share(alike, table.modules[""]) <= OPAQUE_SHARE


def _place(where: str | None) -> str:
    return (where or "forward").replace("\\", "/").rpartition("/")[2]


def _some_number(name: str, dtype: torch.dtype) -> Any:
    whole = name in ("__int__", "__index__") or not dtype.is_floating_point
    return 0 if whole and name != "__float__" else 0.0
