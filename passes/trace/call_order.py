"""Checks that calls change nothing for the calls after them, by making each kind of call twice.

A model that keeps something in Python attributes (flags, sizes, tensors of the last call) is
captured as long as a round of calls (training and evaluation, full and short microbatches), and
another one after it, compute what the first calls did and leave behind what they left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from pdcompile.eager.modes import in_mode, overrides_train
from pdcompile.errors import TraceError
from pdcompile.passes.trace.cached_tensors import CachedTensors
from pdcompile.passes.trace.python_state import State
from pdcompile.passes.trace.tape.run import Recording, same

Kind = tuple[bool, int]  # of a call: whether it trains, number of samples


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
    before = State(model)
    back = not overrides_train(model)  # a train() of its own is a part of the order

    def is_alike(state: State) -> bool:
        return state.change({}, cached_tensors.alike) is None

    expected, left = dict(known), dict[Kind, State]()
    try:
        for number, kind in enumerate((*kinds, *kinds)):
            if number == len(kinds) + 1 and all(map(is_alike, left.values())):
                break  # every call leaves the same, and each has been made after it
            with in_mode(model, kind[0], back=back):
                first = None if number else known.get(kind)
                if first is not None and first.after is not None:
                    first.after.restore()
                try:
                    found = first or record(kind)
                except TraceError:
                    raise refusal from None
            cached_tensors.trained += kind[0]
            same_state = is_alike(left.setdefault(kind, State(model)))
            if not (same_state and same(found, expected.setdefault(kind, found))):
                raise refusal
    finally:
        before.restore()
