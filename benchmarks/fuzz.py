"""Damaged and hostile files of every format that is read: refused, or read, and never executed.

    python benchmarks/fuzz.py [--files 5000] [--format plan graph] [--seed 0]
    python benchmarks/fuzz.py --write benchmarks/results/reliability.md

Every file is made of a whole one, or of one that reached lines of pdcompile which none before it
had reached (`tests/helpers/fuzzing.py`).  A reader has to give a value or raise an error of
pdcompile; that it compiles, executes, imports or starts anything, opens a file elsewhere or writes
one is seen by Python's audit events.  Findings are saved, and the exit code is 1 where there are
any.  `--write` replaces the table of a page.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PDCOMPILE_CACHE", "off")
sys.path.insert(0, str(Path(__file__).parent.parent))

from rich.console import Console
from rich.progress import Progress

from benchmarks.published.tests.helpers.file_formats import MAKERS as PUBLISHED
from tests.helpers.file_formats import MAKERS, formats
from tests.helpers.fuzzing import Outcome, fuzz

FORMATS = {**MAKERS, **PUBLISHED}
BEGIN, END = "<!-- fuzzed files -->\n", "<!-- end of fuzzed files -->"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=5000, help="of each format")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=Path("findings"), help="folder of findings")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page whose table is replaced")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # a cached profile that is refused is only logged
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as bar:
        chosen = {name: FORMATS[name] for name in given.format}
        for kind in formats(Path(folder), chosen):
            task = bar.add_task(kind.name, total=given.files)
            outcomes.append(
                fuzz(kind, given.files, given.seed, lambda task=task: bar.advance(task))
            )
    text = table(outcomes)
    print(text)
    for one in outcomes:
        for number, finding in enumerate(one.findings):
            given.save.mkdir(parents=True, exist_ok=True)
            place = given.save / f"{one.name.replace(' ', '-')}-{number}"
            place.write_bytes(finding.data)
            print(f"{place}: {finding.what}")
    if given.write:
        page = given.write.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGIN)
        page = f"{head}{BEGIN}{text}\n{rest[rest.index(END) :]}"
        given.write.write_text(page, encoding="utf-8")
    return int(any(one.findings for one in outcomes))


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a line for each format."""
    lines = ["| format | files | reached new lines | read | refused | findings |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {one.name} | {one.files} | {one.kept} | {one.read} | {one.refused} | "
        f"{len(one.findings)} |"
        for one in outcomes
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
