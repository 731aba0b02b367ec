"""Groups, pins and order: what a file's colours and edges mean for a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.published.placement.node_groups import grouped
from benchmarks.published.placement_model import (
    DeviceClass,
    PlacementEdge,
    PlacementNode,
    PlacementProblem,
)

CLASSES = (DeviceClass("accelerator", 2), DeviceClass("cpu", 1, transfers=False))


def problem(
    nodes: Sequence[tuple[str | None, bool]], edges: Sequence[tuple[int, int, float]]
) -> PlacementProblem:
    """Nodes as (colour, backward); node i takes 2^i on an accelerator and has size 10^i."""
    return PlacementProblem(
        tuple(
            PlacementNode(i, (2.0**i, 3.0), 10.0**i, color, backward)
            for i, (color, backward) in enumerate(nodes)
        ),
        tuple(PlacementEdge(*edge) for edge in edges),
        CLASSES,
    )


def test_colours_are_groups_and_sums_are_theirs() -> None:
    found = grouped(problem([("a", False), (None, False), ("a", True)], [(0, 1, 5.0)]))
    assert found.members == ((0, 2), (1,))
    assert found.seconds == ((5.0, 6.0), (2.0, 3.0))
    assert found.sizes == (101.0, 10.0)
    assert found.arcs == ((0, 1),)
    assert (found.pins, found.costs) == (((0, 1),), (5.0,))


def test_backward_edges_between_partners_order_nothing() -> None:
    nodes = [("a", False), ("b", False), ("b", True), ("a", True)]
    found = grouped(problem(nodes, [(0, 1, 1.0), (1, 2, 2.0), (2, 3, 4.0)]))
    assert found.arcs == ((0, 1),)
    # The value 0 → 1 and the gradient 2 → 3 have equal pins, 1 → 2 stays inside.
    assert (found.pins, found.costs) == (((0, 1),), (5.0,))


def test_a_backward_node_without_partner_follows_the_mirrored_order() -> None:
    nodes = [("a", False), ("b", False), ("b", True), ("lonely", True), ("a", True)]
    found = grouped(problem(nodes, [(0, 1, 0.0), (2, 3, 0.0), (3, 4, 0.0)]))
    names = {members: g for g, members in enumerate(found.members)}
    a, lonely, b = names[0, 4], names[3,], names[1, 2]
    assert set(found.arcs) == {(a, lonely), (lonely, b)}
    assert found.pins == ()


def test_a_colourless_backward_node_has_no_partner() -> None:
    found = grouped(problem([("a", False), ("a", True), (None, True)], [(1, 2, 1.0)]))
    assert found.members == ((2,), (0, 1))
    assert found.arcs == ((0, 1),)


def test_colours_that_force_a_circle_are_one_group() -> None:
    nodes = [("a", False), ("b", False), ("a", False), (None, False)]
    found = grouped(problem(nodes, [(0, 1, 1.0), (1, 2, 1.0), (2, 3, 7.0)]))
    assert found.members == ((0, 1, 2), (3,))
    assert (found.pins, found.costs) == (((0, 1),), (7.0,))


def test_a_value_with_many_users_has_all_of_them_as_pins() -> None:
    found = grouped(problem([(None, False)] * 4, [(0, v, 3.0) for v in (1, 2, 3)]))
    assert (found.pins, found.costs) == (((0, 1, 2, 3),), (3.0,))
