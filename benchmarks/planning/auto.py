"""Section ``auto``: everything left open, for two Llamas of transformers on A100s.

``plan --schedule auto --replicas any --recompute auto --time-limit 60``: random weights that have
no memory (the meta device), costs estimated from the devices' data sheet, 64 samples a step, hosts
that are joined by 12.5 GB/s, 20 us, and whose devices are by 200 GB/s, 5 us.
"""

from __future__ import annotations

import re
import time
import warnings

import torch

from pdcompile.batch import example_call, resolve_batch
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.options import Options
from pdcompile.options.configuration import capture_size, configure
from pdcompile.pass_runner import Listener, collecting_seldom
from pdcompile.passes.trace import capture
from pdcompile.planner import Planner
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only auto"
TIME_LIMIT, SAMPLES = 60.0, 64
LLAMAS = {
    "32 layers of 4096": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "126 layers of 16384": {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
#: model, tokens of a sample, hosts, devices of each, their memory
CASES = (
    ("32 layers of 4096", 512, 2, 4, None),
    ("32 layers of 4096", 512, 2, 4, 80 * 10**9),
    ("126 layers of 16384", 2048, 8, 8, None),
)


class Told(Listener):
    """Seconds of search until the first plan, how many plans there were, and the last in words."""

    def __init__(self) -> None:
        self.first, self.lines, self.last = 0.0, 0, ""

    def told(self, text: str) -> None:
        if found := re.match(r"plan after (\S+) s: .*?: (.*)", text):
            self.first, self.lines = self.first or float(found[1]), self.lines + 1
            self.last = found[2]


def cluster(hosts: int, devices: int, memory: int | None) -> Cluster:
    levels = (Level("host", devices, 200e9, 5e-6), Level("network", hosts, 12.5e9, 2e-5))
    return Cluster((Device("a100-80", memory),) * (hosts * devices), levels)


def run() -> list[Table]:
    import transformers as hf

    warnings.simplefilter("ignore")
    table = Table(
        "auto",
        f"Schedule, microbatches, replicas and recomputation open, {TIME_LIMIT:.0f} s allowed",
        COMMAND,
        ("Llama", "devices", "memory", "first plan s", "plans", "wall s", "step s", "gap", "plan"),
        (20, 7, 6, 12, 5, 6, 8, 6, 60),
    ).begin()
    for name, tokens, hosts, devices, memory in CASES:
        with torch.device("meta"):
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMAS[name])).train()
            ids = torch.zeros(SAMPLES, tokens, dtype=torch.long)
        flat = example_call(model, {"input_ids": ids, "labels": ids}, None)
        options = Options(
            cluster=cluster(hosts, devices, memory), schedule="auto", replicas="any",
            recompute="auto", costs="estimated", verify="off", time_limit=TIME_LIMIT,
        )  # fmt: skip
        layout = resolve_batch(flat, options.batch_dims)
        chosen = configure(
            options, batch_size=layout.size, splits=layout.splits, num_ranks=None, device="meta"
        )
        with collecting_seldom():
            captured = capture(
                model, flat, layout, None, microbatch_size=capture_size(options, chosen)
            )
            told = Told()
            planner = Planner(model, captured, options, chosen, told)
            planner.costs()
            began = time.monotonic()
            certificate = planner.plan().certificate
            wall = time.monotonic() - began
        table.add(
            name, f"{hosts} x {devices}", "–" if memory is None else f"{memory // 10**9} GB",
            f"{told.first:.1f}", told.lines, f"{wall:.1f}",
            f"{certificate.objective_seconds:.4g}", percent(certificate.gap), told.last,
        )  # fmt: skip
    return [table]
