"""Random streams: stable names, complete lists, the same draws whatever ran before."""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.eager import randomness
from pdcompile.eager.randomness import (
    DrawScope,
    evaluation_minibatch,
    is_leaf,
    is_random_function,
    is_random_module,
    preserved_rng,
    reseed,
    seed_of,
)
from pdcompile.errors import ConfigError
from pdcompile.passes.costs.rehearsal.rehearse import rehearse
from tests.helpers import models

pytestmark = pytest.mark.usefixtures("captured_anew")

X = torch.linspace(0.1, 0.9, 24).view(2, 3, 4)


class Inline(nn.Module):
    """Calls the given function in its forward."""

    def __init__(self, function: Callable[[Tensor], object], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def draws(model: nn.Module, *args: object) -> list[tuple[str, int]]:
    with preserved_rng(), DrawScope(model, 0, 0, 0) as scope:
        model(*args)
    return scope.draws


def test_a_seed_is_the_same_in_every_release() -> None:
    assert seed_of(0, 0, 0, "", 0) == 13176393703614087286
    assert seed_of(7, 3, 1, "blocks.2.drop", 0) == 17304896221675669422


@given(st.lists(st.tuples(*[st.integers(-3, 300)] * 3, st.text(), st.integers(0, 9)), unique=True))
def test_different_draws_have_different_seeds(
    names: list[tuple[int, int, int, str, int]],
) -> None:
    seeds = {seed_of(*name) for name in names if name[3].isascii()}
    assert len(seeds) == sum(name[3].isascii() for name in names)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_evaluation_streams_are_never_those_of_training() -> None:
    assert [evaluation_minibatch(call) for call in range(3)] == [-1, -2, -3]


def python_functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Python functions that a TorchFunctionMode sees as one call: they ask has_torch_function."""
    homes = [F, nn.init, torch.functional, torch._lowrank, torch._lobpcg, torch._tensor.Tensor]
    for home in homes:
        for name, function in vars(home).items():
            if isinstance(function, types.FunctionType):
                names = set(function.__code__.co_names)
                if any(one.startswith("has_torch_function") for one in names):
                    yield name, function


def test_every_python_function_that_reaches_a_seeded_op_is_listed() -> None:
    functions = dict(python_functions())
    assert len(functions) > 100
    random = set(randomness.SEEDED_OPS)
    grown = True
    while grown:  # transitively: gumbel_softmax calls exponential_, dropout2d calls dropout
        reach = {
            name
            for name, function in functions.items()
            if random & set(function.__code__.co_names) and name not in random
        }
        random |= reach
        grown = bool(reach)
    # tensor.split and the like share no name with a random op, so the scan has no false alarm
    missed = {n for n in random if n in functions and not is_random_function(functions[n])}
    assert missed == set()


def test_every_random_leaf_module_is_listed() -> None:
    for name, kind in vars(torch.nn.modules).items():
        if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
            continue
        names = {
            one
            for method in vars(kind).values()
            if isinstance(method, types.FunctionType) and method.__name__ == "forward"
            for one in method.__code__.co_names
        }
        random = any(
            one in randomness.SEEDED_OPS or is_random_function(getattr(F, one, len))
            for one in names
        )
        if random:
            assert issubclass(kind, randomness._RANDOM_MODULES), name


RANDOM_CALLS: dict[str, Callable[[Tensor], object]] = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "F.dropout in eval": lambda x: F.dropout(x, 0.5, training=False),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "F.dropout1d": lambda x: F.dropout1d(x),
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "F.feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "F.rrelu": lambda x: F.rrelu(-x, training=True),
    "F.gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "torch.rand": lambda x: torch.rand(3),
    "torch.randn": lambda x: torch.randn(3),
    "torch.randint": lambda x: torch.randint(9, (3,)),
    "torch.rand_like": lambda x: torch.rand_like(x),
    "torch.randn_like": lambda x: torch.randn_like(x),
    "torch.randint_like": lambda x: torch.randint_like(x, 9),
    "torch.randperm": lambda x: torch.randperm(9),
    "torch.bernoulli": lambda x: torch.bernoulli(x),
    "Tensor.bernoulli_": lambda x: x.clone().bernoulli_(),
    "Tensor.normal_": lambda x: x.clone().normal_(),
    "torch.normal": lambda x: torch.normal(x, x),
    "Tensor.uniform_": lambda x: x.clone().uniform_(),
    "Tensor.exponential_": lambda x: x.clone().exponential_(),
    "Tensor.random_": lambda x: x.clone().random_(7),
    "torch.multinomial": lambda x: torch.multinomial(x[0], 2),
    "torch.poisson": lambda x: torch.poisson(x),
    "torch.ops.aten": lambda x: torch.ops.aten.bernoulli(x),
    "torch.ops.aten overload": lambda x: torch.ops.aten.bernoulli.default(x),
    "distributions.Normal": lambda x: torch.distributions.Normal(0.0, 1.0).rsample((2,)),
    "distributions.Dirichlet": lambda x: torch.distributions.Dirichlet(x).rsample(),
    "nn.init.normal_": lambda x: nn.init.normal_(x.clone()),
    "nn.init.kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x.clone()),
    "F.fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, output_size=2),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", RANDOM_CALLS)
def test_one_random_call_is_one_draw_of_the_running_module(name: str) -> None:
    model = nn.ModuleDict({"inner": Inline(RANDOM_CALLS[name])})
    model.forward = lambda x: [model["inner"](x), model["inner"](x)]
    assert draws(model, X) == [("inner", 0), ("inner", 1)]


RANDOM_LEAVES: dict[str, tuple[nn.Module, Callable[[nn.Module], object]]] = {
    "Dropout": (nn.Dropout(), lambda m: m(X)),
    "Dropout2d": (nn.Dropout2d(), lambda m: m(X[None])),
    "AlphaDropout": (nn.AlphaDropout(), lambda m: m(X)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(), lambda m: m(X)),
    "RReLU": (nn.RReLU(), lambda m: m(X)),
    "LSTM": (nn.LSTM(4, 4, num_layers=2, dropout=0.5), lambda m: m(X)),
    "GRU": (nn.GRU(4, 4, num_layers=2, dropout=0.5), lambda m: m(X)),
    "MultiheadAttention": (nn.MultiheadAttention(4, 2, dropout=0.5), lambda m: m(X, X, X)),
    "FractionalMaxPool2d": (nn.FractionalMaxPool2d(2, output_size=2), lambda m: m(X)),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", RANDOM_LEAVES)
@pytest.mark.parametrize("training", [True, False])
def test_a_random_leaf_is_one_draw_of_its_own_path(name: str, training: bool) -> None:
    leaf, call = RANDOM_LEAVES[name]
    assert is_leaf(leaf)
    assert is_random_module(leaf)
    model = nn.ModuleDict({"a": leaf}).train(training)
    model.forward = lambda: call(model["a"])
    assert draws(model) == [("a", 0)]


def test_what_is_no_leaf() -> None:
    class Mine(nn.Dropout):
        pass

    hooked = nn.Dropout()
    hooked.register_forward_pre_hook(lambda module, args: None)
    assert not any(
        map(is_leaf, [Mine(), hooked, nn.Sequential(), nn.TransformerEncoderLayer(4, 2)])
    )
    assert is_leaf(nn.Linear(2, 2))
    for quiet in (nn.Linear(2, 2), nn.MultiheadAttention(4, 2), nn.LSTM(2, 2)):
        assert not is_random_module(quiet)
    assert not is_random_function(F.linear)
    assert not is_random_function(torch.ops.aten.add.Tensor)


def test_a_shared_module_has_its_first_name_and_strangers_are_transparent() -> None:
    drop = nn.Dropout()
    stranger = nn.Dropout()
    model = Inline(lambda x: drop(stranger(drop(x))), first=drop, second=drop)
    assert draws(model, X) == [("first", 0), ("", 0), ("first", 1)]


def test_the_loss_has_a_path_of_its_own() -> None:
    model = Inline(lambda x: F.dropout(x))
    with preserved_rng(), DrawScope(model, 0, 0, 0) as scope:
        model(X)
        with scope.loss():
            torch.rand(1)
            model(X)
    assert scope.draws == [("", 0), ("loss_fn", 0), ("", 1)]


def run(model: nn.Module, minibatch: int = 0, microbatch: int = 0, seed: int = 0) -> Tensor:
    with preserved_rng(), DrawScope(model, seed, minibatch, microbatch):
        out: Tensor = model(X)
    return out


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", [{"minibatch": 1}, {"microbatch": 1}, {"seed": 1}])
def test_each_minibatch_microbatch_and_seed_draws_afresh(other: dict[str, int]) -> None:
    model = nn.Dropout(0.5)
    torch.manual_seed(1)
    first = run(model)
    torch.rand(5)  # the history of the global generator does not matter
    assert torch.equal(first, run(model))
    assert not torch.equal(first, run(model, **other))


def test_a_draw_is_that_of_its_own_seed() -> None:
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.5))
    with preserved_rng():
        reseed(seed_of(4, 5, 6, "1", 0))
        expected = F.dropout(X)
    assert torch.equal(run(model, minibatch=5, microbatch=6, seed=4), expected)


def test_the_callers_generator_and_module_class_are_given_back() -> None:
    before = torch.get_rng_state()
    plain = nn.Module.__call__

    def fail(x: Tensor) -> Tensor:
        torch.rand(3)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run(Inline(fail))
    assert torch.equal(torch.get_rng_state(), before)
    assert nn.Module.__call__ is plain


@pytest.mark.sample(1)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_regions_draw_what_the_forward_drew(use_reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))

    class Model(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.inner = inner
            self.again = again

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(x, 0.3)
            for _ in range(2):
                if self.again:
                    x = checkpoint(self.block, x, use_reentrant=use_reentrant)
                else:
                    x = self.block(x)
            return F.dropout(x, 0.3)

        def block(self, x: Tensor) -> Tensor:
            return F.dropout(self.inner(F.dropout(x, 0.2)), 0.1)

    gradients: list[list[Tensor | None]] = []
    for again in (False, True):
        inner.zero_grad()
        x = X.clone().requires_grad_()
        model = Model(again)
        with preserved_rng(), DrawScope(model, 0, 0, 0) as scope:
            loss = model(x).square().sum()
        with preserved_rng():
            scope.backward([(loss, None)])
        gradients.append([x.grad, *(p.grad for p in inner.parameters())])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_attention_in_eval_keeps_its_fast_path() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    with torch.no_grad():
        expected = attention(X, X, X, need_weights=False)[0]
        model = Inline(lambda x: attention(x, x, x, need_weights=False)[0], attention=attention)
        assert torch.equal(run(model), expected)


def test_a_gpus_generator_is_seeded_wherever_the_cpus_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands for the GPU, with a generator of its own."""
    gpus, seeded = torch.Generator(), list[bool]()
    there = types.SimpleNamespace(GPU="cpu", generator=lambda device: gpus)
    monkeypatch.setattr(randomness, "devices", there)
    announce = randomness.python_draws.announce

    def told(seed: int) -> None:
        frames = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1))]
        # What restores a state tells it too; a rehearsal draws nothing, its tensors are fakes.
        if frames[0] is reseed.__code__ and rehearse.__code__ not in frames:
            seeded.append(gpus in randomness._seeded)
        announce(seed)

    monkeypatch.setattr(randomness.python_draws, "announce", told)
    before = gpus.get_state()
    model = models.gpt(dropout=0.1, layers=1)
    x, y = models.batch_for(model, 4)
    pipe = pdcompile.compile(
        model, (x,), example_target=y, loss_fn=models.loss_for(model), stages=2, microbatches=2,
        optimizer=partial(torch.optim.SGD, lr=0.1), costs="estimated", progress=False,
        verify="full",
    ).prepare()  # fmt: skip
    compiled = len(seeded)
    pipe.step(x, target=y)
    pipe.close()
    assert 0 < compiled < len(seeded)
    assert all(seeded)
    assert torch.equal(gpus.get_state(), before)


def dropping(rate: float | None) -> nn.Module:
    torch.manual_seed(0)
    inner = [] if rate is None else [nn.Dropout(rate)]
    return nn.Sequential(nn.Linear(4, 4), *inner, nn.Linear(4, 2))


def trained(rate: float | None) -> pdcompile.Pipeline:
    return pdcompile.compile(
        dropping(rate),
        cluster=Cluster.local(2), costs="estimated", progress=False, loss_fn=F.mse_loss,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), microbatches=2,
    )  # fmt: skip


def during(pipe: pdcompile.Pipeline, call: Callable[[], object]) -> object:
    """Result or error of `call` in another thread, in the middle of a step of `pipe`."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except ConfigError as error:
            found.append(error)

    def meanwhile(*_: object) -> None:
        if not found:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

    assert pipe.prepare(*STEP[:1], target=STEP[1]).optimizer is not None
    handle = pipe.optimizer.register_step_pre_hook(meanwhile)
    pipe.step(STEP[0], target=STEP[1])
    handle.remove()
    return found[0]


STEP = torch.linspace(-1, 1, 16).view(4, 4), torch.zeros(4, 2)


def test_calls_of_two_threads_at_the_same_time_are_refused() -> None:
    x, y = STEP
    drawing, another, still = trained(0.3), trained(0.3), trained(None)
    reference = pdcompile.reference(dropping(0.3), loss_fn=F.mse_loss, microbatches=2)
    for pipe in (another, still):
        pipe.prepare(x, target=y)
    told = during(drawing, lambda: another.step(x, target=y))
    assert isinstance(told, ConfigError)
    assert "two threads are in calls" in told.message
    assert "one thread" in str(told.remedy)
    expected = float(reference.forward_backward(x, target=y).loss)
    assert float(another.step(x, target=y).loss) == expected  # as if it had not been called
    calls: list[Callable[[], object]] = [
        lambda: drawing.step(x, target=y),
        drawing.flush,
        drawing.close,
        lambda: still.predict(x),
        lambda: trained(None).step(x, target=y),
        lambda: reference.forward_backward(x, target=y),
    ]
    state = torch.get_rng_state()
    assert all(isinstance(during(drawing, call), ConfigError) for call in calls)
    assert torch.equal(torch.get_rng_state(), state)
