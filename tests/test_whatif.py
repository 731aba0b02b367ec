"""Other limits: the answer is that of planning anew, and every wrong option is named."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import ConfigError, InfeasibleError, PlanError, ScheduleError
from pdcompile.passes.partition import partition
from pdcompile.passes.planning.graph_free import ledgers_of, straight_plan_of
from pdcompile.passes.planning.solved_problem import scaled
from pdcompile.passes.planning.whatif import changed_problem
from pdcompile.passes.planning.whatif import whatif as asked
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan, Training
from pdcompile.plan.diff import diff
from pdcompile.plan.embedded import assignment
from pdcompile.problem.constraints import Forbid, Pin
from pdcompile.problem.scenario import Scenario, changed_cluster
from tests.helpers.alike import WORKLOAD, Call
from tests.helpers.graphs import chain, residual
from tests.helpers.planned import moved, planned


def whatif(plan: Plan, change: Scenario) -> Plan:
    return asked(plan, change)[1]


def held(plan: Plan) -> list[int]:
    """Bytes of each rank by the ledgers."""
    assert plan.forecast is not None
    return [ledger.total_bytes for ledger in plan.forecast.ledgers]


CLOSE = 0.1  # ledgers without a graph were up to 7 % off at stages of real plans
HOSTS = Cluster((Device(),) * 4, (Level("nvlink", 2, 1e3), Level("ethernet", 2, 100.0, 1e-3)))


def write(plan: Plan, folder: Path) -> str:
    path = folder / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    return str(path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw"])
@pytest.mark.parametrize(
    ("change", "cluster", "training"),
    [
        (Scenario(), HOSTS, {}),
        (Scenario(devices="1x3"), replace(HOSTS, devices=(Device(),) * 3, levels=(
            replace(HOSTS.levels[0], size=3), replace(HOSTS.levels[1], size=1))), {}),
        (Scenario(devices="2"), replace(HOSTS, devices=(Device(),) * 2,
            levels=(HOSTS.levels[0], replace(HOSTS.levels[1], size=1))), {}),
        (Scenario(bandwidth=["30 B/s"]), replace(HOSTS, levels=tuple(
            replace(level, bytes_per_second=30.0) for level in HOSTS.levels)), {}),
        (Scenario(bandwidth=["inter=20B/s"], latency=["nvlink=0.5s"]), replace(HOSTS, levels=(
            replace(HOSTS.levels[0], latency_seconds=0.5),
            replace(HOSTS.levels[1], bytes_per_second=20.0))), {}),
        (Scenario(speed=["2", "1=0.5"]), replace(HOSTS, devices=(
            Device(speed=2.0), Device(speed=0.5), Device(speed=2.0), Device(speed=2.0))), {}),
        (Scenario(memory="1 MB"),
         replace(HOSTS, devices=(Device(memory_bytes=10**6),) * 4), {}),
        (Scenario(schedule="gpipe"), HOSTS, {"schedule": "gpipe"}),
        (Scenario(schedule="2bw"), HOSTS, {"schedule": "2bw"}),
        (Scenario(schedule="vsync", batch_size=4), HOSTS,
         {"schedule": "vsync", "microbatches": 1, "batch_size": 4}),
        (Scenario(microbatches=8, batch_size=32), HOSTS, {"microbatches": 8, "batch_size": 32}),
    ],
)  # fmt: skip
def test_it_is_what_planning_anew_gives(
    schedule: str, change: Scenario, cluster: Cluster, training: dict[str, Any]
) -> None:
    graph = residual(2)
    found = whatif(planned(graph, HOSTS, schedule=schedule), change)
    anew = planned(graph, cluster, **({"schedule": schedule} | training))
    assert found.cluster == cluster.to_toml()
    assert found.problem == anew.problem
    objective = anew.certificate.objective_seconds
    assert found.certificate.objective_seconds == pytest.approx(objective, rel=1e-6)
    assert found.certificate.status == anew.certificate.status
    assert found.training == anew.training


@pytest.mark.slow
@given(
    st.sampled_from(("1f1b", "2bw")),
    st.sampled_from((10.0, 100.0, math.inf)),
    st.sampled_from((0.0, 0.3)),
    st.integers(1, 3),
)
@settings(max_examples=8)
def test_any_links_are_what_planning_anew_gives(
    schedule: str, rate: float, latency: float, hosts: int
) -> None:
    plan = planned(residual(2), HOSTS, schedule=schedule)
    change = Scenario(
        devices=f"{hosts}x2",
        bandwidth=["unlimited" if rate == math.inf else f"{rate} B/s"],
        latency=[f"ethernet={latency} s"],
    )
    found = whatif(plan, change)
    anew = planned(residual(2), Cluster.from_toml(found.cluster), schedule=schedule)
    assert found.problem == anew.problem
    objective = anew.certificate.objective_seconds
    assert found.certificate.objective_seconds == pytest.approx(objective, rel=1e-6)


def test_nothing_changed_is_the_plan() -> None:
    plan = planned(residual(4), HOSTS)
    before, found, _ = asked(plan, Scenario())
    for one in (before, found):
        assert one.certificate.objective_seconds == plan.certificate.objective_seconds
        assert assignment(one) == assignment(plan)
        assert held(one) == held(plan)
    assert not diff(before, found).moved


def test_a_plan_that_just_fits_still_fits() -> None:
    """Its ledgers are known; the sketched ones of other cuts may be a little off."""
    free = planned(residual(4), HOSTS)
    most = max(held(free))
    found = whatif(free, Scenario(memory=f"{most} B"))
    objective = free.certificate.objective_seconds
    assert found.certificate.objective_seconds == objective
    less = whatif(free, Scenario(memory=f"{most - 1} B"))
    assert less.certificate.objective_seconds > objective
    assert max(held(less)) <= most - 1


def test_the_ledger_without_a_graph() -> None:
    """What does not need the graph is the plan's own; so is the ledger without a clock."""
    for schedule in ("1f1b", "gpipe", "2bw"):
        plan = planned(residual(4), HOSTS, schedule=schedule)
        assert plan.problem is not None
        assert plan.forecast is not None
        drawn = straight_plan_of(
            plan.problem, assignment(plan), plan.certificate, plan.training, HOSTS
        )
        assert drawn.forecast is not None
        assert ledgers_of(plan) == plan.forecast.ledgers
        assert simulate(drawn).forecast.ledgers == drawn.forecast.ledgers
        for ours, theirs in zip(drawn.forecast.ledgers, plan.forecast.ledgers, strict=True):
            assert ours.weights_bytes == theirs.weights_bytes
            assert ours.optimizer_bytes == theirs.optimizer_bytes
            # the graph knows how many of them a first backward has made when it needs the most
            assert ours.gradients_bytes >= theirs.gradients_bytes
        seconds = simulate(drawn).forecast.step_seconds
        assert 0.98 < seconds / drawn.forecast.step_seconds < 1.02


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "change",
    [
        Scenario(schedule="gpipe"),
        Scenario(schedule="2bw"),
        Scenario(microbatches=8, batch_size=32),
        Scenario(bandwidth=["1GB/s"]),
    ],
)
def test_memory_of_the_same_cut_is_what_planning_anew_gives(change: Scenario) -> None:
    pinned = (Pin("layers.0", 0), Pin("layers.3", 0), Pin("layers.4", 1), Pin("layers.7", 1))
    given = {"constraints": pinned, "training": Training(keeps_outputs=True)}
    plan = planned(chain(8), Cluster.local(2), **given)
    found = whatif(plan, change)
    for option in ("schedule", "microbatches", "batch_size"):
        if (value := getattr(change, option)) is not None:
            given[option] = value
    anew = planned(chain(8), Cluster.local(2), **given)
    assert anew.forecast is not None
    assert any(ledger.outputs_bytes for ledger in anew.forecast.ledgers)
    assert held(found) == held(anew)


def test_microbatches_of_another_size_are_scaled_and_said_so() -> None:
    plan = planned(residual(4), HOSTS, microbatches=4, batch_size=16)
    _, found, notes = asked(plan, Scenario(microbatches=8))
    assert "microbatches of 2 samples, and the costs are of 4" in notes[0]
    assert plan.problem is not None
    assert found.problem is not None
    before, after = plan.problem.items[1], found.problem.items[1]
    assert after.forward_seconds == before.forward_seconds / 2
    assert (after.parameter_bytes, after.saved_bytes) == (
        before.parameter_bytes,
        math.ceil(before.saved_bytes / 2),
    )
    assert scaled(plan.problem, 1.0) == plan.problem


def test_pins_follow_the_last_stage() -> None:
    plan = planned(chain(8), Cluster.local(4), constraints=(Pin("layers.0", 0),))
    assert plan.problem is not None
    loss = len(plan.problem.items) - 1
    found = whatif(plan, Scenario(devices="2")).problem
    assert found is not None
    assert dict(found.pins) == {0: 0, loss: 1}
    assert found.wishes[-1].pins == ((loss, 1),)
    inside = planned(chain(8), Cluster.local(4), constraints=(Pin("layers.4", 2),))
    with pytest.raises(ConfigError, match="pinned to stage 2, and there would be 2 stages"):
        whatif(inside, Scenario(devices="2"))
    not_there = planned(chain(8), Cluster.local(4), constraints=(Forbid("layers.4", 2),))
    found = whatif(not_there, Scenario(devices="2")).problem
    assert found is not None
    assert found.forbidden == ()


@pytest.mark.slow
def test_what_does_not_fit_is_infeasible() -> None:
    plan = planned(residual(4), HOSTS)
    with pytest.raises(InfeasibleError):
        whatif(plan, Scenario(memory="100 B"))
    with pytest.raises(InfeasibleError, match="stages"):
        whatif(plan, Scenario(devices="10x10"))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (Scenario(bandwidth=["eth=1B/s"]), "--bandwidth", "no level is named 'eth'"),
        (Scenario(latency=["eth=1s"]), "--latency", "no level is named 'eth'"),
        (
            Scenario(bandwidth=["inter=1B/s", "ethernet=2B/s"]),
            "--bandwidth",
            "'ethernet=2B/s' is given twice for level 'ethernet'",
        ),
        (Scenario(bandwidth=["1B/s", "2B/s"]), "--bandwidth", "given twice for all"),
        (Scenario(speed=["9=1"]), "--speed", "no device is named '9'"),
        (Scenario(speed=["inter=1"]), "--speed", "no device is named 'inter'"),
        (Scenario(speed=["1=1", "1=2"]), "--speed", "given twice for device '1'"),
        (Scenario(speed=["1", "inf"]), "--speed", "given twice for all"),
        (Scenario(speed=["inf"]), "--speed", "'inf' is not a number above 0"),
        (Scenario(devices="300x300"), "--devices", "90000 devices"),
        (Scenario(devices="2x2x2x2"), "--devices", "4 levels, and the plan's cluster 'nvlink'"),
        (Scenario(schedule="3bw"), "--schedule", "schedule '3bw' is not one of"),
        (Scenario(microbatches=17), "--microbatches", "17 microbatches of a minibatch of 16"),
    ],
)
def test_wrong_changes_are_named(change: Scenario, where: str, message: str) -> None:
    with pytest.raises((ConfigError, ScheduleError)) as caught:
        whatif(planned(residual(3), HOSTS), change)
    assert message in caught.value.message
    assert caught.value.where == where
    assert caught.value.remedy
    if "level is named" in message:
        assert "names are 'nvlink', 'ethernet', intra (innermost)" in caught.value.remedy


def test_unlike_devices_are_not_multiplied() -> None:
    cluster = replace(HOSTS, devices=(Device(speed=2.0), *HOSTS.devices[1:]))
    with pytest.raises(ConfigError, match="unlike"):
        changed_cluster(cluster, Scenario(devices="4x2"))
    assert changed_cluster(cluster, Scenario(devices="1x4"))[0].devices == cluster.devices


def test_a_new_level_is_assumed_and_said_so() -> None:
    one = Cluster((Device(),) * 2, (Level("network", 2, 1e9),))
    cluster, notes = changed_cluster(one, Scenario(devices="3x2"))
    assert [level.name for level in cluster.levels] == ["network", "network'"]
    assert cluster.levels[1].bytes_per_second == 12.5e9
    assert "assumed 12.5 GB/s" in notes[0]
    cluster, notes = changed_cluster(one, Scenario(devices="3x2", bandwidth=["inter=7B/s"]))
    assert (cluster.levels[1].bytes_per_second, notes) == (7.0, ())
    assert cluster.levels[0] == one.levels[0]


def test_levels_of_one_name_go_by_alias() -> None:
    twins = Cluster((Device(),) * 4, (Level("link", 2, 1.0), Level("link", 2, 2.0)))
    with pytest.raises(ConfigError, match="several levels are named 'link'"):
        changed_cluster(twins, Scenario(bandwidth=["link=5B/s"]))
    changed, _ = changed_cluster(twins, Scenario(bandwidth=["intra=5B/s", "inter=6B/s"]))
    assert [level.bytes_per_second for level in changed.levels] == [5.0, 6.0]


@pytest.mark.parametrize("text", ["", "4x", "x8", "4x8x", "four", "-2", "2.5", "0", "9999999x1"])
def test_devices_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--devices"):
        changed_cluster(HOSTS, Scenario(devices=text))


def test_the_warm_up_stays_as_deep_as_it_was() -> None:
    plan = planned(chain(8), Cluster.local(3), microbatches=16)
    assert plan.problem is not None
    deep = replace(
        plan,
        training=replace(plan.training, warmup=(4, 2, 0)),
        problem=replace(plan.problem, memory=replace(plan.problem.memory, in_flight=(5, 3, 1))),
    )
    problem, training, _, _ = changed_problem(deep, Scenario(devices="4"), Cluster.local(3))
    assert (training.warmup, problem.memory.in_flight) == ((6, 4, 2, 0), (7, 5, 3, 1))


def test_what_times_come_from_is_said_first() -> None:
    plan = replace(planned(chain(4), Cluster.local(2)), costs="costs measured on a CPU")
    assert asked(plan, Scenario())[2][0] == (
        "times come from costs measured on a CPU, as those of the plan"
    )


def test_replicas_and_recomputation_are_refused() -> None:
    plan = planned(chain(6), Cluster.local(2))
    again = replace(plan, stages=(replace(plan.stages[0], recompute=True), plan.stages[1]))
    with pytest.raises(PlanError, match="stage 0 recomputes"):
        whatif(again, Scenario())
    twice = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], replicas=2)))
    with pytest.raises(PlanError, match="stage 1 is replicated"):
        whatif(twice, Scenario())
    shared = replace(plan, stages=tuple(replace(stage, ranks=(0,)) for stage in plan.stages))
    with pytest.raises(PlanError, match="stage 0 shares rank 0 with another one") as caught:
        whatif(shared, Scenario())
    for answered in ("pdcompile explain", "faster links", "more memory", "pdcompile diff"):
        assert answered in str(caught.value.remedy)


def test_stages_on_other_ranks_are_not_put_on_other_machines() -> None:
    plan = planned(chain(6), Cluster.local(2))
    stages = tuple(replace(stage, ranks=(1 - stage.index,)) for stage in plan.stages)
    odd = replace(plan, stages=stages)
    assert whatif(odd, Scenario(microbatches=8)).certificate.objective_seconds > 0
    with pytest.raises(PlanError, match="stage 0 runs on rank 1"):
        whatif(odd, Scenario(bandwidth=["1GB/s"]))


def test_the_verb(tmp_path: Path, call: Call) -> None:
    path = write(planned(residual(4), HOSTS), tmp_path)
    code, out, err = call(
        "whatif", path, "--memory", "24GB", "--bandwidth", "inter=25 Gbit/s", "--bandwidth",
        "nvlink=unlimited", "--latency", "5us", "--devices", "3x2", "--speed", "2",
    )  # fmt: skip
    assert (code, err) == (0, "")
    for part in ("b: what if", "3, 2", "24.0 GB", "nvlink.bytes per second", "unlimited",
                 "3.12 GB/s", "5.00 us", "step", "samples per second", "objective", "rank 5",
                 "costs are those of the plan",
                 "--schedule=1f1b --microbatches=4 --cluster=changed.toml",
                 "--write-cluster changed.toml"):  # fmt: skip
        assert part in out, part
    assert not re.search(r"(?m)^forecast ", out)  # no step is simulated
    assert max(len(line) for line in out.splitlines() if "to get this plan" not in line) <= 100


def test_the_verb_as_json_equals_partition(tmp_path: Path, call: Call) -> None:
    plan = planned(residual(4), HOSTS)
    written = tmp_path / "changed.toml"
    code, out, _ = call(
        "whatif", write(plan, tmp_path), "--bandwidth", "20B/s", "--json",
        "--write-cluster", str(written),
    )  # fmt: skip
    document = json.loads(out)
    assert (code, document["status"]) == (0, "optimal")
    cluster = Cluster.load(str(written))
    assert document["after"]["cluster"] == cluster.to_toml()
    assert [level.bytes_per_second for level in cluster.levels] == [20.0, 20.0]
    anew = planned(residual(4), cluster)
    assert anew.problem is not None
    best, _ = partition(anew.problem)
    certificate = document["after"]["certificate"]
    assert certificate["objective_seconds"] == pytest.approx(best.objective)
    assert certificate["bound_seconds"] == pytest.approx(best.objective, rel=1e-5)
    assert [stage["ops"] for stage in document["after"]["stages"]] == [
        list(stage.ops) for stage in anew.stages
    ]
    objective = plan.certificate.objective_seconds
    assert document["before"]["certificate"]["objective_seconds"] == objective
    rates = {"nvlink.bytes_per_second", "ethernet.bytes_per_second"}
    assert {one["what"] for one in document["differences"]["cluster"]} == rates
    assert f"--cluster={written}" in document["command"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--memory", "24"), 2, "with a unit"),
        (("--memory", "many GB"), 2, "with a unit"),
        (("--bandwidth", "12.5GB"), 2, "with a unit"),
        (("--bandwidth", "inter="), 2, "is not NAME=NUMBER"),
        (("--bandwidth", "=5GB/s"), 2, "is not NAME=NUMBER"),
        (("--bandwidth", "0B/s"), 2, "is not a number above 0"),
        (("--latency", "5 parsecs"), 2, "with a unit"),
        (("--speed", "fast"), 2, "not a number above 0"),
        (("--speed", "-1"), 2, "not a number above 0"),
        (("--devices", "2 hosts"), 2, "is not HOSTSxDEVICES"),
        (("--memory", "1kB"), 3, "infeasible"),
        (("--devices", "100"), 3, "infeasible"),
    ],
)
def test_wrong_options_end_with_a_code_and_a_remedy(
    options: tuple[str, ...], code: int, message: str, tmp_path: Path, call: Call
) -> None:
    path = write(planned(residual(3), HOSTS), tmp_path)
    found, out, err = call("whatif", path, *options)
    assert (found, out) == (code, "")
    assert message in err
    assert "remedy: " in err
    found, out, _ = call("whatif", path, *options, "--json")
    assert found == code
    assert json.loads(out)["status"] == ("infeasible" if code == 3 else "error")


@pytest.mark.parametrize("option", ["--microbatches", "--batch-size"])
def test_counts_below_one_are_refused(option: str, tmp_path: Path, call: Call) -> None:
    code, _, err = call("whatif", str(tmp_path / "plan.json"), option, "0")
    assert (code, option in err) == (2, True)


def test_plans_that_cannot_be_asked(tmp_path: Path, call: Call) -> None:
    plan = planned(chain(6), Cluster.local(2))
    code, _, err = call("whatif", write(replace(plan, problem=None), tmp_path), "--memory", "1GB")
    assert (code, "does not hold the problem" in err) == (2, True)
    code, _, err = call("whatif", write(moved(plan, ("linear_0",), 1), tmp_path))
    assert (code, "needs what 'layers.0' makes" in err) == (2, True)
    code, _, err = call("whatif", str(tmp_path / "none.json"))
    assert (code, "No such file" in err) == (2, True)


def test_an_edited_plan_is_compared_as_it_is() -> None:
    plan = planned(chain(6), Cluster.local(2))
    edited = moved(plan, (plan.stages[0].ops[-1],), 1)
    before, found, _ = asked(edited, Scenario())
    assert before.certificate.objective_seconds > plan.certificate.objective_seconds
    assert before.certificate.status == "feasible"
    assert found.certificate.objective_seconds == plan.certificate.objective_seconds


def test_the_command_of_a_plan_made_in_python_has_what_the_plan_tells(
    tmp_path: Path, call: Call
) -> None:
    made = planned(chain(8), Cluster.local(2), constraints=(Pin("layers.0", 0),))
    _, out, _ = call("whatif", write(made, tmp_path), "--memory", "1GB", "--batch-size", "32")
    (line,) = [line for line in out.splitlines() if line.startswith("to get this plan")]
    for part in (" TARGET ", "--pin=layers.0=0", "--cluster=changed.toml", ".whatif.json"):
        assert part in line
    said = " ".join(out.split())
    assert "note: the plan does not tell the command that made it" in said
    assert "note: TARGET has to give minibatches of 32 samples" in said


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "change"),
    [
        (("--cluster", "1x2", "--cut-at", "1,3", "--cut-at", "5"), ("--bandwidth", "1MB/s")),
        (("--cluster", "1x2", "--pin", "0=0", "--together", "2,4"), ("--schedule", "gpipe")),
        (("--cluster", "1x2", "--memory", "1MB", "--optimizer", "SGD", "--lr", "0.1"),
         ("--memory", "300 kB")),
        (("--cluster", "1x2", "--stages", "2", "--warmup", "1", "--microbatches", "8"),
         ("--speed", "0=2")),
        (("--cluster", "1x2", "--pin", "4=1", "--forbid", "6=0", "--apart", "0,2"),
         ("--devices", "3")),
        (("--cluster", "2x2:h100", "--outputs", "everything", "--seed", "3", "--cut-before", "4"),
         ("--schedule", "2bw")),
        (("--cluster", "local:4", "--max-stages", "3", "--autocast", "bfloat16",
          "--max-grad-norm", "0.1", "--loss-reduction", "sum"), ("--latency", "5us")),
        (("--cluster", "1x2:a100", "--microbatches", "8"), ("--devices", "3")),  # another cut
    ],
    ids=[
        "cut-at", "together", "memory", "warm-up", "devices", "machine", "max-stages", "gpus",
    ],
)  # fmt: skip
def test_the_command_makes_the_plan_that_was_announced(
    options: tuple[str, ...], change: tuple[str, ...], tmp_path: Path, call: Call
) -> None:
    """All that was said of the first plan counts, and that plan stays as it is."""
    first, written = tmp_path / "first plan.json", tmp_path / "changed.toml"
    options += ("--costs", "estimated")
    code, _, err = call("plan", WORKLOAD, *options, "-o", str(first))
    assert code == 0, err
    before = first.read_bytes()
    asks = ("whatif", str(first), *change, "--json", "--write-cluster", str(written))
    code, out, err = call(*asks)
    assert code == 0, err
    announced = json.loads(out)
    program, *words = shlex.split(announced["command"])
    code, _, err = call(*words)
    assert (program, code) == ("pdcompile", 0), err
    assert first.read_bytes() == before
    found = Plan.load(first.with_name("first plan.whatif.json"))
    after = announced["after"]
    assert [list(stage.ops) for stage in found.stages] == [
        stage["ops"] for stage in after["stages"]
    ]
    seconds = found.certificate.objective_seconds
    assert seconds == pytest.approx(after["certificate"]["objective_seconds"])
    said = [sum(one.values()) for one in after["forecast"]["ledgers"]]
    assert said == pytest.approx(held(found), rel=CLOSE)
    same = Cluster.from_toml(found.cluster), Cluster.from_toml(after["cluster"])
    assert same[0].devices == same[1].devices
