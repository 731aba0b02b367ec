"""ReferenceState: the parameters and the state of the reference pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from pdcompile.eager.gradients import clip, norm_of
from pdcompile.eager.loss_scale import LossScale
from pdcompile.errors import ClosedError, InputError
from pdcompile.position import Position, as_position, position_of, with_position
from pdcompile.reference.versions import Groups, Versions


class ReferenceState:
    """The part of `Reference` that takes no minibatch."""

    _versions: Versions
    _groups: Groups
    _scale: LossScale | None

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._num_minibatches = 0
        self._num_evaluations = 0
        self._closed = False

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for parameter in self._model.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`; returns the norm.

        The coefficient is that of `torch.nn.utils.clip_grad_norm_`, which groups the norms by
        dtype; here they keep the order of the parameters, so that it does not depend on stages.
        """
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        norms = torch.stack([norm_of(gradient) for gradient in gradients])
        total: Tensor = torch.linalg.vector_norm(norms)
        clip(gradients, total, max_norm)
        return total

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters, the newest version."""
        return self._model.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters, the newest version."""
        return self._model.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Live, detached tensors under the model's names."""
        return with_position(self._model.state_dict(), self.position)

    def full_state_dict(self) -> dict[str, Any]:
        """A copy on the CPU, with exactly the keys of ``model.state_dict()``."""
        state = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in self._model.state_dict().items()
        }
        return with_position(state, self.position)

    @property
    def position(self) -> Position:
        """The numbers of minibatches trained on and evaluated, saved with the state."""
        return Position(self._num_minibatches, self._num_evaluations)

    def load_state_dict(
        self, state: Mapping[str, Any], *, position: Position | int | None = None
    ) -> None:
        """Loads weights and buffers, all or a part of them.

        Under schedules with older weights every version becomes the loaded one.  Training continues
        at `position`, else at the position of the state, else at the present one.

        Raises:
            InputError: a name or a shape that the model does not have.
        """
        unknown = [name for name in state if name not in self._model.state_dict()]
        if unknown:
            raise InputError(
                f"the model has nothing called {', '.join(unknown[:5])}",
                remedy="load a state of this model",
            )
        try:
            self._model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise InputError(
                f"the state does not fit the model: {error}", remedy="load a state of this model"
            ) from None
        self._versions.forget()
        found = as_position(position) or position_of(state) or self.position
        self._groups.restart()
        if self._scale is not None:
            self._scale.restart(found.minibatches)
        self._num_minibatches, self._num_evaluations = found.minibatches, found.evaluations

    def to_model(self) -> nn.Module:
        """The trained eager model (the one that was passed, unless keep_model)."""
        return self._model

    def close(self) -> None:
        """Ends training; the model and its state stay readable."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this pipeline was closed", remedy="make a new pipeline")
