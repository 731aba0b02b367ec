"""Faults: what ranks record, and what the others find, say and do when one of them fails."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults import KINDS, Case, drawn, run
from pdcompile.errors import ConfigError, ContractError, LaunchError
from pdcompile.runtime.failure.first_cause import NOBODY, Failures, FirstCause, Verdict, verdict_of
from pdcompile.runtime.failure.instruction_log import KEPT, InstructionLog, Outside, decoded
from pdcompile.runtime.failure.watchdog import Termination
from pdcompile.runtime.transport.contract import (
    HEADER_LENGTH,
    MAX_DIMS,
    Channel,
    Expected,
    Note,
    checksum,
    read_note,
)
from pdcompile.runtime.transport.launch import debugs_messages
from pdcompile.schedule import Action, Instruction, Kind
from tests.helpers.launch import processes
from tests.helpers.pipelines import by_hand
from tests.test_runtime_exit_hooks import Store

INSTRUCTIONS = st.builds(
    Instruction,
    st.sampled_from(list(Action)),
    st.integers(-1, 63),
    st.integers(-3, 3),
    st.integers(-1, 1023),
    st.integers(-1, 4000),
    st.integers(-1, 511),
)


@given(st.lists(INSTRUCTIONS, min_size=1, max_size=2 * KEPT), st.integers(3, 10**9))
def test_a_log_says_what_began_last(begun: list[Instruction], base: int) -> None:
    log = InstructionLog()
    other = InstructionLog(log.path)
    log.path.unlink()
    assert other.last().doing is Outside.CALL
    assert other.before() == []
    entries = [other.last()]
    for ins in begun:
        log.begin(ins, base)
        found = other.last()
        assert found == decoded(log.packed())
        assert found.doing == ins._replace(minibatch=base + ins.minibatch, lag=0, target=-1)
        assert found.waits == (ins.action.phase.name in ("WAIT_RECV", "WAIT_SEND", "WAIT"))
        assert found.awaited == (ins.peer if found.waits else -1)
        assert other.before() == entries[-KEPT + 1 :]
        entries.append(found)


def test_others_are_waited_for_in_meetings_alone_outside_of_instructions() -> None:
    log = InstructionLog()
    log.path.unlink()
    for where in Outside:
        log.enter(where)
        entry = log.last()
        assert entry.doing is where
        assert entry.waits == (where in (Outside.MEETING, Outside.PARTS))
        assert entry.awaited == -1
    log.enter(Outside.CALL)
    with log.meeting():
        assert str(log.last()) == "the beginning or end of a call"
    assert str(log.last()) == "a call, between its instructions"
    with pytest.raises(RuntimeError, match="lost"), log.meeting():
        raise RuntimeError("lost")
    assert log.last().waits  # it keeps what the rank was in


def test_a_log_is_elsewhere_where_memory_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(Path("/dev/shm").glob("pdcompile-*"))
    log = InstructionLog()
    assert log.path.parent != Path("/dev/shm")
    assert set(Path("/dev/shm").glob("pdcompile-*")) <= before
    other = InstructionLog(log.path)
    log.path.unlink()
    log.enter(Outside.MEETING)
    assert other.last() == log.last()
    assert other.last().waits


def test_a_log_outlives_its_process(tmp_path: Path) -> None:
    log = InstructionLog()
    program = (
        "import os; from pathlib import Path\n"
        "from pdcompile.runtime.failure.instruction_log import InstructionLog\n"
        "from pdcompile.schedule import Action, Instruction\n"
        f"log = InstructionLog(Path({str(log.path)!r}))\n"
        "log.begin(Instruction(Action.WAIT_RECV, 1, 0, 2, 3, 0), 7)\n"
        "os.abort()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, stderr=subprocess.PIPE)
    assert done.returncode == -signal.SIGABRT, done.stderr
    log.path.unlink()
    assert str(log.last()) == "stage 1, wait_recv of minibatch 7, microbatch 2"


@given(st.sampled_from(Verdict), st.integers(-1, 99), st.text())
def test_a_cause_survives_the_store(verdict: Verdict, rank: int, text: str) -> None:
    cause = FirstCause(verdict, rank, text)
    assert FirstCause.unpacked(json.dumps(cause)) == cause


def test_verdicts_of_errors_and_their_exit_codes() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert verdict_of(caught.value) is verdict_of(MemoryError()) is Verdict.OUT_OF_MEMORY
    assert verdict_of(RuntimeError("shapes differ")) is verdict_of(ValueError()) is Verdict.CRASH
    assert sorted(one.exit_code for one in Verdict) == [81, 82, 83, 84, 85]


def test_the_first_cause_wins() -> None:
    store = Store()
    Failures(store, 0, 3).report("first", Verdict.DEADLOCK, NOBODY)
    Failures(store, 1, 3).report("second")
    assert Failures(store, 2, 3).known() == FirstCause(Verdict.DEADLOCK, NOBODY, "first")


@given(st.binary(min_size=1, max_size=64), st.integers(0, 9), st.integers(0, 99), st.data())
def test_a_sealed_message_is_refused_once_anything_differs(
    payload: bytes, serial: int, minibatch: int, data: st.DataObject
) -> None:
    channel, plan, order = Channel(Kind.VALUE, 3, 1), 0xABC, (0,)
    flat = torch.tensor(list(payload), dtype=torch.uint8)
    expected = Expected((len(payload),), torch.uint8, minibatch)
    said = Note(
        plan, channel, minibatch, flat.dtype, expected.shape, order, serial, True, checksum(flat)
    )
    packed = said.packed()
    note = read_note(channel, packed, expected, plan, serial)
    assert note == said
    note.check(flat)
    flat[data.draw(st.integers(0, flat.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ContractError, match=f"message {serial} from rank 1 has checksum "):
        note.check(flat)
    field = data.draw(st.sampled_from([*range(7), 9, HEADER_LENGTH - 2 * MAX_DIMS]))
    packed[field] ^= 1 << data.draw(st.integers(0, 62))
    with pytest.raises(ContractError, match="rank 1 is about to send "):
        read_note(channel, packed, expected, plan, serial)


def test_a_sealed_message_names_what_differs() -> None:
    channel = Channel(Kind.VALUE, 3, 1)
    packed = Note(6, channel, 5, torch.float32, (), (), 4).packed()
    with pytest.raises(ContractError) as caught:
        read_note(channel, packed, Expected((), torch.float32, 6), 7, 5)
    expected = "plan 6 instead of 7, minibatch 5 instead of 6, number 4 instead of 5"
    assert caught.value.message.endswith(expected)


@pytest.mark.parametrize("name", ["stall_timeout", "progress_timeout"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "soon"])
def test_timeouts_are_seconds(name: str, value: object) -> None:
    import pdcompile

    with pytest.raises(ConfigError, match=name):
        pdcompile.compile(torch.nn.Linear(2, 2), **{name: value})  # type: ignore[arg-type]


def test_a_process_alone_has_no_watchdog() -> None:
    """SIGTERM ends it as before, too."""
    pipe = by_hand(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2))), 2,
                   torch.randn(4, 4), torch.randn(4, 4), microbatches=2,
                   loss_fn=torch.nn.functional.mse_loss)  # fmt: skip
    pipe.prepare()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    pipe.close()


def test_a_handler_that_the_program_sets_later_has_sigterm() -> None:
    """Saving on SIGTERM works; only where that handler calls the one before it, the rank ends."""
    termination, taken = Termination(), list[int]()
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.raise_signal(signal.SIGTERM)
        assert termination.arrived()
        signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
        signal.raise_signal(signal.SIGTERM)
        assert taken == [signal.SIGTERM]
        assert not termination.arrived()
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGTERM, lambda *given: before(*given))  # type: ignore[operator]
        signal.raise_signal(signal.SIGTERM)
        assert termination.arrived()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        termination.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def right(case: Case) -> None:
    found = run(case, launched=False)
    assert found.right, f"{case}\n{found.output}"
    assert not found.left, found
    assert found.seconds < 60, found  # only against waiting for ever: the machine may be busy


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_one_report_names_the_rank_that_failed(kind: str) -> None:
    right(Case(kind, ranks=3, rank=1, schedule="1f1b", minibatch=2, instruction=7))


LONG_SAVE = """
import os, sys, time
from pathlib import Path
import torch
from pdcompile.runtime.failure.watchdog import Watchdog
from pdcompile.runtime.state import save_checkpoint
from tests.helpers import models
from tests.helpers.pipelines import by_hand

inputs, target = models.batch_for("mlp", 8)
pipe = by_hand(models.mlp(), 2, inputs, target, loss_fn=models.loss_for("mlp"), microbatches=4,
               schedule="1f1b", optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
               progress_timeout=100.0).prepare()
monotonic, passed = time.monotonic, [0.0]
time.monotonic = lambda: monotonic() + passed[0]
beat, beats = Watchdog._beat, []
Watchdog._beat = lambda *given: beats.append(beat(*given))
write = save_checkpoint.write_stages
def slow(*given):
    passed[0] += 300.0
    seen = len(beats)
    while len(beats) < seen + 4:  # all ranks have told each other how long they have been in there
        time.sleep(0.1)
    return write(*given)
save_checkpoint.write_stages = slow  # on all ranks: none of them begins an instruction meanwhile
pipe.step(inputs, target=target)
pipe.save(Path(sys.argv[1]))
pipe.step(inputs, target=target)
pipe.close()
print("saved by rank", os.environ["RANK"], flush=True)
"""


def test_a_save_that_takes_long_is_no_deadlock(tmp_path: Path) -> None:
    done = processes(LONG_SAVE, 2, tmp_path, str(tmp_path / "saved"))
    assert done.output.count("saved by rank") == 2, done.output


LAST_WORDS = """
import atexit, os, sys, threading, time
from tests.helpers import models
from tests.helpers.pipelines import by_hand

rank = os.environ["RANK"]
atexit.register(lambda: print(f"rank {rank} at exit", flush=False))
threading.Thread(target=lambda: (time.sleep(0.5), print(f"rank {rank} thread"))).start()
inputs, target = models.batch_for("gpt", 8)
pipe = by_hand(models.gpt(layers=2), 2, inputs, target, loss_fn=models.loss_for("gpt"),
               microbatches=4, schedule="1f1b", optimizer=None).prepare()
if rank == "0":
    inputs[5, 3] = 1000
if len(sys.argv) > 1:  # a program that gets over it ends as every program does
    try:
        pipe.step(inputs, target=target)
    except Exception:
        print(f"rank {rank} goes on")
    sys.exit(7)
print(f"rank {rank} begins")
pipe.step(inputs, target=target)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("catches", [False, True])
def test_a_rank_that_failed_ends_at_once_and_loses_nothing(catches: bool, tmp_path: Path) -> None:
    done = processes(LAST_WORDS, 2, tmp_path, *["catch"] * catches)
    assert done.code == (7 if catches else 1), done
    for rank in range(2):
        for said in ("goes on" if catches else "begins", "thread", "at exit"):
            assert f"rank {rank} {said}\n" in done.output, done.output
    assert catches or done.output.count("Traceback") == 2, done.output


@pytest.mark.parametrize("wanted", ["message", "all"])
def test_an_unknown_kind_of_debugging_is_refused(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCOMPILE_DEBUG", wanted)
    with pytest.raises(LaunchError, match=f"PDCOMPILE_DEBUG is '{wanted}'"):
        debugs_messages()
    monkeypatch.setenv("PDCOMPILE_DEBUG", "messages")
    assert debugs_messages()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_drawn_faults(number: int) -> None:
    right(drawn(number, seed=1))


@pytest.mark.slow
def test_torchrun_ends_nobody_before_the_report() -> None:
    """It sends SIGTERM a tenth of a second after the first rank has ended."""
    for instruction in (3, 9):
        case = Case("kill", ranks=2, rank=1, schedule="1f1b", minibatch=3, instruction=instruction)
        found = run(case, launched=True)
        assert found.right, found.output


ORPHANS = """
import os, signal, sys, time
from pathlib import Path
import torch
from tests.helpers import models
from tests.helpers.pipelines import by_hand

inputs, target = models.batch_for("mlp", 8)
pipe = by_hand(models.mlp(), 2, inputs, target, loss_fn=models.loss_for("mlp"), microbatches=4,
               schedule="1f1b", optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)).prepare()
Path(sys.argv[1], f"rank.{os.environ['RANK']}").write_text(str(os.getpid()))
while True:
    pipe.step(inputs, target=target)
"""


ORPHANS_OF_A_CAPTURE = """
import os, sys, threading, time
from pathlib import Path
import torch
import pdcompile

def tell():
    Path(sys.argv[1], f"rank.{os.environ['RANK']}").write_text(str(os.getpid()))

class Slow(torch.nn.Linear):
    def forward(self, x):
        tell()
        time.sleep(600)

if os.environ["RANK"] != "0":
    threading.Timer(2.0, tell).start()  # it waits for rank 0's plan then
pdcompile.compile(Slow(4, 4), torch.zeros(8, 4), loss_fn=torch.nn.functional.mse_loss,
                  example_target=torch.zeros(8, 4), microbatches=2, optimizer=None).prepare()
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [ORPHANS, ORPHANS_OF_A_CAPTURE])
def test_no_rank_is_left_when_torchrun_is_killed(tmp_path: Path, program: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = str(Path(__file__).parents[1])
    launcher = subprocess.Popen(
        [*command, str(script), str(tmp_path)], stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    paths = [tmp_path / f"rank.{rank}" for rank in range(2)]
    deadline = time.monotonic() + 120
    while not all(path.exists() and path.read_text() for path in paths):
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ends = [os.pidfd_open(int(path.read_text())) for path in paths]
    launcher.kill()
    launcher.wait()
    for fd in ends:
        poll = select.poll()
        poll.register(fd)
        assert poll.poll(30_000), "a rank still runs"
        os.close(fd)


def test_every_kind_of_fault_has_a_verdict() -> None:
    assert {verdict for verdict, _ in KINDS.values()} <= {"", *Verdict}
