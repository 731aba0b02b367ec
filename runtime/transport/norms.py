"""Norms of all ranks' gradients, and whether all are finite, as an update needs them.

The arithmetic is that of torch.nn.utils.clip_grad_norm_, in the order of the model's parameters,
so that the coefficient is bit for bit the one that a single process would find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pdcompile.eager.gradients import norm_of
from pdcompile.eager.loss_scale import LossScale
from pdcompile.errors import ConfigError, ContractError
from pdcompile.runtime.transport.point_to_point import Handle
from pdcompile.runtime.transport.reductions import Sums

ABSENT = -1.0  # the norm of a parameter without gradient: it is left out of the stack


class Norms:
    """One rank's part in the exchange: a sum in which every rank fills in what it owns.

    `owned[r]`: the trainable parameters that rank r owns, replicas the same ones; `dtypes`: of all
    parameters, in the order of the model.  A norm plus zeros is that norm, bit for bit.  `scale`:
    of the losses, which gradients are divided by first.
    """

    def __init__(
        self, sums: Sums, rank: int, owned: Sequence[Sequence[str]],
        dtypes: Mapping[str, torch.dtype], scale: LossScale | None = None,
    ) -> None:  # fmt: skip
        self._sums = sums
        self.scale = scale
        self._mine = owned[rank]
        self._before = sum(map(len, owned[:rank]))
        self._names = [fqn for names in owned for fqn in names]
        self._dtypes = dtypes
        self.total = torch.tensor(0.0)  # of the last exchange
        self._posted: dict[int, tuple[dict[str, Tensor], Handle, float]] = {}  # with the scale

    def post(self, minibatch: int, gradients: Mapping[str, Tensor]) -> None:
        """Give this rank's norms to all others."""
        finite = self.scale is None or self.scale.unscale(minibatch, gradients.values())
        scaled_by = 1.0 if self.scale is None else self.scale.scale(minibatch)
        mine = {fqn: norm_of(g) for fqn, g in gradients.items()}
        there = self._sums.device
        absent = torch.full((), ABSENT, device=there.device)
        row = torch.zeros(len(self._names) + 2, dtype=torch.float64, device=there.device)
        if self._mine:
            listed = [mine.get(fqn, absent).to(torch.float64) for fqn in self._mine]
            row[self._before : self._before + len(listed)] = torch.stack(listed)
        if self.scale is not None:  # a norm can overflow where every gradient is finite
            row[-2], row[-1] = scaled_by, 0.0 if finite else 1.0
        # What is queued on a device is read from the row, which comes to the host.
        self._posted[minibatch] = {} if there.queued else mine, self._sums.start(row), scaled_by

    def ready(self, minibatch: int) -> bool:
        return self._posted[minibatch][1].ready()

    def wait(self, minibatch: int) -> Tensor:
        """The total norm over all ranks: a scalar, the same everywhere."""
        norms, handle, scaled_by = self._posted.pop(minibatch)
        total = handle.wait()
        assert total is not None
        row = self._sums.device.fetch(total).wait()
        if self.scale is not None:
            _refuse_unlike(minibatch, scaled_by, float(row[-2]) / self._sums.size)
            self.scale.learn(minibatch, finite=not row[-1])
        for fqn, norm in zip(self._names, row.tolist(), strict=False):
            if norm != ABSENT and fqn not in norms:
                norms[fqn] = torch.tensor(norm, dtype=self._dtypes[fqn].to_real())
        stacked = [norms[fqn] for fqn in self._dtypes if fqn in norms]
        self.total = torch.tensor(0.0)
        if stacked:
            self.total = torch.linalg.vector_norm(torch.stack(stacked), 2.0)
        return self.total

    def abandon(self) -> None:
        """Forget what is in flight: the connections are about to close."""
        self._posted.clear()
        self._sums.abandon()


def _refuse_unlike(minibatch: int, here: float, mean: float) -> None:
    if mean != here:
        raise ContractError(
            f"the loss of minibatch {minibatch} was scaled by {here:g} here, and by {mean:g} in "
            "the mean of all ranks",
            where="grad_scaler",
            remedy="give every rank a GradScaler of the same settings, and change them alike",
        )


def check_max_norm(max_norm: float) -> None:
    """Raise ConfigError for what is not a norm."""
    number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if not number or not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm!r} is not a positive number", remedy="such as 1.0")
