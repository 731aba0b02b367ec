"""One process whose forks are ranks, for all workers that share the tests.

It listens from the start, and imports what ranks need when somebody first asks; it ends with the
process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 180  # generous: the machine may be busy
_HOST, _PORT = "127.0.0.1", "PDCOMPILE_TESTS_FORKING_PORT"
_started: list[subprocess.Popen[bytes]] = []  # referred to, so that their pipes stay open


def start() -> None:
    """Start the process; this one and those that it starts find it by the environment."""
    with socket.create_server((_HOST, 0)) as listening:
        handle = listening.fileno()
        command = [sys.executable, "-m", "tests.helpers.forks", str(handle)]
        _started.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[handle], cwd=ROOT, env=environment()
            )
        )
        os.environ[_PORT] = str(listening.getsockname()[1])


def environment() -> dict[str, str]:
    """Variables of processes that tests start: one thread, and `tests.helpers` to import."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def forks(asked: list[dict[str, object]]) -> list[int]:
    """Exit codes of these ranks (see `tests.helpers.forks`), that of a killed one negative."""
    asking = _asking()
    print(json.dumps(asked), file=asking, flush=True)
    ranks = json.loads(asking.readline())
    late = threading.Timer(TIMEOUT_SECONDS, _kill, [ranks])
    late.start()
    try:
        codes: list[int] = json.loads(asking.readline())
    finally:
        late.cancel()
    return codes


@cache
def _asking() -> TextIO:
    if _PORT not in os.environ:
        start()
    return socket.create_connection((_HOST, int(os.environ[_PORT]))).makefile("rw")


def _kill(ranks: list[int]) -> None:
    for one in ranks:
        os.kill(one, signal.SIGKILL)
