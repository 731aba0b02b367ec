"""What a Pipeline answers where it is taken for an nn.Module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from pdcompile.errors import ConfigError

_MODES = "step trains in train mode; eval_step and predict run in eval mode, by themselves"
_DEVICE = "it runs where the model is: move the model before compile"
_INSIDE = "the model that was given to compile has it; plan, explain() and dump() show the stages"
_HINTS = {
    "train": _MODES,
    "eval": _MODES,
    "to": _DEVICE,
    "cuda": _DEVICE,
    "cpu": _DEVICE,
    "forward": "step trains, predict gives outputs",
    "backward": "step runs it; forward_backward does without the update",
    "requires_grad_": "freeze parameters of the model before compile",
    "modules": _INSIDE,
    "named_modules": _INSIDE,
    "children": _INSIDE,
    "buffers": _INSIDE,
    "named_buffers": _INSIDE,
    "save": "torch.save(pipe.full_state_dict(), file), called on every rank, saved on rank 0",
    "train_step": "step",
    "fit": "step, once for each minibatch",
}


class ModuleHints:
    """Says what to call instead."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            "a pipeline is not called as a module is",
            remedy="pipe.step(...) trains, pipe.predict(...) gives outputs, pipe.eval_step(...) "
            "outputs and loss",
        )

    if not TYPE_CHECKING:  # else every attribute would seem to exist

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {_HINTS[name]}" if name in _HINTS else ""
            raise AttributeError(f"a pipeline has no {name!r}{hint}", name=name, obj=self)
