"""One run of the model's own Python below the recorder, at one batch size, in one mode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pdcompile.batch import BatchLayout, FlatCall, flatten_output, unflatten_output
from pdcompile.eager.autocast import OFF, autocast_region
from pdcompile.errors import PdcompileError, TraceError
from pdcompile.ir.graph import Argument, Attr, GraphInput, Op, Ref, TensorInfo, Value
from pdcompile.passes.trace.arguments import to_argument
from pdcompile.passes.trace.as_eager import as_eager
from pdcompile.passes.trace.branches import both_ways
from pdcompile.passes.trace.caches import emptied
from pdcompile.passes.trace.example_sizes import with_sizes_of_example
from pdcompile.passes.trace.facts import Observer, locate, source_of_traceback
from pdcompile.passes.trace.leftovers import is_memo
from pdcompile.passes.trace.lists import with_whole_lists
from pdcompile.passes.trace.meaning import Meanings
from pdcompile.passes.trace.mode import Recorder
from pdcompile.passes.trace.modules import ModuleTable
from pdcompile.passes.trace.outcomes import CallKey, Outcome
from pdcompile.passes.trace.outputs import find_loss, structure
from pdcompile.passes.trace.probe import probe
from pdcompile.passes.trace.reads import Decision, Key, Reading
from pdcompile.passes.trace.recomputed import check_region, watched_regions
from pdcompile.passes.trace.refuse import ForwardRaised, SizeByValues
from pdcompile.passes.trace.remedies import remedy, remedy_of_loss, tell_of_loss
from pdcompile.passes.trace.selections import Policy, Selections
from pdcompile.passes.trace.sentinel import guarded, not_reseeded
from pdcompile.passes.trace.state import State, settled, write_rebound
from pdcompile.passes.trace.tensors import KEEP, FakeTensors
from pdcompile.passes.trace.transforms import transformed
from pdcompile.passes.trace.unchanged import moves_of_nothing
from pdcompile.passes.trace.varying import Turns, with_sizes_that_vary
from pdcompile.warn import warn


@dataclass(frozen=True, slots=True)
class Recording:
    """What one run gave, all sizes concrete."""

    ops: tuple[Op, ...]
    values: dict[str, Value]
    inputs: tuple[GraphInput, ...]
    tensors: dict[str, TensorInfo]
    classes: dict[str, tuple[str, str]]
    output: Argument
    output_spec: Any
    loss: str | None
    constants: tuple[tuple[str, str], ...]
    tensor_values: dict[str, torch.Tensor]
    meaning: tuple[Any, ...] = ()
    memos: tuple[str, ...] = ()  # values that an earlier call computed and kept
    decisions: tuple[Decision, ...] = ()  # that this run took one way each
    regions: tuple[frozenset[str], ...] = ()  # names of the ops of each reentrant checkpoint


def record(
    model: nn.Module,
    table: ModuleTable,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    *,
    training: bool,
    per_op: bool = False,
    whole: Collection[str] = (),
    settle: bool = True,
) -> Recording:
    """Run ``model(*args, **kwargs)`` once on fake tensors; the model is left as it was.

    The modules at the paths `whole` become one op each; for them the model also runs for real.

    `per_op` compares the states of all random generators at every op, which costs more than the
    capture itself, to name the line that used one.  Without `settle` the model stays as the run
    left it, in its present mode.

    Raises:
        TraceError: the run cannot be recorded faithfully, or the model itself failed.
    """
    outcomes = probe(model, table, flat, whole, training=training) if whole else {}

    def call(assigned: dict[tuple[int, str], str]) -> Recording:
        before = State(model)

        def run(
            selections: Policy | None = None, turns: Turns = range
        ) -> tuple[Recording, Selections | None]:
            chosen: list[Selections | None] = []

            def once(decided: Mapping[Key, bool]) -> Recording:
                before.restore()
                with table.elsewhere.as_before():
                    recording, found = _record(
                        model, table, flat, layout, loss_fn, outcomes, assigned, per_op=per_op,
                        policy=selections, decided=decided, turns=turns,
                    )  # fmt: skip
                chosen.append(found)
                return recording

            recording = both_ways(once, table.reads, training)
            if table.written & table.taken_as_constant:  # a counter, read before it is written
                table.taken_as_constant -= table.written
                return run(selections, turns)
            return recording, chosen[0]

        def sized() -> Recording:
            try:
                return run()[0]
            except SizeByValues:
                found = with_sizes_that_vary(run, table, training)
                if found is None:
                    raise
                return found

        return sized() if table.reads is None else with_sizes_of_example(sized, table.reads)

    with emptied(table.caches):
        if not settle:
            return call({})
        return settled(model, training, call, same, leftovers=table.leftovers)


def _num_draws(recorder: Recorder) -> int:
    return sum(op.draw is not None for op in recorder.ops)


def same(one: Recording, other: Recording) -> bool:
    """Whether two recordings are the same computation."""
    return one.meaning == other.meaning


def _record(
    model: nn.Module,
    table: ModuleTable,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    outcomes: Mapping[CallKey, Outcome],
    assigned: dict[tuple[int, str], str],
    *,
    per_op: bool,
    policy: Policy | None = None,
    decided: Mapping[Key, bool],
    turns: Turns,
) -> tuple[Recording, Selections | None]:
    mode = FakeTensorMode()
    fakes = FakeTensors(table, mode, device_of(model, flat))
    fakes.unnamed.update(_unregistered(model, loss_fn))
    observer = Observer()
    recorder = Recorder(table, fakes, observer)
    recorder.boundary = run.__code__
    if policy is not None or (table.reads is not None and table.reads.sizes_of_example):
        observer.selections = Selections(policy, lambda: recorder.path)
        observer.selections.allows = recorder.hits.allows
    recorder.hits.sites = table.reads.loops if table.reads is not None else set()
    recorder.hits.turns = turns
    recorder.whole = outcomes
    recorder.assigned = assigned
    inputs, leaves, constants = enter_inputs(flat, layout, fakes, recorder)
    args, kwargs, target = flat.unflatten(leaves)
    recorder.reads = Reading(table.reads, inputs, flat)
    recorder.reads.outcomes = decided
    with ExitStack() as stack:
        sentinel = stack.enter_context(guarded())
        if per_op:
            recorder.check_generators = sentinel.check
        draws = partial(_num_draws, recorder)
        stack.enter_context(not_reseeded(draws, lambda: locate(recorder.boundary)[0]))
        stack.enter_context(
            watched_regions(
                lambda: len(recorder.ops),
                lambda start, preserve: check_region(recorder.ops[start:], preserve),
            )
        )
        stack.enter_context(watched(recorder))
        stack.enter_context(transformed(recorder))
        stack.enter_context(moves_of_nothing())
        stack.enter_context(_quiet())
        stack.enter_context(as_eager(table.eager_paths, recorder.is_constant, model.training))
        stack.enter_context(autocast_region(table.autocast or f"{fakes.device.type}:off"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(mode)
        stack.enter_context(observer)
        stack.enter_context(recorder)
        try:
            output, loss = run(model, args, kwargs, target, loss_fn, recorder)
        except TraceError as error:
            error.module_path = recorder.failed
            raise
    if table.autocast is not None:
        off = f"{fakes.device.type}:{OFF}"
        recorder.ops = [op if op.autocast else replace(op, autocast=off) for op in recorder.ops]
    output_argument, output_spec = structure(
        output, lambda leaf: to_argument(leaf, fakes.name, fakes.device)
    )
    found_loss = find_loss(output, loss, fakes.name, given=loss_fn is not None)
    values = _input_values(inputs, fakes.values())
    recorder.ops, left_out = with_whole_lists(
        recorder.ops, (output_argument, Ref(found_loss or ""))
    )
    values = {name: value for name, value in values.items() if name not in left_out}
    meanings = Meanings(recorder.ops, values, fakes.memos)
    names = fakes.value_names()
    table.leftovers.note(model, names, recorder.ops, values, table.tensors, meanings)
    table.elsewhere.check(partial(is_memo, names, recorder.ops, values, table.tensors))
    returned = (output_argument, Ref(found_loss) if found_loss else None)
    recording = Recording(
        ops=tuple(recorder.ops),
        values=values,
        inputs=inputs,
        tensors={  # without constants that only an earlier recording came across
            fqn: info
            for fqn, info in table.tensors.items()
            if info.kind != "constant" or fqn in fakes.constants
        },
        classes=table.classes,
        output=output_argument,
        output_spec=output_spec,
        loss=found_loss,
        constants=constants,
        tensor_values=fakes.constants,
        meaning=(meanings.argument(returned), tuple(meanings.effects)),
        memos=tuple(fakes.memos),
        decisions=tuple(recorder.reads.decisions),
        regions=tuple(recorder.regions),
    )
    return recording, observer.selections


def run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    loss_fn: Callable[..., Any] | None,
    recorder: Recorder,
) -> tuple[Any, Any]:
    """(output, loss) of the model's own Python; failures of it become TraceErrors."""
    try:
        output = model(*args, **kwargs)
        recorder.sizes.returned(output)
        output = _own_tensors_cloned(output, recorder.fakes)
        if recorder.fakes.mode is not None:
            write_rebound(model, recorder.fakes, recorder.table)
        loss = None
        if loss_fn is not None:
            recorder.enter_loss()
            loss = loss_fn(output, target)
        recorder.finish()
    except TraceError as refusal:
        if recorder.region == "loss":
            tell_of_loss(refusal)
        raise
    except PdcompileError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and recorder.reads.handed_out is not None:
            raise recorder.reads.handed_out from error  # it is no number for torch
        what = "loss_fn" if recorder.region == "loss" else "the model's forward"
        said = f"{what} raised {type(error).__name__}: {error}"
        lost = recorder.region == "loss"
        hint = remedy_of_loss(target) if lost else remedy(args, kwargs)
        if "Mixing fake modes" in str(error):  # torch's words for a tensor of another recording
            said, hint = f"{what} uses a tensor that it kept from an earlier call", KEEP
        raise ForwardRaised(said, where=source_of_traceback(error), remedy=hint) from error
    return output, loss


def _own_tensors_cloned(output: Any, fakes: FakeTensors) -> Any:
    """A parameter or buffer that the model returns has the value of this moment: an update that
    comes before anyone looks must not change it."""
    leaves, spec = flatten_output(output)
    own = [isinstance(leaf, torch.Tensor) and isinstance(fakes.name(leaf), Attr) for leaf in leaves]
    if not any(own):
        return output
    cloned = [leaf.clone() if mine else leaf for leaf, mine in zip(leaves, own, strict=True)]
    return unflatten_output(cloned, spec)


def device_of(model: nn.Module, flat: FlatCall) -> torch.device:
    """The device that the model runs on: its inputs', else its parameters', else the CPU."""
    tensors = [leaf for leaf in flat.leaves.values() if isinstance(leaf, torch.Tensor)]
    for tensor in (*tensors, *model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def enter_inputs(
    flat: FlatCall, layout: BatchLayout, fakes: FakeTensors, recorder: Recorder
) -> tuple[tuple[GraphInput, ...], dict[str, Any], tuple[tuple[str, str], ...]]:
    """Name the tensors of the call: (graph inputs, leaves by path, constants)."""
    inputs: list[GraphInput] = []
    leaves: dict[str, Any] = {}
    constants: list[tuple[str, str]] = []
    for path, leaf in flat.leaves.items():
        if not isinstance(leaf, torch.Tensor):
            leaves[path] = leaf
            if path != "target" or leaf is not None:
                constants.append((path, repr(leaf)))
            continue
        name = recorder.names.new(path)
        leaves[path] = fakes.fake_like(leaf)
        fakes.add(name, leaves[path])
        inputs.append(GraphInput(name, path, layout.dims.get(path)))
    return tuple(inputs), leaves, tuple(constants)


def _input_values(inputs: tuple[GraphInput, ...], values: dict[str, Value]) -> dict[str, Value]:
    for entry in inputs:
        values[entry.name] = replace(values[entry.name], producer=None)
    return values


def _unregistered(model: nn.Module, loss_fn: Any) -> dict[int, str]:
    """Tensors that hang on modules (or on loss_fn) as plain attributes: id to path."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found.setdefault(id(value), f"{path}.{name}" if path else name)
    if isinstance(loss_fn, nn.Module):
        for name, value in (*loss_fn.named_buffers(), *loss_fn.named_parameters()):
            found.setdefault(id(value), f"loss_fn.{name}")
    return found


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """Calls that pass no torch function tell the recorder: modules, autograd.Function, scripts."""
    plain_call = nn.Module.__call__
    plain_setattr = nn.Module.__setattr__
    script: Any = torch.jit.ScriptFunction
    plain_script = script.__call__
    function = torch.autograd.Function
    plain_apply = vars(function)["apply"]

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(plain_call, self, args, kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_function_class(cls, plain_apply.__get__(None, cls), args)

    def run_inline(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A scripted function is an optimised graph that detaches; its source is what it means.
        warn(
            f"the TorchScript function {self.name!r} is captured as its Python source, whose "
            "gradients TorchScript's optimiser rounds differently from the second call on"
        )
        return self._torchdynamo_inline(*args, **kwargs)

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        recorder.assigned.setdefault((id(self), name), locate(recorder.boundary)[0])
        plain_setattr(self, name, value)

    nn.Module.__call__ = __call__  # type: ignore[method-assign]
    nn.Module.__setattr__ = __setattr__  # type: ignore[method-assign]
    script.__call__ = run_inline
    function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain_call  # type: ignore[method-assign]
        nn.Module.__setattr__ = plain_setattr  # type: ignore[method-assign]
        script.__call__ = plain_script
        function.apply = plain_apply  # type: ignore[method-assign]


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs the traceback of every shape error at ERROR level before it raises it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
