"""Formats of published problems, with a whole file of each, for the fuzzer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.published import pipedream_model, piper_model, placement_model
from benchmarks.published.tests.helpers.profiles import Writer
from tests.helpers.file_formats import JSON, TEXT, put
from tests.helpers.fuzzing import Format


def _placement(folder: Path, _: object = None) -> Format:
    node = {"fpgaLatency": 1.0, "cpuLatency": 2, "size": 3.5, "supportedOnFpga": 1}
    data = {
        "maxFPGAs": 2,
        "maxSizePerFPGA": 16.0,
        "maxCPUs": 1,
        "nodes": [
            node | {"id": 0, "isBackwardNode": 0},
            node | {"id": 1, "colorClass": 7},
            node | {"id": "two", "colorClass": 7, "isBackwardNode": 1},
        ],
        "edges": [
            {"sourceId": 0, "destId": 1, "cost": 0.25},
            {"sourceId": 1, "destId": "two", "cost": 4},
        ],
    }
    return Format(
        "placement", (json.dumps(data).encode(),), JSON,
        lambda data: placement_model.read(put(folder / "placement.json", data)), folder,
    )  # fmt: skip


def _piper(folder: Path, _: object = None) -> Format:
    plain = {
        "id": "vanilla", "timePerSample": 1.0, "parameterSize": 2.0, "memoryUsageA": 3.0,
        "memoryUsageB": 4.0, "syncTimeFw": {}, "syncTimeBw": {},
    }  # fmt: skip
    data = {
        "maxDevices": 4,
        "maxMemoryPerDevice": None,
        "mbsInBatch": 8,
        "bandwidth": 10.0,
        "nodes": [
            {"id": 7, "TMPCs": {"1": [plain | {"syncTimeBw": {"3": 5.0}}]}},
            {"id": 3, "name": "last", "TMPCs": {"2": [plain | {"syncTimeFw": {"7": 6.0}}]}},
        ],
        "edges": [{"sourceId": 7, "destId": 3, "communicationCost": 9.0}],
    }
    return Format(
        "piper", (json.dumps(data).encode(),), JSON,
        lambda data: piper_model.read(put(folder / "piper.json", data)), folder,
    )  # fmt: skip


def _pipedream(folder: Path, _: object = None) -> Format:
    graph = Writer(0)
    first = graph.add("Input0", [])
    second = graph.add("Linear(8, 8)", [first], time=1.0, activation=2.0, parameters=3.0)
    third = graph.add("Split", [second], time=1.0, parts=(1.0, 2.0))
    graph.add("__getitem__(0)", [third])
    graph.add("Add", [second, third], time=2.0, activation=1.0)
    return Format(
        "pipedream", (graph.text().encode(),), TEXT,
        lambda data: pipedream_model.read(put(folder / "graph.txt", data)), folder,
    )  # fmt: skip


MAKERS: dict[str, Callable[..., Format]] = {
    "placement": _placement,
    "pipedream": _pipedream,
    "piper": _piper,
}
