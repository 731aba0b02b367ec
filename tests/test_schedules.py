"""Compute orders, warm-up depths, streams and the text form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster
from pdcompile.errors import ScheduleError
from pdcompile.passes.check import check
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.schedules import (
    Stream,
    alone,
    gpipe,
    interleaved,
    make_stream,
    one_f_one_b,
    stash,
    two_bw,
    vsync,
    warmup,
    zb_v,
    zero_bubble,
)
from pdcompile.passes.simulate import TimelineEvent, simulate, simulate_drained
from pdcompile.plan import Edge, Plan, TiedParameter
from pdcompile.plan.times import times_of
from pdcompile.problem.space import Setting
from pdcompile.schedule import Action, Instruction
from pdcompile.schedule.instruction import BACKWARDS
from pdcompile.schedule.registry import KINDS, StageWork
from tests.helpers.problems import chain_problem
from tests.helpers.schedules import chain, make_plan, microbatches, plans, rich

GOLDEN = Path(__file__).parent / "golden"


def words(name: str, microbatches: int, depth: int, delay: int = 0) -> str:
    """Forwards and backwards of a rank with one stage."""
    work = StageWork(0, range(microbatches), depth, delay=delay)
    tasks = list(KINDS[name].order((work,)))
    assert tasks.pop() == (0, Action.STEP, 0, -1)
    return " ".join(f"{one.action.value}{one.microbatch}" for one in tasks)


def picture(plan: Plan) -> list[str]:
    """One line a stage, one cell a second: what the docstrings of the schedules show."""
    return drawn(simulate(plan).timeline, len(plan.stages), lambda event: event.microbatch)


def drawn(
    timeline: Sequence[TimelineEvent], num_stages: int, number: Callable[[TimelineEvent], int]
) -> list[str]:
    """Lines of stages, or of ranks where there are more of these."""
    end = round(max(event.end_seconds for event in timeline))
    ranks = {event.rank for event in timeline}
    lines = [[".."] * end for _ in range(max(num_stages, len(ranks)))]
    for event in timeline:
        if event.action in (Action.FORWARD, *BACKWARDS):
            line = lines[event.stage if len(ranks) <= num_stages else event.rank]
            for second in range(round(event.start_seconds), round(event.end_seconds)):
                line[second] = f"{event.action.value}{number(event)}"
    return [" ".join(line).strip(". ") for line in lines]


def drawn_in(module: object, line_of: str = "stage") -> list[str]:
    found = [x for x in str(module.__doc__).splitlines() if x.startswith(f"    {line_of} ")]
    return [line.split(maxsplit=2)[2].strip(". ") for line in found]


def test_gpipe_is_its_picture() -> None:
    assert words("gpipe", 3, 2) == "F0 F1 F2 B0 B1 B2"
    assert picture(make_plan("gpipe", 4, 4)) == drawn_in(gpipe)


def test_1f1b_is_its_picture() -> None:
    assert words("1f1b", 4, 2) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words("1f1b", 2, 5) == "F0 F1 B0 B1"
    assert picture(make_plan("1f1b", 4, 5)) == drawn_in(one_f_one_b)


def test_interleaved_is_its_picture() -> None:
    plan = make_plan("interleaved", 4, 4, per_rank=2)
    assert picture(plan) == drawn_in(interleaved)
    assert plan.training.warmup == (3, 2, 1, 0)


def test_zb_h1_is_its_picture() -> None:
    assert words("zb-h1", 4, 1) == "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"
    assert words("zb-h1", 4, 1, 2) == "F0 F1 I0 F2 I1 F3 I2 W0 I3 W1 W2 W3"
    assert words("zb-h1", 1, 2, 3) == "F0 I0 W0"
    assert picture(make_plan("zb-h1", 4, 7)) == drawn_in(zero_bubble)


def test_zb_v_is_its_picture() -> None:
    plan = make_plan("zb-v", 4, 4, per_rank=2)
    assert picture(plan) == drawn_in(zb_v)
    assert plan.training.warmup == (3, 2, 1, 0)


def test_2bw_is_its_picture() -> None:
    """Three calls of two microbatches and a flush, update and all."""
    drawn = [line.replace(".", "") for line in drawn_in(two_bw)]
    for depth, expected in zip((1, 0), drawn, strict=True):
        pending: list[tuple[int, int]] = []
        text = ""
        for call in range(4):
            microbatches = range(2) if call < 3 else ()
            work = StageWork(0, microbatches, depth, tuple(pending), lag=1, flush=call == 3)
            for _, action, minibatch, microbatch in two_bw.order((work,)):
                letter = "abc"[call + minibatch]
                text += "^" if action is Action.STEP else f" {action.value}{letter}{microbatch}"
                if action is Action.FORWARD:
                    pending.append((minibatch, microbatch))
                elif action is Action.BACKWARD:
                    pending.remove((minibatch, microbatch))
            pending = [(minibatch - 1, microbatch) for minibatch, microbatch in pending]
            text += "|"
        assert text.replace("| ", "|").replace("^ ", "^").strip(" |") == " ".join(
            expected.replace(" |", "|").split()
        )


@pytest.mark.parametrize(("module", "num_stages"), [(stash, 4), (vsync, 3)])
def test_a_schedule_that_updates_each_is_its_picture(module: object, num_stages: int) -> None:
    """Six minibatches of one microbatch and the flush."""
    name = str(module.__name__).rpartition(".")[2]  # type: ignore[attr-defined]
    found = simulate_drained(make_plan(name, num_stages, 1), 6).timeline
    lines = drawn(found, num_stages, lambda event: event.minibatch)
    assert lines == drawn_in(module)


def test_stash_with_replicas_is_its_picture() -> None:
    """Six minibatches and the flush: three groups of two on the first stage."""
    plan = make_plan("stash", 2, 1, replicas=(2, 1), seconds=[(2.0, 4.0), (1.0, 2.0)])
    lines = drawn(simulate_drained(plan, 6).timeline, 2, lambda event: event.minibatch)
    assert lines == drawn_in(stash, "rank")


def test_warm_up_without_replicas() -> None:
    assert warmup("1f1b", 4, 8) == (3, 2, 1, 0)
    assert warmup("1f1b", 4, 8, extra=1) == (6, 4, 2, 0)
    assert warmup("1f1b", 4, 2) == (1, 1, 1, 0)
    assert warmup("gpipe", 4, 8) == (7, 7, 7, 7)
    assert warmup("2bw", 4, 8) == (3, 2, 1, 0)
    assert warmup("2bw", 1, 1) == (0,)
    assert warmup("stash", 4, 1, extra=2) == warmup("vsync", 4, 1, extra=2) == (9, 6, 3, 0)


def test_2bw_depths_are_capped_together() -> None:
    """Neighbours of equal depth take turns: (4, 4, 2, 0) runs at 7.5 instead of 3.75."""
    assert warmup("2bw", 4, 4, extra=1) == (4, 3, 1, 0)
    assert warmup("2bw", 4, 1) == (1, 1, 0, 0)


def test_warm_up_with_replicas() -> None:
    assert warmup("2bw", 3, 8, (1, 2, 1)) == (4, 1, 0)
    assert warmup("2bw", 3, 8, (1, 4, 1)) == (8, 1, 0)
    assert warmup("1f1b", 3, 12, (3, 2, 1)) == (2, 1, 0)
    assert warmup("gpipe", 2, 5, (2, 1)) == (2, 4)
    assert warmup("stash", 2, 1, (2, 1)) == warmup("stash", 2, 1, (3, 1)) == (1, 0)
    assert warmup("stash", 3, 1, (1, 2, 1)) == (5, 1, 0)
    assert warmup("stash", 2, 1, (1, 3), extra=1) == (8, 0)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_stash_with_replicas_keeps_balanced_stages_busy(replicas: list[int]) -> None:
    """The depth is at least PipeDream's, and no less than its own: one microbatch a second is lost
    nowhere once the pipeline is full."""
    counts, ranks = tuple(replicas), sum(replicas)
    seconds = [(float(count), 2.0 * count) for count in counts]
    plan = make_plan("stash", len(counts), 1, replicas=counts, seconds=seconds)
    for s, depth in enumerate(plan.training.warmup):
        assert depth >= (ranks - 1 - sum(counts[:s])) // counts[s]
    forecast = simulate(plan).forecast
    assert forecast.step_seconds == pytest.approx(3.0)
    assert forecast.bubble == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(0, 3),
    st.sampled_from([None, 1.0]),
)
@example([1, 1, 3, 1], 4, 0, None)  # a replica's next microbatch may be far away
@example([1, 1, 3, 1], 4, 0, 1.0)
def test_depths_never_deadlock_and_respect_the_cap(
    replicas: list[int], count: int, extra: int, clip: float | None
) -> None:
    depths = warmup("2bw", len(replicas), count, tuple(replicas), extra)
    assert all(depth <= count // r for depth, r in zip(depths, replicas, strict=True))
    counts = tuple(replicas)
    check(make_plan("2bw", len(counts), count, replicas=counts, depths=depths, clip=clip))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipedream", 2, 2), "is not one of"),
        (("1f1b", 0, 2), "0 stages"),
        (("1f1b", 2, 0), "0 microbatches"),
        (("1f1b", 2, 2, (1,)), "replicas"),
        (("1f1b", 2, 2, (), -1), "negative"),
        (("interleaved", 3, 2, (), 0, (0, 1)), r"3 stages on ranks \[0, 1\]"),
    ],
)
def test_bad_warm_ups(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        warmup(*arguments)  # type: ignore[arg-type]


def held(setting: Setting, depths: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
    """Weight versions, gradient buffers, and microbatches in flight of each stage."""
    count = len(depths)
    found = scheduled(chain_problem([1.0] * count, count), Cluster.local(count), setting, depths)
    each = found.holdings
    return (
        [one.versions for one in each],
        [one.gradient_buffers for one in each],
        [*found.in_flight],
    )


def test_what_stages_hold() -> None:
    assert held(Setting("1f1b", 2, clipping=True), (3, 2, 1, 0)) == ([1] * 4, [1] * 4, [2, 2, 2, 1])
    setting = Setting("2bw", 8, optimizer_factor=1.0, clipping=True)
    assert held(setting, (3, 2, 1, 0)) == ([2] * 4, [2] * 4, [4, 3, 2, 1])
    found = scheduled(chain_problem([1.0] * 4, 4), Cluster.local(4), setting, (3, 2, 1, 0))
    assert {one.optimizer_factor for one in found.holdings} == {1.0}
    assert held(Setting("2bw", 4), (1, 0))[1] == [1, 1]
    assert held(Setting("stash", 1), (4, 2, 0)) == ([5, 3, 1], [1] * 3, [5, 3, 1])
    clipped = Setting("vsync", 1, clipping=True)
    assert held(clipped, (4, 2, 0)) == ([5] * 3, [1, 3, 5], [5, 3, 1])
    with pytest.raises(ScheduleError):
        held(Setting("pipedream", 4), (1, 0))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", list(KINDS))
def test_steady_state_is_one_object(name: str) -> None:
    count, options = microbatches(name, 8), rich(name, {"tied": (TiedParameter("w", (0, 3), 1),)})
    plan = make_plan(name, 4, count, **(options or {}))
    stream = make_stream(plan)
    programs = []
    for _ in range(2 * plan.spec.reach + 3):
        program, stream = stream.step(count)
        programs.append(program)
    assert programs[-3] is programs[-2] is programs[-1]
    assert stream.step(count)[1] == stream


@settings(max_examples=40)
@given(plans(), st.data())
def test_a_flush_leads_back_to_the_beginning(plan: Plan, data: st.DataObject) -> None:
    stream, calls = make_stream(plan), data.draw(st.integers(0, 4))
    start = Stream.begin(stream.spec, calls)  # the same as that of 0, but for whose turn it is
    for _ in range(calls):
        _, stream = stream.step(data.draw(st.integers(1, plan.training.num_microbatches)))
    program, stream = stream.flush()
    assert stream == start
    assert hash(stream) == hash(start)
    again, _ = stream.flush()
    assert not any(again.columns)
    assert program.name.endswith("+flush")


def test_a_stream_takes_no_more_microbatches_than_planned() -> None:
    stream = make_stream(make_plan("1f1b", 2, 4))
    for count in (0, 5):
        with pytest.raises(ScheduleError, match="supports 1 to 4"):
            stream.step(count)


def test_unusable_plans_are_refused() -> None:
    with pytest.raises(ScheduleError, match="is not one of gpipe, 1f1b, interleaved, zb-h1, zb-v"):
        make_stream(make_plan("pipedream", 2, 2, depths=(1, 0)))
    with pytest.raises(ScheduleError, match="3 warm-up depths for 2 stages"):
        make_stream(make_plan("1f1b", 2, 2, depths=(1, 0, 0)))
    with pytest.raises(ScheduleError, match="goes from stage 1 to stage 0"):
        make_stream(make_plan("1f1b", 2, 2, edges=(Edge("x", 1, (0,), 1, True),)))
    with pytest.raises(ScheduleError, match="there is no stage 2"):
        make_stream(make_plan("1f1b", 2, 2, edges=(Edge("x", 1, (2,), 1, True),)))
    tied = (TiedParameter("w", (0, 1), 1),)
    for options, message, remedy in (
        (("stash", 2, 2), "2 microbatches under 'stash'", "microbatches=1"),
        (("vsync", 2, 2), "2 microbatches under 'vsync'", "microbatches=1"),
        (("stash", 2, 1, {"clip": 1.0}), "unlike age", "use schedule '2bw' or 'vsync'"),
        (("stash", 2, 1, {"tied": tied}), r"'w' is on stages \[0, 1\]", "Together"),
        (("vsync", 2, 1, {"replicas": (1, 2)}), "2 replicas under 'vsync'", "stash"),
    ):
        name, stages, count, *more = options
        with pytest.raises(ScheduleError, match=message) as caught:
            make_stream(make_plan(name, stages, count, **(more[0] if more else {})))
        assert remedy in str(caught.value.remedy)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "2bw"])
@pytest.mark.parametrize("replicas", [(1, 3), (3, 1), (2, 3), (3, 2, 1)])
def test_replicas_of_a_copy_get_new_weights_from_those_of_the_owner(
    name: str, replicas: tuple[int, ...]
) -> None:
    """Each gets them in turn, once; proved in a stream, and simulated as the planner's clock has
    it."""
    last = len(replicas) - 1
    plan = make_plan(
        name, last + 1, 6, replicas=replicas, edges=chain(last + 1, 3),
        tied=(TiedParameter("w", (0, last), 5),),
    )  # fmt: skip
    cluster = Cluster.local(sum(replicas))
    plan = replace(plan, cluster=cluster.to_toml())
    check(plan)
    check(replace(plan, training=replace(plan.training, warmup=(0,) * (last + 1))))
    program, _ = make_stream(plan).step(6)
    first, ranks = range(replicas[0]), range(sum(replicas) - replicas[last], sum(replicas))
    sent = [
        (rank, one.peer)
        for rank, column in enumerate(program.columns)
        for one in column
        if one.action is Action.SEND_WEIGHT
    ]
    if name != "2bw":
        assert sorted(sent) == sorted((first[k % len(first)], y) for k, y in enumerate(ranks))
        times = times_of(plan, cluster, [edge.value for edge in plan.edges])
        found = times.makespan(plan.training.warmup, 6)
        assert simulate(plan).forecast.step_seconds == pytest.approx(found)


def test_update_of_2bw_early_and_late() -> None:
    """Early: right after the minibatch's last backward; clipped: before the forward of t + 2."""
    for clip, minibatch, following in ((None, -1, Action.WAIT_RECV), (1.0, -2, Action.WAIT_RECV)):
        stream = make_stream(make_plan("2bw", 3, 4, clip=clip))
        for _ in range(4):
            program, stream = stream.step(4)
        column = program.columns[2]
        (index,) = (n for n, one in enumerate(column) if one.action is Action.STEP)
        assert column[index].minibatch == minibatch
        assert column[index + 1].action is following
        assert column[index + 1].microbatch == 0
        first = [one.action for one in program.columns[0]].index(Action.FORWARD)
        steps = [n for n, one in enumerate(program.columns[0]) if one.action is Action.STEP]
        assert (steps[0] < first) == (clip is not None)


TWO_A_RANK = make_plan("gpipe", 4, 2, edges=(*chain(4), Edge("skip", 0, (1, 3), 1, True)))
TWO_A_RANK = replace(
    TWO_A_RANK,
    stages=tuple(replace(stage, ranks=(stage.index % 2,)) for stage in TWO_A_RANK.stages),
)
GOLDEN_PLANS = {
    "gpipe_two_a_rank": TWO_A_RANK,
    "gpipe": make_plan("gpipe", 2, 3),
    "1f1b": make_plan("1f1b", 3, 4),
    "interleaved": make_plan("interleaved", 4, 3, per_rank=2),
    "1f1b_tied_clipped": make_plan("1f1b", 2, 2, tied=(TiedParameter("w", (0, 1), 1),), clip=1.0),
    "zb-h1": make_plan("zb-h1", 3, 5),
    "zb-v": make_plan("zb-v", 4, 3, per_rank=2),
    "zb-v_replicas_clipped": make_plan("zb-v", 2, 3, per_rank=2, replicas=(2, 2), clip=1.0),
    "round": alone.chain("round", 3, 3, 2),
    "2bw": make_plan("2bw", 3, 4, edges=(*chain(3), Edge("skip", 0, (1, 2), 1, True))),
    "round-2bw": alone.chain("round-2bw", 3, 3, 2),
    "2bw_replicas": make_plan("2bw", 2, 4, replicas=(2, 1)),
    "stash": make_plan("stash", 3, 1),
    "stash_replicas": make_plan("stash", 2, 1, replicas=(2, 1)),
    "async": make_plan("async", 2, 1, replicas=(2, 1)),
    "forward": make_plan("forward", 3, 4),
    "vsync": make_plan("vsync", 3, 1, clip=1.0, tied=(TiedParameter("w", (0, 2), 1),)),
}


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 3, 1)])
def test_updates_of_tied_weights_in_the_middle_wait_for_nobody_that_waits(
    replicas: tuple[int, ...], clip: float | None, fast: bool
) -> None:
    """A replica without microbatches adds to sums and norms with its own update, which is later."""
    for count in (1, 3, 4) if fast else (1, 2, 3, 4, 6, 7):
        plan = make_plan(
            "2bw", 3, count, replicas=replicas, clip=clip, tied=(TiedParameter("w", (0, 2), 1),),
            edges=chain(3),
        )  # fmt: skip
        check(plan)
        middle = plan.spec.halfway(0)
        assert (middle is None) == (max(replicas) > 1 and (clip is not None or replicas[1] == 1))
        assert plan.spec.halfway(2) == middle
        assert plan.spec.halfway(1) is None


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_golden_programs(name: str) -> None:
    """A call in mid-stream and the flush; write the file anew by deleting it and reading the
    diff."""
    plan, texts = GOLDEN_PLANS[name], []
    stream = make_stream(plan)
    for _ in range(2 * plan.spec.reach - 1):
        program, stream = stream.step(plan.training.num_microbatches)
    texts = [str(program)]
    for _ in range(plan.spec.period - 1):  # the others' turns
        program, stream = stream.step(plan.training.num_microbatches)
        texts.append(str(program))
    texts.append(str(stream.flush()[0]))
    text = "\n".join("\n".join(map(str.rstrip, one.splitlines())) for one in texts) + "\n"
    assert (GOLDEN / f"schedule_{name}.txt").read_text() == text


instructions = st.builds(
    Instruction,
    st.sampled_from(Action),
    st.integers(-1, 5),
    st.integers(-3, 3),
    st.integers(-1, 9),
    st.integers(-1, 3),
    st.integers(-1, 3),
    st.integers(0, 1),
    st.just(-1),
)


@given(instructions, instructions)
def test_unlike_instructions_have_unlike_texts(one: Instruction, other: Instruction) -> None:
    assert (str(one) == str(other)) == (one == other)
