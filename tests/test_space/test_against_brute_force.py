"""The search over ideals x replicas x recomputation finds what trying everything finds."""

from __future__ import annotations

import pytest

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.space import best, measure, violations
from tests.helpers.spaces import brute_force, random_case


def agree(seed: int, *, simulated: bool) -> bool:
    """Compare one random case; False when nothing is allowed there.

    The closed form is the objective of straight pipelines, and of streams but for what their
    replicas cost in the simulator; it says little of replicas under a flush.
    """
    problem, cluster, space, setting = random_case(seed)
    ranks = tuple(range(len(cluster.devices)))
    counts = tuple(range(1, len(ranks) + 1)) if seed % 3 else (1,)
    if not simulated and setting.schedule != "2bw":
        counts = (1,)
    case = (problem, cluster, space, setting, ranks, counts)
    expected = brute_force(*case, simulated=simulated)
    try:
        found = best(*case, simulated=simulated)
    except InfeasibleError:  # constraints that contradict each other
        found = None
    if expected is None or found is None:
        assert (expected, found) == (None, None), seed
        return False
    seconds, candidate = found
    assert seconds == pytest.approx(expected, rel=1e-9, abs=1e-12), seed
    assert not violations(problem, cluster, candidate)
    assert simulated or measure(problem, cluster, candidate).seconds == seconds
    return True


def test_the_optimum_of_small_problems() -> None:
    assert sum(agree(seed, simulated=False) for seed in range(80)) > 30


def test_the_simulated_optimum_of_small_problems() -> None:
    assert sum(agree(seed, simulated=True) for seed in range(20)) > 7


@pytest.mark.slow
def test_the_optimum_of_many_small_problems() -> None:
    assert sum(agree(seed, simulated=False) for seed in range(1_000, 2_000)) > 400
    assert sum(agree(seed, simulated=True) for seed in range(3_000, 3_100)) > 40
