"""Section ``parts``: how far a search over parts is behind what a person would type.

``--parts any --replicas any --updates auto`` against stages x replicas x parts by each split, every
device in use and the better updates, on the same costs: as in section ``regret``, but with 1F1B and
as many microbatches everywhere.  A choice by hand ends once it is known to be no faster; where that
holds even of parts that share all work (see `LayoutSearch.ideal`), no split of them is tried.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any, NamedTuple

from pdcompile.batch import example_call
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.driver import fastest, planned_layout
from pdcompile.errors import PdcompileError
from pdcompile.layout_search import NOT_HERE, LayoutSearch, Planned
from pdcompile.options import Options
from pdcompile.options.layouts import OF_EXPERTS, SPLITS
from pdcompile.pass_runner import PassRunner
from pdcompile.passes.planning.search.trials import Sketched
from pdcompile.passes.simulate import simulate
from pdcompile.report.labels import counted
from planning.auto import Told
from planning.regret import GB, NETWORK, TEN_GBIT, made
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only parts"
AUTO, FIXED, IDEAL = 60.0, 20.0, 5.0  # seconds of search


class Case(NamedTuple):
    """A model on hosts of so many devices of a kind, each with so much memory."""

    model: str
    hosts: int
    devices: int
    kind: str
    memory: int
    network: float  # bytes/s between hosts
    microbatches: int


CASES = (
    Case("GPT-2 medium", 1, 4, "a100-40", 40 * GB, NETWORK, 8),
    Case("GPT-2 medium", 2, 4, "a100-40", 40 * GB, TEN_GBIT, 8),
    Case("Llama 7B", 2, 4, "a100-80", 80 * GB, NETWORK, 8),
    Case("Llama 7B", 4, 8, "a100-40", 40 * GB, NETWORK, 16),
    Case("Llama 13B", 1, 8, "a100-80", 80 * GB, NETWORK, 16),
    Case("Llama 13B", 4, 8, "a100-80", 80 * GB, NETWORK, 16),
    Case("Llama 2 70B", 8, 8, "a100-80", 80 * GB, NETWORK, 32),
    Case("Mixtral 8x7B", 4, 8, "a100-80", 80 * GB, NETWORK, 16),
    Case("Mixtral 8x7B", 8, 8, "a100-40", 40 * GB, NETWORK, 16),
)


def fixed(hosts: int, inside: int, *, experts: bool = False) -> Iterator[dict[str, Any]]:
    """Choices that people make: all devices, equally many for each stage."""
    splits = SPLITS + OF_EXPERTS * experts
    for parts in (p for p in (1, 2, 4, 8) if p <= inside):
        places = hosts * inside // parts
        for split in splits if parts > 1 else ("auto",):
            for replicas in (r for r in (1, 2, 4, 8, 16, 32) if places % r == 0):
                yield {"stages": places // replicas, "replicas": replicas, "parts": parts,
                       "split": split, "updates": "auto" if replicas > 1 else "every"}  # fmt: skip


class Remembering(PassRunner):
    """Runner that divides a model in one way once, for all choices that follow each other."""

    layout: tuple[int, str] | None = None  # of the next choice; None: none is remembered
    _known: tuple[int, str] | None = None
    _form: Any = None

    def __call__(self, name: str, run: Callable[[], Any]) -> Any:
        if name != "parts" or self.layout is None:
            return super().__call__(name, run)
        if self.layout != self._known:
            self._known, self._form = self.layout, super().__call__(name, run)
        return self._form


class Beside:
    """Plans of one case, captured once: of all that is open, and of choices made by hand."""

    def __init__(self, case: Case) -> None:
        levels = [Level("host", case.devices, 200e9, 5e-6)]
        levels += [Level("network", case.hosts, case.network, 2e-5)] if case.hosts > 1 else []
        devices = (Device(case.kind, case.memory),) * (case.hosts * case.devices)
        self.same = {
            "cluster": Cluster(devices, tuple(levels)), "microbatches": case.microbatches,
            "recompute": "auto", "costs": "estimated", "verify": "off", "outputs": "none",
            "progress": False,
        }  # fmt: skip
        self.model, given = made(case.model)
        self.flat = example_call(self.model, given, None)
        self.told = Told()
        self.runner = Remembering(self.told)
        self.tried = LayoutSearch(True, self.runner.listener)

    def auto(self, **more: Any) -> tuple[float, str] | None:
        """Seconds of a step of the best plan found, and the plan in words; None: none."""
        open_to = {"parts": "any", "replicas": "any", "updates": "auto", "time_limit": AUTO}
        options = Options.given({**self.same, **open_to, **more})
        try:
            found = fastest(self.model, self.flat, options, None, self.runner)
        except PdcompileError:
            return None
        self.tried.whole = found.whole
        return described(found)

    def by_hand(self, choices: dict[str, Any]) -> tuple[float, str] | None:
        """The same of one choice; None too where none is faster than the best one so far."""
        options = Options.given({**self.same, "time_limit": FIXED, **choices})
        self.runner.layout = (choices["parts"], choices["split"])
        with self.tried.trying(options):
            found = planned_layout(self.model, self.flat, options, None, self.runner, self.tried)
            self.tried.add(found)
            return described(found)
        return None

    def may_be_faster(self, choices: dict[str, Any]) -> bool:
        """False if stages of so many parts are no faster even where these share all work."""
        best, whole = self.tried.best_seconds, self.tried.whole
        search = LayoutSearch(True, self.runner.listener, whole, None, best, True, ideal=True)
        options = Options.given({**self.same, "time_limit": IDEAL, **choices})
        try:
            planned_layout(self.model, self.flat, options, None, self.runner, search)
        except Sketched as sketch:
            return sketch.seconds < best
        except NOT_HERE:
            return False
        raise AssertionError("a sketch has no plan")

    def faster(self, seconds: float, choices: Iterable[dict[str, Any]]) -> tuple[float, str] | None:
        """The best of these choices, if it takes less than so many seconds."""
        self.tried.best_seconds, may_be, best = seconds, dict[tuple[int, int], bool](), None
        for one in choices:
            shared = one["parts"], one["replicas"]
            if one["parts"] > 1 and shared not in may_be:
                may_be[shared] = self.may_be_faster(one)
            if may_be.get(shared, True) and (found := self.by_hand(one)) and found[0] < seconds:
                best = min(found, best or found)
        return best


def described(found: Planned) -> tuple[float, str]:
    plan = found.plan
    forecast = plan.forecast or simulate(plan).forecast
    training, replicas = plan.training, sorted({stage.replicas for stage in plan.stages})
    text = f"{counted(len(plan.stages), 'stage')} of {'-'.join(map(str, replicas))}"
    text += f" in {training.parts} by {training.split}" if training.parts != 1 else ""
    return forecast.step_seconds, text + ", at homes" * (training.updates == "home")


def run(text: str = "") -> list[Table]:
    """The table; of cases whose model and machines contain a text."""
    warnings.simplefilter("ignore")
    table = Table(
        "parts", f"parts any ({AUTO:.0f} s) against fixed choices ({FIXED:.0f} s each)", COMMAND,
        ("model", "cluster", "first plan s", "auto", "which", "choices", "regret", "a faster one"),
        (14, 22, 12, 8, 48, 8, 8, 60),
    ).begin()  # fmt: skip
    for case in CASES:
        cluster = f"{case.hosts} x {case.devices} {case.kind} {case.memory // GB} GB"
        if text not in f"{case.model} {cluster}":
            continue
        beside = Beside(case)
        auto, first = beside.auto(), beside.told.first
        every = list(fixed(case.hosts, case.devices, experts="Mixtral" in case.model))
        best = beside.faster(auto[0] if auto else inf, every)
        table.add(
            case.model, cluster, f"{first:.1f}",
            f"{auto[0]:.4g}" if auto else "–", auto[1] if auto else "–", len(every),
            percent(auto[0] / best[0] - 1 if best else 0.0) if auto else "–",
            f"{best[0]:.4g}: {best[1]}" if best else "none",
        )  # fmt: skip
    return [table]
