"""Small models that do what a capture would rather not see, each in a submodule of its own.

Every class takes and returns rows of eight numbers; it stands between two linear layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[[Any, Tensor], Any]
CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {}


class Part(nn.Module):
    """A linear layer, a batch norm, dropout and a buffer, for the forward of a case to use."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("ema", torch.zeros(8))
        self.register_buffer("step", torch.tensor(0))
        self.calls = 0
        self.kept: Any = None
        self.log: list[Any] = []


def case(verdict: str) -> Callable[[Forward], Forward]:
    """Add a forward of `Part`; verdict: exact, kept (whole), refused."""

    def add(forward: Forward) -> Forward:
        def build() -> nn.Module:
            part = type(forward.__name__.title(), (Part,), {"forward": forward})
            made: nn.Module = part()
            return made

        CASES[forward.__name__] = (build, verdict)
        return forward

    return add


# Values decide.


@case("kept")
def branch_on_item(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    return self.drop(y) * 2 if y.mean().item() > 0 else y


@case("exact")
def nonzero_rows(self: Any, x: Tensor) -> Tensor:
    index = (x[:, 0] > 0).nonzero().flatten()
    return x.index_add(0, index, self.drop(self.lin(x[index])))


@case("kept")
def unique_values(self: Any, x: Tensor) -> Tensor:
    _, inverse = torch.unique((x * 2).int(), return_inverse=True)
    return self.lin(x) + inverse.float() * 0.01


@case("kept")
def numpy_inside(self: Any, x: Tensor) -> Tensor:
    scale = torch.from_numpy(x.detach().numpy().max(axis=1, keepdims=True))
    return self.lin(x) * scale


@case("kept")
def scale_by_float(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) * float(x.abs().max())


@case("kept")
def loop_until(self: Any, x: Tensor) -> Tensor:
    for _ in range(5):
        x = torch.tanh(self.lin(x))
        if x.abs().max() < 0.5:
            break
    return x


@case("kept")
def layer_drop(self: Any, x: Tensor) -> Tensor:
    if self.training and torch.rand([]) < 0.5:
        return x
    return self.lin(x)


@case("exact")
def rows_one_by_one(self: Any, x: Tensor) -> Tensor:
    return torch.stack([self.lin(row) for row in x])


@case("exact")
def batch_as_float(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) + x.shape[0] * 0.5


# Autograd inside.


@case("kept")
def hook_on_activation(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2)
    return y * 3


@case("exact")
def gradient_inside(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    with torch.enable_grad():
        z = y.detach().requires_grad_()
        (grad,) = torch.autograd.grad((z**3).sum(), z)
    return y + grad


@case("exact")
def double_backward(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x if x.requires_grad else x.detach().requires_grad_()
        y = torch.tanh(self.lin(z))
        (grad,) = torch.autograd.grad(y.sum(), z, create_graph=True)
    return y + grad if self.training else (y + grad).detach()


@case("kept")
def vmapped(self: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.sin() * 2)(self.lin(x))


@case("kept")
def vmapped_module(self: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: self.lin(row))(x)


@case("kept")
def func_grad(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) + torch.func.grad(lambda y: (y**3).sum())(x.detach())


@case("exact")
def requires_grad_in_forward(self: Any, x: Tensor) -> Tensor:
    mask = torch.ones(8).requires_grad_()
    return self.lin(x) * mask


@case("exact")
def grad_modes(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.lin(x).sigmoid()
        with torch.enable_grad():
            y = self.lin(x)
    return y * scale


@case("exact")
def detach_trick(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    return y + (y.round() - y).detach()


@case("exact")
def autocast_region(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.lin(x)
    return y.float() + x


@case("exact")
def checkpoint_reentrant(self: Any, x: Tensor) -> Any:
    return checkpoint(lambda y: self.drop(torch.tanh(self.lin(y))), x, use_reentrant=True)


@case("exact")
def checkpoint_plain(self: Any, x: Tensor) -> Any:
    return checkpoint(lambda y: self.drop(torch.tanh(self.lin(y))), x, use_reentrant=False)


@case("kept")
def checkpoint_kept(self: Any, x: Tensor) -> Any:
    y = checkpoint(lambda y: self.drop(torch.tanh(self.lin(y))), x, use_reentrant=False)
    return y if x.sum() > 100 else y + F.dropout(x, 0.5, self.training)


@case("exact")
def checkpoint_sums_gradients(self: Any, x: Tensor) -> Any:
    return checkpoint(lambda y: self.lin(y) * y, x, use_reentrant=True) + self.drop(x)


@case("refused")
def checkpoint_writes_twice(self: Any, x: Tensor) -> Any:
    def statistics(y: Tensor) -> Tensor:
        with torch.no_grad():
            self.ema.lerp_(y.mean(0), 0.1)
        result: Tensor = self.lin(y)
        return result

    return checkpoint(statistics, x, use_reentrant=False)


@case("refused")
def checkpoint_draws_anew(self: Any, x: Tensor) -> Any:
    function = nn.Sequential(self.lin, self.drop)
    return checkpoint(function, x, use_reentrant=True, preserve_rng_state=False)


class Twice(torch.autograd.Function):
    """Its backward is wrong on purpose: no derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        index = x.argmax(1)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        return x * 2, index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        return grad * 5


@case("exact")
def custom_function(self: Any, x: Tensor) -> Tensor:
    y, index = Twice.apply(self.lin(x))  # type: ignore[no-untyped-call]
    result: Tensor = y + index[:, None]
    return result


# In place, views, aliases.


@case("exact")
def writes_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    y[:, :4].mul_(2)
    y.view(-1, 2, 4)[:, 1].add_(x[:, 4:])
    return y


@case("exact")
def returns_a_view(self: Any, x: Tensor) -> Tensor:
    return self.lin(x).view(-1, 2, 4).transpose(1, 2).transpose(1, 2).flatten(1)


@case("exact")
def returns_its_input(self: Any, x: Tensor) -> Tensor:
    self.lin(x)
    return x


@case("exact")
def integer_results(self: Any, x: Tensor) -> Tensor:
    order = x.argsort(1)
    return self.lin(x).gather(1, order)


@case("kept")
def writes_data(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    y.data = y.data * 2
    return y


@case("exact")
def dead_draws(self: Any, x: Tensor) -> Tensor:
    torch.rand(3)
    F.dropout(x, 0.5)
    return self.drop(self.lin(x))


@case("exact")
def complex_numbers(self: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.fft(self.lin(x))
    return torch.fft.ifft(spectrum * 1j).imag


@case("exact")
def counts_in_a_buffer(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.step += 1
        with torch.no_grad():
            self.ema.lerp_(x.mean(0), 0.1)
    return self.lin(x - self.ema) / (1 + self.step)


@case("exact")
def normalises_by_hand(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.lin(x)
    if not self.training:
        return self.drop(y - self.ema / (1 - 0.9 ** (self.step + 1)))
    mean = y.mean(0)
    self.ema.copy_(0.9 * self.ema + 0.1 * mean.detach())
    self.step += 1
    return self.drop(y - mean)


# State outside of tensors.


@case("exact")
def rebinds_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.ema = self.ema * 0.9 + x.detach().mean(0)
    return self.lin(x) + self.ema


@case("exact")
def sets_the_dropout(self: Any, x: Tensor) -> Tensor:
    self.drop.p = 0.1 if self.training else 0.0
    result: Tensor = self.drop(self.lin(x))
    return result


@case("kept")
def exits_early_in_evaluation(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.lin(x)
    if not self.training and y.max() > 0.5:
        return y
    return self.drop(y[:, [1, 0, 2, 3, 4, 5, 6, 7]])


@case("refused")
def counts_in_python(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.lin(x) * self.calls


@case("refused")
def remembers_the_last(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    if self.kept is not None:
        y = y + self.kept
    self.kept = y.detach().mean(0)
    return y


@case("refused")
def appends_to_a_list(self: Any, x: Tensor) -> Tensor:
    self.log.append(x.detach())
    return self.lin(x)


@case("kept")
def python_random(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) if random.random() < 0.5 else x


@case("refused")
def own_generator(self: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return self.lin(x) + torch.rand(8, generator=generator)


@case("refused")
def seeds_in_forward(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return self.drop(self.lin(x))


@case("refused")
def seeds_and_turns_back(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        noise = torch.randn(8)
    return self.lin(x) + noise


@case("refused")
def draws_the_same_again(self: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.randn(8)
    torch.set_rng_state(state)
    return self.lin(x) + noise - torch.randn(8)


@case("refused")
def writes_a_parameter(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.lin.weight.clamp_(-0.1, 0.1)
    return self.lin(x)
