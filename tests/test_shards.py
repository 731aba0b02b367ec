"""`pipe.shard`: every process reads the samples that it feeds, and results stay the same."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, default_collate

import pdcompile
from pdcompile.errors import ConfigError, InputError, NotPrepared
from pdcompile.runtime.shards import _generators, _Part, _Seeded
from tests.helpers.alike import COMMON
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, loss_for, mlp
from tests.helpers.pipelines import states_equal


class Samples:
    """Pairs of an input and its target; `read` are the indices that were asked for."""

    def __init__(self, count: int = 21) -> None:
        self.x, self.y = batch_for(mlp(), count)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.x[index], self.y[index]


class Noisy(Samples):
    """Draws the same noise for an input and its target, from all three generators."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = float(torch.rand(()) + np.random.rand() + random.random())
        x, y = super().__getitem__(index)
        return x + noise, y + noise


def noisy_collate(samples: Any) -> Any:
    x, y = default_collate(samples)
    return x + torch.rand(()), y


def shuffled(samples: Any, size: int = 8) -> BatchSampler:
    """Minibatches in a random order, which torch's own generator draws; the last one is short."""
    return BatchSampler(RandomSampler(samples), size, False)


def pipeline(*, prepared: bool = True, model: Any = None, **given: Any) -> Any:
    model = model or mlp()
    common: dict[str, Any] = {
        "loss_fn": loss_for(model), "optimizer": partial(torch.optim.SGD, lr=0.1),
        "microbatches": 4, "costs": "estimated", "verify": "off", "progress": False,
    }  # fmt: skip
    pipe = pdcompile.compile(model, **(common | given))
    x, y = batch_for(model, 8)
    return pipe.prepare(x, target=y) if prepared else pipe


def test_minibatches_are_those_of_a_loader() -> None:
    """All samples are read in one process, in the order of an ordinary DataLoader."""
    samples = Samples()
    torch.manual_seed(5)
    whole, parts = pipeline(replicas=(2, 1)), pipeline(replicas=(2, 1))
    torch.manual_seed(5)
    loader: Any = torch.utils.data.DataLoader(samples, 8, shuffle=True)  # type: ignore[arg-type]
    expected = [float(whole.step(x, target=y).loss) for _ in range(2) for x, y in loader]
    samples.read.clear()
    torch.manual_seed(5)
    found = [
        float(parts.step(shard).loss)
        for _ in range(2)
        for shard in parts.shard(samples, shuffled(samples))
    ]
    assert found == expected
    assert sorted(samples.read) == sorted([*range(21)] * 2)
    assert states_equal(whole.full_state_dict(), parts.full_state_dict()) == []


RANKS = (
    COMMON
    + """
from pdcompile.runtime.shards import _Part, _Seeded
from tests.test_shards import Noisy, Samples, noisy_collate, pipeline, shuffled
samples = Samples()
own = Samples()
whole, parts = (pipeline(replicas=(2, 1, 1), max_grad_norm=0.5) for _ in range(2))
torch.manual_seed(5)
sizes = (8, 4)  # the last of 21 samples makes a minibatch that the second replica has no part of
for size in sizes:
    torch.manual_seed(size)
    loader = torch.utils.data.DataLoader(samples, size, shuffle=True)
    expected = [float(whole.step(x, target=y).loss) for x, y in loader]
    own.read.clear()
    torch.manual_seed(size)
    batches = list(shuffled(own, size))
    torch.manual_seed(size)
    found = [float(parts.step(shard).loss) for shard in parts.shard(own, shuffled(own, size))]
    assert found == expected, (found, expected)
    torch.manual_seed(size)
    torch.empty((), dtype=torch.int64).random_()  # as a loader does before its sampler
    due = []
    for batch in shuffled(own, size):
        rows = torch.arange(len(batch)).tensor_split(min(4, len(batch)))
        mine = rows[rank::2] if rank < 2 else rows if rank == 3 else ()
        due += [batch[row] for part in mine for row in part]
    assert own.read == due, (own.read, due)

torch.manual_seed(rank)  # a dataset that draws: a sample is the same on every rank
noisy = [list(range(8)), list(range(8, 15)), list(range(8))]
for shard, number, batch in zip(parts.shard(Noisy(), noisy), (9, 10, 11), noisy):
    every = list(enumerate(batch))
    (x, y), _ = _Seeded(Noisy(), 0, None).__getitems__(_Part(number, every, False))
    assert float(parts.step(shard).loss) == float(whole.step(x, target=y).loss)
try:
    next(parts.shard(own, [list(range(8))], collate_fn=noisy_collate))
except InputError as error:
    assert "collate_fn draws random numbers" in str(error), error
    assert rank < 2, rank  # the others collate all of it, or nothing
batches = [[0, 1, 2], [7]]  # a microbatch each, and one for nobody but the first replica
for shard, batch in zip(parts.shard(own, batches, num_workers=1), batches):
    x, y = (part[batch] for part in (samples.x, samples.y))
    assert float(parts.eval_step(shard).loss) == float(whole.eval_step(x, target=y).loss)
assert not states_equal(parts.full_state_dict(), whole.full_state_dict())
counted = pipeline(replicas=(2, 2), loss_reduction=lambda args, kwargs, target: len(target))
try:
    counted.shard(own, batches)
except ConfigError as error:
    assert "counts what is in all microbatches" in str(error), error
    say("equal")
meet("equal")
order = [[0, 1, 2, 3]] if rank != 3 else [[1, 0, 2, 3]]
try:
    for shard in parts.shard(own, order):
        parts.step(shard)
except (ContractError, RankError) as error:
    assert "in another order" in str(error), error
    say("refused")
"""
)


@pytest.mark.slow
def test_ranks_read_what_they_feed(tmp_path: Path) -> None:
    """Replicas share the inputs of a minibatch, a stage between reads nothing; all is as if each
    had read everything.  Ranks that draw other orders are told so."""
    run = processes(RANKS, 4, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 4, run
    assert run.output.count("refused") == 4, run


IN_TURN = (
    COMMON
    + """
from tests.test_shards import Samples, pipeline
samples, own = Samples(), Samples()
common = dict(replicas=(2, 1), schedule="stash", microbatches=1)
whole, parts = (pipeline(**common) for _ in range(2))
batches = [list(range(n, n + 3)) for n in range(0, 21, 3)]
own.read.clear()
for shard, batch in zip(parts.shard(own, batches), batches):
    loss = float(parts.step(shard).loss)
    assert loss == float(whole.step(samples.x[batch], target=samples.y[batch]).loss)
due = [n for k, batch in enumerate(batches) for n in batch if rank == 2 or k % 2 == rank]
assert own.read == due, (own.read, due)
for shard in parts.shard(own, batches[:2], evaluation=True):
    parts.eval_step(shard)
late = parts.shard(own, batches)
next(late)
for call, said in ((parts.step, "needs here, and this call is minibatch 7"),
                   (parts.eval_step, "this call is an evaluation")):
    try:
        call(next(late))
    except InputError as error:
        assert "minibatch 8" in str(error) or "minibatch 9" in str(error), error
        assert said in str(error), error
        say("refused")
parts.close()
say("equal")
"""
)


@pytest.mark.slow
def test_replicas_that_take_minibatches_in_turn_read_their_own(tmp_path: Path) -> None:
    """Each sample of the inputs is read once, those of the targets by the last stage; a shard of
    another minibatch is refused."""
    run = processes(IN_TURN, 3, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 3, run
    assert run.output.count("refused") == 6, run


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Samples())


@pytest.mark.parametrize(
    ("dataset", "options", "match"),
    [
        (Endless(), {}, "read by index"),
        (Samples(), {"batch_size": 8}, "batch_size= is not an option of shard"),
    ],
)
def test_what_cannot_be_shared_out(dataset: Any, options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        pipeline().shard(dataset, [[0, 1]], **options)


def test_samples_draw_the_same_whoever_reads_them() -> None:
    """Each sample of each minibatch has a seed, and the caller's generators stay as they are."""
    states = _generators()
    pipe, batches = pipeline(), [[3, 4, 5, 3], [3, 4, 5, 3]]
    first, second = (shard.batch for shard in pipe.shard(Noisy(), batches))
    torch.manual_seed(1)
    again = next(pipe.shard(Noisy(), batches, num_workers=1)).batch
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])  # as in another epoch
    assert not torch.equal(first[0][0], first[0][3])
    torch.set_rng_state(torch.from_numpy(np.frombuffer(states[0], dtype=np.uint8).copy()))
    assert _generators() == states
    (x, _), drew = _Seeded(Noisy(), 0, None).__getitems__(_Part(0, [(2, 5), (3, 3)], True))
    assert torch.equal(x, first[0][2:])
    assert not drew
    part = _Part(0, [(2, 5)], True)
    assert _Seeded(Samples(), 0, noisy_collate).__getitems__(part)[1]


def test_a_shard_of_a_second_pipeline_waits_for_what_the_first_has_in_flight() -> None:
    """The shard would be computed on the weights of a minibatch before."""
    model, samples = mlp(), Samples(8)
    given: Any = {
        "loss_fn": loss_for("mlp"), "microbatches": 4, "cluster": "local:2", "costs": "estimated",
    }  # fmt: skip
    sgd = partial(torch.optim.SGD, lr=0.5)
    trains = pdcompile.compile(model, optimizer=sgd, schedule="2bw", **given)
    asks = pdcompile.compile(model, optimizer=None, **given)
    asks.prepare(samples.x, target=samples.y)
    with trains:
        trains.step(samples.x, target=samples.y)
        assert trains.in_flight
        (shard,) = asks.shard(samples, [range(8)], evaluation=True)
        found = float(asks.eval_step(shard).loss)
        assert not trains.in_flight
        assert found == float(asks.eval_step(samples.x, target=samples.y).loss)


def test_a_state_loaded_by_a_second_pipeline_waits_too() -> None:
    """The first could neither go on nor flush: what it had in flight was written over."""
    model, samples = mlp(), Samples(8)
    sgd = partial(torch.optim.SGD, lr=0.5)
    trains = pipeline(model=model, optimizer=sgd, schedule="2bw")
    asks = pipeline(model=model, optimizer=None)
    trains.step(samples.x, target=samples.y)
    asks.load_state_dict({name: torch.zeros_like(one) for name, one in model.named_parameters()})
    assert not trains.in_flight
    trains.step(samples.x, target=samples.y)
    trains.close()


def test_shards_that_do_not_fit() -> None:
    pipe = pipeline()
    samples = Samples()
    with pytest.raises(NotPrepared):
        pipeline(prepared=False).shard(samples, [[0, 1]])
    with pytest.raises(InputError, match="a minibatch is 0, and not the indices"):
        list(pipe.shard(samples, [0, 1]))  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="a DataLoader reads whole minibatches") as caught:
        pipe.shard(samples, torch.utils.data.DataLoader(samples, batch_size=2))  # type: ignore[arg-type]
    assert "loader.batch_sampler" in str(caught.value)
    with pytest.raises(InputError, match="without samples"):
        list(pipe.shard(samples, [[]]))
    (shard,) = pipe.shard(samples, [[0, 1, 2]], collate_fn=lambda one: torch.stack([one[0][0]]))
    with pytest.raises(InputError, match=r"pair \(inputs, target\)"):
        pipe.step(shard)
    (shard,) = pipe.shard(
        samples,
        [[0, 1, 2]],
        collate_fn=lambda read: torch.utils.data.default_collate(read[:2]),
    )
    with pytest.raises(InputError, match="2 samples came of the 3"):
        pipe.step(shard)
    (shard,) = pipe.shard(samples, [[0, 1, 2]])
    with pytest.raises(InputError, match="place of all arguments"):
        pipe.step(shard, target=samples.y)
