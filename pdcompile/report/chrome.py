"""Timelines for Perfetto and chrome://tracing, in the Trace Event Format: written, and read again.

The one format of timelines in files, of simulations and of runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

from pdcompile.errors import ConfigError, os_errors_as
from pdcompile.files import read_limited
from pdcompile.jsonio import loads
from pdcompile.report.timeline import COMPUTE, Event
from pdcompile.schedule.recorded import RecordedEvent

FORMAT = "pdcompile.trace/1"
COMPUTE_TRACK, LINK_TRACK = 0, 1
COLOURS = {
    "F": "thread_state_running",
    "B": "good",
    "I": "good",
    "W": "rail_response",
    "STEP": "thread_state_iowait",
}
REMEDY = "give a file that `pdcompile run --trace` or `pdcompile simulate --trace` wrote"
ARGUMENTS = ("stage", "minibatch", "microbatch")


@dataclass(frozen=True, slots=True)
class Trace:
    """A timeline with where it comes from: of a run, and of ranks that were processes of their own
    (else one process took turns); `plan` is the plan's fingerprint."""

    events: tuple[Event, ...]
    measured: bool = False
    apart: bool = True
    plan: str = ""


def trace(made: Trace | Iterable[Event]) -> dict[str, Any]:
    """The JSON object that Perfetto opens: one process a rank, compute and communication tracks.

    Times are microseconds, as the format wants.
    """
    source = made if isinstance(made, Trace) else Trace(tuple(made))
    listed = source.events
    records: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in listed}):
        stages = sorted({event.stage for event in listed if event.rank == rank} - {-1})
        name = f"rank {rank} (stage {', '.join(map(str, stages))})"
        records.append(_meta("process_name", rank, 0, name))
        records.append(_meta("thread_name", rank, COMPUTE_TRACK, "compute"))
        records.append(_meta("thread_name", rank, LINK_TRACK, "communication"))
    records.extend(_record(event) for event in listed)
    about = {
        "format": FORMAT,
        "measured": source.measured,
        "apart": source.apart,
        "plan": source.plan,
    }
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": records}


def _meta(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


def _record(event: Event) -> dict[str, Any]:
    action = str(event.action)
    compute = action in COMPUTE
    label = f"{action} {event.microbatch}" if event.microbatch >= 0 else action
    record = {
        "ph": "X",
        "name": label,
        "cat": "compute" if compute else "communication",
        "pid": event.rank,
        "tid": COMPUTE_TRACK if compute else LINK_TRACK,
        "ts": event.start_seconds * 1e6,
        "dur": (event.end_seconds - event.start_seconds) * 1e6,
        "args": {
            "action": action,
            "stage": event.stage,
            "minibatch": event.minibatch,
            "microbatch": event.microbatch,
        },
    }
    if action in COLOURS:
        record["cname"] = COLOURS[action]
    return record


def load(path: str | PathLike[str]) -> Trace:
    """Read a trace that `trace` made.

    Raises:
        ConfigError: the file cannot be read, or is no such trace; names the place in it.
    """
    where = str(path)
    with os_errors_as(ConfigError, "cannot read the trace", where, REMEDY):
        content = read_limited(path)
    data = loads(content, where=where, error=ConfigError, remedy=REMEDY)
    about = data.get("otherData") if isinstance(data, dict) else None
    records = data.get("traceEvents") if isinstance(data, dict) else None
    if (
        not isinstance(about, dict)
        or about.get("format") != FORMAT
        or not isinstance(records, list)
    ):
        raise ConfigError("this is not a trace of pdcompile", where=where, remedy=REMEDY)
    events = tuple(
        _event(one, f"{where}: traceEvents[{n}]")
        for n, one in enumerate(records)
        if not (isinstance(one, dict) and one.get("ph") == "M")
    )
    return Trace(
        events, about.get("measured") is True, about.get("apart") is True, str(about.get("plan"))
    )


def _event(one: Any, where: str) -> RecordedEvent:
    arguments = one.get("args") if isinstance(one, dict) else None
    if not isinstance(arguments, dict):
        raise ConfigError("an event without args", where=where, remedy=REMEDY)
    numbers = [one.get("pid"), *map(arguments.get, ARGUMENTS)]
    times, action = [one.get("ts"), one.get("dur")], arguments.get("action")
    for name, value in zip(("pid", *ARGUMENTS), numbers, strict=True):
        if type(value) is not int:
            raise ConfigError(f"{name} is {value!r}, no whole number", where=where, remedy=REMEDY)
    for name, time in zip(("ts", "dur"), times, strict=True):
        if (
            type(time) not in (int, float)
            or not math.isfinite(time)
            or (name == "dur" and time < 0)
        ):
            raise ConfigError(f"{name} is {time!r}, no time", where=where, remedy=REMEDY)
    if not isinstance(action, str):
        raise ConfigError(f"action is {action!r}, no text", where=where, remedy=REMEDY)
    rank, stage, minibatch, microbatch = numbers
    start, length = (time / 1e6 for time in times)
    return RecordedEvent(rank, stage, action, minibatch, microbatch, start, start + length)
