"""CPU seconds of capture, planning and training steps against an older commit of pdcompile.

    python benchmarks/against.py COMMIT [--rounds 5] [--only capture] [--write PAGE]

The commit is unpacked into a temporary folder and run with the same Python and the same models.
Each round runs every case once with either code, the order alternating, each in a process of its
own on one thread, after one run that does not count (imports, caches).  The table has the median
seconds of both, and the median ratio of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from models import sample  # of this checkout: the file beside this one
from rich.console import Console
from rich.progress import track

HERE = Path(__file__).resolve().parent.parent

Case = Callable[[], Callable[[], Any]]


def capture(name: str) -> Callable[[], Any]:
    """Capture one of benchmarks/models.py, without its loss."""
    import pdcompile

    example = sample(name)
    return lambda: pdcompile.trace(example.model, example.inputs)


def plan(*arguments: str) -> Callable[[], Any]:
    """Plan with the command line, by estimated costs."""
    from pdcompile.cli import app

    def once() -> None:
        with open(os.devnull, "w") as nowhere:
            kept, sys.stdout = sys.stdout, nowhere
            try:
                app(["plan", *arguments, "--costs", "estimated"], standalone_mode=False)
            finally:
                sys.stdout = kept

    return once


def prepare(name: str) -> Callable[[], Any]:
    """Everything before the first step, unverified."""
    return lambda: _prepared(name, "1f1b")[0].close()


def steps(name: str, schedule: str) -> Callable[[], Any]:
    """Four training steps of two stages in one process."""
    pipe, batch = _prepared(name, schedule)

    def once() -> None:
        for _ in range(4):
            pipe.step(**batch)

    return once


def _prepared(name: str, schedule: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline of two stages, and the arguments of its steps."""
    import pdcompile

    example = sample(name)
    pipe = pdcompile.compile(
        example.model, loss_fn=example.loss_fn, stages=2, microbatches=2, schedule=schedule,
        costs="estimated", verify="off", progress=False,
    )  # fmt: skip
    batch = example.inputs if isinstance(example.inputs, dict) else {"x": example.inputs}
    if example.target is not None:
        batch = batch | {"target": example.target}
    pipe.prepare(**batch)
    return pipe, batch


CASES: dict[str, Case] = {
    **{f"capture {name}": partial(capture, name) for name in ("gpt2", "llama", "resnet50")},
    "plan examples/gpt.py, 4 stages": partial(plan, "examples/gpt.py:build", "--stages", "4"),
    "prepare gpt2": partial(prepare, "gpt2"),
    **{
        f"4 steps {name}, {schedule}": partial(steps, name, schedule)
        for name in ("gpt2", "resnet50")
        for schedule in ("1f1b", "2bw")
    },
}  # fmt: skip


def measure(case: str) -> float:
    """CPU seconds of one case in this process, after one run of it that does not count."""
    once = CASES[case]()
    once()
    began = time.process_time()
    once()
    return time.process_time() - began


def run(case: str, checkout: Path) -> float:
    """CPU seconds of one case in a process of its own, with the code of a checkout."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "PDCOMPILE_CACHE": "off",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--child", case],
        env=environment, cwd=checkout, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{case} failed with the code of {checkout}:\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def unpacked(commit: str, folder: Path) -> Path:
    """The files of a commit, below a folder."""
    archive, found = folder / "older.tar", folder / "older"
    subprocess.run(["git", "-C", HERE, "archive", "-o", archive, commit], check=True)
    with tarfile.open(archive) as opened:
        opened.extractall(found, filter="data")
    return found


def table(rows: dict[str, list[tuple[float, float]]], commit: str) -> str:
    """The Markdown table of all cases."""
    lines = [
        f"| case | at {commit}, CPU s | now, CPU s | now / then |",
        "|---|---:|---:|---:|",
    ]
    for case, pairs in rows.items():
        then, now = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        lines.append(f"| {case} | {then:.2f} | {now:.2f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", help="the older code: any name that git knows")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs (default 5)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", type=Path, help="put the table between the marks of this page")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(measure(arguments.child))
        return
    if not arguments.commit:
        parser.error("name the commit to compare with")
    cases = [case for case in CASES if arguments.only in case]
    rows: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        older = unpacked(arguments.commit, Path(folder))
        turns = [(case, r) for r in range(arguments.rounds) for case in cases]
        for case, r in track(turns, description="measuring", console=Console(stderr=True)):
            order = (older, HERE) if r % 2 == 0 else (HERE, older)
            seconds = {checkout: run(case, checkout) for checkout in order}
            rows[case].append((seconds[older], seconds[HERE]))
    text = table(rows, arguments.commit[:7])
    print(text)
    if arguments.write:
        page = arguments.write.read_text()
        head, _, rest = page.partition("<!-- table -->\n")
        arguments.write.write_text(
            head + "<!-- table -->\n" + text + rest[rest.index("<!-- end -->") :]
        )


if __name__ == "__main__":
    main()
