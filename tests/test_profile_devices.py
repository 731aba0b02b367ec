"""Device kinds by their data sheets: what a plan without the hardware rests on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import pdcompile
from pdcompile.batch import example_call
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.driver import build
from pdcompile.errors import ClusterError
from pdcompile.ir.graph import OpGraph
from pdcompile.options import Options
from pdcompile.passes.costs.machines import KINDS, SHEETS, relative
from pdcompile.passes.profile import source_of
from pdcompile.plan import Plan
from tests.helpers import models
from tests.helpers.costed import profile
from tests.helpers.graphs import GraphBuilder


def cluster(*kinds: str, speeds: tuple[float, ...] = ()) -> Cluster:
    given = speeds or (1.0,) * len(kinds)
    devices = tuple(Device(kind, None, speed) for kind, speed in zip(kinds, given, strict=True))
    return Cluster(devices, (Level("host", len(kinds), 100e9),))


def product(dtype: str, size: int = 4096) -> OpGraph:
    g = GraphBuilder()
    w = g.parameter("w", (size, size))
    y = g.op("y", "torch.nn.functional.linear", (g.input("x", (size, size)),),
             shape=(size, size), parameters=(w,))  # fmt: skip
    graph = g.build(y, loss=y)
    return replace(graph, values={k: replace(v, dtype=dtype) for k, v in graph.values.items()})


def seconds(graph: OpGraph, kind: str) -> float:
    found = profile(graph, None, microbatch_size=4096, costs="estimated", device_kind=kind)
    assert found.ops[0].cost is not None
    return found.ops[0].cost.forward_seconds


def test_no_kind_computes_faster_than_its_sheet_says() -> None:
    flops = 2 * 4096**3
    for kind, sheet in SHEETS.items():
        assert sheet.float16_tera > sheet.float32_tera > sheet.float64_tera > 0, kind
        half = sheet.bfloat16_tera or sheet.float32_tera
        for dtype, tera in (("float32", sheet.float32_tera), ("bfloat16", half)):
            reached = flops / seconds(product(dtype), kind) / 1e12
            assert 0.2 * tera < reached < tera, (kind, dtype)


@pytest.mark.parametrize(
    ("kind", "meant"),
    [
        ("H100", "'h100'"),
        ("h-100", "'h100'"),
        ("RTX 4090", "'rtx-4090'"),
        ("A100", "'a100-40' or 'a100-80'"),
        ("NVIDIA A100-SXM4-80GB", "'a100-80'"),
        ("CPU", "'cpu'"),
        ("gpu", "'cuda'"),
        ("cuda:0", "'cuda'"),
    ],
)
def test_another_spelling_of_a_kind_is_refused(kind: str, meant: str) -> None:
    said = re.escape(f"did you mean {meant}? known are cpu, cuda, v100, ")
    with pytest.raises(ClusterError, match=said):
        Device(kind)
    with pytest.raises(ClusterError, match=said) as caught:
        Cluster.from_toml(f'[[devices]]\nkind = "{kind}"')
    assert caught.value.where == "cluster.toml: devices[0].kind"


@pytest.mark.parametrize("kind", ["h1000", "h20", "b200", "tpu", "l40"])
def test_a_kind_that_is_not_known_may_be_named(kind: str) -> None:
    assert Device(kind).kind not in KINDS


def test_estimates_for_a_cpu_stay_what_they_were() -> None:
    graph = product("float32")
    assert seconds(graph, "cpu") == seconds(graph, "abacus")
    given = cluster("cpu", "cpu")
    assert relative(given, graph, 4) is given


def test_unknown_kinds_are_named_with_the_known_ones() -> None:
    given = cluster("cuda", "a100-80")
    found = relative(given, product("float32"), 4)
    assert found.devices == given.devices
    (note,) = found.notes
    assert "'cuda'" in note
    assert "known kinds are cpu, cuda, v100, " in note
    assert "did you mean" not in note


@pytest.mark.parametrize(("kind", "near"), [("l4o", "l4"), ("h10", "h100"), ("tpu", "")])
def test_an_unknown_kind_that_is_near_a_known_one_names_it(kind: str, near: str) -> None:
    (note,) = relative(cluster(kind, "a100-80"), product("float32"), 4).notes
    assert ("did you mean" in note) is bool(near)
    assert not near or f"did you mean '{near}'? known kinds are " in note


@pytest.mark.parametrize("kind", ["", "  "])
def test_an_empty_kind_is_refused(kind: str) -> None:
    with pytest.raises(ClusterError, match="names none") as caught:
        Cluster.from_toml(f'[[devices]]\nkind = "{kind}"')
    assert caught.value.where == "cluster.toml: devices[0].kind"
    with pytest.raises(ClusterError, match="names none"):
        Device(kind)


def test_a_plan_says_where_its_times_come_from() -> None:
    assert source_of("measured", "cpu") == ""
    assert source_of("estimated", "cpu") == source_of("estimated", "h100") == "estimated costs"
    assert source_of("estimated", "cuda") == source_of("estimated", "tpu")
    assert source_of("estimated", "tpu") == "estimated costs of a CPU core"
    here = source_of("measured", "h100")
    assert (here == "costs measured on a CPU") is not torch.cuda.is_available()
    with pdcompile.compile(
        models.mlp(), torch.ones(4, 16), loss_fn=models.loss_for(models.mlp()),
        example_target=torch.ones(4, 16), stages=2, costs="estimated", verify="off",
    ) as pipe:  # fmt: skip
        assert pipe.plan.costs == "estimated costs"
        assert Plan.from_json(pipe.plan.to_json()) == pipe.plan


def test_unlike_kinds_get_speeds_for_this_model() -> None:
    graph = product("float16")
    found = relative(cluster("h100", "a100-80", "v100"), graph, 4096)
    speeds = [device.speed for device in found.devices]
    assert speeds[0] == 1.0
    assert speeds == sorted(speeds, reverse=True)
    assert 0.2 < speeds[1] < 0.7
    assert "relative to it" in found.notes[0]
    kept = relative(cluster("h100", "v100", speeds=(1.0, 0.7)), graph, 4096)
    assert [device.speed for device in kept.devices] == [1.0, 0.7]
    assert "that the cluster gives" in kept.notes[0]


@pytest.mark.slow
def test_a_plan_for_machines_that_are_not_here() -> None:
    model = models.gpt()
    x, y = models.batch_for(model, 8)
    flat = example_call(model, x, y)

    def planned(kind: str) -> tuple[float, str]:
        options = Options(loss_fn=models.loss_for(model), cluster=cluster(kind, kind),
                          microbatches=4, costs="estimated", verify="off")  # fmt: skip
        plan = build(model, flat, options).plan
        return plan.certificate.objective_seconds, " ".join(plan.notes)

    here, there = planned("cpu"), planned("h100")
    assert there[0] < here[0]
    assert "estimated for h100 from its data sheet" in there[1]
    assert "data sheet" not in here[1]
