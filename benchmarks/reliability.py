"""Kills and flipped bits: what is resumed is the training that never stopped.

    python benchmarks/reliability.py [--resumes 50] [--kills 1000] [--flips 1000] [--ranks 10]
        [--restarts 100]

--resumes: trainings in one process, killed at random moments (also while they save) and resumed,
on another cut each time where that changes no bit, until they end; weights and optimizer are then
compared with a training that never stopped, to the last bit.
--kills: processes that save after every minibatch, killed at random moments; what is found has to
be whole, and the training after the minibatch that it says.
--flips: single bits of files of a checkpoint; each has to be found, with the file and the tensor.
--ranks: trainings on two and three ranks over gloo, of which one is killed at a random moment, each
resumed until it ends; replicated ones may differ by 2e-5.
--restarts: the same under torchrun --max-restarts, which starts the ranks again by itself.

Prints a row each; the exit code is 1 where anything went wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PDCOMPILE_CACHE", "off")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from tests.helpers.crashes import (
    Outcome,
    flipped_bits,
    killed_ranks,
    killed_saves,
    killed_trainings,
)

ANY_CUT = (1, 2, 3, 4)
SCHEDULES = [("1f1b", ANY_CUT), ("2bw", ANY_CUT), ("stash", (3,)), ("vsync", (3,))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resumes", type=int, default=50)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'trial':<10}{'count':>7}{'kills':>7}{'in a save':>11}{'nothing yet':>13}{'wrong':>7}")
    wrong, seed = 0, asked.seed
    for name, count, run in (
        (
            "resumes",
            asked.resumes,
            lambda place, n: killed_trainings(place, SCHEDULES, n, seed),
        ),
        ("kills", asked.kills, lambda place, n: killed_saves(place, n, seed)),
        ("flips", asked.flips, lambda place, n: flipped_bits(place, n, seed)),
        ("ranks", asked.ranks, lambda place, n: killed_ranks(place, n, seed)),
        (
            "restarts",
            asked.restarts,
            lambda place, n: killed_ranks(place, n, seed, restarts=True),
        ),
    ):
        if not count:
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            found: Outcome = run(Path(place), count)
        shown = (found.found, found.kills, found.during_save, found.nothing, len(found.wrong))
        text = "".join(f"{n:>{w}}" for n, w in zip(shown, (7, 7, 11, 13, 7), strict=True))
        print(f"{name:<10}{text}   {time.perf_counter() - began:.0f} s", flush=True)
        for line in found.wrong[:5]:
            print(f"  {line}")
        wrong += len(found.wrong)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
