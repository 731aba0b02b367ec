"""Run a script on several ranks: real torchrun, real gloo, a rendezvous of its own."""

from __future__ import annotations

import os
import socket
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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", str(_write(script, folder)), *arguments]
    return _finish(_start(command, folder, env or {}))


def processes(script: str, num_ranks: int, folder: Path, *arguments: str) -> Run:
    """The same without torchrun, which would end the other ranks as soon as one has died."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(_write(script, folder)), *arguments]
    started = [_start(command, folder, {**common, "RANK": str(rank)}) for rank in range(num_ranks)]
    runs = [_finish(process) for process in started]
    failed = [run.code for run in runs if run.code]
    return Run(failed[0] if failed else 0, "".join(run.output for run in runs))


def _write(script: str, folder: Path) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return path


def _start(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        start_new_session=True,
    )


def _finish(process: subprocess.Popen[str]) -> Run:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return Run(-9, f"{output}\nkilled after {TIMEOUT_SECONDS} s")
    return Run(process.returncode, output)
