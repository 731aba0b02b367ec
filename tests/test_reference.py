"""The reference against training loops written by hand: equal to the last bit."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ClosedError, ConfigError, InputError
from pdcompile.named import NamedParameters
from pdcompile.plan import Certificate, Plan, StagePlan, Training
from pdcompile.randomness import evaluation_minibatch, seed_of
from pdcompile.reference import Reference
from tests.helpers.models import batch_for, convnet, gpt, loss_for, mlp, returns_loss, unet

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2)
SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
Batches = Sequence[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batches(model: nn.Module, *sizes: int) -> Batches:
    return [batch_for(model, size, seed) for seed, size in enumerate(sizes)]


def same(a: nn.Module, b: nn.Module) -> None:
    """Parameters and buffers are equal to the last bit."""
    state = b.state_dict()
    assert state.keys() == a.state_dict().keys()
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def run(model: nn.Module, data: Batches, **options: Any) -> tuple[nn.Module, list[float]]:
    """Losses and trained model of the reference, on a copy."""
    model = copy.deepcopy(model)
    options = {"loss_fn": loss_for(model), "microbatches": 3, **options}
    with pdcompile.reference(model, **options) as pipe:
        losses = [pipe.step(x, target=y).loss for x, y in data]
        assert all(loss is not None and loss.done() for loss in losses)
        return pipe.to_model(), [float(loss) for loss in losses if loss is not None]


def accumulate(model: nn.Module, x: Tensor, y: Tensor, m: int) -> Tensor:
    """Gradient accumulation as a user writes it; returns the loss."""
    total: Tensor | None = None
    for part, target in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
        loss = loss_for(model)(model(part), target) * (len(part) / len(x))
        loss.backward()  # type: ignore[no-untyped-call]
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def by_hand(
    model: nn.Module, data: Batches, make: MakeOptimizer, m: int, clip: float | None = None
) -> tuple[nn.Module, list[float]]:
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        losses.append(accumulate(model, x, y, m).item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, losses


# ------------------------------------------------------------------ flush schedules


@pytest.mark.parametrize("make", [ADAMW, SGD])
@pytest.mark.parametrize("build", [gpt, mlp, convnet, unet])
def test_a_flush_schedule_is_gradient_accumulation(
    build: Callable[[], nn.Module], make: MakeOptimizer
) -> None:
    model = build()
    data = batches(model, 6, 6, 5)
    expected, losses = by_hand(model, data, make, 3)
    for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1"):
        trained, got = run(model, data, optimizer=make, schedule=schedule)
        same(trained, expected)
        assert got == losses


def test_clipping_is_that_of_torch() -> None:
    model = gpt()
    data = batches(model, 6, 6, 6)
    expected, _ = by_hand(model, data, ADAMW, 3, clip=0.1)
    unclipped, _ = by_hand(model, data, ADAMW, 3)
    trained, _ = run(model, data, optimizer=ADAMW, max_grad_norm=0.1)
    same(trained, expected)
    assert not torch.equal(expected.get_parameter("ln_f.weight"),
                           unclipped.get_parameter("ln_f.weight"))  # fmt: skip


def test_the_clip_norm_counts_tied_weights_once() -> None:
    model = gpt(tied=True)
    x, y = batch_for(model, 4)
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), microbatches=2)
    pipe.forward_backward(x, target=y)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
    torch.testing.assert_close(pipe.clip_grad_norm_(1e9), expected)
    before = [grad.clone() for grad in grads]
    norm = pipe.clip_grad_norm_(0.5)
    for grad, old in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, old * (0.5 / norm))


def test_clipping_works_over_several_dtypes_and_without_gradients() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16()])
    pipe = pdcompile.reference(model, microbatches=1)
    assert pipe.clip_grad_norm_(1.0) == 0
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert float(pipe.clip_grad_norm_(1.0)) == pytest.approx(18**0.5, rel=1e-2)
    half = model.get_parameter("2.bias").grad
    assert half is not None
    assert half.dtype == torch.bfloat16
    assert float(half[0]) == pytest.approx(18**-0.5, rel=1e-2)


def test_short_minibatches_count_by_samples() -> None:
    model = mlp()
    x, y = batch_for(model, 7)
    whole = copy.deepcopy(model)
    loss_for(model)(whole(x), y).backward()  # type: ignore[no-untyped-call]
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), microbatches=3)
    pipe.forward_backward(x, target=y)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_fewer_samples_than_microbatches() -> None:
    model = mlp()
    data = batches(model, 4, 2, 1)
    expected = copy.deepcopy(model)
    optimizer = SGD(expected.parameters())
    for x, y in data:
        optimizer.zero_grad()
        accumulate(expected, x, y, min(4, len(x)))
        optimizer.step()
    same(run(model, data, optimizer=SGD, microbatches=4)[0], expected)


def test_loss_reductions() -> None:
    model = mlp()
    x, y = batch_for(model, 6)

    def gradient(reduction: object, loss_fn: object) -> tuple[Tensor, float]:
        model.zero_grad()
        pipe = pdcompile.reference(model, loss_fn=loss_fn, loss_reduction=reduction, microbatches=4)
        loss = pipe.forward_backward(x, target=y).loss
        grad = model.get_parameter("layers.0.weight").grad
        assert grad is not None
        assert loss is not None
        return grad, loss.item()

    def summed(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    def kept_mean(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target[:, 0].long())

    def kept_items(args: object, kwargs: object, target: Tensor) -> Tensor:
        return (target[:, 0] >= 0).sum()

    # four microbatches of 2, 2, 1, 1: the last one has nothing but an ignored item
    y[:, 0] = torch.tensor([1.0, -100, 3, 0, 2, -100])
    for reduction, loss_fn in [
        ("mean", F.mse_loss),
        ("sum", summed),
        (kept_items, kept_mean),
    ]:
        grad, loss = gradient(reduction, loss_fn)
        model.zero_grad()
        whole = loss_fn(model(x), y)  # type: ignore[operator]
        whole.backward()
        torch.testing.assert_close(grad, model.get_parameter("layers.0.weight").grad)
        assert loss == pytest.approx(whole.item(), rel=1e-5)


def test_a_learning_rate_scheduler_counts() -> None:
    model = mlp()
    data = batches(model, *[4] * 5)
    expected = copy.deepcopy(model)
    optimizer = ADAMW(expected.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for x, y in data:
        optimizer.zero_grad()
        accumulate(expected, x, y, 2)
        optimizer.step()
        scheduler.step()
    trained = copy.deepcopy(model)
    pipe = pdcompile.reference(trained, loss_fn=loss_for(model), optimizer=ADAMW, microbatches=2)
    assert pipe.optimizer is not None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
    for x, y in data:
        pipe.step(x, target=y)
        scheduler.step()
    same(trained, expected)


def test_parameter_groups_by_name() -> None:
    seen: list[NamedParameters] = []

    def make(parameters: NamedParameters) -> torch.optim.Optimizer:
        seen.append(parameters)
        groups = [{"params": [p for n, p in parameters.named if "bias" in n], "lr": 0.0}]
        groups.append({"params": [p for n, p in parameters.named if "weight" in n]})
        return torch.optim.SGD(groups, lr=0.1)

    model = mlp()
    trained, _ = run(model, batches(model, 4, 4), optimizer=make)
    assert [name for name, _ in seen[0].named] == [name for name, _ in model.named_parameters()]
    assert isinstance(seen[0], list)
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, trained.get_parameter(name))
        assert moved == ("weight" in name)


# ------------------------------------------------------------------ stale schedules


def delayed_by_hand(
    model: nn.Module, data: Batches, lag_of: Callable[[str], int], m: int, clip: float | None
) -> nn.Module:
    """W_{t+1} = U_t(W_t, g_t(W_max(t-lag, 0))), through functional_call on explicit versions."""
    newest = copy.deepcopy(model)
    optimizer = ADAMW(newest.parameters())
    history: list[dict[str, Tensor]] = []
    for t, (x, y) in enumerate(data):
        history.append({n: p.detach().clone() for n, p in newest.named_parameters()})
        used = {
            name: history[max(t - lag_of(name), 0)][name].clone().requires_grad_()
            for name in history[0]
        }
        for part, target in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            output = torch.func.functional_call(newest, used, (part,))
            (loss_for(model)(output, target) * (len(part) / len(x))).backward()  # type: ignore[no-untyped-call]
        for name, parameter in newest.named_parameters():
            parameter.grad = used[name].grad
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(newest.parameters(), clip)
        optimizer.step()
    return newest


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("build", [gpt, convnet])
def test_2bw_computes_on_the_weights_before(
    build: Callable[[], nn.Module], clip: float | None
) -> None:
    model = build()
    data = batches(model, 6, 6, 4, 6, 6)
    expected = delayed_by_hand(model, data, lambda name: 1, 2, clip)
    trained, _ = run(
        model, data, optimizer=ADAMW, schedule="2bw", microbatches=2, max_grad_norm=clip
    )
    same(trained, expected)
    eager, _ = run(model, data, optimizer=ADAMW, microbatches=2, max_grad_norm=clip)
    assert any(
        not torch.equal(p, q) for p, q in zip(eager.parameters(), trained.parameters(), strict=True)
    )


def test_2bw_on_paper() -> None:
    # w ← w − lr·g(w'), loss = w·x: the gradient is x, so use (w·x)²/2 with gradient w'·x².
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    pipe = pdcompile.reference(
        model,
        loss_fn=lambda out, target: out.square().mean() / 2,
        optimizer=partial(torch.optim.SGD, lr=0.5),
        schedule="2bw",
        microbatches=1,
    )
    seen = []
    for _ in range(4):
        pipe.step(torch.ones(1, 1))
        seen.append(model.weight.item())
    # W1 = W0 − W0/2, W2 = W1 − W0/2, W3 = W2 − W1/2, W4 = W3 − W2/2
    assert seen == [0.5, 0.0, -0.25, -0.25]


def test_flush_and_evaluation_change_nothing() -> None:
    model = gpt(dropout=0.2)
    data = batches(model, *[4] * 4)
    plain, _ = run(model, data, optimizer=ADAMW, schedule="2bw", microbatches=2)
    other = copy.deepcopy(model)
    pipe = pdcompile.reference(
        other, loss_fn=loss_for(model), optimizer=ADAMW, schedule="2bw", microbatches=2
    )
    for x, y in data:
        pipe.step(x, target=y)
        pipe.flush()
        pipe.eval_step(x, target=y)
        pipe.predict(x)
    same(other, plain)


def plan(schedule: str, parameters: list[list[str]], warmup: tuple[int, ...]) -> Plan:
    stages = tuple(
        StagePlan(index=s, ops=(), parameters=tuple(names)) for s, names in enumerate(parameters)
    )
    return Plan(
        fingerprint="",
        stages=stages,
        edges=(),
        tied=(),
        training=Training(schedule=schedule, warmup=warmup),
        cluster="",
        certificate=Certificate(0.0, 0.0, "feasible", "nobody", 0.0, ""),
    )


def test_stash_and_vsync_compute_on_weights_of_their_age() -> None:
    model = mlp(layers=3)
    data = batches(model, *[2] * 7)
    by_stage = [[n for n, _ in model.named_parameters() if f".{s}." in n] for s in range(3)]
    lag = {name: 2 - s for s, names in enumerate(by_stage) for name in names}
    stash = plan("stash", by_stage, (2, 1, 0))
    trained, _ = run(model, data, optimizer=ADAMW, schedule="stash", microbatches=1, plan=stash)
    same(trained, delayed_by_hand(model, data, lag.__getitem__, 1, None))

    vsync = plan("vsync", by_stage, (3, 1, 0))
    options: dict[str, Any] = {"optimizer": ADAMW, "schedule": "vsync", "max_grad_norm": 0.1}
    trained, _ = run(model, data, microbatches=1, plan=vsync, **options)
    same(trained, delayed_by_hand(model, data, lambda name: 3, 1, 0.1))
    trained, _ = run(model, data, microbatches=1, stages=3, **options)
    same(trained, delayed_by_hand(model, data, lambda name: 2, 1, 0.1))


def test_loading_weights_restarts_the_versions() -> None:
    model = mlp()
    data = batches(model, *[4] * 4)
    pipe = pdcompile.reference(
        copy.deepcopy(model), loss_fn=loss_for(model), optimizer=SGD, schedule="2bw",
        microbatches=2,
    )  # fmt: skip
    pipe.step(data[0][0], target=data[0][1])
    pipe.step(data[1][0], target=data[1][1])
    assert pipe.optimizer is not None
    pipe.optimizer.state.clear()
    pipe.load_state_dict(model.state_dict())
    for x, y in data:
        pipe.step(x, target=y)
    trained, _ = run(model, data, optimizer=SGD, schedule="2bw", microbatches=2)
    same(pipe.to_model(), trained)


# ------------------------------------------------------------------ random draws


def test_dropout_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.3))
    x, y = torch.randn(5, 8), torch.randn(5, 8)

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(F.dropout(output, 0.1), target)

    expected = copy.deepcopy(model)
    for minibatch in range(2):
        for i, (a, b) in enumerate(zip(x.tensor_split(2), y.tensor_split(2), strict=True)):
            hidden = expected[0](a)
            torch.manual_seed(seed_of(9, minibatch, i, "1", 0))
            hidden = expected[2](F.dropout(hidden, 0.5))
            torch.manual_seed(seed_of(9, minibatch, i, "3", 0))
            hidden = F.dropout(hidden, 0.3)
            torch.manual_seed(seed_of(9, minibatch, i, "loss_fn", 0))
            (noisy(hidden, b) * (len(a) / 5)).backward()  # type: ignore[no-untyped-call]
    pipe = pdcompile.reference(model, loss_fn=noisy, microbatches=2, seed=9)
    for _ in range(2):
        pipe.forward_backward(x, target=y)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_dropout_depends_on_the_seed_and_not_on_the_global_generator() -> None:
    model = gpt(dropout=0.3)
    data = batches(model, 4, 4)
    torch.manual_seed(1)
    first, losses = run(model, data, optimizer=ADAMW)
    before = torch.get_rng_state()
    again, _ = run(model, data, optimizer=ADAMW)
    assert torch.equal(torch.get_rng_state(), before)
    same(first, again)
    assert run(model, data, optimizer=ADAMW, seed=1)[1] != losses


def test_every_minibatch_and_microbatch_draws_afresh() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * torch.randn_like(x)

    x = torch.zeros(4, 1)
    pipe = pdcompile.reference(
        Noise(), loss_fn=lambda out, target: out.mean(), microbatches=4, optimizer=SGD
    )
    with torch.no_grad():
        pipe.to_model().scale.requires_grad_()
    outputs = [pipe.forward_backward(x).outputs, pipe.forward_backward(x).outputs]
    outputs += [pipe.predict(x), pipe.predict(x)]
    assert len(set(torch.cat(outputs).flatten().tolist())) == 16
    generator = torch.Generator().manual_seed(seed_of(0, evaluation_minibatch(1), 2, "", 0))
    assert torch.equal(outputs[3][2], torch.randn(1, generator=generator))


# ------------------------------------------------------------------ modes, buffers, outputs


def test_batch_norm_advances_once_a_microbatch() -> None:
    model = convnet()
    trained, _ = run(model, batches(model, 6, 6), optimizer=SGD, microbatches=3)
    assert trained.get_buffer("bn1.num_batches_tracked") == 6


def test_modes_are_kept() -> None:
    model = convnet()
    model.bn1.eval()
    before = model.bn1.running_mean.clone()  # type: ignore[union-attr]
    x, y = batch_for(model, 4)
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), optimizer=SGD, microbatches=2)
    pipe.step(x, target=y)
    assert torch.equal(model.bn1.running_mean, before)  # type: ignore[arg-type]
    assert model.bn2.num_batches_tracked == 2
    pipe.eval_step(x, target=y)
    assert model.bn2.num_batches_tracked == 2
    assert (model.training, model.bn1.training) == (True, False)

    evaluated = convnet().eval()
    pipe = pdcompile.reference(evaluated, loss_fn=loss_for(model), optimizer=SGD, microbatches=1)
    pipe.step(x, target=y)
    assert evaluated.bn1.num_batches_tracked == 1
    assert not evaluated.training


def test_evaluation_is_plain_eval_on_the_newest_weights() -> None:
    model = gpt(dropout=0.4)
    x, y = batch_for(model, 5)
    pipe = pdcompile.reference(
        model, loss_fn=loss_for(model), optimizer=ADAMW, schedule="2bw", microbatches=2
    )
    for _ in range(3):
        pipe.step(x, target=y)
    expected = copy.deepcopy(model).eval()
    with torch.no_grad():
        parts = [expected(part) for part in x.tensor_split(2)]
        losses = [
            loss_for(model)(part, target) * (len(part) / 5)
            for part, target in zip(parts, y.tensor_split(2), strict=True)
        ]
    result = pipe.eval_step(x, target=y)
    assert torch.equal(result.outputs, torch.cat(parts))
    assert result.loss is not None
    assert result.loss.item() == (losses[0] + losses[1]).item()
    assert torch.equal(pipe.predict(x), torch.cat(parts))
    assert not pipe.predict(x).requires_grad


Output = namedtuple("Output", ["loss", "logits", "extra"])


class OwnLoss(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.kind = kind

    def forward(self, x: Tensor, *, target: Tensor | None = None) -> Any:
        logits = self.linear(x)
        loss = None if target is None else F.cross_entropy(logits, target)
        if self.kind is dict:
            return {"loss": loss, "logits": logits, "extra": (None, 3)}
        return Output(loss, logits, (None, 3))


@pytest.mark.parametrize("kind", [dict, Output])
def test_models_with_their_own_loss(kind: type) -> None:
    model = OwnLoss(kind)
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    pipe = pdcompile.reference(model, {"x": x, "target": y}, microbatches=2)
    result = pipe.step_call((x,), {"target": y})
    loss = F.cross_entropy(model.linear(x), y)
    assert result.loss is not None
    assert result.loss.item() == pytest.approx(loss.item())
    output = Output(**result.outputs) if kind is dict else result.outputs
    torch.testing.assert_close(output.logits, model.linear(x).detach())
    assert not output.logits.requires_grad
    assert float(output.loss) == result.loss.item()
    assert output.extra == (None, 3)
    assert pipe.eval_step(x).loss is None
    with pytest.raises(ConfigError, match="no loss in it"):
        pipe.step(x)
    with pytest.raises(ConfigError, match="no loss_fn"):
        pipe.step(x, target=y)


def test_a_model_that_returns_the_loss() -> None:
    inner = mlp()
    model = returns_loss(copy.deepcopy(inner))
    x, y = batch_for(model, 5)
    pipe = pdcompile.reference(model, microbatches=2)
    result = pipe.step(x, y)
    expected = accumulate(inner, x, y, 2)
    assert result.loss is not None
    assert torch.equal(result.loss.wait(), expected)
    assert torch.equal(result.outputs, expected)
    for p, q in zip(inner.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert float(pipe.predict(x, y)) == pytest.approx(float(expected))


def test_gradients_only() -> None:
    model = mlp()
    x, y = batch_for(model, 4)
    expected = copy.deepcopy(model)
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), microbatches=2)
    for call in (pipe.forward_backward, pipe.step):  # without optimizer, step is the same
        call(x, target=y)
        accumulate(expected, x, y, 2)
        for (name, p), q in zip(pipe.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())


def test_step_starts_from_zero_gradients_even_after_a_failure() -> None:
    model = mlp()
    (x, y), = batches(model, 4)  # fmt: skip
    fail = True

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if fail and output.shape[0] == 1:
            raise ArithmeticError("boom")
        return F.mse_loss(output, target)

    trained = copy.deepcopy(model)
    pipe = pdcompile.reference(
        trained, loss_fn=loss_fn, optimizer=SGD, microbatches=3, schedule="2bw"
    )
    with pytest.raises(ArithmeticError):
        pipe.step(x, target=y)
    same(trained, model)
    assert all(p.grad is None for p in trained.parameters())
    fail = False
    pipe.step(x, target=y)
    same(trained, by_hand(model, [(x, y)], SGD, 3)[0])


def test_frozen_and_unused_parameters_stay() -> None:
    model = mlp()
    model.layers[0].requires_grad_(False)
    model.unused = nn.Linear(2, 2)
    trained, _ = run(model, batches(model, 4, 4, 4), optimizer=ADAMW, schedule="2bw")
    for name in ("layers.0.weight", "unused.weight"):
        assert torch.equal(model.get_parameter(name), trained.get_parameter(name))
    assert not torch.equal(
        model.get_parameter("layers.1.weight"), trained.get_parameter("layers.1.weight")
    )


def test_a_model_without_parameters() -> None:
    pipe = pdcompile.reference(nn.ReLU(), loss_fn=F.mse_loss, optimizer=ADAMW, microbatches=2)
    assert pipe.optimizer is None
    result = pipe.step(torch.ones(4, 2), target=torch.zeros(4, 2))
    assert result.loss is not None
    assert float(result.loss) == 1.0


def test_autocast_is_around_forward_and_loss() -> None:
    model = mlp()
    x, y = batch_for(model, 4)
    expected = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = expected(x)
        loss = F.mse_loss(output, y)
    loss.backward()  # type: ignore[no-untyped-call]
    for chosen in (torch.bfloat16, "bfloat16"):
        model.zero_grad()
        pipe = pdcompile.reference(model, loss_fn=F.mse_loss, microbatches=1, autocast=chosen)
        result = pipe.forward_backward(x, target=y)
        assert result.outputs.dtype == torch.bfloat16
        assert torch.equal(result.outputs, output)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


# ------------------------------------------------------------------ state


def test_state() -> None:
    model = gpt(tied=True)
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), optimizer=SGD, microbatches=1)
    full = pipe.full_state_dict()
    assert full.keys() == model.state_dict().keys() == pipe.state_dict().keys()
    assert "lm_head.weight" in full
    x, y = batch_for(model, 2)
    pipe.step(x, target=y)
    assert torch.equal(pipe.state_dict()["wte.weight"], model.wte.weight)
    assert not torch.equal(full["wte.weight"], model.wte.weight)
    pipe.load_state_dict({"ln_f.bias": torch.ones(32)})
    assert model.ln_f.bias.eq(1).all()
    pipe.load_state_dict(full)
    assert torch.equal(full["wte.weight"], model.wte.weight)
    with pytest.raises(InputError, match="nothing called other"):
        pipe.load_state_dict({"other": torch.ones(1)})
    with pytest.raises(InputError, match="does not fit"):
        pipe.load_state_dict({"ln_f.bias": torch.ones(3)})


def test_keep_model_trains_a_copy() -> None:
    model = mlp()
    before = copy.deepcopy(model)
    pipe = pdcompile.reference(
        model, loss_fn=loss_for(model), optimizer=SGD, microbatches=1, keep_model=True
    )
    x, y = batch_for(model, 2)
    pipe.step(x, target=y)
    same(model, before)
    name = "layers.0.weight"
    assert not torch.equal(pipe.to_model().get_parameter(name), model.get_parameter(name))


def test_after_close() -> None:
    model = mlp()
    with pdcompile.reference(model, loss_fn=loss_for(model), microbatches=1) as pipe:
        pass
    x, y = batch_for(model, 2)
    for call in (pipe.step, pipe.eval_step, pipe.forward_backward):
        with pytest.raises(ClosedError):
            call(x, target=y)
    assert pipe.to_model() is model


# ------------------------------------------------------------------ what is refused


def make(**options: Any) -> Reference:
    made: Reference = pdcompile.reference(
        **{"model": mlp(), "loss_fn": F.mse_loss, "optimizer": SGD, "microbatches": 2, **options}
    )
    return made


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatches": "auto"}, "planner's choice"),
        ({"microbatches": 0}, "from 1 up"),
        ({"microbatches": True}, "from 1 up"),
        ({"schedule": "auto"}, "which weights"),
        ({"schedule": "fast"}, "which weights"),
        ({"schedule": "stash", "microbatches": 2}, "every microbatch is a minibatch"),
        ({"schedule": "stash", "microbatches": 1}, "depends on the plan"),
        ({"schedule": "vsync", "microbatches": 1}, "depends on the plan"),
        ({"schedule": "stash", "microbatches": 1, "max_grad_norm": 1.0}, "all stages"),
        ({"schedule": "2bw", "optimizer": None}, "without updates"),
        ({"max_grad_norm": 0}, "max_grad_norm must be positive"),
        ({"loss_reduction": "median"}, "'median'"),
        ({"loss_fn": 3}, "not callable"),
        ({"optimizer": 3}, "not a callable"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, "not a callable"),
        ({"optimizer": lambda parameters: 1}, "returned int"),
        ({"optimizer": torch.optim.LBFGS}, "closure"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, "grad_scaler"),
        ({"autocast": "float"}, None),
        ({"autocast": "fp16"}, "no dtype"),
        ({"nonsense": 1}, "nonsense"),
        ({"model": 3}, "not an nn.Module"),
        ({"model": nn.DataParallel(mlp())}, "wrapped"),
        ({"model": torch.compile(mlp())}, "wrapped"),
        ({"model": nn.Linear(2, 2, device="meta")}, "meta device"),
        ({"model": nn.LazyLinear(2)}, "no shape yet"),
    ],
)
def test_options_without_meaning(options: dict[str, Any], said: str | None) -> None:
    if said is None:
        make(**options)
        return
    with pytest.raises(ConfigError, match=said):
        make(**options)


def test_stash_needs_its_own_plan() -> None:
    model = mlp(layers=2)
    names = [name for name, _ in model.named_parameters()]
    options: dict[str, Any] = {"model": model, "schedule": "stash", "microbatches": 1}
    for parameters, said in [
        ([names, names[:1]], "several stages"),
        ([names, ["other"]], "does not have: other"),
    ]:
        with pytest.raises(ConfigError, match=said):
            make(plan=plan("stash", parameters, (1, 0)), **options)
    with pytest.raises(ConfigError, match="type str"):
        make(plan="plan.json", **options)


def test_forward_backward_needs_the_newest_weights() -> None:
    pipe = make(schedule="2bw")
    with pytest.raises(ConfigError, match="older weights"):
        pipe.forward_backward(torch.ones(2, 16), target=torch.ones(2, 16))


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda out, target: out, "shape"),
        (lambda out, target: out.sum().item(), "type float"),
        (lambda out, target: out.detach().sum(), "trainable"),
        (None, "no loss in it"),
    ],
)
def test_losses_without_a_gradient(loss_fn: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(loss_fn=loss_fn).step(torch.ones(2, 16))


def test_minibatches_that_do_not_fit() -> None:
    x = torch.ones(4, 16)
    pipe = make()
    with pytest.raises(InputError, match="missing"):
        pipe.step(target=x)
    with pytest.raises(InputError, match="neither the batch size"):
        pipe.step(x, target=torch.ones(3, 16))
    with pytest.raises(InputError, match="no samples"):
        pipe.step(x[:0], target=x[:0])
    with pytest.raises(InputError, match="example_inputs"):
        make(example_inputs=[x])


def test_batch_dims_reach_every_minibatch() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            out: Tensor = self.linear(x.transpose(0, 1)) * scale
            return out

    model = Scaled()
    pipe = make(model=model, batch_dims={"x": 1, "scale": None})
    for size in (4, 3):  # the second one is as long as `scale` by chance
        x, scale = torch.randn(3, size, 1).expand(3, size, 3), torch.arange(3.0)
        outputs = pipe.eval_step(x, scale, target=torch.zeros(size, 3, 3)).outputs
        torch.testing.assert_close(outputs, model(x, scale).detach())


def test_another_mode_of_the_caller_changes_nothing() -> None:
    model = mlp()
    data = batches(model, 4)
    with torch.no_grad():
        trained, losses = run(model, data, optimizer=SGD)
    expected, by_loop = by_hand(model, data, SGD, 3)
    same(trained, expected)
    assert losses == by_loop
