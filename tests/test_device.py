"""Stages on a GPU that is simulated: the results of the CPU, in an order that a GPU would keep."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.hardware import devices
from pdcompile.runtime.device import Deferred, DeviceFailed, Fetched, QueuedDevice, Starter
from pdcompile.runtime.transport.launch import DataPath
from pdcompile.runtime.transport.links import Working
from tests.helpers.alike import COMMON, PLANNED, compiled
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, mlp, unet
from tests.helpers.simulated_gpu import GPU, Event, SimulatedGpu, Stream
from tests.test_device_order_run import LOCAL, SINGLE, trained
from tests.test_runtime_distributed import BITWISE, FAILURES, OWN_LOOP

ROOT = Path(__file__).parent.parent
ONE_OF_TWO_CALLS_AGO = "Loss.wait"

SIMULATED = """
import os
os.environ["PDCOMPILE_TRANSPORT"] = {transport!r}
from tests.helpers.simulated_gpu import SimulatedGpu
gpu = SimulatedGpu()
gpu.__enter__()
"""
IN_THE_END = """
# Where the pipeline has failed, transports are left with what they had.
found = {one for one in gpu.violations if "is freed while" not in one or not "FAILED"}
assert not found, sorted(found)[:10]
say("in order,", "copied" if gpu.copied_bytes else "nothing was copied")
"""

FREED = """
import ctypes, os, resource
import torch
from tests.helpers.models import mlp
import pdcompile

def kept():
    pdcompile.compile(mlp(), torch.zeros(4, 16), stages=2, microbatches=2, progress=False)
    faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(3):  # of more bytes than any that glibc keeps by itself
        torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return faults[3] - faults[2] < 1000

os.environ["MALLOC_ARENA_MAX"] = "4"
print(kept())
del os.environ["MALLOC_ARENA_MAX"]
print(kept() == hasattr(ctypes.CDLL(None), "mallopt"))
"""


def test_freed_memory_is_used_again_unless_the_environment_tunes_malloc() -> None:
    others = {name: v for name, v in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FREED]
    assert subprocess.check_output(command, env=others, cwd=ROOT, text=True) == "False\nTrue\n"


# -- in one process ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "options"),
    [
        *(pytest.param(*one, marks=pytest.mark.slow) for one in LOCAL),
        (mlp, {"schedule": "1f1b", "stages": 2}),
        pytest.param(
            unet, {"schedule": "1f1b", "stages": 2, "recompute": True}, marks=pytest.mark.slow
        ),
        pytest.param(
            partial(gpt, dropout=0.1), {"schedule": "1f1b", "stages": 2, "max_grad_norm": None},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_results_are_those_of_the_cpu_and_everything_is_in_order(
    build: Any, options: dict[str, Any]
) -> None:
    expected = trained(build, options)
    with SimulatedGpu() as gpu:
        found = trained(build, options)
    assert gpu.violations == []
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert gpu.ops["stream 1"] > 100
    assert gpu.ops["stream 2"]


def test_the_host_waits_for_no_loss_but_that_of_two_calls_ago() -> None:
    with SimulatedGpu() as gpu:
        pipe = compiled(mlp, stages=2, schedule="1f1b", max_grad_norm=None).prepare()
        x, y = batch_for(mlp(), 8)
        before, losses = len(gpu.waits), []
        for _ in range(2):
            losses.append(pipe.step(x, target=y).loss)
            assert len(gpu.waits) == before
        losses.append(pipe.step(x, target=y).loss)
        assert [ONE_OF_TWO_CALLS_AGO in place for place in gpu.waits[before:]] == [True]
        assert [loss.done() for loss in losses] == [True, False, False]
        assert losses[1].wait().device == devices.HOST
        assert len(gpu.waits) == before + 2
    assert gpu.violations == []


def test_clipping_waits_for_the_norms() -> None:
    with SimulatedGpu() as gpu:
        pipe = compiled(mlp, stages=2, schedule="1f1b", max_grad_norm=1.0).prepare()
        x, y = batch_for(mlp(), 8)
        before = len(gpu.waits)
        pipe.step(x, target=y)
        assert {place.partition(" < ")[2].partition(" <")[0] for place in gpu.waits[before:]} == {
            "Norms.wait"
        }
    assert gpu.violations == []


def test_parameters_stay_the_same_objects_and_move() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.register_buffer("scale", torch.full((16,), 2.0))
            self.also = self.scale

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1], dtype=x.dtype)  # of nothing that is on a device
            made: Tensor = self.second(self.first(x * self.scale + places))
            return made

    with SimulatedGpu() as gpu:
        model = Counting()
        weight = model.first.weight
        pipe = pdcompile.compile(
            model, (torch.ones(8, 16),), example_target=torch.ones(8, 16),
            loss_fn=nn.functional.mse_loss, stages=2, **PLANNED,
        ).prepare()  # fmt: skip
        assert model.first.weight is weight
        assert gpu.memory(weight).kind == gpu.memory(model.scale).kind == "device"
        result = pipe.step(torch.ones(8, 16), target=torch.ones(8, 16))
        assert gpu.memory(result.outputs).kind == "device"
        assert all(gpu.memory(one).kind == "host" for one in pipe.full_state_dict().values())
        assert weight.grad is None
    assert gpu.violations == []


ABSENT = """
class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return None

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.second(NoGradient.apply(torch.relu(self.first(x))))

def absent(stages):
    torch.manual_seed(0)
    model, x = Model(), torch.ones(8, 16)
    start = model.first.weight.detach().clone()
    pipe = by_hand(model, stages, x, x, loss_fn=torch.nn.functional.mse_loss, microbatches=4,
                   optimizer=partial(torch.optim.AdamW, lr=0.1), schedule="1f1b").prepare()
    assert "NoGradient" in str(pipe._session.compiled.sources.files["stage_1.py"])
    assert "NoGradient" not in str(pipe._session.compiled.sources.files["stage_0.py"])
    before = len(gpu.waits)
    for _ in range(2):
        pipe.step(x, target=x)
    assert len(gpu.waits) == before, gpu.waits[before:]
    pipe.flush()
    assert 0 not in pipe.stages or torch.equal(model.first.weight, start)
    pipe.close()

absent(2)
"""


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [(1, "tags"), pytest.param(2, "tags", marks=pytest.mark.slow),
     pytest.param(2, "nccl", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_gradient_that_is_absent_is_known_to_the_host(
    ranks: int, transport: str, tmp_path: Path
) -> None:
    """A missing gradient of one stage reaches the other as none, and nobody reads the device."""
    script = SIMULATED.format(transport=transport) + COMMON + ABSENT + IN_THE_END
    if ranks == 1:
        script = script.replace("absent(2)", "os.environ.pop('WORLD_SIZE')\nabsent(2)")
    run = processes(script, ranks, tmp_path)
    assert run.code == 0, run
    assert run.output.count("in order, copied") == ranks, run


# -- whatever is left out is noticed ---------------------------------------------------------------


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def _without(name: str, nth: int) -> Iterator[None]:
    """Streams whose name ends with this number do not wait."""
    plain = getattr(Stream, name)

    def waits(self: Stream, other: Any) -> None:
        if not self.name.endswith(f" {nth}"):
            plain(self, other)

    with mock.patch.object(Stream, name, waits):
        yield


@contextmanager
def _user_goes_on() -> Iterator[None]:
    plain = Stream.wait_stream

    def waits(self: Stream, other: Any) -> None:
        if self.name != "user":
            plain(self, other)

    with mock.patch.object(Stream, "wait_stream", waits):
        yield


@contextmanager
def _not_pinned() -> Iterator[None]:
    with mock.patch.object(QueuedDevice, "pinned_like", lambda _, tensor: torch.empty_like(tensor)):
        yield


@contextmanager
def _blocking() -> Iterator[None]:
    plain = torch.Tensor.copy_

    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        return plain(self, source)

    with mock.patch.object(torch.Tensor, "copy_", copied):
        yield


IN_ORDER: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "compute does not wait for the user": partial(_without, "wait_stream", 1),
    "the user does not wait for compute": _user_goes_on,
    "a copy to the host begins before its source is there": partial(_without, "wait_stream", 2),
    "host memory is not pinned": _not_pinned,
    "the host reads a loss that has not come": partial(
        mock.patch.object, Event, "synchronize", _nothing
    ),
}


@pytest.mark.parametrize("what", IN_ORDER)
def test_what_a_device_does_not_wait_for_is_noticed(what: str) -> None:
    with SimulatedGpu() as gpu, IN_ORDER[what]():
        pipe = compiled(mlp, stages=2, schedule="1f1b", max_grad_norm=None).prepare()
        x, y = batch_for(mlp(), 8)
        for _ in range(3):
            inputs = x.to(GPU) * 1.0 if "user" in what else x
            float(pipe.step(inputs, target=y).loss)
            for parameter in pipe.parameters() if "user" in what else ():
                parameter.data.add_(0.0)
    assert gpu.violations, what


def test_a_copy_that_the_host_waits_for_is_noticed() -> None:
    with SimulatedGpu() as gpu, _blocking():
        pipe = compiled(mlp, stages=2, schedule="1f1b", max_grad_norm=None).prepare()
        x, y = batch_for(mlp(), 8)
        before = len(gpu.waits)
        pipe.step(x, target=y)
        assert len(gpu.waits) > before


# -- on ranks --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "said", "transport"),
    [
        *((BITWISE, 2, "equal", path) for path in DataPath),
        *(
            (OWN_LOOP, 2, "refused: GPT: this model is split over several ranks", path)
            for path in DataPath
        ),
        (FAILURES, 3, "packages rank", "tags"),
        (FAILURES, 3, "packages rank", "nccl"),
    ],
)
def test_scripts_of_the_runtime_on_a_device(
    script: str, ranks: int, said: str, transport: str, tmp_path: Path
) -> None:
    end = IN_THE_END.replace("FAILED", "yes" if script is FAILURES else "")
    run = processes(SIMULATED.format(transport=str(transport)) + script + end, ranks, tmp_path)
    assert run.code == 0, run
    assert run.output.count(said) == ranks, run
    assert run.output.count("in order, copied") == ranks, run


REPLICAS = (
    COMMON
    + """
import ast
from tests.test_device_order_run import trained
for name, options in ast.literal_eval(sys.argv[1]):
    trained(getattr(models, name), {"outputs": "all", **options})
"""
    + IN_THE_END
)


@pytest.mark.slow
@pytest.mark.parametrize("transport", DataPath)
def test_replicas_norms_and_stale_schedules_on_a_device(transport: str, tmp_path: Path) -> None:
    cases = [
        ("convnet", {"schedule": "1f1b", "replicas": (1, 2)}),
        ("gpt", {"schedule": "2bw", "replicas": (2, 1)}),
        ("mlp", {"schedule": "stash", "replicas": (1, 2), **SINGLE}),
    ]
    script = SIMULATED.format(transport=str(transport)) + REPLICAS
    run = processes(script, 3, tmp_path, repr(cases))
    assert run.code == 0, run
    assert run.output.count("in order, copied") == 3, run


CLOSED = (
    SIMULATED.format(transport="nccl")
    + COMMON
    + """
pipe = compiled(models.mlp, stages=2, schedule="1f1b", max_grad_norm=None)
x, y = models.batch_for(models.mlp(), 8)
pipe.step(x, target=y)  # and nobody looks at what comes of it
pipe.close()
"""
    + IN_THE_END.replace("FAILED", "")
)


@pytest.mark.slow
def test_what_is_queued_is_sent_before_connections_close(tmp_path: Path) -> None:
    run = processes(CLOSED, 2, tmp_path)
    assert run.output.count("in order, copied") == 2, run


SEALED = (
    SIMULATED
    + COMMON
    + """
os.environ["PDCOMPILE_DEBUG"] = "messages"
from tests.test_device_order_run import trained
trained(models.mlp, {"schedule": "1f1b"})
"""
    + IN_THE_END
)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tags", "nccl"])
def test_sealed_messages_on_a_device(transport: str, tmp_path: Path) -> None:
    run = processes(SEALED.replace("{transport!r}", repr(transport)), 2, tmp_path)
    assert run.output.count("in order, copied") == 2, run


MUTANTS = (
    SIMULATED.format(transport="tags")
    + COMMON
    + """
from unittest import mock
from pdcompile.runtime.device import Deferred, Fetched
from tests.test_device_order_run import trained

def at_once(self, run=Deferred.run):
    self._done = None
    run(self)

def forgotten(self, tensor, done=None, source=None, starter=None, init=Fetched.__init__):
    init(self, tensor, done, None, starter)

def noticed():
    found = trained(models.mlp, OPTIONS)
    return bool(gpu.violations) or not all(map(torch.equal, expected, found))

OPTIONS = {"schedule": "interleaved", "stages": 4, "outputs": "all"}
expected = trained(models.mlp, OPTIONS)
replace = mock.patch.object
say("as it is", noticed())
for name, patch in (("sent before it has come", replace(Deferred, "run", at_once)),
                    ("forgotten too early", replace(Fetched, "__init__", forgotten))):
    with patch:
        say(name, noticed())
    gpu.violations.clear()
"""
)


@pytest.mark.slow
def test_what_a_message_does_not_wait_for_is_noticed(tmp_path: Path) -> None:
    run = processes(MUTANTS, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("as it is False") == 2, run
    for what in ("sent before it has come", "forgotten too early"):
        assert f"{what} True" in run.output, run


# -- what begins when a device is past something ---------------------------------------------------


class _Place:
    def __init__(self, error: Exception | None = None) -> None:
        self.waited, self._error = False, error

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True
        if self._error is not None:
            raise self._error


def test_things_begin_in_order_when_the_device_is_there() -> None:
    told: list[int] = []

    class Work:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            told.append(self.number)

    starter, places = Starter(), [_Place() for _ in range(3)]
    fetched = [Fetched(torch.ones(1), place, None, starter) for place in places]
    works = [one.then(partial(Work, n)) for n, one in enumerate(fetched)]
    for work in reversed(works):
        work.wait()
    assert told == [2, 1, 0]
    assert all(place.waited for place in places)
    assert Fetched(torch.ones(1)).then(lambda: "at once") == "at once"


def test_errors_of_the_device_and_of_the_peer_are_two() -> None:
    def lost(*_: Any) -> Any:
        raise RuntimeError("[file] Connection closed by peer")

    starter = Starter()
    with pytest.raises(RuntimeError, match="Connection closed"):
        Fetched(torch.ones(1), _Place(), None, starter).then(lost).wait()
    failed = _Place(RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        Working(Fetched(torch.ones(1), failed, None, starter), 1, lost, torch.ones(1)).wait()


def test_what_is_abandoned_begins_nothing() -> None:
    begun: list[int] = []
    waiting = Deferred(_Place(), lambda: begun.append(1))
    starter = Starter()
    starter._waiting = [waiting]
    starter.abandon()
    waiting.wait()
    assert begun == []
