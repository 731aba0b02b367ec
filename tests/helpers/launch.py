"""Run a script on several ranks: real processes, real gloo, a rendezvous of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch.distributed as dist

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
        env=_environment(),
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
    codes = _forks(asked)
    printed = "".join(output.read_text(encoding="utf-8") for output in outputs)
    return Run(next((code for code in codes if code), 0), printed)


def _write(script: str, folder: Path) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return path


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@cache
def _forking() -> subprocess.Popen[str]:
    """The process whose forks are ranks; it ends when these tests have."""
    command = [sys.executable, "-m", "tests.helpers.forks"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=_environment(),
    )


def _forks(asked: list[dict[str, object]]) -> list[int]:
    """Exit codes of these ranks, that of a killed one negative."""
    process = _forking()
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(asked), file=process.stdin, flush=True)
    started = json.loads(process.stdout.readline())
    late = threading.Timer(TIMEOUT_SECONDS, _kill, [started])
    late.start()
    try:
        codes: list[int] = json.loads(process.stdout.readline())
    finally:
        late.cancel()
    return codes


def _kill(started: list[int]) -> None:
    for one in started:
        os.kill(one, signal.SIGKILL)
