"""``python -m benchmarks.published plan``: problems that other people published, without torch.

Its options, the ones that each kind of file takes, and how they are read; then the search.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.published.solution import Progress, Solution, relative_gap
from pdcompile.cli.app import unwrapped
from pdcompile.cli.output import EXIT_INFEASIBLE
from pdcompile.errors import ConfigError, PdcompileError
from pdcompile.units import parse_bytes, parse_rate

NAME = "python -m benchmarks.published"
MOST = 65_536  # devices, microbatches
COMMON = {"imported", "target", "output", "as_json", "time_limit", "seed"}
HELP = """Plan a problem that others published.

The objective is exactly that of their paper: the largest load of a device (device-placement), the
slowest stage or transfer (pipedream), the slowest stage (piper). Needs no torch. Ctrl-C ends the
search with the best plan so far. Exit code 3: no plan fits, or none was found in time.

Examples:

  python -m benchmarks.published plan --import device-placement bert24_inference.json
  --time-limit 60 --json

  python -m benchmarks.published plan --import pipedream vgg16.txt --cluster 4x4
  --bandwidth 10GB/s,1.25GB/s --memory 16GB

  python -m benchmarks.published plan --import piper bert32.json --devices 64 --memory 8GiB
  --batch 1920 --bandwidth 25GiB/s
"""
Limits = Callable[[], dict[str, Any]]  # time limit, seed and progress, asked for when search starts
Solved = tuple[Solution, float | None]  # and the memory limit of a device, in the file's unit

app = typer.Typer(
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def front() -> None:
    """Problems of other people's papers, for comparison with their planners."""


@app.command(help=unwrapped(HELP))
def plan(
    context: typer.Context,
    target: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="A file of that kind.")
    ],
    imported: Annotated[
        str,
        typer.Option(
            "--import",
            metavar="KIND",
            show_default=False,
            help="Kind of FILE: device-placement (JSON), pipedream (graph.txt) or piper (JSON).",
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(metavar="AxB", help="pipedream: sizes of its levels, outermost first."),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="pipedream: of each level of --cluster, innermost first, as 10GB/s,1.25GB/s. "
            "piper: one for all devices, as 25GiB/s or 200Gbit/s; default: the file's.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="pipedream and piper: limit of every device, as '16 GB' or '512 MiB'.",
        ),
    ] = None,
    straight: Annotated[
        bool, typer.Option("--straight", help="pipedream: replicate no stage.")
    ] = False,
    fewer: Annotated[
        bool,
        typer.Option(
            "--fewer", help="pipedream: of equally fast plans the one with the fewest workers."
        ),
    ] = False,
    activation_compression: Annotated[
        str | None,
        typer.Option(
            metavar="R",
            help="pipedream: boundary traffic is divided by R (default 1); none: it costs nothing.",
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="K", help="piper: how many; default: the file's.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", help="piper: microbatches in a batch; default: the file's."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Stop the search then, with the best plan so far."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the JSON object to this file."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print exactly one JSON object on stdout, nothing else.")
    ] = False,
) -> None:
    check_options(imported, context)
    run(imported, context.params, output=output, as_json=as_json)


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file: the options that it takes and needs, and what reads and solves it."""

    solve: Callable[[dict[str, Any], Limits], Solved]
    file: str
    remedy: str  # for an option that it does not take
    unit: str = "s"  # of objective and loads
    takes: Set[str] = frozenset()  # besides `COMMON`
    needs: Mapping[str, str] = field(default_factory=dict)  # an option, and an example of it


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
        from pdcompile.cli.output import write_text

        write_text(output, json.dumps(document, indent=2, allow_nan=False) + "\n")
    if as_json:
        emit_json(document)
    else:
        from benchmarks.published.solution_table import solution_report

        stdout().print(solution_report(answer, unit=KINDS[kind].unit, limit=limit))
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

    begin = time.monotonic()
    time_limit, seed = parse_time_limit(options["time_limit"]), check_seed(options["seed"])
    try:
        with Budget() as until_search, searching() as progress:

            def limits() -> dict[str, Any]:
                # Ctrl-C while reading: what a search finds at once is the answer.
                seconds = 0.0 if until_search.stopped else time_limit
                return {"time_limit": seconds, "seed": seed, "progress": progress}

            answer, limit = KINDS[kind].solve(options, limits)
    except PdcompileError as error:
        error.remedy = error.remedy or f"--import {kind} reads {KINDS[kind].file}"
        raise
    return replace(answer, seconds=time.monotonic() - begin), limit


@contextmanager
def searching() -> Iterator[Progress]:
    """A callback for solvers, which shows the best objective so far and the bound."""
    from pdcompile.report.progress import compiling

    with compiling(lines=False, title="planning") as listener:
        yield lambda objective, bound: listener.found(found_text(objective, bound))


def found_text(objective: float | None, bound: float) -> str:
    """``best 3, bound 2, gap 33 %``."""
    parts = ["no plan yet" if objective is None else f"best {objective:.6g}"]
    if math.isfinite(bound) and bound > 0:
        parts.append(f"bound {bound:.6g}")
        if objective is not None:
            parts.append(f"gap {100 * relative_gap(objective, bound):.2g} %")
    return ", ".join(parts) + "  (Ctrl-C: stop with the best)"


def _device_placement(options: dict[str, Any], limits: Limits) -> Solved:
    from benchmarks.published import placement_model
    from benchmarks.published.placement import place

    problem = placement_model.read(options["target"])
    return place(problem, **limits()), problem.classes[0].memory


def _pipedream(options: dict[str, Any], limits: Limits) -> Solved:
    levels = parse_levels(options["cluster"], options["bandwidth"])
    compression = parse_compression(options["activation_compression"])
    limit = _memory(options["memory"])

    from benchmarks.published import pipedream, pipedream_model
    from benchmarks.published.pipedream_model import HierarchyProblem

    problem = HierarchyProblem(
        pipedream_model.read(options["target"]),
        levels,
        straight=options["straight"],
        fewer=options["fewer"],
        memory_bytes=limit,
        activation_compression=compression,
    )
    return pipedream.solve(problem, **limits()), limit


def _piper(options: dict[str, Any], limits: Limits) -> Solved:
    bandwidth = options["bandwidth"]

    from benchmarks.published import piper, piper_model

    problem = piper_model.read(
        options["target"],
        devices=_count(options["devices"], "devices", "--devices"),
        memory_bytes=_memory(options["memory"]),
        batch=_count(options["batch"], "microbatches", "--batch"),
        bytes_per_second=None if bandwidth is None else parse_bandwidth(bandwidth),
    )
    return piper.solve(problem, **limits()), problem.memory_bytes


KINDS = {
    "device-placement": FileKind(
        _device_placement,
        "the JSON of the NeurIPS 2020 paper: maxFPGAs, maxCPUs, nodes, edges",
        "the file itself tells devices, memory and costs; leave it out",
        unit="",
    ),
    "pipedream": FileKind(
        _pipedream,
        "PipeDream's graph.txt: one line a node, then one line an edge",
        "it takes --cluster and --bandwidth, and --memory where there is a limit",
        takes={"cluster", "bandwidth", "straight", "fewer", "memory", "activation_compression"},
        needs={"cluster": "4x4", "bandwidth": "10GB/s,1.25GB/s"},
    ),
    "piper": FileKind(  # the file has a figure for each option
        _piper,
        "Piper's JSON: maxDevices, nodes with TMPCs, edges",
        "it takes --devices, --memory, --batch and --bandwidth",
        takes={"devices", "memory", "batch", "bandwidth"},
    ),
}


def check_options(kind: str, context: typer.Context) -> None:
    """Refuse options that this kind of file does not take, and name those that are missing.

    Raises:
        ConfigError: an option is refused or missing, or there is no such kind.
    """
    names = {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None
    }
    given = [name for name in names if _is_given(context, name)]
    if kind not in KINDS:
        raise ConfigError(
            f"there is no kind of file {kind!r} to import",
            where="--import",
            remedy=f"one of {', '.join(KINDS)}",
        )
    _refuse(
        (names[name] for name in given if name not in COMMON | KINDS[kind].takes),
        f"has no meaning with --import {kind}",
        f"have no meaning with --import {kind}",
        KINDS[kind].remedy,
    )
    needs = KINDS[kind].needs
    missing = {names[name]: value for name, value in needs.items() if name not in given}
    if missing:
        example = " ".join(f"{option} {value}" for option, value in missing.items())
        raise ConfigError(
            f"--import {kind} needs {_and(list(missing))}",
            where=", ".join(missing),
            remedy=f"for example: {example}",
        )


def parse_levels(cluster: str, bandwidth: str) -> tuple[tuple[int, float], ...]:
    """Levels innermost first, (count, bytes per second), of ``4x2`` and ``30GB/s,25Gbit/s``.

    Raises:
        ConfigError: no positive whole numbers, or not one bandwidth a level.
    """
    counts = cluster.split("x")
    if not all(re.fullmatch("[0-9]{1,9}", count) and int(count) for count in counts):
        raise ConfigError(
            f"--cluster {cluster!r} does not give the sizes of its levels",
            where="--cluster",
            remedy="write the sizes of its levels, outermost first: 4x4 (hosts x devices), or 16",
        )
    _count(math.prod(map(int, counts)), "devices", "--cluster")
    rates = bandwidth.split(",")
    if len(rates) != len(counts):
        many = "few" if len(rates) < len(counts) else "many"
        levels = "1 level" if len(counts) == 1 else f"{len(counts)} levels"
        raise ConfigError(
            f"too {many} bandwidths: {len(rates)} for the {levels} of --cluster {cluster}",
            where="--bandwidth",
            remedy="one a level, innermost first, separated by commas: 10GB/s,1.25GB/s for 4x4",
        )
    return tuple(
        (int(count), parse_bandwidth(rate))
        for count, rate in zip(reversed(counts), rates, strict=True)
    )


def parse_compression(text: str | None) -> float | None:
    """The divisor of boundary traffic, 1 when not given; None for ``none``: traffic is ignored.

    Raises:
        ConfigError: neither a positive number nor ``none``.
    """
    if text is None:
        return 1.0
    if text == "none":
        return None
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not (1e-9 <= ratio < math.inf):
        raise ConfigError(
            f"{text!r} is neither a positive number nor none",
            where="--activation-compression",
            remedy="2 halves the traffic at boundaries; none leaves it out of the cost",
        )
    return ratio


def parse_bandwidth(text: str) -> float:
    rate = parse_rate(text, what="bandwidth", where="--bandwidth")
    if rate < 1:
        raise ConfigError(
            f"bandwidth {text!r} is below 1 B/s", where="--bandwidth", remedy="give more"
        )
    return rate


def _memory(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text, what="memory", where="--memory")


def _count(count: int | None, what: str, where: str) -> int | None:
    if count is not None and not 1 <= count <= MOST:
        raise ConfigError(
            f"got {count} {what}",
            where=where,
            remedy=f"give a whole number from 1 to {MOST:,}",
        )
    return count


def check_seed(seed: int) -> int:
    """The seed itself.

    Raises:
        ConfigError: not one of CP-SAT's, which are 31 bits.
    """
    if not 0 <= seed < 2**31:
        raise ConfigError(
            f"seed {seed} is out of range", where="--seed", remedy="from 0 to 2147483647"
        )
    return seed


def parse_time_limit(seconds: float | None) -> float | None:
    if seconds is None or seconds == math.inf:
        return None
    if not seconds >= 0:
        raise ConfigError(
            f"the time limit is {seconds} seconds",
            where="--time-limit",
            remedy="give seconds from 0 on, or leave it out",
        )
    return seconds


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse(options: Iterable[str], one: str, many: str, remedy: str) -> None:
    refused = list(options)
    if refused:
        raise ConfigError(
            f"{_and(refused)} {one if len(refused) == 1 else many}",
            where=", ".join(refused),
            remedy=remedy,
        )


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
