"""Plans as files: they come back, and whatever is wrong in one is named with its place."""

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdcompile.cluster import Cluster
from pdcompile.errors import PlanError
from pdcompile.plan import (
    Certificate,
    Edge,
    Forecast,
    MemoryLedger,
    Plan,
    StagePlan,
    TiedParameter,
    Training,
)
from pdcompile.problem import ANY_CUT

PLAN = Plan(
    fingerprint="abc",
    stages=(
        StagePlan(0, ("embed", "block_0"), ("wte.weight",), 1, (0,), 1.5, 3.0, 64, 64, 10, 5),
        StagePlan(1, ("block_1",), ('h.1."odd"\n.weight',), 1, (1,), 1e-12, 3e12),
        StagePlan(2, ("head",), ("wte.weight",), 1, (2,)),
    ),
    edges=(
        Edge("block_0", 0, (1, 2), 4096, True, ("b", "2*b+1", "8"), "bfloat16"),
        Edge("block_1", 1, (2,), 0, False),
    ),
    tied=(TiedParameter("wte.weight", (0, 2), 64),),
    training=Training("1f1b", 4, 16, (2, 1, 0), max_grad_norm=1.0),
    cluster=Cluster.parse("3").to_toml(),
    certificate=Certificate(2.0, 2.0, "optimal", "brute force", 0.1, ANY_CUT),
    forecast=Forecast(2.0, 8.0, 0.25, (1, 2, 3), (MemoryLedger(1, 2, 3, 4, 5, 6, 7),) * 3),
    notes=("batch norm counts microbatches",),
)


def edited(path: str, value: Any) -> str:
    """The plan's JSON with one place replaced: ``stages.1.ops``."""
    data = json.loads(PLAN.to_json())
    *way, last = path.split(".")
    part = data
    for step in way:
        part = part[int(step) if isinstance(part, list) else step]
    part[int(last) if isinstance(part, list) else last] = value
    return json.dumps(data)


def test_json_comes_back() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert Plan.from_json(str(PLAN).encode()) == PLAN
    assert Plan.from_json(PLAN.to_json()).to_json() == PLAN.to_json()
    assert all(len(line) <= 100 for line in PLAN.to_json().splitlines() if "cluster" not in line)


def test_hash_is_of_the_contents() -> None:
    assert Plan.from_json(PLAN.to_json()).hash() == PLAN.hash()
    assert Plan.from_json(edited("training.seed", 1)).hash() != PLAN.hash()
    assert len(PLAN.hash()) == 64


def test_ledger_and_gap() -> None:
    assert MemoryLedger(1, 2, 3, 4, 5, 6, 7).total_bytes == 28
    assert Certificate(2.0, 1.0, "feasible", "", 0, "").gap == 0.5
    assert Certificate(2.0, 2.0 - 1e-6, "optimal", "", 0, "").gap == 0.0
    assert Certificate(0.0, 0.0, "optimal", "", 0, "").gap == 0.0


def test_long_lists_are_wrapped_and_come_back() -> None:
    ops = tuple(f"operator_with_a_long_name_{i}" for i in range(50))
    stages = (StagePlan(0, ops, (), 1, (0,)), StagePlan(1, ("z",), ()), StagePlan(2, ("y",), ()))
    certificate = PLAN.certificate
    plan = Plan("", stages, (), (), Training(), PLAN.cluster, certificate)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert max(len(line) for line in text.splitlines() if "cluster" not in line) <= 100


@example({"schema": []})
@given(st.dictionaries(st.text(), st.recursive(st.none() | st.text(), st.lists), max_size=3))
def test_other_json_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(data))


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        (PLAN.to_json()[:200], "not JSON"),
        ("[]", "not an object"),
        ("3", "not an object"),
        (PLAN.to_json().replace("1.5", "NaN"), "NaN"),
        (PLAN.to_json().replace("1.5", "Infinity"), "Infinity"),
        (PLAN.to_json().replace("1.5", "1e999"), "too large"),
        (PLAN.to_json().replace("4096", "9" * 30), "63 bits"),
        (PLAN.to_json().replace("4096", "9" * 5000), "4300 digits"),
        (PLAN.to_json().replace('"seed"', '"seed": 1, "seed"'), "'seed'|\"seed\" appears twice"),
        (DEEP, "nested deeper"),
        ('{"a":' * 80 + "1" + "}" * 80, "nested deeper"),
        ('{"fingerprint": "\\ud800"}', "surrogate"),
        (b"\xff{}", "UTF-8"),
        (b"{" + b" " * (64 * 2**20) + b"}", "more than"),
    ],
    ids=range(16),
)
def test_broken_text(text: str | bytes, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        Plan.from_json(text, where="my/plan.json")
    assert "my/plan.json" in str(caught.value.where)


@pytest.mark.parametrize(
    ("path", "value", "where", "message"),
    [
        ("schema", "pdcompile.plan/9", "schema", "pdcompile.plan/9"),
        ("surprise", 1, "plan.json", "unknown key"),
        ("stages.1.opps", [], "stages[1]", "unknown key"),
        ("stages", [], "stages", "no stages"),
        ("stages", {}, "stages", "not a list"),
        ("stages.1", None, "stages[1]", "not an object"),
        ("stages.1.ops.0", 3, "stages[1].ops[0]", "not text"),
        ("stages.1.ops.0", "embed", "stages[1].ops[0]", "assigned twice"),
        ("stages.1.ops.0", "../../x", "stages[1].ops[0]", "not an op name"),
        ("stages.1.ops.0", "a\x00b", "stages[1].ops[0]", "not an op name"),
        ("stages.1.index", 2, "stages[1].index", "index 2 in position 1"),
        ("stages.1.index", True, "stages[1].index", "true is not a whole number"),
        ("stages.1.index", 1.0, "stages[1].index", "not a whole number"),
        ("stages.1.forward_seconds", -1, "stages[1].forward_seconds", "negative"),
        ("stages.1.forward_seconds", "1", "stages[1].forward_seconds", "not a number"),
        ("stages.1.saved_bytes", -1, "stages[1].saved_bytes", "negative"),
        ("stages.1.parameters", ["b", "a"], "stages[1].parameters", "not sorted"),
        ("stages.1.trainable_bytes", 7, "stages[1].trainable_bytes", "7 trainable of 0"),
        ("stages.1.replicas", 0, "stages[1].replicas", "a stage with 0 replicas"),
        ("stages.1.replicas", 1 << 40, "stages[1].replicas", "1,099,511,627,776 replicas"),
        ("stages.1.replicas", 2, "stages[1].ranks", "1 ranks for 2"),
        (
            "stages.1.ranks",
            [0],
            "stages[1].ranks",
            "rank 0 holds stages [0, 1]; sched",
        ),
        ("stages.1.ranks", [7], "stages", "no device 7"),
        ("edges.1.value", "block_0", "edges[1]", "two edges"),
        ("edges.1.source", 5, "edges[1].source", "no stage 5"),
        ("edges.1.source", 0, "edges[1].source", "made on stage 1"),
        ("edges.1.targets", [0], "edges[1].targets", "from stage 1 to stage 0"),
        ("edges.1.targets", [1], "edges[1].targets", "from stage 1 to stage 1"),
        ("edges.1.targets", [3], "edges[1].targets", "no stage 3"),
        ("edges.1.targets", [], "edges[1].targets", "without targets"),
        ("edges.0.targets", [2, 1], "edges[0].targets", "not ascending"),
        ("edges.1.bytes", -4, "edges[1].bytes", "negative"),
        ("edges.1.dtype", "float99", "edges[1].dtype", "float99"),
        ("edges.1.shape", ["n"], "edges[1].shape", "not a size"),
        ("edges.1.gradient", 1, "edges[1].gradient", "not true or false"),
        ("tied.0.stages", [0], "tied[0].stages", "fewer than two"),
        ("tied.0.stages", [0, 1], "tied[0].stages", "stage 1 does not hold"),
        ("tied.0.stages", [2, 0], "tied[0].stages", "not ascending"),
        ("training.schedule", "2fb1", "training.schedule", "2fb1"),
        ("training.schedule", "auto", "training.schedule", "auto"),
        ("training.num_microbatches", 0, "training.num_microbatches", "is 0"),
        ("training.batch_size", 0, "training.batch_size", "is 0"),
        ("training.warmup", [1, 0], "training.warmup", "2 warm-up depths for 3"),
        ("training.warmup", [0, 1, 2], "training.warmup", "increases"),
        ("training.parts", 0, "training.parts", "0 parts by '', and the cluster joins 1"),
        ("training.parts", 3, "training.parts", "3 parts by '', and the cluster joins 1"),
        ("training.split", "samples", "training.parts", "1 parts by 'samples'"),
        ("training.split", "rows", "training.split", "not one of"),
        ("training.max_grad_norm", 0, "training.max_grad_norm", "clips"),
        ("training.max_grad_norm", -1, "training.max_grad_norm", "negative"),
        ("certificate.bound_seconds", 2.5, "certificate.bound_seconds", "above objective"),
        ("certificate.bound_seconds", 1.0, "certificate.status", "gap of 50"),
        ("certificate.status", "perfect", "certificate.status", "not one of"),
        ("cluster", "x = ", "cluster", "not TOML"),
        ("cluster", Cluster.parse("2").to_toml(), "cluster", "3 ranks on a cluster of 2"),
        ("forecast.sent_bytes", [1], "forecast.sent_bytes", "1 entries for 3"),
    ],
)
def test_edited_into_nonsense(path: str, value: Any, where: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(edited(path, value))
    assert message in caught.value.message
    assert where in str(caught.value.where)
    assert caught.value.remedy


def test_missing_keys_are_named() -> None:
    data = json.loads(PLAN.to_json())
    for key in ("fingerprint", "stages", "certificate"):
        less = copy.deepcopy(data)
        del less[key]
        with pytest.raises(PlanError, match=f"'{key}' is missing"):
            Plan.from_json(json.dumps(less))
    del data["forecast"], data["notes"], data["training"]["seed"]
    assert Plan.from_json(json.dumps(data)).training == PLAN.training


def test_numbers_that_would_overflow_are_refused() -> None:
    data = json.loads(PLAN.to_json())
    data["stages"][0]["forward_seconds"] = 1e308
    with pytest.raises(PlanError, match=r"forward_seconds is 1e\+308: .*too large"):
        Plan.from_json(json.dumps(data))


def test_nonsense_is_not_written() -> None:
    bad = Plan("", PLAN.stages, (), (), Training(optimizer_factor=float("nan")), PLAN.cluster,
               PLAN.certificate)  # fmt: skip
    with pytest.raises(PlanError, match="not finite"):
        bad.to_json()
