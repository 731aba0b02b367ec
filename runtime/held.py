"""What the user may have done to the model between two calls.

The pipeline trains the model's own Parameters, so their values may be changed in place between
calls.  Another Parameter or module in their place, hooks, another dtype, or freezing and thawing
would be passed over in silence by stages that were made before: these are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.errors import ConfigError


class Held:
    """The parameters of the model as they were when the pipeline started.

    `copied`: names of tied parameters of this process that other processes have copies of.
    """

    def __init__(self, model: nn.Module, copied: frozenset[str]) -> None:
        self._modules = [
            (module, name, dict(module._modules), _hooks(module))
            for name, module in model.named_modules()
        ]
        self._places: list[tuple[dict[str, Any], str, str, Tensor, torch.dtype, bool]] = []
        for path, module in model.named_modules():
            home: dict[str, Any] = module._parameters
            for leaf, tensor in home.items():
                if tensor is not None:
                    name = f"{path}.{leaf}" if path else leaf
                    was = (tensor, tensor.dtype, tensor.requires_grad)
                    self._places.append((home, leaf, name, *was))
        self._copied = copied
        self._states: list[tuple[int, int]] = []
        self.remember()

    def remember(self) -> None:
        """The values are the pipeline's own from here on."""
        self._states = [_state(tensor) for *_, tensor, _, _ in self._places]

    def check(self, *, training: bool, in_flight: bool, fresh_copies: bool) -> None:
        """Raise ConfigError when a call cannot mean what the model now says.

        `in_flight`: microbatches are under way that were computed on the present values;
        `fresh_copies`: copies of tied parameters on other ranks are not renewed by this call.
        """
        for module, name, children, hooks in self._modules:
            if module._modules != children:
                _refuse(name, "got other submodules", "a module")
            if _hooks(module) != hooks:
                _refuse(name, "got other hooks", "a module")
        for home, leaf, name, tensor, dtype, trained in self._places:
            if home.get(leaf) is not tensor:
                _refuse(name, "was replaced by another tensor")
            if tensor.dtype != dtype:
                _refuse(name, f"was {dtype} and is {tensor.dtype}, converted")
            if training and tensor.requires_grad != trained:
                what = "frozen" if trained else "made trainable"
                _refuse(name, f"was {what}")
        if not in_flight and not (fresh_copies and self._copied):
            return
        for (*_, name, tensor, _, _), state in zip(self._places, self._states, strict=True):
            if _state(tensor) == state:
                continue
            if in_flight:
                raise ConfigError(
                    "a parameter was changed while microbatches were in flight that were "
                    "computed on its old values",
                    where=name,
                    remedy="call pipe.flush() first; load_state_dict does so by itself",
                )
            if name in self._copied:
                raise ConfigError(
                    "a parameter was changed that other ranks hold copies of (tied weights)",
                    where=name,
                    remedy="call pipe.load_state_dict({name: value}) on every rank instead",
                )


def _state(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, 0 if tensor.is_meta else tensor.data_ptr()


def _hooks(module: nn.Module) -> tuple[int, int]:
    return len(module._forward_hooks), len(module._backward_hooks)


def _refuse(name: str, what: str, thing: str = "a parameter") -> None:
    raise ConfigError(
        f"{thing} {what} after the pipeline was prepared, which has its stages made already",
        where=name or "the model",
        remedy="change values in place (p.copy_ under torch.no_grad, or load_state_dict), or "
        "compile the changed model anew",
    )
