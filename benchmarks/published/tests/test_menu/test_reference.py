"""Piper's own input: every row of its table at least as good, and proved."""

from __future__ import annotations

import pytest

from benchmarks.published import piper_model
from benchmarks.published.piper import solve
from benchmarks.published.piper_model import evaluate
from pdcompile.units import parse_bytes
from tests.helpers.reference import folder

GIB = 2**30

# devices, GiB on each, what Piper's algorithm returns (seconds per sample)
PUBLISHED = (
    (8, 8, 0.16585575),
    (32, 8, 0.0415154504),
    (64, 8, 0.0202005503),
    (128, 8, 0.0101208803),
    (512, 8, 0.00256112785),
    (64, 2, 0.0320300812),
    (128, 1, 0.03887175),
    (8, 80, 0.12200726935),
    (512, 80, 0.00227252011),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("devices", "memory", "published"), PUBLISHED)
def test_published_table(devices: int, memory: int, published: float) -> None:
    problem = piper_model.read(
        folder("piper") / "bert32a100.json",
        devices=devices,
        memory_bytes=memory * GIB,
        batch=1920,
        bytes_per_second=25 * GIB,
    )
    answer = solve(problem)
    assert answer.status == "optimal"
    assert answer.objective is not None
    # The table is rounded to nine digits.
    assert answer.objective <= published * (1 + 5e-9)
    assert answer.bound >= published * (1 - 1e-5)
    assert evaluate(problem, answer.stages).objective == answer.objective


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [1.0, 1.05, 1.1, 1.2, 1.3])
def test_tight_memory_is_proved(share: float) -> None:
    """Limits from the least possible one on."""
    file = folder("piper") / "bert32a100.json"
    reason = solve(piper_model.read(file, devices=16, memory_bytes=1e8)).reason
    # Rounded up to three digits: a hundredth below there may be no plan.
    least = parse_bytes(reason.split("; ")[-1].partition(" on each")[0])
    below = solve(piper_model.read(file, devices=16, memory_bytes=0.99 * least))
    assert below.status == "infeasible"
    answer = solve(piper_model.read(file, devices=16, memory_bytes=share * least))
    assert answer.status == "optimal"
