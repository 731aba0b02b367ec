"""Plain torch on graphs, tables, sets and states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import BATCH, Entry, classes, floats, generator
from tests.zoo.plain_sequences import entry

FAMILY = "plain graphs and tables"


class DLRM(nn.Module):
    """Embedding tables (one of them a bag) and dense features, all pairs of dot products."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(40, 16) for _ in range(3))
        self.history = nn.EmbeddingBag(40, 16, mode="mean")
        self.top = nn.Sequential(
            nn.Linear(26, 24), nn.ReLU(), nn.Dropout(dropout), nn.Linear(24, 1)
        )

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        rows = [self.bottom(dense), self.history(clicked)]
        rows += [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(rows, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        i, j = torch.tril_indices(5, 5, offset=-1)
        return self.top(torch.cat([rows[0], products[:, i, j]], dim=1)).squeeze(1)


class DeepFM(nn.Module):
    def __init__(self, dropout: float, fields: int = 5) -> None:
        super().__init__()
        self.first = nn.Embedding(60, 1)
        self.factors = nn.Embedding(60, 8)
        self.bias = nn.Parameter(torch.zeros(1))
        self.deep = nn.Sequential(
            nn.Linear(8 * fields, 24),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(24, 1),
        )

    def forward(self, fields: Tensor) -> Tensor:
        v = self.factors(fields)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1, keepdim=True)
        linear = self.first(fields).sum(1) + self.bias
        return torch.sigmoid(linear + pairs + self.deep(v.flatten(1))).squeeze(1)


class GCN(nn.Module):
    """Dense, symmetrically normalised adjacency."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 5)])
        self.dropout = dropout

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        a = adjacency + torch.eye(adjacency.shape[-1])
        scale = a.sum(-1).rsqrt()
        a = scale.unsqueeze(-1) * a * scale.unsqueeze(-2)
        for layer in self.layers[:-1]:
            nodes = F.dropout(F.relu(layer(a @ nodes)), self.dropout, self.training)
        return self.layers[-1](a @ nodes).transpose(1, 2)


class GAT(nn.Module):
    def __init__(self, dropout: float, heads: int = 2) -> None:
        super().__init__()
        self.project = nn.ModuleList([nn.Linear(8, 24), nn.Linear(24, 24)])
        self.source = nn.ParameterList(torch.randn(heads, 12) for _ in range(2))
        self.target = nn.ParameterList(torch.randn(heads, 12) for _ in range(2))
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.head = nn.Linear(24, 5)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        for project, source, target in zip(self.project, self.source, self.target, strict=True):
            h = project(nodes).unflatten(-1, (self.heads, -1))
            left, right = (h * source).sum(-1), (h * target).sum(-1)
            score = F.leaky_relu(left.unsqueeze(2) + right.unsqueeze(1), 0.2)
            score = score.masked_fill(adjacency.unsqueeze(-1) == 0, -1e9)
            weight = self.dropout(score.softmax(dim=2))
            nodes = F.elu(torch.einsum("bijh,bjhd->bihd", weight, h).flatten(2))
        return self.head(nodes.mean(1))


class MessagePassing(nn.Module):
    """Edges as an index list that all samples share; messages by index_add."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.start = nn.Linear(8, 16)
        self.message = nn.Linear(32, 16)
        self.update = nn.GRUCell(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 5)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        b, n, _ = nodes.shape
        h = self.start(nodes)
        senders, receivers = edges
        for _ in range(3):
            pair = torch.cat([h[:, senders], h[:, receivers]], dim=-1)
            message = self.dropout(F.relu(self.message(pair)))
            total = torch.zeros_like(h).index_add(1, receivers, message)
            h = self.update(total.flatten(0, 1), h.flatten(0, 1)).view(b, n, -1)
        return self.head(h.sum(1))


class PointNet(nn.Module):
    """A learned rotation, shared layers per point, a maximum over points."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.align = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.matrix = nn.Linear(16, 9)
        self.points = nn.Sequential(nn.Conv1d(3, 24, 1), nn.BatchNorm1d(24), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(24, 16), nn.Dropout(dropout), nn.Linear(16, 5))

    def forward(self, cloud: Tensor) -> tuple[Tensor, Tensor]:
        turn = self.matrix(self.align(cloud).amax(2)).view(-1, 3, 3) + torch.eye(3)
        features = self.points(torch.bmm(turn, cloud)).amax(2)
        return self.head(features), turn


def point_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    logits, turn = output
    skew = torch.bmm(turn, turn.mT) - torch.eye(3)
    return F.cross_entropy(logits, target) + 1e-3 * skew.square().sum((1, 2)).mean()


class SetTransformer(nn.Module):
    def __init__(self, dropout: float, width: int = 24) -> None:
        super().__init__()
        self.start = nn.Linear(4, width)
        self.points = nn.Parameter(torch.randn(1, 4, width))
        self.down = nn.MultiheadAttention(width, 4, dropout, batch_first=True)
        self.up = nn.MultiheadAttention(width, 4, dropout, batch_first=True)
        self.seed = nn.Parameter(torch.randn(1, 1, width))
        self.pool = nn.MultiheadAttention(width, 4, dropout, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, items: Tensor) -> Tensor:
        x = self.start(items)
        inducing = self.points.repeat(len(x), 1, 1)
        h = self.down(inducing, x, x)[0]
        x = x + self.up(x, h, h)[0]
        pooled, _ = self.pool(self.seed.repeat(len(x), 1, 1), x, x)
        return self.head(pooled[:, 0])


class ActorCritic(nn.Module):
    """Two heads on one recurrent body; the advantage is detached in one of the losses."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.LSTM(6, 24, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.actor, self.critic = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, observed: Tensor, action: Tensor, returned: Tensor) -> dict[str, Tensor]:
        states, (last, _) = self.body(observed)
        states = self.dropout(states)
        logits, value = self.actor(states), self.critic(states).squeeze(-1)
        advantage = (returned - value).detach()
        chosen = logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        loss = -(chosen * advantage).mean() + F.smooth_l1_loss(value, returned) - 0.01 * entropy
        return {"loss": loss, "value": value, "logits": logits, "state": last}


class NeuralODE(nn.Module):
    """The same field integrated by Runge-Kutta with a fixed step."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.start = nn.Linear(8, 16)
        self.field = nn.Sequential(nn.Linear(17, 24), nn.Tanh(), nn.Linear(24, 16))
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(16, 5))

    def _slope(self, x: Tensor, t: float) -> Tensor:
        return self.field(torch.cat([x, x.new_full((x.shape[0], 1), t)], dim=1))

    def forward(self, x: Tensor, step: float = 0.25) -> Tensor:
        x = self.start(x)
        for i in range(4):
            k1 = self._slope(x, i * step)
            k2 = self._slope(x + step / 2 * k1, (i + 0.5) * step)
            x = x + step * k2
        return self.head(x)


class HyperNetwork(nn.Module):
    """One network writes another one's weights, sample by sample."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.write = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 8 * 8 + 8))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        weight, bias = self.write(context).split([64, 8], dim=-1)
        h = torch.baddbmm(bias.unsqueeze(1), x.unsqueeze(1), weight.view(-1, 8, 8)).squeeze(1)
        return self.head(self.dropout(F.gelu(h)))


class Mixture(nn.Module):
    """A mixture density network through torch.distributions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(24, 9)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits, mean, scale = self.head(self.body(x)).chunk(3, dim=-1)
        parts = torch.distributions.Normal(mean, F.softplus(scale) + 1e-3)
        weights = torch.distributions.Categorical(logits=logits)
        mixture = torch.distributions.MixtureSameFamily(weights, parts)
        return -mixture.log_prob(y).mean()


class MultiTask(nn.Module):
    """Nested dicts in, dataclass-free dict out, losses weighted by learned variances."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Dropout(dropout))
        self.heads = nn.ModuleDict({"kind": nn.Linear(24, 5), "size": nn.Linear(24, 1)})
        self.spread = nn.ParameterDict({"kind": torch.zeros(()), "size": torch.zeros(())})

    def forward(self, batch: dict[str, Tensor], labels: dict[str, Tensor]) -> dict[str, Any]:
        h = self.body(torch.cat([batch["image"], batch["text"]], dim=-1))
        found = {name: head(h) for name, head in self.heads.items()}
        losses = {
            "kind": F.cross_entropy(found["kind"], labels["kind"]),
            "size": F.mse_loss(found["size"].squeeze(1), labels["size"]),
        }
        total = sum(torch.exp(-self.spread[n]) * v + self.spread[n] for n, v in losses.items())
        return {"loss": total, "found": found, "losses": losses}


def _adjacency(step: int, nodes: int = 7) -> Tensor:
    a = torch.rand(BATCH, nodes, nodes, generator=generator(step)) > 0.6
    return (a | a.mT | torch.eye(nodes, dtype=torch.bool)).float()


def _edges(step: int) -> Tensor:
    return torch.randint(0, 7, (2, 15), generator=generator(0))


ENTRIES: tuple[Entry, ...] = tuple(
    entry(name, make, inputs, loss_fn, target, FAMILY, batch_dims)
    for name, make, inputs, loss_fn, target, batch_dims in (
        (
            "dlrm",
            DLRM,
            lambda s: (floats(s, 6), classes(s, 40, 3), classes(s + 1, 40, 4)),
            F.binary_cross_entropy_with_logits,
            lambda s: classes(s, 2).float(),
            0,
        ),
        (
            "deepfm",
            DeepFM,
            lambda s: (classes(s, 60, 5),),
            F.binary_cross_entropy,
            lambda s: classes(s, 2).float(),
            0,
        ),
        (
            "gcn",
            GCN,
            lambda s: (floats(s, 7, 8), _adjacency(s)),
            F.cross_entropy,
            lambda s: classes(s, 5, 7),
            0,
        ),
        (
            "gat",
            GAT,
            lambda s: (floats(s, 7, 8), _adjacency(s)),
            F.cross_entropy,
            lambda s: classes(s, 5),
            0,
        ),
        (
            "message_passing",
            MessagePassing,
            lambda s: (floats(s, 7, 8), _edges(s)),
            F.cross_entropy,
            lambda s: classes(s, 5),
            ((0, None), {}, 0),
        ),
        (
            "pointnet",
            PointNet,
            lambda s: (floats(s, 3, 20),),
            point_loss,
            lambda s: classes(s, 5),
            0,
        ),
        (
            "set_transformer",
            SetTransformer,
            lambda s: (floats(s, 9, 4),),
            F.cross_entropy,
            lambda s: classes(s, 5),
            0,
        ),
        (
            "actor_critic",
            ActorCritic,
            lambda s: {
                "observed": floats(s, 6, 6),
                "action": classes(s, 3, 6),
                "returned": floats(s + 1, 6),
            },
            None,
            lambda s: None,
            0,
        ),
        (
            "neural_ode",
            NeuralODE,
            lambda s: (floats(s, 8),),
            F.cross_entropy,
            lambda s: classes(s, 5),
            0,
        ),
        (
            "hypernetwork",
            HyperNetwork,
            lambda s: (floats(s, 8), floats(s + 1, 4)),
            F.cross_entropy,
            lambda s: classes(s, 5),
            0,
        ),
        ("mixture_density", Mixture, lambda s: (floats(s, 8), floats(s)), None, lambda s: None, 0),
        (
            "multi_task",
            MultiTask,
            lambda s: {
                "batch": {"image": floats(s, 8), "text": floats(s + 1, 4)},
                "labels": {"kind": classes(s, 5), "size": floats(s)},
            },
            None,
            lambda s: None,
            0,
        ),
    )
)
