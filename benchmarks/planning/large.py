"""Section ``large``: what capture and planning of two large Llamas take, pass by pass.

The Llamas of section ``auto``, unmodified, on the meta device; costs estimated from the devices'
data sheet; schedule 1f1b; one sample, and 64 in 32 microbatches.  Each in a process of its own, as
`pdcompile plan` would be: CPU seconds of the whole process (user and system) and its peak memory.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from planning.tables import Table

COMMAND = "python benchmarks/planner.py --only large"
#: model, tokens of a sample, hosts, devices of each
CASES = (("32 layers of 4096", 512, 1, 8), ("126 layers of 16384", 2048, 8, 8))
BATCHES = ((1, 1), (64, 32))  # samples, microbatches
LIMITS = (None, 10.0)
COLUMNS = ("import", "capture", "costs", "problem", "search", "proof", "writing", "total")


class Clock:
    """CPU seconds of this process, by what they were spent on."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(COLUMNS, 0.0)
        self.wall = 0.0  # of the search

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Counts what is spent inside."""
        began, wall = time.process_time(), time.monotonic()
        yield
        self.spent[name] += time.process_time() - began
        self.wall += time.monotonic() - wall if name == "search" else 0.0


def measure(name: str, samples: int, microbatches: int, limit: float | None) -> dict[str, Any]:
    """CPU seconds by column, and what the plan came to; in a process that did nothing before."""
    clock = Clock()
    clock.spent["import"] = time.process_time()  # of Python itself
    with clock.of("import"):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from pdcompile.batch import example_call
        from pdcompile.driver import run_passes
        from pdcompile.options import Options
        from pdcompile.pass_runner import PassRunner, collecting_seldom
        from planning.auto import LLAMAS, cluster

    class Spending(PassRunner):
        def __call__(self, name: str, run: Callable[[], Any]) -> Any:
            column = {
                "graph": "capture", "costs": "costs", "problem": "problem", "plan": "search",
                "sources": "writing",
            }.get(name, "proof")  # fmt: skip
            with clock.of(column):
                return super().__call__(name, run)

    warnings.simplefilter("ignore")
    tokens, hosts, devices = next(case[1:] for case in CASES if case[0] == name)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMAS[name])).train()
        ids = torch.zeros(samples, tokens, dtype=torch.long)
    options = Options(
        cluster=cluster(hosts, devices, None), stages=hosts * devices, microbatches=microbatches,
        schedule="1f1b", costs="estimated", time_limit=limit,
    )  # fmt: skip
    flat = example_call(model, {"input_ids": ids, "labels": ids}, None)
    compiled = run_passes(model, flat, options, None, Spending())
    with clock.of("writing"), collecting_seldom():
        compiled.plan.to_json()
    clock.spent["total"] = time.process_time()
    return {
        "spent": clock.spent,
        "wall": clock.wall,
        "ops": len(compiled.capture.train.ops),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def run() -> list[Table]:
    table = Table(
        "large",
        "CPU seconds to capture and plan large models, schedule 1f1b; search limited to so many s",
        COMMAND,
        ("Llama", "devices", "samples", "ops", "limit", *COLUMNS, "search wall s", "peak GiB"),
        (20, 7, 7, 5, 5, *(max(len(each), 6) for each in COLUMNS), 13, 8),
    ).begin()
    for name, _, hosts, devices in CASES:
        for samples, microbatches in BATCHES:
            for limit in LIMITS:
                given = json.dumps((name, samples, microbatches, limit))
                answer = subprocess.run(
                    [sys.executable, "-c", _CHILD, given],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                found = json.loads(answer.stdout)
                table.add(
                    name, hosts * devices, samples, found["ops"], f"{limit or '–'}",
                    *(f"{found['spent'][column]:.1f}" for column in COLUMNS),
                    f"{found['wall']:.1f}", f"{found['peak'] / 2**30:.2f}",
                )  # fmt: skip
    return [table]


_CHILD = f"""
import json, sys
sys.path[:0] = {sys.path!r}
from planning.large import measure
print(json.dumps(measure(*json.loads(sys.argv[1]))))
"""
