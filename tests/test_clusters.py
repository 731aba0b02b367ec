"""Machines by name: the descriptions that come with pdcompile, and every text for a cluster."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdcompile
from pdcompile import Cluster, ClusterError, LaunchError, Plan, PlanError
from pdcompile.clusters import FOLDER, cluster_of, described, names
from pdcompile.options import Options
from pdcompile.passes.costs.machines import KINDS
from pdcompile.plan.host_requirements import lacks
from tests.helpers.alike import Call
from tests.helpers.report_data import plan

NUMBER = re.compile("count|memory|speed|size|bandwidth|latency")


def test_there_are_the_machines_that_people_ask_for() -> None:
    assert names() == ("a100", "a10g", "h100", "laptop", "v100")


@pytest.mark.parametrize("name", names())
def test_every_number_has_a_source(name: str) -> None:
    """Each source is in a comment behind its number; and devices are of a kind whose speed is
    known."""
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    numbers = [
        line for line in text.splitlines() if re.match(r"(count|memory|speed|size|band|lat)", line)
    ]
    assert len(numbers) >= 6
    for line in numbers:
        value, _, source = line.partition("#")
        assert len(source.strip()) > 10, line
        assert re.search(r"= \S", value), line
    machines = described(name)
    assert machines.devices[0].kind in KINDS
    assert machines.devices[0].memory_bytes
    assert name in machines.notes[0]
    assert Cluster.from_toml(machines.to_toml()) == machines


def test_the_page_shows_a_file_that_is_read() -> None:
    page = (Path(__file__).parents[1] / "docs" / "machines.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    cluster = Cluster.from_toml(text)
    assert {(one.kind, one.memory_bytes) for one in cluster.devices} == {("a100-80", 80 * 10**9)}
    assert [(level.name, level.size) for level in cluster.levels] == [
        ("nvlink", 4),
        ("infiniband", 2),
    ]
    for keyword in ("_DeviceRow", "_LevelRow"):
        names_of_keys = {one.name for one in fields(getattr(pdcompile.cluster, keyword))}
        assert all(re.search(rf"^{key} = ", text, re.MULTILINE) for key in names_of_keys)


def test_hosts_and_devices_of_a_name() -> None:
    two = cluster_of("2x8:h100")
    assert len(two.devices) == 16
    assert [(level.name, level.size) for level in two.levels] == [("nvlink", 8), ("infiniband", 2)]
    assert two.level_between(7, 8).bytes_per_second == 50e9
    one = cluster_of("4:h100")
    assert [(level.name, level.size) for level in one.levels] == [("nvlink", 4)]
    assert len(cluster_of("v100").devices) == 16
    assert cluster_of("1x4:v100") == cluster_of("4:v100")


def test_what_the_command_line_takes_python_takes_too(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(Cluster.parse("2x2").to_toml(), encoding="utf-8")
    assert cluster_of(str(path)) == cluster_of("2x2") == Cluster.parse("2x2")
    assert cluster_of("local:3") == Cluster.local(3)
    assert Options(cluster="local:3").cluster == Cluster.local(3)
    pipe = pdcompile.compile(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.ones(4, 3), loss_fn=None,
        optimizer=None, cluster="local:2", costs="estimated", verify="off",
    )  # fmt: skip
    assert len(pipe.plan.stages) == 2
    with pytest.raises(ClusterError, match="no machines of the name 'h10'"):
        pdcompile.compile(nn.Linear(2, 2), cluster="2x8:h10")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2x8:h10", "did you mean 'h100'"),
        ("8:nothing", "one of a100, a10g, h100, laptop, v100"),
        ("2x9:h100", "'2x8:h100'"),
        ("x:h100", "no number of hosts and devices"),
        ("0x8:h100", "no number of hosts and devices"),
        ("2x2:laptop", "nothing is known of links between hosts of 'laptop'"),
        ("local:0", "no number of stages"),
        ("local:²", "no number of stages"),
        ("gpu", "machines with a name are"),
        ("cuda:2", "'local:4' for four stages in one process"),
        ("loca:2", "'local:4' for four stages in one process"),
        ("H100", "did you mean 'h100'"),
        ("99999x8:h100", "devices"),
    ],
)
def test_other_texts_say_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ClusterError) as error:
        cluster_of(text)
    assert said in str(error.value)


def test_the_command_line_knows_names(call: Call) -> None:
    code, out, _ = call("plan", "--help")
    assert code == 0
    assert "h100" in out
    code, _, err = call("plan", "no.such:module", "--cluster", "2x8:h10")
    assert code == 2
    assert "did you mean 'h100'" in err


# Plans that cannot run here


def found(given: Plan, **here: Any) -> list[str]:
    return [error.message for error in lacks(given, **here)]


def test_a_plan_is_held_against_processes_and_memory() -> None:
    given = plan()
    ranks = given.num_ranks
    assert given.forecast is not None
    needed = sum(ledger.total_bytes for ledger in given.forecast.ledgers)
    assert found(given, processes=ranks, memory_bytes=needed) == []
    assert found(given, processes=None, memory_bytes=needed) == []
    assert found(given, processes=ranks, memory_bytes=None) == []
    assert "and there are 7" in found(given, processes=7)[0]
    assert "ranks on this host need" in found(given, processes=None, memory_bytes=needed - 1)[0]
    first = given.forecast.ledgers[0].total_bytes
    assert found(given, processes=ranks, on_this_host=1, memory_bytes=first) == []
    assert found(replace(given, forecast=None), processes=None, memory_bytes=1) == []


def test_a_plan_is_held_against_devices() -> None:
    ranks = plan().num_ranks
    given = replace(plan(), cluster=cluster_of(f"{ranks}:h100").to_toml())
    assert found(given, processes=ranks, gpus=ranks, memory_bytes=1) == []  # not the host's memory
    assert found(given, processes=None, gpus=1) == []
    assert found(given, processes=ranks, on_this_host=1, gpus=1) == []
    (said,) = found(given, processes=ranks, gpus=1)
    assert (
        said
        == f"the plan is for h100 devices, {ranks} of them on this host, and torch finds 1 GPUs"
    )
    assert found(plan(), processes=ranks, gpus=0) == []


def test_a_plan_of_the_last_ranks_is_for_one_process() -> None:
    given = plan()
    devices = len(Cluster.from_toml(given.cluster).devices)
    stages = tuple(replace(stage, ranks=(stage.index + 2,)) for stage in given.stages)
    cluster = cluster_of(f"{devices + 2}").to_toml()
    given = replace(given, stages=stages, cluster=cluster, forecast=None)
    assert found(given, processes=None) == []
    (said,) = found(given, processes=given.num_ranks)
    assert said.startswith("the plan leaves idle the ranks 0, 1 before its last one")


def test_it_is_refused_before_anything_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def captures(*_: Any, **__: Any) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr("pdcompile.driver.capture", captures)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    on_cards = replace(plan(), cluster=cluster_of(f"{plan().num_ranks}:h100").to_toml())
    with pytest.raises(LaunchError, match="the plan is for"):
        raise next(lacks(on_cards, processes=None, gpus=0))
    with pytest.raises(LaunchError, match="the plan is for h100"):
        pdcompile.compile(model, cluster="2:h100").prepare(torch.ones(4, 4))
    with pytest.raises(PlanError, match="ranks on this host need"):
        raise next(lacks(plan(), processes=None, memory_bytes=1))
    with pytest.raises(LaunchError, match="and there are 5"):
        raise next(lacks(plan(), processes=5))
