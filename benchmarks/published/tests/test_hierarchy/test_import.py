"""Reading graph.txt: what it means, and refusals that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published import pipedream_model
from benchmarks.published.pipedream_model import HierarchyProblem
from pdcompile.errors import ConfigError, CostError

TIMES = "forward_compute_time=1.0, backward_compute_time=2.5"
NODE = f"{TIMES}, activation_size=8.0, parameter_size=3.0"


def node(name: str, description: str = "Linear(3, 4)", facts: str = NODE) -> str:
    return f"{name} -- {description} -- {facts}"


def test_nodes_edges_and_what_is_dropped() -> None:
    text = "\n".join(
        [
            node("node1", "Input0"),
            node("node2", "LSTM(2, 2)", f"{TIMES}, activation_size=[4.0; 2.0; 2], parameter_size=1")
            + " -- stage_id=3",
            node("node3", "__getitem__(0)"),
            node("node4", "__getitem__(1)"),
            node("node5"),
            "\tnode1 -- node2",
            "\tnode2 -- node3",
            "\tnode2 -- node4",
            "\tnode3 -- node5",
            "\tnode3 -- node5",
            "",
        ]
    )
    graph = pipedream_model.parse(text, where="graph.txt")
    assert [n.id for n in graph.nodes] == ["node2", "node3", "node5"]
    assert graph.dropped == ("node1", "node4")
    assert graph.edges == ((0, 1), (1, 2))
    first = graph.nodes[0]
    assert (first.seconds, first.activation_bytes, first.parameter_bytes) == (0.0035, 8.0, 1.0)


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("", "no node to place", ""),
        (node("node1", "Input0"), "no node to place", ""),
        ("nonsense", "neither a node nor an edge", ":1"),
        (node("a") + "\n" + node("a"), "appears twice", ":2"),
        (node("a") + "\n\ta -- b", "no node with id 'b'", ":2"),
        (node("a") + "\n\ta -- a", "feeds itself", ":2"),
        (node("a") + "\n\ta", "not an edge", ":2"),
        (node("a", facts=TIMES), "activation_size is missing", ":1"),
        (node("a", facts=NODE.replace("8.0", "nan")), "activation_size is 'nan'", ":1"),
        (node("a", facts=NODE.replace("8.0", "-1")), "activation_size is '-1'", ":1"),
        (node("a", facts=NODE.replace("8.0", "[1; x]")), "activation_size is 'x'", ":1"),
        (node("a", facts=NODE.replace("8.0", "[1; 2")), "no closing bracket", ":1"),
        (node("a", facts=NODE.replace("=3.0", "=1e300")), "parameter_size is '1e300'", ":1"),
        (node("a", facts=NODE.replace("=1.0", "=inf")), "forward_compute_time is 'inf'", ":1"),
        (node("a", facts=NODE.replace("=1.0", "=1_0")), "forward_compute_time is '1_0'", ":1"),
        (node("a", facts=NODE + ", parameter_size=1"), "appears twice", ":1"),
        (node("a") + "\n" + node("b") + "\n\ta -- b\n\tb -- a", "cycle: a -> b -> a", ""),
    ],
)
def test_refusals(text: str, message: str, line: str) -> None:
    with pytest.raises(CostError) as caught:
        pipedream_model.parse(text, where="graph.txt")
    assert message in caught.value.message
    assert caught.value.where == f"graph.txt{line}"
    assert caught.value.remedy


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="cannot be read"):
        pipedream_model.read(tmp_path / "missing.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CostError, match="UTF-8"):
        pipedream_model.read(tmp_path / "bytes.txt")


@pytest.mark.parametrize(
    "wrong",
    [
        {"levels": ()},
        {"levels": ((0, 1.0),)},
        {"levels": ((2, 0.0),)},
        {"levels": ((2, float("nan")),)},
        {"levels": ((2**12, 1.0), (2**12, 1.0))},
        {"memory_bytes": 0.0},
        {"memory_bytes": float("inf")},
        {"activation_compression": -1.0},
    ],
)
def test_problems_that_are_none(wrong: dict[str, object]) -> None:
    graph = pipedream_model.parse(node("a"), where="graph.txt")
    with pytest.raises(ConfigError):
        HierarchyProblem(graph, **{"levels": ((2, 1.0),), **wrong})  # type: ignore[arg-type]


def test_a_long_line_of_spaces_is_read_in_one_pass() -> None:
    # With a line end that matched as spaces too, this took minutes.
    with pytest.raises(CostError, match="forward_compute_time is missing"):
        pipedream_model.parse("1 -- Linear -- a=" + " " * 300_000 + "!", where="graph.txt")
