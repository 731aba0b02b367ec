"""Plain torch on sequences: recurrent, attentive, convolutional."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import BATCH, Case, Entry, classes, floats, ids

VOCAB = 96


def entry(
    name: str,
    make: Callable[[float], nn.Module],
    inputs: Callable[[int], Any],
    loss_fn: Any = None,
    target: Callable[[int], Any] = lambda step: None,
    family: str = "plain sequences",
    batch_dims: Any = 0,
) -> Entry:
    return Entry(
        name,
        family,
        lambda dropout: Case(make(dropout), inputs, loss_fn, target, batch_dims),
        "torch",
    )


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Translator(nn.Module):
    """nn.Transformer with embeddings and sinusoidal positions."""

    def __init__(self, dropout: float, width: int = 32) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCAB, width)
        self.target = nn.Embedding(VOCAB, width)
        self.transformer = nn.Transformer(
            width, 4, 2, 2, dim_feedforward=48, dropout=dropout, batch_first=True
        )
        self.head = nn.Linear(width, VOCAB)
        position = torch.arange(64).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        table = torch.zeros(64, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
        self.register_buffer("positions", table, persistent=False)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        out = self.transformer(
            self.source(src) + self.positions[: src.shape[1]],
            self.target(tgt) + self.positions[: tgt.shape[1]],
            tgt_mask=mask,
            src_key_padding_mask=src == 3,
            tgt_is_causal=True,
        )
        return self.head(out)


class GNMT(nn.Module):
    """A bidirectional first layer, residual LSTMs, and attention read by every decoder layer."""

    def __init__(self, dropout: float, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.first = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.encoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.attend = nn.MultiheadAttention(width, 1, batch_first=True)
        self.start = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.ModuleList(
            nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, _ = self.first(self.embed(source))
        for i, layer in enumerate(self.encoder):
            y, _ = layer(self.dropout(x))
            x = y if i == 0 else x + y
        query, _ = self.start(self.dropout(self.embed(target)))
        context, _ = self.attend(query, x, x, need_weights=False)
        y = query
        for i, layer in enumerate(self.decoder):
            z, _ = layer(torch.cat([self.dropout(y), context], dim=-1))
            y = z if i == 0 else y + z
        return self.head(y)


class LanguageModel(nn.Module):
    """LSTM cells stepped by hand, tied head, one dropout mask for all steps."""

    def __init__(self, dropout: float, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)
        self.head.weight = self.embed.weight
        self.p = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        keep = 1 - self.p
        if self.training and self.p > 0:
            x = x * torch.empty_like(x[:, :1]).bernoulli_(keep) / keep
        states = [(x.new_zeros(len(x), 32), x.new_zeros(len(x), 32)) for _ in self.cells]
        outputs = []
        for step in range(x.shape[1]):
            h = x[:, step]
            for i, cell in enumerate(self.cells):
                states[i] = cell(h, states[i])
                h = states[i][0]
            outputs.append(h)
        return self.head(torch.stack(outputs, dim=1))


class GRUAttention(nn.Module):
    """Additive attention, teacher forcing step by step."""

    def __init__(self, dropout: float, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.encoder = nn.GRU(
            width, width, 2, dropout=dropout, bidirectional=True, batch_first=True
        )
        self.keys = nn.Linear(2 * width, width)
        self.query = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1)
        self.cell = nn.GRUCell(3 * width, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        states, last = self.encoder(self.embed(source))
        keys, h = self.keys(states), last[-1]
        logits, weights = [], []
        for token in target.unbind(1):
            score = self.score(torch.tanh(keys + self.query(h).unsqueeze(1))).squeeze(-1)
            score = score.masked_fill(source == 3, float("-inf"))
            weight = score.softmax(-1)
            context = torch.bmm(weight.unsqueeze(1), states).squeeze(1)
            h = self.cell(torch.cat([self.embed(token), context], -1), h)
            logits.append(self.head(h))
            weights.append(weight)
        return {"logits": torch.stack(logits, 1), "attention": torch.stack(weights, 1)}


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and skips summed from every layer."""

    def __init__(self, dropout: float, width: int = 16) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, width, 1)
        self.filters = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**i) for i in range(4))
        self.gates = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**i) for i in range(4))
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(4))
        self.skip = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(4))
        self.out = nn.Sequential(
            nn.ReLU(), nn.Conv1d(width, width, 1), nn.Dropout(dropout), nn.Conv1d(width, 32, 1)
        )

    def forward(self, wave: Tensor) -> Tensor:
        x = self.start(wave)
        skips: Tensor | int = 0
        for i, (filter_, gate) in enumerate(zip(self.filters, self.gates, strict=True)):
            padded = F.pad(x, (2**i, 0))
            z = torch.tanh(filter_(padded)) * torch.sigmoid(gate(padded))
            skips = skips + self.skip[i](z)
            x = x + self.residual[i](z)
        return self.out(skips)


class TCN(nn.Module):
    """Weight-normalised temporal convolutions."""

    def __init__(self, dropout: float, width: int = 16) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(
            norm(nn.Conv1d(3 if i == 0 else width, width, 3, dilation=2**i)) for i in range(3)
        )
        self.down = nn.Conv1d(3, width, 1)
        self.dropout = nn.Dropout1d(dropout)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        for i, layer in enumerate(self.layers):
            x = self.dropout(F.relu(layer(F.pad(x, (2 ** (i + 1), 0)))))
        return self.head((x + skip)[:, :, -1])


class TextCNN(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24, padding_idx=3)
        self.convs = nn.ModuleList(nn.Conv1d(24, 16, k) for k in (2, 3, 4))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(48, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        pooled = [F.relu(conv(x)).max(dim=2).values for conv in self.convs]
        return self.head(self.dropout(torch.cat(pooled, 1)))


class Speech(nn.Module):
    """Convolutions, a bidirectional GRU and the CTC loss inside."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Hardtanh(0, 20)
        )
        self.rnn = nn.GRU(32, 16, 2, bidirectional=True, dropout=dropout)
        self.head = nn.Linear(32, 20)
        self.ctc = nn.CTCLoss(zero_infinity=True)

    def forward(self, spectrum: Tensor, text: Tensor) -> Tensor:
        x = self.conv(spectrum.unsqueeze(1)).flatten(1, 2).permute(2, 0, 1)
        logs = self.head(self.rnn(x)[0]).log_softmax(-1)
        frames = torch.full((text.shape[0],), logs.shape[0], dtype=torch.long)
        letters = torch.full((text.shape[0],), text.shape[1], dtype=torch.long)
        return self.ctc(logs, text, frames, letters)


class Memory(nn.Module):
    """Segments one after another, each attending to the detached states of the last."""

    def __init__(self, dropout: float, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.attend = nn.ModuleList(
            nn.MultiheadAttention(width, 4, dropout=dropout, batch_first=True) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        memory: list[Tensor] = []
        parts = []
        for segment in tokens.chunk(3, dim=1):
            x, new = self.embed(segment), []
            for i, (attend, norm) in enumerate(zip(self.attend, self.norms, strict=True)):
                new.append(x.detach())
                context = torch.cat([memory[i], x], 1) if memory else x
                x = norm(x + attend(x, context, context)[0])
            memory = new
            parts.append(x)
        return self.head(torch.cat(parts, 1)), memory


class Perceiver(nn.Module):
    """A few latents read a long input again and again with the same weights."""

    def __init__(self, dropout: float, width: int = 32) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, width) * 0.02)
        self.read = nn.MultiheadAttention(width, 4, batch_first=True, kdim=8, vdim=8)
        self.think = nn.TransformerEncoderLayer(width, 4, 48, dropout, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.latents.expand(x.shape[0], -1, -1)
        for _ in range(3):
            z = self.think(z + self.read(z, x, x, need_weights=False)[0])
        return self.head(z.mean(1))


class Experts(nn.Module):
    """A transformer with top-2 routing by dense masks and a load-balancing loss."""

    def __init__(self, dropout: float, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.attend = nn.TransformerEncoderLayer(width, 4, 48, dropout, batch_first=True)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))
            for _ in range(experts)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.attend(self.embed(tokens))
        probability = self.router(x).softmax(-1)
        top = probability.topk(2, dim=-1)
        gate = torch.zeros_like(probability).scatter(-1, top.indices, top.values)
        y = sum(gate[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        share = (gate > 0).float().mean((0, 1))
        balance = (share * probability.mean((0, 1))).sum() * len(self.experts)
        logits = self.head(x + y)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * balance
        return {"loss": loss, "logits": logits, "balance": balance.detach()}


class SparseExperts(nn.Module):
    """Top-1 routing that sends each expert only its own tokens: sizes depend on data."""

    def __init__(self, dropout: float, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(_SparseLayer(dropout, width, experts) for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            for mix in self.mix[3 * i : 3 * i + 3]:
                x = x + F.gelu(mix(x))
        return self.head(x.mean(1))


class _SparseLayer(nn.Module):
    def __init__(self, dropout: float, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == i)
            if rows.numel():
                out[rows] = weight[rows, None] * expert(flat[rows])
        return x + self.dropout(out.view_as(x))


def _token_entry(name: str, make: Callable[[float], nn.Module]) -> Entry:
    return entry(name, make, lambda s: (ids(s),), token_loss, lambda s: ids(s + 1))


def _pair_entry(name: str, make: Callable[[float], nn.Module], loss_fn: Any = token_loss) -> Entry:
    return entry(name, make, lambda s: (ids(s), ids(s + 3, 9)), loss_fn, lambda s: ids(s + 4, 9))


ENTRIES: tuple[Entry, ...] = (
    _pair_entry("nn_transformer", Translator),
    _pair_entry("gnmt", GNMT),
    _pair_entry("gru_attention", GRUAttention, lambda o, t: token_loss(o["logits"], t)),
    _token_entry("lstm_cells_tied", LanguageModel),
    entry(
        "wavenet",
        WaveNet,
        lambda s: (floats(s, 1, 40),),
        F.cross_entropy,
        lambda s: classes(s, 32, 40),
    ),
    entry("tcn", TCN, lambda s: (floats(s, 3, 20),), F.cross_entropy, lambda s: classes(s, 5)),
    entry("text_cnn", TextCNN, lambda s: (ids(s),), F.cross_entropy, lambda s: classes(s, 5)),
    entry("deep_speech", Speech, lambda s: (floats(s, 8, 40), ids(s, 5, vocab=20, low=1))),
    entry(
        "segment_memory",
        Memory,
        lambda s: (ids(s),),
        lambda o, t: token_loss(o[0], t),
        lambda s: ids(s + 1),
    ),
    entry(
        "perceiver",
        Perceiver,
        lambda s: (floats(s, 20, 8),),
        F.cross_entropy,
        lambda s: classes(s, 5),
    ),
    entry("dense_experts", Experts, lambda s: {"tokens": ids(s), "labels": ids(s + 1)}),
    entry(
        "sparse_experts",
        SparseExperts,
        lambda s: (floats(s, 6, 8),),
        F.cross_entropy,
        lambda s: classes(s, 5),
    ),
)

assert BATCH == 4
