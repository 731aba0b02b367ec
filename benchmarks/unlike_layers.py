"""Layers whose memory and time rank differently: our cut beside equal layers and parameters.

    python -m benchmarks.unlike_layers [--rounds 20] [--dense 6] [--experts 6]

A DeepSeek-V2 of Hugging Face on two ranks of this machine (gloo): its first layers are dense, which
takes time, the others have experts, which hold parameters.  1F1B with eight microbatches, AdamW,
costs measured on this machine.  The three pipelines take a step in turn, on the same two ranks; the
figures are seconds of a step by the simulator, and medians of what was measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # also as `python benchmarks/unlike_layers.py`

import pdcompile
from pdcompile.problem.constraints import Pin

MICROBATCHES, BATCH, TOKENS, VOCABULARY, SETTLING = 8, 16, 64, 512, 2


def model_of(dense: int, experts: int) -> nn.Module:
    """Model of so many dense layers, and then so many of 32 experts, of which a token takes two."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.DeepseekV2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=2048, moe_intermediate_size=256,
        num_hidden_layers=dense + experts, first_k_dense_replace=dense, n_routed_experts=32,
        num_experts_per_tok=2, n_shared_experts=1, num_attention_heads=4, num_key_value_heads=4,
        kv_lora_rank=64, q_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64,
        n_group=1, topk_group=1, experts_implementation="grouped_mm", use_cache=False,
    )  # fmt: skip
    model: nn.Module = hf.DeepseekV2ForCausalLM(config)
    return model.train()


def halves(sizes: Sequence[int]) -> int:
    """First layer of the second stage, where the larger stage has as little as can be."""
    total = sum(sizes)
    before = [0, *accumulate(sizes)]
    return min(range(1, len(sizes)), key=lambda cut: max(before[cut], total - before[cut]))


def contestants(model: nn.Module) -> Iterator[tuple[str, tuple[Pin, ...]]]:
    """Names of cuts, and the constraints that make them."""
    layers = list(model.get_submodule("model.layers").children())
    parameters = [sum(one.numel() for one in layer.parameters()) for layer in layers]
    yield "ours", ()
    for name, cut in (("equal layers", len(layers) // 2), ("equal parameters", halves(parameters))):
        pins = [Pin(f"model.layers.{n}", int(n >= cut)) for n in range(len(layers))]
        yield f"{name} ({cut} and {len(layers) - cut})", tuple(pins)


def rank(rounds: int, dense: int, experts: int) -> None:
    """Both ranks: a step of each pipeline in turn; rank 0 prints a table."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    pipes = {
        name: pdcompile.compile(
            model_of(dense, experts), batch, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
            stages=2, microbatches=MICROBATCHES, schedule="1f1b", constraints=pins, verify="off",
            outputs="none", progress=False,
        )
        for name, pins in contestants(model_of(dense, experts))
    }  # fmt: skip
    measured: dict[str, list[float]] = {name: [] for name in pipes}
    for count in range(rounds + SETTLING):
        for name, pipe in pipes.items():
            dist.barrier()
            start = time.perf_counter()
            pipe.step(**batch)
            dist.barrier()
            if count >= SETTLING:
                measured[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print("| cut | simulated | measured | parameters, MB a rank |\n|---|---:|---:|---:|")
        for name, pipe in pipes.items():
            forecast = pipe.plan.forecast
            assert forecast is not None
            held = " and ".join(f"{stage.parameter_bytes / 1e6:.0f}" for stage in pipe.plan.stages)
            took = 1000 * statistics.median(measured[name])
            print(f"| {name} | {1000 * forecast.step_seconds:.0f} ms | {took:.0f} ms | {held} |")
    for pipe in pipes.values():
        pipe.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dense", type=int, default=6, help="dense layers")
    parser.add_argument("--experts", type=int, default=6, help="layers of experts")
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank(given.rounds, given.dense, given.experts)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
                   f"--log-dir={folder}", "-r1:1", __file__, *sys.argv[1:]]  # fmt: skip
        sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
