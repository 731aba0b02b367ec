"""The pieces of benchmarks/runtime.py: waiting layers, counters, intervals, a small comparison."""

from __future__ import annotations

import socket
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pdcompile
from benchmarks import runtime
from benchmarks.side_by_side import networks, page
from benchmarks.side_by_side import waiting as module
from benchmarks.side_by_side.counters import interface_bytes, socket_bytes
from benchmarks.side_by_side.job import Figures, Job
from benchmarks.side_by_side.launch import Outcome, launched
from benchmarks.side_by_side.waiting import Times, profile_of, timed_layers, waiting
from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError
from pdcompile.problem.constraints import Together

TIMES = Times(2e-3, 1e-3, 3e-3)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.ReLU())


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that layers were to take, which then take no time."""
    found: list[float] = []
    monkeypatch.setattr(module, "lasting", lambda seconds: nullcontext(found.append(seconds)))
    return found


def test_waiting_layers_have_shapes_and_gradients_of_real_ones(slept: list[float]) -> None:
    real, x = chain(), torch.randn(5, 6)
    made = waiting(real, x, [TIMES, TIMES, Times(2e-3, 4e-3, 0.0)])
    y = made(x)
    assert y.shape == real(x).shape
    assert sum(slept) == pytest.approx(6e-3)  # the input of the first layer needs no gradient
    y.sum().backward()
    assert sum(slept) == pytest.approx(6e-3 + 3e-3 + 4e-3 + 4e-3)
    for parameter in made.parameters():
        assert parameter.grad is not None
        assert parameter.grad.is_contiguous()
        assert float(parameter.grad.abs().sum()) > 0


def test_what_a_waiting_layer_takes_itself_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, found = [0.0], list[float]()
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "wait", found.append)
    for taken in (1.0, 4.0):
        with module.lasting(3.0):
            now[0] += taken
    with module.no_waits(), module.lasting(3.0):
        pass
    assert found == [2.0, 0.0]
    made = module.Waiting(nn.Linear(2, 2), (2,), Times(3e-3, 2e-3, 6e-3, (1e-3, 3e-3, 2e-3)))
    assert made.forward_wait == pytest.approx(2e-3)
    assert made.input_wait == 0.0
    assert made.weight_wait == pytest.approx(4e-3)


def test_equal_layers_are_timed_once_and_the_first_has_no_input_gradient() -> None:
    found = timed_layers(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.randn(2, 4))
    assert found[0].input_seconds == 0.0
    assert found[1] is found[2]
    assert found[1].input_seconds == pytest.approx(found[1].weight_seconds)


def test_plans_of_waiting_layers_know_their_times(slept: list[float]) -> None:
    """Both parts of a backward can be apart, so that stages can split it."""
    times = [replace(TIMES, input_seconds=0.0), TIMES, Times(2e-3, 4e-3, 0.0)]
    x, y = torch.randn(4, 6), torch.randn(4, 4)
    model = waiting(chain(), x, times)
    pipe = pdcompile.compile(
        model, x, example_target=y, loss_fn=F.mse_loss, stages=2, microbatches=2,
        schedule="zb-h1", costs=profile_of(pdcompile.trace(model, x), 2, times), verify="off",
        cluster=Cluster.local(2), constraints=[Together(str(n)) for n in range(3)],
    )  # fmt: skip
    stages = pipe.plan.stages
    assert sum(one.forward_seconds for one in stages) == pytest.approx(6e-3, rel=0.05)
    assert sum(one.backward_seconds for one in stages) == pytest.approx(11e-3, rel=0.05)
    assert not any("cannot" in note for note in pipe.plan.notes)
    slept.clear()
    pipe.step(x, target=y)
    assert sum(slept) == pytest.approx(2 * 17e-3)


def test_bytes_on_connections_are_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        reader = threading.Thread(target=other.recv, args=(100_000, socket.MSG_WAITALL))
        before = socket_bytes()
        reader.start()
        one.sendall(bytes(100_000))
        reader.join()
        assert socket_bytes() - before == 100_000
    assert interface_bytes("lo") >= 0
    with pytest.raises(ValueError, match="no interface 'nowhere'"):
        interface_bytes("nowhere")


def test_intervals_hold_the_median_surely_enough() -> None:
    assert page.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert page.interval([float(n) for n in range(1, 9)]) == (1.0, 8.0)
    assert page.interval([float(n) for n in range(1, 10)]) == (2.0, 8.0)  # outside: 2 · 10 / 512


def test_shaping_is_refused_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(ConfigError, match="shaped links need ip and tc") as found:
        networks.Networks(2, "100mbit")
    assert "iproute2" in str(found.value.remedy)
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="need root"):
        networks.check()
    with pytest.raises(ConfigError, match="'fast' is not a rate"):
        runtime.cluster(2, "fast")
    assert Cluster.from_toml(runtime.cluster(2, "100mbit")).levels[0].bytes_per_second == 12.5e6


def test_a_page_has_ratios_to_the_baseline() -> None:
    def figures(seconds: float) -> Figures:
        return Figures(seconds=[seconds] * 7, sent_bytes=2e6, peak_bytes=3_000_000)

    rank = {"one process": figures(0.8), "torch 1F1B": figures(0.5), "pdcompile 1f1b": figures(0.4),
            "pdcompile later": Figures(refused="not yet")}  # fmt: skip
    rank["pdcompile 1f1b"].forecast_seconds = 0.36
    rank["pdcompile 1f1b"].python_seconds = 21e-6
    outcome = Outcome("GPT", "A model.", 4, (rank, rank), 1.0)
    kinds: dict[str, list[Outcome]] = {"emulated": [outcome], "real": [], "shaped": []}
    text = page.written(kinds, "it.svg", "--write x")
    read = text.replace(page.READING, page.READING + "\n\nOurs are faster.")
    assert "Ours are faster." in read
    assert page.written(kinds, "it.svg", "--write x", read) == read
    row = "| pdcompile 1f1b | 400 | 400 | 1.25 (1.25–1.25) | 50 % |  | 90 % | 2.00 MB | 3.00 MB |"
    assert row + " 21 us |" in text
    assert "pdcompile later: not yet" in text
    assert "pdcompile 1f1b at 1.25 (1.25–1.25) of torch 1F1B's speed." in text
    assert "Slow links" not in text


@pytest.mark.slow
def test_contestants_take_turns() -> None:
    """Two ranks, one round, waits of a millisecond."""
    names = ("one process", "DDP", "torch zero bubble", "pdcompile 1f1b", "pdcompile 2bw")
    job = Job("wide MLP", names, 4, rounds=1, steps=1, times=(Times(1e-3, 1e-3, 1e-3),) * 4,
              arguments={"b": 16, "layers": 4, "width": 64})  # fmt: skip
    outcome = launched("small", "", job, 2)
    assert len(outcome.of_rank) == 2
    for number, rank in enumerate(outcome.of_rank):
        assert list(rank) == list(names)
        for name, one in rank.items():
            idle = name == "one process" and number == 1
            assert not one.refused
            assert len(one.seconds) == 1
            assert one.sent_bytes > 4 * 64 * 4 or name == "one process"
            assert one.peak_bytes > 2 * 2 * 64 * 64 * 4 or idle
    ours = outcome.of_rank[0]["pdcompile 1f1b"]
    assert ours.forecast_seconds is not None
    assert ours.forecast_seconds >= 4 * 2 * 3e-3
    assert ours.python_seconds is not None
    assert "| pdcompile 2bw |" in "\n".join(page.section(outcome))
