"""Section ``papers``: configurations and speed-ups over data-parallel, beside the published ones.

Both times come from PipeDream's cost model and its profiles, so a speed-up here is a prediction;
the published ones were measured.
"""

from __future__ import annotations

import itertools
import re

from benchmarks.published import pipedream_model as profiles
from benchmarks.published.pipedream_model import ProfileGraph
from planning import fresh, two_bw
from planning.pipedream import arguments, configuration
from planning.published import REFERENCE, SOSP, optimizer
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only papers"
NETWORKS = ("vgg16", "alexnet", "resnet50", "resnet18", "gnmt")
DENSE = re.compile("Linear|Embedding|Classifier")
GIGABIT = 1e9 / 8
# key in SOSP, key in the published optimizer's answers, levels innermost first
CLUSTERS = {
    "4x4, PCIe 10 GB/s, 10 Gbit/s": ("A", "A_4x4_PCIe10GB/s+10Gbps", ((4, 10e9), (4, 1.25e9))),
    "2x8, NVLink 30 GB/s, 25 Gbit/s": (
        "B", "B_2x8_NVLink30GB/s+25Gbps", ((8, 30e9), (2, 3.125e9))
    ),
    "16, 10 Gbit/s": (None, "flat16_10Gbps", ((16, 1.25e9),)),
    "16, 25 Gbit/s": (None, "flat16_25Gbps", ((16, 3.125e9),)),
    "16, 40 Gbit/s": (None, "flat16_40Gbps", ((16, 5e9),)),
}  # fmt: skip
Levels = tuple[tuple[int, float], ...]


def data_parallel(graph: ProfileGraph, levels: Levels) -> float:
    """Seconds of one stage on all workers: PipeDream's all-reduce term on every level."""
    seconds = sum(node.seconds for node in graph.nodes)
    parameters = sum(node.parameter_bytes for node in graph.nodes)
    inside = 1
    for count, bandwidth in levels:
        reduce = 4 * (count - 1) * parameters / (bandwidth * count) / inside
        seconds = (seconds + reduce) / count
        inside *= count
    return seconds


def two_stages(graph: ProfileGraph, replicas: tuple[int, int], bandwidth: float) -> float:
    """The best cut of one linear order into two stages of so many replicas, seconds."""
    order = topological(graph)
    best = float("inf")
    for cut in range(1, len(order)):
        first = set(order[:cut])
        crossing = {a for a, b in graph.edges if a in first and b not in first}
        activations = sum(graph.nodes[node].activation_bytes for node in crossing)
        times = [2 * activations / (bandwidth * count) for count in replicas]
        for count, part in zip(replicas, (order[:cut], order[cut:]), strict=True):
            compute = sum(graph.nodes[node].seconds for node in part)
            parameters = sum(graph.nodes[node].parameter_bytes for node in part)
            times.append((compute + 4 * (count - 1) * parameters / (bandwidth * count)) / count)
        best = min(best, max(times))
    return best


def topological(graph: ProfileGraph) -> list[int]:
    waiting = [0] * len(graph.nodes)
    for _, target in graph.edges:
        waiting[target] += 1
    order = [node for node, count in enumerate(waiting) if not count]
    for node in order:
        for source, target in graph.edges:
            if source == node:
                waiting[target] -= 1
                if not waiting[target]:
                    order.append(target)
    return order


def profile(network: str) -> ProfileGraph:
    return profiles.read(REFERENCE / "pipedream" / f"{network}.txt")


def solved(network: str, levels: Levels, **more: bool) -> dict[str, object]:
    params = {"n": [n for n, _ in levels], "b": [b for _, b in levels], **more}
    return fresh.plan(*arguments(network, params)).answer


def run() -> list[Table]:
    return [_profiles(), _table(), _straight(), _bandwidths(), two_bw.table()]


def _profiles() -> Table:
    """Profiles by where the parameters are: dense layers, embeddings and classifiers against the
    rest."""
    table = Table(
        "papers_profiles",
        "The profiles: what a minibatch costs, and how much of it are dense layers",
        COMMAND,
        ("network", "layers", "compute s", "parameters MB", "dense: of compute", "of parameters",
         "slowest layer", "all-reduce of all s"),
        (9, 7, 10, 14, 18, 14, 14, 20),
    ).begin()  # fmt: skip
    for network in NETWORKS:
        graph = profile(network)
        dense = [n for n in graph.nodes if DENSE.match(n.description)]
        seconds = sum(node.seconds for node in graph.nodes)
        parameters = sum(node.parameter_bytes for node in graph.nodes)
        alone = data_parallel(graph, ((16, 1.25e9),)) - seconds / 16
        table.add(
            network, len(graph.nodes), f"{seconds:.4f}", f"{parameters / 1e6:.0f}",
            percent(sum(node.seconds for node in dense) / seconds),
            percent(sum(node.parameter_bytes for node in dense) / parameters),
            percent(max(node.seconds for node in graph.nodes) / seconds), f"{alone:.4f}",
        )  # fmt: skip
    return table


def _table() -> Table:
    table = Table(
        "papers",
        "The papers' table: configuration and speed-up over data-parallel on 16 devices",
        COMMAND,
        ("network", "cluster", "ours", "gap", "speed-up", "its optimizer", "speed-up",
         "published", "measured"),
        (9, 31, 26, 6, 9, 26, 9, 19, 11),
    ).begin()  # fmt: skip
    answers = optimizer()
    for network, (cluster, (letter, key, levels)) in itertools.product(NETWORKS, CLUSTERS.items()):
        reference = data_parallel(profile(network), levels)
        answer = solved(network, levels)
        theirs = answers[network][key]
        paper = SOSP.get((network, letter or ""), ("–", "–"))
        table.add(
            network, cluster, configuration(answer["stages"]), percent(answer["gap"]),
            f"{reference / answer['objective']:.2f}", configuration(theirs["stages"]),
            f"{reference / theirs['pipeline_time_s']:.2f}", *paper,
        )  # fmt: skip
    return table


def _straight() -> Table:
    table = Table(
        "papers_straight",
        "GNMT without replication (--straight), as published",
        COMMAND,
        ("cluster", "stages", "speed-up", "with replication", "published"),
        (31, 7, 9, 17, 11),
    ).begin()
    graph = profile("gnmt")
    for cluster, (_, _, levels) in CLUSTERS.items():
        reference = data_parallel(graph, levels)
        straight, free = solved("gnmt", levels, straight=True), solved("gnmt", levels)
        table.add(
            cluster, len(straight["stages"]), f"{reference / straight['objective']:.2f}",
            f"{reference / free['objective']:.2f}", SOSP["gnmt", "A"][1],
        )  # fmt: skip
    return table


def _bandwidths() -> Table:
    table = Table(
        "papers_bandwidths",
        "16 devices in one level: what the answer is as the network gets slower",
        COMMAND,
        ("network", "Gbit/s", "ours", "speed-up", "best 15-1", "behind ours", "without boundaries",
         "speed-up"),
        (9, 7, 26, 9, 10, 12, 26, 9),
    ).begin()  # fmt: skip
    for network, gigabits in itertools.product(
        ("vgg16", "alexnet", "resnet50"), (40, 25, 10, 5, 2.5, 1)
    ):
        graph, levels = profile(network), ((16, gigabits * GIGABIT),)
        reference = data_parallel(graph, levels)
        ours, ignoring = solved(network, levels), solved(network, levels, acr=None)
        forced = two_stages(graph, (15, 1), levels[0][1])
        table.add(
            network, f"{gigabits:g}", configuration(ours["stages"]),
            f"{reference / ours['objective']:.2f}", f"{reference / forced:.2f}",
            percent(max(0.0, forced / ours["objective"] - 1)), configuration(ignoring["stages"]),
            f"{reference / ignoring['objective']:.2f}",
        )  # fmt: skip
    return table
