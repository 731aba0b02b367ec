"""Options of an imported problem as they are read, and its answer as it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.command import (
    found_text,
    parse_bandwidth,
    parse_compression,
    parse_levels,
)
from benchmarks.published.solution import LevelSolution
from benchmarks.published.solution_table import level_lines, members
from pdcompile.errors import ConfigError
from pdcompile.units import parse_bytes

Call = Callable[..., tuple[int, str, str]]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), min_size=1, max_size=4))
def test_levels_are_innermost_first(levels: list[tuple[int, int]]) -> None:
    cluster = "x".join(str(count) for count, _ in reversed(levels))
    bandwidth = ",".join(f"{rate / 8}GB/s" for _, rate in levels)
    assert parse_levels(cluster, bandwidth) == tuple((c, 1.25e8 * r) for c, r in levels)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1250000000.0B/s", 1.25e9),
        ("1.25 GB/s", 1.25e9),
        ("10Gbit/s", 1.25e9),
        ("25GiB/s", 25 * 2.0**30),
        ("4.294967296e9 B/s", 2.0**32),
    ],
)
def test_bandwidths(text: str, rate: float) -> None:
    assert parse_bandwidth(text) == rate


def test_memory_may_be_a_fraction_of_a_unit() -> None:
    assert parse_bytes("7.45GiB") == math.floor(7.45 * 2**30)
    assert parse_bytes("16000000000.0B") == parse_bytes("16GB") == 16 * 10**9
    with pytest.raises(ConfigError, match="GiB"):
        parse_bytes("16")


@pytest.mark.parametrize(("text", "ratio"), [(None, 1.0), ("none", None), ("2.5", 2.5)])
def test_compression(text: str | None, ratio: float | None) -> None:
    assert parse_compression(text) == ratio


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "None", "half", ""])
def test_compression_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--activation-compression"):
        parse_compression(text)


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ((3, 1, 2), "1–3"),
        (("node2", "node3", "node7", "loss"), "node2–3, node7, loss"),
        (("007", "h.01"), "007, h.01"),  # a leading zero is part of a name
        ((), "nothing"),
        (tuple(range(0, 100, 2)), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, …"),
    ],
)
def test_members_are_abbreviated(ids: tuple[int | str, ...], shown: str) -> None:
    assert members(ids) == shown


def test_levels_are_indented() -> None:
    inner = LevelSolution((1, 2), 4)
    assert level_lines([LevelSolution((1, 2), 2, (inner,)), LevelSolution((3,), 1)]) == [
        "  2 × 1–2",
        "    4 × 1–2",
        "  3",
    ]


def test_the_line_of_a_running_search() -> None:
    assert found_text(None, 0.0).startswith("no plan yet  (Ctrl-C")
    assert found_text(None, 1.5).startswith("no plan yet, bound 1.5  (")
    assert found_text(2.0, 1.5).startswith("best 2, bound 1.5, gap 25 %  (")
