"""One run of the command in a process of its own: its answer, CPU seconds and peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]  # of the checkout, where `benchmarks` is found


@dataclass(frozen=True, slots=True)
class Run:
    """`cpu_seconds` (user and system) and `peak_bytes` are of the whole process, start included."""

    answer: dict[str, Any]
    cpu_seconds: float
    peak_bytes: int
    exit_code: int


def plan(*arguments: str) -> Run:
    """``python -m benchmarks.published plan ARGUMENTS --json``, on one core.

    Raises:
        RuntimeError: it printed no JSON object; carries what it said.
    """
    command = [sys.executable, "-m", "benchmarks.published", "plan", *arguments, "--json"]
    code, out, error, cpu_seconds, peak_bytes = measured(command)
    try:
        answer = json.loads(out)
    except ValueError as cause:
        raise RuntimeError(f"{' '.join(command)}: exit code {code}\n{error}") from cause
    if "error" in answer:
        raise RuntimeError(f"{' '.join(command)}: {answer['error']['message']}")
    return Run(answer, cpu_seconds, peak_bytes, code)


def measured(command: list[str]) -> tuple[int, str, str, float, int]:
    """Exit code, stdout, stderr, CPU seconds, peak resident bytes of one process."""
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None
    assert child.stderr is not None
    # stderr is a few lines at most without a terminal: it cannot fill its pipe and block.
    out, error = child.stdout.read(), child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    return child.returncode, out, error, seconds, usage.ru_maxrss * 1024


def startup() -> tuple[float, float]:
    """CPU seconds of a command that does nothing, and of the same with OR-Tools imported."""
    program = "import benchmarks.published.command{}"
    plain, solver = (
        min(measured([sys.executable, "-c", program.format(more)])[3] for _ in range(3))
        for more in ("", "; from ortools.sat.python import cp_model")
    )
    return plain, solver
