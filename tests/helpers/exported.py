"""Workloads that are exported, as command-line targets: ``tests.helpers.exported:mlp``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile import Cluster, Plan, Workload, driver
from pdcompile.batch import example_call
from pdcompile.cli import app
from pdcompile.options import Options
from tests.helpers import models

BATCH = 8


def planned(workload: Workload, stages: int, **options: Any) -> Plan:
    """A plan with estimated costs."""
    inputs, target = workload.example()
    defaults: dict[str, Any] = {"cluster": Cluster.local(stages), "microbatches": 4}
    given = Options(
        loss_fn=workload.loss_fn, costs="estimated", verify="off", progress=False,
        **(defaults | options),
    )  # fmt: skip
    flat = example_call(workload.model, inputs, target)
    return driver.build(workload.model, flat, given).plan


def planned_for(name: str, stages: int, **options: Any) -> Plan:
    """A plan of one of the workloads here."""
    return planned(globals()[name](), stages, **options)


def export(plan: Plan | Path, target: str, folder: Path) -> tuple[str, ...]:
    """Runs ``dump --torch``; the notes that it prints.  Raises what it refuses."""
    path = plan
    if isinstance(plan, Plan):
        path = folder.with_name(f"{folder.name}.plan.json")
        path.write_text(plan.to_json(), encoding="utf-8")
    said, words = StringIO(), ("dump", target, "--torch", "--plan", str(path), "-o", str(folder))
    with redirect_stdout(said):
        app([*words, "--json"], standalone_mode=False)
    return tuple(json.loads(said.getvalue())["notes"])


def made(name: str, stages: int, folder: Path, **options: Any) -> tuple[str, ...]:
    """One of the workloads here, planned and exported; the notes."""
    plan = planned_for(name, stages, **options)
    return export(plan, f"{__name__}:{name}", folder)


class Residuals(nn.Module):
    """Layers in a list, in the form that torchtitan's models have: what is missing is passed by."""

    def __init__(self, layers: int = 6, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if self.first is not None else x
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x) if self.last is not None else x


def mlp() -> Workload:
    torch.manual_seed(0)
    return _workload(Residuals(), lambda g: torch.randn(BATCH, 4, generator=g), _classes(3))


class Crossing(nn.Module):
    """A skip connection over two blocks: the gradient of `kept` comes from the last stage.  The
    first and the last stage read `x`."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.MEAN_SCALE = nn.Linear(width, width)  # a name with words of the exporter's own
        self.blocks[-1].weight = self.MEAN_SCALE.weight

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        kept = torch.tanh(self.blocks[0](self.MEAN_SCALE(x)))
        y = kept
        for block in self.blocks[1:]:
            y = torch.tanh(block(y))
        return (y + kept) * scale + x


def crossing() -> Workload:
    """A value from the first stage to the last one, and an input that only the last one reads."""
    torch.manual_seed(0)

    def inputs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(BATCH, 16, generator=generator), torch.rand(
            BATCH, 1, generator=generator
        )

    return _workload(Crossing(), inputs, lambda g: torch.randn(BATCH, 16, generator=g), F.mse_loss)


def gpt() -> Workload:
    """GPT with tied weights and dropout."""
    model = models.gpt(layers=2, dropout=0.1)
    inputs, _ = models.batch_for(model, BATCH)

    def ids(generator: torch.Generator) -> Tensor:
        return torch.randint(int(inputs.max()) + 1, inputs.shape, generator=generator)

    return _workload(model, ids, ids, models.token_loss)


class Layered(nn.Module):
    """Dropout inside of an attention and of a recurrent layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.5, batch_first=True)
        self.middle = nn.Linear(width, width)
        self.recurrent = nn.LSTM(width, width, num_layers=2, dropout=0.5, batch_first=True)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.recurrent(torch.tanh(self.middle(x)))[0][:, -1])


def layered() -> Workload:
    torch.manual_seed(0)
    return _workload(Layered(), lambda g: torch.randn(BATCH, 5, 16, generator=g), _classes(3))


class VGG(nn.Module):
    """Convolutions with batch norm, in-place activations and dropout; images (b, 3, 16, 16)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (8, 0, 16, 0, 16):
            if not width:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
            layers.append(nn.ReLU(inplace=True))
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(16 * 16, 32), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(32, 5)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(images), 1))


def vgg() -> Workload:
    torch.manual_seed(0)
    return _workload(VGG(), lambda g: torch.randn(BATCH, 3, 16, 16, generator=g), _classes(5))


def gpt2() -> Workload:
    """Hugging Face's GPT-2 in small: tied weights, dropout, a loss of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=32, n_head=2, n_positions=32, vocab_size=128, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip

    def batches() -> Iterator[tuple[dict[str, Tensor], None]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            ids = torch.randint(128, (BATCH, 16), generator=generator)
            yield {"input_ids": ids, "labels": ids}, None

    return Workload(GPT2LMHeadModel(config), next(batches())[0], None, batches)


def llama() -> Workload:
    """Masks, and rotations that the first stage makes and all later ones read."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, bos_token_id=0, eos_token_id=0,
        max_position_embeddings=32,
    )  # fmt: skip

    def batches() -> Iterator[tuple[dict[str, Tensor], None]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            ids = torch.randint(64, (BATCH, 16), generator=generator)
            mask = torch.ones_like(ids)
            mask[:, -3:] = 0
            yield {"input_ids": ids, "attention_mask": mask, "labels": ids}, None

    return Workload(LlamaForCausalLM(config), next(batches())[0], None, batches)


def t5() -> Workload:
    """An encoder whose output all of the decoder reads, and an embedding that three parts share."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        num_layers=2, d_model=32, d_kv=8, d_ff=64, num_heads=4, vocab_size=64,
        decoder_start_token_id=0,
    )  # fmt: skip

    def batches() -> Iterator[tuple[dict[str, Tensor], None]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            ids, labels = (torch.randint(1, 64, (BATCH, n), generator=generator) for n in (16, 12))
            yield {"input_ids": ids, "labels": labels}, None

    return Workload(T5ForConditionalGeneration(config), next(batches())[0], None, batches)


def unseeded() -> Workload:
    """Every process has another model."""
    torch.seed()
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return _workload(layers, lambda g: torch.randn(BATCH, 4, generator=g), _classes(4))


class Frozen(nn.Module):
    """A norm that stays in evaluation mode, as in fine-tuning, and a part that holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean = torch.full((4,), 0.5)
        self.norm.eval()
        self.last = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.last(self.norm(x))
        return out


def frozen() -> Workload:
    torch.manual_seed(0)
    return _workload(Frozen(), lambda g: torch.randn(BATCH, 4, generator=g), _classes(4))


def as_tuple() -> tuple[Any, ...]:
    """A workload without the class, and with its data as a list."""
    made = mlp()
    assert made.batches is not None
    pairs = list(itertools.islice(made.batches(), 3))
    return made.model, made.example_inputs, made.loss_fn, lambda: pairs


def _classes(count: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randint(count, (BATCH,), generator=g)


def _workload(
    model: nn.Module,
    inputs: Callable[[torch.Generator], Any],
    target: Callable[[torch.Generator], Tensor],
    loss_fn: Callable[[Any, Any], Tensor] = F.cross_entropy,
) -> Workload:
    def batches() -> Iterator[tuple[Any, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            yield inputs(generator), target(generator)

    return Workload(model, next(batches())[0], loss_fn, batches)
