"""The forecast of a step of stages in parts, beside the step on four emulated ranks.

    python benchmarks/parts_forecast.py [--rate 1.5e8] [--only sequence]

Emulated: every product of matrices waits as long as a device of `--rate` FLOP/s takes, when its
costs are measured as in the steps, so that there can be more ranks than cores; all else is
computed, and sent over gloo.  Links are those that `pdcompile probe` finds first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # also as `python benchmarks/parts_forecast.py`

import pdcompile  # noqa: E402
from benchmarks.side_by_side.waiting import sleep_precisely  # noqa: E402
from examples.gpt import GPT, loss_fn  # noqa: E402
from pdcompile.options.values import SPLITS  # noqa: E402
from pdcompile.passes.costs import timing  # noqa: E402

RANKS, MICROBATCHES, STEPS = 4, 8, 5
CASES: list[dict[str, Any]] = [{"stages": 4}]
CASES += [
    {"parts": 2, "stages": 2, "split": split}
    for split in SPLITS
    if split != "auto" and "experts" not in split
]
CASES += [
    {"parts": 4},
    {"parts": 2, "stages": 1, "replicas": 2},
    {"parts": (2, 1, 1)},
    {"parts": 2, "stages": 2, "schedule": "zb-h1"},
]


class Emulated(TorchDispatchMode):
    """Products of matrices take as long as on a device of so many FLOP/s."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        began, kwargs = time.perf_counter(), kwargs or {}
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple | list) else result
        count = flop_registry.get(func._overloadpacket)
        if count is not None and type(first) is torch.Tensor and first.device.type == "cpu":
            seconds = count(*args, **kwargs, out_val=result) / self._rate
            time.sleep(max(0.0, began + seconds - time.perf_counter()))
        return result


def measure(
    case: dict[str, Any], cluster: str, rate: float,
    make: Callable[[], nn.Module] = lambda: GPT(4, 128, 4, 64), length: int = 64,
) -> None:  # fmt: skip
    """One rank of a case; the first one prints the seconds of a step, forecast and measured, and
    the share in which ranks idle by the forecast.

    Args:
        length: tokens of a sample, of which there are two in each of the `microbatches`.
    """
    timing.thread_time = time.perf_counter  # type: ignore[assignment]  # waits count
    sleep_precisely()
    torch.manual_seed(0)
    count = case.setdefault("microbatches", MICROBATCHES)
    model, ids = make(), torch.randint(256, (2 * count, length))
    with Emulated(rate), pdcompile.compile(
        model, ids, example_target=ids, loss_fn=loss_fn,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), cluster=cluster, verify="off",
        progress=False, **case,
    ) as pipe:  # fmt: skip
        seconds = []
        for _ in range(2 + STEPS):
            began = time.perf_counter()
            pipe.step(ids, target=ids).loss.item()
            seconds.append(time.perf_counter() - began)
        if int(os.environ["RANK"]) == 0:
            found = pipe.plan.forecast
            assert found is not None
            print("STEP", found.step_seconds, median(seconds[2:]), found.bubble, flush=True)


def launched(*arguments: str, ranks: int = RANKS) -> str:
    """Run a module on the ranks, and return what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PDCOMPILE_CACHE": "off"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--rate", type=float, default=1.5e8, help="FLOP/s of a device (default 1.5e8)"
    )
    parser.add_argument("--only", default="", help="cases whose text has this")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        case = {k: tuple(v) if isinstance(v, list) else v
                for k, v in json.loads(options.rank[0]).items()}  # fmt: skip
        measure(case, options.rank[1], options.rate)
        return
    with tempfile.TemporaryDirectory() as folder:
        cluster = f"{folder}/cluster.toml"
        launched("-m", "pdcompile", "probe", "-o", cluster)
        print("| case | forecast | measured | forecast / measured |\n|---|---:|---:|---:|")
        for case in CASES:
            named = ", ".join(f"{name}={value}" for name, value in case.items())
            if options.only not in named:
                continue
            text = launched(str(Path(__file__)), "--rate", str(options.rate),
                            "--rank", json.dumps(case), cluster)  # fmt: skip
            line = next(line for line in text.splitlines() if line.startswith("STEP"))
            forecast, measured = map(float, line.split()[1:3])
            print(f"| {named} | {forecast:.3f} s | {measured:.3f} s | {forecast / measured:.3f} |")


if __name__ == "__main__":
    main()
