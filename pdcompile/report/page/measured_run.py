"""A run of a plan beside its forecast: which of its minibatches to draw, and where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from pdcompile.errors import ConfigError
from pdcompile.plan import Plan
from pdcompile.report import labels
from pdcompile.report.chrome import load
from pdcompile.report.timeline import COMPUTE, Event, bars, duration, idle
from pdcompile.schedule.program import RecordedEvent
from pdcompile.units import format_seconds

IN_TURN = (
    "One process ran all ranks in turn: stages took what is measured here, but not at the same "
    "time, so that steps and idle time say nothing, and no boxes are drawn."
)


@dataclass(frozen=True, slots=True)
class Run:
    """Compute of a run from its trace, by minibatch; `note`: what to know about it."""

    minibatches: tuple[tuple[RecordedEvent, ...], ...]
    apart: bool
    note: str = ""

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds from the start of a minibatch to that of the next; None: not known."""
        starts = [min(one.start_seconds for one in events) for events in self.minibatches]
        if not self.apart or len(starts) < 2:
            return None
        return (starts[-1] - starts[0]) / (len(starts) - 1)

    def aligned(self, drawn: Sequence[Event]) -> tuple[RecordedEvent, ...]:
        """Its last minibatches, as many as are drawn of the forecast, with the same numbers."""
        numbers = sorted({one.minibatch for one in drawn if str(one.action) in COMPUTE})
        if not self.apart or not numbers:
            return ()
        chosen = self.minibatches[-len(numbers) :]
        return tuple(
            one._replace(minibatch=number)
            for number, events in zip(numbers, chosen, strict=False)
            for one in events
        )


def run_of(path: Path, plan: Plan) -> Run:
    """The run in a trace file.

    Raises:
        ConfigError: it is no trace of a run, or of a run of another plan.
    """
    events, about = load(path)
    compute = [one for one in events if one.action in COMPUTE]
    wrong = ""
    if not about.measured or not compute:
        wrong = "this trace is not of a run"
    elif about.plan != plan.fingerprint:
        wrong = "the run is of another plan"
    if wrong:
        raise ConfigError(
            wrong,
            where=str(path),
            remedy="pdcompile run TARGET --plan plan.json --trace trace.json, with this plan",
        )
    numbers = sorted({one.minibatch for one in compute})
    minibatches = tuple(tuple(o for o in compute if o.minibatch == number) for number in numbers)
    return Run(minibatches, about.apart, "" if about.apart else IN_TURN)


def compared(plan: Plan, run: Run) -> Iterator[tuple[str, str, str, str]]:
    """Rows of what, forecast, measured and measured / forecast, step first and then by stage."""
    forecast = plan.forecast
    assert forecast is not None
    if run.step_seconds is not None:
        yield _row("a step", forecast.step_seconds, run.step_seconds)
        shown = bars(one for events in run.minibatches for one in events)
        if duration(shown):
            yield "idle", f"{100 * forecast.bubble:.1f} %", f"{100 * idle(shown):.1f} %", ""
    events = [one for minibatch in run.minibatches for one in minibatch]
    for s, stage in enumerate(plan.stages):
        backward = stage.backward_pass_seconds
        expected = (("F", "forward", stage.forward_seconds), ("B", "backward", backward),
                    ("STEP", "update", stage.update_seconds))  # fmt: skip
        for action, name, seconds in expected:
            actions = ("B", "I", "W") if action == "B" else (action,)
            own = [one for one in events if one.stage == s and one.action in actions]
            if own:
                took = sum(one.end_seconds - one.start_seconds for one in own)
                count = len({(one.minibatch, one.microbatch, one.rank) for one in own})
                yield _row(f"stage {s}, {name}", seconds, took / count)


def comparison_table(rows: Sequence[tuple[str, ...]]) -> Table:
    """Forecast and measured times, row by row."""
    made = labels.table("|measured run", ">forecast", ">measured", ">ratio")
    for row in rows:
        made.add_row(*row)
    return made


def _row(name: str, forecast: float, measured: float) -> tuple[str, str, str, str]:
    ratio = f"{measured / forecast:.2f}" if forecast > 0 else ""
    return name, format_seconds(forecast), format_seconds(measured), ratio
