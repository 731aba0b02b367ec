"""A model written for parts, generated, and run in turns of this process beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.eager.randomness import DrawScope, preserved_rng
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Sources, StageInterface, named_results
from pdcompile.ir.stage_streams import Streams
from pdcompile.parts.shard import Division, Shard, Split
from pdcompile.parts.turns import in_turns
from pdcompile.passes.codegen import generate, stage_classes
from pdcompile.passes.parts.layouts import Layouts, lay_out
from pdcompile.passes.parts.written import Program, write
from tests.helpers.cuts import cut
from tests.helpers.generated import captured

SEED = 5


@dataclass
class InParts:
    """A model, and what was written of it."""

    model: nn.Module
    program: Program
    sources: Sources
    capture: Capture
    leaves: dict[str, Any]
    layouts: Layouts

    @property
    def shards(self) -> dict[str, Shard]:
        return dict(self.program.shards)


def written(
    model: nn.Module, inputs: Any, target: Any, loss_fn: Any, *,
    family: Split = "width", parts: int = 2, stages: int = 1, outputs: bool = False,
) -> InParts:  # fmt: skip
    """Captures, lays out, writes and generates."""
    flat, _, capture = captured(model, inputs, target, loss_fn)
    layouts = lay_out(capture.train, family, parts, outputs=outputs)
    train = write(layouts)
    evaluation = write(lay_out(capture.eval, family, parts, outputs=outputs))
    assert dict(train.shards) == dict(evaluation.shards)
    division = Division(parts, family, train.shards, train.summed)
    capture = replace(capture, train=train.graph, eval=evaluation.graph, division=division)
    count = sum(op.region == "forward" for op in capture.train.ops)
    plan = cut(capture, [count * k // stages for k in range(1, stages)])
    sources = generate(capture, plan)
    return InParts(model, train, sources, capture, dict(flat.leaves), layouts)


def _loaded(it: InParts, part: int) -> list[nn.Module]:
    """The stages of one part with its slices of the model's tensors."""
    tensors = dict(it.model.named_parameters(remove_duplicate=False))
    tensors |= dict(it.model.named_buffers(remove_duplicate=False))
    streams, found = Streams(SEED), []
    for cls, interface in zip(stage_classes(it.sources), it.sources.interfaces, strict=True):
        stage = cls().to(next(it.model.parameters()).dtype)
        streams.attach(stage, interface)
        own = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
        for name, tensor in own.items():
            fqn = interface.aliases.get(name, name)
            whole = tensors.get(fqn, it.sources.constants.get(fqn))
            assert whole is not None, fqn
            shard = it.shards.get(fqn)
            value = whole if shard is None else shard.own(whole, part)
            with torch.no_grad():
                if tensor.dtype != value.dtype:
                    tensor.data = tensor.data.to(value.dtype)
                assert tensor.shape == value.shape, name
                tensor.copy_(value)
            tensor.requires_grad_(whole.requires_grad)
        found.append(stage)
    vars(found[0])["streams"] = streams
    return found


def run_part(it: InParts, part: int, *, training: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by FQN of one part."""
    stages = _loaded(it, part)
    streams: Streams = vars(stages[0])["streams"]
    values: dict[str, Any] = {}
    streams.begin(0, 0)
    with torch.set_grad_enabled(training):
        for stage, interface in zip(stages, it.sources.interfaces, strict=True):
            stage.train(training)
            mode = interface.train if training else interface.eval
            given = [values[p.value] if p.path is None else it.leaves[p.path] for p in mode.inputs]
            values |= named_results(interface.index, mode.outputs, stage(*given))
        loss = _loss(it, stages[-1], it.sources.interfaces[-1], values, training)
        if training:
            loss.backward()
    gradients: dict[str, Tensor] = {}
    for stage, interface in zip(stages, it.sources.interfaces, strict=True):
        for name, parameter in stage.named_parameters():
            fqn = interface.aliases.get(name, name)
            if parameter.grad is not None:
                gradients[fqn] = (
                    gradients[fqn] + parameter.grad if fqn in gradients else parameter.grad
                )
    return loss.detach(), gradients


def _loss(
    it: InParts, stage: Any, interface: StageInterface, values: dict[str, Any], training: bool
) -> Tensor:
    mode = interface.train if training else interface.eval
    if not mode.loss_inputs:
        return values[mode.loss or ""]  # type: ignore[no-any-return]
    given = [
        values[p.value] if p.value in values else it.leaves[p.path or ""] for p in mode.loss_inputs
    ]
    return stage.loss(*given)  # type: ignore[no-any-return]


def compare(
    it: InParts, call: Callable[[], Tensor], tolerance: float, *, training: bool = True
) -> float:
    """Runs all parts in turns, and the model; the greatest difference of loss and gradients.

    `call` gives the loss of the model.  What is whole has to be the same on all parts, bit by bit.
    """
    with preserved_rng():
        found = in_turns([
            lambda part=part: run_part(it, part, training=training)
            for part in range(it.program.parts)
        ])  # fmt: skip
    return compare_found(it, found, call, tolerance, training=training)


def compare_found(
    it: InParts, found: Sequence[Any], call: Callable[[], Tensor], tolerance: float, *,
    training: bool = True,
) -> float:  # fmt: skip
    """Compares what the parts found (`run_part`) with the model."""
    for parameter in it.model.parameters():
        parameter.grad = None
    state = {name: buffer.clone() for name, buffer in it.model.named_buffers()}
    it.model.train(training)
    with preserved_rng(), DrawScope(it.model, SEED, 0, 0), torch.set_grad_enabled(training):
        expected = call()
    if training:
        expected.backward()
    with torch.no_grad():
        for name, buffer in it.model.named_buffers():
            buffer.copy_(state[name])
    losses, gradients = [loss for loss, _ in found], [one for _, one in found]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    worst = (losses[0] - expected).abs().item()
    if training:
        worst = max(worst, _compare_gradients(it, gradients))
    assert worst <= tolerance, worst
    return worst


def _compare_gradients(it: InParts, gradients: Sequence[dict[str, Tensor]]) -> float:
    worst = 0.0
    for fqn, parameter in it.model.named_parameters():
        given = [one[fqn] for one in gradients if fqn in one]
        if parameter.grad is None:
            assert not given, fqn
            continue
        assert len(given) == it.program.parts, fqn
        if fqn in it.shards:
            found = it.shards[fqn].joined(given)
        elif fqn in it.program.summed:
            found = torch.stack(given).sum(0)
        else:
            found = given[0]
            assert all(torch.equal(one, found) for one in given), fqn
        worst = max(worst, (found - parameter.grad).abs().max().item())
    return worst
