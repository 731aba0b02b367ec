"""Shards: of each minibatch the samples that this process feeds, and no others."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from pdcompile.batch import EVALUATION, FlatCall, Whole, empty_call, example_call
from pdcompile.eager.randomness import evaluation_minibatch, preserved_rng, reseed, seed_of
from pdcompile.errors import ConfigError, InputError
from pdcompile.ir import python_draws
from pdcompile.runtime.calls import Cut
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
        inputs, target = self.batch, None
        if with_target:
            if not isinstance(inputs, list | tuple) or len(inputs) != 2:
                raise InputError(
                    f"samples were collated to a {type(inputs).__name__}, and not to two parts",
                    remedy="with a loss_fn, a sample of the dataset is a pair (inputs, target)",
                )
            inputs, target = inputs
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs  # as DataLoader has tuples
        flat = example_call(model, inputs, target)
        return FlatCall(flat.leaves, flat.spec, self.whole)


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
    numbers = count(first) if first is not None else map(evaluation_minibatch, count())
    cut = Cut(session, first is not None)
    waiting: deque[tuple[Whole, bool]] = deque()  # drawn, and whether something of it is read

    def drawn() -> Iterator[_Part]:
        for batch, turn, number in zip(batches, turns, numbers, strict=False):
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
            rows = cut.rows_here(len(indices), max(turn, 0))
            whole = Whole(len(indices), _digest(indices), turn if session.spec.period > 1 else None)
            waiting.append((whole, bool(rows)))
            yield _Part(number, [(row, indices[row]) for row in rows], len(rows) < len(indices))

    def unread() -> Iterator[Shard]:
        while waiting and not waiting[0][1]:
            yield Shard(None, waiting.popleft()[0])

    if not any(wiring.paths(True) for wiring in session.wirings.values()):
        for _ in drawn():
            yield from unread()
        return
    seeded: Any = _Seeded(dataset, session.plan.training.seed, options.pop("collate_fn", None))
    parts: Any = (part for part in drawn() if part.rows)
    loader: Any = DataLoader(seeded, batch_sampler=parts, collate_fn=tuple, **options)
    for batch, drew in loader:
        if drew:
            raise InputError(
                "collate_fn draws random numbers, and processes collate different parts of this "
                "minibatch: inputs and targets of a sample would come from unlike draws",
                where="pipe.shard",
                remedy="draw in the dataset's __getitem__, which has a seed for each sample; no "
                "replicas of stages that read; or give step the same minibatches on every rank",
            )
        yield from unread()
        yield Shard(batch, waiting.popleft()[0])
    yield from unread()


class _Part(NamedTuple):
    """Part of a minibatch that this process reads: its number in training (evaluations: negative),
    rows and their indices, and whether there are others."""

    number: int
    rows: list[tuple[int, Any]]
    partial: bool


class _Seeded:
    """A dataset whose samples draw from streams of their own: whoever reads a sample, and whatever
    else it reads, draws the same."""

    def __init__(self, dataset: Any, seed: int, collate: Any) -> None:
        vars(self).update(_dataset=dataset, _seed=seed, _collate=collate or default_collate)

    def __getattr__(self, name: str) -> Any:  # a worker_init_fn may ask for the dataset's own
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getitems__(self, part: _Part) -> tuple[Any, bool]:
        """The collated samples, and whether collating a part of the minibatch drew."""
        with preserved_rng():
            samples = []
            for row, index in part.rows:
                self._begin(part, row)
                samples.append(self._dataset[index])
            self._begin(part, -1)
            before = _generators()
            batch = self._collate(samples)
            return batch, part.partial and _generators() != before  # a tuple, which `tuple` keeps

    def _begin(self, part: _Part, row: int) -> None:
        reseed(seed_of(self._seed, part.number, row, "pipe.shard", 0))
        python_draws.begin()


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), python_draws.states()


def _digest(indices: list[Any]) -> int:
    """Digest of the samples and their order, never 0."""
    plain = [one.item() if hasattr(one, "item") else one for one in indices]
    return 1 + zlib.crc32(repr(plain).encode())
