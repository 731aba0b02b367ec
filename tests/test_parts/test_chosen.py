"""The choice of parts is the best of all: of random problems, and of those that are judged."""

from __future__ import annotations

import pytest
import torch

from examples.gpt import GPT, loss_fn
from pdcompile.batch.call import example_call
from pdcompile.driver import build
from pdcompile.options import Options
from tests.helpers.counted_layouts import difference
from tests.test_parts.test_any import planned, two_hosts


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(16))
def test_the_choice_is_the_best_of_all_that_can_be_counted(block: int) -> None:
    for seed in range(5 * block, 5 * (block + 1)):
        assert difference(seed)[1] == "", seed


@pytest.mark.slow
def test_parts_stay_inside_hosts() -> None:
    best = planned(two_hosts(), 256, parts="any", replicas="any", time_limit=300.0).plan
    assert (best.training.parts, best.certificate.status) == (2, "optimal")
    assert "'inside'" in str(best.notes)


def test_parts_across_hosts_take_half_as_long_again() -> None:
    """Weights gathered between hosts, of the same stage with as many replicas."""
    same = {"parts": 2, "split": "weights+samples", "stages": 1, "replicas": 2}
    inside, across = (
        planned(two_hosts(rate), 1024, **same).plan.forecast for rate in ("100 GB/s", "12.5 GB/s")
    )
    assert inside
    assert across
    assert across.step_seconds >= 1.5 * inside.step_seconds


@pytest.mark.slow
def test_a_limit_on_memory_turns_sequence_into_width() -> None:
    """Parts of a long sequence exchange less, and hold whole weights."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model, ids = GPT(2, 512, 4, 4096), torch.zeros(1, 4096, dtype=torch.int64)
    splits = []
    for memory in ("", 'memory = "285 MB"'):
        given = {"loss_fn": loss_fn, "costs": "estimated", "cluster": two_hosts(memory=memory),
                 "verify": "off", "parts": "any", "replicas": "any", "progress": False,
                 "stages": 1, "time_limit": 300.0}  # fmt: skip
        plan = build(model, example_call(model, ids, ids), Options.given(given)).plan
        splits.append(plan.training.split)
        assert plan.certificate.status == "optimal"
    assert splits == ["sequence", "width+sequence"]


def test_a_single_microbatch_fits_where_its_ledger_does() -> None:
    """Its gradients come one by one, where its activations go."""
    with torch.device("meta"):
        model, ids = GPT(2, 512, 4, 4096), torch.zeros(1, 4096, dtype=torch.int64)
    held = 0.0
    for _ in range(2):
        given = {"loss_fn": loss_fn, "costs": "estimated", "stages": 1, "parts": 2,
                 "cluster": two_hosts(memory=f'memory = "{1.01 * held:.0f} B"' if held else ""),
                 "verify": "off", "replicas": "any", "progress": False}  # fmt: skip
        plan = build(model, example_call(model, ids, ids), Options.given(given)).plan
        held = max(ledger.total_bytes for ledger in plan.ledgers)
