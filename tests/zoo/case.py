"""Entry of the zoo: a real architecture, small, random, and one call of it."""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4  # samples in a minibatch of every entry

LossFn = Callable[[Any, Any], Tensor]


@dataclass(slots=True)
class Case:
    """One model in train mode with minibatches to train it on.

    `inputs(step)` are keyword arguments (a dict) or positional ones (a tuple) of BATCH samples;
    they differ from step to step in values, never in shape.  Without `loss_fn` the model returns
    its loss; otherwise `target(step)` is what loss_fn compares the output with.
    """

    model: nn.Module
    inputs: Callable[[int], Any]
    loss_fn: LossFn | None = None
    target: Callable[[int], Any] = lambda step: None
    batch_dims: Any = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A name, how to build the model (dropout probability -> Case), and what that needs."""

    name: str
    family: str
    build: Callable[[float], Case]
    library: str  # torch | transformers | timm
    lists: tuple[str, ...] = field(default=())  # published lists that the model is on

    @property
    def missing(self) -> str:
        """Reason why it cannot be built here; empty when it can."""
        if self.library != "torch" and importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed (make venv installs it)"
        if self.library == "timm":
            from tests.zoo.torchvision_path import reason

            return reason()
        return ""


def build(entry: Entry, dropout: float) -> Case:
    """The entry's model with weights drawn from a seed that is its own, in train mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(entry.name.encode()))
        case = entry.build(dropout)
    case.model.train()
    return case


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def ids(step: int, length: int = 12, vocab: int = 96, low: int = 3) -> Tensor:
    """(BATCH, length) token ids from low up to vocab."""
    return torch.randint(low, vocab, (BATCH, length), generator=generator(step))


def floats(step: int, *shape: int) -> Tensor:
    """Standard normal, (BATCH, *shape)."""
    return torch.randn(BATCH, *shape, generator=generator(step + 500))


def classes(step: int, count: int, *shape: int) -> Tensor:
    """Class numbers below count, (BATCH, *shape)."""
    return torch.randint(0, count, (BATCH, *shape), generator=generator(step + 900))


def padded(step: int, length: int = 12) -> Tensor:
    """An attention mask, (BATCH, length): the last row is padded at its end."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[-1, length - 3 - step % 2 :] = 0
    return mask
