"""Section ``regret``: how far ``auto`` is behind what a person would type.

Everything open (``--schedule auto --replicas any --recompute auto``) against fixed choices of
schedule, stages, replicas and microbatches, recomputation chosen by the planner, on the same costs:
random weights that have no memory, costs estimated from data sheets, 64 samples a step, hosts
whose devices are joined by 200 GB/s, 5 us; between hosts 12.5 GB/s, 20 us, or 10 Gbit/s.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pdcompile.batch import FlatCall, example_call, resolve_batch
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError
from pdcompile.ir.graph import Capture
from pdcompile.options import Options
from pdcompile.options.configuration import capture_size, configure
from pdcompile.pass_runner import Listener, collecting_seldom
from pdcompile.passes.trace import capture
from pdcompile.planner import Planner
from planning.real import SAMPLES, batch, models
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only regret"
AUTO, FIXED = 60.0, 20.0  # seconds of search
GB, NETWORK, TEN_GBIT = 10**9, 12.5e9, 1.25e9
#: model, hosts, devices of each, their kind and memory, bytes/s between hosts
CASES = (
    ("Llama 7B", 2, 4, "a100-80", 80 * GB, NETWORK),
    ("Llama 13B", 1, 8, "a100-40", 40 * GB, NETWORK),
    ("Llama 13B", 2, 8, "a100-80", 80 * GB, NETWORK),
    ("GPT-2 medium", 2, 4, "a100-40", 40 * GB, TEN_GBIT),
    ("GPT-2 medium", 16, 1, "v100", 16 * GB, TEN_GBIT),
    ("BERT large", 1, 8, "a100-40", 24 * GB, NETWORK),
    ("BERT large", 4, 4, "v100", 16 * GB, TEN_GBIT),
    ("T5 base", 1, 8, "a100-40", 24 * GB, NETWORK),
    ("ViT large", 8, 8, "a100-80", 80 * GB, NETWORK),
    ("ResNet-50", 4, 1, "v100", 16 * GB, TEN_GBIT),
    ("VGG-16", 16, 1, "v100", 16 * GB, TEN_GBIT),
    ("Mixtral, 16 layers of 1024", 1, 8, "a100-80", 80 * GB, NETWORK),
)
#: width, inner width, layers, heads, heads of keys and values; samples of a minibatch, tokens
LLAMAS = {
    "Llama 7B": (4096, 11008, 32, 32, 32, SAMPLES, 2048),
    "Llama 13B": (5120, 13824, 40, 40, 40, SAMPLES, 2048),
    "Llama 2 70B": (8192, 28672, 80, 64, 8, 128, 4096),
}


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model on the meta device, and its minibatch."""
    import transformers as hf

    with torch.device("meta"):
        if name in LLAMAS:
            hidden, inner, layers, heads, pairs, samples, tokens = LLAMAS[name]
            config = hf.LlamaConfig(
                hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=pairs,
            )  # fmt: skip
            return hf.LlamaForCausalLM(config).train(), batch(tokens, samples)
        if name == "Mixtral 8x7B":  # sizes by default; groups are multiplied in bf16 alone on meta
            config = hf.MixtralConfig(experts_implementation="grouped_mm")
            return hf.MixtralForCausalLM(config).bfloat16().train(), batch(2048)
        if name == "VGG-16":
            return _vgg().train(), {"pixel_values": torch.empty(SAMPLES, 3, 224, 224)}
        build, tokens = next((build, tokens) for one, build, tokens in models() if one == name)
        return build().train(), batch(tokens)


class _Mean(nn.Module):
    """A network of images whose loss is the mean of what it returns."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.layers(pixel_values).square().mean()
        return mean


def _vgg() -> nn.Module:
    """VGG-16 (Simonyan and Zisserman, 2014, configuration D)."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
    return _Mean(*layers, nn.ReLU(), nn.Linear(4096, 1000))


def fixed(devices: int) -> Iterator[dict[str, Any]]:
    """Choices that people make: all devices, equally many for each stage."""
    for schedule in ("1f1b", "zb-h1"):
        for replicas in (r for r in (1, 2, 4) if devices % r == 0 and devices // r > 1):
            for microbatches in sorted({min(4 * devices // replicas, SAMPLES), SAMPLES}):
                yield {
                    "schedule": schedule, "stages": devices // replicas, "replicas": replicas,
                    "microbatches": microbatches,
                }  # fmt: skip


def step_seconds(
    model: nn.Module, flat: FlatCall, captured: Capture, cluster: Cluster, **choices: Any
) -> float | None:
    """Seconds of a step by the plan's forecast; None where no plan is found."""
    options = Options(
        cluster=cluster, costs="estimated", verify="off", recompute="auto", outputs="none",
        **choices,
    )  # fmt: skip
    layout = resolve_batch(flat, options.batch_dims)
    chosen = configure(
        options, batch_size=layout.size, splits=layout.splits, num_ranks=None, device="meta"
    )
    planner = Planner(model, captured, options, chosen, Listener())
    planner.costs()
    try:
        forecast = planner.plan().forecast
    except InfeasibleError:
        return None
    return None if forecast is None else forecast.step_seconds


def described(choices: dict[str, Any]) -> str:
    return "{schedule}, {stages} stages of {replicas}, m = {microbatches}".format(**choices)


def run() -> list[Table]:
    warnings.simplefilter("ignore")
    table = Table(
        "regret",
        f"auto ({AUTO:.0f} s) against fixed choices ({FIXED:.0f} s each), seconds of a step",
        COMMAND,
        ("model", "cluster", "auto", "best fixed", "regret", "which", "found"),
        (28, 24, 9, 10, 8, 34, 6),
    ).begin()
    regrets = []
    for name, hosts, devices, kind, memory, rate in CASES:
        levels = [Level("host", devices, 200e9, 5e-6), Level("network", hosts, rate, 2e-5)]
        cluster = Cluster((Device(kind, memory),) * (hosts * devices), tuple(levels))
        model, given = made(name)
        flat = example_call(model, given, None)
        everything: dict[str, Any] = {
            "schedule": "auto", "replicas": "any", "time_limit": AUTO,
        }  # fmt: skip
        measured = _captured(model, flat, Options(cluster=cluster, costs="estimated", **everything))
        auto = step_seconds(model, flat, measured, cluster, **everything)
        rows = []
        every = list(fixed(hosts * devices))
        for choices in every:
            seconds = step_seconds(model, flat, measured, cluster, **choices, time_limit=FIXED)
            rows += [] if seconds is None else [(seconds, described(choices))]
        best, which = min(rows, default=(None, "none fits"))
        regret = None if auto is None or best is None else auto / best - 1
        regrets += [] if regret is None else [regret]
        table.add(
            name, f"{hosts} x {devices} {kind} {memory // GB} GB",
            "–" if auto is None else f"{auto:.4g}", "–" if best is None else f"{best:.4g}",
            "–" if regret is None else percent(regret), which, f"{len(rows)}/{len(every)}",
        )  # fmt: skip
    table.note(regret_median=statistics.median(regrets), regret_most=max(regrets))
    return [table]


def _captured(model: nn.Module, flat: FlatCall, options: Options) -> Capture:
    layout = resolve_batch(flat, options.batch_dims)
    chosen = configure(
        options, batch_size=layout.size, splits=layout.splits, num_ranks=None, device="meta"
    )
    with collecting_seldom():
        return capture(model, flat, layout, None, microbatch_size=capture_size(options, chosen))
