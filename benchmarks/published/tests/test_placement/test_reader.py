"""Device-placement files: read as they are, or refused with the place that is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.placement_model import read
from benchmarks.published.tests.helpers.placements import write
from pdcompile.errors import CostError


def small() -> dict[str, Any]:
    def node(name: int, **other: Any) -> dict[str, Any]:
        return {"id": name, "supportedOnFpga": 1, "cpuLatency": 4, "fpgaLatency": 1} | other

    return {
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "maxSizePerFPGA": 100.0,
        "nodes": [
            node(7, size=3.5, colorClass=2, isBackwardNode=0),
            node(8, supportedOnFpga=False),
            node(9, colorClass=2, isBackwardNode=True),
        ],
        "edges": [
            {"sourceId": 7, "destId": 8, "cost": 0.5, "size": 1},
            {"sourceId": 8, "destId": 9, "cost": 0},
        ],
    }


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    problem = read(write(tmp_path, small()))
    first, second, third = problem.nodes
    assert (first.id, first.seconds, first.size, first.color) == (7, (1.0, 4.0), 3.5, 2)
    assert (second.seconds, second.size, second.color) == ((math.inf, 4.0), 0.0, None)
    assert [node.backward for node in problem.nodes] == [False, False, True]
    assert [(e.source, e.target, e.cost) for e in problem.edges] == [(0, 1, 0.5), (1, 2, 0.0)]
    accelerator, cpu = problem.classes
    assert (accelerator.count, accelerator.memory, accelerator.transfers) == (2, 100.0, True)
    assert (cpu.count, cpu.memory, cpu.transfers) == (1, math.inf, False)
    assert third.id == 9


def test_text_ids_and_an_edge_given_twice(tmp_path: Path) -> None:
    data = small()
    for node in data["nodes"]:
        node["id"] = f"op{node['id']}"
    for edge in data["edges"]:
        edge["sourceId"], edge["destId"] = f"op{edge['sourceId']}", f"op{edge['destId']}"
    data["edges"].append(dict(data["edges"][0]))
    problem = read(write(tmp_path, data))
    assert [node.id for node in problem.nodes] == ["op7", "op8", "op9"]
    assert len(problem.edges) == 2


def test_costs_of_one_source_may_differ_as_printing_does(tmp_path: Path) -> None:
    data = small()
    data["edges"] += [{"sourceId": 7, "destId": 9, "cost": 0.5 * (1 + 1e-12)}]
    assert {e.cost for e in read(write(tmp_path, data)).edges if e.source == 0} == {0.5}


def test_no_memory_limit_and_no_cpu_latency_without_cpus(tmp_path: Path) -> None:
    data = small() | {"maxSizePerFPGA": None, "maxCPUs": 0}
    del data["nodes"][0]["cpuLatency"]
    problem = read(write(tmp_path, data))
    assert problem.classes[0].memory == math.inf
    assert problem.nodes[0].seconds == (1.0, math.inf)


Change = Callable[[dict[str, Any]], object]
WRONG: dict[str, tuple[Change, str]] = {
    "no nodes": (lambda d: d.update(nodes=[]), "nodes"),
    "nodes missing": (lambda d: d.pop("nodes"), "nodes"),
    "nodes no list": (lambda d: d.update(nodes={}), "nodes"),
    "node no object": (lambda d: d["nodes"].__setitem__(1, 5), "nodes[1]"),
    "id twice": (lambda d: d["nodes"][2].update(id=7), "nodes[2]"),
    "id missing": (lambda d: d["nodes"][1].pop("id"), "nodes[1]"),
    "id a flag": (lambda d: d["nodes"][1].update(id=True), "nodes[1].id"),
    "id a fraction": (lambda d: d["nodes"][1].update(id=1.5), "nodes[1].id"),
    "negative": (lambda d: d["nodes"][0].update(fpgaLatency=-1), "nodes[0].fpgaLatency"),
    "huge": (lambda d: d["nodes"][0].update(cpuLatency=1e300), "nodes[0].cpuLatency"),
    "latency missing": (lambda d: d["nodes"][0].pop("fpgaLatency"), "nodes[0]"),
    "latency text": (lambda d: d["nodes"][0].update(fpgaLatency="1"), "nodes[0].fpgaLatency"),
    "size a flag": (lambda d: d["nodes"][0].update(size=True), "nodes[0].size"),
    "flag 2": (lambda d: d["nodes"][0].update(isBackwardNode=2), "nodes[0].isBackwardNode"),
    "flag text": (lambda d: d["nodes"][0].update(supportedOnFpga="yes"), "supportedOnFpga"),
    "colour a list": (lambda d: d["nodes"][0].update(colorClass=[1]), "nodes[0].colorClass"),
    "count negative": (lambda d: d.update(maxFPGAs=-1), "maxFPGAs"),
    "count a fraction": (lambda d: d.update(maxCPUs=1.5), "maxCPUs"),
    "count huge": (lambda d: d.update(maxFPGAs=10**9), "maxFPGAs"),
    "limit missing": (lambda d: d.pop("maxSizePerFPGA"), "maxSizePerFPGA"),
    "edge to nobody": (lambda d: d["edges"][0].update(destId=99), "edges[0].destId"),
    "edge with text": (lambda d: d["edges"][0].update(sourceId="7"), "edges[0].sourceId"),
    "cost missing": (lambda d: d["edges"][1].pop("cost"), "edges[1]"),
    "unequal costs": (
        lambda d: d["edges"].append({"sourceId": 7, "destId": 9, "cost": 0.6}),
        "edges[2].cost",
    ),
    "cycle": (lambda d: d["edges"].append({"sourceId": 9, "destId": 7, "cost": 1}), "edges"),
    "loop": (lambda d: d["edges"].append({"sourceId": 9, "destId": 9, "cost": 1}), "edges"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_with_its_place(name: str, tmp_path: Path) -> None:
    change, place = WRONG[name]
    data = small()
    change(data)
    path = write(tmp_path, data)
    with pytest.raises(CostError) as caught:
        read(path)
    shown = f"{caught.value.where} {caught.value.message}"
    assert str(path) in shown
    assert place in shown
    assert caught.value.remedy


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"maxFPGAs": NaN}', '{"maxFPGAs": 1, "maxFPGAs": 2}', "\x00"]
)
def test_what_is_no_such_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CostError, match=r"graph\.json"):
        read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="cannot be read"):
        read(tmp_path / "none.json")


def test_a_cycle_is_named(tmp_path: Path) -> None:
    data = small()
    data["edges"].append({"sourceId": 9, "destId": 7, "cost": 1})
    with pytest.raises(CostError, match=r"7 -> 8 -> 9 -> 7|8 -> 9 -> 7 -> 8|9 -> 7 -> 8 -> 9"):
        read(write(tmp_path, data))


def test_numbers_too_small_to_matter_are_none(tmp_path: Path) -> None:
    data = small()
    data["nodes"][0]["fpgaLatency"] = 1e-310
    assert json.loads(write(tmp_path, data).read_text())["nodes"][0]["fpgaLatency"] > 0
    assert read(write(tmp_path, data)).nodes[0].seconds[0] == 0.0
