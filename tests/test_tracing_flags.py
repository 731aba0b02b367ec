"""Models that look into their inputs for a short cut go where eager goes, or say so."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pdcompile
from pdcompile.batch import example_call
from pdcompile.driver import build
from pdcompile.options import Options
from pdcompile.passes import trace
from pdcompile.passes.trace import attempt as attempts
from pdcompile.passes.trace.assumptions import Assumptions, Findings
from pdcompile.passes.trace.interceptors import process_state
from pdcompile.passes.trace.interceptors.process_state import GENERAL_PATH, TracingFlags
from tests.helpers.captures import captured, make, rows

pytestmark = pytest.mark.usefixtures("captured_anew")


def grouped(*, use_cache: bool) -> Any:
    """Fewer key than query heads: with and without a mask other kernels run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, max_position_embeddings=32,
        use_cache=use_cache,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def batch(*, masked: int | None = None) -> dict[str, torch.Tensor]:
    ids = torch.randint(48, (8, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if masked is not None:
        mask[masked, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def compiled(model: Any) -> Any:
    warnings.simplefilter("ignore")
    return pdcompile.compile(
        model, stages=2, cluster="1x2", microbatches=2, costs="estimated", optimizer=None,
        keep_model=True, verify="full",
    )  # fmt: skip


def differing(pipe: Any, model: Any, call: dict[str, torch.Tensor]) -> list[str]:
    reference = pdcompile.reference(model, microbatches=2, optimizer=None, keep_model=True)
    assert float(pipe.step(**call).loss) == pytest.approx(float(reference.step(**call).loss))
    ours, theirs = (dict(runner.named_parameters()) for runner in (pipe, reference))
    return [name for name in theirs if not torch.equal(ours[name].grad, theirs[name].grad)]


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [False, True])
def test_without_a_mask_the_short_cut_is_eagers(use_cache: bool) -> None:
    model = grouped(use_cache=use_cache)
    call = batch()
    del call["attention_mask"]
    assert differing(compiled(model), model, call) == []


@pytest.mark.slow
def test_a_mask_of_ones_is_captured_for_others_too() -> None:
    model = grouped(use_cache=True)
    pipe = compiled(model)
    for call in (batch(), batch(masked=2)):
        differing(pipe, model, call)
    assert GENERAL_PATH in pipe.explain()


@pytest.mark.slow
def test_a_mask_that_varies_is_captured_for_all_and_the_rounding_is_noted() -> None:
    model = grouped(use_cache=True)
    flat = example_call(model, batch(masked=3))  # the second microbatch has no padding
    options = Options(stages=2, cluster="1x2", microbatches=2, costs="estimated", verify="full")
    found = build(model, flat, options).verification
    assert found is not None
    assert found.differences == ()
    assert GENERAL_PATH in found.notes
    assert ("up to rounding" in str(found)) != found.exact  # as the processor's kernels are
    pipe = compiled(model)
    for masked in (3, 2):
        differing(pipe, model, batch(masked=masked))


def test_a_model_that_is_as_eager_is_captured_once_with_a_loss_function_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.utils import import_utils

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        import_utils.is_fake_tensor(x)
        found: torch.Tensor = self.lin(x)
        return found

    searches = []

    def settled_on(attempt: Any, assumed: Any) -> Any:
        searches.append(assumed)
        return attempts.settled_on(attempt, assumed)

    monkeypatch.setattr(trace, "settled_on", settled_on)
    found = captured(make(forward), loss_fn=torch.nn.functional.mse_loss, target=rows(seed=1))
    assert GENERAL_PATH in found.train.notes
    assert len(searches) == 1


def test_the_question_is_put_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import import_utils

    plain, findings = import_utils.is_fake_tensor, Findings()
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(2)

    monkeypatch.setattr(process_state, "read", lambda *call: None)  # no constant
    tape: Any = SimpleNamespace(
        fakes=SimpleNamespace(findings=findings), assumed=Assumptions(), training=True, ops=[]
    )
    with TracingFlags(tape).around():
        assert import_utils.is_fake_tensor(fake)
        assert findings.rounded == {GENERAL_PATH}
    assert import_utils.is_fake_tensor is plain


@pytest.mark.slow
def test_the_first_capture_of_a_process_keeps_no_model() -> None:
    """Modules of torch that are imported during it keep what is asked meanwhile."""
    script = """
import gc, weakref
import torch
from torch import nn
from pdcompile.batch import example_call, resolve_batch
from pdcompile.passes import trace

model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.ones(8, 4)
flat = example_call(model, x, x)
trace.capture(model, flat, resolve_batch(flat, 0), nn.functional.mse_loss)
kept = weakref.ref(model)
del model
gc.collect()
print("kept" if kept() else "gone")
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout == "gone\n"
