"""Section ``parts_published``: Llama 2 70B on 64 GPUs by the settings that others publish.

Each setting's stages x replicas x parts, and ``--parts any --replicas any --updates auto``, by the
same clock on the same estimated costs: 128 samples of 4,096 tokens, a sample a microbatch, 1F1B,
recomputation where the planner wants it, 8 hosts of 8 A100 of 80 GB.
"""

from __future__ import annotations

import warnings
from math import inf

from planning.parts import AUTO, Beside, Case
from planning.regret import GB, NETWORK
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only parts_published"
#: of the performance summary of NVIDIA NeMo 24.07 (docs/source/performance), of
#: torchtitan/models/llama3/train_configs/llama3_70b.toml ("a preset for 64 A100 GPUs", whose FSDP
#: of the 8 groups is homes of updates here), and of Narayanan et al., 2021, arXiv 2104.04473, table
#: 1, 76.1 billion parameters, on a quarter of its replicas
PUBLISHED = {
    "NeMo: TP 4, PP 4": {"stages": 4, "replicas": 4, "parts": 4},
    "torchtitan: TP 8, FSDP 8": {"stages": 1, "replicas": 8, "parts": 8},
    "Megatron-LM: TP 8, PP 4": {"stages": 4, "replicas": 2, "parts": 8},
}
CASE = Case("Llama 2 70B", 8, 8, "a100-80", 80 * GB, NETWORK, 128)


def run() -> list[Table]:
    warnings.simplefilter("ignore")
    table = Table(
        "parts_published", f"Llama 2 70B on 64 GPUs, published settings and auto ({AUTO:.0f} s)",
        COMMAND, ("settings", "plan", "seconds of a step", "auto is"), (28, 52, 18, 10),
    ).begin()  # fmt: skip
    beside = Beside(CASE)
    auto = beside.auto()
    table.add("auto", auto[1] if auto else "not found", auto and auto[0], "")
    for name, choices in PUBLISHED.items():
        beside.tried.best_seconds = inf  # a slower one is wanted too
        found = beside.by_hand({**choices, "split": "width+sequence", "updates": "home"})
        slower = percent(auto[0] / found[0] - 1) if auto and found else "–"
        table.add(name, found[1] if found else "does not fit", found and found[0], slower)
    return [table]
