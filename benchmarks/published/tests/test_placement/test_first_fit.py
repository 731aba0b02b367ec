"""A search that has no time still answers with a placement."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graphs import FAMILIES, problem
from benchmarks.published.placement import first_fit, place
from benchmarks.published.placement.node_groups import grouped
from benchmarks.published.placement.placements import objective


def test_without_any_time_there_is_a_placement() -> None:
    answer = place(problem(FAMILIES["experts"](2_000, 0), 64, cpus=1), time_limit=0)
    assert answer.status == "feasible", answer.reason
    assert answer.objective is not None
    assert answer.bound <= answer.objective < math.inf


@settings(max_examples=60)
@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 60), st.integers(1, 80), st.integers(0, 2))
def test_it_keeps_the_order_and_the_counts(family: str, ops: int, devices: int, cpus: int) -> None:
    groups = grouped(problem(FAMILIES[family](ops, ops), devices, cpus=cpus))
    found = first_fit(groups)
    assert found is not None
    assert math.isfinite(objective(groups, found))
