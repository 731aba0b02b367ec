"""One process whose forks are ranks, for all workers that share the tests.

It listens from the start, and imports what ranks need when somebody first asks; it ends with the
process that started it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 280  # generous: the machine may be busy; CI ends a test after 300
_PLACE = "PDCOMPILE_TESTS_FORKING"  # its socket, in a folder of this user alone


def start() -> None:
    """Start the process; this one and those that it starts find it by the environment."""
    place = f"{tempfile.mkdtemp()}/asked"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        handle = listening.fileno()
        command = [sys.executable, "-m", "tests.helpers.forks", str(handle)]
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[handle], cwd=ROOT, env=environment()
        )
    atexit.register(server.communicate)  # which closes its standard input, and so ends it
    os.environ[_PLACE] = place


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
    if _PLACE not in os.environ:
        start()
    with socket.socket(socket.AF_UNIX) as connection:  # open until its file is closed
        connection.connect(os.environ[_PLACE])
        return connection.makefile("rw")


def _kill(ranks: list[int]) -> None:
    for one in ranks:
        os.kill(one, signal.SIGKILL)
