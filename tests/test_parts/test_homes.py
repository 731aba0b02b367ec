"""Optimizers that do not update element by element, on stages of which parts have slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pdcompile.parts.shard import Shard
from pdcompile.runtime.watch.optimizer_watch import stepped_whole
from tests.helpers.divided import OPTIMIZERS, Lamb
from tests.helpers.launch import processes
from tests.test_parts.test_pipelines import agree, checkpoints_fit

RANKS = """
    import copy, json, sys
    import torch
    import pdcompile
    from examples.gpt import loss_fn
    from tests.helpers.divided import OPTIMIZERS, batch_of, model_of, plain_training

    for kwargs in json.loads(sys.argv[1]):
        name, clip = kwargs.pop("optimizer"), kwargs.get("max_grad_norm")
        build = OPTIMIZERS[name]
        model, (inputs, target) = model_of("gpt"), batch_of("gpt")
        plain = copy.deepcopy(model)
        skipped = kwargs.pop("skipped", 0)  # the first step overflows, the next scale is 16
        if skipped:
            kwargs["grad_scaler"] = torch.amp.GradScaler(
                "cpu", init_scale=2.0**127, backoff_factor=2.0**-123
            )
        with pdcompile.compile(
            model, loss_fn=loss_fn, costs="estimated", microbatches=4, optimizer=build,
            verify="off", **kwargs,
        ) as pipe:
            pipe.prepare(**inputs, target=target)
            decay = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
            losses = []
            for n in range(3 + skipped):
                result = pipe.step(**inputs, target=target)
                if n >= skipped:
                    losses.append(result.loss.item())
                    decay.step()
            pipe.flush()
            whole = kwargs.get("split") in ("sequence", "samples")
            assert whole != ("parameters whole, each at one part" in pipe.explain())
            state = pipe.full_state_dict()
            if pipe.ranks == (0,):
                lag = kwargs.get("schedule") == "2bw"
                expected, found = plain_training(
                    plain, inputs, target, loss_fn, clip, lag=lag, build=build, decay=0.5
                )
                worst = max((state[k] - v).abs().max().item() for k, v in expected.items())
                apart = max(abs(a - b) for a, b in zip(losses, found))
                good = worst <= 2e-5 and apart <= 2e-5
                print(f"AGREE {good} {worst:.1e} {apart:.1e} {name} {kwargs}")
"""

UNLIKE_ON_SLICES = [name for name in OPTIMIZERS if name != "adamw"]
FAST = [
    {"optimizer": "muon", "parts": 2, "stages": 2, "max_grad_norm": 0.5},
    {"optimizer": "adafactor", "parts": 4},
    {"optimizer": "lamb", "parts": 2, "replicas": 2, "stages": 1},
]


def test_gpt_trains_as_plain_pytorch_with_each_optimizer(tmp_path: Path) -> None:
    agree(processes(RANKS, 4, tmp_path, json.dumps(FAST)), len(FAST))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "2bw", "interleaved"])
def test_every_schedule(schedule: str, tmp_path: Path) -> None:
    stages = 4 if schedule == "interleaved" else 2
    common = {"parts": 2, "stages": stages, "schedule": schedule}
    settings = [{**common, "optimizer": name} for name in UNLIKE_ON_SLICES]
    agree(processes(RANKS, 4, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
def test_clipping_loss_scales_samples_and_replicas(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"optimizer": "adafactor", "parts": 2, "stages": 2, "max_grad_norm": 0.5},
        {"optimizer": "lamb", "parts": 2, "stages": 2, "skipped": 1, "max_grad_norm": 0.5},
        {"optimizer": "muon", "parts": 2, "stages": 1, "replicas": 2, "max_grad_norm": 0.5},
        {"optimizer": "adafactor", "parts": 4, "split": "sequence"},
        {"optimizer": "lamb", "parts": 2, "stages": 2, "split": "samples"},
        {"optimizer": "muon", "parts": 4, "split": "width+sequence", "recompute": True},
    ]
    agree(processes(RANKS, 4, tmp_path, json.dumps(settings)), len(settings))


SAID = """
    import torch
    import pdcompile
    from examples.gpt import loss_fn
    from tests.helpers.divided import OPTIMIZERS, batch_of, model_of
    from tests.helpers.loops import Normalised

    inputs, target = batch_of("gpt")
    for split, build in (
        ("samples", OPTIMIZERS["lamb"]),
        ("width", OPTIMIZERS["adamw"]),
        ("width", lambda p: Normalised(p, lr=0.1)),
    ):
        try:
            with pdcompile.compile(
                model_of("gpt"), loss_fn=loss_fn, costs="estimated", microbatches=4, parts=2,
                split=split, optimizer=build, verify="off",
            ) as pipe:
                pipe.prepare(**inputs, target=target)
                print("whole" if "whole, each at" in pipe.explain() else "slices")
        except pdcompile.errors.ConfigError as error:
            print(error.message)
"""


def test_what_has_no_home_and_what_is_refused(tmp_path: Path) -> None:
    run = processes(SAID, 2, tmp_path)
    assert run.output.splitlines()[:2] == ["slices"] * 2, run
    assert "or of what other parts or replicas of its stage update" in run.output.splitlines()[2], (
        run
    )


OWN_LOOP = """
    import pdcompile
    from examples.gpt import loss_fn
    from tests.helpers.divided import OPTIMIZERS, batch_of, model_of

    inputs, target = batch_of("gpt")
    pipe = pdcompile.compile(
        model_of("gpt"), loss_fn=loss_fn, costs="estimated", microbatches=4, parts=2,
        optimizer=OPTIMIZERS["lamb"], verify="off",
    ).prepare(**inputs, target=target)
    for call in (lambda: pipe.forward_backward(**inputs, target=target), pipe.optimizer.step):
        try:
            call()
        except pdcompile.errors.ConfigError as error:
            print(error.where, "refused: homes" if "home" in error.message else error)
    pipe.step(**inputs, target=target)
    pipe.close()
"""


def test_only_step_brings_gradients_to_homes(tmp_path: Path) -> None:
    run = processes(OWN_LOOP, 2, tmp_path)
    for call in ("forward_backward", "optimizer.step"):
        assert run.output.count(f"{call} refused: homes") == 2, run


class ByShape(torch.optim.SGD):
    """Wants the true shapes."""

    def __init__(self, parameters: Any, lr: float) -> None:
        parameters = list(parameters)
        assert all(one.numel() > 16 for one in parameters)
        super().__init__(parameters, lr)


def muon_where_large(parameters: Any) -> list[torch.optim.Optimizer]:
    large = [one for one in parameters if one.numel() > 100]
    rest = [one for one in parameters if one.numel() <= 100]
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(large)] if large else []
    return made + ([torch.optim.SGD(rest)] if rest else [])


def rates_by_width(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [one], "lr": 1 / one.shape[-1]} for one in parameters])


class Late(torch.optim.SGD):
    """Goes by the size of a parameter, which small copies do not show."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and one.numel() >= 100:
                    one.grad /= one.grad.norm()
        return super().step(closure)


@pytest.mark.parametrize(
    ("build", "whole"),
    [
        (torch.optim.AdamW, ""),
        (lambda p: Late(p, lr=0.1), "rows columns"),
        (lambda p: torch.optim.Muon(p, lr=1e-6), "rows columns"),
        (lambda p: torch.optim.Adafactor(p, lr=1e-6), "rows columns"),
        (lambda p: Lamb(p, lr=0.0), "rows columns"),
        (muon_where_large, "rows columns"),
        (rates_by_width, "columns"),
        (lambda p: ByShape(p, lr=0.1), "rows columns"),
    ],
)
def test_optimizers_are_tried_on_slices(build: Any, whole: str) -> None:
    def bare(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(shape, device="meta"))

    wholes = {"rows": bare(32, 16), "columns": bare(32, 16), "other": bare(32, 16)}
    slices = {"rows": bare(16, 16), "columns": bare(32, 8), "other": bare(32, 16)}
    shards = {
        "rows": Shard("rows", 0, (32,), 0, 2),
        "columns": Shard("columns", 1, (16,), 0, 2),
    }
    assert {*stepped_whole(build, slices, wholes, shards)} == {*whole.split()}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNLIKE_ON_SLICES)
def test_checkpoints_of_any_plan_fit_any_other(name: str, tmp_path: Path) -> None:
    two, four = {"parts": 2, "stages": 2}, {"parts": 4}
    checkpoints_fit(name, [two, {"stages": 1, "replicas": 4}, four, two, four], tmp_path)


BY_HAND = """
    import sys
    import torch
    import pdcompile
    from examples.gpt import loss_fn
    from tests.helpers.divided import OPTIMIZERS, batch_of, model_of
    from tests.test_parts.test_pipelines import tensors_of

    file, (inputs, target), before = sys.argv[1], batch_of("gpt"), None
    for kwargs in ({"parts": 2, "stages": 2, "schedule": "2bw"}, {"parts": 4}):
        with pdcompile.compile(
            model_of("gpt"), loss_fn=loss_fn, costs="estimated", microbatches=4,
            optimizer=OPTIMIZERS["muon"], verify="off", **kwargs,
        ) as pipe:
            pipe.prepare(**inputs, target=target)
            if before is not None:
                model, optimizer = torch.load(file)
                pipe.load_state_dict(model)
                pipe.load_optimizer_state_dict(optimizer)
            else:
                pipe.step(**inputs, target=target)  # in flight when the schedule is made
                torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5).step()
                pipe.step(**inputs, target=target)
            state = pipe.full_state_dict(), pipe.full_optimizer_state_dict()
            now = tensors_of(state)
            if pipe.ranks == (0,):
                torch.save(state, file)
                assert before is None or before.keys() == now.keys()
                assert before is None or all(torch.equal(now[k], v) for k, v in before.items())
                print("AGREE True", len(now))
            before = now
            pipe.flush()
"""


@pytest.mark.slow
def test_states_by_hand_and_schedules_that_are_made_in_flight(tmp_path: Path) -> None:
    agree(processes(BY_HAND, 4, tmp_path, str(tmp_path / "state.pt")), 2)
