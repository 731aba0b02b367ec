"""The targets of export, one row each."""

from __future__ import annotations

from collections.abc import Callable

from pdcompile.passes.export.configurations import accelerate, megatron, torchtitan
from pdcompile.passes.export.subject import Exported, Subject
from pdcompile.passes.export.torch_pipelining import torch_pipelining

KINDS: dict[str, Callable[[Subject], Exported]] = {
    "torch-pipelining": torch_pipelining,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "accelerate": accelerate,
}
