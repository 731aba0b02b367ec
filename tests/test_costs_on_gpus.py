"""Costs and memory of plans for GPUs, where CPU tensors and a clock stand for one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache as once
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pdcompile
from benchmarks import gpu as benchmark
from pdcompile.batch import example_call, resolve_batch
from pdcompile.driver import build
from pdcompile.errors import ConfigError, CostError
from pdcompile.hardware import devices
from pdcompile.ir.graph import OpGraph
from pdcompile.options import Options
from pdcompile.passes import trace
from pdcompile.passes.costs import (
    costed_ops,
    forecast,
    machines,
    structural_key,
    timing,
    tried_kernels,
)
from pdcompile.passes.costs.machines import calibrate
from pdcompile.passes.costs.timing import LEAST_QUEUED, WARMUPS, took
from pdcompile.passes.costs.workspaces import HOST, NEWER, OLDER, THREADS, VARIABLE, Kernels
from pdcompile.passes.profile import (
    NO_GPU_HERE,
    Profile,
    Sizes,
    apply,
    cache,
    distinct_calls,
    measure,
    other_device,
    stage_times,
)
from pdcompile.passes.profile.entries import Entry
from pdcompile.passes.profile.op_bench import starting
from tests.helpers import models
from tests.helpers.costed import profile

GPU = torch.device("cpu", 0)  # as an argument it is another device than "cpu"; tensors are alike
LENGTH = 50
NAME = "NVIDIA H100 80GB HBM3"


class Queue:
    """A device with a clock of its own: each run takes it some seconds, and queueing it others."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.occupied: list[float] = []

    def run(self, seconds: float, dispatch: float) -> None:
        self.host += dispatch
        self.device = max(self.device, self.host) + seconds

    def synchronize(self, device: torch.device) -> None:
        self.host = self.device = max(self.host, self.device)

    def occupy(self, seconds: float) -> None:
        self.occupied.append(seconds)
        self.device = max(self.device, self.host) + seconds

    def event(self) -> Any:
        queue = self

        class Event:
            def record(self) -> None:
                queue.device = self.at = max(queue.device, queue.host)

            def synchronize(self) -> None:
                queue.synchronize(GPU)

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * (end.at - self.at)

        return Event()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    made = Queue()
    monkeypatch.setattr(devices, "gpus", lambda: 1)
    monkeypatch.setattr(devices, "gpu", lambda _: GPU)
    monkeypatch.setattr(devices, "is_host", lambda device: device.index is None)
    monkeypatch.setattr(devices, "gpu_name", lambda _: NAME)
    monkeypatch.setattr(devices, "passing_bytes", lambda device, run: 0)
    monkeypatch.setattr(devices, "gpu_memory_bytes", lambda _: 80 * 10**9)
    monkeypatch.setattr(devices, "capability", lambda _: (9, 0))
    monkeypatch.setattr(devices, "hand_back", lambda _: None)
    monkeypatch.setattr(devices, "timed_event", made.event)
    monkeypatch.setattr(devices, "occupy", made.occupy)
    monkeypatch.setattr(devices, "synchronize", made.synchronize)
    monkeypatch.setattr(timing, "perf_counter", lambda: made.host)
    yield made
    for cached in (calibrate, starting):
        cached.cache_clear()


@pytest.fixture
def slow_queue(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """One on which every run takes what it takes here, and 1 us to be queued."""

    def timed(run: Callable[[], object], device: torch.device) -> float:
        began = perf_counter()
        run()
        return perf_counter() - began

    monkeypatch.setattr(machines, "GPU_SIZES", machines.HOST_SIZES)
    monkeypatch.setattr(timing, "timed", timed)
    monkeypatch.setattr(timing, "perf_counter", perf_counter)
    return queue


@once
def captured(name: str) -> tuple[nn.Module, OpGraph]:
    model: nn.Module = getattr(models, name)()
    inputs, target = models.batch_for(model, 4)
    flat = example_call(model, inputs, target)
    found = trace.capture(model, flat, resolve_batch(flat), models.loss_for(model))
    return model, found.train


@pytest.mark.parametrize(("seconds", "dispatch"), [(1e-3, 1e-5), (1e-6, 1e-5)])
def test_device_and_host_are_timed_apart(queue: Queue, seconds: float, dispatch: float) -> None:
    """Even where the device is done before the host has queued the next run."""
    runs = []

    def run() -> None:
        runs.append(1)
        queue.run(seconds, dispatch)

    found = took(lambda: run, GPU, 0.02)
    assert found.seconds == pytest.approx(seconds)
    assert found.dispatch_seconds == pytest.approx(dispatch)
    assert len(runs) >= WARMUPS + 1 + 2 * 2 * LEAST_QUEUED
    assert queue.occupied


def test_a_long_run_is_not_repeated_beyond_the_budget(queue: Queue) -> None:
    runs = []

    def run() -> None:
        runs.append(1)
        queue.run(3.0, 1e-5)

    assert took(lambda: run, GPU, 0.02).seconds == pytest.approx(3.0, rel=1e-4)
    assert len(runs) == WARMUPS + 1


def test_a_run_that_is_held_up_is_not_all_that_is_known_of_an_op(queue: Queue) -> None:
    """The first that is timed takes a second, longer than the budget."""
    runs = []

    def run() -> None:
        runs.append(1)
        queue.run(1.0 if len(runs) == WARMUPS else 1e-3, 1e-5)

    assert took(lambda: run, GPU, 0.02).seconds == pytest.approx(1e-3)
    assert len(runs) > WARMUPS + 1


def test_a_first_run_that_is_held_up_is_not_what_an_op_takes() -> None:
    times = [0.7, 1e-3, 2e-3]
    assert timing.typical(lambda: times.pop(0), 0.01) == 1e-3


def test_a_plan_for_gpus_is_measured_on_the_one_that_is_here(
    slow_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCOMPILE_CACHE", str(tmp_path / "cache"))
    model, graph = captured("convnet")
    # Enough for each op on a busy machine too: what takes longer than its part is run but once.
    found = measure(graph, model, microbatch_size=4, device_kind="cuda", budget_seconds=2.0)
    assert found.device == NAME
    assert {entry.key for entry in found.entries} == set(distinct_calls(graph, 4))
    assert all(entry.forward_dispatch_seconds > 0 for entry in found.entries)
    (file,) = (tmp_path / "cache").iterdir()
    environment = json.loads(file.read_text())["environment"]
    assert environment["device_kind"].startswith(NAME)
    assert environment["device_kind"] != cache.Environment.here(devices.HOST, 4).device_kind
    again = measure(graph, model, microbatch_size=4, device_kind="h100", budget_seconds=0.1)
    assert again.entries == found.entries
    told: list[str] = []
    Sizes(graph, model, (4,), device_kind="cuda", say=told.append).at(4)
    assert f"costs were measured on {NAME}: a microbatch of 4 takes it" in told[-1]
    on_host = measure(graph, model, microbatch_size=4, budget_seconds=0.1)
    assert on_host.device == "cpu"
    assert not any(entry.forward_dispatch_seconds for entry in on_host.entries)
    for kind, other in (("cuda", on_host), ("cpu", found)):
        with pytest.raises(CostError, match="its device is"):
            profile(graph, model, microbatch_size=4, costs=other, device_kind=kind)
    assert profile(graph, model, microbatch_size=4, costs=found, device_kind="cuda")


def test_what_does_not_fit_the_gpu_is_estimated(
    slow_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = captured("mlp")
    monkeypatch.setattr(devices, "gpu_memory_bytes", lambda _: 0)
    found = measure(graph, model, microbatch_size=4, device_kind="cuda", budget_seconds=0.1)
    assert found.entries == ()
    monkeypatch.setattr(devices, "gpu_memory_bytes", lambda _: 10**9)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("pdcompile.passes.profile.op_bench.measure", full)
    found = measure(graph, model, microbatch_size=4, device_kind="cuda", budget_seconds=0.1)
    costs = [op.cost for op in apply(graph, found, device_kind="cuda").ops]
    assert {cost.origin for cost in costs if cost is not None} == {"estimated"}


@pytest.mark.parametrize("dispatch", [0.0, 1e-3, 8e-3])
def test_the_host_counts_for_as_long_as_the_device_waits_for_it(dispatch: float) -> None:
    """Over the whole graph the larger of both sums, however it is distributed over the ops."""
    _, graph = captured("mlp")
    ops = distinct_calls(graph, 4)
    entries = [
        Entry(key, "op", 1e-3 * n, 2e-3 * n, dispatch, 2 * dispatch) for n, key in enumerate(ops)
    ]
    costs = [
        op.cost
        for op in apply(graph, Profile("2", NAME, 4, tuple(entries))).ops
        if op.cost is not None and op.cost.origin == "measured"
    ]
    work = sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
    known = {entry.key: entry for entry in entries}
    calls = [known[key] for key in _keys(graph) if key in known]
    device = sum(one.forward_seconds + one.backward_seconds for one in calls)
    assert work == pytest.approx(max(device, 3 * dispatch * len(calls)))


def _keys(graph: OpGraph) -> list[str]:
    return [structural_key(call) for call in costed_ops(graph, 4)]


def test_a_plan_says_where_costs_come_from_another_device(queue: Queue) -> None:
    assert other_device("measured", "cpu") == other_device("estimated", "a100-80") == ""
    assert other_device("measured", "cuda") == other_device("measured", "H100") == ""
    assert f"measured on {NAME}, and the plan is for a100-80" in other_device("measured", "a100-80")


def test_a_plan_for_gpus_says_that_there_was_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 0)
    said = other_device("measured", "h100")
    assert "measured on a CPU" in said
    assert "--costs estimated" in said
    assert "--costs estimated" not in other_device("measured", "cuda")
    model = models.mlp()
    pipe = partial(build, model, example_call(model, *models.batch_for(model, 8)))
    for kind, expected in (("h100", True), ("cpu", False)):
        options = Options(
            loss_fn=models.loss_for(model), cluster=pdcompile.Cluster.local(2, kind=kind),
            microbatches=4, verify="off", time_limit=0, refine=False,
        )  # fmt: skip
        plan = pipe(options).plan
        notes = plan.notes
        assert (NO_GPU_HERE in notes) is expected
        assert (plan.costs == "estimated costs") is expected
        refined = replace(options, refine=True)
        if expected:
            with pytest.raises(ConfigError, match="costs are estimated"):
                pipe(refined)
        assert any("workspace on GPUs" in note for note in notes) is expected


def test_stages_are_timed_on_the_gpu(slow_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.mlp()
    before = {name: (one, one.clone()) for name, one in model.named_parameters()}
    seen = []
    kept_busy = timing.kept_busy

    def note(run: Callable[[], object], device: torch.device, queueing: float) -> float:
        seen.append(device)
        return kept_busy(run, device, queueing)

    monkeypatch.setattr(timing, "kept_busy", note)
    options = Options(
        loss_fn=models.loss_for(model), cluster=pdcompile.Cluster.local(2, kind="cuda"),
        microbatches=4, verify="off", time_limit=0, refine=True,
    )  # fmt: skip
    plan = build(model, example_call(model, *models.batch_for(model, 8)), options).plan
    assert any(note.startswith("stages measured") for note in plan.notes)
    assert seen
    assert {device.index for device in seen} == {0}
    for name, one in model.named_parameters():
        assert one is before[name][0]
        assert torch.equal(one, before[name][1])
        assert one.grad is None

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(stage_times, "_measure", full)
    notes = build(model, example_call(model, *models.batch_for(model, 8)), options).plan.notes
    assert "stages not timed: CUDA out of memory" in notes


@pytest.mark.parametrize(
    ("host", "device"), [((1e-3, 2e-3), (4e-3, 5e-3)), ((4e-3, 6e-3), (3e-3, 4e-3))]
)
def test_a_stage_takes_what_the_slower_of_host_and_device_takes(
    queue: Queue, host: tuple[float, float], device: tuple[float, float]
) -> None:
    stage: Any = SimpleNamespace(
        left={}, wiring=SimpleNamespace(outputs=(), differentiable=()),
        backward=lambda *_: queue.run(device[1], host[1]),
    )  # fmt: skip
    found = stage_times._measure(stage, lambda: queue.run(device[0], host[0]), 0.1, GPU)
    slower = max(host, device, key=sum)
    assert (found.forward_seconds, found.backward_seconds) == pytest.approx(slower)


# -- memory ----------------------------------------------------------------------------------------


def test_kernels_of_gpus_make_no_copies_and_multiply_in_a_workspace() -> None:
    _, graph = captured("convnet")
    placed = [0 if op.name == "conv1" else 1 for op in graph.ops]
    first = next(i for i, one in enumerate(placed) if one == 0)
    placed = [0 if i <= first else 1 for i in range(len(placed))]
    gpu = Kernels(copies=False, product_bytes=1 << 20)
    convolving, last = forecast(graph, placed, 2, 4, kernels=gpu)
    on_cpu = forecast(graph, placed, 2, 4)
    bare = forecast(graph, placed, 2, 4, kernels=replace(gpu, product_bytes=0))
    assert forecast(graph, placed, 2, 4, kernels=HOST) == on_cpu
    assert convolving == bare[0]  # it multiplies no matrices
    assert convolving.forward_workspace_bytes < on_cpu[0].forward_workspace_bytes
    assert last.saved_bytes == bare[1].saved_bytes == on_cpu[1].saved_bytes
    assert last.workspace_bytes == bare[1].workspace_bytes + (1 << 20)
    assert last.first_workspace_bytes == bare[1].first_workspace_bytes + (1 << 20)


def test_convolutions_are_tried_on_the_gpu_that_is_here(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, graph = captured("convnet")
    tried: list[Any] = []

    def passing(device: torch.device, run: Callable[[], Any]) -> int:
        tried.append(run())
        return 1 << 20

    monkeypatch.setattr(devices, "passing_bytes", passing)
    monkeypatch.setattr(tried_kernels, "_KNOWN", {})
    ops = [0] * len(graph.ops)
    gpu, bare = Kernels(False, gpu="some GPU"), Kernels(False)
    assert gpu.note() != bare.note()
    (more,), (less,) = (forecast(graph, ops, 1, 4, kernels=one) for one in (gpu, bare))
    assert more.saved_bytes == less.saved_bytes
    assert less.workspace_bytes < more.workspace_bytes <= less.workspace_bytes + (1 << 20)
    assert less.forward_workspace_bytes < more.forward_workspace_bytes <= 1 << 20
    assert tried
    assert not any(type(one).__name__ == "FakeTensor" for one in tried)
    count = len(tried)
    assert forecast(graph, [0] * len(graph.ops), 1, 4, kernels=gpu) == (more,)
    assert len(tried) == count

    def full(*_: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(devices, "passing_bytes", full)
    other = forecast(graph, ops, 1, 4, kernels=replace(gpu, gpu="another GPU"))
    assert other == (less,)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_attention_on_a_gpu_keeps_no_scores(dropout: float) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x).view(x.shape[0], 1, LENGTH, 8)
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
            return nn.functional.scaled_dot_product_attention(
                x, x, x, attn_mask=mask, dropout_p=dropout
            )

    graph = trace.trace(Attention(), torch.rand(2, LENGTH, 8))
    gpu, cpu = (
        forecast(graph, [0] * len(graph.ops), 1, 2, kernels=kernels)[0]
        for kernels in (Kernels(copies=False), HOST)
    )
    values, scores, mask = 2 * LENGTH * 8 * 4, 2 * LENGTH * LENGTH * 4, LENGTH * LENGTH
    # What it reads, what it gives, a number for each of 64 rows, and the mask in numbers.
    assert gpu.saved_bytes == 2 * values + 2 * 64 * 4 + 4 * mask
    assert (cpu.saved_bytes > gpu.saved_bytes + scores) is (dropout > 0)
    costs = profile(graph, None, microbatch_size=2, costs="estimated", device_kind="h100").ops
    assert sum(op.cost.saved_bytes for op in costs if op.cost is not None) == gpu.saved_bytes


def test_the_workspace_of_products_is_that_of_the_generation(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Kernels.of("cpu") == HOST
    assert HOST.note() == ""
    assert [Kernels.of(kind).product_bytes for kind in ("h100", "a100-80", "cuda")] == [
        THREADS * NEWER, THREADS * OLDER, THREADS * NEWER,
    ]  # fmt: skip
    # Where devices differ, each rank is reckoned with the most.
    for kinds in (["a100-80", "h100"], ["h100", "a100-80"], ["cpu", "h100"]):
        mixed = Kernels.of_all(kinds)
        assert (mixed.product_bytes, mixed.copies) == (THREADS * NEWER, "cpu" in kinds)
    assert Kernels.of_all(["cpu", "cpu"]) == HOST
    assert (NEWER, OLDER) == (32 << 20, 8519680)  # torch's own numbers
    monkeypatch.setattr(devices, "capability", lambda _: (8, 0))
    assert Kernels.of("cuda").product_bytes == THREADS * OLDER
    monkeypatch.setattr(devices, "gpus", lambda: 0)
    assert Kernels.of("cuda").product_bytes == THREADS * OLDER
    monkeypatch.setenv(VARIABLE, ":4096:2:16:8")
    assert Kernels.of("h100").product_bytes == THREADS * OLDER
    assert "16 MiB of cuBLAS" in Kernels.of("h100").note()


# -- the benchmark ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    command = f"mlp --device cpu --tiny --stages 1 2 --steps 2 --write {page} --json {figures}"
    benchmark.main(command.split())
    rows = json.loads(figures.read_text())["rows"]
    assert [row["stages"] for row in rows] == [1, 2]
    assert all(row["difference"] == 0 and row["forecast_seconds"] > 0 for row in rows)
    assert page.read_text().count("\n| mlp | ") == 2
    said = capsys.readouterr().out
    assert said.index("forecast") < said.index("measured")


@pytest.mark.slow
def test_the_benchmark_goes_on_after_a_model_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tiny: bool) -> Any:
        raise RuntimeError("no such model")

    monkeypatch.setattr(benchmark, "MODELS", {"broken": broken, **benchmark.MODELS})
    page = tmp_path / "page.md"
    command = f"broken mlp --device cpu --tiny --stages 1 --steps 1 --write {page}"
    with pytest.raises(SystemExit, match="broken: RuntimeError: no such model"):
        benchmark.main(command.split())
    assert page.read_text().count("\n| mlp | ") == 1
    assert "failed: broken" in page.read_text()


def test_what_is_no_number_differs() -> None:
    one, other = torch.ones(2), torch.tensor([1.0, 1.5])
    assert benchmark.difference({"a": one, "b": one}, {"a": one, "b": other}) == pytest.approx(
        1 / 3
    )
    found = benchmark.difference({"a": one, "b": one / 0 * 0}, {"a": one, "b": one})
    assert found != found
