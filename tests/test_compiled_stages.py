"""Stages through torch.compile: what eager stages compute, with the masks of eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pdcompile
from pdcompile.eager.stage_compiler import compile_in_place, pass_images
from pdcompile.errors import ConfigError, VerifyError
from pdcompile.parts import conversions
from pdcompile.passes.simulate import simulate
from pdcompile.problem.constraints import CutBefore
from tests.helpers.launch import processes
from tests.test_parts.test_pipelines import COMMON, RANKS, agree

dynamo = pytest.importorskip("torch._dynamo")


@pytest.fixture(scope="module", autouse=True)
def guards_are_not_timed() -> Iterator[None]:
    """Torch times the guards of each graph for its log, on an emptied cache of the processor: up to
    a third of what it takes to compile these small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


class Sign(nn.Module):
    """Is captured as opaque: its result depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.linear(x))
        return y * 2 if y.sum() > 0 else y


class Model(nn.Module):
    """Draws by modules and by functions, counts its calls in a buffer."""

    captured_once = True

    def __init__(self, *, opaque: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.middle = Sign() if opaque else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.gelu(self.a(x)))
        x = self.norm(F.dropout(self.b(x), 0.2, self.training))
        return self.c(self.middle(x) + torch.rand_like(x)).square().mean()


BATCHES = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in (12, 12, 11, 12)]
#: compiled code sums in another order
CLOSE = {"rtol": 0.0, "atol": 1e-5}


def trained(
    compiler: Any, *, opaque: bool = False, steps: int = 4, images: bool = False, **options: Any
) -> list[Tensor]:
    """Losses of so many steps and an evaluation, then parameters and buffers."""
    torch.manual_seed(0)
    model = Skips() if images else Model(opaque=opaque)
    with pdcompile.compile(
        model, BATCHES[0], cluster=pdcompile.Cluster.local(2), microbatches=4, costs="estimated",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        verify="off", time_limit=0, stage_compiler=compiler, **options,
    ) as pipe:  # fmt: skip
        losses = [torch.tensor(float(pipe.step(batch).loss)) for batch in BATCHES[:steps]]
        losses.append(torch.tensor(float(pipe.eval_step(BATCHES[0]).loss)))
        return [*losses, *(one.detach().clone() for one in model.state_dict().values())]


def compiled(**options: Any) -> tuple[list[Tensor], int]:
    """Results of `trained`, and the number of graphs that torch.compile made for them."""
    dynamo.reset()
    dynamo.utils.counters.clear()
    return trained("aot_eager", **options), dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.filterwarnings("ignore:captured as opaque")
@pytest.mark.parametrize(
    "options",
    [{"schedule": "1f1b", "recompute": True, "opaque": True},
     pytest.param({"schedule": "interleaved", "stages": 4}, marks=pytest.mark.slow)],
    ids=lambda options: options["schedule"],
)  # fmt: skip
def test_they_train_as_eager_stages(options: dict[str, Any]) -> None:
    """Both have the masks of eager, in training and evaluation, short minibatches too; opaque
    modules stay as they are."""
    found, graphs = compiled(**options)
    torch.testing.assert_close(found, trained(None, **options), **CLOSE)
    assert graphs > 2


@pytest.mark.slow
def test_versions_of_weights_share_code() -> None:
    cut = [CutBefore("norm")]
    found, graphs = compiled(schedule="2bw", constraints=cut)
    torch.testing.assert_close(found, trained(None, schedule="2bw", constraints=cut), **CLOSE)
    assert graphs == compiled(schedule="1f1b", constraints=cut)[1] > 2


def test_whole_backwards_where_the_schedule_splits_them() -> None:
    with pytest.warns(UserWarning, match="compiled stages do not split their backward: 'zb-h1'"):
        found = trained("aot_eager", schedule="zb-h1", steps=2)
    torch.testing.assert_close(found, trained(None, schedule="zb-h1", steps=2), **CLOSE)


def test_what_stays_as_it_is_does_so_once() -> None:
    """Versions of weights have one source, and share code by the functions and classes in it."""
    names: dict[str, Any] = {"total": conversions.total, "relu": torch.relu}
    found = []
    for stage in (nn.Sequential(Sign()), nn.Sequential(Sign())):
        compile_in_place(stage, names, "aot_eager", [stage[0]])
        found.append((names["total"], names["relu"], type(stage[0])))
    assert found[0] == found[1]
    assert found[0][0] is not conversions.total
    assert found[0][1] is torch.relu


@cache
def by_a_function() -> tuple[list[Tensor], list[torch.fx.GraphModule]]:
    """Results of `trained`, and the graphs that a backend of ours was given."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    dynamo.reset()
    return trained(backend, schedule="gpipe", steps=2), graphs


def test_a_function_is_a_backend() -> None:
    found, graphs = by_a_function()
    torch.testing.assert_close(found, trained(None, schedule="gpipe", steps=2))
    assert graphs


def test_modules_of_dropout_run_as_they_are() -> None:
    """Compiled, each would be a graph of one op between two stops; a call of F.dropout stays."""
    nodes = [one for graph in by_a_function()[1] for one in graph.graph.nodes]
    found = [str((one.args[1:], one.kwargs)) for one in nodes if "dropout" in str(one.target)]
    assert any("0.2" in one for one in found)
    assert not any("0.1" in one for one in found)


@pytest.mark.slow
def test_inductor() -> None:
    options = {"schedule": "1f1b"}
    torch.testing.assert_close(trained("inductor", **options), trained(None, **options), **CLOSE)


class Images(nn.Module):
    """Its images cross, and are viewed and dropped out of as they lie in eager."""

    captured_once = True

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.drop, self.c = nn.Dropout(0.2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x.view(-1, 1, 2, 4)))
        y = self.drop(self.b(x)) + x.view(len(x), 64).view_as(x)
        return self.c(y.view(-1, 8)).square().mean()


class Skips(nn.Module):
    """Its second stage takes two images with channels last, and sees neither's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Conv2d(16, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x.view(-1, 1, 2, 4)))
        x = self.c(torch.cat([x, self.b(x)], 1))
        return self.d(x.sum(2).mean(2)).square().mean()


@pytest.mark.slow
def test_images_that_stay_with_channels_last_train_as_eager() -> None:
    options: dict[str, Any] = {
        "images": True, "schedule": "1f1b", "constraints": [CutBefore("b")], "stages": 2,
    }  # fmt: skip
    found = trained("inductor", **options)
    torch.testing.assert_close(found, trained(None, **options), **CLOSE)


def test_images_lie_as_planned_within_a_stage() -> None:
    """They come and go with channels last, and so do gradients of those that came."""

    class Stage(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            inside.extend((x.is_contiguous(), y.is_contiguous()))
            return (x.view(-1).view_as(x) * 2, y) if len(x) > 1 else x

    inside: list[bool] = []
    for _ in range(2):  # versions of weights have one class
        pass_images(Stage, [{0: False}, {0: False}], [{}, {0: True}])
    last = torch.channels_last
    image = torch.randn(2, 3, 4, 5).to(memory_format=last).requires_grad_()
    made, other = Stage()(image, torch.ones(2, 3))
    made.backward(torch.randn(2, 3, 4, 5))
    assert image.grad is not None
    assert all(one.is_contiguous(memory_format=last) for one in (made, image.grad))
    assert other.is_contiguous()
    assert torch.is_tensor(Stage()(image[:1], other))  # of an edited stage, to be refused
    assert Stage().eval()(image, other)[0].is_contiguous()
    assert len(inside) == 6
    assert all(inside)


def test_images_stay_with_channels_last_where_no_op_sees_it() -> None:
    """They come so and are used so; other results leave as in eager."""

    class Stage(nn.Module):
        def forward(self, x: Tensor) -> Any:
            inside.append(x.is_contiguous(memory_format=torch.channels_last))
            return x * 2, x.sum(2), "edited"

    inside: list[bool] = []
    pass_images(Stage, [{0: True}] * 2, [{0: False, 1: False, 2: False}, {0: True, 1: False}])
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    doubled, total, _ = Stage()(image)
    assert doubled.is_contiguous(memory_format=torch.channels_last)
    assert all(one.is_contiguous() for one in (total, *Stage().eval()(image)[:2]))
    doubled.backward(torch.ones(2, 3, 4, 5))
    assert image.grad is not None
    assert image.grad.is_contiguous(memory_format=torch.channels_last)
    assert inside == [True, True]


def in_two_stages(*layers: nn.Module) -> Any:
    """Interfaces of a stage with one convolution and of one with these layers."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), *layers)
    with pdcompile.compile(
        model, torch.ones(8, 1, 8, 8), cluster=pdcompile.Cluster.local(2), microbatches=4,
        costs="estimated", verify="off", schedule="forward", constraints=[CutBefore("1")],
    ) as pipe:  # fmt: skip
        return pipe.prepare()._running.compiled.interfaces


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view(-1).mul(2).view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Any) -> Tensor:
        return 2 * gradient


class Double(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Doubled.apply(x) + 1


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(2).view(len(x), -1)


@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        ([nn.ReLU(), nn.Conv2d(8, 8, 3)], True),
        ([nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)], True),
        ([nn.ReLU(), nn.Flatten()], False),  # a view of what lies as in eager
        ([Summed()], False),
        ([Double()], False),  # nobody knows what a user's Function does to its argument
        ([nn.Upsample(scale_factor=2), nn.PixelShuffle(2)], True),
    ],
)
def test_images_are_kept_where_no_op_views_them(layers: list[nn.Module], kept: bool) -> None:
    assert [one.train.any_layout for one in in_two_stages(*layers)] == [True, kept]


def test_images_are_not_kept_where_masks_are_drawn() -> None:
    found = in_two_stages(nn.Dropout(0.2), nn.Conv2d(8, 8, 3))
    assert [(one.train.any_layout, one.eval.any_layout) for one in found][1] == (False, False)


def test_images_are_what_convolutions_made_for_other_stages() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    with pdcompile.compile(
        model, torch.ones(8, 1, 8, 8), cluster=pdcompile.Cluster.local(2), microbatches=4,
        costs="estimated", verify="off", schedule="forward", constraints=[CutBefore("2")],
    ) as pipe:  # fmt: skip
        interfaces = pipe.prepare()._running.compiled.interfaces
    found = [[port.image for port in (*one.eval.inputs, *one.eval.outputs)] for one in interfaces]
    assert found == [[False, True], [True, False]]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_images_pass_with_channels_last(tmp_path: Path, schedule: str) -> None:
    """Images go over borders as ranks compiled for ahead, and masks are those of eager."""
    agree(processes(AHEAD, 2, tmp_path, schedule, "inductor"), 2)


def test_refusals() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)'inductr' is not a backend.*did you mean 'inductor'"
    ):
        trained("inductr")
    with pytest.raises(ConfigError, match="a compiled stage has none"):
        trained("aot_eager", detect_nonfinite=True)


ON_RANKS = [{"replicas": 2, "stages": 1}, {"parts": 2, "stages": 1, "split": "weights+samples"}]


@pytest.mark.slow
def test_replicas_and_parts_on_ranks(tmp_path: Path) -> None:
    settings = [{**one, "stage_compiler": "aot_eager"} for one in ON_RANKS]
    run = processes(COMMON + RANKS, 2, tmp_path, json.dumps(settings))
    agree(run, len(settings))
    assert "recompile_limit" not in run.output


AHEAD = """
    import sys
    import torch
    import pdcompile
    from pdcompile.problem.constraints import CutBefore
    from tests.test_compiled_stages import BATCHES, Images, Model

    def backend(graph, inputs):
        return graph.forward

    def made():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def trained(compiler):
        torch.manual_seed(0)
        model = Images() if sys.argv[2:] else Model()
        model.c.weight.register_hook(lambda gradient: seen.append(gradient))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        state = torch.get_rng_state()
        pipe = pdcompile.compile(
            model, BATCHES[0], microbatches=4, costs="estimated", verify="off",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            schedule=sys.argv[1], stage_compiler=compiler, constraints=[CutBefore("b")],
        )
        with pipe:
            pipe.prepare()
            ahead = made()
            own = pipe.state_dict()
            assert all(torch.equal(one, before[name]) for name, one in own.items()), "written"
            assert all(one.grad is None for one in pipe.parameters()), "gradients"
            assert not seen and torch.equal(state, torch.get_rng_state())
            losses = [float(pipe.step(BATCHES[0]).loss) for _ in range(3)]
        assert made() == ahead and bool(ahead) == (compiler is not None), (made(), ahead)
        return losses

    seen = []
    plain = trained(None)
    seen.clear()
    found = trained((*sys.argv[2:], backend)[0])
    far = max(abs(one - other) for one, other in zip(plain, found, strict=True))
    print(f"AGREE {far <= (1e-5 if sys.argv[2:] else 0)} {plain} {found}", flush=True)
"""


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("2bw", marks=pytest.mark.slow)])
def test_ranks_compile_ahead(tmp_path: Path, schedule: str) -> None:
    """Before the first step, and nothing else comes of it: what they train is what eager trains."""
    agree(processes(AHEAD, 2, tmp_path, schedule), 2)


def verified(compiler: Any) -> str:
    """Return what verify="full" says of a model's stages."""
    torch.manual_seed(0)
    with pdcompile.compile(
        Model(), BATCHES[0], cluster=pdcompile.Cluster.local(2), microbatches=4, costs="estimated",
        verify="full", stage_compiler=compiler,
    ) as pipe:  # fmt: skip
        return str(pipe.prepare()._running.compiled.verification)


def test_verify_compares_compiled_stages() -> None:
    """Within rounding, and notices a backend that computes something else."""
    assert "the stages, compiled by aot_eager, equal eager up to rounding" in verified("aot_eager")

    def wrong(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *given: tuple(one * 1.01 for one in module.forward(*given))

    with pytest.raises(VerifyError, match="compiled by wrong, differ from the model"):
        verified(wrong)


def test_forecast_is_of_compiled_stages() -> None:
    """They are timed once more as they will run: here each takes 20 ms more than as it is."""
    torch.manual_seed(0)

    def slow(module: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            end = time.thread_time() + 0.02  # what is timed is work, not sleep
            while time.thread_time() < end:
                pass
            return module.forward(*given)

        return run

    with pdcompile.compile(
        Model(), BATCHES[0], cluster=pdcompile.Cluster.local(2), microbatches=4, verify="off",
        stage_compiler=slow, progress=False,
    ) as pipe:  # fmt: skip
        plan = pipe.prepare().plan
    assert plan.forecast is not None
    assert plan.forecast.step_seconds > 4 * 0.02
    assert max(one.forward_seconds for one in plan.stages) < 0.02  # costs that the cut is of
    assert sum("stages compiled by slow measured" in note for note in plan.notes) == 1
    assert plan.forecast.ledgers == simulate(plan).forecast.ledgers  # it keeps what eager keeps


def test_memory_is_of_what_compiled_code_keeps() -> None:
    def again(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *given: checkpoint(module.forward, *given, use_reentrant=False)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
                            for _ in range(2)))  # fmt: skip
    with pdcompile.compile(
        model, torch.ones(64, 8), loss_fn=lambda out, target: (out * target).mean(),
        example_target=torch.ones(64, 8),
        cluster=pdcompile.Cluster.local(2), microbatches=4, verify="off", stage_compiler=again,
        progress=False, constraints=[CutBefore("1")],
    ) as pipe:  # fmt: skip
        plan = pipe.prepare().plan
    assert plan.forecast is not None
    for stage, ledger, eager in zip(
        plan.stages, plan.forecast.ledgers, simulate(plan).forecast.ledgers, strict=True
    ):
        # Of a microbatch of 16: both results of 64 numbers are computed again, that of 8 is left.
        less = 2 * 16 * 64 * 4
        in_flight = 2 - stage.index
        difference = eager.activations_bytes - ledger.activations_bytes
        assert difference == in_flight * less + 4 * stage.index  # and the loss


TWICE = """
import torch
from torch import nn
import pdcompile

model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
with pdcompile.compile(
    model, torch.ones(4, 8), loss_fn=lambda out, target: out.mean(), example_target=torch.ones(4),
    cluster=pdcompile.Cluster.local(2), costs="estimated", verify="off", progress=False,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), stage_compiler="inductor",
) as pipe:
    pipe.step(torch.ones(4, 8), target=torch.ones(4))
found = torch._dynamo.utils.counters["inductor"]
print(found["fxgraph_cache_miss"], found["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_a_further_run_finds_what_was_compiled(tmp_path: Path) -> None:
    """Compiled code is on disk, whatever files the source of its stages lies in."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", TWICE]
    (missed, had), (none, hit) = (
        map(int, subprocess.check_output(command, env=environment, text=True).split())
        for _ in range(2)
    )
    assert missed > 0
    assert (had, none, hit) == (0, 0, missed)
