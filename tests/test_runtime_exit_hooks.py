"""Programs that end between two calls: the other ranks learn why."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdcompile.errors import InputError
from pdcompile.runtime.failure import exit_hooks
from pdcompile.runtime.failure.exit_hooks import PipelineExit
from pdcompile.runtime.failure.first_cause import Failures, describe
from pdcompile.runtime.failure.host_peers import exit_status, identity
from pdcompile.runtime.transport.links import PeerLost
from tests.helpers.alike import COMMON
from tests.helpers.launch import processes, torchrun


class Store(dict[str, Any]):
    """The part of torch's store that failures use."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def compare_set(self, key: str, expected: str, value: str) -> None:
        assert expected == ""
        self.setdefault(key, value.encode())

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def add(self, key: str, by: int) -> int:
        self[key] = self.setdefault(key, 0) + by
        return int(self[key])

    def text(self, key: str) -> str:
        return str(self.get(key, b""), "utf-8")


class Owner:
    """Part of a session that its exit needs."""

    def __init__(self) -> None:
        self.causes: list[str] = []

    def leave(self, cause: str) -> None:
        self.causes.append(cause)


@pytest.fixture(autouse=True)
def before() -> Iterator[Any]:
    """Every test leaves the interpreter's hooks as they were."""
    hooks = sys.excepthook, threading.excepthook
    yield hooks
    assert (sys.excepthook, threading.excepthook) == hooks
    assert exit_hooks._open == []


def raised(text: str = "a bug") -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_an_error_that_nobody_caught_is_told_and_the_programs_hook_still_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: seen.append(given))
    store, error = Store(), raised()
    one = PipelineExit(store, 1)
    one.called("step", 2)
    sys.excepthook(ValueError, error, error.__traceback__)
    assert seen == [(ValueError, error, error.__traceback__)]
    line = "(test_runtime_exit_hooks.py:"
    assert store.text("raised/1").startswith(f"rank 1: ValueError: a bug {line}")
    assert "`raise ValueError(text)`), after step (minibatch 2)" in store.text("raised/1")
    one.called("eval_step", -1)
    sys.excepthook(ValueError, error, error.__traceback__)
    assert "after eval_step (evaluation 0)" in store.text("raised/1")
    one.over()


def test_a_hook_that_the_program_calls_itself_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *given: None)
    store, owner = Store(), Owner()
    one = PipelineExit(store, 0)
    one.leave = exit_hooks.weakref.WeakMethod(owner.leave)
    sys.excepthook(ValueError, raised(), None)
    assert owner.causes == []
    assert store.text("raised/0")
    one.called("step", 1)
    assert store.text("raised/0") == ""
    monkeypatch.setattr(exit_hooks, "_goes_on", lambda: False)
    sys.excepthook(ValueError, raised(), None)
    assert len(owner.causes) == 1
    assert exit_hooks._open == []


def test_hooks_are_put_back_in_whatever_order_pipelines_end(before: Any) -> None:
    first, second = PipelineExit(Store(), 0), PipelineExit(Store(), 0)
    assert sys.excepthook is not before[0]
    first.over()
    first.over()
    assert sys.excepthook is not before[0]
    second.over()
    assert (sys.excepthook, threading.excepthook) == before


def test_a_hook_that_the_program_puts_on_top_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: seen.append("first"))
    one = PipelineExit(Store(), 0)
    below = sys.excepthook

    def own(*given: Any) -> None:
        seen.append("own")
        below(*given)

    monkeypatch.setattr(sys, "excepthook", own)
    one.over()
    assert sys.excepthook is own
    other = PipelineExit(Store(), 0)
    error = raised()
    sys.excepthook(ValueError, error, None)
    assert seen == ["own", "first"]
    other.over()
    assert sys.excepthook is own


def test_only_the_thread_that_makes_the_calls_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    store = Store()
    one = PipelineExit(store, 0)

    def fails(calls: bool) -> None:
        if calls:
            one.called("step", 0)
        raise ValueError("in a thread")

    for calls in (False, True):
        thread = threading.Thread(target=fails, args=(calls,))
        thread.start()
        thread.join()
        assert ("ValueError: in a thread" in store.text("raised/0")) is calls
    one.over()


def test_a_pipeline_that_was_let_go_of() -> None:
    store, owner = Store(), Owner()
    one = PipelineExit(store, 1)
    one.belongs_to(owner)
    one.called("step", 4)
    del owner
    assert "rank 1 let go of the pipeline without pipe.close(), after step (minibatch 4)" in (
        store.text("left/1")
    )


def test_a_forked_process_says_nothing() -> None:
    store, error = Store(), raised()
    one = PipelineExit(store, 1)
    one._process += 1
    sys.excepthook(ValueError, error, None)
    one.end()
    assert set(store) == {"process/1"}


def test_an_error_without_a_line_of_the_programs() -> None:
    assert describe(2, KeyboardInterrupt(), None, 0) == "rank 2: KeyboardInterrupt"
    refused = InputError("too wide", where="img", remedy="pad it")
    told = describe(0, refused, None, 0, ", after step (minibatch 2)")
    assert told == "rank 0: InputError: too wide, after step (minibatch 2)\n  where: img"


def ended(how: str) -> str:
    """Facts known of a process that ended like this and was not waited for."""
    script = "import os, sys; from pdcompile.runtime.failure.host_peers import identity; "
    script += f"print(identity()); {how}"
    command = [sys.executable, "-u", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        return exit_status(process.stdout.readline().strip())


def test_how_a_process_ended() -> None:
    assert ended("os._exit(7)") == ended("sys.exit(7)") == "its exit code is 7"
    assert ended("os.kill(os.getpid(), 9)").startswith("it was ended by SIGKILL, as the system")
    assert ended("os.abort()").startswith("it was ended by SIGABRT, a crash outside")
    assert exit_status(identity(), wait=False) == ""
    assert exit_status("") == exit_status("another machine 1 2") == ""
    boot, names, pid, start = identity().split()
    assert (
        exit_status(f"{boot} {names} {pid} {int(start) + 1}") == ""
    )  # the number's earlier process
    assert exit_status(f"{boot} {names} 4194305 {start}") == ""  # beyond any process number


def test_what_is_said_of_a_rank_that_is_gone() -> None:
    def told(**said: str) -> str:
        store = Store()
        for kind, text in said.items():
            store.set(f"{kind}/1", text)
        failures = Failures(store, 0, 3)
        lost = PeerLost(1, "[file] Connection closed by peer. advice")
        message = failures.cause(lost, "rank 0, stage 0").message
        assert Failures(store, 2, 3).cause(PeerLost(0, "x"), "rank 2").message == message
        return message

    assert told(raised="rank 1: ValueError: x", left="left").endswith(
        "first: rank 1: ValueError: x"
    )
    assert told(refused="rank 1 refused", left="left").endswith("first: rank 1 refused")
    noticed = "noticed by rank 0, stage 0: lost the connection to rank 1: Connection closed by peer"
    assert told(left="rank 1 left").endswith(f"first: rank 1 left; {noticed}")
    how = "(killed, out of memory, crashed, or it left early)"
    assert told().endswith(f"first: rank 1 ended without an error of its own {how}; {noticed}")


PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from pdcompile.errors import RankError
from tests.helpers import models
from tests.helpers.pipelines import by_hand

rank = int(os.environ["RANK"])
hooks = sys.excepthook, threading.excepthook

def bug():
    raise ValueError("between two calls")

def main():
    inputs, target = models.batch_for("mlp", 8)
    options = dict(loss_fn=models.loss_for("mlp"), microbatches=4, schedule="1f1b",
                   optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    pipe = by_hand(models.mlp(), 2, inputs, target, **options).prepare()
    pipe.step(inputs, target=target)
    pipe.flush()
    Path(f"stepped.{rank}").touch()
    while not all(Path(f"stepped.{r}").exists() for r in range(2)):
        time.sleep(0.01)
    if rank == 1:
        HOW
    try:
        pipe.step(inputs, target=target)
    except RankError as error:
        sys.stdout.write(f"[{rank}] {error.message}\\n")
        sys.stdout.flush()
"""


@pytest.mark.slow
def test_an_error_between_calls_reaches_other_ranks_under_torchrun(tmp_path: Path) -> None:
    hook = "sys.excepthook = lambda *given: print('own hook saw', given[0].__name__)\n"
    run = torchrun(PROGRAM.replace("HOW", "bug()") + hook + "main()\n", 2, tmp_path)
    assert run.code != 0, run
    assert "own hook saw ValueError" in run.output, run
    assert (
        "[0] another rank failed first: rank 1: ValueError: between two calls (script.py:"
    ) in run.output, run
    assert '`raise ValueError("between two calls")`), after flush (minibatch 1)' in run.output, run


THREAD = """
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "start", "told"),
    [
        ("raise KeyboardInterrupt", "main()", "rank 1: KeyboardInterrupt (script.py:"),
        ("bug()", THREAD, "rank 1: ValueError: between two calls (script.py:"),
        ("sys.exit(3)", "main()", "rank 1 ended with sys.exit or its last line and without"),
        ("os._exit(4)", "main()", "rank 1 ended without an error of its own (its exit code is 4"),
    ],
)
def test_ends_between_calls(tmp_path: Path, how: str, start: str, told: str) -> None:
    run = processes(f"{PROGRAM.replace('HOW', how)}\n{start}\n", 2, tmp_path)
    assert "[0] another rank failed first: " in run.output, run
    assert told in run.output, run


CLOSED = """
    assert (sys.excepthook, threading.excepthook) != hooks
    pipe.close()
    assert (sys.excepthook, threading.excepthook) == hooks
    print("closed\\n")

main()
"""


@pytest.mark.slow
def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    run = processes(PROGRAM.replace("HOW", "pass") + CLOSED, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("closed") == 2, run


BESIDE_SUMS = (
    COMMON
    + """
from tests.helpers.alike import PLANNED
import pdcompile

class Fails(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        Fails.calls += 1
        if rank == 1 and Fails.calls == 5:
            raise ValueError("a bug of the user's")
        return gradient

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.second(Fails.apply(torch.relu(self.first(x))))

torch.manual_seed(0)
x = torch.randn(8, 16)
pipe = pdcompile.compile(
    Model(), (x,), example_target=x, loss_fn=torch.nn.functional.mse_loss, stages=2,
    replicas=(2, 1), schedule="2bw", microbatches=4, max_grad_norm=0.5, **PLANNED,
    optimizer=partial(torch.optim.SGD, lr=0.1), constraints=(pdcompile.CutBefore("second"),),
).prepare()
try:
    for _ in range(6):
        float(pipe.step(x, target=x).loss)
except Exception as error:
    say(type(error).__name__, str(error).splitlines()[0])
"""
)


@pytest.mark.slow
def test_sums_that_wait_for_each_other_do_not_keep_an_error_from_the_others(
    tmp_path: Path,
) -> None:
    """Two ranks are in a sum of norms that the third will never begin: that one has failed, and
    neither may wait for the end of the sum before it closes what the other waits for."""
    run = processes(BESIDE_SUMS, 3, tmp_path)
    assert run.code == 0, run
    assert run.output.count("RankError another rank failed first") == 2, run
    assert "[1] ValueError a bug of the user's" in run.output, run
