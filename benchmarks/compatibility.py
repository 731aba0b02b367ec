"""Table of the releases of torch, transformers and timm that pass the tests, and compile the zoo.

    python benchmarks/compatibility.py 2.11.0 2.13.0 2.15.0            # the fast tests
    python benchmarks/compatibility.py 2.15.0 --newest --models        # the zoo, newest libraries

Each release of torch runs in the environment that ``make venv TORCH=…`` makes (with NEWEST=1 for
--newest; the pinned one in .venv).  benchmarks/results/compatibility.md gets a row for each
environment, and keeps its other rows.  Exit code 1 when a test failed, or a model that could be
built did not pass.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "results" / "compatibility.md"
ROWS = "<!-- written by benchmarks/compatibility.py -->\n"
NOT_RUN = "not run"
SHOWN = ("torch", "python", "transformers", "timm")
VERSIONS = f"""
import platform
from importlib.metadata import PackageNotFoundError, version
for name in {SHOWN}:
    try:
        print(platform.python_version() if name == "python" else version(name))
    except PackageNotFoundError:
        print("none")
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Findings in one environment."""

    torch: str
    python: str
    transformers: str
    timm: str
    tests: str = NOT_RUN
    models: str = NOT_RUN
    date: str = ""

    @property
    def environment(self) -> tuple[str, ...]:
        return astuple(self)[: len(SHOWN)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("releases", nargs="+", metavar="TORCH", help="releases such as 2.15.0")
    parser.add_argument("--newest", action="store_true", help="newest transformers and timm")
    parser.add_argument("--models", action="store_true", help="the zoo instead of the tests")
    parser.add_argument("--slow", action="store_true", help="the slow tests too")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    given = parser.parse_args(arguments)
    worst = 0
    for release in given.releases:
        python = _environment(release, newest=given.newest)
        row = Row(*_output(python, "-c", VERSIONS).split(), date=f"{datetime.now(UTC):%Y-%m-%d}")
        print(f"== {', '.join(f'{n} {v}' for n, v in zip(SHOWN, row.environment, strict=True))}")
        if given.models:
            code, text = _shown(
                python, "benchmarks/coverage.py", "--quick", f"--jobs={given.workers}"
            )
            row = replace(row, models=models_of(text))
        else:
            select = () if given.slow else ("-m", "not slow")
            code, text = _shown(
                python, "-m", "pytest", "-q", "-n", str(given.workers), "--dist", "loadfile",
                "-p", "no:cacheprovider", *select,
            )  # fmt: skip
            row = replace(row, tests=tests_of(text) + (", slow ones too" if given.slow else ""))
        worst = max(worst, code)
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), row), encoding="utf-8")
    return int(worst != 0)


def tests_of(text: str) -> str:
    """Counts from pytest's last line: ``2101 passed, 0 failed, 12 skipped``."""
    last = text.rstrip().splitlines()[-1] if text.strip() else ""
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", last)}
    if "passed" not in counts:
        raise SystemExit(f"pytest did not come to an end: {last}")
    failed = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    return f"{counts['passed']} passed, {failed} failed, {counts.get('skipped', 0)} skipped"


def models_of(text: str) -> str:
    """``173 of 175`` from what benchmarks/coverage.py prints."""
    found = re.search(r"^(\d+ of \d+) models pass", text, re.MULTILINE)
    if found is None:
        raise SystemExit("benchmarks/coverage.py did not come to an end")
    return found.group(1)


def written(page: str, row: Row) -> str:
    """The page with this row; what this run did not look at is kept from an earlier one."""
    before, _, after = page.partition(ROWS)
    _, _, after = after.partition(ROWS)
    rows = {one.environment: one for one in rows_of(page)}
    old = rows.get(row.environment, row)
    rows[row.environment] = replace(
        row,
        tests=old.tests if row.tests == NOT_RUN else row.tests,
        models=old.models if row.models == NOT_RUN else row.models,
    )
    ordered = sorted(rows.values(), key=lambda one: [*map(_number, one.environment)])
    titles = [field.name if field.name != "python" else "Python" for field in fields(Row)]
    lines = [titles, ["---"] * len(titles), *map(astuple, ordered)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{before}{ROWS}{table}{ROWS}{after}"


def rows_of(page: str) -> Iterator[Row]:
    """The rows that the page has."""
    for line in page.partition(ROWS)[2].partition(ROWS)[0].splitlines()[2:]:
        yield Row(*(cell.strip() for cell in line.strip("|").split("|")))


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _environment(release: str, *, newest: bool) -> Path:
    """The interpreter of an environment, which is made where it is missing."""
    pinned = f"torch=={release}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    given = [] if pinned else [f"TORCH={release}"]
    given += ["NEWEST=1"] if newest else []
    name = ".venv" + ("" if pinned else f"-torch-{release}") + ("-newest" if newest else "")
    python = ROOT / name / "bin" / "python"
    if not python.exists():
        subprocess.run(["make", "venv", *given], cwd=ROOT, check=True)
    return python


def _output(python: Path, *arguments: str) -> str:
    return subprocess.run(
        [str(python), *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def _shown(python: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a run, which is printed as it comes."""
    lines = []
    with subprocess.Popen(
        [str(python), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return run.returncode, "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
