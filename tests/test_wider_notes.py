"""A plan says what replicas and schedules would save that nobody asked about."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from examples.gpt import GPT, loss_fn
from pdcompile import driver
from pdcompile.batch import example_call
from pdcompile.options import Options
from pdcompile.plan import Plan
from tests.helpers.clocks import ticking

IDS = torch.zeros(64, 16, dtype=torch.long)
NOTE = re.compile(
    r"with (.*) left open a step takes (\S+ \w+) or less, instead of (\S+ \w+): .*; .* \((--.*)\)"
)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The glance at what nobody asked about is as long on every machine."""
    ticking(monkeypatch)


def planned(**options: Any) -> Plan:
    """Plan for four devices, whose pipeline of four stages idles for most of four microbatches."""
    given = {"costs": "estimated", "microbatches": 4, "cluster": "1x4", "verify": "off"}
    model = GPT(2, 64, 4, 16).to("meta")
    flat = example_call(model, IDS, IDS)
    return driver.build(model, flat, Options.given({"loss_fn": loss_fn, **given, **options})).plan


def notes(plan: Plan) -> list[re.Match[str]]:
    return [found for note in plan.notes if (found := NOTE.fullmatch(note))]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_is_known_to_be_faster_is_noted_and_found(schedule: str) -> None:
    """The options of the note find a plan that takes as long as it says."""
    opened: dict[str, Any] = {"replicas": "any"}
    if schedule == "1f1b":
        opened["schedule"] = "auto"
    plan = planned(schedule=schedule)
    (found,) = notes(plan)
    assert found[1].split(" and ") == [*opened]
    assert found[4] == " ".join(f"--{name} {value}" for name, value in opened.items())
    better = planned(**{"schedule": schedule, **opened})
    assert better.forecast is not None
    assert plan.forecast is not None
    assert better.forecast.step_seconds < 0.8 * plan.forecast.step_seconds
    assert not notes(better)


@pytest.mark.parametrize(
    "options", [{"stages": 4}, {"replicas": 2}, {"microbatches": 16}, {"schedule": "2bw"}]
)
def test_what_was_asked_for_or_saves_little_has_no_note(options: dict[str, Any]) -> None:
    assert not notes(planned(**options))


def test_fewer_and_larger_microbatches_are_among_them() -> None:
    """Nobody chose how many: kernels of microseconds take as long for as many more samples."""
    plan = planned(cluster="1x4:a100", microbatches="auto")
    assert plan.training.num_microbatches == 16
    (found,) = notes(plan)
    assert int(re.findall(r"(\d+) microbatches", found[0])[0]) < 16
    assert not notes(planned(cluster="1x4:a100", microbatches=16, schedule="2bw"))
