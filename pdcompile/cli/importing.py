"""``pdcompile plan --import KIND FILE``: problems that other people published, without torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import typer

from pdcompile.cli.import_options import (
    check_seed,
    parse_bandwidth,
    parse_batch,
    parse_compression,
    parse_devices,
    parse_levels,
    parse_memory,
    parse_time_limit,
)
from pdcompile.cli.output import EXIT_INFEASIBLE
from pdcompile.errors import PdcompileError
from pdcompile.problem.answer import Answer

Limits = Callable[[], dict[str, Any]]  # time limit, seed and progress, asked for when search starts
Solved = tuple[Answer, float | None]  # and the memory limit of a device, in the file's unit
Raw = TypeVar("Raw")
Read = TypeVar("Read")
FILES = {
    "device-placement": "the JSON of the NeurIPS 2020 paper: maxFPGAs, maxCPUs, nodes, edges",
    "pipedream": "PipeDream's graph.txt: one line a node, then one line an edge",
    "piper": "Piper's JSON: maxDevices, nodes with TMPCs, edges",
}
UNITS = {"device-placement": "", "pipedream": "s", "piper": "s"}  # of objective and loads


def run(kind: str, options: dict[str, Any], *, output: Path | None, as_json: bool) -> None:
    """Plan an imported problem, print the answer, and write its JSON object to `output`.

    `options` are the command's, by parameter name, and were checked (`check_options`).

    Raises:
        ConfigError: a malformed option, or `output` cannot be written.
        PdcompileError: what the reader refuses in the file.
        typer.Exit: exit code 3, when there is no plan or none was found in time.
    """
    from pdcompile.cli.output import emit_json, stderr, stdout

    answer, limit = solve(kind, options)
    document = answer.to_json()
    if output is not None:
        from pdcompile.cli.compiling import write_text

        write_text(output, json.dumps(document, indent=2, allow_nan=False) + "\n")
    if as_json:
        emit_json(document)
    else:
        from pdcompile.report.answer_table import answer_report

        stdout().print(answer_report(answer, unit=UNITS[kind], limit=limit))
        if output is not None:
            stderr().print(f"written: {output}", soft_wrap=True)
    if answer.objective is None:
        raise typer.Exit(EXIT_INFEASIBLE)


def solve(kind: str, options: dict[str, Any]) -> Solved:
    """Read the file and search; `options` are the command's, by parameter name.

    `seconds` of the answer runs from reading to the answer.

    Raises:
        ConfigError: a malformed option.
        PdcompileError: what the reader refuses in the file.
    """
    from pdcompile.passes.partition.budget import Budget
    from pdcompile.report.search_line import searching

    begin = time.monotonic()
    time_limit, seed = parse_time_limit(options["time_limit"]), check_seed(options["seed"])
    try:
        with Budget() as until_search, searching() as progress:

            def limits() -> dict[str, Any]:
                # Ctrl-C while reading: what a search finds at once is the answer.
                seconds = 0.0 if until_search.stopped else time_limit
                return {"time_limit": seconds, "seed": seed, "progress": progress}

            answer, limit = SOLVERS[kind](options, limits)
    except PdcompileError as error:
        error.remedy = error.remedy or f"--import {kind} reads {FILES[kind]}"
        raise
    return replace(answer, seconds=time.monotonic() - begin), limit


def _given(read: Callable[[Raw], Read], value: Raw | None) -> Read | None:
    return None if value is None else read(value)


def _device_placement(options: dict[str, Any], limits: Limits) -> Solved:
    from pdcompile.passes.published import placement_model
    from pdcompile.passes.published.placement import place

    problem = placement_model.read(Path(options["target"]))
    return place(problem, **limits()), problem.classes[0].memory


def _pipedream(options: dict[str, Any], limits: Limits) -> Solved:
    levels = parse_levels(options["cluster"], options["bandwidth"])
    compression = parse_compression(options["activation_compression"])
    limit = _given(parse_memory, options["memory"])

    from pdcompile.passes.published import pipedream, pipedream_model
    from pdcompile.passes.published.pipedream_model import HierarchyProblem

    problem = HierarchyProblem(
        pipedream_model.read(Path(options["target"])),
        levels,
        straight=options["straight"],
        fewer=options["fewer"],
        memory_bytes=limit,
        activation_compression=compression,
    )
    return pipedream.solve(problem, **limits()), limit


def _piper(options: dict[str, Any], limits: Limits) -> Solved:
    devices = _given(parse_devices, options["devices"])
    memory = _given(parse_memory, options["memory"])
    batch = _given(parse_batch, options["batch"])
    bandwidth = _given(parse_bandwidth, options["bandwidth"])

    from pdcompile.passes.published import piper, piper_model

    problem = piper_model.read(
        Path(options["target"]),
        devices=devices,
        memory_bytes=memory,
        batch=batch,
        bytes_per_second=bandwidth,
    )
    return piper.solve(problem, **limits()), problem.memory_bytes


SOLVERS = {"device-placement": _device_placement, "pipedream": _pipedream, "piper": _piper}
