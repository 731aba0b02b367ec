"""The optimizer between two calls, while an update of its is in flight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pdcompile.eager import digest
from pdcompile.eager.loss_scale import LossScale
from pdcompile.eager.optimizers import all_step_hooks, members
from pdcompile.errors import ConfigError

# What every optimizer has, and what schedulers of learning rates add.
_KNOWN = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"_opt_called", "_step_count"}


class OptimizerWatch:
    """The optimizer as the last call left it, while an update of its is in flight.

    Values of its param_groups (learning rates) count from the next step on, as always: updates
    have them from the moment when their step was called.  So does what the user puts into the
    GradScaler, which shows the newest `scale` of the losses between calls.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | None, scale: LossScale | None = None
    ) -> None:
        self._optimizer = optimizer
        self._scale = scale
        self._seen: list[tuple[str, Any]] = []

    def remember(self, *, in_flight: bool) -> None:
        """A call ends."""
        if self._scale is not None:
            self._scale.show()
        self._seen = self._present() if in_flight else []

    def check(self, *, in_flight: bool) -> None:
        """Raise ConfigError when an update in flight would meet another optimizer."""
        if self._scale is not None:
            self._scale.follow()
        if not in_flight:
            return
        now = self._present()
        if now != self._seen:
            changed = [w for (w, a), (_, b) in zip(self._seen, now, strict=False) if a != b]
            what = changed[0] if changed else "its state"
            raise in_flight_error("pipe.optimizer", f"changed ({what})", "the optimizer")

    def _present(self) -> list[tuple[str, Any]]:
        one = self._optimizer
        assert one is not None, "nothing is in flight without updates"
        own = {
            (n, name): _state_of(value) if isinstance(value, Mapping) else _state_of({"": value})
            for n, member in enumerate(members(one))
            for name, value in vars(member).items()
            if name not in _KNOWN and not hasattr(value, "_wrapped_by_lr_sched")
        }
        return [
            (
                "the parameters of its groups",
                [[id(p) for p in g["params"]] for g in one.param_groups],
            ),
            ("its step hooks", [id(hook) for hook in all_step_hooks(one)]),
            ("its attributes", own),
            ("its state", {id(p): _state_of(values) for p, values in one.state.items()}),
        ]


def _state_of(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return id(values)
    return {
        key: digest.write_state_sample(value) if isinstance(value, Tensor)
        else value if isinstance(value, bool | int | float | str) else id(value)
        for key, value in values.items()
    }  # fmt: skip


def in_flight_error(name: str | None, what: str, thing: str) -> ConfigError:
    """The refusal of a change that would hit an update in flight."""
    return ConfigError(
        f"{thing} was {what} while microbatches were in flight whose computation or update needs "
        "it as it was",
        where=name,
        remedy="call pipe.flush() before such a change; pipe.load_state_dict does so by itself",
    )
