"""Stages of models with awkward parts: each is cut in several places and compared with eager."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pdcompile.passes.codegen import generate, stage_classes
from pdcompile.passes.stages.kept_outputs import loss_only
from pdcompile.passes.verify import verify
from tests.helpers.cuts import cut
from tests.helpers.generated import captured, check, mean_square


class Square(torch.autograd.Function):
    """Its own backward, which differs from the derivative on purpose."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * gradient


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(Square.apply(self.one(x)))


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.one(x)
            y = torch.relu(y)
        return self.two(y.float())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.one(x)
        y += 1
        y[:, 0] = 0.5
        y.relu_()
        z = F.gelu(self.two(y))
        z *= 2
        return z


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 6, num_layers=2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        y, (h, _) = self.rnn(x)
        return self.head(y[:, -1] + h[-1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        mixed, _ = self.attention(y, y, y, need_weights=False)
        return x + mixed


class Nested(nn.Module):
    """Blocks in blocks, equal ones and one that differs."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"wide": nn.ModuleList(Outer(4) for _ in range(2))})
        self.last = Outer(4, bias=False)

    def forward(self, x):
        skips = []
        for block in self.body["wide"]:
            x = block(x, skips[-1] if skips else x)
            skips.append(x)
        return self.last(x, torch.stack(skips).sum(0))


class Outer(nn.Module):
    def __init__(self, width, bias=True):
        super().__init__()
        self.inner = nn.ModuleList([Residual(width, bias), Residual(width, bias)])
        self.gate = nn.Parameter(torch.randn(width))

    def forward(self, x, skip):
        for inner in self.inner:
            x = inner(x)
        return x * self.gate + skip


class Tower(nn.Module):
    """A block whose forward ends with a loop."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Residual(4, True) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Tower(), Tower()

    def forward(self, x):
        return self.two(self.one(x))


class Residual(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, 2 * width, bias=bias), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        return x + self.net(x)


class Keywords(nn.Module):
    """Keyword arguments, nested inputs, an unused parameter, a mask used late."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, batch, *, scale):
        x = self.embed(batch["ids"])
        x = torch.tanh(x) * scale
        x = self.head(x)
        return {"x": x * batch["mask"].unsqueeze(-1), "extra": (x.sum(), None)}


class ThroughTheBatch(nn.Module):
    """Batch norm in one block, statistics written in training only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(ConvBlock(3) for _ in range(3)))

    def forward(self, x):
        return self.blocks(x).mean((2, 3))


class ConvBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x))) + x


class SharedWeight(nn.Module):
    """One tensor under three names, one of them inside a block, one used directly."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Tied(), Tied()
        self.two.linear.weight = self.one.linear.weight
        self.direct = self.one.linear.weight

    def forward(self, x):
        return F.linear(self.two(self.one(x)), self.direct)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Operators(nn.Module):
    """Operators that reach torch under names of their own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.one(x) ** 2
        y **= 2
        y = y.pow(exponent=0.5) + (x == y) + 2**x + abs(x)
        return self.two(y) ** 2.0


class Checkpointed(nn.Module):
    """Dropout in regions that run again in backward."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        def region(y):
            return F.dropout(self.two(y), 0.3, self.training)

        y = checkpoint(region, self.one(x), use_reentrant=False)
        return checkpoint(region, y, use_reentrant=True)


class Switched(nn.Module):
    """Submodules that stay in eval mode while the model trains."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.dropout = nn.BatchNorm1d(4).eval(), nn.Dropout(0.5).eval()

    def forward(self, x):
        return self.two(self.dropout(self.norm(self.one(x))))


class Sparse(nn.Module):
    """A parameter whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.embed, self.two = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, ids):
        return self.two(self.embed(ids))


CASES = {
    "custom function": (Custom, torch.randn(4, 4), torch.randn(4, 4), mean_square, [1, 2]),
    "autocast": (Autocast, torch.randn(4, 4), torch.randn(4, 4), mean_square, [1, 2, 3]),
    "in place": (InPlace, torch.randn(4, 4), torch.randn(4, 4), mean_square, [4, 5]),
    "lstm": (Recurrent, torch.randn(4, 3, 4), torch.randn(4, 4), mean_square, [5]),
    "attention": (Attention, torch.randn(4, 3, 8), torch.randn(4, 3, 8), mean_square, [1, 3]),
    "nested": (Nested, torch.randn(4, 4), torch.randn(4, 4), mean_square, [1, 3, 5, 10, 11, 20]),
    "batch norm": (
        ThroughTheBatch, torch.randn(4, 3, 6, 6), torch.randn(4, 3), mean_square, [2, 4, 6],
    ),
    "towers": (Towers, torch.randn(4, 4), torch.randn(4, 4), mean_square, [3, 12, 14]),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4)),
        torch.randn(4, 4), torch.randn(4, 4), mean_square, [1, 2, 3],
    ),
    "operators": (Operators, torch.rand(4, 4), torch.randn(4, 4), mean_square, [2, 5]),
    "checkpointed": (Checkpointed, torch.randn(4, 4), torch.randn(4, 4), mean_square, [1, 3]),
    "switched": (Switched, torch.randn(4, 4), torch.randn(4, 4), mean_square, [1, 3]),
    "sparse": (
        Sparse, torch.randint(10, (4,)), torch.randn(4, 4), mean_square, [1],
    ),
    "shared": (SharedWeight, torch.randn(4, 4), torch.randn(4, 4), mean_square, [1, 2, 3, 4]),
    "keywords": (
        Keywords,
        {"batch": {"ids": torch.randint(10, (4, 3)), "mask": torch.rand(4, 3)}, "scale": 0.5},
        torch.randn(4, 3, 4), lambda out, y: mean_square(out["x"], y), [1, 2, 3, 4],
    ),
}  # fmt: skip


@cache
def captured_case(name):
    """Captured once for all cuts."""
    build, inputs, target, loss_fn, _ = CASES[name]
    torch.manual_seed(0)
    model = build()
    return model, *captured(model, inputs, target, loss_fn)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "position"),
    [(name, position) for name, case in CASES.items() for position in [None, *case[-1]]],
)
def test_stages_of_awkward_models_equal_eager(name, position):
    loss_fn = CASES[name][3]
    model, flat, layout, found = captured_case(name)
    plan = cut(found, [] if position is None else [position])
    sources = generate(found, plan)
    assert verify(found, plan, sources, model, flat, layout, loss_fn).differences == ()
    found = {key for cls in stage_classes(sources) for key in cls().state_dict()}
    assert found == set(model.state_dict())
    for text in sources.files.values():
        assert max(map(len, text.splitlines())) <= 100 or text.startswith("{")


def test_what_a_file_needs_besides_torch_is_listed():
    sources, _ = check(Custom(), torch.randn(4, 4), [1], torch.randn(4, 4), mean_square)
    assert f"# needs: {Square.__module__}.Square" in sources.files["stage_1.py"]
    assert f"from {Square.__module__} import Square" in sources.files["stage_1.py"]
    assert "needs" not in sources.files["stage_0.py"]


def test_equal_blocks_in_blocks_are_written_once():
    sources, _ = check(Nested(), torch.randn(4, 4), [], torch.randn(4, 4), mean_square)
    text = sources.files["stage_0.py"]
    assert text.count("class Residual") == 2  # with and without bias
    assert text.count("class Outer") == 2


class Remembering(nn.Module):
    """Layers that return caches beside what they pass on, and a loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Remembers() for _ in range(3))

    def forward(self, x):
        caches = []
        for layer in self.layers:
            cache, x = layer(x)
            caches.append(cache)
        return {"loss": x.square().mean(), "caches": caches}


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys, self.drop = nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x):
        cache = self.keys(x)
        return cache, x + self.drop(cache.softmax(-1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("positions", [[], [4], [7]])
def test_results_that_training_leaves_out_need_no_second_body(positions):
    model, x = Remembering(), torch.randn(4, 4)
    flat, layout, found = captured(model, x)
    found = replace(found, train=loss_only(found.train))
    assert found.train.output != found.eval.output
    plan = cut(found, positions)
    sources = generate(found, plan)
    for k in range(len(positions)):
        text = sources.files[f"stage_{k}.py"]
        assert text.count("self.layers[0](") <= 1
        assert text.count("        if self.training:\n            return (x") == 1
    verify(found, plan, sources, model, flat, layout, None)
