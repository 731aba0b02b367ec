"""Section ``parts``: how far a search over parts is behind what a person would type.

``--parts any --replicas any --updates auto`` against stages x replicas x parts by each split and
updates by hand, every device in use, on the same costs: as in section ``regret``, but with 1F1B and
as many microbatches everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from pdcompile.batch import FlatCall, example_call
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.driver import build
from pdcompile.errors import PdcompileError
from pdcompile.options import Options
from pdcompile.options.layouts import SPLITS
from planning.regret import GB, NETWORK, TEN_GBIT, made
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only parts"
AUTO, FIXED = 60.0, 5.0  # seconds of search
#: model, hosts, devices of each, their kind and memory, bytes/s between hosts, microbatches
CASES = (
    ("GPT-2 medium", 1, 4, "a100-40", 40 * GB, NETWORK, 8),
    ("GPT-2 medium", 2, 4, "a100-40", 40 * GB, TEN_GBIT, 8),
    ("Llama 7B", 2, 4, "a100-80", 80 * GB, NETWORK, 8),
    ("Llama 13B", 4, 8, "a100-80", 80 * GB, NETWORK, 16),
)


def fixed(hosts: int, inside: int) -> Iterator[dict[str, Any]]:
    """Choices that people make: all devices, equally many for each stage."""
    for parts in (p for p in (1, 2, 4, 8) if p <= inside):
        places = hosts * inside // parts
        for replicas in (r for r in (1, 2, 4, 8, 16, 32) if places % r == 0):
            for split in SPLITS if parts > 1 else ("auto",):
                for updates in ("every", "home") if replicas > 1 else ("every",):
                    yield {"stages": places // replicas, "replicas": replicas, "parts": parts,
                           "split": split, "updates": updates}  # fmt: skip


def step_seconds(model: Any, flat: FlatCall, options: dict[str, Any]) -> tuple[float, str] | None:
    """Seconds of a step by the plan's forecast, and the plan in words; None: there is none."""
    given = {"costs": "estimated", "verify": "off", "outputs": "none", "progress": False}
    try:
        plan = build(model, flat, Options.given({**given, **options})).plan
    except PdcompileError:
        return None
    assert plan.forecast is not None
    training, replicas = plan.training, sorted({stage.replicas for stage in plan.stages})
    text = f"{len(plan.stages)} stages of {'-'.join(map(str, replicas))}"
    text += f" in {training.parts} by {training.split}" if training.parts != 1 else ""
    return plan.forecast.step_seconds, text + ", at homes" * (training.updates == "home")


def run(cases: Any = CASES) -> list[Table]:
    warnings.simplefilter("ignore")
    table = Table(
        "parts", f"parts any ({AUTO:.0f} s) against fixed choices ({FIXED:.0f} s each)", COMMAND,
        ("model", "cluster", "auto", "which", "best fixed", "which fixed", "regret", "found"),
        (14, 22, 8, 44, 10, 44, 8, 7),
    ).begin()  # fmt: skip
    for name, hosts, inside, kind, memory, rate, microbatches in cases:
        levels = [Level("host", inside, 200e9, 5e-6), Level("network", hosts, rate, 2e-5)]
        levels = levels[: 1 if hosts == 1 else 2]
        cluster = Cluster((Device(kind, memory),) * (hosts * inside), tuple(levels))
        model, given = made(name)
        flat = example_call(model, given, None)
        same = {"cluster": cluster, "microbatches": microbatches, "recompute": "auto"}
        open_to = {"parts": "any", "replicas": "any", "updates": "auto", "time_limit": AUTO}
        auto = step_seconds(model, flat, {**same, **open_to})
        every = list(fixed(hosts, inside))
        found = [step_seconds(model, flat, {**same, **one, "time_limit": FIXED}) for one in every]
        best = min((one for one in found if one is not None), default=None)
        regret = percent(auto[0] / best[0] - 1) if auto and best else "–"
        table.add(
            name, f"{hosts} x {inside} {kind} {memory // GB} GB",
            f"{auto[0]:.4g}" if auto else "–", auto[1] if auto else "–",
            f"{best[0]:.4g}" if best else "–", best[1] if best else "–",
            regret, f"{sum(one is not None for one in found)}/{len(every)}",
        )  # fmt: skip
    return [table]
