"""Places of communication: early posts, late waits, and the pools that hold it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from pdcompile.passes.schedules import evaluation, make_stream
from pdcompile.plan import Edge, Plan, StagePlan, TiedParameter
from pdcompile.schedule import Action, Schedule
from pdcompile.schedule.instruction import SEND, WAIT_SEND
from pdcompile.schedule.registry import LOOKAHEAD
from tests.helpers.schedules import chain, make_plan, plans


def column(program: Schedule, rank: int, *actions: Action) -> list[str]:
    return [one.text(one.stage) for one in program.columns[rank] if one.action in actions]


def test_pools() -> None:
    """Receive slots of a stage: those in flight, and one that travels meanwhile."""
    spec = make_plan("2bw", 3, 8, edges=(*chain(3), Edge("skip", 0, (1, 2), 1, True))).spec
    assert [spec.pool(stage) for stage in range(3)] == [4, 3, 2]
    assert make_plan("gpipe", 2, 4).spec.pool(1) == 4
    assert LOOKAHEAD >= 1


def test_gradients_of_a_value_are_chained() -> None:
    """Last target → first target → source, so that the sums are eager's."""
    plan = make_plan("1f1b", 3, 1, edges=(Edge("x", 0, (1, 2), 1, True),))
    program, _ = make_stream(plan).step(1)
    compute = (Action.BACKWARD, Action.WAIT_RECV_GRADIENT, Action.SEND_GRADIENT)
    assert column(program, 2, *compute) == ["B 0", "SEND_GRADIENT 0 e0 >1"]
    assert column(program, 1, *compute) == [
        "WAIT_RECV_GRADIENT 0 e0 <2",
        "B 0",
        "SEND_GRADIENT 0 e0 >0",
    ]
    assert column(program, 0, *compute) == ["WAIT_RECV_GRADIENT 0 e0 <1", "B 0"]
    assert column(program, 0, Action.SEND) == ["SEND 0 e0 >1", "SEND 0 e0 >2"]


def test_tied_gradients_and_weights() -> None:
    plan = make_plan("1f1b", 3, 2, tied=(TiedParameter("w", (0, 2), 1),))
    program, _ = make_stream(plan).step(2)
    assert column(program, 2, Action.BACKWARD, Action.SEND_TIED) == [
        "B 0",
        "B 1",
        "SEND_TIED t0 >0",
    ]
    owner = [one.text(0) for one in program.columns[0]]
    # It comes while the owner drains.
    assert owner.index("F 1") < owner.index("POST_RECV_TIED t0 <2") < owner.index("B 1")
    assert owner.index("B 1") < owner.index("WAIT_RECV_TIED t0 <2") < owner.index("STEP")
    assert owner.index("STEP") < owner.index("SEND_WEIGHT t0 >2")
    holder = [one.text(2) for one in program.columns[2]]
    assert holder[-4] == "WAIT_RECV_WEIGHT t0 <0"  # only waits for sends come after it
    assert holder.index("STEP") < holder.index("POST_RECV_WEIGHT t0 <0")


def test_a_tied_sum_passes_every_holder_once_an_update() -> None:
    """A split backward sends it after the last gradients of inputs, before those of weights;
    replica q sends to replica q mod r, and the owner's replicas reduce what they got."""
    plan = make_plan("zb-h1", 3, 4, tied=(TiedParameter("w", (0, 1, 2), 1),), replicas=(1, 1, 2))
    program, _ = make_stream(plan).step(4)
    last = [one.text(2) for one in program.columns[3]]
    assert last.index("I 3") < last.index("SEND_TIED t0 >1") < last.index("W 3")
    tied = (Action.WAIT_RECV_TIED, Action.SEND_TIED)
    received = ["WAIT_RECV_TIED t0 <2", "WAIT_RECV_TIED t0 <3", "SEND_TIED t0 >0"]
    assert column(program, 1, *tied) == received
    plan = make_plan("1f1b", 2, 4, tied=(TiedParameter("w", (0, 1), 1),), replicas=(2, 3))
    program, _ = make_stream(plan).step(4)
    assert column(program, 0, *tied, Action.POST_REDUCE) == [
        "WAIT_RECV_TIED t0 <2", "WAIT_RECV_TIED t0 <4", "POST_REDUCE",
    ]  # fmt: skip
    assert column(program, 1, *tied, Action.POST_REDUCE) == ["WAIT_RECV_TIED t0 <3", "POST_REDUCE"]


def test_tied_weights_under_2bw_are_waited_for_just_before_they_are_named() -> None:
    stream = make_stream(make_plan("2bw", 3, 4, tied=(TiedParameter("w", (0, 2), 1),)))
    for _ in range(5):
        program, stream = stream.step(4)
    holder, owner = ([one.text(rank) for one in program.columns[rank]] for rank in (2, 0))
    assert holder.index("WAIT_RECV_WEIGHT -2: t0 <0") < holder.index("F 0 W-1")
    # The next ones may come as soon as those have, for the stage's part of the sum is out.
    expected = holder.index("POST_RECV_WEIGHT -1: t0 <0")
    assert holder.index("WAIT_RECV_WEIGHT -2: t0 <0") < expected < holder.index("F 0 W-1")
    assert holder.index("SEND_TIED -1: t0 >0") < expected
    # Both update in the middle of the minibatch after it, at the earliest with all gradients.
    for text in (holder, owner):
        assert text.index("F 2 W-1") < text.index("STEP -1:") < text.index("F 3 W-1")
    order = ["WAIT_RECV_TIED -1: t0 <2", "STEP -1:", "SEND_WEIGHT -1: t0 >2"]
    assert [one for one in owner if one in order] == order


def test_norms_are_posted_early_and_waited_for_late() -> None:
    stream = make_stream(make_plan("2bw", 2, 4, clip=1.0))
    for _ in range(4):
        program, stream = stream.step(4)
    actions = (Action.POST_NORMS, Action.WAIT_NORMS, Action.STEP, Action.FORWARD)
    assert column(program, 1, *actions)[:4] == [
        "POST_NORMS -1:",
        "WAIT_NORMS -2:",
        "STEP -2:",
        "F 0 W-1",
    ]
    flush, _ = stream.flush()
    assert column(flush, 1, *actions)[-4:] == [
        "WAIT_NORMS -2:",
        "STEP -2:",
        "WAIT_NORMS -1:",
        "STEP -1:",
    ]


def test_the_loss_goes_to_every_rank() -> None:
    plan = make_plan("1f1b", 2, 4, replicas=(1, 2))
    program, _ = make_stream(plan).step(4)
    losses = (Action.LOSS, Action.TELL_LOSS, Action.HEAR_LOSS)
    assert column(program, 0, *losses) == ["HEAR_LOSS <1", "HEAR_LOSS <2"]
    assert column(program, 1, *losses) == [
        "HEAR_LOSS <2",
        "LOSS",
        "TELL_LOSS >0",
        "TELL_LOSS >2",
    ]
    one, _ = make_stream(plan).step(1)
    assert column(one, 2, *losses) == ["HEAR_LOSS <1"]


def test_ranks_without_a_stage_only_hear_the_loss() -> None:
    plan = make_plan("1f1b", 1, 2)
    stage = StagePlan(0, (), (), ranks=(1,))
    program, _ = make_stream(replace(plan, stages=(stage,))).step(2)
    assert [one.text(-1) for one in program.columns[0]] == ["HEAR_LOSS <1"]


@settings(max_examples=60)
@given(plans())
def test_posts_come_before_waits_and_sends_are_waited_for(plan: Plan) -> None:
    """The first receives of a call are posted before anything is computed."""
    stream = make_stream(plan)
    program, stream = stream.step(plan.training.num_microbatches)
    for one in program.columns:
        actions = [each.action for each in one]
        if Action.POST_RECV in actions:
            assert actions.index(Action.POST_RECV) < actions.index(Action.FORWARD)
    flush, _ = stream.flush()
    for pair in zip(SEND.values(), WAIT_SEND.values(), strict=True):
        sends, waits = (
            sum(each.action is action for p in (program, flush) for c in p.columns for each in c)
            for action in pair
        )
        assert sends == waits


@pytest.mark.parametrize("with_loss", [False, True])
def test_evaluation_is_complete_in_itself(with_loss: bool) -> None:
    plan = make_plan("2bw", 3, 4)
    program = evaluation(plan, (Edge("y", 0, (2,), 1, False),), 3, with_loss=with_loss)
    assert program.name == "2bw+eval"
    assert column(program, 0, Action.FORWARD) == ["F 0", "F 1", "F 2"]
    assert column(program, 1, Action.FORWARD, Action.SEND) == ["F 0", "F 1", "F 2"]
    assert column(program, 2, Action.LOSS) == ["LOSS"] * with_loss
    assert column(program, 0, Action.SEND) == ["SEND 0 e0 >2", "SEND 1 e0 >2", "SEND 2 e0 >2"]
