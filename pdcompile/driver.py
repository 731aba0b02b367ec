"""The whole compiler on one screen: pass after pass, from a model to a running pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Literal, Never

from torch import nn

from pdcompile.batch import (
    BatchLayout,
    FlatCall,
    check_example,
    check_splits,
    resize,
    resolve_batch,
)
from pdcompile.compiled import Compiled
from pdcompile.eager.autocast import note_on_region
from pdcompile.eager.modes import apply_overrides
from pdcompile.errors import PdcompileError, refuse_unknown
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.ir.value_checks import check_loss, note_without_loss
from pdcompile.layout_search import LayoutSearch, Planned
from pdcompile.options import NOT_OPTIONS, Options
from pdcompile.options.configuration import Configuration, capture_size, configure, joined
from pdcompile.options.layouts import as_one_device, layouts
from pdcompile.options.option_checks import check_model, check_options
from pdcompile.options.row import documented
from pdcompile.options.table import ROWS, default_optimizer
from pdcompile.parts.hooks import refuse_hooks
from pdcompile.parts.shard import Split
from pdcompile.pass_runner import Listener, PassRunner
from pdcompile.passes import codegen
from pdcompile.passes.check import check
from pdcompile.passes.parts import evaluated_in_parts, in_parts, run_whole
from pdcompile.passes.planning.compiled_times import with_compiled_times
from pdcompile.passes.planning.solved_problem import choices_of
from pdcompile.passes.profile import NO_GPU_HERE, check_costs, possible
from pdcompile.passes.simulate import simulate
from pdcompile.passes.stages import boundaries
from pdcompile.passes.stages.assemble import notes_on_own_buffers
from pdcompile.passes.stages.capture_file import read_capture, write_capture
from pdcompile.passes.stages.kept_outputs import kept_by_default, note_on_dropped
from pdcompile.passes.trace import capture
from pdcompile.passes.trace.assemble import without_gradients
from pdcompile.passes.trace.batch_sizes import OnlyWhole
from pdcompile.passes.trace.subject import CaptureCall, device_of
from pdcompile.passes.verify import verify
from pdcompile.passes.verify.full_batch import notes_on_microbatches
from pdcompile.plan import Plan
from pdcompile.planner import (
    Planner,
    after_wider,
    check_refine,
    times_compiled,
    why_not_timed,
)
from pdcompile.report.progress import compiling
from pdcompile.runtime.pipeline import Pipeline
from pdcompile.user_plans import (
    check_here,
    check_memory,
    check_minibatch,
    check_user_files,
    in_place,
    places_in_its_file,
    read_plan,
    user_plan,
    user_sources,
    with_saved_plan,
    with_user_plan,
)
from pdcompile.warn import each_once, warn


def build(
    model: nn.Module,
    flat: FlatCall,
    options: Options,
    num_ranks: int | None = None,
) -> Compiled:
    """Run every pass once: from a model and one global minibatch to all that a runtime needs.

    A plan or sources given in the options take the place of the passes that would make them, and
    are checked instead.

    Args:
        num_ranks: the number of processes; None: one.

    Raises:
        PdcompileError: one of its children, which names the cause, the place and the remedy.
    """
    options, shown = read_plan(options), options.progress
    with each_once(), compiling(lines=shown is True, quiet=shown is False) as listener:

        def run(options: Options) -> Compiled:
            with places_in_its_file(options):
                return run_passes(model, flat, options, num_ranks, PassRunner(listener))

        try:
            return run(with_saved_plan(options, num_ranks))
        except OnlyWhole as error:
            if options.microbatches != "auto" or options.plan is not None:
                raise
            why = f": {error.message}{f' ({error.where})' if error.where else ''}"
            pairs = resolve_batch(flat, options.batch_dims).size // 2  # as batch norm wants
            for count in dict.fromkeys((max(pairs, 1), 1)):
                with suppress(OnlyWhole):
                    made = run(with_saved_plan(replace(options, microbatches=count), num_ranks))
                    turns = ", so that ranks take turns" * (count == 1)
                    warn(f"microbatches={count}{turns}{why}")
                    return made
            raise
        except PdcompileError as error:
            if options.resume is None or options.plan is not None:
                raise
            warn(f"the plan in the checkpoint is not used: {error.message}")
        return run(options)


def _build_to_run(
    model: nn.Module, flat: FlatCall, options: Options, num_ranks: int | None
) -> Compiled:
    """`build`, where what comes of it runs at once on what is here."""
    options = read_plan(options)
    check_here(options, num_ranks)
    return build(model, flat, replace(options, alone=num_ranks in (None, 1)), num_ranks)


def resolved(
    model: nn.Module, flat: FlatCall, options: Options, num_ranks: int | None
) -> tuple[Options, BatchLayout, Configuration]:
    """The options as a given plan completes them, on minibatch and machines: all that is refused
    before a model is captured is refused here."""
    options = with_user_plan(options, model)
    layout = resolve_batch(flat, options.batch_dims)
    check_minibatch(options, layout)
    chosen = configure(
        options,
        batch_size=layout.size,
        splits=layout.splits,
        num_ranks=num_ranks,
        device=device_of(model, flat).type,
    )
    costs = possible(options.costs, chosen.cluster.devices[0].kind)
    if options.plan is None and costs != options.costs:
        options, notes = replace(options, costs=costs), (*chosen.cluster.notes, NO_GPU_HERE)
        chosen = replace(chosen, cluster=replace(chosen.cluster, notes=notes))
    check_refine(options, model)
    check_splits(layout, chosen.training.num_microbatches)
    return options, layout, chosen


def run_passes(
    model: nn.Module,
    flat: FlatCall,
    options: Options,
    num_ranks: int | None,
    step: PassRunner,
    wider: Plan | None = None,
) -> Compiled:
    """`build`, every pass run by `step`, which times it and writes its form; `wider`: the plan of a
    search over more settings, whose choices are the options."""
    apply_overrides(model)
    options, layout, chosen, whole, captured, plan = fastest(model, flat, options, num_ranks, step)
    if not captured.train.sizes.holds_parts(layout.size, plan.training.num_microbatches):
        step.listener.told("captured again: microbatches are to be of one sample")
        options = replace(options, **choices_of(plan))
        return run_passes(model, flat, options, num_ranks, step, wider=plan)
    proof = step("proof", lambda: check(plan))
    forecast = step("forecast", lambda: plan.forecast or simulate(plan).forecast)
    if wider is not None:
        plan = after_wider(plan, wider)
    notes = (
        *plan.notes,
        *note_without_loss(captured.train),
        *note_on_dropped(plan, captured.train),
        *notes_on_own_buffers(plan, captured.train),
        *notes_on_microbatches(whole.train, plan.training),
        *note_on_region(plan.training.autocast, plan.machines.devices),
    )
    plan = replace(plan, forecast=forecast, notes=tuple(dict.fromkeys(notes)))
    check_memory(chosen.cluster, plan)
    _write_capture(whole, options, plan, step.listener)
    captured = boundaries.as_planned(captured, plan)
    sources = user_sources(options, step("sources", lambda: codegen.generate(captured, plan)))
    if times_compiled(options, model):
        size, backend = _largest(layout, plan), options.stage_compiler
        given = captured.train, plan, sources, model, resize(flat, layout, size).leaves
        plan = step("compiled", lambda: with_compiled_times(*given, size, backend))
        check_memory(chosen.cluster, plan)
    verification = None if options.verify == "off" or captured.kept else step(
        "verified",
        lambda: verify(
            captured, plan, sources, model, flat, layout, options.loss_fn,
            mode="full" if options.verify == "full" else "auto",
            loss_reduction=options.loss_reduction,
            backend=options.stage_compiler if options.verify == "full" else None,
        ),
    )  # fmt: skip
    if options.alone and plan.training.parts != 1:
        plan = run_whole(plan, whole)
        captured = boundaries.as_planned(whole, plan)
        sources = codegen.generate(captured, plan)
    return Compiled(
        capture=captured,
        plan=plan,
        sources=sources,
        eval_edges=boundaries.eval_edges(captured, plan, _largest(layout, plan)),
        layout=layout,
        proof=proof,
        verification=verification,
        pass_seconds=tuple(step.seconds.items()),
    )


def recompiled(model: nn.Module, flat: FlatCall, options: Options, usual: Compiled) -> Compiled:
    """Evaluator of another form of call than the captured one, on the stages of its plan.

    Raises:
        PdcompileError: as `build`, of which this is the part that depends on the call.
    """
    layout, plan = resolve_batch(flat, options.batch_dims), usual.plan
    found = capture(
        model, flat, layout, None if flat.leaves.get("target") is None else options.loss_fn,
        microbatch_size=_largest(layout, plan) if layout.splits else None,
        autocast=plan.training.autocast, evaluates=True,
    )  # fmt: skip
    evaluation = evaluated_in_parts(found.eval, usual.capture, plan.training)
    captured = replace(usual.capture, eval=evaluation, attributes=found.attributes)
    return replace(
        usual,
        capture=captured,
        sources=codegen.generate(captured, plan),
        eval_edges=boundaries.eval_edges(captured, plan, _largest(layout, plan)),
        layout=layout,
        verification=None,
    )


def fastest(
    model: nn.Module, flat: FlatCall, options: Options, num_ranks: int | None, step: PassRunner
) -> Planned:
    """The fastest plan, of the layouts of parts that are open: half of the time is for a sketch of
    each, the other half for the plan of the best layout."""
    experts = options.parts == "any" and any(one.dim() == 3 for one in model.parameters())
    open_to = layouts(options, num_ranks, experts=experts)
    search = LayoutSearch(len(open_to) > 1, step.listener)
    for one in search.turns(open_to):
        with search.trying(one):
            search.add(planned_layout(model, flat, one, num_ranks, step, search))
    return search.fastest()


def planned_layout(
    model: nn.Module,
    flat: FlatCall,
    options: Options,
    num_ranks: int | None,
    step: PassRunner,
    search: LayoutSearch,
) -> Planned:
    """The plan for one layout of parts, which the user may give."""
    options, layout, chosen = resolved(model, flat, options, num_ranks)
    capturing = partial(_captured, model, flat, layout, options, chosen, step.listener)
    whole = search.whole = search.whole or step("graph", capturing)
    chosen = _with_outputs(chosen, whole.train, options)
    if search.ideal:
        chosen, captured = as_one_device(options, chosen), whole
    else:
        divided = partial(_in_parts, model, whole, options, chosen, step)
        chosen, captured = divided(evaluates=not search.sketches)
    if options.plan is not None:
        part = step.listener.part
        plan = step("plan", lambda: user_plan(options, chosen, captured.train, part))
    else:
        placed = in_place(options, captured)
        planner = Planner(model, captured, placed, chosen, step.listener)
        plan = make_plan(planner, partial(resize, flat, layout), step, search)
    return Planned(options, layout, chosen, whole, captured, plan)


def _in_parts(
    model: nn.Module, whole: Capture, options: Options, chosen: Configuration, step: PassRunner,
    *, evaluates: bool,
) -> tuple[Configuration, Capture]:  # fmt: skip
    """The configuration with what parts divide, and the program of one of them."""
    if chosen.training.parts == 1:
        return chosen, whole
    cut = partial(_first_cut, model, whole, options, chosen, step.listener)
    captured = step("parts", partial(in_parts, whole, chosen.training, cut, evaluates=evaluates))
    refuse_hooks(dict(model.named_parameters()), captured.division)
    training = replace(chosen.training, split=captured.division.split)
    return replace(chosen, training=training), captured


def _first_cut(
    model: nn.Module,
    whole: Capture,
    options: Options,
    chosen: Configuration,
    listener: Listener,
) -> Mapping[str, int]:
    """The stage of each op where stages have unlike numbers of parts: as the plan says that is
    given, else as if the devices of a stage were one, by as much faster than each of them as the
    whole model takes longer than one of its parts."""
    if options.plan is not None:
        return boundaries.stage_of_ops(whole.train, options.plan)

    def costed(captured: Capture, chosen: Configuration) -> Planner:
        placed = in_place(options, captured)
        planner = Planner(model, captured, placed, chosen, listener)
        planner.costs()
        return planner

    training = replace(chosen.training, parts=chosen.training.most_parts)
    divided = costed(in_parts(whole, training), replace(chosen, training=training))
    one = costed(whole, joined(options, chosen, 1.0))
    faster = one.work_seconds / divided.work_seconds
    plan = costed(whole, joined(options, chosen, faster)).plan()
    return boundaries.stage_of_ops(whole.train, plan)


def make_plan(
    planner: Planner,
    microbatch: Callable[[int], FlatCall],
    step: PassRunner,
    search: LayoutSearch,
) -> Plan:
    """The passes from a capture to a plan.  `microbatch`: one of the example's, by its size."""
    step("costs", planner.costs)
    search.check(planner.least_step_seconds())
    step("problem", planner.problem)
    best = partial(planner.plan, search.elsewhere, sketch=search.sketches, start=search.start)
    plan = step("plan", best)
    if why_not_timed(plan, planner.options, planner.model) is not None:
        return plan
    return step("refined", lambda: planner.refined(plan, microbatch))


def _captured(
    model: nn.Module,
    flat: FlatCall,
    layout: BatchLayout,
    options: Options,
    chosen: Configuration,
    listener: Listener,
) -> Capture:
    """The model's ops, with a loss that depends on something."""
    call = CaptureCall(
        model, flat, layout, options.loss_fn, capture_size(options, chosen),
        chosen.training.autocast,
    )  # fmt: skip
    if options.plan is not None and options.capture_file is not None:
        found = read_capture(options.capture_file, options.plan, call, options.command_target)
        if isinstance(found, Capture):
            listener.told(f"the ops are those of {found.kept}, not compared with the model")
            return found
        listener.told(f"captured again: {found}")
    trains = chosen.training.kind.trains
    found = capture(
        model, flat, layout, options.loss_fn,
        microbatch_size=call.microbatch_size, autocast=call.autocast, evaluates=not trains,
    )  # fmt: skip
    check_loss(found.train)
    return found if trains else replace(found, train=without_gradients(found.eval))


def _with_outputs(chosen: Configuration, graph: OpGraph, options: Options) -> Configuration:
    """The configuration without outputs of training that nobody names, where these take much, or
    would be sent between replicas."""
    training, last = chosen.training, options.replicas
    last = last[-1] if isinstance(last, tuple) else last
    keeps = last in (1, "1") and kept_by_default(graph, training.batch_size, chosen.cluster.devices)
    if keeps or not (chosen.outputs_open and training.kind.trains):
        return chosen
    return replace(chosen, training=replace(training, keeps_outputs=False))


def _write_capture(captured: Capture, options: Options, plan: Plan, listener: Listener) -> None:
    """Write the capture beside the plan that was made, where there is a file for it."""
    if options.plan is not None or options.capture_file is None:
        return
    if reason := write_capture(captured, options.capture_file, plan, options.command_target):
        listener.told(f"the capture is not kept beside the plan: {reason}")


def _largest(layout: BatchLayout, plan: Plan) -> int:
    """Samples of the largest microbatch."""
    return -(-layout.size // plan.training.num_microbatches)


@documented(ROWS)
def compile(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    example_target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = default_optimizer,
    cluster: Any = "auto",
    stages: int | None = None,
    schedule: str | PathLike[str] | None = None,
    replicas: int | tuple[int, ...] | Literal["equal", "any"] | None = None,
    recompute: bool | Literal["auto"] | Sequence[bool] | None = None,
    microbatches: int | Literal["auto"] = "auto",
    parts: int | tuple[int, ...] | Literal["any"] | None = None,
    split: Split = "auto",
    updates: Literal["every", "home", "auto"] | None = None,
    memory: int | str | None = None,
    constraints: Sequence[Any] = (),
    cut_tolerance: float | None = None,
    batch_dims: Any = 0,
    loss_reduction: Literal["mean", "sum"] | Callable[..., Any] | None = None,
    autocast: Any = None,
    grad_scaler: Any = None,
    max_grad_norm: float | None = None,
    linear_lr_scaling: bool | None = None,
    seed: int | None = None,
    costs: Any = "measured",
    refine: bool | Literal["auto"] = "auto",
    verify: Literal["auto", "full", "off"] = "auto",
    outputs: Literal["none", "evaluation", "last", "everything", "all"] | None = None,
    keep_model: bool = False,
    max_staleness: int | Literal["any"] = 0,
    time_limit: float | None = None,
    plan: Any = None,
    sources: Any = None,
    allow_edited: bool = False,
    weights: Any = None,
    resume: str | PathLike[str] | None = None,
    group: Any = None,
    stage_compiler: str | Callable[..., Any] | None = None,
    detect_nonfinite: bool = False,
    stall_timeout: float | None = 30.0,
    progress_timeout: float | None = 300.0,
    progress: bool | Literal["auto"] = "auto",
    **unknown: Never,
) -> Pipeline:
    """Compile a model into a pipeline of stages; `pipe.step(inputs, target=…)` trains it.

    Returns at once: the model is captured, planned and verified with the first minibatch
    (`step` or `prepare`), or now when `example_inputs` (and, for a loss_fn, `example_target`)
    are given.  In a plain process all stages run in this process; under torchrun one a rank.
    With a `plan`, what is left out is as it was made with.  Options are the rows of
    `pdcompile.options.table`; `help(pdcompile.compile)` lists them.

    Args:
        model: any nn.Module.  In one process it is trained in place, as after torch.compile;
            under torchrun its other stages' parameters become meta tensors.
        example_inputs: one global minibatch: a tensor, a tuple (positional) or a dict (keyword).
        example_target: the target that belongs to it, for `loss_fn`.

    Raises:
        PdcompileError: one of its children; the options that cannot be right are refused here,
            the rest when the pipeline is prepared.
    """
    given = dict(locals())
    for name in ("model", "example_inputs", "example_target", "unknown"):
        del given[name]
    known = ("example_inputs", "example_target", *given)
    refuse_unknown("compile has no option", unknown, known, NOT_OPTIONS)
    return pipeline(model, Options.given(given), example_inputs, example_target)


def pipeline(
    model: nn.Module, options: Options, example_inputs: Any = None, example_target: Any = None
) -> Pipeline:
    """`compile`, with its options as one record."""
    check_model(model)
    check_options(options)
    check_costs(options.costs)
    check_refine(options, model)
    check_user_files(model, options)
    if example_inputs is not None:
        check_example(example_inputs)
    example = example_inputs, example_target
    pipe = Pipeline(model, options, _build_to_run, example, recompiled)
    if example_inputs is not None and (options.loss_fn is None or example_target is not None):
        pipe.prepare()
    return pipe
