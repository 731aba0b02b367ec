"""Plans that a person would choose: cuts at borders of modules, almost as fast as the fastest."""

from __future__ import annotations

import itertools
import math
import signal
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError, PdcompileError, PlanError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs.forecast import residents
from pdcompile.passes.partition.alternatives import seconds_of
from pdcompile.passes.partition.space.pipelines import filled
from pdcompile.passes.planning import border_cuts, branch_and_bound
from pdcompile.passes.planning.border_cuts import (
    divided,
    divided_before,
    preferred,
    sent_bytes,
    step_seconds,
    units,
)
from pdcompile.passes.planning.candidate_plan import candidate_plan
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.passes.planning.solved_problem import candidate_of, placed
from pdcompile.plan import Plan, Training
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem.constraints import Apart, Constraint, CutBefore, Pin, Together
from pdcompile.report.plan_table import certificate_line
from pdcompile.units import format_bytes
from tests.helpers.graphs import B, GraphBuilder, chain
from tests.helpers.planned import planned
from tests.helpers.whole_space import explored, random_space


def transformer(seconds: list[float], *, head: float = 0.5, wide: int = 4) -> OpGraph:
    """Blocks of an attention and an MLP, one op more wide inside of each."""
    g = GraphBuilder(batch_size=4)
    x = g.op("wte", "torch.relu", (g.input("x"),), module="wte", seconds=(0.1, 0.1), saved=32)
    for i, own in enumerate(seconds):
        for part, share in (("attn", 0.4), ("mlp", 0.6)):
            path, half = f"h.{i}.{part}", own * share / 2
            weight = g.parameter(f"{path}.weight")
            up = g.op(
                f"{part}_up_{i}", "torch.relu", (x,), module=path, shape=(B, wide * 8),
                seconds=(half / 3, 2 * half / 3), saved=32, parameters=(weight,),
            )  # fmt: skip
            down = g.op(
                f"{part}_down_{i}", "torch.relu", (up,), module=path,
                seconds=(half / 3, 2 * half / 3), saved=32,
            )  # fmt: skip
            x = g.op(
                f"{part}_add_{i}", "operator.add", (x, down), module=f"h.{i}", seconds=(1e-3, 1e-3)
            )
    loss = g.op("loss", "torch.mean", (x,), shape=(), module="loss_fn", seconds=(head, head))
    return g.build(loss, loss=loss)


def links(count: int, rate: float = 1e6, memory: int | None = None) -> Cluster:
    return Cluster((Device("cpu", memory),) * count, (Level("link", count, rate, 1e-3),))


def uneven() -> OpGraph:
    """The halves of its time meet inside of an attention, where more is sent than elsewhere."""
    return transformer([1.0] * 4, head=0.2)


def names_on(plan: Plan, stage: int) -> set[str]:
    return set(plan.stages[stage].ops)


def test_a_cut_between_blocks_wins_where_it_costs_little() -> None:
    graph, cluster = uneven(), links(2)
    fastest = planned(graph, cluster, time_limit=200)
    assert "attn_up_2" in names_on(fastest, 0)
    assert "attn_down_2" in names_on(fastest, 1)
    plan = planned(graph, cluster, tolerance=0.03, time_limit=200)
    assert "mlp_add_1" in names_on(plan, 0)
    assert "attn_up_2" in names_on(plan, 1)
    old, new = fastest.certificate, plan.certificate
    assert old.status == "optimal"
    assert (new.status, new.bound_seconds) == ("feasible", old.bound_seconds)
    assert new.fastest_seconds == pytest.approx(old.objective_seconds)
    assert new.gap == pytest.approx(1 - old.objective_seconds / new.objective_seconds, rel=1e-4)
    check_plan(plan, graph, cluster)
    assert plan.forecast is not None
    assert fastest.forecast is not None
    assert sum(plan.forecast.sent_bytes) < sum(fastest.forecast.sent_bytes)
    (note,) = (one for one in plan.notes if "slower" in one)
    sent, before = (sum(one.forecast.sent_bytes) for one in (plan, fastest) if one.forecast)
    told = f"sends {format_bytes(sent)} instead of {format_bytes(before)} a step"
    assert f"cuts lie at borders of modules; {told}" in note
    assert "--cut-tolerance 0" in note
    assert "which is proved optimal" in str(certificate_line(plan))
    assert Plan.from_json(plan.to_json()) == plan


def same(plan: Plan, fastest: Plan) -> bool:
    """True if a plan is the fastest one, and says nothing of others."""
    seconds = fastest.certificate.seconds  # of the search
    own = replace(plan, certificate=replace(plan.certificate, seconds=seconds))
    return own == fastest


def test_a_cut_inside_of_a_block_that_pays_for_itself_stays() -> None:
    graph, cluster = uneven(), links(2)
    assert same(planned(graph, cluster, tolerance=0.01), planned(graph, cluster))


def test_without_time_the_plan_stays_as_it_was_found() -> None:
    graph, cluster = uneven(), links(2)
    fastest, found = planned(graph, cluster), placed(planned(graph, cluster))
    update = partial(fastest.training.update_seconds, versions=False)
    stage_of, certificate, notes = preferred(
        found, fastest.certificate, graph, 0.03, update=update, fits=lambda _: True, seconds=0.0
    )
    assert (stage_of, certificate, notes) == (tuple(found.stage_of), fastest.certificate, ())


@pytest.mark.parametrize("tolerance", [0.0, 0.03])
@pytest.mark.parametrize("memory", [None, 1 << 20])
def test_only_the_chosen_plan_is_rehearsed(
    tolerance: float, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed: list[int] = []

    def counted(*given: Any) -> Any:
        rehearsed.append(len(given[2]))
        return residents(*given)

    monkeypatch.setattr("pdcompile.passes.stages.assemble.residents", counted)
    plan = planned(uneven(), links(2, memory=memory), tolerance=tolerance)
    assert rehearsed == [2]
    assert ("by the schedule's ledger" in plan.certificate.scope) == (memory is not None)


def test_a_preferred_plan_whose_ledgers_exceed_a_limit_is_searched_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(branch_and_bound, "PATIENCE", 0.2)  # any plan will do
    graph, loose = uneven(), links(2)
    for tolerance in (0.0, 0.03):
        plan = planned(graph, loose, tolerance=tolerance)
        assert plan.forecast is not None
        need = max(ledger.total_bytes for ledger in plan.forecast.ledgers)
        tight = links(2, memory=need - 1)  # enough by the formula, which knows of no sends
        found = planned(graph, tight, tolerance=tolerance)
        assert found.forecast is not None
        assert filled(found.forecast.ledgers, tight) <= 1
        check_plan(found, graph, tight)


@pytest.mark.slow
def test_a_refusal_names_a_limit_under_which_a_plan_was_found() -> None:
    graph = uneven()
    plan = planned(graph, links(2))
    assert plan.forecast is not None
    need = max(ledger.total_bytes for ledger in plan.forecast.ledgers)
    with pytest.raises(InfeasibleError) as caught:
        planned(graph, links(2, memory=need // 4))
    assert "of memory on every stage, which is enough" in str(caught.value)


def test_ctrl_c_ends_the_choice_with_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster, times = uneven(), links(2), []

    def interrupted(plan: Evaluation) -> float:
        times.append(plan)
        if len(times) == 2:
            signal.raise_signal(signal.SIGINT)
        return seconds_of(plan)

    monkeypatch.setattr(border_cuts, "seconds_of", interrupted)
    plan = planned(graph, cluster, tolerance=0.03)
    assert len({id(one) for one in times}) == 1  # the plan itself, and no other cut
    check_plan(plan, graph, cluster)


def test_the_fastest_stays_where_nothing_is_saved() -> None:
    for graph in (transformer([1.0] * 4, head=0.1), chain(6)):
        cluster = links(2)
        fastest = planned(graph, cluster)
        for tolerance in (0.01, 0.2):
            assert same(planned(graph, cluster, tolerance=tolerance), fastest)
    alone = planned(chain(3), links(1))
    assert same(planned(chain(3), links(1), tolerance=0.5), alone)


def test_a_simple_cut_that_is_faster_than_what_was_searched_is_the_fastest() -> None:
    graph, cluster = transformer([1.0] * 4, head=0.1), links(2)
    plan = planned(graph, cluster)
    assert plan.problem is not None
    worse = (0,) * 3 + (1,) * (len(plan.problem.items) - 3)
    found = Evaluation(plan.problem, worse)
    certificate = replace(plan.certificate, objective_seconds=found.seconds)
    _, judged, notes = preferred(found, certificate, graph, 0.01)
    assert judged.objective_seconds == pytest.approx(plan.certificate.objective_seconds)
    assert (judged.fastest_seconds, notes) == (None, ())


def test_updates_count_among_simple_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head takes longest wherever the blocks are; their updates are shorter apart."""
    monkeypatch.setattr(branch_and_bound, "PATIENCE", 0.2)  # the fastest is found at once
    graph, cluster = transformer([1.0] * 6, head=4.0), links(4)
    training = Training(step_moved=10.0, moving_seconds=2e-4)
    fastest = planned(graph, cluster, training=training)
    plan = planned(graph, cluster, training=training, tolerance=0.01)
    assert plan.forecast is not None
    assert fastest.forecast is not None
    assert plan.problem is not None
    before = divided_before(units(graph, plan.problem, 3.0), len(plan.problem.items))
    borders, steps = [p for p, count in enumerate(before[:-1]) if p and not count], []
    for cut in itertools.combinations(borders, 3):
        stage_of = [sum(b <= i for b in cut) for i in range(len(plan.problem.items))]
        candidate = replace(candidate_of(plan), stage_of=tuple(stage_of))
        other = candidate_plan(graph, plan.problem, candidate, plan.training, cluster)
        assert other.forecast is not None
        steps.append(other.forecast.step_seconds)
    assert plan.forecast.step_seconds <= min(steps) * (1 + 1e-6)
    assert plan.forecast.step_seconds < fastest.forecast.step_seconds
    (note,) = (one for one in plan.notes if "slower" in one)
    assert "shorter once updates count" in note
    check_plan(plan, graph, cluster)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_step_with_updates_is_the_simulators(data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.3]), min_size=2, max_size=4))
    graph, cluster = transformer(seconds), links(data.draw(st.integers(2, 4)), 1e3)
    training = Training(step_moved=10.0, moving_seconds=data.draw(st.sampled_from([0.0, 1e-4])))
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
    plan = planned(graph, cluster, schedule=schedule, training=training)
    update = partial(training.update_seconds, versions=False)
    found = step_seconds(placed(plan), update)
    assert plan.forecast is not None
    assert found == pytest.approx(plan.forecast.step_seconds, rel=1e-9)


def test_what_a_certificate_says_of_the_fastest_is_checked() -> None:
    graph, cluster = uneven(), links(2)
    plan = planned(graph, cluster, tolerance=0.3)
    for wrong, text in ((plan.certificate.bound_seconds / 2, "below the bound"),
                        (plan.certificate.objective_seconds * 2, "above objective")):  # fmt: skip
        broken = replace(plan, certificate=replace(plan.certificate, fastest_seconds=wrong))
        with pytest.raises(PlanError, match=text) as caught:
            check_plan(broken, graph, cluster)
        assert "fastest_seconds" in str(caught.value)


WISHES: tuple[Constraint, ...] = (
    Pin("h.1", 0), Together("h.0", "h.2"), Apart("h.0", "h.1"), CutBefore("h.2.mlp"),
    Pin("h.1.mlp", 1),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_a_preferred_plan_keeps_every_promise(data: st.DataObject) -> None:
    """It is allowed, nearly as fast, sends no more, divides no more; its bound is the search's."""
    seconds = data.draw(st.lists(st.sampled_from([0.5, 0.9, 1.0, 1.3]), min_size=3, max_size=6))
    graph = transformer(seconds, head=data.draw(st.sampled_from([0.1, 0.7])))
    count, tolerance = data.draw(st.integers(2, 4)), data.draw(st.sampled_from([0.01, 0.1, 0.5]))
    wishes = data.draw(st.lists(st.sampled_from(WISHES), max_size=2, unique=True))
    memory = data.draw(st.sampled_from([None, 20_000, 30_000]))
    cluster = links(count, data.draw(st.sampled_from([1e3, 1e5])), memory)
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "2bw"]))
    try:
        fastest = planned(graph, cluster, schedule=schedule, constraints=wishes)
    except PdcompileError:
        assume(False)
    plan, again = (
        planned(graph, cluster, schedule=schedule, constraints=wishes, tolerance=tolerance)
        for _ in range(2)
    )
    check_plan(plan, graph, cluster)
    kept(plan, fastest, tolerance, graph)
    assert [one.ops for one in again.stages] == [one.ops for one in plan.stages]


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.02, 0.3]))
def test_plans_with_replicas_and_recomputation_too(seed: int, tolerance: float) -> None:
    case = random_space(seed)
    try:
        fastest, plan = (explored(case, tolerance=one) for one in (0.0, tolerance))
    except PdcompileError:
        assume(False)
    graph = case.graph_at(fastest.training.num_microbatches)
    check_plan(plan, graph, case.cluster)
    kept(plan, fastest, tolerance, graph)


def kept(plan: Plan, fastest: Plan, tolerance: float, graph: OpGraph) -> None:
    """Promises of a preferred plan, beside `check`."""
    old, new = fastest.certificate, plan.certificate
    known = new.objective_seconds if new.fastest_seconds is None else new.fastest_seconds
    assert known <= old.objective_seconds * (1 + 1e-9)
    assert new.objective_seconds <= known * (1 + tolerance) * (1 + 1e-9)
    assert new.bound_seconds == pytest.approx(min(old.bound_seconds, new.objective_seconds))
    before, after = placed(fastest), placed(plan)
    assert not list(after.violations())
    assert after.problem == before.problem
    # Where the stages are the same, it is the search that took a slower plan (of new weights).
    if new.fastest_seconds is not None and after.stage_of != before.stage_of:
        assert sent_bytes(after) <= sent_bytes(before) or known < old.objective_seconds
        items = after.problem.items
        total = sum(item.forward_seconds + item.backward_seconds for item in items)
        parts = units(graph, after.problem, total / len(set(before.stage_of)))
        fewer = divided(parts, after.stage_of) < divided(parts, before.stage_of)
        assert fewer or sent_bytes(after) < sent_bytes(before)
    for stage in plan.stages:
        for rank in stage.ranks:
            limit = Cluster.from_toml(plan.cluster).devices[rank].memory_bytes
            if limit is not None and plan.forecast is not None:
                assert plan.forecast.ledgers[rank].total_bytes <= limit


def test_units_are_what_a_stage_could_hold() -> None:
    graph = transformer([1.0, 4.0])
    problem = planned(graph, links(2)).problem
    assert problem is not None
    assert len(units(graph, problem, math.inf)) == 6  # each block, its two halves; not their list
    few = units(graph, problem, 2.0)
    paths = [{problem.items[i].name.partition(":")[0] for i in unit} for unit in few]
    assert paths == [{"h.0", "h.0.attn", "h.0.mlp"}, {"h.0.attn"}, {"h.0.mlp"}, {"h.1.attn"}]
    # between attention and MLP a cut divides the block, inside of one of them both
    before = divided_before(few, len(problem.items))
    where = {item.name: i for i, item in enumerate(problem.items)}
    assert before[where["h.0.mlp:mlp_up_0"]] == 1
    assert before[where["h.0.mlp:mlp_down_0"]] == 2
    assert before[where["h.1.attn:attn_up_1"]] == 0
    assert before[-1] == 0


@given(st.data())
def test_divided_counts_what_it_counts_before_each_item(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 9))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] < p[1])
    parts = data.draw(st.lists(pairs, max_size=6))
    for cut in range(1, n):
        halves = [0] * cut + [1] * (n - cut)
        assert divided(parts, halves) == divided_before(parts, n)[cut]
