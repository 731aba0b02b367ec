"""Timelines for Perfetto and chrome://tracing, in the Trace Event Format: written, and read again.

The one format of timelines in files, of simulations and of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from pdcompile.errors import ConfigError, errors_as
from pdcompile.files import read_limited
from pdcompile.jsonio import decode, encode, loads
from pdcompile.report.timeline import COMPUTE, Event
from pdcompile.schedule.program import RecordedEvent

FORMAT = "pdcompile.trace/1"
COMPUTE_TRACK, LINK_TRACK = 0, 1
REMEDY = "give a file that `pdcompile run --trace` or `pdcompile simulate --trace` wrote"


@dataclass(frozen=True, slots=True)
class About:
    """Origin of a timeline: a run, and of ranks that were processes of their own (else one process
    took turns); `plan` is the plan's fingerprint.  In a file it is the ``otherData``."""

    measured: bool
    apart: bool
    plan: str
    format: str = FORMAT


@dataclass(frozen=True, slots=True)
class _Arguments:
    action: str
    stage: int
    minibatch: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class _Span:
    """A complete event of the format; `pid` is the rank, `ts` and `dur` are microseconds."""

    ph: str
    name: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: _Arguments


def trace(events: Sequence[Event], about: About) -> dict[str, Any]:
    """The JSON object that Perfetto opens: one process a rank, compute and communication tracks."""
    records: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        stages = sorted({event.stage for event in events if event.rank == rank} - {-1})
        name = f"rank {rank} (stage {', '.join(map(str, stages))})"
        records.append(_meta("process_name", rank, 0, name))
        records.append(_meta("thread_name", rank, COMPUTE_TRACK, "compute"))
        records.append(_meta("thread_name", rank, LINK_TRACK, "communication"))
    records.extend(encode(_span(event)) for event in events)
    return {"displayTimeUnit": "ms", "otherData": encode(about), "traceEvents": records}


def _meta(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


def _span(event: Event) -> _Span:
    action = str(event.action)
    category, track = "communication", LINK_TRACK
    if action in COMPUTE:
        category, track = "compute", COMPUTE_TRACK
    label = f"{action} {event.microbatch}" if event.microbatch >= 0 else action
    begin, length = event.start_seconds * 1e6, (event.end_seconds - event.start_seconds) * 1e6
    arguments = _Arguments(action, event.stage, event.minibatch, event.microbatch)
    return _Span("X", label, category, event.rank, track, begin, length, arguments)


def load(path: str | PathLike[str]) -> tuple[tuple[RecordedEvent, ...], About]:
    """Read a trace that `trace` made.

    Raises:
        ConfigError: the file cannot be read, or is no such trace; names the place in it.
    """
    where = str(path)
    try:
        with errors_as(ConfigError, "cannot read the trace", where, REMEDY):
            content = read_limited(path)
        data = loads(content, where=where, error=ConfigError)
        said = data.get("otherData") if isinstance(data, dict) else None
        records = data.get("traceEvents") if isinstance(data, dict) else None
        known = isinstance(said, dict) and said.get("format") == FORMAT
        if not known or not isinstance(records, list):
            raise ConfigError("this is not a trace of pdcompile", where=where)
        about = decode(About, said, where=f"{where}: otherData", error=ConfigError)
        events = tuple(
            _event(one, f"{where}: traceEvents[{n}]")
            for n, one in enumerate(records)
            if not (isinstance(one, dict) and one.get("ph") == "M")
        )
    except ConfigError as error:
        error.remedy = REMEDY
        raise
    return events, about


def _event(data: Any, where: str) -> RecordedEvent:
    span = decode(_Span, data, where=where, error=ConfigError)
    if span.dur < 0:
        raise ConfigError(f"dur is {span.dur}, no time", where=where)
    args, start = span.args, span.ts / 1e6
    end = start + span.dur / 1e6
    return RecordedEvent(
        span.pid, args.stage, args.action, args.minibatch, args.microbatch, start, end
    )
