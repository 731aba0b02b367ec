"""Section ``real``: unmodified models of transformers on A100s, flush schedules.

Published sizes with random weights that have no memory (the meta device), costs estimated from the
devices' data sheet, 64 samples a step, hosts of 8 devices (200 GB/s, 5 us) that are joined by
12.5 GB/s, 20 us.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn

from pdcompile.batch import FlatCall, example_call, resolve_batch
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError
from pdcompile.ir.graph import Capture
from pdcompile.options import Options
from pdcompile.options.configuration import configure
from pdcompile.pass_runner import PassRunner
from pdcompile.passes.partition import partition
from pdcompile.passes.trace import capture
from pdcompile.plan import Plan
from pdcompile.plan.evaluate import Evaluation
from pdcompile.planner import Planner
from pdcompile.problem import PartitionProblem
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only real"
STAGES, MICROBATCHES, TIME_LIMIT = (4, 8, 16), (1, 8, 16, 64), 10.0
LIMITED, SHARES = ((4, 16), (8, 8), (16, 16)), (0.9, 0.8)
SAMPLES = 64


def models() -> Iterator[tuple[str, Callable[[], nn.Module], int]]:
    """Name, how to build it, and the tokens of a sample; 0: an image."""
    import transformers as hf

    yield (
        "GPT-2 medium",
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=1024, n_layer=24, n_head=16)),
        512,
    )
    yield "Llama 1.1B", lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
            num_attention_heads=32, num_key_value_heads=4,
        )
    ), 512  # fmt: skip
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    yield (
        "BERT large",
        lambda: hf.BertForMaskedLM(hf.BertConfig(intermediate_size=4096, **large)),
        512,
    )
    yield "T5 base", lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
        )
    ), 256  # fmt: skip
    yield (
        "ViT large",
        lambda: hf.ViTForImageClassification(hf.ViTConfig(intermediate_size=4096, **large)),
        0,
    )
    yield "Mixtral, 16 layers of 1024", lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(
            hidden_size=1024, intermediate_size=3584, num_hidden_layers=16,
            num_attention_heads=16, num_key_value_heads=4,
        )
    ), 256  # fmt: skip
    yield "ResNet-50", lambda: hf.ResNetForImageClassification(hf.ResNetConfig()), 0


def batch(tokens: int, samples: int = SAMPLES) -> dict[str, Any]:
    if not tokens:
        images = torch.empty(SAMPLES, 3, 224, 224, device="meta")
        return {
            "pixel_values": images,
            "labels": torch.zeros(SAMPLES, dtype=torch.long, device="meta"),
        }
    ids = torch.zeros(samples, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def cluster(devices: int) -> Cluster:
    levels = [Level("host", min(devices, 8), 200e9, 5e-6)]
    if devices > 8:
        levels.append(Level("network", devices // 8, 12.5e9, 2e-5))
    return Cluster((Device("a100-80"),) * devices, tuple(levels))


def planned(
    model: nn.Module, flat: FlatCall, captured: Capture, stages: int, microbatches: int
) -> Plan:
    options = Options(
        cluster=cluster(stages), stages=stages, microbatches=microbatches, costs="estimated",
        verify="off", time_limit=TIME_LIMIT,
    )  # fmt: skip
    layout = resolve_batch(flat, options.batch_dims)
    chosen = configure(
        options, batch_size=layout.size, splits=layout.splits, num_ranks=None, device="meta"
    )
    planner = Planner(model, captured, options, chosen, PassRunner().listener)
    planner.costs()
    planner.problem()
    return planner.plan()


def limited(problem: PartitionProblem, plan: Plan) -> Iterator[tuple[float, PartitionProblem]]:
    """The problem, if no stage may need more than a share of what one needs most in the plan."""
    stages = {op: stage.index for stage in plan.stages for op in stage.ops}
    found = Evaluation(problem, [stages[item.ops[0]] for item in problem.items])
    most = max(found.needed(s) for s in range(len(problem.stages)))
    for share in SHARES:
        limits = tuple(replace(stage, memory_bytes=int(share * most)) for stage in problem.stages)
        yield share, replace(problem, stages=limits)


def tables() -> tuple[Table, Table]:
    command = f"{TIME_LIMIT:.0f} s of search allowed"
    return Table(
        "real", f"Unmodified models on A100s, flush schedules, {command}", COMMAND,
        ("model", "items", "stages", "microbatches", "fastest s", "gap", "chosen", "wall s"),
        (26, 6, 7, 13, 12, 8, 8, 7),
    ).begin(), Table(
        "limited", f"Unmodified models with less memory than the plans above need, {command}",
        COMMAND,
        ("model", "stages", "microbatches", "memory", "fastest s", "slower", "gap", "wall s"),
        (26, 7, 13, 7, 12, 8, 8, 7),
    )  # fmt: skip


def run() -> list[Table]:
    warnings.simplefilter("ignore")
    table, tight = tables()
    gaps, steady_gaps, tight_gaps, later = [], [], [], []
    for name, build, tokens in models():
        with torch.device("meta"):
            model = build().train()
        flat = example_call(model, batch(tokens), None)
        layout = resolve_batch(flat, Options().batch_dims)
        captured = capture(model, flat, layout, None, microbatch_size=layout.size // 8)
        for stages, microbatches in product(STAGES, MICROBATCHES):
            plan = planned(model, flat, captured, stages, microbatches)
            problem, certificate = plan.problem, plan.certificate
            assert problem is not None
            chosen, fastest = certificate.objective_seconds, certificate.fastest_seconds
            fastest = chosen if fastest is None else fastest
            gap = replace(certificate, objective_seconds=fastest).gap
            gaps.append(100 * gap)
            if microbatches >= stages:
                steady_gaps.append(100 * gap)
            table.add(
                name, len(problem.items), stages, microbatches, fastest, percent(gap),
                percent(chosen / fastest - 1), f"{certificate.seconds:.1f}",
            )  # fmt: skip
            if (stages, microbatches) in LIMITED:
                later.append((name, stages, microbatches, fastest, *limited(problem, plan)))
    tight.begin()
    for name, stages, microbatches, fastest, *problems in later:
        for share, problem in problems:
            try:
                found, certificate = partition(problem, time_limit=TIME_LIMIT)
            except InfeasibleError:
                none = (None, None, None, "infeasible")
                tight.add(name, stages, microbatches, f"{100 * share:.0f} %", *none)
                continue
            tight_gaps.append(100 * certificate.gap)
            tight.add(
                name, stages, microbatches, f"{100 * share:.0f} %", found.objective,
                percent(found.objective / fastest - 1), percent(certificate.gap),
                f"{certificate.seconds:.1f}",
            )  # fmt: skip
    for one, values in ((table, gaps), (tight, tight_gaps)):
        median, most = statistics.median(values), max(values)
        one.note(median=median, most=most, over=sum(gap > 5 for gap in values))
    table.note(steady_median=statistics.median(steady_gaps), steady_most=max(steady_gaps))
    return [table, tight]
