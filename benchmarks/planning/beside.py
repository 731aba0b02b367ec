"""Section ``beside``: cuts that others make of the same models, on the same costs and clock.

The cuts lie between *layers*: each block, what runs before the first one and what runs after the
last one.  Equal layers: equally many blocks a stage, one more on the first stages; embedding and
head go with the first and the last.  Equal parameters: the largest stage has as few parameters as
can be.  ``auto_partition`` is what pytorch pull request 179212 proposes, after its description and
its authors' paper (AutoPipe, IEEE CLUSTER 2022), in our own words and code: layers are balanced,
then moved off the stage that decides, as long as that makes a simulated step shorter.

Seconds of a step are those of our simulator for all of them, which counts updates too.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate, islice, pairwise
from typing import Any

import torch

from pdcompile.batch import FlatCall, example_call, resolve_batch
from pdcompile.cluster import Cluster
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.options import Options
from pdcompile.options.configuration import configure
from pdcompile.pass_runner import PassRunner
from pdcompile.passes.coarsen.constraints import between_borders
from pdcompile.passes.form.module_tree import ancestors
from pdcompile.passes.partition.alternatives import seconds_of
from pdcompile.passes.planning.candidate_plan import candidate_plan
from pdcompile.passes.planning.solved_problem import candidate_of, placed
from pdcompile.passes.trace import capture
from pdcompile.plan import Forecast, Plan
from pdcompile.plan.evaluate import Evaluation
from pdcompile.planner import Planner
from pdcompile.problem import PartitionProblem
from planning.real import batch, cluster, models
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only beside"
DEVICES, MICROBATCHES, TIME_LIMIT = (4, 8), 16, 10.0
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1}  # stages a device
BLOCKS = ("transformer.h.*", "*.layers.*", "*.encoder.layer.*", "*coder.block.*")
MOST_TRIED = 300  # partitions that `auto_partition` simulates
ROUNDING = 1e-6  # relative

Cut = tuple[int, ...]  # the layer that each stage but the first begins with


@dataclass(frozen=True)
class Layers:
    """Model as other planners know it: a list of layers, with seconds and parameters."""

    begins: tuple[int, ...]  # items of the planner's problem
    is_block: tuple[bool, ...]
    seconds: tuple[float, ...]
    parameters: tuple[int, ...]

    def stage_of(self, cut: Cut, num_items: int) -> tuple[int, ...]:
        """The stage of each item of the problem."""
        ends = pairwise((0, *(self.begins[layer] for layer in cut), num_items))
        return tuple(s for s, (a, b) in enumerate(ends) for _ in range(a, b))


def layers_of(graph: OpGraph, problem: PartitionProblem, patterns: Sequence[str]) -> Layers:
    """The blocks that match one of the patterns, and what lies between them."""
    item_of = {name: i for i, item in enumerate(problem.items) for name in item.ops}
    found: dict[int, bool] = {}
    paths = {path for op in graph.ops for path in ancestors(op.module_path)}
    there = [one for one in patterns if any(fnmatchcase(path, one) for path in paths)]
    for run in between_borders(graph, there):
        first = graph.ops[run[0]]
        inside = any(fnmatchcase(path, one) for path in ancestors(first.module_path)
                     for one in there)  # fmt: skip
        found.setdefault(0 if not found else item_of[first.name], inside)
    begins = sorted(found)
    own = [problem.items[a:b] for a, b in pairwise((*begins, len(problem.items)))]
    return Layers(
        tuple(begins),
        tuple(found[at] for at in begins),
        tuple(sum(item.forward_seconds + item.backward_seconds for item in part) for part in own),
        tuple(sum(item.parameter_bytes for item in part) for part in own),
    )


def equal_layers(layers: Layers, stages: int) -> Cut | None:
    """None where there are fewer blocks than stages."""
    blocks = [i for i, is_block in enumerate(layers.is_block) if is_block]
    if len(blocks) < stages:
        return None
    return tuple(blocks[(len(blocks) * s + stages - 1) // stages] for s in range(1, stages))


def equal_shares(weights: Sequence[float], stages: int) -> Cut | None:
    """The largest share as small as can be; None where there are fewer layers than stages."""
    total = list(accumulate(weights, initial=0.0))
    return balanced(total, range(1, len(weights)), stages)


def auto_partition(layers: Layers, stages: int, seconds: Callable[[Cut], float]) -> Cut | None:
    """The best of the partitions that it comes by, beginning with equal seconds.

    `seconds` of a step are those of the planner's own evaluator, which knows every transfer; the
    original takes one cost for each hop.
    """
    total = list(accumulate(layers.seconds, initial=0.0))
    cuts = islice(rebalanced(total, range(1, len(layers.seconds)), stages), MOST_TRIED)
    return min(cuts, key=seconds, default=None)


def balanced(total: Sequence[float], borders: Sequence[int], stages: int) -> tuple[int, ...] | None:
    """Boundaries at `borders` that keep the largest share least; `total`: sums up to each item.

    Searches the least share by bisection: the greedy cut with shares of at most so much shows
    whether it is enough.
    """
    low, high = total[-1] / stages, total[-1]
    best = _greedy(total, borders, stages, high)
    for _ in range(40):
        share = (low + high) / 2
        found = _greedy(total, borders, stages, share)
        if found is None:
            low = share
        else:
            high, best = share, found
    return best


def rebalanced(
    total: Sequence[float], borders: Sequence[int], stages: int
) -> Iterator[tuple[int, ...]]:
    """Equal shares, and cuts that others come by from there (torch's proposed `auto_partition`):
    of each the largest share gives what is between its first borders to the stages before it, or
    between its last ones to those after it, which are balanced again."""
    first = balanced(total, borders, stages)
    waiting = deque(() if first is None else (first,))
    seen = set(waiting)
    while waiting:
        cut = waiting.popleft()
        yield cut
        for moved in _moved(total, borders, cut):
            if moved not in seen:
                seen.add(moved)
                waiting.append(moved)


def _moved(
    total: Sequence[float], borders: Sequence[int], cut: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    ends = (0, *cut, len(total) - 1)
    shares = [total[b] - total[a] for a, b in pairwise(ends)]
    s = shares.index(max(shares))
    inside = [p for p in borders if ends[s] < p < ends[s + 1]]
    if inside and s > 0:
        at = inside[0]
        front = balanced(total[: at + 1], [p for p in borders if p < at], s)
        if front is not None:
            yield (*front, at, *cut[s:])
    if inside and s < len(shares) - 1:
        at = inside[-1]
        rest = [sum_to - total[at] for sum_to in total[at:]]
        back = balanced(rest, [p - at for p in borders if p > at], len(shares) - 1 - s)
        if back is not None:
            yield (*cut[:s], at, *(at + p for p in back))


def _greedy(
    total: Sequence[float], borders: Sequence[int], stages: int, share: float
) -> tuple[int, ...] | None:
    """The cut whose shares are each as large as may be; None where one would be too large."""
    sums, cut = [total[p] for p in borders], []
    k, start = 0, 0.0
    for left in range(stages - 1, 0, -1):
        furthest = bisect_right(sums, start + share * (1 + 1e-9)) - 1
        at = min(furthest, len(borders) - left)  # as many are left for the other stages
        if at < k:
            return None
        cut.append(borders[at])
        start, k = sums[at], at + 1
    return tuple(cut) if total[-1] - start <= share * (1 + 1e-9) else None


@dataclass(frozen=True)
class Beside:
    """One plan of ours, and the forecasts of others' cuts by their names."""

    ours: Plan
    others: dict[str, Forecast | None]

    @property
    def slower(self) -> list[str]:
        """Those that are faster than ours, which there should be none of."""
        assert self.ours.forecast is not None
        own = self.ours.forecast.step_seconds * (1 - ROUNDING)
        return [name for name, one in self.others.items() if one and one.step_seconds < own]


def beside(plan: Plan, graph: OpGraph, machines: Cluster, patterns: Sequence[str]) -> Beside:
    """The cuts of others in place of the plan's, on the same stages and costs."""
    problem, found, count = plan.problem, placed(plan), len(plan.stages)
    assert problem is not None
    layers, size = layers_of(graph, problem, patterns), len(problem.items)

    def seconds(cut: Cut) -> float:
        return seconds_of(Evaluation(found.problem, layers.stage_of(cut, size), found.deployment))

    def simulated(cut: Cut | None) -> Forecast | None:
        if cut is None:
            return None
        stage_of = layers.stage_of(cut, size)
        if any(Evaluation(found.problem, stage_of, found.deployment).violations()):
            return None
        candidate = replace(candidate_of(plan), stage_of=stage_of)
        return candidate_plan(graph, problem, candidate, plan.training, machines).forecast

    return Beside(
        plan,
        {
            "equal layers": simulated(equal_layers(layers, count)),
            "equal parameters": simulated(equal_shares(layers.parameters, count)),
            "auto_partition": simulated(auto_partition(layers, count, seconds)),
        },
    )


def planned(
    model: torch.nn.Module, flat: FlatCall, captured: Capture, **options: Any
) -> tuple[Plan, OpGraph, Cluster]:
    """Our plan, the graph with the costs that it was made of, and the cluster."""
    chosen_options = Options(costs="estimated", verify="off", **options)
    layout = resolve_batch(flat, chosen_options.batch_dims)
    chosen = configure(
        chosen_options, batch_size=layout.size, splits=layout.splits, num_ranks=None, device="meta"
    )
    planner = Planner(model, captured, chosen_options, chosen, PassRunner().listener)
    graph = planner.costs()
    planner.problem()
    return planner.plan(), graph, planner.cluster


def run() -> list[Table]:
    warnings.simplefilter("ignore")
    table = Table(
        "beside",
        f"Others' cuts of the same models: seconds of a step in units of ours, {MICROBATCHES} "
        "microbatches on A100s",
        COMMAND,
        ("model", "schedule", "devices", "ours, s", "gap", "equal layers", "equal parameters",
         "auto_partition", "ours, GB sent", "auto_partition, GB sent"),
        (26, 12, 7, 10, 8, 12, 16, 14, 13, 23),
    ).begin()  # fmt: skip
    ratios: dict[str, list[float]] = {}
    slower = 0
    for name, build, tokens in models():
        with torch.device("meta"):
            model = build().train()
        flat = example_call(model, batch(tokens), None)
        layout = resolve_batch(flat, Options().batch_dims)
        captured = capture(model, flat, layout, None, microbatch_size=layout.size // MICROBATCHES)
        for schedule, each in SCHEDULES.items():
            for devices in DEVICES:
                plan, graph, machines = planned(
                    model, flat, captured, cluster=cluster(devices), stages=each * devices,
                    microbatches=MICROBATCHES, schedule=schedule, time_limit=TIME_LIMIT,
                )  # fmt: skip
                found = beside(plan, graph, machines, BLOCKS)
                slower += len(found.slower)
                assert plan.forecast is not None
                own, cells = plan.forecast.step_seconds, []
                for other, one in found.others.items():
                    if one is not None:
                        ratios.setdefault(other, []).append(one.step_seconds / own)
                    cells.append(None if one is None else f"{one.step_seconds / own:.3f}")
                theirs = found.others["auto_partition"]
                table.add(
                    name, schedule, devices, own, percent(plan.certificate.gap), *cells,
                    _gigabytes(plan.forecast), _gigabytes(theirs),
                )  # fmt: skip
    table.note(
        microbatches=MICROBATCHES,
        slower=slower,
        least=min(map(min, ratios.values())),
        **{f"{other.replace(' ', '_')}_mean": sum(own) / len(own) for other, own in ratios.items()},
        **{f"{other.replace(' ', '_')}_most": max(own) for other, own in ratios.items()},
    )
    return [table]


def _gigabytes(forecast: Forecast | None) -> str | None:
    return None if forecast is None else f"{sum(forecast.sent_bytes) / 1e9:.2f}"
