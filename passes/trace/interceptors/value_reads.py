"""ValueReads: reads of tensor values by the model's Python, recorded as checks or decisions.

Fake tensors have no values, so ``if tensor:`` has no answer.  Most such reads only validate:
`if not valid.all(): raise ValueError`, an assert, torch._check, the constraints of
torch.distributions.  They are recognised by trying: the model runs up to the read and goes on
once with False and once with True, for a few operators.  Where one of the two raises (a raise or
an assert in Python, not a failure of an operator), the model only ever goes on with the other
value; the read becomes an operator ``torch._assert`` of the graph, which raises for a microbatch
where the model would have raised.

Where both ways go on, and the value depends on integer or bool inputs alone and is the same for
every sample of the example, the capture is made for that value, and the ``torch._assert`` refuses
every other one; a warning says so.  A module with few parameters is opaque instead, because then it
works for all values.  All other reads are refused, which makes the module opaque that they are in:
a capture that holds for one value of an activation would fail in the middle of a training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdcompile.errors import TraceError
from pdcompile.ir.graph import CHECK, Ref
from pdcompile.ir.value_checks import CAPTURED
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.assumptions import Site, Undecided
from pdcompile.passes.trace.constants import evaluate, read
from pdcompile.passes.trace.opaque.opaque_modules import OPAQUE_SHARE, parameter_share
from pdcompile.passes.trace.tape.arguments import is_public
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed
from pdcompile.releases.torch_internals import no_dispatch_modes

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape


DIFFERS = "; it is not the same for all samples of the example"
MAX_OPS = 8  # between a read and the exception that it leads to
_BRANCHES = frozenset(("__bool__", "is_nonzero"))
_NUMBERS = frozenset(("item", "__int__", "__index__", "__float__"))


class ValueReads(Interceptor):
    """Answers reads of values where these are known, and refuses other calls of `REFUSED`.

    Raises:
        Undecided: the place of the read has to be tried.
        TraceError: the value is not known, and both ways go on.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self._visits: dict[Site, int] = {}

    def recorded(self, source: str) -> None:
        """Ends a trial in which nothing is raised soon."""
        trial = self.tape.assumed.trial
        if trial is not None and trial.begun:
            trial.ops += 1
            if trial.ops > MAX_OPS:
                raise refusals.Ended

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        tape, name = self.tape, str(getattr(func, "__name__", ""))
        refusal = refusals.REFUSED.get(name) if name != "__format__" else refusals.READ
        if refusal is None or not (name == "__format__" or is_public(func, name)):
            return proceed(func, args, kwargs)
        if refusal is refusals.READ and (known := read(func, args, kwargs, tape.ops, tape.fakes)):
            return known[0]
        if name == "__format__":
            return proceed(func, args, kwargs)
        error = refusals.error(refusal, name, tape.where())
        if refusal is not refusals.READ:
            raise error
        branches = name in _BRANCHES or (name == "item" and args[0].dtype is torch.bool)
        trial = tape.assumed.trial
        if trial is not None and trial.begun:
            if name in _NUMBERS and not branches:  # some number for the text of an error
                real = name == "item" and args[0].dtype.is_floating_point
                return 0.0 if real or name == "__float__" else 0
            raise refusals.Ended
        if name in _NUMBERS and not branches and not kwargs:
            return self._number(func, args[0], error)
        if branches and not kwargs:
            return self._branch(args[0], error)
        raise error

    def _number(self, func: Any, tensor: Tensor, refusal: TraceError) -> Any:
        """The number in a tensor, which is checked for every microbatch."""
        if tensor.dtype.is_floating_point:
            raise refusal
        value = self._specialised(tensor, refusal)
        self._held(self.tape.call(torch.eq, (tensor, value)), value, refusal)
        return float(value) if func.__name__ == "__float__" else value

    def _branch(self, tensor: Tensor, refusal: TraceError) -> bool:
        tape = self.tape
        if tensor.numel() != 1:
            raise refusal
        site = tape.site()
        visits = self._visits[site] = self._visits.get(site, 0) + 1
        trial = tape.assumed.trial
        if trial is not None and trial.site == site:
            trial.begun = True
            return trial.value
        if site not in tape.assumed.reads:
            raise Undecided(site)
        expected = tape.assumed.reads[site]
        if expected is not None:
            place = _file_and_line(refusal.where)
            _check(tape, tensor, f"{place}: {expected.text(visits)}", holds=expected.value)
            return expected.value
        value = bool(self._specialised(tensor, refusal))
        self._held(tensor, value, refusal, holds=value)
        return value

    def _held(self, tensor: Tensor, value: Any, refusal: TraceError, *, holds: bool = True) -> None:
        """Records that the capture is for this value, where a tensor is `holds`."""
        place = _file_and_line(refusal.where)
        _check(self.tape, tensor, f"{place}: {CAPTURED} this value is {value}", holds=holds)
        about = f"forward decides by a value of the inputs ({refusal.where or place})"
        told = f"it is {value} in the example, and calls with another one are refused"
        self.tape.fakes.findings.holds_for[about] = told

    def _specialised(self, tensor: Tensor, refusal: TraceError) -> Any:
        """The example's value; raises the refusal where it varies or the module can be opaque."""
        tape = self.tape
        name = tape.fakes.name(tensor)
        if not isinstance(name, Ref) or _may_be_opaque(tape):
            raise refusal
        values = _values_of_example(tape, name.name)
        if len(values) != 1:
            if values:
                refusal.message = f"{refusal.message.removesuffix(DIFFERS)}{DIFFERS}"
            raise refusal
        return values[0]


def _values_of_example(tape: Tape, name: str) -> list[Any]:
    """The distinct values of the example's calls, two at most; [] where they are unknown."""
    found: list[Any] = []
    for given in tape.examples():
        value = evaluate(name, tape.ops, tape.fakes, given)
        if value is None:
            return []
        with no_dispatch_modes():
            now = value.item()
        if now not in found:
            found.append(now)
        if len(found) > 1:
            break
    return found


def _may_be_opaque(tape: Tape) -> bool:
    """True if the running module and others of its class have so few parameters that they may be
    opaque."""
    path, table = tape.path, tape.table
    root = not path or path not in table.modules  # or loss_fn
    if root or any(tensor.is_meta for tensor in table.objects.values()):
        return False
    kind = type(table.modules[path])
    alike = [module for module in table.modules.values() if type(module) is kind]
    return parameter_share(alike, table.modules[""]) <= OPAQUE_SHARE


def _file_and_line(where: str | None) -> str:
    """A place without its folders, for the message of a check."""
    return (where or "forward").replace("\\", "/").rpartition("/")[2]


def _check(tape: Tape, value: torch.Tensor | Ref, message: str, *, holds: bool = True) -> None:
    """Records an op that raises where a value is not `holds`."""
    if not holds:
        value = tape.call(torch.logical_not, (value,))
    tape.begin()
    tape.record("function", CHECK, "check", (value, message), {}, None, None)
