"""Mixtures of experts: routing in the graph, losses born in every layer, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.passes.costs import estimate
from tests.helpers.captures import captured, faithful, make

WIDTH, EXPERTS, LENGTH, CLASSES = 8, 4, 6, 10


class Router(nn.Module):
    """Top-1 routing in full precision, with a capacity per sequence that evaluation widens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            logits = self.gate(x.float())
            probs = logits.softmax(-1)
            chosen = F.one_hot(probs.argmax(-1), EXPERTS)
            capacity = LENGTH // EXPERTS if self.training else LENGTH
            chosen = chosen * (chosen.cumsum(1) <= capacity)
            balance = EXPERTS * (chosen.float().mean((0, 1)) * probs.mean((0, 1))).sum()
            auxiliary = 0.01 * balance + 0.001 * logits.logsumexp(-1).square().mean()
        return chosen * probs, auxiliary


class Layer(nn.Module):
    """All experts on all tokens, what was not chosen weighted with 0; keeps its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 3)
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, auxiliary = self.router(self.norm(x))
        hidden = torch.einsum("bsd,edh->bseh", x, self.up).relu()
        y = torch.einsum("bseh,ehd->bsed", hidden, self.down)
        self.auxiliary = auxiliary
        return x + (weight.unsqueeze(-1).to(y.dtype) * y).sum(2), auxiliary


class Model(nn.Module):
    """Returns its loss: cross entropy and all layers' losses, collected in one of two ways."""

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.kept = kept

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        losses = []
        for layer in self.layers:
            x, auxiliary = layer(x)
            losses.append(auxiliary)
        if self.kept:
            losses = [layer.auxiliary for layer in self.layers]
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss + sum(losses), "logits": logits, "auxiliary": sum(losses)}


def model_of(kind: Any, **arguments: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: nn.Module = kind(**arguments)
        return made


def tokens(count: int = 8, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(CLASSES, (2, count, LENGTH), generator=generator).unbind()
    return {"ids": ids, "labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "autocast"), [(False, None), (True, None), (False, "bfloat16")],
    ids=["returned", "attributes", "autocast"],
)  # fmt: skip
def test_losses_of_every_layer_reach_the_objective(kept: bool, autocast: Any) -> None:
    ours, theirs = model_of(Model, kept=kept), model_of(Model, kept=kept)
    options: dict[str, Any] = {"optimizer": None, "microbatches": 2, "autocast": autocast}
    pipe = pdcompile.compile(
        ours, tokens(), stages=3, costs="estimated", outputs="everything", **options
    )
    reference = pdcompile.reference(theirs, **options)
    stages = pipe.plan.stages
    assert len(stages) == 3
    for seed in range(2):
        found, expected = pipe.step(**tokens(seed=seed)), reference.step(**tokens(seed=seed))
        assert float(found.loss) == float(expected.loss)
        assert torch.equal(found.outputs["auxiliary"], expected.outputs["auxiliary"])
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None, name
        assert torch.equal(one.grad, other.grad), name
    # Capacity: evaluation drops no token, training does.
    found, expected = pipe.eval_step(**tokens()), reference.eval_step(**tokens())
    assert torch.equal(found.outputs["logits"], expected.outputs["logits"])
    gates = [f"layers.{i}.router.gate.weight" for i in range(3)]
    owners = {next(s.index for s in stages if gate in s.parameters) for gate in gates}
    assert len(owners) > 1  # losses are born on several stages


@pytest.mark.slow
def test_the_router_stays_in_full_precision() -> None:
    found = captured(model_of(Model, kept=False), *tokens().values(), autocast="cpu:bfloat16")
    gate = next(op for op in found.train.ops if op.module_path.endswith("router.gate"))
    assert found.train.values[gate.name].dtype == "float32"
    up = next(op for op in found.train.ops if op.target.endswith("einsum"))
    assert found.train.values[up.name].dtype == "bfloat16"


@pytest.mark.slow
def test_capacity_that_differs_in_evaluation() -> None:
    found = faithful(model_of(Model, kept=True), *tokens(4).values())
    limits = [
        [op.args[1] for op in graph.ops if op.target == "operator.le"]
        for graph in (found.train, found.eval)
    ]
    assert limits == [[1] * 3, [LENGTH] * 3]


class Sparse(nn.Module):
    """Every token meets the matrix of one of sixteen experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 16)
        self.weight = nn.Parameter(torch.randn(16, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        return weight[:, None] * torch.bmm(x[:, None], self.weight[chosen]).squeeze(1)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 6 * WIDTH), nn.ReLU(), nn.Linear(6 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_memory_counts_all_experts_and_time_the_chosen_ones() -> None:
    model = nn.Sequential(Sparse(), Dense())
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    graph = captured(model, x).train
    flops, held = [0, 0], [0, 0]
    for op, cost in zip(graph.ops, estimate(graph, microbatch_size=64), strict=True):
        layer = int(op.module_path.partition(".")[0])
        flops[layer] += cost.flops
        held[layer] += cost.parameter_bytes
    assert held[0] > 1.3 * held[1]
    assert flops[0] < 0.5 * flops[1]


class Routed(nn.Module):
    """Every expert on the tokens that chose it, written in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, choice = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            if self.way == "mask":
                mine = choice == i
                out[mine] = weight[mine].unsqueeze(-1) * expert(flat[mine])
                continue
            (rows,) = torch.where(choice == i)
            if self.way == "skip" and rows.numel() == 0:
                continue
            chosen = expert(flat[rows])
            if self.way == "baked":
                chosen = chosen.view(rows.shape[0], WIDTH)
            out.index_add_(0, rows, weight[rows, None] * chosen)
        return x + out.view_as(x)


class Stack(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Routed(way) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["where", "mask"])
def test_experts_on_the_tokens_that_chose_them(way: str) -> None:
    found = faithful(model_of(Stack, way=way), tokens()["ids"]).train
    assert not any(op.opaque for op in found.ops)
    varying = [value for value in found.values.values() if value.varies]
    # 48 tokens, 4 experts: what is expected decides costs, all experts count as memory.
    assert {value.shape[value.varies[0]] for value in varying} == {48 // EXPERTS}
    ours, theirs = model_of(Stack, way=way), model_of(Stack, way=way)
    options: dict[str, Any] = {"loss_fn": entropy, "optimizer": None, "microbatches": 2}
    pipe = pdcompile.compile(
        ours, tokens()["ids"], example_target=tokens()["labels"],
        stages=3, costs="estimated", **options,
    )  # fmt: skip
    reference = pdcompile.reference(theirs, **options)
    for seed in range(3):
        ids, labels = tokens(8, seed).values()
        if seed != 1:
            ids = torch.zeros_like(ids)  # most experts get no token
            ours.zero_grad()
            theirs.zero_grad()
        results = [each.step(ids, target=labels) for each in (pipe, reference)]
        assert float(results[0].loss) == float(results[1].loss)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
    sent = {edge.value for edge in pipe.plan.edges}
    assert not sent & {value.name for value in varying}


def test_what_a_mask_chooses() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = self.lin(x)
        return y + y[x > 0].sum() + torch.nonzero(x > 0).sum()

    found = faithful(make(forward)).train
    assert [value.varies for value in found.values.values() if value.varies] == [(0,), (0,)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["skip", "baked"])
def test_a_size_that_python_reads_stays_inside_of_an_opaque_module(way: str) -> None:
    with pytest.warns(UserWarning, match="captured as opaque"):
        found = faithful(model_of(Stack, way=way), tokens()["ids"])
    assert [op.module_path for op in found.train.ops if op.opaque] == [
        f"layers.{i}" for i in range(3)
    ]
