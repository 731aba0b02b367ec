"""Changes that users make to a model and its optimizer between two calls, and what becomes of it.

One row a change, with the words of docs/between_calls.md; tests and the random trials run them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Outcome = Literal["taken over", "refused"]
Kind = Literal["values", "buffers", "structure", "settings", "optimizer"]


class Settings:
    """Values that a model is built from, as libraries keep it."""

    def __init__(self) -> None:
        self.slope = 0.1
        self.unused = 0


class Rich(nn.Module):
    """(b, 8) -> (b, 8), with something of everything that can be changed; maybe tied weights."""

    def __init__(self, tied: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("shift", torch.zeros(()), persistent=False)
        self.factor = 1.0
        self.offset = torch.zeros(8)
        self.settings = Settings()
        self.names = SimpleNamespace(power=1.0)
        self.table = {"gain": 1.0}
        self.third.register_forward_hook(_half_more)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(x), self.settings.slope)
        x = torch.tanh(self.norm(self.second(x))) * self.scale * self.factor
        x = x + self.fixed(self.drop(x)) * self.table["gain"] + self.offset * self.names.power
        out: Tensor = self.last(torch.tanh(self.third(x) + self.shift))
        return out


def _half_more(module: Any, inputs: Any, output: Any) -> Any:
    return output * 1.5


_half_more.captured_once = True  # type: ignore[attr-defined]


def _twice(module: Any, inputs: Any, output: Any) -> Any:
    return output * 2


@dataclass(frozen=True)
class Change:
    """`text`: the first cell of its row; `make(model, optimizer)` does it."""

    text: str
    kind: Kind
    make: Callable[[Any, Any], Any]
    of_tied: bool = False  # whether the parameter is the tied one
    flushes: Literal["", "one process", "always"] = ""  # where it drains what is in flight itself

    def outcome(self, *, in_flight: bool, several_ranks: bool, tied: bool) -> Outcome:
        """Outcome that docs/between_calls.md promises."""
        if self.kind == "structure":
            return "refused"
        if self.kind == "settings":
            return "taken over"
        drained = self.flushes == "always" or (self.flushes and not several_ranks)
        if in_flight and not drained:
            return "refused"
        copied = tied and self.of_tied and several_ranks and self.kind == "values"
        return "refused" if copied else "taken over"


def _no_grad(model: Any, _: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def _data(model: Any, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def _numpy(model: Any, _: Any) -> None:
    for parameter in model.parameters():
        if not parameter.is_meta:
            array = parameter.detach().numpy()
            array *= 0.9


def _rebind_data(model: Any, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def _of_one(model: Any, _: Any) -> None:
    model.second.weight.data.mul_(0.9)


def _load(model: Any, _: Any) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):  # on ranks there is no state
        keys = Rich(tied=False).state_dict().keys()
        own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        state = {key: own[key] for key in keys}
    else:
        state = model.state_dict()  # after what is in flight
    model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in state.items()})


def _fixed(model: Any, _: Any) -> None:
    model.fixed.weight.data.mul_(0.5)


def _sgd(model: Any, _: Any) -> None:
    held = [p for p in model.parameters() if not p.is_meta and p.requires_grad]
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(held, lr=0.01).step()
    for parameter in held:
        parameter.grad = None


def _attribute(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda model, _: setattr(model, name, value)


def _group(**values: Any) -> Callable[[Any, Any], None]:
    def make(_: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group.update(values)

    return make


def _schedule(_: Any, optimizer: Any) -> None:
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates.step()


def _clear(_: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def _moments(_: Any, optimizer: Any) -> None:
    for values in optimizer.state.values():
        values["exp_avg"].data.mul_(0.5)


def _out_of_group(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not model.second.weight]


def _load_optimizer(_: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    for values in optimizer.state.values():
        values["exp_avg"].mul_(0.5)


def _gradient(model: Any, _: Any) -> None:
    model.second.weight.register_hook(lambda gradient: gradient * 0.5)


def _gradient_of_tied(model: Any, _: Any) -> None:
    model.first.weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))


def _halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def _accumulated(model: Any, _: Any) -> None:
    model.second.weight.register_post_accumulate_grad_hook(_halve)


def _no_hook(model: Any, _: Any) -> None:
    model.third._forward_hooks.clear()


def _other_hook(model: Any, _: Any) -> None:
    _no_hook(model, _)
    model.third.register_forward_hook(_twice)


def _prune(model: Any, _: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(model.third, "weight", amount=0.3)


def _norm(model: Any, _: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.third)


def _modes_there_and_back(model: Any, _: Any) -> None:
    model.eval()
    model.train()


VALUES = [
    Change("a parameter written in place under `torch.no_grad()`", "values", _no_grad, True),
    Change("a parameter written through `.data`", "values", _data, True),
    Change("a parameter written through numpy", "values", _numpy, True),
    Change("`parameter.data = tensor`", "values", _rebind_data, True),
    Change("an untied parameter written through `.data`", "values", _of_one),
    Change("`model.load_state_dict(…)`", "values", _load, True, flushes="one process"),
    Change("a step of another optimizer on the same parameters", "values", _sgd, True),
    Change("a frozen parameter written", "values", _fixed),
]
BUFFERS = [
    Change("a buffer written in place", "buffers", lambda m, _: m.scale.mul_(0.5)),
    Change("a buffer written through `.data`", "buffers", lambda m, _: m.scale.data.fill_(0.5)),
    Change("a buffer replaced by a tensor of its shape and dtype", "buffers",
           lambda m, _: setattr(m, "scale", torch.full((8,), 0.5))),
    Change("a buffer that is not saved replaced", "buffers",
           lambda m, _: setattr(m, "shift", torch.tensor(0.5))),
    Change("a tensor in an attribute written", "buffers", lambda m, _: m.offset.fill_(0.5)),
    Change("`norm.reset_running_stats()`", "buffers", lambda m, _: m.norm.reset_running_stats()),
]  # fmt: skip
STRUCTURE = [
    Change("a buffer replaced by a tensor of another shape or dtype", "structure",
           lambda m, _: setattr(m, "scale", torch.ones(8, dtype=torch.float64))),
    Change("a buffer registered or removed", "structure",
           lambda m, _: m.register_buffer("more", torch.ones(1))),
    Change("a parameter replaced by another one", "structure",
           lambda m, _: setattr(m.third, "weight", nn.Parameter(torch.ones(8, 8)))),
    Change("a parameter registered or removed", "structure",
           lambda m, _: m.register_parameter("more", nn.Parameter(torch.ones(1)))),
    Change("a parameter frozen", "structure", lambda m, _: m.third.weight.requires_grad_(False)),
    Change("a parameter made trainable", "structure", lambda m, _: m.fixed.requires_grad_(True)),
    Change("`model.double()`, `model.half()`", "structure", lambda m, _: m.double()),
    Change("a submodule replaced", "structure", lambda m, _: setattr(m, "third", nn.Linear(8, 8))),
    Change("a submodule added", "structure", lambda m, _: m.add_module("more", nn.Linear(8, 8))),
    Change("a parametrization (`weight_norm`)", "structure", _norm),
    Change("pruning", "structure", _prune),
    Change("a forward hook", "structure",
           lambda m, _: m.third.register_forward_hook(lambda module, args, out: out * 2)),
    Change("a forward hook removed", "structure", _no_hook),
    Change("a forward hook replaced by another one", "structure", _other_hook),
    Change("a forward pre-hook", "structure",
           lambda m, _: m.third.register_forward_pre_hook(lambda module, args: (args[0] * 2,))),
    Change("a full backward hook", "structure",
           lambda m, _: m.third.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))),
    Change("a full backward pre-hook", "structure",
           lambda m, _: m.third.register_full_backward_pre_hook(lambda module, go: (go[0] * 2,))),
    Change("`module.forward = function`", "structure",
           lambda m, _: setattr(m.third, "forward", lambda x: x * 2)),
    Change("`module.__class__` changed", "structure",
           lambda m, _: setattr(m.drop, "__class__", nn.Identity)),
    Change("an attribute that forward reads", "structure", _attribute("factor", 0.5)),
    Change("a tensor in an attribute replaced", "structure", _attribute("offset", torch.ones(8))),
    Change("an attribute of an object that forward reads", "structure",
           lambda m, _: setattr(m.settings, "slope", 0.3)),
    Change("an entry of a dict that forward reads", "structure",
           lambda m, _: m.table.update(gain=2.0)),
    Change("an entry of a namespace that forward reads", "structure",
           lambda m, _: setattr(m.names, "power", 2.0)),
    Change("an attribute of one of torch's modules (`norm.momentum`)", "structure",
           lambda m, _: setattr(m.norm, "momentum", 0.9)),
    Change("`module.eval()` of one module in a model that trains", "structure",
           lambda m, _: m.norm.eval()),
]  # fmt: skip
SETTINGS = [
    Change("learning rate, betas, weight decay in `param_groups`", "settings",
           _group(lr=0.003, betas=(0.5, 0.9), weight_decay=0.3)),
    Change("a learning rate scheduler, and its steps", "settings", _schedule),
    Change("`model.eval()` and `model.train()` of the whole model", "settings",
           _modes_there_and_back),
    Change("`model.eval()` left on", "settings", lambda m, _: m.eval()),
    Change("an attribute that forward does not read", "settings", _attribute("epoch", 3)),
    Change("an unread attribute of an object", "settings",
           lambda m, _: setattr(m.settings, "unused", 1)),
    Change("`model.zero_grad()`, `optimizer.zero_grad()`", "settings",
           lambda m, o: (m.zero_grad(), o.zero_grad())),
]  # fmt: skip
OPTIMIZER = [
    Change("`optimizer.state.clear()`", "optimizer", _clear),
    Change("moments of the optimizer written", "optimizer", _moments),
    Change("a parameter taken out of `param_groups`", "optimizer", _out_of_group),
    Change("`optimizer.load_state_dict(…)`", "optimizer", _load_optimizer, flushes="always"),
    Change("`parameter.register_hook(…)`", "optimizer", _gradient),
    Change("`register_hook` on a tied parameter", "optimizer", _gradient_of_tied),
    Change("`register_post_accumulate_grad_hook`", "optimizer", _accumulated),
]
CHANGES = [*VALUES, *BUFFERS, *STRUCTURE, *SETTINGS, *OPTIMIZER]


def batch(t: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and target number t."""
    values = torch.Generator().manual_seed(t)
    return torch.randn(size, 8, generator=values), torch.randn(size, 8, generator=values)
