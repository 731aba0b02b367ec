"""Training sends nothing that only the model's outputs need, unless these are asked for."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pdcompile
from pdcompile import Cluster, CutBefore
from pdcompile.batch import example_call, resolve_batch
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import LeftOut, OpCost, OpGraph, Ref, leaves, walk
from pdcompile.passes.stages.boundaries import stage_of_ops
from pdcompile.passes.stages.kept_outputs import loss_only, planned
from pdcompile.passes.trace import capture
from pdcompile.plan import Plan, Training
from pdcompile.schedule.registry import KINDS
from tests.helpers.llama import batch, llama
from tests.helpers.pipelines import by_hand, states_equal


class Branches(nn.Module):
    """A loss, and beside it values that are costly, random, or written to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.aside = nn.Linear(4, 64)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        aside = self.aside(hidden).exp()
        noise = nn.functional.dropout(hidden, 0.5, self.training)
        hidden = nn.functional.dropout(hidden, 0.5, self.training)
        with torch.no_grad():
            self.seen.add_(hidden.sum(0))
        return {"loss": self.last(hidden).mean(), "aside": [aside, (noise,)], "hidden": hidden}


def captured(model: nn.Module, inputs: Any, loss_fn: Any = None, target: Any = None) -> Any:
    flat = example_call(model, inputs, target)
    return capture(model, flat, resolve_batch(flat, 0), loss_fn)


def compiled(model: nn.Module, outputs: str, **more: Any) -> Any:
    return pdcompile.compile(
        model, costs="estimated", cluster=Cluster.local(2), time_limit=0, outputs=outputs,
        optimizer=None, microbatches=2, **more,
    )  # fmt: skip


def test_what_has_an_effect_besides_its_value_stays() -> None:
    whole = captured(Branches(), torch.ones(4, 4))
    smaller = replace(whole, train=loss_only(whole.train))
    gone = {op.name for op in whole.train.ops} - {op.name for op in smaller.train.ops}
    paths = {op.module_path or op.target for op in whole.train.ops if op.name in gone}
    assert "aside" in paths
    assert [op.name for op in smaller.train.ops if op.draw is not None] == [
        op.name for op in whole.train.ops if op.draw is not None
    ]
    assert any(op.mutates or op.buffers_written for op in smaller.train.ops)
    assert [ref.name for ref in walk(smaller.train.output, Ref)] == [whole.train.loss]
    names = {op.name for op in smaller.train.ops}
    assert all(set(value.consumers) <= names for value in smaller.train.values.values())


def test_what_loss_fn_reads_stays() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.aside = nn.Linear(4, 2), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.aside(x)

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output[0], target)

    whole = captured(Two(), torch.ones(4, 4), loss_fn, torch.ones(4, 2))
    smaller = loss_only(whole.train)
    assert [op.module_path for op in smaller.ops if op.kind == "module"] == ["layer"]
    assert len(walk(smaller.output, Ref)) == 1
    assert walk(smaller.output, LeftOut)
    assert OpGraph.from_json(smaller.to_json()) == smaller
    assert OpGraph.from_json(smaller.to_json()).output == smaller.output


def test_what_is_made_beside_the_plan_costs_the_last_stage_time() -> None:
    x, y = examples()
    whole = captured(Layers(4, 0), x, of_logits, y).train
    cost = OpCost(forward_seconds=1.0, backward_seconds=2.0)
    whole = replace(whole, ops=tuple(replace(op, cost=cost) for op in whole.ops))
    least, needed = (
        planned(whole, Training(keeps_outputs=keeps, sends_outputs=False))
        for keeps in (False, True)
    )
    assert [op.name for op in needed.ops] == [op.name for op in least.ops]
    beside = len(whole.ops) - len(needed.ops)
    assert beside > 3
    seconds = {op.name: (op.cost.forward_seconds, op.cost.backward_seconds) for op in needed.ops}
    assert seconds.pop(whole.loss) == (1.0 + beside, 2.0)
    assert set(seconds.values()) == {(1.0, 2.0)}
    assert {op.cost for op in least.ops} == {cost}


def test_without_a_loss_and_without_other_outputs_nothing_changes() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean()

    alone = captured(Alone(), torch.ones(4, 4)).train
    assert loss_only(alone) is alone
    plain = captured(nn.Linear(4, 2), torch.ones(4, 4)).train
    assert loss_only(plain) is plain


def test_gradients_and_buffers_are_the_same_with_less_traffic() -> None:
    found = {}
    for outputs in ("none", "last"):
        torch.manual_seed(0)
        model = Branches()
        pipe = compiled(model, outputs)
        result = pipe.forward_backward(torch.arange(16.0).view(4, 4))
        grads = {name: p.grad for name, p in pipe.named_parameters()}
        found[outputs] = float(result.loss), grads, model.seen.clone()
        if outputs == "none":
            assert result.outputs is None
            assert set(pipe.predict(torch.ones(4, 4))) == {"loss", "aside", "hidden"}
            assert result.loss is not None
        else:
            assert set(result.outputs) == {"loss", "aside", "hidden"}
            assert isinstance(result.outputs["hidden"], Tensor | pdcompile.OmittedOutput)
    (loss, grads, seen), (expected, theirs, buffer) = found["none"], found["last"]
    assert loss == expected
    assert torch.equal(seen, buffer)
    for name, grad in grads.items():
        assert torch.equal(grad, theirs[name]) if grad is not None else theirs[name] is None


@pytest.mark.slow
def test_the_caches_of_a_decoder_are_not_sent() -> None:
    found: dict[str, Any] = {}
    for outputs in ("none", "last", "everything"):
        # One cut for all: a faster plan may send more, and a busy planner find another one.
        pipe = compiled(llama(use_cache=True), outputs, constraints=(CutBefore("model.layers.1"),))
        result = pipe.forward_backward(**batch(0))
        grads = [parameter.grad.clone() for parameter in pipe.parameters()]
        found[outputs] = pipe.plan, result, (result.loss.wait(), *grads), pipe.predict(**batch(1))
    sent = {key: sum(plan.forecast.sent_bytes) for key, (plan, *_) in found.items()}
    assert sent["none"] <= sent["last"] < sent["everything"]
    for _, _, values, outputs in found.values():
        assert all(map(torch.equal, values, found["last"][2]))
        assert all(isinstance(layer.keys, Tensor) for layer in outputs.past_key_values.layers)
    ours, theirs = found["last"][1].outputs, found["everything"][1].outputs
    assert type(ours) is type(theirs)
    assert type(ours.past_key_values) is type(theirs.past_key_values)
    assert torch.equal(ours.logits, theirs.logits)
    first, last = ours.past_key_values.layers
    assert isinstance(first.keys, pdcompile.OmittedOutput)
    assert isinstance(first.values, pdcompile.OmittedOutput)
    assert torch.equal(last.values, theirs.past_key_values.layers[1].values)
    (note,) = [note for note in found["last"][0].notes if "leave out" in note]
    assert "past_key_values.layers[0].keys" in note
    assert "everything" in note
    assert not any("leave out" in note for note in found["everything"][0].notes)


def test_a_mark_says_how_to_have_the_output() -> None:
    mark = pdcompile.OmittedOutput("cache[0].keys")
    uses: list[Any] = [
        lambda: mark + 1, lambda: torch.ones(2) * mark, lambda: torch.cat([torch.ones(2), mark]),
        lambda: list(mark), lambda: bool(mark), lambda: mark[0], lambda: float(mark), len,
        lambda: mark < torch.ones(2), lambda: torch.relu(mark), lambda: np.asarray(mark),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(ConfigError, match="leave out this output") as error:
            use(mark) if use is len else use()
        assert "cache[0].keys" in str(error.value)
        assert "outputs=" in str(error.value)
    with pytest.raises(AttributeError, match="no 'shape' here: training steps leave out"):
        _ = mark.shape  # type: ignore[attr-defined]
    assert not hasattr(mark, "shape")
    for again in (copy.deepcopy(mark), pickle.loads(pickle.dumps(mark))):
        assert repr(again) == repr(mark) == "OmittedOutput('cache[0].keys')"


@dataclasses.dataclass
class Output:
    """Class that no pytree knows."""

    logits: Tensor
    hidden: Any


class Layers(nn.Module):
    """Layers that return some of what each makes, and what is made of that for the caller alone."""

    captured_once = True

    def __init__(self, count: int, returned: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.drop, self.probe = nn.Dropout(0.2), nn.Linear(4, 2)
        self.returned = returned

    def forward(self, x: Tensor) -> Output:
        made = [x]
        hidden: dict[str, Any] = {"at the start": x}
        for i, layer in enumerate(self.layers):
            x = self.drop(layer(x)).tanh()
            made.append(x)
            if self.returned >> i & 1:
                hidden[f"layer_{i}"] = (x, [x.detach()])
        probe = self.probe(x)
        hidden |= {"sum": sum(made), "probe": probe, "odds": {"of it": probe.exp()}}
        return Output(x, hidden | {"bias": self.layers[0].bias.sum(), "own": self.probe.bias.exp()})


def of_logits(output: Output, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.logits, target)


def of_all(output: Output, target: Tensor) -> Tensor:
    hidden = [value[0] for value in output.hidden.values() if isinstance(value, tuple)]
    return of_logits(output, target) + sum(one.square().mean() for one in hidden)


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)


@pytest.mark.slow
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@example(stages=3, returned=7, schedule="interleaved", loss_fn=of_logits, again=False, many=True)
@example(stages=3, returned=5, schedule="1f1b", loss_fn=of_all, again=True, many=True)
@given(
    stages=st.integers(1, 4),
    returned=st.integers(0, 15),
    schedule=st.sampled_from(["gpipe", "1f1b", "2bw", "zb-h1", "stash", "vsync"]),
    loss_fn=st.sampled_from([of_logits, of_all]),
    again=st.booleans(),
    many=st.booleans(),
)
def test_whatever_is_left_out_training_stays_the_same(
    stages: int, returned: int, schedule: str, loss_fn: Any, again: bool, many: bool
) -> None:
    several = schedule == "interleaved"
    each = KINDS[schedule].updates_each
    common: dict[str, Any] = {
        "loss_fn": loss_fn, "optimizer": partial(torch.optim.AdamW, lr=0.1),
        "schedule": schedule, "microbatches": 3 if many and not each else 1,
    }  # fmt: skip
    torch.manual_seed(0)
    model = Layers(4, returned)
    twin = copy.deepcopy(model)
    stages *= 2 if several else 1
    more: dict[str, Any] = {
        "ranks": tuple(n % (stages // 2) for n in range(stages) if several),
        "recompute": again and not several, **common,
    }  # fmt: skip
    least = by_hand(copy.deepcopy(model), stages, *examples(), outputs="none", **more).prepare()
    with by_hand(model, stages, *examples(), **more).prepare() as pipe:
        assert pipe.plan.edges == least.plan.edges
        expected = pdcompile.reference(twin, plan=pipe.plan if each else None, **common)
        for _ in range(3):
            ours, theirs = (
                one.step(examples()[0], target=examples()[1]) for one in (pipe, expected)
            )
            assert float(ours.loss) == float(theirs.loss)
        check_outputs(pipe, ours.outputs, theirs.outputs)
        pipe.flush()
        assert not states_equal(pipe.full_state_dict(), expected.full_state_dict())
        assert_equal(pipe.predict(examples()[0]), expected.predict(examples()[0]))


def check_outputs(pipe: Any, ours: Output, theirs: Output) -> None:
    """Check that what the last stage can make is there, and the rest is marked."""
    train, last = pipe._running.compiled.capture.train, len(pipe.plan.stages) - 1
    stage_of = stage_of_ops(train, pipe.plan)
    made = {name for name, stage in stage_of.items() if stage == last}
    read = {name for op in train.ops if stage_of[op.name] == last for name in op.inputs}
    assert type(ours) is Output
    assert torch.equal(ours.logits, theirs.logits)
    assert list(ours.hidden) == list(theirs.hidden)
    parts = (tree_leaves(one.hidden) for one in (ours, theirs))
    for one, other in zip(*parts, strict=True):
        assert isinstance(one, pdcompile.OmittedOutput) or torch.equal(one, other)
    for leaf in leaves(train.output):
        if isinstance(leaf, LeftOut):
            assert leaf.name not in made
        elif isinstance(leaf, Ref):
            assert leaf.name in made | read | {"x"}
    for key in ("probe", "odds", "own"):  # of the last layer's result, or of no other stage's
        assert not any(
            isinstance(x, pdcompile.OmittedOutput) for x in tree_leaves(ours.hidden[key])
        )
    assert isinstance(ours.hidden["bias"], Tensor) == (last == 0)


def assert_equal(ours: Output, theirs: Output) -> None:
    parts = (tree_leaves((one.logits, one.hidden)) for one in (ours, theirs))
    assert all(map(torch.equal, *parts))


def compiled_in_two(**more: Any) -> Any:
    torch.manual_seed(0)
    x, y = examples()
    given: dict[str, Any] = {
        "costs": "estimated", "optimizer": None, "microbatches": 2, "loss_fn": of_logits,
        "stages": 2,
        "constraints": () if "plan" in more else [pdcompile.CutBefore("layers.2")],
    }  # fmt: skip
    return pdcompile.compile(Layers(4, 15), x, example_target=y, **(given | more))


def test_a_plan_of_before_sends_what_it_says() -> None:
    x, y = examples()
    with compiled_in_two(outputs="everything") as pipe:
        text = json.loads(pipe.plan.to_json())
        whole, expected = pipe.plan, pipe.forward_backward(x, target=y)
    for unknown in ("sends_outputs", "linear_lr_scaling", "loss_scaling"):
        del text["training"][unknown]
    earlier = Plan.from_json(json.dumps(text))
    assert earlier.training.sends_outputs
    with compiled_in_two(plan=earlier, outputs="last") as pipe:
        assert pipe.plan.edges == whole.edges
        found = pipe.forward_backward(x, target=y)
        assert_equal(found.outputs, expected.outputs)


def test_a_plan_that_leaves_outputs_out_gives_no_more() -> None:
    with compiled_in_two() as pipe:
        plan = Plan.from_json(pipe.plan.to_json())
    for outputs in ("everything", "all"):
        with pytest.raises(ConfigError, match=f"outputs='{outputs}' asks for all outputs"):
            compiled_in_two(plan=plan, outputs=outputs)
    with compiled_in_two(plan=plan) as pipe:
        assert pipe.plan.edges == plan.edges
    with compiled_in_two(plan=plan, outputs="none") as pipe:
        assert pipe.plan.edges == plan.edges


def test_a_plan_for_other_outputs_runs_where_it_has_them() -> None:
    x, y = examples()
    with compiled_in_two(outputs="none") as pipe:
        plan, expected = Plan.from_json(pipe.plan.to_json()), pipe.forward_backward(x, target=y)
    with compiled_in_two(plan=plan, outputs="last") as pipe:
        assert pipe.plan.edges == plan.edges
        assert pipe.plan.stages[-1].output_bytes > plan.stages[-1].output_bytes
        found = pipe.forward_backward(x, target=y)
        assert float(found.loss) == float(expected.loss)
        assert isinstance(found.outputs.hidden["odds"]["of it"], Tensor)


@pytest.mark.slow
def test_what_cannot_be_sent_is_an_output_of_evaluation() -> None:
    """Rows that values choose are chosen on the last stage."""

    class Chooses(Layers):
        def forward(self, x: Tensor) -> Any:
            chosen = self.layers[0](x)
            made = vars(super().forward(x))
            return made | {"chosen": chosen[chosen.sum(1) > 0].sum() * 2}

    x, y = examples()
    model = Chooses(4, 0)
    pipe = pdcompile.compile(
        model, x, example_target=y, costs="estimated", optimizer=None, microbatches=1, stages=3,
        loss_fn=lambda output, target: (output["logits"] - target).square().mean(), keep_model=True,
    )  # fmt: skip
    with pipe:
        assert isinstance(pipe.step(x, target=y).outputs["chosen"], pdcompile.OmittedOutput)
        assert torch.equal(pipe.predict(x)["chosen"], model.eval()(x)["chosen"])
