"""Several stages on one rank: next to each other or apart, in every layer."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Level
from pdcompile.errors import DeadlockError, ScheduleError
from pdcompile.passes.check import check, check_programs
from pdcompile.passes.schedules import evaluation, make_stream
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Edge, Plan, TiedParameter
from pdcompile.schedule import Action, Phase, Schedule
from tests.helpers.schedules import chain, make_plan, mutated
from tests.test_schedules import picture

ADJACENT, ALTERNATING, FOLDED = (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)
SHARED = pytest.mark.parametrize("ranks", [ADJACENT, ALTERNATING, FOLDED])
SKIPS = (*chain(4, 10), Edge("skip", 0, (1, 2, 3), 7, True), Edge("far", 0, (3,), 3, False))
TIED = (TiedParameter("w", (0, 2, 3), 5),)


def on_ranks(plan: Plan, ranks: tuple[int, ...]) -> Plan:
    stages = [replace(stage, ranks=(r,)) for stage, r in zip(plan.stages, ranks, strict=True)]
    return replace(plan, stages=tuple(stages))


def shared(
    ranks: tuple[int, ...] = ALTERNATING, microbatches: int = 5, clip: float | None = 1.0
) -> Plan:
    plan = make_plan("gpipe", len(ranks), microbatches, edges=SKIPS, tied=TIED, clip=clip)
    return on_ranks(plan, ranks)


@pytest.mark.sample(1)
@SHARED
def test_a_plan_of_two_stages_a_rank_is_proved(ranks: tuple[int, ...]) -> None:
    plan = shared(ranks)
    assert plan.num_ranks == 2
    proof = str(check(plan))
    assert "in flight: at most [5, 5, 5, 5]" in proof
    for with_loss in (False, True):
        program = evaluation(plan, plan.edges, 3, with_loss=with_loss)
        check_programs(plan, [program], plan.edges)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=6), st.integers(1, 6), st.data())
def test_any_stages_on_any_ranks(ranks: list[int], count: int, data: st.DataObject) -> None:
    n = len(ranks)
    edges = [*chain(n)]
    for index in range(data.draw(st.integers(0, 3))):
        source = data.draw(st.integers(0, n - 2))
        targets = data.draw(st.sets(st.integers(source + 1, n - 1), min_size=1))
        edges.append(Edge(f"v{index}", source, tuple(sorted(targets)), 1, data.draw(st.booleans())))
    holders = tuple(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=2))))
    clip = data.draw(st.sampled_from([None, 1.0]))
    plan = make_plan(
        "gpipe", n, count, edges=tuple(edges), tied=(TiedParameter("w", holders, 1),), clip=clip
    )
    plan = on_ranks(plan, tuple(ranks))
    check(plan)
    assert simulate(plan).forecast.step_seconds >= 3.0 * count


@pytest.mark.sample(1)
@SHARED
def test_a_hop_inside_a_rank_costs_nothing(ranks: tuple[int, ...]) -> None:
    """It is handed over: no receive is posted, no send waited for, no byte sent, no second."""
    program, _ = make_stream(shared(ranks)).step(5)
    inside = [
        one.action.phase
        for rank, column in enumerate(program.columns)
        for one in column
        if one.peer == rank
    ]
    assert set(inside) == {Phase.SEND, Phase.WAIT_RECV}
    assert inside.count(Phase.SEND) == inside.count(Phase.WAIT_RECV) > 0
    alone = make_plan("gpipe", 4, 5, edges=chain(4, 10))
    slow = simulate(alone, links=lambda a, b: Level("slow", 4, 1.0)).forecast
    folded = simulate(on_ranks(alone, ranks), links=lambda a, b: Level("slow", 4, 1.0)).forecast
    hops = sum(a != b for a, b in pairwise(ranks))
    assert sum(slow.sent_bytes) == 3 * 2 * 5 * 10
    assert sum(folded.sent_bytes) == hops * 2 * 5 * 10


def test_adjacent_stages_take_the_time_of_one() -> None:
    """Two stages of one rank with two microbatches: all forwards of the first, then the second."""
    assert picture(on_ranks(make_plan("gpipe", 2, 2), (0, 0))) == [
        "F0 F1 .. .. .. .. .. .. B0 B0 B1 B1",
        "F0 F1 B0 B0 B1 B1",
    ]


@pytest.mark.sample(1)
@SHARED
def test_the_memory_of_a_rank_is_the_sum_over_its_stages(ranks: tuple[int, ...]) -> None:
    sizes = {"parameter_bytes": 100, "trainable_bytes": 1, "saved_bytes": 1100}
    plan = make_plan("gpipe", 4, 3, edges=chain(4, 10), **sizes)
    alone = simulate(plan).forecast.ledgers
    together = simulate(on_ranks(plan, ranks)).forecast.ledgers
    assert len(together) == 2
    for rank, ledger in enumerate(together):
        held = [one for one, r in zip(alone, ranks, strict=True) if r == rank]
        for name in ("weights_bytes", "optimizer_bytes", "activations_bytes"):
            assert getattr(ledger, name) == sum(getattr(one, name) for one in held), name
        assert ledger.total_bytes >= max(one.total_bytes for one in held)


def programs_of(plan: Plan) -> list[Schedule]:
    stream, programs = make_stream(plan), []
    for _ in range(2):
        program, stream = stream.step(plan.training.num_microbatches)
        programs.append(program)
    return programs


def test_text_names_the_stage_of_a_rank_of_several() -> None:
    assert ">1/3" in str(programs_of(shared(ALTERNATING))[0])


@settings(max_examples=80)
@given(st.sampled_from([ADJACENT, ALTERNATING, FOLDED]), st.randoms(use_true_random=False))
def test_what_is_missing_or_aimed_elsewhere_is_caught(
    ranks: tuple[int, ...], pick: random.Random
) -> None:
    plan = shared(ranks, 3)
    programs = programs_of(plan)
    rank = pick.randrange(2)
    column = list(programs[1].columns[rank])
    index = pick.randrange(len(column))
    one = column[index]
    changed = [one._replace(stage=(one.stage + 1) % 4)]
    if one.target >= 0:
        changed += [one._replace(target=target) for target in (-1, (one.target + 1) % 4)]
    if one.peer >= 0:
        changed.append(one._replace(peer=1 - one.peer))
    column[index : index + 1] = [] if pick.random() < 0.3 else [pick.choice(changed)]
    told = (Action.TELL_LOSS, Action.HEAR_LOSS, Action.POST_NORMS, Action.WAIT_NORMS)
    if one.action in told:
        return  # of the whole rank, whichever stage they name
    programs[1] = mutated(programs[1], rank, column)
    with pytest.raises((ScheduleError, DeadlockError)):
        check_programs(plan, programs)


def test_a_skip_past_a_shared_rank_does_not_hold_it_up() -> None:
    """Stage 1 runs all its forwards before stage 2 makes anything for stage 3 to go on with."""
    edges = (*chain(4), Edge("skip", 0, (3,), 1, True))
    check(on_ranks(make_plan("gpipe", 4, 6, edges=edges), (0, 2, 2, 1)))


def test_a_rank_that_waits_for_itself_is_caught() -> None:
    plan = on_ranks(make_plan("gpipe", 2, 1), (0, 0))
    program = programs_of(plan)[0]
    column = list(program.columns[0])
    moved = next(one for one in column if one.action is Action.WAIT_RECV)
    column.remove(moved)
    column.insert(0, moved)
    with pytest.raises(ScheduleError, match="another stage of the rank did not make"):
        check_programs(plan, [mutated(program, 0, column)])


def test_schedules_say_how_many_stages_a_rank_holds() -> None:
    for name in ("1f1b", "2bw"):
        with pytest.raises(ScheduleError, match=r"rank 0 holds stages \[0, 2\].*runs 1 on a rank"):
            make_stream(on_ranks(make_plan(name, 4, 4), ALTERNATING))
    replicated = make_plan("gpipe", 3, 4, replicas=(1, 2, 1))
    given = zip(replicated.stages, [(0,), (1, 2), (0,)], strict=True)
    stages = [replace(stage, ranks=ranks) for stage, ranks in given]
    with pytest.raises(ScheduleError, match=r"stages have \[1, 2, 1\] replicas") as caught:
        make_stream(replace(replicated, stages=tuple(stages)))
    assert "as many replicas of every stage" in str(caught.value.remedy)
    crossed = make_plan("gpipe", 2, 4, replicas=(2, 2))
    stages = [replace(s, ranks=r) for s, r in zip(crossed.stages, [(0, 1), (1, 0)], strict=True)]
    with pytest.raises(ScheduleError, match=r"on other ranks besides: \[0, 1\] and \[1, 0\]"):
        make_stream(replace(crossed, stages=tuple(stages)))
