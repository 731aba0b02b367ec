"""Modules that are divided as a `Split` asks: layouts, what cannot be, training on ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pdcompile
from examples.gpt import loss_fn
from pdcompile import Split
from pdcompile.batch import example_call, resolve_batch
from pdcompile.errors import ConfigError
from pdcompile.parts.shard import Split as Family
from pdcompile.passes.parts import in_parts
from pdcompile.passes.parts.layouts import Layouts, lay_out
from pdcompile.plan import Plan, Training
from pdcompile.problem.constraints import parsed, smallest_conflict
from tests.helpers.captures import capture_once
from tests.helpers.divided import batch_of, model_of
from tests.helpers.launch import processes
from tests.test_parts.test_experts import capture_of
from tests.test_parts.test_pipelines import COMMON, agree


@cache
def captured(name: str) -> Any:
    model, (inputs, target) = model_of(name), batch_of(name)
    if target is None:
        return capture_of(model, **inputs)
    flat = example_call(model, inputs, target)
    return capture_once(model, flat, resolve_batch(flat), loss_fn)


def products(layouts: Layouts, module: str) -> list[str]:
    """The axes of the products of a module, in order; "" where one stays whole."""
    stay = {one.op for one in layouts.stays}
    known = (op.name for op in layouts.graph.ops if op.module_path.startswith(module))
    found = [n for n in known if n in stay or (layouts.axes.get(n) and n in _PRODUCTS)]
    return [layouts.axes.get(name, "") for name in found]


_PRODUCTS = {f"blocks_{i}_{end}" for i in range(2)
             for end in ("attention_qkv", "attention_proj", "up", "down")}  # fmt: skip
_PRODUCTS |= {"scaled_dot_product_attention", "scaled_dot_product_attention_1"}


@pytest.mark.parametrize(
    ("family", "axis", "expected"),
    [
        ("width", "sequence", ["sequence", "heads", "sequence", "sequence", "sequence"]),
        ("sequence", "width", ["heads", "heads", "heads", "hidden", "hidden"]),
        ("width", "samples", ["samples"] * 5),
        ("samples", "whole", [""] * 5),
    ],
)
def test_one_block_is_divided_otherwise(family: Family, axis: Any, expected: list[str]) -> None:
    """Its products are; those of the other block are as they would be without it."""
    graph = captured("gpt").train
    usual = lay_out(graph, family, 2)
    found = lay_out(graph, family, 2, splits=[Split("blocks.0", axis)])
    assert products(found, "blocks.0") == expected != products(usual, "blocks.0")
    assert products(found, "blocks.1") == products(usual, "blocks.1")


def test_a_module_without_products() -> None:
    graph = captured("gpt").train
    assert "blocks_0_ln_1" not in lay_out(graph, "width", 2).axes
    found = lay_out(graph, "width", 2, splits=[Split("blocks.0.ln_1", "sequence")])
    assert found.axes["blocks_0_ln_1"] == "sequence"


def test_experts_of_one_layer() -> None:
    splits = [Split("layers.0", "experts+samples")]
    found = lay_out(captured("switch").train, "samples", 2, splits=splits)
    assert {*found.shards} == {"layers.0.switch.up", "layers.0.switch.down"}


@pytest.mark.parametrize(
    ("model", "given", "splits", "match", "remedy"),
    [
        ("gpt", {"split": "width"}, [Split("blocks.0", "experts"), Split("blocks.1", "samples")],
         r"^Split\('blocks.0', 'experts'\): it has no experts",
         "leave out Split('blocks.0', 'experts')"),
        ("gpt", {"split": "sequence"}, [Split("blocks.0.attention", "context")],
         "it has no axis of context", "leave out Split('blocks.0.attention', 'context')"),
        ("gpt", {"split": "auto"},
         [Split("blocks.1", "width"), Split("blocks.0", "width"), Split("*.up", "samples")],
         r"cannot hold together: Split\('blocks.1', 'width'\) and Split\('\*.up', 'samples'\); .*"
         "both of blocks_1_up", "leave out Split('*.up', 'samples')"),
        ("gpt", {"split": "weights+samples"},
         [Split("blocks.1", "whole"), Split("blocks.0", "width")],
         r"cannot hold together: Split\('blocks.1', 'whole'\) and split='weights\+samples'",
         "split='width' or 'width+sequence' or 'sequence' or 'context' or 'samples'"),
        ("gpt", {"split": "width"}, [Split("*", "whole")], "divides nothing",
         "leave out Split('*', 'whole')"),
        ("gpt", {"split": "width"}, [Split("blocks.*.mlp", "width")], "is named 'blocks.*.mlp'",
         "did you mean"),
        ("gpt", {"split": "width", "num_microbatches": 8}, [Split("blocks.0", "samples")],
         r"Split\('blocks.0', 'samples'\): microbatches=8 of 8", "leave out Split('blocks.0'"),
        ("gpt", {"split": "width", "parts": 3}, [Split("blocks.0", "samples")],
         "parts=3: .* do not divide", "use "),
        ("switch", {"split": "experts"}, [Split("layers.*.switch", "samples")],
         r"Split\('layers.\*.switch', 'samples'\) and split='experts'; .* otherwise what has them",
         "leave out Split('layers.*.switch', 'samples'), or split='width' or"),
    ],
)  # fmt: skip
def test_what_cannot_hold(
    model: str, given: dict[str, Any], splits: list[Split], match: str, remedy: str
) -> None:
    """The fewest of the limits are named, each remedy is one."""
    own = tuple((one.pattern, one.axis) for one in splits)
    training = Training(batch_size=8, num_microbatches=2, parts=2, module_splits=own)
    with pytest.raises(ConfigError, match=match.replace("*.mlp'", r"\*.mlp'")) as caught:
        in_parts(captured(model), replace(training, **given))
    assert remedy in (caught.value.remedy or "")
    for text in (caught.value.remedy or "").split(", or "):
        gone = text.removeprefix("leave out ")
        if gone == text:
            continue
        left = tuple((one.pattern, one.axis) for one in splits if str(one) not in gone)
        assert len(left) < len(splits)
        in_parts(captured(model), replace(training, **given | {"module_splits": left}))


def test_the_fewest_are_found_where_a_larger_conflict_comes_first() -> None:
    """The pair is named, though three of a, b, c and d conflict as well."""
    conflicts = [{"a", "b", "c"}, {"c", "d"}]

    def holds(chosen: Any) -> bool:
        return not any(one <= {*chosen} for one in conflicts)

    assert smallest_conflict("abcd", holds) == ("c", "d")


def test_stages_of_one_part() -> None:
    """A constraint of what is on whole stages alone is refused; of another one it holds."""
    model, (inputs, target) = model_of("gpt"), batch_of("gpt")

    def plan(parts: Any, *constraints: Any) -> Plan:
        pipe = pdcompile.compile(
            model, inputs, example_target=target, loss_fn=loss_fn, stages=2, parts=parts,
            constraints=[pdcompile.Pin("blocks.0", 0), pdcompile.Pin("blocks.1", 1), *constraints],
            costs="estimated", microbatches=2, verify="off", cluster="1x4" if parts == 1 else "1x3",
        )  # fmt: skip
        with pipe:
            return pipe.plan

    plan((2, 1), Split("blocks.0", "sequence"))
    with pytest.raises(ConfigError, match="stages of one part alone"):
        plan((2, 1), Split("blocks.1", "sequence"))
    with pytest.raises(ConfigError, match="a stage has one part"):
        plan(1, Split("blocks.1", "sequence"))


def test_on_the_command_line() -> None:
    (one,) = parsed({"split_of": ["h.*.mlp = width+sequence"]})
    assert one == Split("h.*.mlp", "width+sequence")
    for wrong in ("h.*.mlp", "h=diagonal", "=width"):
        with pytest.raises(ConfigError, match="--split-of"):
            parsed({"split_of": [wrong]})


RANKS = """
    from pdcompile.plan import Plan
    for split, *asked in json.loads(sys.argv[1]):
        model = model_of("gpt")
        plain = copy.deepcopy(model)
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        common = dict(loss_fn=loss_fn, optimizer=optimizer)
        constraints = [pdcompile.Split(*one) for one in asked]
        with compiled(
            model, parts=2, stages=2, split=split, constraints=constraints, **common
        ) as pipe:
            pipe.prepare(**inputs, target=target)
            text = pipe.plan.to_json()
            assert "constraints Split(" in pipe.plan.certificate.scope
        again = dict(plan=Plan.from_json(text)) | common  # which says it by itself
        with compiled(copy.deepcopy(plain), **again) as pipe:
            losses = [pipe.step(**inputs, target=target).loss.item() for _ in range(3)]
            evaluated = pipe.eval_step(**inputs, target=target).loss.item()
            state = pipe.full_state_dict()
            if pipe.ranks == (0,):
                expected, found = plain_training(plain, inputs, target, loss_fn, None)
                plain.load_state_dict(expected)
                there = loss_fn(plain.eval()(**inputs), target).item()
                worst = max((state[k] - v).abs().max().item() for k, v in expected.items())
                apart = max(abs(a - b) for a, b in zip([*losses, evaluated], [*found, there]))
                print(f"AGREE {worst <= 2e-5 and apart <= 2e-5} {worst:.1e} {apart:.1e} {asked}")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("setting", [
    ["width", ["blocks.0.attention", "sequence"], ["blocks.1", "samples"]],
    ["samples", ["blocks.0", "width"], ["blocks.1.attention", "whole"]],
], ids=lambda setting: setting[0])  # fmt: skip
def test_on_four_ranks_as_plain_pytorch(setting: list[Any], tmp_path: Path) -> None:
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps([setting])), 1)
