"""Run a script on several ranks: real torchrun, real gloo, a rendezvous of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 180  # generous: the machine may be busy


@dataclass(frozen=True)
class Run:
    """What became of a launch: exit code and what the ranks printed."""

    code: int
    output: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output}"


def torchrun(
    script: str, num_ranks: int, folder: Path, *arguments: str, env: dict[str, str] | None = None
) -> Run:
    """Write the script (dedented) into the folder and run it on `num_ranks` ranks.

    Every rank has one thread, and can import `tests.helpers`.  Ranks that still run after the
    time limit are killed, all of them.
    """
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", str(path), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return Run(-9, f"{output}\nkilled after {TIMEOUT_SECONDS} s")
    return Run(process.returncode, output)
