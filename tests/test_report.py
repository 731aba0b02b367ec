"""Tables and drawings show the numbers of the plan and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.cluster import Cluster
from pdcompile.passes.simulate import simulate_drained
from pdcompile.plan import Certificate, MemoryLedger
from pdcompile.problem import ANY_CUT, BY_RULE
from pdcompile.report import chrome, labels, palette, plan_table, timeline
from pdcompile.schedule.program import RecordedEvent
from tests.helpers.report_data import one_f_one_b, plan
from tests.helpers.schedules import make_plan


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2 defines it: from 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_timeline_is_the_textbook_picture() -> None:
    # 12.5 seconds on 25 characters: a forward is 2, a backward 4, an update 1.
    drawn = timeline.text(one_f_one_b(2, 3, 1.0, 2.0), width=7 + 25).plain.splitlines()
    assert drawn == [
        "rank 0 F0F1····B0==F2B1==··B2==U",
        "rank 1 ··F0B0==F1B1==F2B2==U····",
    ]


def test_microbatches_by_rule_are_told() -> None:
    made = plan()
    assert "by rule" not in plan_table.headline(made)
    scope = f"{made.certificate.scope}; {made.training.num_microbatches} {BY_RULE}"
    ruled = replace(made, certificate=replace(made.certificate, scope=scope))
    assert "4 microbatches (by rule)" in plan_table.headline(ruled)


def test_a_forecast_says_that_stages_of_one_process_take_turns() -> None:
    assert "in one process they take turns" in plan_table.forecast_line(plan()).plain
    apart = replace(plan(), cluster=Cluster.parse("2").to_toml())
    assert "take turns" not in plan_table.forecast_line(apart).plain


@given(st.integers(1, 5), st.integers(1, 9), st.integers(30, 140))
def test_text_timeline_keeps_its_width_and_order(stages: int, num: int, width: int) -> None:
    lines = timeline.text(one_f_one_b(stages, num), width=width).plain.splitlines()
    assert len(lines) == stages
    assert {len(line) for line in lines} == {width}
    for line in lines:
        labels = [int(i) for i in re.findall(r"F(\d+)", line)]
        assert labels == sorted(labels)


@given(st.integers(1, 6), st.integers(1, 12))
def test_idle_fraction_of_1f1b(stages: int, num: int) -> None:
    """The bubble of equal stages, without updates, is (S − 1) / (M + S − 1)."""
    events = [event for event in one_f_one_b(stages, num) if event.action != "STEP"]
    expected = (stages - 1) / (num + stages - 1)
    assert timeline.idle(timeline.bars(events)) == pytest.approx(expected)


def test_waits_and_sends_are_not_compute() -> None:
    events = [*one_f_one_b(), RecordedEvent(0, 0, "SEND", 0, 0, 0.0, 9.0)]
    assert timeline.bars(events) == timeline.bars(one_f_one_b())


def test_empty_timeline_draws_nothing() -> None:
    assert timeline.text([]).plain == ""
    assert timeline.idle(()) == 0.0


def test_chrome_trace_has_every_event_in_microseconds() -> None:
    events = (*one_f_one_b(2, 2), RecordedEvent(1, 1, "SEND_GRADIENT", 0, 1, 0.001, 0.003))
    document = json.loads(json.dumps(chrome.trace(events, "x")))
    assert document["otherData"] == {"plan": "x"}
    spans = [record for record in document["traceEvents"] if record["ph"] == "X"]
    assert len(spans) == len(events)
    assert spans[-1]["ts"] == pytest.approx(1000.0)
    assert spans[-1]["dur"] == pytest.approx(2000.0)
    assert spans[-1]["tid"] != spans[0]["tid"]
    tracks = {(r["pid"], r["args"]["name"]) for r in document["traceEvents"] if r["ph"] == "M"}
    assert (1, "rank 1 (stage 1)") in tracks


def test_explain_says_what_the_plan_says() -> None:
    text = plan_table.explain(plan(), width=110)
    for part in (
        "1f1b: 2 stages on 2 ranks, minibatches of 16 samples in 4 microbatches",
        "clipped to norm 1",
        "blocks.0–1, tokens",
        "1.50 ms",
        "3.00 ms",
        "65.5 kB",
        "3.52 MB",
        "4.00 MB",
        "22.5 ms a step",
        "certificate: optimal",
        "by CP-SAT",
        ANY_CUT,
        "note: batch norm",
    ):
        assert part in " ".join(text.split()), part
    assert max(map(len, text.splitlines())) <= 110


def test_explain_does_not_call_a_gap_optimal() -> None:
    text = plan_table.explain(plan(status="feasible"), width=120)
    assert "feasible" in text
    assert "gap 11 %" in text
    assert "optimal" not in text


def test_a_forecast_from_costs_that_are_not_the_devices_says_so_before_its_figure() -> None:
    made = replace(plan(), costs="costs measured on a CPU")
    assert "forecast from costs measured on a CPU: 22.5 ms a step, " in plan_table.forecast_line(
        made
    )
    assert "forecast: 22.5 ms a step, " in plan_table.forecast_line(plan())


def test_explain_without_forecast() -> None:
    text = plan_table.explain(plan(forecast=False))
    assert "forecast" not in text
    assert "certificate" in text


@pytest.mark.parametrize("count", range(1, 11))
def test_a_table_of_memory_has_all_its_numbers(count: int) -> None:
    full = plan()
    assert full.forecast is not None
    lines = dict.fromkeys(MemoryLedger.__slots__[:count], 393_000)
    forecast = replace(full.forecast, ledgers=(MemoryLedger(**lines),) * 2)
    rows = plan_table.explain(replace(full, forecast=forecast)).splitlines()
    row = next(row for row in rows if row.startswith("rank 0"))
    assert row.count("393 kB") + row.count("393kB") == count + (count == 1)
    assert row.endswith(("4.00 MB", "4.00MB"))


def test_memory_over_the_limit_is_marked() -> None:
    full = replace(plan(), forecast=None)
    forecast = plan().forecast
    assert forecast is not None
    big = replace(forecast, ledgers=(MemoryLedger(weights_bytes=9_000_000),) * 2)
    rows = plan_table.memory_table(replace(full, forecast=big)).rows
    assert [row.style for row in rows] == ["red", "red"]
    assert [row.style for row in plan_table.memory_table(plan()).rows] == [None, None]


@pytest.mark.parametrize(
    ("schedule", "expected"), [("1f1b", [2, 1]), ("gpipe", [4, 4]), ("2bw", [2, 1])]
)
def test_in_flight(schedule: str, expected: list[int]) -> None:
    made = plan(schedule=schedule)
    assert [plan_table.in_flight(made, stage) for stage in (0, 1)] == expected


def test_temporaries_of_the_optimizer_have_a_line_of_their_own() -> None:
    forecast = plan().forecast
    assert forecast is not None
    ledger = MemoryLedger(weights_bytes=1_000_000, temporaries_bytes=500_000)
    made = replace(forecast, ledgers=(ledger,) * 2)
    text = plan_table.explain(replace(plan(), forecast=made))
    assert "temporaries" in text
    assert "500 kB" in text
    assert "workspace" not in text  # lines that are 0 everywhere are left out


def test_all_lines_of_memory_fit_into_a_hundred_columns() -> None:
    forecast = plan().forecast
    assert forecast is not None
    ledger = MemoryLedger(*[17_400_000] * len(plan_table.LEDGER_LINES))
    made = replace(forecast, ledgers=(ledger,) * 2)
    lines = plan_table.explain(replace(plan(), forecast=made)).splitlines()
    (row,) = [line for line in lines if line.startswith("rank 0 ")]
    assert row.split()[2:] == [*["17.4MB"] * len(plan_table.LEDGER_LINES), "174MB", "4.00MB"]
    assert max(map(len, lines)) <= 100
    headings = {"memory", "weights", "grads", "optim.", "activ.", "receive", "work", "temp."}
    assert headings <= set(" ".join(lines).split())


def test_the_legend_says_what_is_shown_and_no_more() -> None:
    events = one_f_one_b(2, 3, 1.0, 2.0)
    shown = timeline.bars(events)
    wide = timeline.text(events, width=7 + 25)
    assert timeline.legend(wide, shown) == (
        "F- forward, B= backward, U update, dots idle; the number is the microbatch"
    )
    many = one_f_one_b(2, 60)
    narrow = timeline.text(many, width=40)
    assert not re.search(r"\d", narrow.plain.replace("rank 0", "").replace("rank 1", ""))
    assert "number" not in timeline.legend(narrow, timeline.bars(many))
    alone = one_f_one_b(1, 2)[:-1]
    drawn = timeline.text(alone, width=40)
    assert timeline.legend(drawn, timeline.bars(alone)) == (
        "F- forward, B= backward; the number is the microbatch"
    )
    assert timeline.legend(timeline.text([]), ()) == ""
    parts = timeline.text(alone, width=40, of=lambda rank: (2 * rank, 2 * rank + 1))
    assert parts.plain.startswith("ranks 0–1 F0")
    assert timeline.legend(parts, timeline.bars(alone)).startswith("F- forward, B= backward;")


def test_text_can_be_read_on_every_colour() -> None:
    fills = [fill for pair in palette.WORK.values() for fill in pair]
    fills += [fill for fill, _ in palette.MEMORY.values()]
    for fill in (*fills, palette.LINK, palette.WEIGHTS):
        assert contrast(palette.INK, fill) >= 4.5, fill
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_module_ranges() -> None:
    parameters = [f"net.blocks.{i}.w" for i in (0, 1, 2, 4)] + ["head.bias", "3.w"]
    assert labels.modules(parameters) == "3, head, net.blocks.0–2,4"
    assert labels.modules((), ("relu", "add")) == "relu … add"
    assert labels.modules((), ("relu",)) == "relu"
    assert labels.ranks((0, 1, 2, 5)) == "0–2,5"
    assert labels.ranks(()) == "-"


@given(st.sets(st.integers(0, 30), min_size=1))
def test_ranges_name_exactly_their_numbers(numbers: set[int]) -> None:
    found: set[int] = set()
    for run in labels.ranks(sorted(numbers)).split(","):
        first, _, last = run.partition("–")
        found.update(range(int(first), int(last or first) + 1))
    assert found == numbers


def test_reports_need_no_torch() -> None:
    program = (
        "import sys, pdcompile.report.page, pdcompile.report.chrome;"
        "sys.exit(bool({'torch', 'ortools', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 0


def test_drained_timeline_has_every_backward() -> None:
    for schedule in ("1f1b", "2bw"):
        shown = timeline.bars(simulate_drained(plan(schedule=schedule), 3).timeline)
        counts = {
            kind: sum(bar.kind == kind for bar in shown)
            for kind in ("forward", "backward", "update")
        }
        assert counts == {"forward": 3 * 4 * 2, "backward": 3 * 4 * 2, "update": 3 * 2}


def test_a_timeline_of_minibatches_of_one_is_numbered_by_them() -> None:
    events = simulate_drained(make_plan("stash", 2, 1), 3).timeline
    shown = timeline.bars(events)
    assert timeline.numbered(shown) == "minibatch"
    labels = [bar.label for bar in shown if bar.rank == 1 and bar.kind != "update"]
    assert labels == ["F0", "B0", "F1", "B1", "F2", "B2"]


def test_a_certificate_says_in_words_which_plans_it_speaks_of() -> None:
    made = make_plan("1f1b", 3, 18)
    scope = "cuts between 7 groups of the 9 ops; in one group: a hook (2); constraints Pin('a', 0)"
    proved = Certificate(60.0, 60.0, "optimal", "brute force", 0.1, scope)
    text = plan_table.certificate_line(replace(made, certificate=proved)).plain
    assert text.endswith(
        "among all plans with cuts between 7 groups of the 9 ops; constraints Pin('a', 0). "
        "Ops share a group, and so a stage, for: a hook (2)"
    )
