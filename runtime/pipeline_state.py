"""PipelineState: answers of a prepared pipeline about itself, and its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from pdcompile.errors import ClosedError, ConfigError, NotPrepared
from pdcompile.hardware import devices
from pdcompile.options import Options
from pdcompile.options.option_checks import check_older_weights, check_unscaled
from pdcompile.plan import Plan
from pdcompile.position import Position
from pdcompile.runtime.calls import Cut, check_sizes, needed_paths
from pdcompile.runtime.session import Session, in_one_thread
from pdcompile.runtime.shards import Shard, shards
from pdcompile.runtime.state.exchange import Refused
from pdcompile.runtime.transport.reductions import check_max_norm
from pdcompile.runtime.watch.same_model import settle_others

_MODES = "step trains in train mode; eval_step and predict run in eval mode, by themselves"
_DEVICE = "stages run on the devices of cluster=; your own model may be moved before compile"
_INSIDE = "the model that was given to compile has it; plan, explain() and dump() show the stages"
_HINTS = {
    "train": _MODES,
    "eval": _MODES,
    **dict.fromkeys(("to", devices.GPU, devices.HOST.type), _DEVICE),
    "forward": "step trains, predict gives outputs",
    "backward": "step runs it; forward_backward does without the update",
    "requires_grad_": "freeze parameters of the model before compile",
    "model": _INSIDE,
    "modules": _INSIDE,
    "named_modules": _INSIDE,
    "children": _INSIDE,
    "buffers": _INSIDE,
    "named_buffers": _INSIDE,
    "train_step": "step",
    "fit": "step, once for each minibatch",
}


class ModuleHints:
    """Errors that name the right call where a pipeline is taken for an nn.Module."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            "a pipeline is not called as a module is",
            remedy="pipe.step(...) trains, pipe.predict(...) gives outputs, pipe.eval_step(...) "
            "outputs and loss",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a pipeline is not pickled or copied: it holds connections, and stages of this process",
            remedy="pipe.save(folder) writes all that a training needs; for the weights alone "
            "torch.save(pipe.full_state_dict(), file), which every rank calls",
        )

    if not TYPE_CHECKING:  # else every attribute would seem to exist

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {_HINTS[name]}" if name in _HINTS else ""
            raise AttributeError(f"a pipeline has no {name!r}{hint}", name=name, obj=self)


class PipelineState(ModuleHints):
    """The part of a `Pipeline` that takes no minibatch."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._model = model
        self._options = options
        self._session: Session | None = None
        self._num_minibatches = 0
        self._num_evaluations = 0
        self._closed = False

    # -- what it is --------------------------------------------------------------------------

    @property
    def _running(self) -> Session:
        if self._session is None:
            self._check_open()
            raise NotPrepared(
                "there is no plan yet: the model is captured with the first minibatch",
                remedy="call pipe.step(...) or pipe.prepare(inputs) first, or give "
                "example_inputs= to compile",
            )
        return self._session

    @property
    def plan(self) -> Plan:
        """The plan; raises NotPrepared before there is one, as everything here that needs it."""
        return self._running.plan

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this process's parameters (None: gradients only)."""
        return self._running.optimizer

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run in this process: one under torchrun, all of them otherwise."""
        return tuple(map(self._running.process_number, self._running.ranks))

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of these ranks."""
        return tuple(self._running.stages)

    @property
    def in_flight(self) -> bool:
        """True if microbatches wait for a later call: flush() drains them."""
        session = self._session
        return session is not None and session.in_flight and session.failed is None

    @property
    def unsettled(self) -> bool:
        """True if flush() would do anything: replicas may also have something of their own."""
        session = self._session
        apart = session is not None and session.replicas_apart and session.failed is None
        return self.in_flight or apart

    @property
    def position(self) -> Position:
        """Numbers of minibatches trained on and evaluated, saved with the state."""
        return Position(self._num_minibatches, self._num_evaluations)

    @property
    def needs(self) -> tuple[str, ...]:
        """Paths of the inputs and targets that this process reads; others may be None."""
        return needed_paths(self._running, training=True, with_loss=True)

    def shard(
        self,
        dataset: Any,
        batches: Iterable[Sequence[Any]],
        *,
        evaluation: bool = False,
        **loader: Any,
    ) -> Iterator[Shard]:
        """This process's part of minibatches: of their samples it reads what its stages need.

        Every rank iterates over the same `batches`, each the indices of one minibatch (a
        torch.utils.data.BatchSampler, or lists), and gives what comes to `step`, `eval_step` and
        the like in place of their arguments.  Samples are (inputs, target) pairs where there is a
        loss_fn, else inputs: a tensor, a tuple of forward's arguments or a dict of them.
        `loader`: further arguments of torch.utils.data.DataLoader, as num_workers and collate_fn.
        Where replicas take whole minibatches in turn (stash), each reads its own: shards have to
        come to `step` in their order, and `evaluation=True` makes those for `eval_step` and
        `predict`.

        Raises ConfigError for a dataset that is not read by index, and where loss_reduction
        counts items that another replica reads.
        """
        first = None if evaluation else self._num_minibatches
        return shards(self._running, dataset, batches, loader, first)

    def check_size(self, samples: int, *, training: bool = True) -> None:
        """Raise InputError where no call, of training or evaluation, takes so many samples."""
        cut = Cut(self._running, training)
        if self._running.compiled.layout.splits:
            check_sizes(cut.graph, cut.sizes(samples), training=training)

    def explain(self) -> str:
        """The plan as a table: stages, time, memory, traffic, proof."""
        session = self._running
        found = session.compiled.explain()
        return f"{found}\n{session.homes}" if session.homes.wholes else found

    def dump(self, folder: str) -> None:
        """Write the stages as source, with the plan."""
        self._running.compiled.dump(folder, self._model)

    # -- calls without a minibatch -----------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this pipeline was closed", remedy="make a new pipeline")

    def flush(self) -> None:
        """Drain what is in flight, which changes no result, and bring together the buffers that
        replicas write apart."""
        if self._session is None:
            return
        with self._call("flush") as session:
            session.drain(self._num_minibatches)

    @contextmanager
    def _call(self, kind: str) -> Iterator[Session]:
        """A call that takes no minibatch: checked, and agreed on with the other ranks, which may
        all refuse it together; then the pipeline goes on."""
        refused: Refused | None = None
        self._check_open()
        session = self._running
        session.check_running()
        with in_one_thread(session):
            if kind != "flush":
                settle_others(self)
            session.check_changes()
            with session.call():
                session.agree(kind, self._num_minibatches)
                try:
                    yield session
                except Refused as error:
                    refused = error
        if refused is not None:
            raise refused.error

    # -- parameters --------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters with the model's names: tied ones on their owner only."""
        return self._running.state.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        """Drop the gradients of this process's parameters; before the first minibatch those of the
        model's."""
        started = self._session is not None or self._closed
        for parameter in self.parameters() if started else self._model.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`.

        For your own loop around `forward_backward`; every rank calls it.  Returns the norm.
        """
        check_max_norm(max_norm)
        check_unscaled(self._options, "clip_grad_norm_")
        check_older_weights(self.plan.training.schedule, updates=False)
        self._running.homes.check_none("clip_grad_norm_")
        with self._call("clip_grad_norm_") as session:
            session.drain(self._num_minibatches, together=False)
            return session.clip(self._num_minibatches, max_norm)
