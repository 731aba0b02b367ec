"""Checks that no order of calls changes what a call computes: every reachable state is tried.

A model that keeps something in Python attributes (flags, sizes, tensors of the last call) is
captured as long as no sequence of calls (training and evaluation, full and short microbatches)
changes a computation.  The states reached so are few, unless the model counts something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from pdcompile.eager.modes import in_mode
from pdcompile.errors import TraceError
from pdcompile.passes.trace.calls.memos import KeptTensors
from pdcompile.passes.trace.calls.python_state import State
from pdcompile.passes.trace.tape.run import Recording, same

Kind = tuple[bool, int]  # of a call: whether it trains, number of samples
MAX_STATES = 8


def check_order(
    model: nn.Module,
    kinds: Sequence[Kind],
    record: Callable[[Kind], Recording],
    kept_tensors: KeptTensors,
) -> None:
    """Raises TraceError where a call of some kind is another computation after other calls.

    Args:
        record: records a call from the model's present state, and leaves the state after it.

    The state of the model is as before afterwards.
    """
    refusal = kept_tensors.accepted
    if refusal is None:
        return  # no call has changed anything
    expected: dict[Kind, Recording] = {}
    states = [State(model)]
    # Where train() only sets flags, a state is the same in both modes.
    flag = all(type(module).train is nn.Module.train for module in model.modules())
    try:
        for state in states:  # grows meanwhile
            for kind in kinds:
                state.restore()
                with in_mode(model, kind[0], back=flag):
                    try:
                        found = record(kind)
                    except TraceError:
                        raise refusal from None
                if kind[0]:
                    kept_tensors.expire(model)
                if not same(found, expected.setdefault(kind, found)):
                    raise refusal
                if all(known.change({}, kept_tensors.alike) is not None for known in states):
                    if len(states) == MAX_STATES:
                        raise refusal
                    states.append(State(model))
    finally:
        states[0].restore()
