"""The proof accepts what is right and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from math import lcm
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdcompile.errors import DeadlockError, ScheduleError
from pdcompile.passes.check import check, check_programs
from pdcompile.passes.schedules import evaluation, make_stream
from pdcompile.plan import Edge, Plan, TiedParameter
from pdcompile.schedule import Action, Instruction, Kind, Phase, Schedule
from pdcompile.schedule.instruction import BACKWARDS, POST_RECV, SEND, WAIT_RECV, WAIT_SEND
from pdcompile.schedule.registry import allowed
from tests.helpers.schedules import (
    Broken,
    Meaning,
    chain,
    make_plan,
    microbatches,
    mutated,
    plans,
    rich,
)

PHASES = (POST_RECV, WAIT_RECV, SEND, WAIT_SEND)


def programs_of(plan: Plan, counts: tuple[int, ...]) -> list[Schedule]:
    stream, found = make_stream(plan), []
    for count in counts:
        program, stream = stream.step(count)
        found.append(program)
    return [*found, stream.flush()[0]]


@pytest.mark.slow
@settings(max_examples=120)
@given(plans(max_stages=6, several=True))
def test_every_generated_schedule_is_proved(plan: Plan) -> None:
    proof = check(plan)
    assert proof.num_instructions > 0


@pytest.mark.parametrize("replicas", [(1, 1, 2), (1, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize("m", [1, 4])
def test_tied_weights_whose_sums_take_unlike_times(replicas: tuple[int, ...], m: int) -> None:
    """The weight over replicas is expected after the next update of the other one."""
    tied = (TiedParameter("w0", (0, 1), 1), TiedParameter("w1", (0, 1, 2), 1))
    check(make_plan("2bw", 3, m, tied=tied, replicas=replicas))


@pytest.mark.parametrize(("replicas", "skips"), [((1, 2, 1), False), ((1, 1, 2, 1), True)])
def test_turns_decide_the_depths_of_lone_updates(replicas: tuple[int, ...], skips: bool) -> None:
    """A gradient would wait, with more in flight, for a receive of the next call."""
    count = len(replicas)
    edges = (Edge("v", 0, (2,), 1, True),) if skips else tuple(chain(count))
    for extra in (0, 2):
        plan = make_plan("async", count, 1, edges=edges, replicas=replicas, extra=extra)
        assert plan.training.warmup == tuple(
            sum(replicas[s + 1 :]) + r - 1 for s, r in enumerate(replicas)
        )
        check(plan)


@settings(max_examples=60)
@given(plans(max_stages=6, several=True), st.data())
def test_any_sequence_of_minibatch_sizes_is_proved(plan: Plan, data: st.DataObject) -> None:
    sizes = st.integers(1, plan.training.num_microbatches)
    counts = tuple(data.draw(st.lists(sizes, min_size=1, max_size=6)))
    check_programs(plan, programs_of(plan, counts))


@settings(max_examples=60)
@given(plans(max_stages=6, several=True), st.integers(1, 9), st.booleans())
def test_evaluations_are_proved(plan: Plan, count: int, with_loss: bool) -> None:
    program = evaluation(plan, plan.edges, count, with_loss=with_loss)
    check_programs(plan, [program], plan.edges)
    assert (Action.LOSS in {one.action for c in program.columns for one in c}) == with_loss


def test_full_short_full_under_2bw() -> None:
    """The sequence that hangs without draining: 8, 8, 2, 8 microbatches at depth 4 and 8."""
    for depth in (4, 8):
        plan = make_plan("2bw", depth, 8)
        check_programs(plan, programs_of(plan, (8, 8, 2, 8)))


def test_the_proof_says_what_it_proved() -> None:
    text = str(check(make_plan("2bw", 3, 4, clip=1.0)))
    assert "W_max(t-1,0), 2 live versions" in text
    assert "at most [3, 2, 1] microbatches per stage, planned [3, 2, 1]" in text
    assert "repeat from call" in text
    assert "4, 1, 4" in text


@settings(max_examples=60)
@given(st.sampled_from(["stash", "vsync"]), st.integers(1, 8), st.data())
def test_updates_after_every_microbatch_are_proved(
    name: str, num_stages: int, data: st.DataObject
) -> None:
    """w_s + 1 microbatches in flight, and a version more than the weights are minibatches old."""
    last = num_stages - 1
    tied = tuple(
        TiedParameter(f"w{s}", (s, last), 1) for s in range(last) if data.draw(st.booleans())
    )
    options = rich(name, {"clip": data.draw(st.sampled_from([None, 1.0])), "tied": tied}) or {}
    down = sorted(data.draw(st.lists(st.integers(0, 12), min_size=num_stages, max_size=num_stages)))
    warmup = tuple(max(depth, s) for s, depth in enumerate(down))[::-1]
    plan = make_plan(name, num_stages, 1, depths=warmup, **options)
    proof, spec = str(check(plan)), plan.spec
    ages = list(warmup) if name == "stash" else [warmup[0]] * num_stages
    in_flight = [depth + 1 for depth in warmup]
    assert [spec.versions(s) for s in range(num_stages)] == [age + 1 for age in ages]
    assert f"at most {in_flight} microbatches per stage, planned {in_flight}" in proof
    late = bool(options.get("clip") or options.get("tied"))
    held = [ages[s] - warmup[s] + 1 if late and spec.late(s) else 1 for s in range(num_stages)]
    assert [spec.gradient_buffers(s) for s in range(num_stages)] == held


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 1),
    st.lists(st.integers(0, 6), min_size=4, max_size=4),
    st.booleans(),
)
@example([1, 3], 0, [0, 3, 0, 0], False)  # some go backward before their group is complete
@example([3, 4], 0, [0, 0, 0, 0], True)
def test_stash_with_replicas_is_proved(
    replicas: list[int], extra: int, depths: list[int], usual: bool
) -> None:
    """PipeDream's 1F1B-RR: w_s + 1 versions, as many in flight on every replica, and weights
    W_max(t // r_s - w_s, 0); with any depths, also ones that grow."""
    counts, given_depths = tuple(replicas), None if usual else tuple(depths[: len(replicas)])
    plan = make_plan(
        "stash", len(counts), 1, replicas=counts, extra=extra, depths=given_depths,
    )  # fmt: skip
    warmup, spec, proof = plan.training.warmup, plan.spec, str(check(plan))
    assert spec.period == lcm(*counts)
    for s, (count, depth) in enumerate(zip(counts, warmup, strict=True)):
        assert spec.versions(s) == spec.in_flight(s) == depth + 1
        assert spec.gradient_buffers(s) == 1
        for k in range(1, 40):  # counted from 1, as the paper does
            assert spec.version(s, k - 1) == max(0, -(-k // count) - 1 - depth)
            assert spec.rank(s, 0, k - 1) == spec.ranks[s][(k - 1) % count]
    stream, seen = make_stream(plan), list[Instruction]()
    for _ in range(2 * spec.reach):
        program, stream = stream.step(1)
        seen += [one for column in program.columns for one in column]
    seen += [one for column in stream.flush()[0].columns for one in column]
    kept = [
        one
        for one in seen
        if one.action.phase is Phase.COMPUTE or one.action.kind is not Kind.GRADIENT
    ]
    assert all(-one.minibatch <= spec.reach for one in kept)
    if usual:
        in_flight = [depth + 1 for depth in warmup]
        assert f"at most {in_flight} microbatches per stage, planned {in_flight}" in proof


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
)
def test_flushes_of_stash_with_replicas_in_any_place_are_proved(
    replicas: list[int], lengths: list[int]
) -> None:
    """A group that a flush leaves incomplete goes on after it."""
    plan = make_plan("stash", len(replicas), 1, replicas=tuple(replicas))
    stream, programs = make_stream(plan), []
    for length in lengths:
        for _ in range(length):
            program, stream = stream.step(1)
            programs.append(program)
        program, stream = stream.flush()
        programs.append(program)
    check_programs(plan, programs)
    updates = [one for p in programs for c in p.columns for one in c if one.action is Action.STEP]
    due = [sum(lengths) // count for count in replicas]
    assert [sum(one.stage == s for one in updates) for s in range(len(replicas))] == [
        count * times for count, times in zip(replicas, due, strict=True)
    ]


def test_a_replica_takes_its_own_turns_and_updates_whole_groups() -> None:
    plan = make_plan("stash", 1, 1, replicas=(2,))
    programs = programs_of(plan, (1, 1, 1, 1))
    first, second = programs[0].columns
    with pytest.raises(ScheduleError, match="they take turns"):
        check_programs(plan, [replace(programs[0], columns=(second, first))])
    flush = programs[-1]
    column = flush.columns[1]
    step = next(n for n, one in enumerate(column) if one.action is Action.STEP)
    early = column[step]._replace(minibatch=column[step].minibatch - 1)
    changed = mutated(flush, 1, [*column[:step], early, *column[step + 1 :]])
    with pytest.raises(ScheduleError, match="the next update is that of minibatch 3"):
        check_programs(plan, [*programs[:-1], changed])


RICH: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"clip": 1.0},
    "tied": {"tied": (TiedParameter("w", (0, 2), 1),)},
    "replicas": {"replicas": (1, 2, 1)},
    "homes": {"replicas": (1, 2, 1), "homes": True, "tied": (TiedParameter("w", (1, 2), 1),)},
    "skips": {"edges": (*chain(3), Edge("skip", 0, (1, 2), 1, True))},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", RICH)
@pytest.mark.parametrize("name", allowed("any"))
def test_no_instruction_may_be_dropped_or_doubled(name: str, kind: str, fast: bool) -> None:
    """All of the third program, and a third of the others; in the fast tests a third of that."""
    options = rich(name, RICH[kind])
    if options is None:
        with pytest.raises(ScheduleError):
            check(make_plan(name, 3, 1, **RICH[kind]))
        return
    count = microbatches(name, 4)
    plan = make_plan(name, 3, count, **options)
    programs = programs_of(plan, (count,) * 3)
    for number in range(len(programs) - 1, -1, -1):
        for rank, column in enumerate(programs[number].columns):
            stride = (1 if number == 2 else 3) * (3 if fast else 1)
            for index in range((rank + number) % stride, len(column), stride):
                for kept in (0, 2):
                    changed = [*column[:index], *[column[index]] * kept, *column[index + 1 :]]
                    sequence = list(programs)
                    sequence[number] = mutated(programs[number], rank, changed)
                    with pytest.raises(ScheduleError):
                        check_programs(plan, sequence)


def aim_elsewhere(one: Instruction, plan: Plan, pick: random.Random) -> Instruction:
    """Another peer, edge, microbatch, minibatch, lag or action of the same shape."""
    choices = [one._replace(minibatch=one.minibatch + pick.choice([-1, 1]))]
    if one.microbatch >= 0:
        choices.append(one._replace(microbatch=one.microbatch + pick.choice([-1, 1])))
    if one.peer >= 0 and plan.num_ranks > 1:
        others = [rank for rank in range(plan.num_ranks) if rank != one.peer]
        choices.append(one._replace(peer=pick.choice(others)))
    if one.edge >= 0:
        choices.append(one._replace(edge=one.edge + pick.choice([-1, 1])))
        kind = one.action.kind
        others_of = [table[kind] for table in PHASES if table[kind] is not one.action]
        choices.append(one._replace(action=pick.choice(others_of)))
    if one.action in (Action.FORWARD, *BACKWARDS):
        choices.append(one._replace(lag=abs(one.lag - 1)))
    if one.action in BACKWARDS:
        others_of = [action for action in BACKWARDS if action is not one.action]
        choices.append(one._replace(action=pick.choice(others_of)))
    if one.action.kind is not Kind.NORMS or plan.num_ranks >= len(plan.stages):
        choices.append(one._replace(stage=one.stage + 1))  # else they are those of a whole rank
    return pick.choice(choices)


@settings(max_examples=150)
@given(plans(max_stages=6, max_microbatches=5, several=True), st.randoms(use_true_random=False))
def test_aiming_elsewhere_is_caught(plan: Plan, pick: random.Random) -> None:
    counts = (plan.training.num_microbatches,) * 3
    programs = programs_of(plan, counts)
    number = pick.randrange(3)
    rank = pick.randrange(plan.num_ranks)
    column = list(programs[number].columns[rank])
    if not column:
        return
    index = pick.randrange(len(column))
    column[index] = aim_elsewhere(column[index], plan, pick)
    programs[number] = mutated(programs[number], rank, column)
    with pytest.raises(ScheduleError):
        check_programs(plan, programs)


@settings(max_examples=300)
@given(plans(max_stages=4, max_microbatches=5), st.randoms(use_true_random=False))
def test_a_swap_is_caught_or_changes_nothing(plan: Plan, pick: random.Random) -> None:
    """A program that the proof accepts trains the same model: shown by another reader of
    programs."""
    counts = (plan.training.num_microbatches,) * 3
    right = programs_of(plan, counts)
    number, rank = pick.randrange(len(right)), pick.randrange(plan.num_ranks)
    column = list(right[number].columns[rank])
    if len(column) < 2:
        return
    first = pick.randrange(len(column) - 1)
    second = min(len(column) - 1, first + pick.choice([1, 1, 2, 5]))
    column[first], column[second] = column[second], column[first]
    changed = list(right)
    changed[number] = mutated(right[number], rank, column)
    try:
        check_programs(plan, changed)
    except ScheduleError:
        return
    assert meaning(plan, changed) == meaning(plan, right)


def meaning(plan: Plan, programs: list[Schedule]) -> object:
    spec = plan.spec
    reader = Meaning(plan, [spec.versions(stage.index) for stage in plan.stages])
    for program in programs:
        reader.run(program)
    return reader.result()


def test_the_other_reader_sees_a_wrong_order() -> None:
    """The reader above is no rubber stamp: it tells programs apart and notices hangs."""
    plan = make_plan("1f1b", 2, 2)
    program = programs_of(plan, (2,))[0]
    column = list(program.columns[1])
    first, second = (n for n, one in enumerate(column) if one.action is Action.BACKWARD)
    swapped = list(column)
    swapped[first], swapped[second] = column[second], column[first]
    with pytest.raises(Broken):
        meaning(plan, [mutated(program, 1, swapped)])
    late = [one for one in column if one.action is not Action.STEP]
    assert meaning(plan, [mutated(program, 1, late)]) != meaning(plan, [program])


def blocking(program: Schedule) -> Schedule:
    """Every receive posted only where it is waited for, every send waited for at once."""
    columns = []
    waits = set(WAIT_SEND.values())
    for column in program.columns:
        out: list[Instruction] = []
        for one in column:
            phase, kind = one.action.phase, one.action.kind
            if phase is Phase.WAIT_RECV:
                out += [one._replace(action=POST_RECV[kind]), one]
            elif phase is Phase.SEND:
                out += [one, one._replace(action=WAIT_SEND[kind])]
            elif phase not in (Phase.POST_RECV, Phase.WAIT_SEND):
                out.append(one)
        assert not waits & {one.action for one in column} or out
        columns.append(tuple(out))
    return replace(program, columns=tuple(columns))


def test_blocking_1f1b_deadlocks_and_the_cycle_is_named() -> None:
    plan = make_plan("1f1b", 2, 4)
    program = blocking(programs_of(plan, (4,))[0])
    with pytest.raises(DeadlockError) as caught:
        check_programs(plan, [program])
    message, place = caught.value.message, caught.value.where
    assert message.count("waits for") == 2
    assert "rank 0 (stage 0) at WAIT_SEND 1 e0 >1 s0, microbatch 1" in message
    assert "rank 1 (stage 1) at WAIT_SEND_GRADIENT 0 e0 >0 s1, microbatch 0" in message
    assert place is not None
    assert place.count("<-- here") == 2


def test_a_warm_up_that_grows_is_a_deadlock() -> None:
    plan = make_plan("1f1b", 3, 6, depths=(0, 2, 0))
    with pytest.raises(DeadlockError, match="waits for"):
        check(plan)


def test_errors_show_the_place() -> None:
    plan = make_plan("1f1b", 2, 2)
    program = programs_of(plan, (2,))[0]
    column = [one for one in program.columns[0] if one.action is not Action.STEP]
    with pytest.raises(ScheduleError) as caught:
        check_programs(plan, [mutated(program, 0, column)])
    assert "no update of minibatch 0" in caught.value.message
    assert "rank 0" in str(caught.value.where)
    assert "<-- here" in str(caught.value.where)


def test_programs_of_another_plan_are_refused() -> None:
    plan = make_plan("1f1b", 2, 2)
    other = programs_of(make_plan("1f1b", 3, 2), (2,))[0]
    with pytest.raises(ScheduleError, match="3 columns for 2 ranks"):
        check_programs(plan, [other])
    with pytest.raises(ScheduleError, match="does not belong"):
        check_programs(plan, [replace(other, name="gpipe")])


@pytest.mark.slow
def test_depth_64_with_1024_microbatches() -> None:
    proof = check(make_plan("1f1b", 64, 1024))
    assert proof.num_instructions > 700_000
