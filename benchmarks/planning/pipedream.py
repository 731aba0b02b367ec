"""Section ``pipedream``: five profiles on twenty-six clusters, beside PipeDream's own optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.published import pipedream_model as profiles
from planning import fresh
from planning.published import REFERENCE, optimizer
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only pipedream"
Entry = tuple[str, str, dict[str, Any]]  # network, cluster, published answer
SAME = 1e-9  # relative difference that summation order explains


def arguments(network: str, params: dict[str, Any]) -> tuple[str, ...]:
    """The command's arguments for one entry of the published answers."""
    given = [
        "--import", "pipedream", str(REFERENCE / "pipedream" / f"{network}.txt"),
        "--cluster", "x".join(map(str, reversed(params["n"]))),
        "--bandwidth", ",".join(f"{rate:.0f}B/s" for rate in params["b"]),
    ]  # fmt: skip
    given += ["--straight"] * params.get("straight", False)
    given += ["--fewer"] * params.get("fewer", False)
    if params.get("usemem"):
        given += ["--memory", f"{params['mem']:.0f}B"]
    if "acr" in params:
        ratio = params["acr"]
        given += ["--activation-compression", "none" if ratio is None else f"{ratio}"]
    return tuple(given)


def configuration(stages: Sequence[dict[str, Any]]) -> str:
    """``15-1``: the replicas of each stage; ``1-…-1 (16)``: sixteen equal ones in a row."""
    parts: list[list[int]] = []
    for stage in stages:
        if parts and parts[-1][0] == stage["replicas"]:
            parts[-1][1] += 1
        else:
            parts.append([stage["replicas"], 1])
    shown = [
        f"{replicas}-…-{replicas} ({times})" if times > 8 else "-".join([str(replicas)] * times)
        for replicas, times in parts
    ]
    return "-".join(shown) or "none"


def run() -> list[Table]:
    everything = optimizer()
    entries = [
        (n, c, theirs) for n, clusters in everything.items() for c, theirs in clusters.items()
    ]
    free = [entry for entry in entries if "mem" not in entry[2]["params"]]
    limited = [entry for entry in entries if "mem" in entry[2]["params"]]
    return [*_free(free), _limited(limited)]


def _free(entries: Sequence[Entry]) -> list[Table]:
    table = Table(
        "pipedream",
        "PipeDream profiles: seconds per minibatch at the bottleneck",
        COMMAND,
        ("network", "cluster", "ours", "published", "ratio", "gap", "configuration", "published",
         "CPU s", "MB"),
        (9, 38, 11, 11, 9, 7, 26, 26, 6, 5),
    ).begin()  # fmt: skip
    summary: dict[str, list[tuple[float, float, bool]]] = {}
    for network, cluster, theirs in entries:
        found = fresh.plan(*arguments(network, theirs["params"]))
        ours, published = found.answer["objective"], theirs["pipeline_time_s"]
        proved = found.answer["gap"] == 0
        summary.setdefault(network, []).append((ours / published, found.cpu_seconds, proved))
        table.add(
            network, cluster, ours, published, f"{ours / published:.5f}",
            percent(found.answer["gap"]), configuration(found.answer["stages"]),
            configuration(theirs["stages"]), f"{found.cpu_seconds:.1f}",
            found.peak_bytes // 10**6,
        )  # fmt: skip
    return [table, _summary(summary)]


def _limited(entries: Sequence[Entry]) -> Table:
    """Limits are of a worker; data-parallel keeps a minibatch of the whole network on each."""
    table = Table(
        "pipedream_memory",
        "The same with a memory limit (the published option is unsound)",
        COMMAND,
        ("network", "cluster", "limit GB", "ours", "needs GB", "configuration", "published",
         "configuration", "data-parallel needs GB"),
        (9, 22, 8, 11, 9, 15, 11, 15, 23),
    ).begin()  # fmt: skip
    for network, cluster, theirs in entries:
        answer = fresh.plan(*arguments(network, theirs["params"])).answer
        graph = profiles.read(REFERENCE / "pipedream" / f"{network}.txt")
        everything = sum(node.activation_bytes + node.parameter_bytes for node in graph.nodes)
        held = [stage["memory_bytes"] for stage in answer["stages"]]
        table.add(
            network, cluster, f"{theirs['params']['mem'] / 1e9:g}", answer["objective"],
            f"{max(held) / 1e9:.1f}" if held else None,
            configuration(answer["stages"]) if held else answer["status"],
            theirs["pipeline_time_s"], configuration(theirs["stages"]), f"{everything / 1e9:.1f}",
        )  # fmt: skip
    return table


def _summary(found: dict[str, list[tuple[float, float, bool]]]) -> Table:
    table = Table(
        "pipedream_summary",
        "The same in short",
        COMMAND,
        ("network", "clusters", "better", "equal", "worse", "best ratio", "worst ratio", "proved",
         "slowest CPU s"),
        (10, 8, 7, 7, 7, 11, 11, 7, 14),
    ).begin()  # fmt: skip
    for network, rows in found.items():
        ratios = [ratio for ratio, _, _ in rows]
        better = sum(ratio < 1 - SAME for ratio in ratios)
        worse = sum(ratio > 1 + SAME for ratio in ratios)
        table.add(
            network, len(rows), better, len(rows) - better - worse, worse, f"{min(ratios):.5f}",
            f"{max(ratios):.5f}", sum(proved for _, _, proved in rows),
            f"{max(seconds for _, seconds, _ in rows):.1f}",
        )  # fmt: skip
    everything = [row for rows in found.values() for row in rows]
    table.note(
        rows=len(everything),
        better=sum(ratio < 1 - SAME for ratio, _, _ in everything),
        worse=sum(ratio > 1 + SAME for ratio, _, _ in everything),
        proved=sum(proved for _, _, proved in everything),
        slowest_seconds=max(seconds for _, seconds, _ in everything),
    )
    return table
