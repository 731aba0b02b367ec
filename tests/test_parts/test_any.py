"""The planner chooses the number of parts of a stage, and along what they divide."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import pdcompile
from examples.gpt import GPT, loss_fn
from pdcompile import driver, layout_search
from pdcompile.batch.call import example_call
from pdcompile.cluster import Cluster, ring_seconds
from pdcompile.compiled import Compiled
from pdcompile.driver import build
from pdcompile.errors import ConfigError, InfeasibleError, LaunchError, NotFoundError
from pdcompile.layout_search import LayoutSearch, Planned
from pdcompile.options import Options
from pdcompile.options.layouts import SPLITS, layouts, named
from pdcompile.parts.shard import Split
from pdcompile.pass_runner import Listener, PassRunner
from pdcompile.passes.planning.search.trials import Sketched, Trials
from pdcompile.plan import Plan
from tests.helpers.launch import processes
from tests.test_parts.test_pipelines import COMMON, RANKS, agree

#: two hosts of two devices each, with fast links inside
TWO_HOSTS = """
[[devices]]
count = 4
kind = "a100-80"
{memory}
[[levels]]
name = "inside"
size = 2
bandwidth = "{inside}"
[[levels]]
name = "between"
size = 2
bandwidth = "{between}"
"""


def two_hosts(inside: str = "100 GB/s", memory: str = "", between: str = "12.5 GB/s") -> Cluster:
    return Cluster.from_toml(TWO_HOSTS.format(inside=inside, memory=memory, between=between))


def planned(cluster: Cluster, width: int = 512, **options: Any) -> Compiled:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(2, width, 4, 256)
        ids = torch.zeros(16, 256, dtype=torch.int64)
    given = {"loss_fn": loss_fn, "costs": "estimated", "cluster": cluster, "microbatches": 2,
             "verify": "off", "optimizer": torch.optim.SGD, "progress": False}  # fmt: skip
    return build(model, example_call(model, ids, ids), Options.given({**given, **options}))


def test_layouts_leave_their_time_to_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is impossible takes none, others what they took, to divide the model too; each has
    enough for a first plan."""
    clock = [0.0]
    monkeypatch.setattr(layout_search.time, "monotonic", lambda: clock[0])
    captured: Any = object()

    def limits(seconds: list[float], dividing: float = 0.0) -> Iterator[float | None]:
        given = [Options.given({"parts": 2, "time_limit": 60.0})] * len(seconds)
        search = LayoutSearch(True, Listener())
        for one, spent in zip(search.turns(given), seconds, strict=True):
            yield one.time_limit
            search.whole = search.whole or (captured if dividing else None)
            with search.trying(one):
                clock[0] += dividing
                if spent > 0:
                    search.check(1.0)
                    clock[0] += spent
                raise ConfigError("impossible")

    assert [*limits([0.0, 8.0, 8.0, 8.0])] == [30 / 4, 30 / 3, 22 / 2, 14]
    assert [*limits([8.0] * 4, dividing=2.0)] == [30 / 4, 20 / 3, 10 / 2, 3.0]
    assert [*limits([5.0] * 20)] == [3.0] * 20  # 100 s, of 30


def test_layouts_that_share_samples_are_verified_with_enough_of_them() -> None:
    """The capture that they share is of two samples, of which each of four parts has none."""
    model, ids = GPT(1, 16, 2, 8), torch.zeros(32, 8, dtype=torch.int64)
    options = Options.given({
        "loss_fn": loss_fn, "costs": "estimated", "cluster": Cluster.local(4), "parts": "any",
        "optimizer": torch.optim.SGD, "progress": False, "time_limit": 4.0,
    })  # fmt: skip
    layouts = replace(options, parts=1), replace(options, parts=4, split="samples")
    step, search = PassRunner(Listener()), LayoutSearch(True, Listener())
    flat = example_call(model, ids, ids)
    for one in layouts:
        found = driver.planned_layout(model, flat, one, 4, step, search)
    assert (found.whole.train.batch_size, found.captured.train.batch_size) == (2, 4)


def test_where_no_sketch_has_a_plan_one_layout_is_searched_for_its_error() -> None:
    given = [Options.given({"parts": 1}), *(Options.given({"parts": n}) for n in (2, 4))]
    search, seen = LayoutSearch(True, Listener()), []
    for one in search.turns(given):
        seen.append((one.parts, search.sketches))
        with search.trying(one):
            if one.parts == 1:
                raise ConfigError("impossible")
            if search.sketches:
                raise Sketched(1.0)
            raise NotFoundError("none was found that fits", where="memory")
    assert seen == [(1, True), (4, True), (2, True), (2, False)]
    with pytest.raises(NotFoundError, match="none was found"):
        search.fastest()


def test_where_no_layout_fits_the_first_one_is_planned_for_its_error() -> None:
    """A sketch does not look for the memory that is enough."""
    search, seen = LayoutSearch(True, Listener()), []
    for one in search.turns([Options.given({"parts": n}) for n in (1, 2)]):
        seen.append((one.parts, search.sketches))
        assert search.elsewhere == math.inf
        with search.trying(one):
            raise InfeasibleError("sketch" if search.sketches else "plan")
    assert seen == [(1, True), (2, True), (1, False)]
    with pytest.raises(InfeasibleError, match=r"^whole stages: plan; nor is there another layout"):
        search.fastest()


def test_the_plan_of_a_layout_begins_with_the_best_candidate_of_its_sketch() -> None:
    given = [Options.given({"parts": n}) for n in (1, 2, 4)]
    search, made = LayoutSearch(True, Listener()), []
    best: Any = {n: object() for n in (1, 2, 4)}
    for one in search.turns(given):
        with search.trying(one):
            if search.sketches:
                assert search.start is None
                raise Sketched(1.0, abs(one.parts - 2) + 3.0, best[one.parts])
            made.append((one.parts, search.start))
            raise NotFoundError("its plan does not fit", where="memory")
    assert made[0] == (2, best[2])


def sketched(found: dict[tuple[int, str, bool], float], seconds: float = 1.0) -> list[str]:
    """The sketches of layouts whose best plans take so many seconds, in order; by parts, split and
    whether they count as ideal."""
    clock, order = [0.0], list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_search.time, "monotonic", lambda: clock[0])
        search, known = LayoutSearch(True, Listener(), whole=cast(Any, object())), list[Options]()
        for parts, split, ideal in found:
            given = {"parts": parts, "split": split, "costs": "estimated", "time_limit": 60.0}
            known += [] if ideal else [Options.given(given)]
        for one in search.turns(known):
            if not search.sketches:
                break
            order.append(("ideal " if search.ideal else "") + named(one))
            with search.trying(one):
                search.check(1.0)
                clock[0] += seconds
                raise Sketched(2.0, found[one.parts, one.split, search.ideal])
    bounds = search._bounds  # of all of them, with or without a sketch
    assert {bounds[named(one)] for one in known if named(one) not in order} <= {1.0}
    assert len(bounds) == len(known) == search._passed + sum("ideal" not in o for o in order)
    return order


FOUND = {
    (1, "auto", False): 10.0,
    (2, "width", True): 7.0, (2, "width", False): 8.0, (2, "sequence", False): 8.5,
    (4, "width", True): 4.0, (4, "width", False): 6.8, (4, "sequence", False): 6.0,
    (8, "width", True): 3.0, (8, "width", False): 9.0, (8, "sequence", False): 8.0,
}  # fmt: skip


def test_layouts_are_not_sketched_once_even_ideal_parts_are_behind() -> None:
    """Those in most parts come first, the splits that were fastest before them first."""
    order = [
        "whole stages",
        *("ideal 8 parts by width", "8 parts by width", "8 parts by sequence"),
        *("ideal 4 parts by sequence", "4 parts by sequence", "4 parts by width"),
        "ideal 2 parts by sequence",
    ]
    found = FOUND | {(n, "sequence", True): FOUND[n, "width", True] for n in (2, 4, 8)}
    assert sketched(found) == order
    assert sketched(found | {(2, "sequence", True): 5.0})[-2:] == [
        "2 parts by sequence", "2 parts by width",
    ]  # fmt: skip
    assert sketched(found, seconds=12.0) == order[:4]  # more than three quarters of 60 s


def test_no_split_is_ideal() -> None:
    """All work of whole stages bounds the layouts that have no sketch."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model, ids = GPT(1, 64, 4, 32), torch.zeros(16, 32, dtype=torch.int64)
    flat, least = example_call(model, ids, ids), dict[str, float]()
    search = LayoutSearch(True, Listener(), best_seconds=0.0)  # all of them are slower
    given = {"loss_fn": loss_fn, "costs": "estimated", "microbatches": 2, "replicas": "any",
             "cluster": two_hosts(), "optimizer": torch.optim.SGD, "progress": False}  # fmt: skip
    for one in layouts(Options.given({**given, "parts": "any"}), None):
        for search.ideal in (True, False):
            with pytest.raises(Sketched):
                driver.planned_layout(model, flat, one, None, PassRunner(Listener()), search)
            least[f"{named(one)} {search.ideal}"] = search._least
    whole = least["whole stages False"]
    assert all(seconds >= whole * (1 - 1e-9) for seconds in least.values()), least
    ideal = [seconds for name, seconds in least.items() if name.endswith("True")]
    assert ideal == pytest.approx([whole] * len(ideal))


@cache
def whole_stages() -> Plan:
    return planned(two_hosts(), replicas=4).plan


@pytest.mark.parametrize(("times", "rows"), [(2.0, ["2 parts by width, at least"]), (0.9, [])])
def test_a_layout_that_was_not_tried_is_told_by_its_bound(times: float, rows: list[str]) -> None:
    """None is told that might be faster."""
    plan = whole_stages()
    search, seconds = LayoutSearch(True, Listener()), plan.certificate.objective_seconds
    search.add(Planned(Options(), *cast(Any, (None, None, None, None, plan))))
    search._bounded(Options.given({"parts": 2, "split": "width"}), times * seconds)
    found = [one for one in search.fastest().plan.alternatives if one.choice == "parts"]
    assert [(one.own, one.value) for one in found] == [("whole stages", row) for row in rows]
    assert all(one.step_seconds == pytest.approx(times * seconds) for one in found)


def test_layouts_stay_inside_the_innermost_links() -> None:
    given = Options.given({"parts": "any", "cluster": two_hosts(), "replicas": "any"})
    splits = [named(one) for one in layouts(given, None, experts=True)]
    assert splits == [
        "whole stages",
        *(f"2 parts by {split}" for split in (*SPLITS, "experts", "experts+samples")),
    ]  # fmt: skip
    assert [named(one) for one in layouts(given, None)] == splits[:-2]
    given = Options.given({"parts": "any", "split": "context", "cluster": two_hosts()})
    assert [named(one) for one in layouts(given, None)] == ["whole stages", "2 parts by context"]
    assert [named(one) for one in layouts(Options.given({"parts": "any"}), None)] == [
        "whole stages"
    ]
    two = Options.given({"parts": "any", "stages": 2, "cluster": two_hosts()})
    assert {one.parts for one in layouts(two, 4)} == {2}
    with pytest.raises((ConfigError, LaunchError)):
        layouts(Options.given({"parts": "any", "stages": 3, "cluster": two_hosts()}), 4)


@pytest.mark.slow  # test_chosen counts out smaller problems
def test_the_choice_is_the_fastest_of_all_that_can_be_named() -> None:
    cluster = two_hosts()
    chosen = planned(cluster, parts="any", replicas="any", time_limit=300.0).plan
    tried = {}
    for one in layouts(
        Options.given({"parts": "any", "cluster": cluster, "replicas": "any"}), None
    ):
        given = {"parts": one.parts, "split": one.split} if one.parts != 1 else {}
        plan = planned(cluster, replicas="any", **given).plan
        assert plan.forecast is not None
        tried[named(one)] = plan.forecast.step_seconds
        assert chosen.certificate.bound_seconds <= plan.certificate.objective_seconds * 1.0001
    assert chosen.forecast is not None
    assert chosen.forecast.step_seconds <= min(tried.values()) * 1.01, tried
    assert "layouts of parts, alike on all stages" in chosen.certificate.scope
    assert any(row.choice == "parts" for row in chosen.alternatives)


TIGHT = {"cluster": two_hosts(memory='memory = "150 MB"'), "width": 1024, "microbatches": 8}


@cache
def divided() -> tuple[Plan, int]:
    """The plan of any parts where stages do not fit whole, and how often the model was captured."""
    captures: list[int] = []
    own = driver.capture
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "capture", lambda *a, **k: captures.append(1) or own(*a, **k))
        return planned(parts="any", stages=2, **TIGHT).plan, len(captures)


def test_memory_and_links_decide() -> None:
    """Slow links inside of a host make stages whole; weights that fit nowhere else divide."""
    whole = planned(two_hosts("1 GB/s"), parts="any", stages=2, replicas=2).plan
    assert whole.training.parts == 1
    with pytest.raises(InfeasibleError):
        planned(stages=2, replicas=2, **TIGHT)
    training = divided()[0].training
    assert (training.parts, training.split) == (2, "width+sequence")


@pytest.mark.parametrize("split", [
    "samples", pytest.param("sequence", marks=pytest.mark.slow), "weights+samples",
])  # fmt: skip
def test_an_update_waits_until_parts_have_summed_what_each_has_whole(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of weights that are whole on all parts are summed by these first, as by replicas,
    in plans and where layouts are compared; else samples would be shared for nothing."""
    given = {"parts": 2, "split": split, "stages": 2, "replicas": 1}
    fast, slow = (planned(two_hosts(inside), **given) for inside in ("100 GB/s", "1 GB/s"))
    assert slow.plan.machines.parts is not None
    for compiled in fast, slow:
        plan, graph, link = compiled.plan, compiled.capture.train, compiled.plan.machines.parts
        assert link is not None
        assert graph.summed == compiled.capture.division.summed
        for s, stage in enumerate(plan.stages):
            copied = {one.fqn for one in plan.tied if s in one.stages[1:]}
            sizes = [
                graph.tensors[fqn].bytes for fqn in graph.summed.intersection(stage.parameters)
                if fqn not in copied
            ]  # fmt: skip
            owned = stage.trainable_bytes - sum(graph.tensors[fqn].bytes for fqn in copied)
            own = plan.training.update_seconds(owned, versions=False)
            summing = sum(ring_seconds(link, size, 2) for size in sizes)
            assert stage.update_seconds == pytest.approx(own + summing)
            whole = split != "weights+samples"  # of which only vectors are whole
            assert (sum(sizes) > 0.9 * owned) == whole
    found = list[float]()
    told = Trials.updates
    monkeypatch.setattr(Trials, "updates", lambda *a: found.append(told(*a)) or found[-1])
    options: dict[str, Any] = {"parts": 2, "split": split, "replicas": "any", "cut_tolerance": 0}
    plan = planned(two_hosts("1 GB/s"), **options).plan  # without another cut than was tried
    assert any(one == pytest.approx(max(s.update_seconds for s in plan.stages)) for one in found)


def test_to_share_samples_is_not_for_nothing() -> None:
    """Two parts of each sample on a slow link, beside two replicas there."""
    slow = {"cluster": two_hosts("2 GB/s"), "stages": 2}
    shared = planned(**slow, parts=2, split="samples").plan.forecast
    replicas = planned(**slow, replicas=2).plan.forecast
    assert shared is not None
    assert replicas is not None
    assert shared.step_seconds > 0.9 * replicas.step_seconds


@pytest.mark.slow
def test_parts_inside_of_hosts_and_by_memory() -> None:
    """Parts of fast links, which across hosts would take half as long again; along the sequence
    until memory is short, where weights are divided."""
    given = {"stages": 2, "microbatches": 16, "autocast": torch.bfloat16, "time_limit": 300.0}
    near = planned(two_hosts(), width=1536, parts="any", **given).plan
    assert (near.training.parts, near.training.split) == (2, "width+sequence")
    assert [near.processes_of(rank) for rank in range(2)] == [(0, 1), (2, 3)]
    turned = two_hosts("12.5 GB/s", between="100 GB/s")
    far = planned(turned, width=1536, parts=2, split="width+sequence", **given).plan
    assert near.forecast is not None
    assert far.forecast is not None
    assert far.forecast.step_seconds > 1.5 * near.forecast.step_seconds

    free = planned(two_hosts(), width=1024, parts="any", **given).plan
    held = max(one.total_bytes for one in free.ledgers)
    assert (free.training.parts, free.training.split) == (2, "sequence")
    short = two_hosts(memory=f'memory = "{held * 3 // 4} B"')
    kept = planned(short, width=1024, parts="any", **given).plan.training
    assert (kept.parts, kept.split) == (2, "width+sequence")


@pytest.mark.slow
def test_on_four_ranks_it_trains_as_plain_pytorch(tmp_path: Path) -> None:
    searched = {"parts": "any", "time_limit": None}
    settings = [{**searched, "replicas": "any"}, {**searched, "stages": 2}]
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(settings)), len(settings))


def test_in_a_process_alone_stages_are_whole() -> None:
    torch.manual_seed(0)
    ids = torch.randint(256, (8, 16))
    pipe = pdcompile.compile(
        GPT(2, 64, 4, 16), ids, example_target=ids, loss_fn=loss_fn, costs="estimated", parts="any",
        verify="off",
    )  # fmt: skip
    assert pipe.plan.training.parts == 1


def test_a_model_is_captured_once_and_a_given_plan_is_not_searched() -> None:
    plan, captures = divided()
    assert captures == 1
    again = planned(parts="any", plan=plan, **TIGHT).plan
    assert again.stages == plan.stages
