"""Coarsening: what stays together, what moves for free, what the user asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.batch import example_call, resolve_batch
from pdcompile.errors import CostError
from pdcompile.ir.graph import Attr, OpGraph
from pdcompile.passes import trace
from pdcompile.passes.coarsen import coarsen, spans
from pdcompile.passes.coarsen.items import Assembly
from pdcompile.passes.coarsen.spans import Groups
from pdcompile.passes.partition import partition
from pdcompile.problem import PartitionProblem, StageLimits
from tests.helpers import models
from tests.helpers.costed import profile
from tests.helpers.graphs import B, GraphBuilder, chain, check, random_graphs, residual
from tests.helpers.problems import measure

TWO = (StageLimits(bytes_per_second=1e3),) * 2


def problem_of(graph: OpGraph, *constraints: Any, stages: int = 2) -> PartitionProblem:
    return coarsen(graph, TWO[:1] * stages, num_microbatches=4, constraints=constraints)


def item_of(problem: PartitionProblem) -> dict[str, int]:
    return {name: i for i, item in enumerate(problem.items) for name in item.ops}


def test_a_chain_stays_as_it_is() -> None:
    problem = problem_of(chain(3))
    assert [item.name for item in problem.items] == ["layers.0", "layers.1", "layers.2", "loss"]
    assert [item.parameter_bytes for item in problem.items] == [256, 256, 256, 0]
    assert [(t.value, t.producer, t.consumers) for t in problem.traffic] == [
        ("linear_0", 0, (1,)),
        ("linear_1", 1, (2,)),
        ("linear_2", 2, (3,)),
    ]
    assert problem.traffic[0].forward_bytes == problem.traffic[0].backward_bytes == 4 * 8 * 4
    assert problem.pins == ((3, 1),)


def test_loss_region_is_pinned_and_consumes_the_output() -> None:
    problem = problem_of(residual(2))
    last = item_of(problem)["cross_entropy"]
    assert problem.pins == ((last, 1),)
    head = next(t for t in problem.traffic if t.value == "head")
    assert head.consumers == (last,)
    (shared,) = problem.shared
    assert shared.fqn == "wte.weight"
    assert shared.trainable
    assert [problem.items[i].name for i in shared.items] == ["wte", "head"]
    assert all(item.parameter_bytes == 0 for item in problem.items if item.name in ("wte", "head"))


def test_container_stays_with_what_takes_it_apart() -> None:
    g = GraphBuilder()
    x = g.input("x")
    parts = g.op("parts", "torch.nn.LSTM", (x,), kind="module", dtype="container", shape=(),
                 seconds=(1, 1))  # fmt: skip
    out = g.op("out", "operator.getitem", (parts, 0), seconds=(0, 0))
    state = g.op("state", "operator.getitem", (parts, 1), seconds=(0, 0))
    far = g.op("far", "torch.relu", (out,), seconds=(1, 1))
    end = g.op("end", "operator.add", (far, state), seconds=(1, 1))
    where = item_of(problem_of(g.build(end, loss=end)))
    assert where["parts"] == where["out"] == where["state"]
    assert where["far"] != where["parts"]


def test_mutation_joins_everything_up_to_the_last_write() -> None:
    g = GraphBuilder()
    x = g.op("x", "torch.relu", (g.input("given"),), seconds=(1, 1))
    view = g.op("view", "view", (x, 8, -1), kind="method", view_of=x, seconds=(0, 0))
    before = g.op("before", "torch.relu", (x,), seconds=(1, 1))
    side = g.op("side", "torch.relu", (before,), seconds=(1, 1))
    write = g.op("write", "add_", (view, side), kind="method", mutates=("view",), seconds=(1, 1))
    after = g.op("after", "torch.relu", (x,), seconds=(1, 1))
    end = g.op("end", "operator.add", (after, write), seconds=(1, 1))
    problem = problem_of(g.build(end, loss=end))
    where = item_of(problem)
    assert len({where[name] for name in ("x", "view", "before", "side", "write")}) == 1
    assert where["after"] > where["x"]
    assert "in-place" in problem.scope


def test_every_reader_of_a_written_input_stays() -> None:
    g = GraphBuilder()
    x = g.input("x")
    g.op("write", "relu_", (x,), kind="method", mutates=("x",), seconds=(1, 1))
    middle = g.op("middle", "torch.relu", (x,), seconds=(1, 1))
    end = g.op("end", "torch.relu", (middle,), seconds=(1, 1))
    where = item_of(problem_of(g.build(end, loss=end)))
    assert where["write"] == where["middle"] != where["end"]


def test_written_buffer_joins_its_readers_and_writers() -> None:
    g = GraphBuilder()
    state = g.buffer("norm.running_mean")
    fields: dict[str, Any] = {
        "kind": "module",
        "module": "norm",
        "buffers_read": (state,),
        "seconds": (1, 1),
    }
    x = g.input("x")
    x = g.op("one", "torch.nn.BatchNorm1d", (x,), buffers_written=(state,), **fields)
    x = g.op("between", "torch.relu", (x,), seconds=(1, 1))
    x = g.op("two", "torch.nn.BatchNorm1d", (x,), buffers_written=(state,), **fields)
    end = g.op("end", "torch.relu", (x,), seconds=(1, 1))
    where = item_of(problem_of(g.build(end, loss=end)))
    assert where["one"] == where["between"] == where["two"] != where["end"]


def test_a_write_of_statistics_is_where_they_are_computed() -> None:
    """Evaluation reads the buffer there, before what follows."""
    g = GraphBuilder()
    state, count = g.buffer("ema"), g.buffer("count")
    x = g.op("one", "torch.nn.Linear", (g.input("x"),), seconds=(1, 1))
    mean = g.op("mean", "torch.mean", (x,), seconds=(1, 1))
    scaled = g.op("scaled", "torch.mul", (mean,), seconds=(1, 1))
    g.op("write", "torch.add", (scaled,), buffers_written=(state,), seconds=(1, 1))
    g.op("counted", "torch.add", (), buffers_written=(count,), seconds=(1, 1))
    x = g.op("two", "torch.sub", (x, mean), seconds=(1, 1))
    end = g.op("end", "torch.relu", (x,), seconds=(1, 1))
    where = item_of(problem_of(g.build(end, loss=end)))
    assert where["mean"] == where["scaled"] == where["write"] == where["counted"] != where["two"]


@settings(max_examples=40, deadline=None)
@given(random_graphs())
def test_what_only_a_write_needs_is_found_from_the_write_back(graph: OpGraph) -> None:
    """No search looks at every op before it, of which there are thousands for thousands of
    writes."""
    position = {op.name: i for i, op in enumerate(graph.ops)}
    readers = [[position[name] for name in graph.values[op.name].consumers] for op in graph.ops]
    for i in (i for i, found in enumerate(readers) if not found):
        alone, shared = {i}, [-1]
        for at in range(i - 1, -1, -1):
            if alone.intersection(readers[at]):
                (alone.add if alone.issuperset(readers[at]) else shared.append)(at)
        last = max(shared)
        assert spans._computed_for(graph, i, position) == (alone, None if last < 0 else last)


def test_read_only_buffer_is_copied_to_every_stage_that_reads_it() -> None:
    g = GraphBuilder()
    table = g.buffer("table")
    x = g.op("one", "torch.mul", (g.input("x"),), buffers_read=(table,), seconds=(1, 1))
    end = g.op("two", "torch.mul", (x,), buffers_read=(table,), seconds=(1, 1))
    problem = problem_of(g.build(end, loss=end))
    assert [(s.fqn, s.trainable, s.items) for s in problem.shared] == [("table", False, (0, 1))]


def test_opaque_module_called_twice_is_one_item() -> None:
    g = GraphBuilder()
    x = g.op("one", "my.Router", (g.input("x"),), kind="opaque", module="router", seconds=(1, 1))
    x = g.op("two", "my.Router", (x,), kind="opaque", module="router", seconds=(1, 1))
    end = g.op("end", "torch.relu", (x,), seconds=(1, 1))
    where = item_of(problem_of(g.build(end, loss=end)))
    assert where["one"] == where["two"] != where["end"]


def attention(multi: bool = False) -> OpGraph:
    """A projection, its split into three, views of each, and their only reader."""
    g = GraphBuilder()
    y = g.op("qkv", "torch.nn.Linear", (g.input("x"),), shape=(B, 24), seconds=(3, 6))
    parts = g.op("parts", "split", (y, 8, 1), kind="method", dtype="container", shape=(),
                 view_of=y, seconds=(0, 0))  # fmt: skip
    heads = []
    for name in "qkv":
        part = g.op(f"get_{name}", "operator.getitem", (parts, 0), view_of=y, seconds=(0, 0))
        heads.append(
            g.op(
                f"{name}_view",
                "view",
                (part, -1, 4),
                kind="method",
                view_of=y,
                shape=(B, 2, 4),
                seconds=(0, 0),
            )
        )
    mixed = g.op("mixed", "torch.nn.functional.scaled_dot_product_attention", tuple(heads),
                 seconds=(5, 9))  # fmt: skip
    if multi:
        other = g.op("other", "torch.relu", (heads[0],), seconds=(1, 1))
        mixed = g.op("sum", "operator.add", (mixed, other), seconds=(1, 1))
    return g.build(mixed, loss=mixed)


def test_views_move_to_a_neighbour() -> None:
    problem = problem_of(attention())
    assert [item.ops[0] for item in problem.items] == ["qkv", "parts"]
    assert [t.value for t in problem.traffic] == ["qkv"]


def test_views_with_two_readers_stay_a_choice() -> None:
    where = item_of(problem_of(attention(multi=True)))
    assert len({where["parts"], where["mixed"], where["other"]}) == 3


def test_constants_run_where_their_only_reader_is() -> None:
    g = GraphBuilder()
    ids = g.input("ids", (B, 8), "int64")
    steps = g.op("steps", "torch.arange", (8,), shape=(8,), dtype="int64", seconds=(1e-6, 0))
    row = g.op("row", "unsqueeze", (steps, 0), kind="method", view_of=steps, shape=(1, 8),
               dtype="int64", seconds=(0, 0))  # fmt: skip
    tokens = g.op("tokens", "torch.nn.Embedding", (ids,), kind="module", module="wte",
                  parameters=(g.parameter("wte.weight"),), seconds=(1, 1))  # fmt: skip
    places = g.op("places", "torch.nn.Embedding", (row,), kind="module", module="wpe",
                  parameters=(g.parameter("wpe.weight"),), seconds=(1, 1))  # fmt: skip
    end = g.op("end", "operator.add", (tokens, places), seconds=(1, 1))
    problem = problem_of(g.build(end, loss=end))
    where = item_of(problem)
    assert where["steps"] == where["row"] == where["places"] != where["tokens"]
    assert "1.00 us of ops moved" in problem.scope


def test_views_of_parameters_go_with_their_only_reader() -> None:
    """The weights of experts are transposed before they are multiplied with."""
    g = GraphBuilder()
    x = g.input("x")
    early = g.op("early", "torch.relu", (x,), seconds=(1, 1))

    own, tied = g.parameter("experts"), g.parameter("tied")
    turned, shared = (
        g.op(name, "torch.transpose", (Attr(fqn), 0, 1), parameters=(fqn,), shape=(8, 8),
             seconds=(0, 0))
        for name, fqn in (("turned", own), ("shared", tied))
    )  # fmt: skip
    again = g.op("again", "view", (turned, 8, 8), kind="method", view_of=turned, shape=(8, 8),
                 seconds=(0, 0))  # fmt: skip
    mixed = g.op("mixed", "torch.matmul", (early, again), seconds=(1, 1))
    both = g.op("both", "torch.matmul", (mixed, shared), seconds=(1, 1))
    end = g.op("end", "torch.nn.functional.linear", (both, Attr(tied)), parameters=(tied,),
               seconds=(1, 1))  # fmt: skip
    problem = problem_of(g.build(end, loss=end))
    where = item_of(problem)
    assert where["turned"] == where["again"] == where["mixed"]
    assert problem.items[where["mixed"]].parameter_bytes == 8 * 8 * 4
    assert where["shared"] not in (where["both"], where["end"])  # a choice: another op reads it too
    assert (
        "views and shares of parameters moved, with these, to the op that reads them (1)"
        in problem.scope
    )


def test_costs_are_required() -> None:
    with pytest.raises(CostError, match="'linear_0'"):
        problem_of(chain(2, costs=False))


def test_a_graph_without_ops_and_without_loss() -> None:
    g = GraphBuilder()
    x = g.input("x")
    problem = problem_of(g.build(x), stages=1)
    assert [item.ops for item in problem.items] == [()]
    assert problem.traffic == ()


@pytest.mark.slow
def test_twenty_thousand_ops_keep_their_order() -> None:
    graph = chain(20_000)
    problem = problem_of(graph)
    assert [name for item in problem.items for name in item.ops] == [op.name for op in graph.ops]


@given(random_graphs())
@settings(max_examples=150)
def test_every_op_is_in_one_item_and_items_are_in_order(graph: OpGraph) -> None:
    check(graph)
    problem = problem_of(graph)
    names = [name for item in problem.items for name in item.ops]
    assert sorted(names) == sorted(op.name for op in graph.ops)
    assert all(t.producer < c for t in problem.traffic for c in t.consumers)
    where = item_of(problem)
    for op in graph.ops:
        for name in op.inputs:
            if name in where:
                assert where[name] <= where[op.name]


@given(random_graphs(), st.data())
@settings(max_examples=100)
def test_a_partition_of_items_is_a_legal_partition_of_ops(
    graph: OpGraph, data: st.DataObject
) -> None:
    problem = problem_of(graph, stages=3)
    stage_of: list[int] = []
    pins = dict(problem.pins)
    for item in range(len(problem.items)):
        low = max((stage_of[t.producer] for t in problem.traffic if item in t.consumers), default=0)
        stage_of.append(pins.get(item, data.draw(st.integers(low, 2))))
    stage = {name: stage_of[i] for i, item in enumerate(problem.items) for name in item.ops}
    last_write: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        for name in op.mutates:
            last_write[graph.values[name].storage] = i
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            value = graph.values[name]
            if value.producer is None:
                continue
            assert stage[name] <= stage[op.name]
            if not value.is_tensor or i <= last_write.get(value.storage, -1):
                assert stage[name] == stage[op.name], "a cut where there may be none"
    writers = {stage[op.name] for op in graph.ops if op.buffers_written}
    assert len(writers) <= 1


@given(random_graphs(max_ops=7))
@settings(max_examples=40)
def test_moving_views_never_loses_the_optimum(graph: OpGraph) -> None:
    """Two stages, every assignment of single ops that keeps the spans, by brute force."""
    coarse = problem_of(graph)
    fine = problem_of_spans(graph)
    slack = constant_seconds(graph)
    best, allowed = best_bottleneck(coarse), best_bottleneck(fine)
    assert allowed - 1e-9 <= best <= allowed + slack + 1e-9


def constant_seconds(graph: OpGraph) -> float:
    """Seconds of ops that nothing of the call enters: only they may run elsewhere at a price."""
    varying = {given.name for given in graph.inputs}
    total = 0.0
    for op in graph.ops:
        if varying.isdisjoint(op.inputs):
            assert op.cost is not None
            total += op.cost.forward_seconds + op.cost.backward_seconds
        else:
            varying.add(op.name)
    return total


def problem_of_spans(graph: OpGraph) -> PartitionProblem:
    """The same problem without moving anything."""
    groups = Groups(len(graph.ops) + 1)
    spans.join_spans(graph, groups)
    spans.close_cycles(graph, groups)
    assembly = Assembly.of(graph, groups, graph.batch_size)
    return PartitionProblem(
        items=assembly.items(),
        traffic=assembly.traffic(),
        stages=TWO,
        shared=assembly.shared(),
        pins=((assembly.output_item, 1),),
    )


def best_bottleneck(problem: PartitionProblem) -> float:
    """The smallest largest load over all monotone assignments to two stages."""
    pins = dict(problem.pins)
    free = [i for i in range(len(problem.items)) if i not in pins]
    best = float("inf")
    for choice in itertools.product((0, 1), repeat=len(free)):
        stage_of = [pins.get(i, 0) for i in range(len(problem.items))]
        for i, stage in zip(free, choice, strict=True):
            stage_of[i] = stage
        flows = [(t.producer, c) for t in problem.traffic for c in t.consumers]
        if any(stage_of[a] > stage_of[b] for a, b in (*flows, *problem.order)):
            continue
        best = min(best, max(measure(problem, stage_of).loads))
    return best


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "low", "high"), [("gpt", 20, 50), ("unet", 8, 20)])
def test_real_models_coarsen_to_readable_items(name: str, low: int, high: int) -> None:
    model = getattr(models, name)()
    inputs, target = models.batch_for(model, 8)
    flat = example_call(model, inputs, target)
    loss = models.loss_for(model)
    graph = trace.capture(model, flat, resolve_batch(flat), loss, microbatch_size=4).train
    problem = problem_of(profile(graph, None, microbatch_size=4, costs="estimated"), stages=4)
    assert low <= len(problem.items) <= high
    named = {item.name.partition(":")[0] for item in problem.items}
    assert named >= {path for path, module in model.named_modules() if module._parameters}
    answer, certificate = partition(problem)
    assert sorted(set(answer.stage_of)) == [0, 1, 2, 3]
    assert certificate.objective_seconds > 0
    if name == "gpt":
        (shared,) = problem.shared
        assert [problem.items[i].name for i in shared.items] == ["wte", "lm_head"]
        attention = item_of(problem)["scaled_dot_product_attention"]
        assert "split" in problem.items[attention].ops
