"""``pdcompile probe``: levels found in times of messages, and a cluster from measurements."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster
from pdcompile.hardware.data_sheets import kind_of_name
from pdcompile.passes.costs.machines import Machine
from pdcompile.passes.probe.levels import (
    PairTimes,
    block_sizes,
    level_names,
    level_pairs,
    levels,
    partner,
)
from pdcompile.passes.probe.links import DeviceSpeed
from pdcompile.passes.probe.probed import devices_of
from tests.helpers import launch
from tests.helpers.alike import Call


def times_of(
    sizes: tuple[int, ...], rates: tuple[float, ...], noise: float, seed: int
) -> PairTimes:
    """Times that would be measured on a cluster with such blocks, give or take."""
    chance, n = random.Random(seed), sizes[-1]
    rate = [[0.0] * n for _ in range(n)]
    for a in range(n):
        for b in range(a + 1, n):
            level = next(k for k, size in enumerate(sizes) if a // size == b // size)
            rate[a][b] = rate[b][a] = rates[level] * math.exp(chance.uniform(-noise, noise))
    latency = [[0.0 if a == b else 1e-6 for b in range(n)] for a in range(n)]
    return PairTimes(latency, rate, rate)


@settings(max_examples=200)
@given(st.data())
def test_levels_are_found_in_spite_of_noise(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    factors = data.draw(st.lists(st.integers(2, 4), min_size=count, max_size=count))
    sizes = tuple(math.prod(factors[: k + 1]) for k in range(count))
    rates = [data.draw(st.floats(1e9, 1e11))]
    for _ in range(count - 1):
        rates.append(rates[-1] / data.draw(st.floats(2.5, 20)))
    times = times_of(sizes, tuple(rates), 0.15, data.draw(st.integers(0, 10**6)))
    assert block_sizes(times) == sizes


@settings(max_examples=100)
@given(st.integers(2, 12), st.integers(0, 10**6))
def test_anything_makes_a_cluster(n: int, seed: int) -> None:
    """Links without an order make one too: sizes divide, and the last one is all devices."""
    chance = random.Random(seed)
    rate = [[10 ** chance.uniform(8, 11) for _ in range(n)] for _ in range(n)]
    rate = [[min(rate[a][b], rate[b][a]) for b in range(n)] for a in range(n)]
    latency = [[1e-6] * n for _ in range(n)]
    times = PairTimes(latency, rate, rate)
    sizes = block_sizes(times)
    assert sizes[-1] == n
    assert all(outer % inner == 0 < outer - inner for inner, outer in pairwise(sizes))
    found, _ = levels(times, sizes, [1e9] * len(sizes))
    assert math.prod(level.size for level in found) == n


def test_blocks_of_unlike_size_are_no_level() -> None:
    """Three ranks near each other and one apart, or pairs that are not next to each other."""
    near, far = 1e10, 1e9
    for blocks in ([0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1, 2]):
        n = len(blocks)
        rate = [[near if blocks[a] == blocks[b] else far for b in range(n)] for a in range(n)]
        assert block_sizes(PairTimes([[1e-6] * n] * n, rate, rate)) == (n,), blocks


@settings(max_examples=50)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=3))
def test_pairs_and_partners_of_levels(factors: list[int]) -> None:
    sizes = [math.prod(factors[: k + 1]) for k in range(len(factors))]
    n = sizes[-1]
    pairs = [pair for level in level_pairs(sizes) for pair in level]
    assert sorted(pairs) == [(a, b) for a in range(n) for b in range(a + 1, n)]
    for (inner, outer), level in zip(pairwise((1, *sizes)), level_pairs(sizes), strict=True):
        to = [partner(rank, inner, outer)[0] for rank in range(n)]
        assert sorted(to) == list(range(n))  # everybody receives from one
        for rank in range(n):
            assert (min(rank, to[rank]), max(rank, to[rank])) in level
            assert partner(to[rank], inner, outer)[1] == rank


def test_what_is_shared_and_what_is_half_duplex() -> None:
    times = times_of((2, 4), (1e10, 1e9), 0.0, 0)
    (inner, outer), notes = levels(times, (2, 4), (1e10, 0.25e9))
    assert (inner.size, inner.bytes_per_second, inner.full_duplex) == (2, 1e10, True)
    assert (outer.size, outer.bytes_per_second) == (2, 0.25e9)
    assert "so that its bandwidth is 0.25 GB/s here" in notes[1]
    assert "its bandwidth" not in notes[0]
    half = PairTimes(times.latency_seconds, times.bytes_per_second, [[0.5e9] * 4] * 4)
    (inner, outer), _ = levels(half, (2, 4), (0.1e9, 0.5e9))
    assert not inner.full_duplex
    # Both ends sent 0.1 GB/s at once, and the sum of both is what a half duplex link takes.
    assert (inner.bytes_per_second, outer.bytes_per_second) == (0.2e9, 1e9)


def test_a_slow_pair_that_is_no_level_is_told() -> None:
    """One of three ranks that is far away makes no blocks of equal size."""
    times = times_of((3,), (1e10,), 0.0, 0)
    rate = [list(row) for row in times.bytes_per_second]
    rate[0][2] = rate[2][0] = 1e8
    slow = PairTimes(times.latency_seconds, rate, rate)
    _, (note,) = levels(slow, block_sizes(slow), (1e10,))
    assert "times as long between ranks 0 and 2 as between others" in note
    _, (note,) = levels(times, (3,), (1e10,))
    assert "not alike" not in note


def test_levels_are_named_after_what_they_join() -> None:
    assert level_names((2, 4), ["a", "a", "b", "b"]) == ["host", "network"]
    assert level_names((2, 4, 8), ["a"] * 4 + ["b"] * 4) == ["host1", "host2", "network"]
    assert level_names((2,), ["a", "b"]) == ["network"]


def speed(factor: float, memory: int = 16 * 10**9) -> DeviceSpeed:
    return DeviceSpeed("a", "CPU", "cpu", memory, Machine(1e11 * factor, 1e10 * factor, 1e-6))


def test_speeds_are_relative_to_rank_0_and_noise_is_left_out() -> None:
    found = devices_of([speed(1.0), speed(1.1), speed(0.5), speed(3.0, 0)])
    assert [device.speed for device in found] == [1.0, 1.0, 0.5, 3.0]
    crowded = devices_of([speed(1.0), speed(0.5)], crowded=True)
    assert [device.speed for device in crowded] == [1.0, 1.0]
    assert [device.memory_bytes for device in found] == [16 * 10**9] * 3 + [None]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Some Thing 7", "some-thing-7"),
        ("", "device"),
    ],
)
def test_kinds_by_the_names_of_drivers(name: str, kind: str) -> None:
    assert kind_of_name(name) == kind


SCRIPT = """
    import os, sys
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    from pdcompile.cli import main
    main(sys.argv[1:])
"""


def test_two_ranks_are_probed(tmp_path: Path) -> None:
    run = launch.processes(SCRIPT, 2, tmp_path, "probe", "-o", "cluster.toml", "--json")
    assert run.code == 0, run
    found = json.loads(run.output[run.output.index("{") :])
    assert [level["size"] for level in found["levels"]] == [2]
    assert found["levels"][0]["latency_seconds"] > 0
    cluster = Cluster.load(str(tmp_path / "cluster.toml"))
    assert len(cluster.devices) == 2
    assert all(device.memory_bytes for device in cluster.devices)
    assert 1e6 < cluster.levels[0].bytes_per_second < 1e12
    assert any("where all devices send" in note for note in cluster.notes)


def test_without_torchrun_it_says_how_to_start(call: Call) -> None:
    code, _, err = call("probe")
    assert code == 2
    assert "torchrun --nproc-per-node=4 -m pdcompile probe" in err
