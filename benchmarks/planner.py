"""The planner on other people's problems and on ours: objectives, proofs, seconds, memory.

    python benchmarks/planner.py [--only placement,pipedream,…] [--rows TEXT] [--write PAGE]

Sections: placement, pipedream, papers, piper, scale, own, real, auto, regret, parts,
parts_published, large, beside and random; --rows "Llama 7B" is for parts alone.
Without --only all run, which takes an hour and a half on one core.  What is printed is kept in
out/planner, so that --write can put together a page from sections that ran at different times
(--only none: run nothing more); sections that did not run stay as the page has them.
Published inputs are read from PDCOMPILE_REFERENCE (default: ../shared/reference).
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks.published

from planning import page
from planning.published import REFERENCE
from planning.tables import load, save

# Each in a process of its own: a child's peak memory, as the system counts it, starts at its
# parent's, and some sections grow.
SECTIONS = {
    "placement": "planning.placement",
    "pipedream": "planning.pipedream",
    "papers": "planning.papers",
    "piper": "planning.piper",
    "scale": "planning.scale",
    "own": "planning.own",
    "real": "planning.real",
    "auto": "planning.auto",
    "regret": "planning.regret",
    "parts": "planning.parts",
    "parts_published": "planning.parts_published",
    "large": "planning.large",
    "beside": "planning.beside",
    "random": "planning.agreement",
}
PUBLISHED = {"placement", "pipedream", "papers", "piper", "scale"}  # read inputs of others
KEPT = Path(__file__).parent.parent / "out" / "planner"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, or none")
    parser.add_argument("--rows", help="of parts, those of models and machines with this text")
    parser.add_argument("--write", type=Path, help="write the page with all sections here")
    options = parser.parse_args()
    chosen = [] if options.only == "none" else options.only.split(",")
    if options.rows is not None and chosen != ["parts"]:
        parser.error("--rows is for --only parts")
    unknown = sorted(set(chosen) - set(SECTIONS))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    for name in chosen:
        if name in PUBLISHED and not REFERENCE.is_dir():
            print(f"{name}: left out, no inputs at {REFERENCE} (set PDCOMPILE_REFERENCE)")
            continue
        if len(chosen) > 1:
            subprocess.run([sys.executable, __file__, "--only", name], check=True)
        else:
            run = importlib.import_module(SECTIONS[name]).run
            save(run() if options.rows is None else run(options.rows), KEPT / f"{name}.json")
    if options.write is not None:
        kept = [path for name in SECTIONS if (path := KEPT / f"{name}.json").exists()]
        before = options.write.read_text(encoding="utf-8") if options.write.exists() else ""
        written = page.render([table for path in kept for table in load(path)], before)
        options.write.write_text(written, encoding="utf-8")
        print(f"written: {options.write}")


if __name__ == "__main__":
    main()
