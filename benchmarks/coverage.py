"""Table of the real models that are compiled, with whether stages are the model to the last bit.

    python benchmarks/coverage.py                          # the whole zoo
    python benchmarks/coverage.py --only gpt2 t5 --quick
    python benchmarks/coverage.py --family timm --jobs 2
    python benchmarks/coverage.py --peers peers.jsonl --write    # benchmarks/results/coverage.md

Every model runs in a process of its own with limits of time and memory.  Exit code 1 when a
model that could be built did not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the results depend on it
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.zoo.case import Entry  # noqa: E402
from tests.zoo.check import Report  # noqa: E402
from tests.zoo.isolate import CPU_SECONDS, checked, judged, preload  # noqa: E402
from tests.zoo.models import FAMILIES, chosen  # noqa: E402
from tests.zoo.table import page, summary  # noqa: E402

TABLE = ROOT / "benchmarks" / "results" / "coverage.md"

Judged = dict[str, tuple[str, str]]  # front end -> (result, reason)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    warnings.simplefilter("ignore")
    try:
        entries = chosen(tuple(given.only), tuple(given.family))
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    for entry in entries:
        if entry.missing:
            print(f"left out  {entry.name}: {entry.missing}")
    entries = tuple(entry for entry in entries if not entry.missing)
    preload(entries)
    reports, peers = _run(entries, given)
    passed = sum(report.passed for report in reports)
    print(summary(reports, peers))
    if given.json:
        lines = [{**r.to_dict(), "peers": peers.get(r.name, {})} for r in reports]
        Path(given.json).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if given.write:
        TABLE.write_text(page(reports, peers, quick=given.quick))
        print(f"written: {TABLE.relative_to(ROOT)}")
    return int(passed < len(reports))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--family", nargs="+", default=[], choices=FAMILIES)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--quick", action="store_true", help="few cuts, with dropout only")
    parser.add_argument("--seconds", type=int, default=CPU_SECONDS, help="CPU limit of a model")
    parser.add_argument(
        "--peers",
        metavar="FILE",
        help="torch's own front ends as well, one line a model in FILE; those in it are not rerun",
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/coverage.md")
    parser.add_argument("--json", metavar="FILE", help="one report a line")
    return parser


def _run(
    entries: Sequence[Entry], given: argparse.Namespace
) -> tuple[list[Report], dict[str, Judged]]:
    reports: list[Report] = []
    peers = _known(given.peers) if given.peers else {}

    def one(entry: Entry) -> tuple[Report, Judged]:
        report = checked(entry, thorough=not given.quick, cpu_seconds=given.seconds)
        if not given.peers:
            return report, {}
        return report, peers.get(entry.name) or judged(entry, cpu_seconds=given.seconds)

    with ThreadPoolExecutor(given.jobs) as pool:
        for report, others in pool.map(one, entries):
            print(report.line(), flush=True)
            for name, (result, reason) in others.items():
                print(f"    {name:30} {result} {reason}", flush=True)
            reports.append(report)
            if others and report.name not in peers:
                peers[report.name] = others
                with open(given.peers, "a", encoding="utf-8") as file:
                    print(json.dumps({"name": report.name, "peers": others}), file=file)
    own = {report.name for report in reports}
    return reports, {name: others for name, others in peers.items() if name in own}


def _known(path: str) -> dict[str, Judged]:
    """Findings of an earlier run on other front ends, by model; nothing of ours is in it."""
    if not Path(path).exists():
        return {}
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return {data["name"]: data["peers"] for data in map(json.loads, lines)}


if __name__ == "__main__":
    sys.exit(main())
