"""Embeddings with sparse gradients: accumulated, clipped and updated as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError, ContractError
from pdcompile.ir.sparse_gradients import makes_sparse
from pdcompile.passes.trace import trace
from pdcompile.runtime.transport.contract import laid
from tests.helpers.launch import processes
from tests.helpers.pipelines import states_equal

WORDS, WIDTH = 12, 6


class Pairs(nn.Module):
    """Two tables and nothing dense, as SparseAdam wants it."""

    captured_once = True

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.right = nn.Embedding(WORDS, WIDTH, sparse=True)

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        return (self.left(i) * self.right(j)).sum(-1)


class Table(nn.Module):
    """One table, read as `way` says, with layers between."""

    captured_once = True

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        if self.way == "dense first":
            x = self.words.weight[i]
        elif self.way == "computed":
            x = F.embedding(i, self.words.weight * 2, sparse=True)
        else:
            x = self.words(i)
        x = self.second(self.first(x).tanh()).tanh()
        if self.way == "dense last":
            return F.linear(x, self.words.weight).logsumexp(-1)
        return (
            (x * self.words(j)).sum(-1) if self.way in ("twice", "dense first") else x.sum(-1) + j
        )


def batches(count: int = 4) -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(1)
    words = partial(torch.randint, 0, WORDS, (8,))
    return [(words(), words(), torch.randn(8)) for _ in range(count)]


SGD = partial(torch.optim.SGD, lr=0.3)
APART = (pdcompile.Pin("left", stage=0), pdcompile.Pin("right", stage=1))


# Training itself compares what stages compute.
DEFAULTS = {"costs": "estimated", "stages": 2, "verify": "off"}


def compare(make: Callable[[], nn.Module], optimizer: Any = SGD, **options: Any) -> Any:
    """Train a pipeline and the reference alike; the plan."""
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": optimizer, "microbatches": 4}
    given |= {key: options[key] for key in ("schedule", "max_grad_norm") if key in options}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    pipe = pdcompile.compile(models[1], **{**DEFAULTS, **given, **options})
    i, j, y = next(iter(batches()))
    pipe.prepare(i, j, target=y)
    eager = pdcompile.reference(models[0], plan=pipe.plan, **given)
    results = [
        (pipe.step(i, j, target=y).loss, eager.step(i, j, target=y).loss) for i, j, y in batches()
    ]
    pipe.flush()
    assert [float(one) for one, _ in results] == [float(other) for _, other in results]
    state = pipe.full_state_dict()
    assert states_equal(state, models[0].state_dict() if state else {}) == []
    plan = pipe.plan
    pipe.close()
    return plan


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize(
    "optimizer", [SGD, partial(SGD, momentum=0.9), partial(torch.optim.SparseAdam, lr=0.1)]
)
def test_tables_on_two_stages(schedule: str, max_grad_norm: float | None, optimizer: Any) -> None:
    plan = compare(
        Pairs, optimizer, schedule=schedule, max_grad_norm=max_grad_norm, constraints=APART
    )
    assert [stage.parameters for stage in plan.stages] == [("left.weight",), ("right.weight",)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("way", ["once", "twice", "dense first", "dense last", "computed"])
def test_one_table_with_layers(way: str, schedule: str) -> None:
    plan = compare(partial(Table, way), schedule=schedule, max_grad_norm=0.1)
    # What crosses a cut of a table is the sum that ends with a dense summand, or nothing.
    assert [tied.fqn for tied in plan.tied] == (["words.weight"] if way == "dense last" else [])


@pytest.mark.sample(1)
def test_verification_and_measured_costs() -> None:
    compare(Pairs, verify="full", costs="measured", constraints=APART)
    compare(partial(Table, "dense last"), verify="full")


def test_the_norm_is_the_dense_gradients() -> None:
    i, j, y = batches(1)[0]
    norms = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = Pairs()
        model.left.sparse = model.right.sparse = sparse
        pipe = pdcompile.compile(
            model, loss_fn=F.mse_loss, optimizer=None, microbatches=2, stages=2, costs="estimated"
        )
        pipe.forward_backward(i, j, target=y)
        norms.append(pipe.clip_grad_norm_(0.1))
        total = sum(p.grad.to_dense().square().sum() for p in pipe.parameters())
        assert float(total) == pytest.approx(0.01)
        pipe.close()
    torch.testing.assert_close(norms[0], norms[1])


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WORDS, WIDTH))
        self.module = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.dense = nn.Embedding(WORDS, WIDTH)
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, sparse=True)

    def forward(self, i: Tensor) -> tuple[Tensor, ...]:
        index = i[:, None].expand(-1, WIDTH)
        with torch.no_grad():
            still = self.module(i)
        return (
            self.module(i),
            self.bag(i[:, None]),
            F.embedding(i, self.weight, None, None, 2.0, False, True),
            F.embedding_bag(i[:, None], self.weight, sparse=True),
            torch.embedding(self.weight, i, -1, False, True),
            torch.gather(self.weight, 0, index, sparse_grad=True),
            self.weight.gather(0, index, sparse_grad=True),
            self.dense(i) + F.embedding(i, self.weight) + self.weight.gather(0, index) + still,
        )


def test_ops_that_make_sparse_gradients() -> None:
    graph = trace(Reads(), torch.arange(4))
    asked = [op.target for op in graph.ops if makes_sparse(op)]
    assert len(asked) == 7
    assert {target.rpartition(".")[2] for target in asked} == {
        "Embedding", "EmbeddingBag", "embedding", "embedding_bag", "gather",
    }  # fmt: skip


def test_a_sparse_gradient_is_not_sent() -> None:
    with pytest.raises(ContractError, match="sparse gradient"):
        laid(torch.eye(2).to_sparse(), (0, 1))


@pytest.mark.parametrize("way", ["once", "twice"])
def test_replicas_of_a_table_are_refused(way: str) -> None:
    """Before a minibatch runs: they sum dense gradients."""
    i, j, y = batches(1)[0]
    given: dict[str, Any] = {**DEFAULTS, "example_target": y, "loss_fn": F.mse_loss}
    with pytest.raises(ConfigError, match=r"sparse.* the 2 replicas of stage 0") as caught:
        pdcompile.compile(Table(way), (i, j), replicas=(2, 1), microbatches=4, **given)
    assert caught.value.where == "words.weight"
    assert "replicas=(1, 1)" in str(caught.value)
    given |= {"schedule": "interleaved", "stages": 2, "cluster": Cluster.local(2)}
    with pytest.raises(ConfigError, match="2 replicas of stage 0") as caught:
        pdcompile.compile(Table(way), (i, j), replicas=2, microbatches=4, **given)
    assert caught.value.remedy == "sparse=False; or replicas=1"
    given |= {"schedule": "round", "stages": 3}  # all replicas of a stage are those of its schedule
    with pytest.raises(ConfigError, match="2 replicas of stage 0") as caught:
        pdcompile.compile(Table(way), (i, j), microbatches=4, **given)
    assert caught.value.remedy == "sparse=False; or schedule='1f1b'"


def test_a_sparse_gradient_that_only_a_run_shows_is_not_summed() -> None:
    i, j, y = batches(1)[0]
    pipe = pdcompile.compile(
        Table("computed"), (i, j), example_target=y, loss_fn=F.mse_loss, optimizer=SGD,
        microbatches=4, **{**DEFAULTS, "replicas": 2, "stages": 1},
    )  # fmt: skip
    with pytest.raises(ContractError, match="sparse, and is to be summed"):
        pipe.step(i, j, target=y)


def test_replicas_beside_a_table_train() -> None:
    """Its own stage has one; so has a table whose gradient is dense in the end."""
    for way, options in (
        ("once", {"replicas": (1, 2)}),
        ("dense last", {"replicas": 2, "stages": 1}),
    ):
        i, j, y = batches(1)[0]
        pipe = pdcompile.compile(
            Table(way), (i, j), example_target=y, loss_fn=F.mse_loss, optimizer=SGD, microbatches=4,
            **{**DEFAULTS, **options},
        )  # fmt: skip
        assert float(pipe.step(i, j, target=y).loss) > 0


RANKS = """
from functools import partial
import torch
from tests.test_sparse_gradients import APART, Pairs, SGD, Table, compare

for schedule in ("1f1b", "2bw"):
    for optimizer in (SGD, partial(torch.optim.SparseAdam, lr=0.1)):
        compare(Pairs, optimizer, schedule=schedule, max_grad_norm=0.1, constraints=APART)
    for way in ("once", "dense last"):
        compare(partial(Table, way), schedule=schedule, max_grad_norm=0.1)
print("equal")
"""


@pytest.mark.slow
def test_two_ranks_train_like_the_reference(tmp_path: Path) -> None:
    run = processes(RANKS, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 2, run
