"""Runs scripts in forks of a process that has imported everything: a rank starts at once.

A socket, whose handle is the argument, is for those who ask, each of whom a fork serves.  Each line
that comes in asks for one run, a JSON list of ranks: {"script", "arguments", "folder",
"environment", "output"}.  Each line that goes out answers: the process numbers as soon as the
ranks run, the exit codes when all have ended.  A fork runs its script as the interpreter would: as
`__main__`, with its own exit code, hooks and last line.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import types
from contextlib import suppress
from typing import Any

ended = 0  # the exit code


@atexit.register  # the first, so that it runs after those of all modules
def end() -> None:
    """End as the interpreter does, but for taking all modules apart, which takes most of the time
    of a small rank."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or nobody reads it
            stream.flush()
    os._exit(ended)


listening = socket.socket(fileno=int(sys.argv[1]))


def wait_for_somebody() -> None:
    """Return when somebody connects; end where standard input has, and with it all tests."""
    if sys.stdin in select.select([sys.stdin, listening], [], [])[0]:
        shutil.rmtree(os.path.dirname(listening.getsockname()))
        sys.exit(0)


wait_for_somebody()  # before anything is imported
# Builds of torch for CUDA bring it, and it complains at the end of a fork that it was not freed.
sys.modules["triton"] = None  # type: ignore[assignment]

import pytest  # noqa: E402, F401
import torch  # noqa: E402

import pdcompile  # noqa: E402

# What most ranks need, so that no fork has to read it again.
from examples.gpt import loss_fn  # noqa: E402
from pdcompile import driver, reference  # noqa: E402, F401
from pdcompile.releases.torch_internals import import_compiler  # noqa: E402
from pdcompile.report import progress  # noqa: E402
from tests.helpers import models, pipelines  # noqa: E402, F401
from tests.helpers.captures import capture_once  # noqa: E402
from tests.helpers.divided import batch_of, model_of  # noqa: E402


def rank_to_run() -> dict[str, Any]:
    """Return what a fork has to run; the first process stays in here until all tests have ended,
    its forks that serve until those whom they serve have."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks that serve
    while True:
        wait_for_somebody()
        connection, _ = listening.accept()
        with connection:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return served(connection)


def served(connection: socket.socket) -> dict[str, Any]:
    """Return what a fork of this one has to run, which stays in here until nobody asks any more."""
    listening.close()
    with connection.makefile("rw") as asking:
        for line in asking:
            started = []
            for rank in json.loads(line):
                child = os.fork()
                if child == 0:
                    return rank  # type: ignore[no-any-return]
                started.append(child)
            print(json.dumps(started), file=asking, flush=True)
            # One after the other: how rank 1 ended stays known while rank 0 runs.
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]
            print(json.dumps(codes), file=asking, flush=True)
    sys.exit(0)


def become(rank: dict[str, Any]) -> None:
    """Take on the folder, environment, arguments and output of a process of its own."""
    output = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(here, there)
    os.chdir(rank["folder"])
    os.environ.update(rank["environment"])
    sys.argv = [rank["script"], *rank["arguments"]]
    sys.path[0] = os.path.dirname(rank["script"])


import_compiler()
torch.set_num_threads(1)
# The first compilation of a process takes three times as long as the next ones; and most scripts
# whose ranks are parts of a stage capture this model.
driver.capture = capture_once  # type: ignore[attr-defined]
progress.FIRST = 3600.0  # seconds; what ranks print is compared, however busy the machine is
with torch.random.fork_rng():
    inputs, target = batch_of("gpt")
    pdcompile.compile(
        model_of("gpt"), inputs, example_target=target, loss_fn=loss_fn, microbatches=4,
        costs="estimated", verify="off", progress=False,
    )  # fmt: skip
del inputs, target
gc.collect()
gc.freeze()  # a collection in a fork would copy all that is shared
rank = rank_to_run()
become(rank)
main = types.ModuleType("__main__")
main.__file__ = rank["script"]
sys.modules["__main__"] = main
with open(rank["script"], encoding="utf-8") as file:
    code = compile(file.read(), rank["script"], "exec")
try:
    exec(code, main.__dict__)
except BaseException as error:
    said = error.code if isinstance(error, SystemExit) else 1
    ended = said if isinstance(said, int) else int(said is not None)
    raise
