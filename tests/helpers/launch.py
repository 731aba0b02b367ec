"""Run a script on several ranks: real processes, real gloo, a rendezvous of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tests.helpers.forking import ROOT, TIMEOUT_SECONDS, environment, forks

__all__ = ["ROOT", "Run", "processes", "torchrun"]


@dataclass(frozen=True)
class Run:
    """End of a launch: exit code and what the ranks printed."""

    code: int
    output: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output}"


def torchrun(
    script: str,
    num_ranks: int,
    folder: Path,
    *arguments: str,
    restarts: int = 0,
    seconds: int = TIMEOUT_SECONDS,
) -> Run:
    """Write the script (dedented) into the folder and run it on `num_ranks` ranks.

    Every rank has one thread, and can import `tests.helpers`.  torchrun starts all again after a
    failure, `restarts` times.  Ranks that still run after so many `seconds` are killed, all of
    them.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", f"--max-restarts={restarts}"]
    command += [str(_write(script, folder)), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment(),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Run(-9, f"{output}\nkilled after {seconds} s")
    return Run(process.returncode, output)


def processes(script: str, num_ranks: int, folder: Path, *arguments: str) -> Run:
    """The same without torchrun, which would end the other ranks as soon as one has died.

    The ranks are forks of one process that has imported torch, so that they start at once.
    """
    # What ranks tell each other outlives each of them, as under torchrun.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    path, outputs = _write(script, folder), [folder / f"output.{r}" for r in range(num_ranks)]
    asked = [
        {
            "script": str(path),
            "arguments": arguments,
            "folder": str(folder),
            "environment": {**common, "RANK": str(rank)},
            "output": str(output),
        }
        for rank, output in enumerate(outputs)
    ]
    codes = forks(asked)
    printed = "".join(output.read_text(encoding="utf-8") for output in outputs)
    return Run(next((code for code in codes if code), 0), printed)


def _write(script: str, folder: Path) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return path
