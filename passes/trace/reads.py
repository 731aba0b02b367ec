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

import dis
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.errors import TraceError
from pdcompile.ir.graph import GraphInput, Ref
from pdcompile.ir.value_checks import CAPTURED
from pdcompile.passes.trace import refuse
from pdcompile.passes.trace.constants import evaluate, read
from pdcompile.passes.trace.examples import Examples
from pdcompile.passes.trace.facts import locate
from pdcompile.passes.trace.scalars import Scalar
from pdcompile.passes.trace.whole import KEPT_WHOLE_SHARE, held_share
from pdcompile.warn import warn

if TYPE_CHECKING:
    from pdcompile.passes.trace.mode import Recorder

Site = tuple[tuple[CodeType, int], ...]  # where in the running Python: frames up to the module
Key = tuple[str, int, Site, int]  # module path, its call, where in it, how many times before

DIFFERS = "; it is not the same for all samples of the example"
MAX_OPS = 8  # that may come between a read and the exception that it leads to
MAX_TEXT = 64  # characters of the model's own words in a check
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


@dataclass(frozen=True, slots=True)
class Expected:
    """The only value with which the model goes on, and what it raises with the other one."""

    value: bool
    otherwise: str

    def text(self, visits: int) -> str:
        """What the model raises; its words are known of the first visit in a run only."""
        return self.otherwise if visits == 1 else self.otherwise.partition(":")[0]


@dataclass(slots=True)
class Trial:
    """A run that takes `value` for the first read at `site`; `begun`: it has come there."""

    site: Site
    value: bool
    begun: bool = False
    ops: int = 0


@dataclass(slots=True)
class Reads:
    """What is known of the reads of one model, over all runs of one capture.

    Args:
        flat: the example minibatch.
        layout: which dims of it count samples.
        total_parameters: elements of all parameters of the model.
    """

    flat: FlatCall
    layout: BatchLayout
    known: dict[Site, Expected | None] = field(default_factory=dict)  # None: a decision
    trial: Trial | None = None
    specialised: dict[str, str] = field(default_factory=dict)  # line to value
    loops: set[Site] = field(default_factory=set)  # choices that forward loops through
    one_way: set[Site] = field(default_factory=set)  # branches whose ways do not fit together
    mixed: set[Any] = field(default_factory=set)  # (training, keys) tried in mixtures of outcomes
    sizes_of_example: bool = False  # whether sizes that depend on integers are the example's
    sized: dict[str, None] = field(default_factory=dict)  # lines where they are

    def decide(self, undecided: Undecided, run: Callable[[], Any]) -> None:
        """Find out by two runs of the model what comes of a read."""
        if isinstance(undecided, Loops):
            self.loops.add(undecided.site)
            return
        raised: dict[bool, str] = {}
        for value in (False, True):
            self.trial = trial = Trial(undecided.site, value)
            try:
                run()
            except refuse.ForwardRaised as error:
                if trial.begun and error.__cause__ is not None and _on_purpose(error.__cause__):
                    raised[value] = _text(error.__cause__)
            except (TraceError, GoesOn):
                continue
            finally:
                self.trial = None
        expected = None
        if len(raised) == 1:
            ((value, text),) = raised.items()
            expected = Expected(not value, text)
        self.known[undecided.site] = expected

    def warn(self) -> None:
        """Tell for which values the capture was made."""
        for where, value in self.specialised.items():
            warn(
                f"forward decides by a value of the inputs ({where}): it is {value} in the "
                "example, and calls with another one are refused"
            )
        for where in self.sized:
            warn(
                f"a size depends on values of the inputs ({where}): calls in which it is not as "
                "in the example are refused"
            )


class Reading:
    """The reads of one run.

    Args:
        reads: what earlier runs found out.
        inputs: the graph's inputs.
        flat: the call that is recorded.
    """

    def __init__(
        self,
        reads: Reads | None = None,
        inputs: tuple[GraphInput, ...] = (),
        flat: FlatCall | None = None,
    ) -> None:
        self._reads = reads
        self.examples = Examples(reads.flat, reads.layout, inputs, flat) if reads and flat else None
        self._visits: dict[Site, int] = {}
        self.handed_out: TraceError | None = None  # for a number that Python holds unknown
        self.outcomes: Mapping[Key, bool] = {}  # of decisions that only a run can tell
        self.decisions: list[Decision] = []

    @property
    def known(self) -> Reads | None:
        """What is known of the reads of the model, if anybody keeps count."""
        return self._reads

    @property
    def sizes_of_example(self) -> bool:
        """Whether sizes that depend on integer inputs are taken as the example has them."""
        return self._reads is not None and self._reads.sizes_of_example

    def recorded(self) -> None:
        """An operator was recorded: a trial ends when nothing is raised soon."""
        trial = self._reads.trial if self._reads is not None else None
        if trial is not None and trial.begun:
            trial.ops += 1
            if trial.ops > MAX_OPS:
                raise GoesOn

    def answer(self, recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call that reads values returns to the model.

        Raises:
            Undecided: a trial has to tell.
            TraceError: the value is not known and decides something.
        """
        known = read(func, args, kwargs, recorder.ops, recorder.fakes)
        if known is not None:
            return known[0]
        name = str(func.__name__)
        refusal = refuse.error(refuse.REFUSED[name], name, locate(recorder.boundary)[0])
        trial = self._reads.trial if self._reads is not None else None
        if trial is not None and trial.begun:
            if name in _NUMBERS and not self._branches(func, args):
                return _some_number(name, args[0].dtype)  # for the text of an error
            raise GoesOn
        if name in _NUMBERS and not self._branches(func, args) and not kwargs:
            return self._number(recorder, func, args[0], refusal)
        if recorder.fakes.mode is None:  # an eager run, to be compared with a capture
            value = func(*args, **kwargs)
            if self._branches(func, args):
                recorder.check(args[0], "", holds=bool(value))
            return value
        if self._reads is None or kwargs:
            raise refusal
        if self._branches(func, args):
            return self._branch(recorder, args[0], refusal)
        raise refusal

    def _number(self, recorder: Recorder, func: Any, tensor: Tensor, refusal: TraceError) -> Any:
        """The number in a tensor of one element, or what stands for it."""

        def number() -> Any:
            trial = self._reads.trial if self._reads is not None else None
            if trial is not None and trial.begun:
                return _some_number(func.__name__, tensor.dtype)
            with torch._C.DisableTorchFunction():
                if recorder.fakes.mode is None:
                    return func(tensor)
                if self._reads is None or tensor.dtype.is_floating_point:
                    raise refusal
                value = self._specialised(recorder, tensor, refusal, floats=self.sizes_of_example)
                place = _place(refusal.where)
                same = recorder.call(torch.eq, (tensor, value))
                recorder.check(same, f"{place}: {CAPTURED} this value is {value}")
                self._reads.specialised[refusal.where or place] = str(value)
            return float(value) if func.__name__ == "__float__" else value

        if func.__name__ != "item" or tensor.numel() != 1:
            return number()
        self.handed_out = refusal
        return Scalar(tensor, number)

    @staticmethod
    def _branches(func: Any, args: Any) -> bool:
        name = func.__name__
        return name in _BRANCHES or (name == "item" and args[0].dtype is torch.bool)

    def _branch(self, recorder: Recorder, tensor: Tensor, refusal: TraceError) -> bool:
        assert self._reads is not None
        if tensor.numel() != 1:
            raise refusal
        site = site_of(recorder.boundary)
        visits = self._visits[site] = self._visits.get(site, 0) + 1
        trial = self._reads.trial
        if trial is not None and trial.site == site:
            trial.begun = True
            return trial.value
        if site not in self._reads.known:
            undecided = Undecided(refusal.message, where=refusal.where, remedy=refusal.remedy)
            undecided.site = site
            raise undecided
        expected = self._reads.known[site]
        if expected is not None:
            place = _place(refusal.where)
            recorder.check(tensor, f"{place}: {expected.text(visits)}", holds=expected.value)
            return expected.value
        try:
            value = self._specialised(recorder, tensor, refusal)
        except TraceError:
            if site in self._reads.one_way:
                raise
            return self._either(recorder, tensor, site)
        place = _place(refusal.where)
        message = f"{place}: {CAPTURED} this value is {bool(value)}"
        recorder.check(tensor, message, holds=bool(value))
        self._reads.specialised[refusal.where or place] = str(bool(value))
        return bool(value)

    def _either(self, recorder: Recorder, tensor: Tensor, site: Site) -> bool:
        """The outcome to be recorded of a decision that only a run can tell."""
        op, path, call = recorder.decision(tensor)
        visits = sum(decision.key[:3] == (path, call, site) for decision in self.decisions)
        key = (path, call, site, visits)
        if len(self.decisions) > MAX_BRANCHES:
            raise refuse.error(refuse.READ, "__bool__, again and again", locate(None)[0])
        self.decisions.append(Decision(key, op))
        return self.outcomes.get(key, False)

    def _specialised(
        self, recorder: Recorder, tensor: Tensor, refusal: TraceError, *, floats: bool = False
    ) -> Any:
        """The value on the example; raises the refusal where it may vary, or need not be known."""
        name = recorder.fakes.name(tensor)
        if not isinstance(name, Ref) or kept_whole(recorder):
            raise refusal
        values = []
        for given in self.examples.calls(floats=floats) if self.examples is not None else ():
            found = evaluate(name.name, recorder.ops, recorder.fakes, given)
            if found is None:
                raise refusal
            with _disable_current_modes():
                values.append(found.item())
        if any(value != values[0] for value in values):
            refusal.message = f"{refusal.message.removesuffix(DIFFERS)}{DIFFERS}"
            raise refusal
        return values[0]


def kept_whole(recorder: Recorder) -> bool:
    """Whether the running module and its like hold so little that they may be one op each."""
    path, table = recorder.path, recorder.table
    root = not path or path not in table.modules  # or loss_fn
    if root or any(tensor.is_meta for tensor in table.objects.values()):
        return False
    kind = type(table.modules[path])
    alike = [module for module in table.modules.values() if type(module) is kind]
    return held_share(alike, table.modules[""]) <= KEPT_WHOLE_SHARE


def site_of(boundary: CodeType | None) -> Site:
    """Where Python runs: the frames from here to the innermost module's call."""
    from pdcompile.passes.trace.mode import Recorder

    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    ends = (boundary, Recorder.call_module.__code__)
    while frame is not None and frame.f_code not in ends:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _on_purpose(error: BaseException) -> bool:
    """Whether a raise statement or an assert of Python raised it, outside of any operator."""
    from pdcompile.passes.trace.mode import Recorder

    traceback = error.__traceback__
    last = None
    while traceback is not None:
        if traceback.tb_frame.f_code is Recorder.__torch_function__.__code__:
            return False
        last, traceback = traceback, traceback.tb_next
    if last is None:
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _text(error: BaseException) -> str:
    """Kind and first line, without the fake tensors that only a capture has."""
    line = str(error).strip().partition("\n")[0].replace("FakeTensor", "Tensor")
    line = line if len(line) <= MAX_TEXT else line[:MAX_TEXT].rpartition(" ")[0] + " …"
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _place(where: str | None) -> str:
    return (where or "forward").replace("\\", "/").rpartition("/")[2]


def _some_number(name: str, dtype: torch.dtype) -> Any:
    whole = name in ("__int__", "__index__") or not dtype.is_floating_point
    return 0 if whole and name != "__float__" else 0.0
