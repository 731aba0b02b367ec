"""A small model with every kind of tensor, on the meta device and in safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pdcompile.weights.source import slots


class Rotary(nn.Module):
    """A buffer that no checkpoint has, and the method by which libraries fill it again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("frequencies", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.frequencies.copy_(1.0 / (1 + torch.arange(self.width)))


class Bare(nn.Module):
    """The same without the method."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3).tril(), persistent=False)


class Net(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.inner = inner
        self.last = nn.Linear(4, 8, bias=False)
        self.last.weight = self.first.weight


def on_meta(build: Any = Net) -> Any:
    with torch.device("meta"):
        return build()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """State as safetensors takes it: tied tensors under one name."""
    return {slot.fqn: slot.tensor for slot in slots(model).values() if slot.persistent}


def saved(folder: Path, state: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    save_file({key: value.detach().contiguous() for key, value in state.items()}, folder / name)
    return folder / name


def sharded(folder: Path, state: dict[str, Tensor]) -> Path:
    """One file a tensor, and their index, as on the Hugging Face hub."""
    index = {}
    for number, (name, value) in enumerate(state.items()):
        index[name] = saved(folder, {name: value}, f"part-{number}.safetensors").name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def equal(model: nn.Module, expected: nn.Module) -> bool:
    theirs = slots(expected)
    return all(torch.equal(s.tensor, theirs[fqn].tensor) for fqn, s in slots(model).items())


def normal(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.normal_()
    else:
        tensor.zero_()
