"""Numbers of a training for a log: loss, seconds a step, samples and tokens a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdcompile.errors import ConfigError

if TYPE_CHECKING:
    from pdcompile.batch.step_result import StepResult


class Meter:
    """Counts steps, and gives their numbers as a plain dict of floats.

    That is what TensorBoard's ``SummaryWriter.add_scalar``, tqdm's ``set_postfix``, a JSON line
    and others take; nothing is printed, and nothing waits but `scalars`, which reads the loss.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last: StepResult | None = None
        self._begin()

    def _begin(self) -> None:
        self._began = self._clock()
        self._steps = self._samples = self._tokens = 0

    def add(self, result: StepResult, *, samples: int = 0, tokens: int = 0) -> None:
        """Count the minibatch of a result, with its samples and tokens over all ranks.

        Raises:
            ConfigError: a number is no count.
        """
        for name, number in (("samples", samples), ("tokens", tokens)):
            if type(number) is not int or number < 0:
                raise ConfigError(
                    f"{name}={number!r} is no count",
                    where="Meter.add",
                    remedy="give a whole number: len(batch), tensor.numel()",
                )
        self._last = result
        self._steps, self._samples = self._steps + 1, self._samples + samples
        self._tokens += tokens

    def scalars(self) -> dict[str, float]:
        """The last loss, and means since the last call of this function; begins anew.

        The keys are ``loss``, ``step_seconds``, ``samples_per_second`` and ``tokens_per_second``;
        what was not counted is left out, and without a step all is.
        """
        if self._last is None or not self._steps:
            return {}
        found = {} if self._last.loss is None else {"loss": float(self._last.loss)}
        seconds = self._clock() - self._began  # after the loss: the step is over then
        found["step_seconds"] = seconds / self._steps
        for name, count in (("samples", self._samples), ("tokens", self._tokens)):
            if count and seconds > 0:
                found[f"{name}_per_second"] = count / seconds
        self._last = None
        self._begin()
        return found
