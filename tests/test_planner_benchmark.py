"""Parts that benchmarks/planner.py adds to the planner: cost formulas, tables, and a brute
force."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.published import pipedream_model as profiles
from benchmarks.published.piper_model import (
    MenuEdge,
    MenuNode,
    MenuProblem,
    NodeVariant,
)
from benchmarks.published.placement_model import (
    DeviceClass,
    PlacementEdge,
    PlacementNode,
    PlacementProblem,
)
from tests.helpers.reference import folder

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def planning() -> Iterator[SimpleNamespace]:
    """The benchmark's modules, which are a package only for their own scripts."""
    sys.path.insert(0, str(BENCHMARKS))
    from planning import page, papers, pipedream, published, tables, two_bw
    from random_problems import placement

    yield SimpleNamespace(
        page=page, papers=papers, pipedream=pipedream, published=published, tables=tables,
        placement=placement, two_bw=two_bw,
    )  # fmt: skip
    sys.path.remove(str(BENCHMARKS))


def test_data_parallel_is_what_the_published_speed_ups_are_relative_to(planning: Any) -> None:
    data = folder("pipedream")
    for network, clusters in planning.published.optimizer().items():
        graph = profiles.read(data / f"{network}.txt")
        for theirs in clusters.values():
            levels = tuple(zip(theirs["params"]["n"], theirs["params"]["b"], strict=True))
            expected = theirs["speedup_vs_dp"] * theirs["pipeline_time_s"]
            assert planning.papers.data_parallel(graph, levels) == pytest.approx(expected, rel=1e-9)


def test_the_published_15_1_is_the_best_15_1(planning: Any) -> None:
    graph = profiles.read(folder("pipedream") / "vgg16.txt")
    theirs = planning.published.optimizer()["vgg16"]["flat16_25Gbps"]
    assert theirs["config"] == "15-1"
    best = planning.papers.two_stages(graph, (15, 1), 3.125e9)
    assert best == pytest.approx(theirs["pipeline_time_s"], rel=1e-9)


def test_arguments_of_a_published_entry(planning: Any) -> None:
    found = planning.pipedream.arguments(
        "vgg16",
        {"n": [4, 2], "b": [1e10, 1.25e9], "usemem": True, "mem": 4e9, "acr": None, "fewer": True},
    )
    assert found[3:] == (
        "--cluster", "2x4", "--bandwidth", "10000000000B/s,1250000000B/s", "--fewer",
        "--memory", "4000000000B", "--activation-compression", "none",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("replicas", "text"),
    [([15, 1], "15-1"), ([1] * 16, "1-…-1 (16)"), ([2, 1, 1, 3], "2-1-1-3"), ([], "none")],
)
def test_configuration(replicas: list[int], text: str, planning: Any) -> None:
    assert planning.pipedream.configuration([{"replicas": r} for r in replicas]) == text


def test_tables_print_and_come_back(
    planning: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = planning.tables.Table(
        "name", "Title", "python x.py", ("what", "s", "gap"), (6, 8, 5)
    ).begin()
    table.add("a", 0.125, None)
    table.note(largest=0.125)
    assert capsys.readouterr().out.splitlines() == [
        "", "Title", "  $ python x.py", "what          s   gap", "a         0.125     –",
        "  largest = 0.125",
    ]  # fmt: skip
    assert table.markdown() == "| what | s | gap |\n| --- | ---: | ---: |\n| a | 0.125 | – |"
    planning.tables.save([table], tmp_path / "new" / "t.json")
    assert planning.tables.load(tmp_path / "new" / "t.json") == [table]


def test_the_page_quotes_tables_and_their_figures(
    planning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "page.md"
    monkeypatch.setattr(planning.page, "TEMPLATE", template)
    table = planning.tables.Table("t", "Title", "python x.py", ("a",), (3,), [["1"]], {"most": 2})
    template.write_text("at most [[t.most:.2f]] s\n\n[[t]]\n", encoding="utf-8")
    assert planning.page.render([table]) == (
        "at most 2.00 s\n\n    python x.py\n\n| a |\n| --- |\n| 1 |\n"
    )
    with pytest.raises(KeyError):
        planning.page.render([])


def test_two_equal_layers_under_three_schedules(planning: Any) -> None:
    """F 1, B 2, weights 4, activations 10; two stages, two microbatches, a byte between them.

    A flush takes (2 + 1)·3, a stream 2·3; again, each forward counts twice.  The first stage holds
    weights, gradient, Adam's two (and a second version) and two microbatches, besides two
    gradients of a byte; running forward again one set of activations, and what it still sends.
    """

    def layer(name: str) -> MenuNode:
        kept, again = NodeVariant("kept", 3.0, 4, 10), NodeVariant("again", 4.0, 4, 1)
        return MenuNode(name, {1: (kept, again)}, "Layer")

    nodes = (MenuNode("mask", {1: (NodeVariant("", 0.0),) * 2}, "tensor"), layer("a"), layer("b"))
    edges = (MenuEdge(0, 1, 9.0), MenuEdge(1, 2, 1.0))
    stages = planning.two_bw.cut(MenuProblem(nodes, edges, 2, math.inf, 1, 1e9), 2)
    assert list(stages.stage_of) == [0, 1]
    expected = {"gpipe": (9, 12, 38, 30), "1f1b": (9, 12, 38, 30), "2bw": (6, 8, 42, 34)}
    for name, (seconds, twice, held, less) in expected.items():
        kept, again = planning.two_bw.outcomes(planning.two_bw.planned(name, stages, 2))
        assert (kept.seconds, again.seconds) == pytest.approx((seconds, twice), rel=1e-6)
        assert (kept.peak_bytes, again.peak_bytes) == (held, less)
        assert kept.fits
        assert planning.two_bw.chosen(name, (kept, again)) is (again if name == "gpipe" else kept)


def test_brute_force_on_a_problem_solved_by_hand(planning: Any) -> None:
    """a(2) → b(3) → c(4), moving a costs 1 and b costs 2: {a, b} | {c} is 7, {a} | {b, c} is 8."""
    nodes = tuple(PlacementNode(n, (t, 20.0), 1.0) for n, t in zip("abc", (2, 3, 4), strict=True))
    edges = (PlacementEdge(0, 1, 1.0), PlacementEdge(1, 2, 2.0))

    def best(memory: float, cpus: int = 0) -> float:
        classes = (
            DeviceClass("accelerator", 2, memory),
            DeviceClass("cpu", cpus, transfers=False),
        )
        return float(planning.placement.brute_force(PlacementProblem(nodes, edges, classes)))

    assert best(3.0) == 7.0
    assert best(2.0) == 7.0
    assert math.isinf(best(1.0))
    assert best(1.0, cpus=1) == 20.0


def test_backward_nodes_follow_their_partners(planning: Any) -> None:
    """f0 → f1, b1 → b0: colours tie b to f; an orphan backward node takes the mirrored order."""
    forward = (PlacementNode(0, (1, 1), 0, 0), PlacementNode(1, (1, 1), 0, 1))
    backward = (PlacementNode(2, (1, 1), 0, 0, True), PlacementNode(3, (1, 1), 0, None, True))
    edges = (PlacementEdge(0, 1, 1.0), PlacementEdge(3, 2, 1.0))
    classes = (DeviceClass("accelerator", 2), DeviceClass("cpu", 0, transfers=False))
    problem = PlacementProblem(forward + backward, edges, classes)
    assert set(planning.placement.assignments(problem, 2)) == {
        (0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1), (1, 1, 1, 1)
    }  # fmt: skip
