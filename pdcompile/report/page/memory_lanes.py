"""Memory of a page: each rank's peak by what it is full of, and curves over time of the fullest."""

from __future__ import annotations

from collections.abc import Sequence

from pdcompile.passes.simulate.ledger import Held
from pdcompile.plan import MemoryLedger, Plan
from pdcompile.report.page.page_data import Grid, MemoryLane, MemoryLanes
from pdcompile.report.palette import MEMORY
from pdcompile.report.plan_table import fullest, limits, memory_table
from pdcompile.units import format_bytes

MOST_CURVES = 8
MOST_POINTS = 400  # of a curve
LINES: dict[str, tuple[str, ...]] = {
    "weights": ("weights_bytes",),
    "gradients": ("gradients_bytes",),
    "optimizer state": ("optimizer_bytes",),
    "activations": ("activations_bytes", "inputs_bytes", "outputs_bytes"),
    "messages": ("receive_bytes", "send_bytes"),
    "temporaries": ("workspace_bytes", "temporaries_bytes"),
}
assert LINES.keys() == MEMORY.keys()


def memory_lanes(plan: Plan, curves: Sequence[Sequence[Held]], seconds: float) -> MemoryLanes:
    """Memory of a plan with a forecast; `curves` by rank over so many seconds."""
    assert plan.forecast is not None
    limit_of, ledgers = limits(plan), plan.forecast.ledgers
    drawn = fullest(plan)[:MOST_CURVES]
    lanes = []
    for rank, ledger in enumerate(ledgers):
        limit, total = limit_of.get(rank), ledger.total_bytes
        lanes.append(
            MemoryLane(
                rank,
                limit,
                "no limit" if limit is None else format_bytes(limit),
                format_bytes(total),
                f"{100 * total / limit:.0f} %" if limit else "",
                limit is not None and total > limit,
                grouped(ledger),
                thinned(curves[rank]) if rank in drawn else (),
            )
        )
    hidden = len(ledgers) - len(drawn)
    note = f"Over time: the {MOST_CURVES} fullest ranks; {hidden} others are left out." * (
        hidden > 0
    )
    return MemoryLanes(tuple(LINES), seconds, tuple(lanes), Grid.of(memory_table(plan)), note)


def grouped(ledger: MemoryLedger) -> tuple[int, ...]:
    """The bytes of each group; together they are the ledger's total."""
    return tuple(sum(getattr(ledger, name) for name in names) for names in LINES.values())


def thinned(
    curve: Sequence[Held], most: int = MOST_POINTS
) -> tuple[tuple[float, *tuple[int, ...]], ...]:
    """Points of a curve, at most so many; of neighbours the fullest, so that the peak remains."""
    size = -(-len(curve) // most) if curve else 1
    chunks = (curve[i : i + size] for i in range(0, len(curve), size))
    kept = (max(chunk, key=lambda one: one.ledger.total_bytes) for chunk in chunks)
    return tuple((one.seconds, *grouped(one.ledger)) for one in kept)
