"""Whatif: planning again with the options of a plan, but for those that are said."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pdcompile.cli import main
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import ConfigError
from pdcompile.plan import Plan
from pdcompile.plan.diff import diff
from pdcompile.problem.scenario import Scenario, changed_cluster
from tests.helpers.alike import WORKLOAD, Call
from tests.helpers.clocks import ticking
from tests.helpers.graphs import chain
from tests.helpers.planned import planned

HOSTS = Cluster((Device(),) * 4, (Level("nvlink", 2, 1e3), Level("ethernet", 2, 100.0, 1e-3)))
COSTS = ("--costs", "estimated")


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
    ],
)
def test_wrong_changes_are_named(change: Scenario, where: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed_cluster(HOSTS, change)
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


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are compared were sought for as long."""
    ticking(monkeypatch)


@pytest.fixture(scope="module")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plan of two devices, with the capture beside it."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patch:
        ticking(patch)
        with pytest.raises(SystemExit) as stop:
            main(["plan", WORKLOAD, "--cluster", "1x2", *COSTS, "-o", str(folder / "plan.json")])
    assert not stop.value.code
    return folder


@pytest.fixture
def made(planned_once: Path, tmp_path: Path) -> str:
    """A copy of the plan, which a test may change."""
    shutil.copytree(planned_once, tmp_path, dirs_exist_ok=True)
    return str(tmp_path / "plan.json")


def test_the_verb(made: str, tmp_path: Path, call: Call) -> None:
    """Machines are changed, and differences are shown."""
    code, out, err = call(
        "whatif", WORKLOAD, made, "--memory", "24GB", "--bandwidth", "inter=25 Gbit/s",
        "--bandwidth", "intra=unlimited", "--latency", "5us", "--devices", "3x2", "--speed", "2",
    )  # fmt: skip
    assert code == 0, err
    for part in ("b: what if", "3, 2", "24.0 GB", "unlimited", "3.12 GB/s", "5.00 us", "step",
                 "samples per second", "objective", "rank 5"):  # fmt: skip
        assert part in out, part
    assert max(map(len, out.splitlines())) <= 100
    assert sorted(os.listdir(tmp_path)) == ["plan.capture.json", "plan.json"]


def test_nothing_changed_is_the_plan(made: str, tmp_path: Path, call: Call) -> None:
    code, out, _ = call("whatif", WORKLOAD, made)
    assert "the plans are identical" in out
    other = str(tmp_path / "other.json")
    code, out, _ = call("whatif", WORKLOAD, made, "--json", "-o", other)
    assert (code, json.loads(out)["differences"]["identical"]) == (0, True)
    plan, again = Plan.load(made), Plan.load(other)
    assert diff(plan, again).identical
    assert plan.command == again.command


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "change"),
    [
        (("--cluster", "1x2", "--cut-at", "1,3", "--cut-at", "5"), ("--bandwidth", "1MB/s")),
        (("--cluster", "1x2", "--memory", "1MB", "--optimizer", "SGD", "--lr", "0.1"),
         ("--memory", "300 kB")),
        (("--cluster", "1x2", "--stages", "2", "--warmup", "1", "--microbatches", "8"),
         ("--speed", "0=2")),
        (("--cluster", "1x2", "--pin", "4=1", "--together", "5,6", "--apart", "0,2"),
         ("--devices", "3")),
        (("--cluster", "2x2:h100", "--seed", "3", "--replicas", "any", "--schedule", "auto"),
         ("--recompute", "on")),
        (("--cluster", "local:4", "--cut-before", "2", "--autocast", "bfloat16",
          "--max-grad-norm", "0.1", "--loss-reduction", "sum"), ("--latency", "5us")),
        (("--cluster", "1x4", "--parts", "2", "--split-of", "0=whole", "--memory", "1GB"),
         ("--devices", "2x4", "--microbatches", "4")),
        ((), ("--schedule", "forward")),
        (("--cluster", "1x2"), ("--autocast", "bfloat16")),
        (("--cluster", "1x2", "--autocast", "bfloat16", "--microbatches", "1"),
         ("--loss-reduction", "sum", "--microbatches", "8")),
    ],
)  # fmt: skip
def test_its_plan_is_that_of_its_command(
    options: tuple[str, ...], change: tuple[str, ...], tmp_path: Path, call: Call
) -> None:
    """All that was said of the first plan counts, and that plan stays as it is."""
    first, second, third = (tmp_path / f"{name} plan.json" for name in "abc")
    code, _, err = call("plan", WORKLOAD, *options, *COSTS, "-o", str(first))
    assert code == 0, err
    before = first.read_bytes()
    code, _, err = call("whatif", WORKLOAD, str(first), *change, "-o", str(second))
    assert code == 0, err
    assert first.read_bytes() == before
    found = Plan.load(second)
    assert (tmp_path / "b plan.cluster.toml").exists() == (change[0] in OF_MACHINES)
    code, _, err = call("plan", *found.command, "-o", str(third))
    assert code == 0, err
    again = replace(Plan.load(third), command=found.command)
    differs = diff(found, again)
    assert differs.identical, differs
    assert not diff(Plan.load(first), found).identical


def test_a_default_that_is_said_counts(tmp_path: Path, call: Call) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    made = ("--schedule", "auto", "--max-staleness", "1", "--microbatches", "2", "--refine", "off")
    assert call("plan", WORKLOAD, *made, "--cluster", "1x2", *COSTS, "-o", str(first))[0] == 0
    said = ("--max-staleness=0", "--microbatches=auto", "--refine=auto", "--cluster=auto")
    assert call("whatif", WORKLOAD, str(first), *said, "-o", str(second))[0] == 0
    assert {*said} <= {*Plan.load(second).command}
    assert len(Plan.load(second).machines.devices) == 1


def test_other_links_leave_memory_as_it_was(tmp_path: Path, call: Call) -> None:
    """The limit is the least of the machines' and the option's; -o writes no file of theirs."""
    machines, first, other = (tmp_path / n for n in ("m.toml", "a.json", "m.json"))
    cluster = Cluster((Device("cpu", 400_000),) * 2, (Level("link", 2, 1e9),))
    machines.write_text(cluster.to_toml(), encoding="utf-8")
    given = ("--cluster", str(machines), "--memory", "1GB", *COSTS)
    assert call("plan", WORKLOAD, *given, "-o", str(first))[0] == 0
    before = machines.read_bytes()
    changes = ("--bandwidth", "100MB/s")
    code, _, err = call("whatif", WORKLOAD, str(first), *changes, "-o", str(other))
    assert code == 0, err
    assert {one.memory_bytes for one in Plan.load(other).machines.devices} == {400_000}
    assert machines.read_bytes() == before
    assert "m.cluster.toml" in err.replace("\n", "")


def test_parts_without_a_cluster_keep_their_devices(tmp_path: Path, call: Call) -> None:
    first, other = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert call("plan", WORKLOAD, "--stages", "2", "--parts", "2", *COSTS, "-o", first)[0] == 0
    code, _, err = call("whatif", WORKLOAD, first, "--bandwidth", "10GB/s", "-o", other)
    assert code == 0, err
    found = Plan.load(other).machines
    assert found.parts is not None
    assert (len(found.devices), found.parts.bytes_per_second) == (2, 1e10)


OF_MACHINES = ("--devices", "--memory", "--bandwidth", "--latency", "--speed")


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
    options: tuple[str, ...], code: int, message: str, made: str, call: Call
) -> None:
    found, out, err = call("whatif", WORKLOAD, made, *options)
    assert (found, out) == (code, "")
    assert message in err
    assert "remedy: " in err
    found, out, _ = call("whatif", WORKLOAD, made, *options, "--json")
    assert found == code
    assert json.loads(out)["status"] == ("infeasible" if code == 3 else "error")


def test_plans_that_cannot_be_asked(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "plan.json"
    plan = planned(chain(6), Cluster.local(2))
    for command, message in (
        ((), "does not tell the command"),
        (("a.py:build", "--gone=3"), "--gone=3, which is no option of pdcompile plan"),
        (("a.py:build", "--lr=abc"), "--lr=abc, which is no option"),
        (("a.py:build", "--schedule"), "--schedule, which is no option"),
        (("a.py:build", "--sources=evil"), "--sources=evil, which is no option"),
        (("a.py:build", "--optimizer=b.py:made"), "code is not run because a plan names it"),
    ):
        path.write_text(replace(plan, command=command).to_json(), encoding="utf-8")
        code, _, err = call("whatif", WORKLOAD, str(path), "--memory", "1GB")
        assert (code, message in " ".join(err.split())) == (2, True), err
    for alone, remedy in ((str(path), f"whatif a.py:build {path}"), (WORKLOAD, "plan.json")):
        code, _, err = call("whatif", alone, "--memory", "1GB")
        assert (code, remedy in " ".join(err.split())) == (2, True), err
    code, _, err = call("whatif", WORKLOAD, str(tmp_path / "none.json"))
    assert (code, "No such file" in err) == (2, True)
