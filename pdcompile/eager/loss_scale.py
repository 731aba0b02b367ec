"""The scale of a loss in float16, as torch.amp.GradScaler keeps it, while several updates are open.

A loss is multiplied by the scale before its backward, so that small gradients do not vanish in
float16; gradients are divided by it before anything reads them, and a minibatch with one that is
not finite makes no update.  Each update is followed by a scale for the next one.  Where minibatches
run on weights that are `lag` updates old, minibatch t begins before its last `lag` updates are
known, and takes the scale after max(t - lag, 0) of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pdcompile.errors import ConfigError

SavedScale = tuple[int, float, int, float, float, int]  # updates before; the fields of `Scale`
_RULE = ("growth_factor", "backoff_factor", "growth_interval")


@dataclass(frozen=True, slots=True)
class Scale:
    """A scale with the rule of its changes; `finite`: updates since the last change."""

    value: float
    finite: int
    growth_factor: float
    backoff_factor: float
    growth_interval: int

    @staticmethod
    def of(state: dict[str, Any]) -> Scale:
        """Scale from the state_dict of a GradScaler that is enabled: it scales by a float32, and
        shows what it was given until it first does."""
        rule = (state[name] for name in _RULE)
        return Scale(_float32(state["scale"]), int(state["_growth_tracker"]), *rule)

    def state(self) -> dict[str, Any]:
        """State for GradScaler.load_state_dict."""
        rule = {name: getattr(self, name) for name in _RULE}
        return {"scale": self.value, "_growth_tracker": self.finite, **rule}

    def after(self, *, finite: bool) -> Scale:
        """The scale after an update, in float32 as torch's own kernel has it."""
        if not finite:
            return replace(self, value=_float32(self.value * self.backoff_factor), finite=0)
        if self.finite + 1 < self.growth_interval:
            return replace(self, finite=self.finite + 1)
        grown = _float32(self.value * self.growth_factor)
        return replace(self, value=self.value if grown == float("inf") else grown, finite=0)


class LossScale:
    """The scales of a training, by the number of updates before; `scaler` shows the newest."""

    def __init__(self, scaler: torch.amp.GradScaler, lag: int) -> None:
        self._scaler, self._lag = scaler, lag
        self._shown: dict[str, Any] = scaler.state_dict()
        self._after: dict[int, Scale] = {0: Scale.of(self._shown)}
        self._skipped: set[int] = set()

    def scale(self, minibatch: int) -> float:
        """Factor that the loss of a minibatch is multiplied by."""
        known = [number for number in self._after if number <= minibatch - self._lag]
        return self._after[max(known, default=min(self._after))].value

    def unscale(self, minibatch: int, gradients: Iterable[Tensor]) -> bool:
        """Divide by the scale, in place.  Returns whether all are finite."""
        factor = torch.tensor(self.scale(minibatch)).double().reciprocal().float().item()
        finite = []
        with torch.no_grad():
            for gradient in gradients:
                numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
                finite.append(torch.isfinite(numbers).all())
                gradient.mul_(factor)
            return not finite or bool(torch.stack(finite).all())  # a device is asked once

    def learn(self, minibatch: int, *, finite: bool) -> None:
        """All gradients of a minibatch were finite, or one was not: then it makes no update.

        In one process each rank says so; one may be a minibatch behind another.
        """
        if max(self._after) > minibatch + 1:
            return
        before = self._after[max(number for number in self._after if number <= minibatch)]
        self._after[minibatch + 1] = before.after(finite=finite)
        for number in [one for one in self._after if one < minibatch - self._lag]:
            del self._after[number]
        self._skipped = {t for t in self._skipped if t >= minibatch - self._lag and t != minibatch}
        if not finite:
            self._skipped.add(minibatch)

    def skips(self, minibatch: int) -> bool:
        """True if a minibatch that was learnt of makes no update."""
        return minibatch in self._skipped

    # -- the user's GradScaler ---------------------------------------------------------------

    def show(self) -> None:
        """A call ends: `scaler` gets the newest scale."""
        self._scaler.load_state_dict(self._after[max(self._after)].state())
        self._shown = self._scaler.state_dict()

    def follow(self) -> None:
        """A call begins: take over what the user has put into `scaler` since the last one."""
        if self._scaler.state_dict() != self._shown:
            self._shown = self._scaler.state_dict()
            self._after[max(self._after)] = Scale.of(self._shown)

    # -- states ------------------------------------------------------------------------------

    def saved(self) -> tuple[SavedScale, ...]:
        """State that later minibatches need: updates before, and fields of the scale after them."""
        return tuple((number, *astuple(one)) for number, one in sorted(self._after.items()))

    def restart(self, minibatches: int, saved: Iterable[SavedScale] = ()) -> None:
        """Go on after so many minibatches, with what was saved then; without it all earlier scales
        are the newest."""
        newest = self._after[max(self._after)]
        self._skipped.clear()
        self._after = {one[0]: Scale(*one[1:]) for one in saved} or {minibatches: newest}
        self.show()


def scaler_of(given: Any) -> torch.amp.GradScaler | None:
    """The option ``grad_scaler=``; None without one, or for one that is switched off.

    Raises:
        ConfigError: it is none.
    """
    if given is None or given is False:
        return None
    if given is True:
        return torch.amp.GradScaler("cpu")
    if not isinstance(given, torch.amp.GradScaler):
        raise ConfigError(
            f"grad_scaler={given!r} is no torch.amp.GradScaler",
            remedy='for example torch.amp.GradScaler("cpu", init_scale=1024.0), with '
            "autocast=torch.float16",
        )
    return given if given.is_enabled() else None


def loss_scale(given: Any, lag: int) -> LossScale | None:
    """Scales for the option ``grad_scaler=``, where weights are so many updates old."""
    scaler = scaler_of(given)
    return None if scaler is None else LossScale(scaler, lag)


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).item())
