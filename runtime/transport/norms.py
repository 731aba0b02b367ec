"""Clipping by the global norm: every rank's per-parameter norms, exchanged and stacked.

The arithmetic is that of torch.nn.utils.clip_grad_norm_, in the order of the model's parameters,
so that the coefficient is bit for bit the one that a single process would find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pdcompile.eager.gradients import norm_of
from pdcompile.errors import ConfigError
from pdcompile.runtime.transport.contract import Channel, Expected
from pdcompile.runtime.transport.point_to_point import Handle, Transport
from pdcompile.schedule import Kind

ABSENT = -1.0  # the norm of a parameter without gradient: it is left out of the stack


class Norms:
    """One rank's part in the exchange.

    `owned[r]`: the trainable parameters that rank r owns; `dtypes`: of all parameters, in the
    order of the model.
    """

    def __init__(
        self,
        transport: Transport,
        owned: Sequence[Sequence[str]],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._transport = transport
        self._owned = owned
        self._dtypes = dtypes
        self.total = torch.tensor(0.0)  # of the last exchange
        self.posted: dict[int, tuple[dict[str, Tensor], list[tuple[int, Handle]]]] = {}

    def post(self, minibatch: int, gradients: Mapping[str, Tensor]) -> None:
        """Send this rank's norms to all others, and post the receives of theirs."""
        rank = self._transport.rank
        mine = {fqn: norm_of(g) for fqn, g in gradients.items()}
        absent = torch.tensor(ABSENT)
        listed = [mine.get(fqn, absent).to(torch.float64) for fqn in self._owned[rank]]
        vector = torch.stack([*listed, absent.to(torch.float64)])
        others = [peer for peer in range(len(self._owned)) if peer != rank]
        handles = []
        for peer in others:
            channel = Channel(Kind.NORMS, 0, peer)
            self._transport.send(channel, vector, minibatch, deferred=True)
            expected = Expected((len(self._owned[peer]) + 1,), torch.float64, minibatch)
            handles.append((peer, self._transport.receive(channel, expected)))
        self.posted[minibatch] = (mine, handles)

    def ready(self, minibatch: int) -> bool:
        return all(handle.ready() for _, handle in self.posted[minibatch][1])

    def wait(self, minibatch: int) -> Tensor:
        """The total norm over all ranks: a scalar, the same everywhere."""
        norms = self.posted[minibatch][0]
        for peer, handle in self.posted[minibatch][1]:
            vector = handle.wait()
            assert vector is not None
            for fqn, norm in zip(self._owned[peer], vector.tolist(), strict=False):
                if norm != ABSENT:
                    norms[fqn] = torch.tensor(norm, dtype=self._dtypes[fqn])
        del self.posted[minibatch]
        stacked = [norms[fqn] for fqn in self._dtypes if fqn in norms]
        self.total = torch.tensor(0.0)
        if stacked:
            self.total = torch.linalg.vector_norm(torch.stack(stacked), 2.0)
        return self.total


def check_max_norm(max_norm: float) -> None:
    """Raise ConfigError for what is not a norm."""
    number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if not number or not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm!r} is not a positive number", remedy="such as 1.0")
