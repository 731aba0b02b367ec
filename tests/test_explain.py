"""Reasons for a plan: what binds, the neighbouring cuts, commands for looser limits, the verb."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError, PlanError
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.alternatives import (
    bottleneck,
    boundaries,
    critical,
    stage_uses,
)
from pdcompile.passes.planning.branch_and_bound import best_plan
from pdcompile.passes.planning.explain import explain
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.plan import Plan, Training
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import PartitionProblem, StageLimits
from pdcompile.problem.constraints import Pin
from pdcompile.problem.space import SearchSpace
from tests.helpers.alike import WORKLOAD, Call
from tests.helpers.graphs import chain, residual
from tests.helpers.planned import moved, planned
from tests.helpers.problems import measure, random_problem


def solved(seed: int) -> tuple[PartitionProblem, tuple[int, ...]]:
    """A random problem and its best assignment; hypothesis looks elsewhere when there is none."""
    problem = random_problem(seed)
    try:
        return problem, partition(problem)[0].stage_of
    except InfeasibleError:
        assume(False)
        raise


@given(st.integers(0, 10**6))
def test_what_binds_adds_up_to_the_objective(seed: int) -> None:
    problem, stage_of = solved(seed)
    uses = stage_uses(Evaluation(problem, stage_of))
    found = measure(problem, stage_of)
    assert [use.memory_bytes for use in uses] == list(found.memory_bytes)
    if problem.objective == "bottleneck":
        assert max(use.binding_seconds for use in uses) == pytest.approx(found.objective)
        decides = uses[bottleneck(uses)].binding_seconds
        assert decides == pytest.approx(found.objective)
    elif all(stage.full_duplex for stage in problem.stages):
        parts = [use.critical_seconds for use in uses]
        parts.append(critical(Evaluation(problem, stage_of))[1])
        assert math.fsum(parts) == pytest.approx(found.objective)


@given(st.integers(0, 10**6))
def test_what_crosses_boundaries_is_what_stages_send(seed: int) -> None:
    problem, stage_of = solved(seed)
    plan = Evaluation(problem, stage_of)
    crossing = [one for one in plan.messages if one.kind != "final"]
    for one in boundaries(plan):
        over = [m for m in crossing if min(m.source, m.target) <= one.boundary]
        over = [m for m in over if max(m.source, m.target) > one.boundary]
        forward = [m for m in over if m.kind == "forward"]
        assert one.bytes >= sum(m.bytes for m in forward)
        assert one.bytes == 0 or one.values > 0
        assert (one.values == 0) == (not forward)


def write(plan: Plan, folder: Path) -> str:
    path = folder / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw"])
def test_the_verb(schedule: str, tmp_path: Path, call: Call) -> None:
    cluster = replace(Cluster.parse("3"), notes=())
    plan = planned(residual(4), cluster, schedule=schedule, constraints=(Pin("wte", 0),))
    code, out, err = call("explain", write(replace(plan, command=("a.py:build",)), tmp_path))
    assert (code, err) == (0, "")
    for part in ("certificate: ", "bound by", " decides", "0 | 1", "1 | 2", "crosses",
                 "without one limit or option", "--bandwidth unlimited"):  # fmt: skip
        assert part in out, part
    assert ("critical path" in out) == (schedule != "2bw")
    assert max(len(line) for line in out.splitlines() if line[:10] != "pdcompile ") <= 100


def test_commands_tell_what_looser_limits_gain(tmp_path: Path, call: Call) -> None:
    """Limits of machines by `whatif`, constraints by planning again; each can be run as it is."""
    path, again = (str(tmp_path / f"plan{n}.json") for n in ("", ".again"))
    made = ("--cluster=2x2", "--memory=1MB", "--apart=0,2", "--recompute=on", "--costs=estimated")
    assert call("plan", WORKLOAD, *made, "-o", path)[0] == 0
    _, out, _ = call("explain", path)
    lines = (
        line for line in out.splitlines() if line.startswith(("pdcompile whatif", "pdcompile plan"))
    )
    *looser, pinned = found = [shlex.split(line, comments=True) for line in lines]
    assert looser == [
        ["pdcompile", "whatif", WORKLOAD, path, "--memory", "none"],
        ["pdcompile", "whatif", WORKLOAD, path, "--bandwidth", "unlimited", "--latency", "0s"],
        ["pdcompile", "whatif", WORKLOAD, path, "--recompute", "off"],
    ]
    kept = [word for word in Plan.load(path).command if not word.startswith("--apart")]
    assert pinned == ["pdcompile", "plan", *kept, "-o", again]
    for words in found:
        assert call(*words[1:])[0] == 0
    assert explain(planned(chain(3), Cluster.local(2))).commands == ()  # nobody knows the command


def test_the_verb_as_json(tmp_path: Path, call: Call) -> None:
    plan = planned(residual(4), Cluster.parse("2"))
    code, out, _ = call("explain", write(plan, tmp_path), "--json")
    document = json.loads(out)
    assert (code, document["status"]) == (0, "optimal")
    assert Plan.from_json(json.dumps(document["plan"])) == plan
    found = document["explanation"]
    assert found["objective_seconds"] == pytest.approx(plan.certificate.objective_seconds)
    assert [use["stage"] for use in found["stages"]] == [0, 1]
    assert found["edited"] is False
    assert found["boundaries"][0]["bytes"] > 0


def test_an_edited_plan_is_told(tmp_path: Path, call: Call) -> None:
    plan = planned(chain(6), Cluster.local(2))
    first = plan.stages[0].ops[-1]
    code, out, _ = call("explain", write(moved(plan, (first,), 1), tmp_path))
    assert code == 0
    assert "the plan was edited" in out


def test_a_plan_that_breaks_its_limits_is_told(tmp_path: Path, call: Call) -> None:
    plan = planned(chain(6), Cluster.local(2), constraints=(Pin("layers.2", 0),))
    edited = moved(plan, ("linear_2",), 1)
    code, out, _ = call("explain", write(edited, tmp_path))
    assert code == 0
    assert "not allowed as it is: 'layers.2' is on stage 1, pinned to 0" in out


def test_a_plan_that_breaks_the_flow_of_data_is_told(tmp_path: Path, call: Call) -> None:
    plan = planned(chain(6), Cluster.local(2))
    code, out, _ = call("explain", write(moved(plan, ("linear_0",), 1), tmp_path))
    assert code == 0
    assert "'layers.1' on stage 0 needs what 'layers.0' makes on stage 1" in out


def test_a_torn_item_is_told_and_the_tables_are_shown(tmp_path: Path, call: Call) -> None:
    plan = planned(chain(6), Cluster.local(2))
    assert plan.problem is not None
    first, second, *rest = plan.problem.items
    item = replace(first, ops=(*first.ops, *second.ops))
    problem = replace(plan.problem, items=(item, replace(second, ops=()), *rest))
    path = write(moved(replace(plan, problem=problem), second.ops, 1), tmp_path)
    code, out, _ = call("explain", path)
    assert code == 0
    assert "certificate: " in out
    assert "cannot explain what binds: op " in out
    assert f"the planner keeps them together as {item.name!r}" in " ".join(out.split())
    code, out, _ = call("explain", path, "--json")
    assert (code, json.loads(out)["explanation"]) == (0, None)
    assert item.name in json.loads(out)["missing"]


def test_a_plan_without_problem_says_how_to_get_one(tmp_path: Path, call: Call) -> None:
    plan = replace(planned(chain(6), Cluster.local(2)), problem=None)
    code, out, _ = call("explain", write(plan, tmp_path))
    assert code == 0
    assert "does not hold the problem" in out
    assert "pdcompile plan TARGET" in out
    with pytest.raises(PlanError):
        explain(plan)


SMALL = Cluster(
    (Device("cpu", 30_000),) * 4, (Level("near", 2, 2000.0), Level("far", 2, 500.0, 0.01))
)
SPACES = [  # what a search decided besides the cut, and the schedule
    ("1f1b", {"replicas": (2, 2), "stages": 2}),
    ("2bw", {"replicas": (2, 1), "stages": 2}),
    ("gpipe", {"replicas": (3, 1), "stages": 2}),
    ("zb-h1", {"recompute": (False, True), "recomputed": (True, False, True, False), "stages": 4}),
    ("2bw", {"recompute": (True,), "stages": 4, "in_order": True}),
    ("interleaved", {"placement": (0, 1, 2, 3) * 2, "stages": 8, "in_order": True}),
    ("zb-v", {"placement": (0, 1, 1, 0), "stages": 4, "in_order": True, "replicas": (2,) * 4}),
    ("stash", {"replicas": (4,), "stages": 1, "microbatches": (1,)}),
    ("1f1b", {"replicas": "any", "recompute": (False, True), "extra_warmup": (0, 1)}),
]


def searched(schedule: str, choice: dict[str, Any], cluster: Cluster = SMALL, **more: Any) -> Plan:
    graph = residual(4)
    space = SearchSpace(**{"schedules": (schedule,), "microbatches": (4,)} | choice)
    stages = space.stages or 4

    def problem(m: int) -> PartitionProblem:
        return coarsen(graph, (StageLimits(),) * stages, num_microbatches=m, **more)

    plan = best_plan(lambda _: graph, problem, cluster, space, Training(batch_size=16))
    check_plan(plan, graph, cluster)
    return Plan.from_json(plan.to_json())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "choice"), SPACES)
def test_replicas_recomputation_and_shared_ranks_are_explained(
    schedule: str, choice: dict[str, Any], tmp_path: Path, call: Call
) -> None:
    """Stages are explained with the plan's own objective."""
    plan = searched(schedule, choice)
    found = explain(plan)
    assert not found.edited
    assert found.broken == ()
    assert found.objective_seconds == pytest.approx(plan.certificate.objective_seconds)
    assert len(found.boundaries) == len(plan.stages) - 1
    code, out, err = call("explain", write(plan, tmp_path))
    assert (code, err) == (0, "")
    assert "decides" in out
    assert "cannot explain" not in out


@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", [["explain"], ["simulate"], ["diff"]])
def test_no_torch_is_needed(verb: list[str], tmp_path: Path) -> None:
    path = write(planned(chain(6), Cluster.local(2)), tmp_path)
    files = [path, path] if verb == ["diff"] else [path]
    program = (
        "import sys\nfrom pdcompile.cli import main\n"
        f"try:\n    main({[verb[0], *files, *verb[1:]]!r})\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "    sys.exit(str({'torch'} & set(sys.modules) or ''))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == ""
