"""Small ordinary models that many tests share, with batches and losses that fit them.

Each is what a user would write: no pdcompile import, no care for pipelines.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm transformer block: (b, s, width) -> (b, s, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + F.dropout(
            self.down(F.gelu(self.up(self.ln_2(x)))), self.dropout, training=self.training
        )


class GPT(nn.Module):
    """Token ids (b, s) -> logits (b, s, vocab)."""

    def __init__(
        self,
        *,
        tied: bool,
        dropout: float,
        layers: int,
        width: int,
        heads: int,
        vocab: int,
        context: int,
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.context = context
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.1)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class MLP(nn.Module):
    """(b, width) -> (b, width)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        out: Tensor = self.layers[-1](x)
        return out


class ConvNet(nn.Module):
    """Images (b, 3, 8, 8) -> logits (b, 10), with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.relu(self.bn2(self.conv2(x)))
        logits: Tensor = self.head(self.pool(x).flatten(1))
        return logits


class UNet(nn.Module):
    """(b, 1, 16, 16) -> (b, 1, 16, 16); each level's activation skips to the other side."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2 = nn.Conv2d(16, 4, 3, padding=1)
        self.up1 = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(F.max_pool2d(a, 2)))
        x = F.relu(self.middle(F.max_pool2d(b, 2)))
        x = F.relu(self.up2(torch.cat([b, F.interpolate(x, scale_factor=2.0)], dim=1)))
        out: Tensor = self.up1(torch.cat([a, F.interpolate(x, scale_factor=2.0)], dim=1))
        return out


class ReturnsLoss(nn.Module):
    """forward(x, y) returns the loss of the inner model: nothing outside is needed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.loss = loss_for(inner)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.inner(x), y)


def gpt(
    tied: bool = True,
    dropout: float = 0.0,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    vocab: int = 64,
    context: int = 16,
    seed: int = 0,
) -> GPT:
    """A decoder with causal attention; `tied`: lm_head.weight is wte.weight."""
    with _seeded(seed):
        return GPT(
            tied=tied, dropout=dropout, layers=layers, width=width, heads=heads, vocab=vocab,
            context=context,
        )  # fmt: skip


def mlp(layers: int = 6, width: int = 16, seed: int = 0) -> MLP:
    """Linear layers with ReLU in between."""
    with _seeded(seed):
        return MLP(layers, width)


def convnet(seed: int = 0) -> ConvNet:
    """Two convolutions with batch norm."""
    with _seeded(seed):
        return ConvNet()


def unet(seed: int = 0) -> UNet:
    """Skip connections that jump over the middle."""
    with _seeded(seed):
        return UNet()


def returns_loss(model: nn.Module) -> ReturnsLoss:
    """The same model, but its forward takes (x, y) and returns the loss."""
    return ReturnsLoss(model)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all positions: logits (b, s, v), target (b, s)."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def class_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy: logits (b, classes), target (b,)."""
    return F.cross_entropy(logits, target)


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(output, target)


def loss_for(model: nn.Module | str) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss function (output, target) -> scalar that fits the model."""
    name = _name(model)
    return {"gpt": token_loss, "convnet": class_loss}.get(name, square_loss)


def batch_for(model: nn.Module | str, batch_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(inputs, target), one tensor each, drawn from a generator of their own.

    For a `returns_loss` wrapper the two are the arguments of its forward.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, ReturnsLoss):
        model = model.inner
    name = _name(model)
    if name == "gpt":
        vocab, length = (model.vocab, model.context) if isinstance(model, GPT) else (64, 16)
        tokens = torch.randint(vocab, (batch_size, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if name == "convnet":
        images = torch.randn(batch_size, 3, 8, 8, generator=generator)
        return images, torch.randint(10, (batch_size,), generator=generator)
    shape = (1, 16, 16) if name == "unet" else (model.width if isinstance(model, MLP) else 16,)
    return (
        torch.randn(batch_size, *shape, generator=generator),
        torch.randn(batch_size, *shape, generator=generator),
    )


def _name(model: nn.Module | str) -> str:
    name = model if isinstance(model, str) else type(model).__name__.lower()
    if name not in ("gpt", "mlp", "convnet", "unet"):
        raise ValueError(f"no batch is known for {name!r}")
    return name


class _seeded:
    """Initial weights depend on `seed` alone, and the caller's generator is untouched."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.state = torch.random.get_rng_state()
        torch.default_generator.manual_seed(self.seed)

    def __exit__(self, *error: object) -> None:
        torch.random.set_rng_state(self.state)
