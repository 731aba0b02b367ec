"""Shards: of each minibatch the samples that this process feeds, and no others."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from pdcompile.batch import EVALUATION, FlatCall, Whole, empty_call, example_call
from pdcompile.errors import ConfigError, InputError
from pdcompile.runtime.calls import rows_here
from pdcompile.runtime.session import Session

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """This process's part of one minibatch: `step`, `forward_backward`, `eval_step` and `predict`
    take it in place of their arguments.

    `batch`: what its samples were collated to, None where it reads nothing; `whole`: of what it is
    a part.
    """

    batch: Any
    whole: Whole

    def call(self, model: nn.Module, *, with_target: bool) -> FlatCall:
        """The call that it stands for."""
        if self.batch is None:
            return empty_call(model, self.whole)
        inputs, target = self._pair() if with_target else (self.batch, None)
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs  # as DataLoader has tuples
        flat = example_call(model, inputs, target)
        return FlatCall(flat.leaves, flat.spec, self.whole)

    def _pair(self) -> tuple[Any, Any]:
        if not isinstance(self.batch, list | tuple) or len(self.batch) != 2:
            raise InputError(
                f"samples were collated to a {type(self.batch).__name__}, and not to two parts",
                remedy="with a loss_fn, a sample of the dataset is a pair (inputs, target)",
            )
        inputs, target = self.batch
        return inputs, target


def shards(
    session: Session, dataset: Any, batches: Iterable[Sequence[Any]], options: dict[str, Any],
    first: int | None,
) -> Iterator[Shard]:  # fmt: skip
    """One for each of the `batches`; a DataLoader with these `options` reads the samples.

    `first`: which minibatch of the training the first one is; None: they are for evaluations.

    Raises ConfigError, before anything is read, for what cannot be shared out.
    """
    _check(session, dataset, batches, options)
    # What a DataLoader draws on iteration, on ranks without one too: samplers draw after it.
    seed = int(torch.empty((), dtype=torch.int64).random_())
    options = {"generator": torch.Generator().manual_seed(seed), **options}
    return _read(session, dataset, batches, options, first)


def _check(session: Session, dataset: Any, batches: Any, options: dict[str, Any]) -> None:
    ours = [name for name in _OURS if name in options]
    if ours:
        raise ConfigError(
            f"{ours[0]}= is not an option of shard: the second argument says which samples each "
            "minibatch has",
            remedy="pipe.shard(dataset, torch.utils.data.BatchSampler(sampler, batch_size, "
            "drop_last))",
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"a {type(dataset).__name__} is not read by index, and a shard is of certain samples",
            remedy="a map-style dataset (with __getitem__), or give step the same minibatches on "
            "every rank",
        )
    if isinstance(batches, DataLoader):
        raise ConfigError(
            "a DataLoader reads whole minibatches, and a shard is of certain samples: the second "
            "argument says which samples each minibatch has",
            remedy="pipe.shard(dataset, loader.batch_sampler)",
        )
    replicas = len(session.spec.ranks[-1])
    alone = session.world is None
    if callable(session.options.loss_reduction) and replicas > 1 and not alone:
        raise ConfigError(
            f"loss_reduction counts what is in all microbatches, and each of the {replicas} "
            "replicas of the last stage would read its own",
            remedy='loss_reduction="mean" or "sum"; one replica for the last stage; or give step '
            "the same minibatches on every rank",
        )


def _read(
    session: Session, dataset: Any, batches: Iterable[Sequence[Any]], options: dict[str, Any],
    first: int | None,
) -> Iterator[Shard]:  # fmt: skip
    turns = repeat(EVALUATION) if first is None else count(first)
    waiting: deque[tuple[Whole, bool]] = deque()  # drawn, and whether something of it is read

    def drawn() -> Iterator[list[Any]]:
        for batch, turn in zip(batches, turns, strict=False):
            if not isinstance(batch, Iterable):
                raise InputError(
                    f"a minibatch is {batch!r}, and not the indices of its samples",
                    where="the batches of pipe.shard",
                    remedy="torch.utils.data.BatchSampler(sampler, batch_size, drop_last), or a "
                    "list of indices for each minibatch",
                )
            indices = list(batch)
            if not indices:
                raise InputError(
                    "a minibatch without samples",
                    where="the batches of pipe.shard",
                    remedy="leave it out",
                )
            rows = rows_here(session, len(indices), max(turn, 0), training=first is not None)
            whole = Whole(len(indices), _digest(indices), turn if session.spec.period > 1 else None)
            waiting.append((whole, bool(rows)))
            yield [indices[row] for row in rows]

    def unread() -> Iterator[Shard]:
        while waiting and not waiting[0][1]:
            yield Shard(None, waiting.popleft()[0])

    if not any(wiring.paths(True) for wiring in session.wirings.values()):
        for _ in drawn():
            yield from unread()
        return
    for batch in DataLoader(dataset, batch_sampler=_Drawn(filter(None, drawn())), **options):
        yield from unread()
        yield Shard(batch, waiting.popleft()[0])
    yield from unread()


class _Drawn:
    """Samplers are iterated once for each pass over a loader: this one has one."""

    def __init__(self, batches: Iterator[list[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches


def _digest(indices: list[Any]) -> int:
    """Of the samples and their order, never 0."""
    return 1 + zlib.crc32(repr([_plain(one) for one in indices]).encode())


def _plain(index: Any) -> Any:
    return index.item() if hasattr(index, "item") else index
