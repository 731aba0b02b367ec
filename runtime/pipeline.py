"""Pipeline: what `pdcompile.compile` returns, and what a training loop talks to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from pdcompile.batch import FlatCall, example_call, flatten_call
from pdcompile.batch.omitted_output import DROPPED
from pdcompile.batch.step_result import StepResult
from pdcompile.compiled import Compiled
from pdcompile.eager.autocast import other_region
from pdcompile.eager.modes import Modes, apply_overrides, modes
from pdcompile.eager.module_copies import copy_of
from pdcompile.eager.randomness import evaluation_minibatch, one_thread
from pdcompile.errors import ConfigError, InputError, PdcompileError
from pdcompile.ir.graph import OpGraph
from pdcompile.ir.sparse_gradients import sparse_lookups
from pdcompile.ir.value_checks import check_trained
from pdcompile.options import Options
from pdcompile.options.of_plan import completed
from pdcompile.options.option_checks import (
    check_older_weights,
    check_target,
    check_trains,
    check_unscaled,
)
from pdcompile.plan import Plan
from pdcompile.runtime.calls import begin_call, refuse_blind_start, refuse_modes
from pdcompile.runtime.evaluations import Evaluations, Recompile
from pdcompile.runtime.failure.first_cause import describe
from pdcompile.runtime.outputs import result_of
from pdcompile.runtime.saving import Saving, flush_before_state
from pdcompile.runtime.session import Session, in_one_thread
from pdcompile.runtime.shards import Shard
from pdcompile.runtime.transport import launch
from pdcompile.runtime.transport.start_up import StartUp
from pdcompile.runtime.watch import same_model
from pdcompile.runtime.watch.alike import compiled_alike
from pdcompile.schedule.registry import DEFAULT
from pdcompile.warn import warn


def check_supported(plan: Plan, graph: OpGraph) -> None:
    """Raise ConfigError for another autocast region than that of the devices, for what cannot be
    recomputed, and for gradients that cannot be summed over replicas; `graph` is what trains."""
    if other := other_region(plan.training.autocast, plan.machines.devices):
        raise ConfigError(
            other,
            where="autocast",
            remedy="plan again with a dtype: autocast='bfloat16' is the region of the devices",
        )
    if plan.training.parts != 1 and plan.spec.period > 1:
        raise ConfigError(
            f"replicas take whole minibatches in turn under {plan.training.schedule!r}, and parts "
            "sum gradients once a minibatch",
            where="parts",
            remedy="replicas=1 or parts=1; or another schedule",
        )
    again = {name: stage for stage in plan.stages if stage.recompute for name in stage.ops}
    for op in graph.ops:
        if op.hooks and op.name in again:
            raise ConfigError(
                f"stage {again[op.name].index} recomputes its forward, and the forward hook "
                f"{op.hooks[0]} of the opaque module {op.module_path!r} would run twice",
                where=op.module_path,
                remedy="remove it, or do that in the module's forward; or recompute=False for this "
                "stage",
            )
    summing = {name: stage for stage in plan.stages if stage.replicas > 1 for name in stage.ops}
    shared = plan.num_ranks < sum(stage.replicas for stage in plan.stages)  # then all have as many
    alone = f"schedule={DEFAULT!r}" if plan.training.kind.dispatched else "replicas=1"
    for fqn, lookups in sparse_lookups(graph).items():
        stage = summing.get(lookups[0].name)
        if stage is not None:
            counts = tuple(1 if one is stage else one.replicas for one in plan.stages)
            instead = f"one replica for this stage, as in replicas={counts}"
            raise ConfigError(
                f"the gradient of this parameter is sparse ({lookups[0].source}), and the "
                f"{stage.replicas} replicas of stage {stage.index} sum dense ones",
                where=fqn,
                remedy=f"sparse=False; or {alone if shared else instead}",
            )
    for fqn, info in graph.tensors.items() if plan.training.loss_scaling else ():
        if info.requires_grad and info.dtype == "float16":  # divided by the scale it would vanish
            raise ConfigError(
                "this parameter is float16, and so is its gradient, which a GradScaler cannot "
                "divide by the scale",
                where=fqn,
                remedy="keep parameters in float32, and give autocast=torch.float16",
            )


Build = Callable[[nn.Module, FlatCall, Options, int | None], Compiled]


class Pipeline(Saving):
    """A model in pipeline-parallel training; nothing is captured before the first call.

    `build` is the compiler: from the model, one global minibatch (the first call's, or
    `example`: inputs and target), options and the number of processes to a `Compiled`.
    `recompile` makes another of it, for evaluation of another form of call; None: there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        build: Build,
        example: tuple[Any, Any],
        recompile: Recompile | None = None,
    ) -> None:
        super().__init__(model, options)
        self._build, self._recompile = build, recompile
        self._evaluations: Evaluations | None = None
        self._example = example
        self._handles: list[Any] = []  # of hooks on the model and the optimizer

    # -- what it is --------------------------------------------------------------------------

    def prepare(self, *args: Any, target: Any = None, **kwargs: Any) -> Pipeline:
        """Capture, plan and start, with one global minibatch (or none, if compile had one)."""
        if self._session is None:
            flat = flatten_call(self._model, args, kwargs, target) if args or kwargs else None
            with one_thread():
                self._start(flat)
        return self

    def _start(self, flat: FlatCall | None) -> None:
        self._check_open()
        refuse_modes()
        held = same_model.split_before(self._model, self._options)
        passed = modes(self._model)
        apply_overrides(self._model)
        start = launch.start_up(self._options) if launch.is_distributed(self._options) else None
        with nullcontext() if start is None else start, same_model.forward_allowed(self._model):
            if start is not None:
                self._options = same_model.settled(self._model, held, self._options, start)
            compiled = self._compiled(flat, start)
            world = self._connected(compiled, passed, start)
        try:
            session = Session(self._model, self._options, compiled, world)
            same_model.started(self, self._model, session)
        except BaseException as error:
            if world is not None:
                world.leave(error)
            raise
        self._session = session
        if self._recompile is not None:
            self._evaluations = Evaluations(session, self._recompile)
        for note in compiled.plan.notes if session.is_first else ():
            if note.startswith(DROPPED):
                warn(note)
        self._handles = flush_before_state(
            self, self._model, session.optimizer, alone=world is None
        )
        if world is not None:
            same_model.note_split(self._model, compiled, self._options.group)
            world.exit.belongs_to(self)
        self._resume()

    def _connected(
        self, compiled: Compiled, passed: Modes, start: StartUp | None
    ) -> launch.World | None:
        """The connections to other ranks; `passed` are the modes that the user's model was in."""
        plan = compiled.plan
        self._options = completed(self._options, plan)  # a given one is read where it is compiled
        check_supported(plan, compiled.capture.train)
        check_older_weights(plan.training.schedule, updates=self._options.optimizer is not None)
        if self._options.keep_model:
            kept, self._model = self._model, copy_of(self._model)
            for module in kept.modules():
                module.training = passed[module]
        if start is None:
            return None
        return launch.connect(start, self._options, plan, compiled.capture.division)

    def _compiled(self, flat: Any, start: StartUp | None) -> Compiled:
        if flat is None and (start is None or start.rank == 0 or self._example[0] is not None):
            flat = example_call(self._model, *self._example)
        if start is None:
            return self._build(self._model, flat, self._options, None)
        return compiled_alike(start, self._model, self._options, flat, self._build)

    # -- training ----------------------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """One global minibatch and its update (optimizer=None: `forward_backward`).

        The result's `outputs` are None on ranks that get none; reading those that the plan drops,
        as they would take more than a little of their rank's memory, raises ConfigError.

        The arguments are those of forward, which runs in train mode; or one of `shard`.  Raises
        InputError before anything is sent when they do not fit the capture; RankError when
        another rank failed.
        """
        return self.step_call(args, kwargs, target)

    def step_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, target: Any = None
    ) -> StepResult:
        """`step` for a model whose forward has an argument named ``target``."""
        if not isinstance(args, tuple | list) or not isinstance(kwargs or {}, Mapping):
            raise InputError(
                f"arguments of type {type(args).__name__} and {type(kwargs).__name__}",
                where="step_call",
                remedy="a tuple of them, and a dict: step_call((inputs,), {'mask': mask})",
            )
        return self._train("step", args, kwargs or {}, target)

    def forward_backward(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """One minibatch's gradients, added to .grad of `parameters()`; the update is yours.

        Raises ConfigError under schedules whose gradients belong to older weights.
        """
        check_unscaled(self._options, "forward_backward")
        return self._train("forward_backward", args, kwargs, target)

    def _train(self, kind: str, args: Any, kwargs: Any, target: Any) -> StepResult:
        flat = self._flatten(args, kwargs, target)
        session = self._running
        check_trains(session.plan.training.schedule, kind)
        check_older_weights(session.plan.training.schedule, updates=kind == "step")
        updates = kind == "step" and session.optimizer is not None
        if not updates:
            session.homes.check_none(kind)
        graph = session.compiled.capture.train
        check_trained(graph)
        self._goes_on()
        with in_one_thread(session):
            number = self._num_minibatches
            feeds = begin_call(session, kind, number, flat, training=True, with_loss=True)
            with session.call(None if session.compiled.overlaps else number):
                session.train(number, feeds, updates=updates)
            self._num_minibatches += 1
        return result_of(session, graph, feeds, session.workers[-1].losses[number])

    # -- evaluation --------------------------------------------------------------------------

    def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Outputs and loss of one minibatch on the newest weights, in eval mode.

        Flushes first.  The loss is None where there is no loss_fn and the model returns none.
        """
        return self._evaluate("eval_step", args, kwargs, target)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output pytree for one minibatch in eval mode; no loss_fn is called.

        A call with other arguments than the captured one's, as without labels of a model that has
        its loss inside, is captured once.  Flushes first.  None on ranks that get no outputs.
        """
        return self._evaluate("predict", args, kwargs, None).outputs

    def _evaluate(self, kind: str, args: Any, kwargs: Any, target: Any) -> StepResult:
        refuse_blind_start(self._options, target, started=self._session is not None)
        flat = self._flatten(args, kwargs, target)
        session = self._running
        with in_one_thread(session):
            number = evaluation_minibatch(self._num_evaluations)
            form = None if self._evaluations is None else self._evaluations.of(flat, number)
            with nullcontext() if form is None else form.evaluating(session):
                graph = session.compiled.capture.eval
                own = session.compiled.interfaces[-1].eval.loss_inputs == ()
                with_loss = graph.loss is not None and (kind == "eval_step" or own)
                feeds = begin_call(session, kind, number, flat, training=False, with_loss=with_loss)
                self._num_evaluations += 1
                with session.call():
                    session.drain(self._num_minibatches)
                    session.refresh(self._num_minibatches)
                if form is not None:
                    form.take_tensors(session)
                with session.call(number):
                    session.evaluate(number, feeds, with_loss=with_loss)
                loss = session.workers[-1].losses[number] if with_loss else None
                return result_of(session, graph, feeds, loss)

    # -- one call ----------------------------------------------------------------------------

    def _flatten(self, args: Any, kwargs: Any, target: Any) -> FlatCall:
        self._check_open()
        with nullcontext() if self._session is None else self._session.refusing():
            check_target(self._options, target)
            if not (args and isinstance(args[0], Shard)):
                flat = flatten_call(self._model, args, kwargs, target)
            elif len(args) > 1 or kwargs or target is not None:
                raise InputError("a shard takes the place of all arguments", remedy="step(shard)")
            else:
                flat = args[0].call(self._model, with_target=self._options.loss_fn is not None)
        if self._session is None:
            with one_thread():
                self._start(flat)
        same_model.settle_others(self)
        return flat

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, and free what this pipeline made.  Every rank calls it."""
        session = self._session
        if self._closed:
            return
        runs = session is not None and session.failed is None
        with in_one_thread(session) if session and runs else nullcontext():
            self._closed = True
            for handle in self._handles:
                handle.remove()
            if session is not None and runs:
                _end(session, self._num_minibatches)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            # Peers may be anywhere: no message of ours would be expected.
            self._closed = True
            if self._session is not None and self._session.failed is None:
                self._session.leave(describe(self._session.process_number(0), error, None, 0))

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None and session.in_flight and not self._closed and not session.failed:
            warnings.warn(
                "a pipeline ended with microbatches in flight, whose updates are lost; call "
                "pipe.flush() or pipe.close() after the last step",
                RuntimeWarning,
                stacklevel=2,
            )


def _end(session: Session, minibatches: int) -> None:
    """Flushes, and closes the connections."""
    if session.in_flight:
        try:
            session.check_changes()
        except PdcompileError as error:
            session.leave(describe(session.process_number(0), error, None, 0))
            raise
    with session.guard():
        session.agree("close", minibatches)
        session.drain(minibatches)
        session.close()
    if session.waits_for_more(minibatches):
        warn(
            "the pipeline was closed between two updates of a replicated stage: gradients of "
            "its last minibatches wait for more of them and are in no weight; pipe.save(folder) "
            "before close() keeps them",
            RuntimeWarning,
        )
