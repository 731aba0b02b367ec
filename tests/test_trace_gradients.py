"""Which values get a gradient, and which only with some outcomes of the model's decisions."""

from itertools import product

import hypothesis.strategies as st
from hypothesis import given, settings

from pdcompile.ir.graph import Op, Ref, Value
from pdcompile.passes.trace.reachable import MAX_TRIED, with_gradients

Chain = list[tuple[bool, bool]]  # of each choice: which side goes on, is the other one `second`


def _graph(chain: Chain) -> tuple[list[Op], dict[str, Value]]:
    """``found = (second, found)[d]`` or the like, again and again, beginning with `first`."""
    ops, found = [], "first"
    values = {
        name: Value(name, (4,), "float32", requires_grad=True) for name in ("first", "second")
    }
    for number, (goes_on, has_second) in enumerate(chain):
        decider, made = f"decider{number}", f"chosen{number}"
        values[decider] = Value(decider, (), "container", producer=decider)
        values[made] = Value(made, (4,), "float32", requires_grad=True, producer=made)
        other = "second" if has_second else "first"
        sides = (other, found) if goes_on else (found, other)
        ops.append(Op(decider, "method", "item", (Ref("first"),)))
        args = (tuple(Ref(side) for side in sides), Ref(decider))
        ops.append(Op(made, "function", "operator.getitem", args))
        found = made
    return ops, values


def _gets(chain: Chain, outcomes: tuple[bool, ...]) -> str:
    """The one of `first` and `second` that the last choice leads back to."""
    for (goes_on, has_second), outcome in zip(reversed(chain), reversed(outcomes), strict=True):
        if outcome != goes_on:
            return "second" if has_second else "first"
    return "first"


@settings(max_examples=200)
@given(chain=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=MAX_TRIED - 2))
def test_a_gradient_is_conditional_if_any_mixture_of_outcomes_takes_it_away(chain: Chain) -> None:
    ops, values = _graph(chain)
    found = with_gradients(ops, values, None, Ref(ops[-1].name))
    reached = {_gets(chain, outcomes) for outcomes in product((False, True), repeat=len(chain))}
    for name in ("first", "second"):
        assert found[name].needs_gradient == (name in reached)
        assert found[name].conditional == (name in reached and len(reached) == 2)


def test_gradients_of_too_many_decisions_are_conditional() -> None:
    ops, values = _graph([(True, True)] * (MAX_TRIED + 1))
    found = with_gradients(ops, values, None, Ref(ops[-1].name))
    assert found["first"].conditional
    assert found["second"].conditional
    assert not found[ops[-1].name].conditional
