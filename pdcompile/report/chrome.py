"""Timelines for Perfetto and chrome://tracing, in the Trace Event Format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdcompile.report.timeline import COMPUTE, Event

COMPUTE_TRACK, LINK_TRACK = 0, 1
COLOURS = {
    "F": "thread_state_running",
    "B": "good",
    "I": "good",
    "W": "rail_response",
    "STEP": "thread_state_iowait",
}


def trace(events: Iterable[Event]) -> dict[str, Any]:
    """The JSON object that Perfetto opens: one process a rank, compute and communication tracks.

    Times are microseconds, as the format wants.
    """
    listed = list(events)
    records: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in listed}):
        stages = sorted({event.stage for event in listed if event.rank == rank})
        name = f"rank {rank} (stage {', '.join(map(str, stages))})"
        records.append(_meta("process_name", rank, 0, name))
        records.append(_meta("thread_name", rank, COMPUTE_TRACK, "compute"))
        records.append(_meta("thread_name", rank, LINK_TRACK, "communication"))
    records.extend(_record(event) for event in listed)
    return {"displayTimeUnit": "ms", "traceEvents": records}


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
            "stage": event.stage,
            "minibatch": event.minibatch,
            "microbatch": event.microbatch,
        },
    }
    if action in COLOURS:
        record["cname"] = COLOURS[action]
    return record
