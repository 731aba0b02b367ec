"""Checks that no order of calls changes what a call computes: every reachable state is tried.

A model that keeps something in Python attributes (flags, sizes, tensors of the last call) is
captured as long as no sequence of calls (training and evaluation, full and short microbatches)
changes a computation.  The states reached so are few, unless the model counts something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from pdcompile.eager.modes import in_mode, modes
from pdcompile.errors import TraceError
from pdcompile.passes.trace.cached_tensors import CachedTensors
from pdcompile.passes.trace.python_state import State
from pdcompile.passes.trace.tape.run import Recording, same

Kind = tuple[bool, int]  # of a call: whether it trains, number of samples
MAX_STATES = 8


def check_order(
    model: nn.Module,
    kinds: Sequence[Kind],
    record: Callable[[Kind], Recording],
    cached_tensors: CachedTensors,
    known: Mapping[Kind, Recording],
) -> None:
    """Raises TraceError where a call of some kind is another computation after other calls.

    Args:
        record: records a call from the model's present state, and leaves the state after it.
        known: recordings from the first state.

    The state of the model is as before afterwards.
    """
    refusal = cached_tensors.change
    if refusal is None:
        return
    expected: dict[Kind, Recording] = {}
    states: list[tuple[State, Kind | None]] = [(State(model), None)]  # and the call before
    # Where train() only sets flags, a state is the same in both modes.
    flag = _only_sets_flags(model)
    try:
        for state, last in states:  # grows meanwhile
            for kind in kinds:
                state.restore()
                with in_mode(model, kind[0], back=flag):
                    found = known.get(kind) if last is None else None
                    if found is None:
                        try:
                            found = record(kind)
                        except TraceError:
                            raise refusal from None
                    elif found.after is not None:
                        found.after.restore()
                if kind[0]:
                    cached_tensors.expire(model)
                if not same(found, expected.setdefault(kind, found)):
                    raise refusal
                if all(each.change({}, cached_tensors.alike) is not None for each, _ in states):
                    if kind == last or len(states) == MAX_STATES:  # as after each of its kind
                        raise refusal
                    states.append((State(model), kind))
    finally:
        states[0][0].restore()


def _only_sets_flags(model: nn.Module) -> bool:
    """Whether another mode is nothing but other flags, also where a class has its own train()."""
    before, flags = State(model), modes(model)
    try:
        with in_mode(model, not model.training, back=False):
            for module, flag in flags.items():
                module.training = flag
            return before.change({}) is None
    finally:
        before.restore()
