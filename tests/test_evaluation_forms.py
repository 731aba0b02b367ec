"""Evaluation of calls that are unlike the captured one: labels and other arguments in one alone."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import InputError, PdcompileError
from pdcompile.runtime import evaluations
from tests.helpers.launch import processes

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}


class Inside(nn.Module):
    """Has its loss inside, and takes what training or evaluation alone gives."""

    captured_once = True

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self.wte, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.strict, self.power = strict, 1

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        noise: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        hidden: bool = False,
    ) -> Any:
        if self.strict and self.training and labels is None:
            raise ValueError("training needs labels")
        x = self.drop(self.norm(self.wte(ids)))
        x = x if noise is None else x + noise
        x = torch.tanh(self.mix(x)) * self.scale**self.power
        x = x if mask is None else x * mask[:, :, None]
        logits = self.head(x)
        found = {"logits": logits, "hidden": x} if hidden else {"logits": logits}
        if labels is None:
            return found
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), **found}


def batch(size: int = 8, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(11, (size, 5), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}


def compiled(model: nn.Module, **options: Any) -> Any:
    given: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.1), "microbatches": 2, "costs": "estimated",
        "cluster": "local:2", "progress": False, "time_limit": 0,
    }  # fmt: skip
    return pdcompile.compile(model, **(given | options))


def same(ours: Any, theirs: Any) -> None:
    assert list(ours) == list(theirs)
    for key in theirs:  # the loss is summed up from microbatches
        torch.testing.assert_close(ours[key], theirs[key], **({} if key == "loss" else EXACT))


def eager(model: nn.Module, **inputs: Any) -> Any:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(**inputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"schedule": "2bw"}, {"schedule": "interleaved", "stages": 4},
        {"stages": 1, "replicas": 2}, {"strict": True},
    ],
    ids=str,
)  # fmt: skip
def test_predict_without_labels_follows_the_training(options: dict[str, Any]) -> None:
    model = Inside(strict=options.pop("strict", False))
    with compiled(model, **options) as pipe:
        pipe.step(**batch())
        with pytest.warns(UserWarning, match="labels is left out.*captured on its own, once"):
            pipe.predict(ids=batch()["ids"])
        pipe.flush()
        for seed in range(2):
            inputs = batch(8, seed)
            losses = float(pipe.eval_step(**inputs).loss)
            same(pipe.predict(batch(6, 3)["ids"]), eager(model, ids=batch(6, 3)["ids"]))
            assert float(pipe.eval_step(**inputs).loss) == losses
            assert pipe.eval_step(ids=inputs["ids"], labels=None).loss is None
            pipe.step(**inputs)
            pipe.flush()
        assert set(pipe.predict(**inputs)) == {"loss", "logits"}
        assert len(pipe._evaluations._forms) == 2  # with None in place of labels, and without


@pytest.mark.slow
def test_arguments_of_training_or_of_evaluation_alone() -> None:
    model, noise = Inside(), torch.randn(8, 5, 8)
    with compiled(model) as pipe:
        pipe.step(**batch(), noise=noise)
        ids, mask = batch(seed=1)["ids"], torch.rand(8, 5)
        calls: list[dict[str, Any]] = [
            {"ids": ids}, {"ids": ids, "mask": mask}, {"ids": ids, "hidden": True},
            {"ids": ids, "noise": noise, "mask": mask}, {"ids": ids, "mask": mask * 2},
            {"ids": ids, "hidden": False}, batch(),
        ]  # fmt: skip
        for call in calls:
            assert torch.equal(pipe.predict(**call)["logits"], eager(model, **call)["logits"])
        assert set(pipe.predict(ids=ids, hidden=True)) == {"logits", "hidden"}
        result = pipe.eval_step(**batch(), mask=mask)
        assert torch.allclose(result.loss.wait(), eager(model, **batch(), mask=mask)["loss"])
        assert len(pipe._evaluations._forms) == 7


class Scaled(nn.Module):
    """Takes a factor, as a tensor or in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: Any = None) -> Tensor:
        y = self.second(self.first(x).relu())
        return y if factor is None else y * getattr(factor, "value", factor)


class Factor:
    """Its text does not tell what it holds."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Factor"


def test_added_tensors_are_told_by_dimensions_and_objects_refused() -> None:
    model, x = Scaled(), torch.randn(8, 4)
    with compiled(model, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, target=x)
        for factor in (torch.rand(8, 1), torch.tensor(2.0), 3.0):
            found = pipe.predict(x, factor=factor)
            assert torch.equal(found, eager(model, x=x, factor=factor))
        with pytest.raises(InputError, match=r"factor is added as Factor.*may be another"):
            pipe.predict(x, factor=Factor(2.0))


def test_what_changes_after_the_capture_of_a_form_is_seen() -> None:
    model = Inside()
    with compiled(model, optimizer=None) as pipe:
        pipe.step(**batch())
        ids = batch()["ids"]
        pipe.predict(ids=ids)
        with torch.no_grad():
            model.wte.weight.mul_(0.5)
        model.register_buffer("scale", torch.tensor(3.0))
        same(pipe.predict(ids=ids), eager(model, ids=ids))
        model.power = 2
        with pytest.raises(PdcompileError, match="power"):
            pipe.predict(ids=ids)


def test_a_call_that_fails_in_eager_is_refused_with_both_causes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluations, "MOST", 2)
    with compiled(Inside()) as pipe:
        pipe.step(**batch())
        with pytest.raises(InputError, match=r"mask is added.*cannot be captured") as error:
            pipe.predict(ids=batch()["ids"], mask=torch.ones(8, 4))
        assert "arguments of the first call" in str(error.value)
        same(pipe.predict(**batch()), eager(pipe.to_model(), **batch()))
        for n in range(2):
            pipe.predict(ids=batch()["ids"], hidden=n + 2)
        with pytest.raises(InputError, match="2 other forms"):
            pipe.predict(ids=batch()["ids"], hidden=4)


RANKS = """
import copy, warnings
from functools import partial
import torch
import pdcompile
from tests.test_evaluation_forms import Inside, batch, eager, same

warnings.simplefilter("ignore")
for given in ({"stages": 2}, {"stages": 2, "schedule": "2bw"}, {"stages": 1, "replicas": 2}):
    torch.manual_seed(0)
    pipe = pdcompile.compile(Inside(strict=True), costs="estimated", microbatches=2, **given,
                             optimizer=partial(torch.optim.SGD, lr=0.1), time_limit=0)
    for seed in range(2):
        pipe.step(**batch(8, seed))
        for call in ({"ids": batch()["ids"]}, {"ids": batch()["ids"], "hidden": True}, batch()):
            got = pipe.predict(**call)
            model = pipe.to_model()
            state = pipe.full_state_dict()
            if got is not None:
                told = got
            rank = pipe.ranks[0]
            if rank == 0:
                torch.save(eager(model, **call), "want.pt")
            pipe.flush()
            pipe.full_state_dict()
            if got is not None:
                want = torch.load("want.pt")
                same(got, want)
                print("same", flush=True)
    try:
        pipe.predict(ids=batch()["ids"], mask=torch.ones(8, 4))
        print("not refused", flush=True)
    except pdcompile.PdcompileError as error:
        assert "mask is added" in str(error), error
    pipe.predict(ids=batch()["ids"])
    pipe.close()
"""


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    run = processes(RANKS, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("same") == 18, run
    assert "not refused" not in run.output, run
