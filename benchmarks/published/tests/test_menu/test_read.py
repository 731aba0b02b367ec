"""Reading Piper's files: what they say, and every way to say it wrongly."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import piper_model
from pdcompile.errors import ConfigError, CostError
from tests.helpers.reference import folder


def variant(**changes: Any) -> dict[str, Any]:
    plain = {
        "id": "vanilla",
        "timePerSample": 1.0,
        "parameterSize": 2.0,
        "memoryUsageA": 3.0,
        "memoryUsageB": 4.0,
        "syncTimeFw": {},
        "syncTimeBw": {},
    }
    return plain | changes


def two_nodes() -> dict[str, Any]:
    return {
        "maxDevices": 4,
        "maxMemoryPerDevice": 100.0,
        "mbsInBatch": 8,
        "bandwidth": 10.0,
        "nodes": [
            {"id": 7, "TMPCs": {"1": [variant(syncTimeBw={"3": 5.0})]}},
            {"id": 3, "name": "last", "TMPCs": {"2": [variant(syncTimeFw={"7": 6.0})]}},
        ],
        "edges": [{"sourceId": 7, "destId": 3, "communicationCost": 9.0}],
    }


def test_reads_what_is_there() -> None:
    problem = piper_model.parse(two_nodes(), where="f.json")
    assert [node.id for node in problem.nodes] == [7, 3]
    assert problem.nodes[0].variants[1][0].sync_backward == {1: 5.0}
    assert problem.nodes[1].variants[2][0].sync_forward == {0: 6.0}
    assert [(e.source, e.target, e.bytes) for e in problem.edges] == [(0, 1, 9.0)]
    assert (problem.devices, problem.memory_bytes) == (4, 100.0)
    assert (problem.batch, problem.bytes_per_second) == (8, 10.0)


def test_arguments_replace_the_figures_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "two.json"
    file.write_text(json.dumps(two_nodes()))
    problem = piper_model.read(
        file, devices=9, memory_bytes=math.inf, batch=3, bytes_per_second=1.5
    )
    assert (problem.devices, problem.memory_bytes) == (9, math.inf)
    assert (problem.batch, problem.bytes_per_second) == (3, 1.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"devices": 0},
        {"devices": True},
        {"devices": 1.5},
        {"batch": -1},
        {"memory_bytes": 0},
        {"memory_bytes": math.nan},
        {"bytes_per_second": -1.0},
        {"bytes_per_second": "fast"},
    ],
)
def test_arguments_out_of_range(tmp_path: Path, wrong: dict[str, Any]) -> None:
    file = tmp_path / "two.json"
    file.write_text(json.dumps(two_nodes()))
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        piper_model.read(file, **wrong)


def edit(path: str, value: Any) -> dict[str, Any]:
    """`two_nodes` with the entry at a dotted path replaced; None removes it."""
    data = copy.deepcopy(two_nodes())
    *way, last = path.split(".")
    at: Any = data
    for key in way:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if isinstance(at, list):
        at[int(last)] = value
    elif value is None:
        del at[last]
    else:
        at[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nodes", None, "'nodes' is missing"),
        ("nodes", [], "no node"),
        ("nodes", {}, "not a list"),
        ("nodes.0", 5, "not an object"),
        ("nodes.1.id", 7, "appears twice"),
        ("nodes.1.id", "7", "appears twice"),
        ("nodes.1.id", 2.5, "not a name"),
        ("nodes.0.TMPCs", [], "not an object"),
        ("nodes.0.TMPCs", {}, "has no variant"),
        ("nodes.0.TMPCs", {"1": []}, "has no variant"),
        ("nodes.0.TMPCs", {"0": [variant()]}, "tensor-parallel degree"),
        ("nodes.0.TMPCs", {"one": [variant()]}, "tensor-parallel degree"),
        ("nodes.0.TMPCs.1.0.timePerSample", -1.0, "between 0"),
        ("nodes.0.TMPCs.1.0.timePerSample", 1e40, "between 0"),
        ("nodes.0.TMPCs.1.0.timePerSample", 10**400, "between 0"),
        ("nodes.0.TMPCs.1.0.timePerSample", "1", "not a number"),
        ("nodes.0.TMPCs.1.0.timePerSample", None, "is missing"),
        ("nodes.0.TMPCs.1.0.memoryUsageA", True, "not a number"),
        ("nodes.0.TMPCs.1.0.id", "", "not a name"),
        ("nodes.0.TMPCs.1.0.syncTimeBw", {}, "no entry for the edge with node 3"),
        ("nodes.0.TMPCs.1.0.syncTimeFw", {"3": 1.0}, "no edge"),
        ("nodes.0.TMPCs.1.0.syncTimeBw", {"3": -1.0}, "between 0"),
        ("edges.0.destId", 8, "no node with id 8"),
        ("edges.0.destId", 7, "cycle: 7 -> 7"),
        ("edges.0.communicationCost", None, "is missing"),
        ("maxDevices", 0, "whole number"),
        ("maxDevices", 2.5, "whole number"),
        ("mbsInBatch", "8", "whole number"),
        ("bandwidth", 0, "not a limit"),
        ("maxMemoryPerDevice", -5, "between 0"),
    ],
)
def test_wrong_files_are_refused_with_their_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(CostError, match=message) as caught:
        piper_model.parse(edit(path, value), where="f.json")
    assert caught.value.where is not None
    assert caught.value.where.startswith("f.json")
    assert caught.value.remedy


def test_repeated_edges_and_variants_are_refused() -> None:
    twice = two_nodes()
    twice["edges"] *= 2
    with pytest.raises(CostError, match="twice"):
        piper_model.parse(twice, where="f.json")
    twice = two_nodes()
    twice["nodes"][0]["TMPCs"]["1"] *= 2
    with pytest.raises(CostError, match="same id"):
        piper_model.parse(twice, where="f.json")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"nodes": NaN}', "null", "\x00"])
def test_texts_that_are_no_problem(tmp_path: Path, text: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text)
    with pytest.raises(CostError, match=r"(?s).*wrong\.json"):
        piper_model.read(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="cannot be read"):
        piper_model.read(tmp_path / "none.json")


def test_the_published_file() -> None:
    problem = piper_model.read(folder("piper") / "bert32a100.json")
    assert (len(problem.nodes), len(problem.edges)) == (37, 67)
    assert (problem.devices, problem.batch) == (10, 1920)
