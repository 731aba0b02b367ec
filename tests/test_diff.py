"""Differences between two plans: as data, as tables, and from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.plan import Plan
from pdcompile.plan.diff import Changed, Moved, diff
from pdcompile.problem.constraints import Pin
from tests.helpers.alike import Call
from tests.helpers.graphs import chain, residual
from tests.helpers.planned import moved, planned
from tests.helpers.report_data import plan as hand_made

TWO = Cluster((Device(memory_bytes=10**9),) * 2, (Level("nvlink", 2, 1e3),))


def files(folder: Path, *plans: Plan) -> list[str]:
    paths = [folder / f"{i}.json" for i in range(len(plans))]
    for path, plan in zip(paths, plans, strict=True):
        path.write_text(plan.to_json(), encoding="utf-8")
    return list(map(str, paths))


def test_a_plan_and_itself_are_identical() -> None:
    plan = planned(residual(3), TWO)
    later = replace(plan, certificate=replace(plan.certificate, seconds=123.0))
    found = diff(plan, later)
    assert found.identical
    assert found.says_nothing


def test_moved_ops_are_grouped_by_the_way_they_go() -> None:
    plan = planned(chain(8), Cluster.local(3))
    free = plan.stages[0].ops[-2:]
    found = diff(plan, moved(plan, free, 1))
    assert not found.identical
    assert found.prints == ()
    assert found.moved == (Moved(free, 0, 1),)
    back = diff(moved(plan, free, 1), plan)
    assert [(one.ops, one.source, one.target) for one in back.moved] == [(free, 1, 0)]


@given(st.integers(0, 2), st.integers(0, 2), st.sets(st.integers(0, 6)))
def test_every_op_on_another_stage_is_listed_once(a: int, b: int, numbers: set[int]) -> None:
    plan = planned(chain(6), Cluster.local(3))
    ops = [op for stage in plan.stages for op in stage.ops]
    chosen = tuple(ops[n] for n in sorted(numbers))
    one, two = moved(plan, chosen, a), moved(plan, chosen, b)
    listed = [op for group in diff(one, two).moved for op in group.ops]
    assert sorted(listed) == sorted(chosen if a != b else ())


def test_plans_of_different_models_say_so() -> None:
    found = diff(planned(chain(6), TWO), planned(residual(3), TWO))
    assert found.prints == ("model", "costs")
    assert found.unlike
    assert found.moved == ()
    odd = replace(planned(chain(6), TWO), fingerprint="abc")
    assert diff(planned(chain(6), TWO), odd).prints == ("all",)
    longer = diff(planned(chain(6), TWO), planned(chain(7), TWO))
    assert longer.prints[0] == "model"
    assert not longer.unlike
    assert {None in (one.source, one.target) for one in longer.moved} == {True, False}


def test_clusters_are_compared_part_by_part() -> None:
    other = Cluster(
        (Device("cuda", 2 * 10**9, 2.0),) * 4,
        (replace(TWO.levels[0], bytes_per_second=5e3), Level("ethernet", 2, 1.0)),
    )
    found = diff(planned(chain(8), TWO), planned(chain(8), other))
    assert found.prints == ("cluster",)
    facts = {one.what: (one.a, one.b) for one in found.cluster}
    assert facts == {
        "devices": ((2,), (2, 2)),
        "kind": (("cpu",), ("cuda",)),
        "memory_bytes": ((10**9,), (2 * 10**9,)),
        "speed": ((1.0,), (2.0,)),
        "nvlink.bytes_per_second": (1e3, 5e3),
        "ethernet.bytes_per_second": (None, 1.0),
        "ethernet.latency_seconds": (None, 0.0),
        "ethernet.full_duplex": (None, True),
    }
    assert found.stages[0] == Changed("stages", 2, 4)


def test_devices_in_another_order_differ() -> None:
    mixed = (Device(speed=2.0), Device(speed=1.0), Device(speed=2.0), Device(speed=1.0))
    levels = (Level("host", 4, 1e3),)
    a = planned(chain(8), Cluster(mixed, levels))
    b = planned(chain(8), Cluster((mixed[0], mixed[2], mixed[1], mixed[3]), levels))
    assert [one.what for one in diff(a, b).cluster] == ["speed"]


def test_training_forecast_and_memory() -> None:
    a, b = planned(residual(3), TWO), planned(residual(3), TWO, schedule="2bw")
    found = diff(a, b)
    assert {one.what for one in found.training} == {"schedule"}
    assert [one.what for one in found.memory] == ["rank 0", "rank 1"]
    assert "step_seconds" in {one.what for one in found.forecast}
    assert "objective_seconds" in {one.what for one in found.certificate}
    assert "seconds" not in {one.what for one in found.certificate}
    without = diff(a, replace(a, forecast=None))
    assert all(one.b is None for one in (*without.forecast, *without.memory))


def test_replicas_recomputation_and_notes() -> None:
    a = planned(chain(6), Cluster.local(3))
    first = replace(a.stages[0], recompute=True)
    b = replace(a, stages=(first, *a.stages[1:]), notes=("a new one",))
    found = diff(a, b)
    assert found.stages == (Changed("stages[0].recompute", False, True),)
    assert found.notes == (Changed("note", None, "a new one"),)
    assert not found.says_nothing


def test_turns(tmp_path: Path, call: Call) -> None:
    a = planned(chain(6), Cluster.local(2))
    b = replace(a, stages=(replace(a.stages[0], turns=(0, 0)), *a.stages[1:]))
    found = diff(a, b)
    assert found.stages == (Changed("stages[0].turns", (), (0, 0)),)
    assert not found.says_nothing
    code, out, err = call("diff", *files(tmp_path, a, b))
    assert code == 0, err
    assert "stage 0 turns - 0, 0" in " ".join(out.split())


def test_what_no_list_shows_is_said(tmp_path: Path, call: Call) -> None:
    a = planned(chain(6), Cluster.local(2))
    found = diff(a, replace(a, problem=None))
    assert not found.identical
    assert found.says_nothing
    code, out, _ = call("diff", *files(tmp_path, a, replace(a, problem=None)))
    assert (code, "only figures inside differ" in out) == (0, True)


def test_the_verb(tmp_path: Path, call: Call) -> None:
    a = planned(residual(3), TWO)
    b = planned(residual(3), replace(TWO, devices=(Device(),) * 2), schedule="2bw",
                constraints=(Pin("h.2", 0),))  # fmt: skip
    code, out, err = call("diff", *files(tmp_path, a, b))
    assert (code, err) == (0, "")
    for part in ("they are for different clusters", "ops on another stage", "stage 1  stage 0",
                 "1f1b", "2bw", "1.00 GB", "none", "certificate", "rank 0",
                 "objectives are of a step with a flush", "in different scopes"):  # fmt: skip
        assert part in out, part
    assert max(map(len, out.splitlines())) <= 100


def test_identical_plans_say_so(tmp_path: Path, call: Call) -> None:
    a = planned(residual(3), TWO)
    code, out, _ = call("diff", *files(tmp_path, a, a))
    assert (code, out.startswith("the plans are identical")) == (0, True)
    code, out, _ = call("diff", *files(tmp_path, a, a), "--json")
    assert (code, json.loads(out)["status"]) == (0, "identical")


def test_the_verb_as_json(tmp_path: Path, call: Call) -> None:
    a, b = hand_made(), hand_made(schedule="2bw", status="feasible", forecast=False)
    code, out, _ = call("diff", *files(tmp_path, a, b), "--json")
    document = json.loads(out)
    assert (code, document["status"]) == (0, "different")
    assert document["training"] == [{"what": "schedule", "a": "1f1b", "b": "2bw"}]
    assert {one["what"]: one["b"] for one in document["memory"]} == {"rank 0": None, "rank 1": None}


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1, 2]", b"\xff"])
@pytest.mark.parametrize("place", [0, 1])
def test_files_that_are_no_plans(
    content: bytes | None, place: int, tmp_path: Path, call: Call
) -> None:
    paths = files(tmp_path, hand_made(), hand_made())
    wrong = tmp_path / "wrong.json"
    if content is not None:
        wrong.write_bytes(content)
    paths[place] = str(wrong)
    code, out, err = call("diff", *paths)
    assert (code, out) == (2, "")
    assert "wrong.json" in err
    code, out, _ = call("diff", *paths, "--json")
    assert (code, json.loads(out)["status"]) == (2, "error")


def test_one_file_is_not_enough(tmp_path: Path, call: Call) -> None:
    assert call("diff", *files(tmp_path, hand_made()))[0] == 2


def test_what_an_update_costs_has_its_words_and_units(tmp_path: Path, call: Call) -> None:
    plan = hand_made()
    with_state = replace(
        plan.training, optimizer_factor=2.0, step=(2.0, 1.0, 0.0), step_moved=21.0,
        moving_seconds=2e-11,
    )  # fmt: skip
    without = replace(
        with_state, optimizer_factor=0.0, step=(0.0, 0.0, 0.5), step_moved=3.0, moving_seconds=0.0
    )
    plans = [replace(plan, training=one) for one in (with_state, without)]
    _, out, _ = call("diff", *files(tmp_path, *plans))
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "training optimizer state 2 x weights 0 x weights -100 %" in rows
    assert "training update moves 21 x weights 3 x weights -86 %" in rows
    assert "training update moves at 50.0 GB/s no cost" in rows
    assert any(row.startswith("training update holds 2 x one, 1 x previous") for row in rows)
