"""Times at sizes that were not measured: lines through those that were."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.passes import profile as module
from pdcompile.passes.costs import Machine
from pdcompile.passes.costs.timing import _timed_by_events
from pdcompile.passes.profile import (
    Entry,
    Profile,
    Sizes,
    distinct_calls,
    interpolated,
    measured_sizes,
    seconds_at,
)
from tests.helpers.graphs import GraphBuilder

positive = st.floats(1e-6, 1e-1)
points = st.lists(st.tuples(positive, positive), min_size=1, max_size=3)


@given(points, positive)
def test_seconds_lie_between_those_of_the_neighbours(
    measured: list[tuple[float, float]], work: float
) -> None:
    found = seconds_at(work, measured)
    assert found >= 0
    below = [took for w, took in measured if w <= work]
    above = [took for w, took in measured if w >= work]
    if below and above:
        took = [seconds for _, seconds in measured]
        assert min(took) <= found * 1.000001
        assert found <= max(took) * 1.000001


def test_what_is_measured_is_found_again_and_one_point_grows_with_its_work() -> None:
    assert [seconds_at(w, [(2.0, 6.0), (1.0, 4.0)]) for w in (1.0, 1.5, 2.0)] == [4.0, 5.0, 6.0]
    assert seconds_at(1.0, [(2.0, 6.0)]) == 3.0
    assert seconds_at(4.0, [(2.0, 6.0), (1.0, 4.0)]) == 12.0
    assert seconds_at(5.0, [(0.0, 6.0)]) == 6.0  # work that the roofline does not know


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("sizes", "measured"),
    [((4,), (4,)), ((4, 1), (1, 4)), ((1, 2, 4), (1, 4)), ((1, 2, 4, 8, 16), (1, 4, 16)),
     ((16, 24, 32, 48), (16, 48))],
)  # fmt: skip
def test_two_or_three_sizes_are_measured(sizes: tuple[int, ...], measured: tuple[int, ...]) -> None:
    assert measured_sizes(sizes) == measured


def test_a_profile_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured at 2 and 8 with a price a call and one a sample; asked for at 4 and 6."""
    machine = Machine(flops_per_second=1e9, bytes_per_second=1e9, call_seconds=0.0)
    monkeypatch.setattr(module, "machine_here", lambda _: machine)
    g = GraphBuilder()
    weights = (g.parameter("w"),)
    x = g.op("y", "torch.nn.functional.linear", (g.input("x"),), parameters=weights)
    a = g.op("a", "torch.relu", (x,))
    b = g.op("b", "torch.tanh", (a,))
    graph = g.build(b, loss=b)

    def truth(target: str, size: int) -> tuple[float, float]:
        price = 1e-5 if target == "torch.relu" else 3e-5
        return price + size * 1e-6, 2 * price + size * 3e-6

    def entries(size: int) -> tuple[Entry, ...]:
        return tuple(
            Entry(key, call.op.target, *truth(call.op.target, size))
            for key, call in distinct_calls(graph, size).items()
        )

    profiles = [Profile("2", "cpu", size, entries(size)) for size in (2, 8)]
    for size in (4, 6):
        found = interpolated(graph, profiles, size)
        assert found.microbatch_size == size
        assert {entry.key for entry in found.entries} == set(distinct_calls(graph, size))
        for entry, expected in zip(found.entries, entries(size), strict=True):
            if entry.target != "torch.nn.functional.linear":
                assert entry.forward_seconds == pytest.approx(expected.forward_seconds)
                assert entry.backward_seconds == pytest.approx(expected.backward_seconds)
    # What could be measured at one size only is taken to grow with its work.
    alone = interpolated(graph, [profiles[0], replace(profiles[1], entries=())], 4)
    assert alone.entries[1].forward_seconds == pytest.approx(2 * truth("torch.relu", 2)[0])
    assert interpolated(graph, [replace(one, entries=()) for one in profiles], 4).entries == ()


def test_sizes_that_were_not_measured_are_told() -> None:
    told: list[str] = []
    graph = GraphBuilder().build("x")
    for sizes in ((1, 4), (1, 2, 4), (1, 2, 4, 8, 16)):
        Sizes(graph, None, sizes, say=told.append)
    begins = [text.partition(":")[0] for text in told]
    assert begins == [
        "costs at microbatch size 2 follow from those measured at 1, 4",
        "costs at microbatch sizes 2, 8 follow from those measured at 1, 4, 16",
    ]


def test_events_stamp_begin_and_end_on_the_device() -> None:
    told: list[str] = []

    class Event:
        def __init__(self) -> None:
            self.name = f"event {sum('made' in line for line in told)}"
            told.append(f"{self.name} made")

        def record(self) -> None:
            told.append(f"{self.name} recorded")

        def synchronize(self) -> None:
            told.append(f"{self.name} waited for")

        def elapsed_time(self, end: Event) -> float:
            assert (self.name, end.name) == ("event 0", "event 1")
            return 250.0  # milliseconds

    assert _timed_by_events(lambda: told.append("run"), Event) == 0.25
    assert told[2:] == ["event 0 recorded", "run", "event 1 recorded", "event 1 waited for"]
