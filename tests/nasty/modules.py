"""Small modules that a capture would rather not see, as they are; see `cases` for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Sequences(nn.Module):
    """An LSTM over packed sequences of one or two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, 0] > 0).long() + 1
        packed = pack_padded_sequence(x.view(-1, 2, 4), lengths, True, enforce_sorted=False)
        out, _ = self.rnn(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=2)
        return padded.flatten(1)


class Hooked(nn.Sequential):
    """Hooks on modules, forward and backward."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
        self[0].register_forward_hook(lambda module, args, out: out * 2)
        self[2].register_full_backward_hook(lambda module, given, got: (given[0] * 3,))


class SharedNorm(nn.Module):
    """One batch norm for two layers, with a cumulative average."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.norm(self.a(x))))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """A parameter that nobody uses, and one whose gradient stays None."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)
        self.aside = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        torch.mul(x, self.aside)
        return self.lin(x)  # type: ignore[no-any-return]


class TiedInside(nn.Module):
    """Weights tied to each other inside of an opaque module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        return y * (1.0 if float(y.sum()) > 0 else 2.0)


class Flat(nn.Module):
    """One flat parameter, of which forward takes the layer's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lin: Any = nn.Linear(8, 8)
        self.flat = nn.Parameter(torch.cat([self.lin.weight.flatten(), self.lin.bias]).detach())
        del self.lin.weight, self.lin.bias

    def forward(self, x: Tensor) -> Any:
        self.lin.weight, self.lin.bias = self.flat[:64].view(8, 8), self.flat[64:]
        y = self.lin(x)
        del self.lin.weight, self.lin.bias
        return y


def compiled() -> nn.Module:
    module: Any = torch.compile(nn.Linear(8, 8), backend="eager")
    return module  # type: ignore[no-any-return]


def scripted() -> nn.Module:
    module: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    return module


def exported() -> nn.Module:
    return torch.export.export(nn.Linear(8, 8), (torch.randn(4, 8),)).module()


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sequences": (Sequences, "kept"),
    "hooks_on_modules": (Hooked, "kept"),
    "shared_norm": (SharedNorm, "kept"),
    "unused_parameters": (Unused, "exact"),
    "tied_inside": (TiedInside, "kept"),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), "exact"),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "exact"),
    "old_weight_norm": (lambda: torch.nn.utils.weight_norm(nn.Linear(8, 8)), "exact"),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), "exact"),
    "flat_parameter": (Flat, "exact"),
    "scripted": (scripted, "refused"),
    "exported": (exported, "refused"),
    "compiled": (compiled, "refused"),
    "lazy": (lambda: nn.LazyLinear(8), "refused"),
}
