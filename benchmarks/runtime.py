"""Training side by side: one process, DDP, FSDP2, torch's pipelines, and each of our schedules.

    python benchmarks/runtime.py [--rounds 7] [--steps 3] [--emulated 4] [--real 2]
                                 [--models GPT "wide MLP"] [--only 1f1b 2bw]
                                 [--write benchmarks/results/performance.md]
    python benchmarks/runtime.py --python [--ranks 2]
    python benchmarks/runtime.py --shape 100mbit [--ranks 2] [--write PAGE]

Emulated: every layer waits as long as it took when it was timed, so that there can be more ranks
than cores; real: everything is computed.  0 ranks leave one of them out.  `--shape`: links of that
rate in network namespaces (as tc writes it; needs root, `ip` and `tc`), for the dense layers of
VGG-16 and AlexNet.  `--python`: what the interpreter takes for one instruction, of tiny stages.

What was measured is kept in out/runtime.json, comparison by comparison, and the page has all that
is there: parts can be measured at different times.  `--emulated 0 --real 0` measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # also as `python benchmarks/runtime.py`

from benchmarks.models import CHAINS  # noqa: E402
from benchmarks.side_by_side import page  # noqa: E402
from benchmarks.side_by_side.job import Job  # noqa: E402
from benchmarks.side_by_side.launch import Outcome, launched  # noqa: E402
from benchmarks.side_by_side.links import cluster_text  # noqa: E402
from benchmarks.side_by_side.networks import INTERFACE, Networks, check  # noqa: E402
from benchmarks.side_by_side.waiting import Times, timed_layers  # noqa: E402
from benchmarks.side_by_side.worker import ALONE, DDP, FSDP, OURS, TIED, TORCH  # noqa: E402
from pdcompile.errors import ConfigError, PdcompileError  # noqa: E402
from pdcompile.schedule.registry import KINDS, allowed  # noqa: E402

KEPT = ROOT / "out" / "runtime.json"
#: of ours those with a rank for each stage: dispatched ones are in benchmarks/heavy_head.py
STAGED = [name for name in allowed("any") if not KINDS[name].dispatched]
EVERYONE = [ALONE, DDP, FSDP, *TORCH, *(OURS + name for name in STAGED), TIED,
            OURS + "replicas", OURS + "auto"]  # fmt: skip
DENSE = ("VGG-16", "AlexNet")
MODELS = tuple(model for model in CHAINS if model not in DENSE)
SLOW = [DDP, "torch 1F1B", OURS + "1f1b", OURS + "2bw"]
SLOW_ROUNDS, SLOW_MICROBATCHES = 2, 4
TIED_MODEL = "GPT"
SHAPED_LATENCY = 200e-6
RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
SCALE = {"k": 1e3, "m": 1e6, "g": 1e9}


def compare(model: str, kind: str, ranks: int, options: argparse.Namespace) -> Outcome:
    """Everybody on one model, emulated or real."""
    names = [n for n in EVERYONE if not options.only or any(part in n for part in options.only)]
    job = Job(
        model, tuple(n for n in names if n != TIED or model == TIED_MODEL),
        options.microbatches, options.rounds, options.steps, memory=not options.no_memory,
    )  # fmt: skip
    one = job.sample()
    if kind == "emulated":
        part = one.inputs.tensor_split(options.microbatches)[0]
        job = replace(job, times=tuple(timed_layers(one.model, part)))
    return launched(f"{model}, {kind}, {ranks} ranks", described(job), job, ranks)


def compare_shaped(model: str, ranks: int, rate: str) -> Outcome:
    """Data parallelism and pipelines over slow links; dense layers are computed."""
    job = Job(model, tuple(SLOW), SLOW_MICROBATCHES, SLOW_ROUNDS, steps=1, interface=INTERFACE,
              cluster=cluster(ranks, rate), memory=False)  # fmt: skip
    one = job.sample()
    part = one.inputs.tensor_split(SLOW_MICROBATCHES)[0]
    times = [replace(layer, real=True) for layer in timed_layers(one.model, part)]
    features = one.model[0]
    times[0] = Times(
        len(part) * features.forward_seconds, 0.0, len(part) * features.backward_seconds
    )
    job, title = replace(job, times=tuple(times)), f"{model}, {rate}, {ranks} ranks"
    with Networks(ranks, rate) as networks:
        return launched(title, described(job), job, ranks, networks)


def cluster(ranks: int, rate: str) -> str:
    """The machines that a network of this rate joins, as TOML."""
    found = RATE.fullmatch(rate)
    if not found:
        raise ConfigError(
            f"{rate!r} is not a rate", where="--shape", remedy="such as 100mbit or 1gbit"
        )
    return cluster_text(ranks, float(found[1]) * SCALE[found[2]] / 8, SHAPED_LATENCY)


def described(job: Job) -> str:
    """Description of what is trained."""
    what = (CHAINS[job.model].__doc__ or "").strip().splitlines()[0]
    return f"{what} {len(job.sample().inputs)} samples a step, {job.microbatches} microbatches."


def show(outcome: Outcome) -> None:
    """The table of a comparison."""
    table = Table(title=outcome.title)
    for head in page.HEADS:
        table.add_column(head, justify="right" if head else "left")
    for name, figures in outcome.of_rank[0].items():
        row = page.cells(outcome, name)
        table.add_row(*row[:1], *(["refused"] if figures.refused else row[1:]))
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    print(f"{outcome.seconds:.0f} s")


def keep(kind: str, outcome: Outcome) -> None:
    """Put a comparison into the file, in place of an earlier one of the same name."""
    known = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    known.setdefault(kind, {})[outcome.title] = asdict(outcome)
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(known))


def write(file: Path, arguments: str) -> None:
    """The page, and beside it its picture, of all that is in the file."""
    known = json.loads(KEPT.read_text())
    kinds = {kind: [Outcome.of_json(one) for one in known.get(kind, {}).values()]
             for kind, _ in page.SECTIONS}  # fmt: skip
    picture = file.with_suffix(".svg")
    page.draw([one for kind in kinds.values() for one in kind], picture)
    before = file.read_text() if file.exists() else ""
    file.write_text(page.written(kinds, picture.name, arguments, before))


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    if options.python:
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += [
            f"--nproc-per-node={options.ranks}",
            "-m",
            "benchmarks.side_by_side.python_share",
        ]
        raise SystemExit(subprocess.run(command, cwd=ROOT).returncode)
    try:
        if options.shape:
            cluster(options.ranks, options.shape)
            check()
            for model in options.models or DENSE:
                measured("shaped", compare_shaped(model, options.ranks, options.shape))
        else:
            for kind, ranks in (("emulated", options.emulated), ("real", options.real)):
                for model in (options.models or MODELS) if ranks else ():
                    measured(kind, compare(model, kind, ranks, options))
    except PdcompileError as error:
        raise SystemExit(f"error: {error}") from None
    if options.write:
        write(options.write, f"--write {options.write}")


def measured(kind: str, outcome: Outcome) -> None:
    show(outcome)
    keep(kind, outcome)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--steps", type=int, default=3, help="minibatches a round (default 3)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a minibatch (default 8)")
    parser.add_argument("--emulated", type=int, default=4, help="ranks that wait (default 4)")
    parser.add_argument("--real", type=int, default=2, help="ranks that compute (default 2)")
    parser.add_argument("--models", nargs="+", choices=CHAINS, metavar="MODEL",
                        help=f"{', '.join(MODELS)}; with --shape {', '.join(DENSE)}")  # fmt: skip
    parser.add_argument("--only", nargs="+", help="contestants whose name contains one of these")
    parser.add_argument(
        "--no-memory", action="store_true", help="leave the peaks out: half as long"
    )
    parser.add_argument("--shape", metavar="RATE", help="links of so many bits a second: 100mbit")
    parser.add_argument(
        "--python", action="store_true", help="what Python takes for an instruction, no more"
    )
    parser.add_argument("--ranks", type=int, default=2, help="with --shape, --python (default 2)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a page as there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
