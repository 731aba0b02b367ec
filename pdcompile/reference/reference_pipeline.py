"""The reference pipeline: one process, the model itself, microbatch after microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import (
    BatchLayout,
    FlatCall,
    check_splits,
    concatenate,
    flatten_call,
    lone_row_error,
    lone_rows,
    map_tensors,
    microbatch_sizes,
    output_leaves,
    resolve_batch,
    split,
    weights,
)
from pdcompile.batch.step_result import (
    LazyLoss,
    StepResult,
    check_loss,
    own_loss,
    scaled_loss,
)
from pdcompile.eager.autocast import autocast_region, autocast_text
from pdcompile.eager.gradients import memory_of
from pdcompile.eager.loss_scale import loss_scale
from pdcompile.eager.modes import apply_overrides, in_mode
from pdcompile.eager.optimizers import make_optimizer
from pdcompile.eager.randomness import DrawScope, evaluation_minibatch, one_thread, preserved_rng
from pdcompile.errors import ConfigError
from pdcompile.ir.records import SizeRange
from pdcompile.options import Options
from pdcompile.options.option_checks import (
    check_older_weights,
    check_target,
    check_trains,
    check_unscaled,
)
from pdcompile.reference.checks import check_model, check_options, chosen_model
from pdcompile.reference.reference_state import ReferenceState
from pdcompile.reference.replica_sums import ReplicaSums
from pdcompile.reference.tied_uses import TiedUses
from pdcompile.reference.versions import Groups, Versions, learning_rates, weight_ages
from pdcompile.schedule.registry import kind_of


class Reference(ReferenceState):
    """The result of `reference`, with the interface of a pipeline.

    `optimizer` is the user's, over all parameters (None without one).
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(chosen_model(model, options))
        check_model(self._model)
        self._options = options
        self._num_microbatches = check_options(options)
        self._turns = kind_of(options.schedule).turns  # of each microbatch's backward
        self._device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        apply_overrides(self._model)
        self._given: dict[str, Tensor] = {}  # buffers that the optimizer has
        self.optimizer = make_optimizer(
            options.optimizer, self._model.named_parameters(), buffer=self._buffer
        )
        ages = weight_ages(self._model, options)
        self._versions = Versions(self._model, ages)
        self._groups = Groups(self._model, ages, partial(learning_rates, options))
        plan = options.plan
        #: sizes of microbatches: parts of a stage may share the samples of each
        self._sizes = SizeRange(multiple=1 if plan is None else plan.training.sharing)
        self._uses = TiedUses(self._model, () if plan is None else plan.tied)
        self._sums = ReplicaSums(self._model, plan)
        lag = max((age.lag for age in ages.values()), default=0)
        self._scale = loss_scale(options.grad_scaler, lag)
        if self._versions.stale:
            check_older_weights(options.schedule, updates=self.optimizer is not None)
        self._first: BatchLayout | None = None  # of each input in its first call

    # -- training

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """One minibatch and its update (with optimizer=None: `forward_backward`).

        Gradients start from zero and are dropped after the update.

        Raises:
            InputError: the minibatch does not fit the model, or cannot be split.
            ConfigError: there is no loss, or it cannot be differentiated.
            ClosedError: after `close`.
        """
        return self.step_call(args, kwargs, target)

    def step_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, target: Any = None
    ) -> StepResult:
        """`step` for a model whose forward has an argument named ``target``."""
        with one_thread():
            return self._step(args, kwargs or {}, target)

    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> StepResult:
        if self.optimizer is None:
            return self._run(args, kwargs, target, training=True)
        self.zero_grad()
        if self._scale is not None:
            self._scale.follow()
        try:
            with self._versions.of_minibatch():
                result = self._run(args, kwargs, target, training=True)
            self._groups.take(self._num_minibatches - 1)
            number = self._num_minibatches - 1
            held = [p.grad for p in self._model.parameters() if p.grad is not None]
            finite = self._scale is None or self._scale.unscale(number, held)
            if self._options.max_grad_norm is not None:
                self.clip_grad_norm_(self._options.max_grad_norm)
            self._versions.remember(number)
            if finite:
                self._groups.step(self.optimizer, number)
            if self._scale is not None:
                self._scale.learn(number, finite=finite)
                self._scale.show()
        finally:
            self.zero_grad()
        return result

    def forward_backward(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """One minibatch's gradients, added to ``.grad``; the update is the caller's.

        Raises:
            ConfigError: the schedule computes gradients on older weights.
        """
        if self._versions.stale:
            check_older_weights(self._options.schedule, updates=False)
        check_unscaled(self._options, "forward_backward")
        with one_thread():
            return self._run(args, kwargs, target, training=True)

    def flush(self) -> None:
        """Does nothing: no minibatch is ever in flight here."""
        self._check_open()

    # -- evaluation, on the newest weights

    def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Outputs and loss of one minibatch in eval mode, without gradients.

        The loss is None where there is no loss_fn and the model returns none.
        """
        with one_thread():
            return self._run(args, kwargs, target, training=False)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output pytree for one minibatch in eval mode; no loss_fn is called."""
        with one_thread():
            return self._run(args, kwargs, None, training=False, with_loss=False).outputs

    # -- one minibatch

    def _run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any,
        *, training: bool, with_loss: bool = True,
    ) -> StepResult:  # fmt: skip
        """Microbatch after microbatch, forward and in training backward."""
        if training:
            check_trains(self._options.schedule, "the reference")
        flat, layout = self._prepare(args, kwargs, target)
        number = self._num_minibatches if training else evaluation_minibatch(self._num_evaluations)
        count = self._num_microbatches
        if layout.splits:
            count = self._sizes.count(layout.size, count, more=not training)
        counted = self._options.loss_reduction, flat, layout, count
        scales = weights(*counted) if training else []
        losses, outputs = list[Tensor](), list[Any]()
        later: dict[int, tuple[DrawScope, Tensor]] = {}
        with (
            in_mode(self._model, training),
            torch.set_grad_enabled(training),
            preserved_rng(self._device, apart=True),
            self._uses.of_minibatch() if training else nullcontext(),
            self._sums.of_minibatch() if training else nullcontext(),
        ):
            for index, part in enumerate(split(flat.leaves, layout, count)):
                with DrawScope(self._model, self._options.seed, number, index) as scope:
                    output, loss = self._forward(flat, part, scope, with_loss=with_loss)
                    leaves = output_leaves(output) if loss is not None else []
                    loss_leaf = next((i for i, leaf in enumerate(leaves) if leaf is loss), None)
                    if training:
                        loss = self._differentiable(loss, output)
                    if loss is not None:
                        # a reduction that counts items can only be asked where there is a loss
                        scales = scales or weights(*counted)
                        loss = scaled_loss(loss, scales[index])
                        losses.append(loss.detach())
                    if loss is not None and loss.requires_grad:
                        scale = None if self._scale is None else self._scale.scale(number)
                        later[index] = scope, loss if scale is None else loss * torch.tensor(scale)
                if not self._turns:
                    self._backward(later)
                outputs.append(self._kept(output))
            self._backward(later)
        if training:
            self._num_minibatches += 1
            for fqn, one in self._given.items():  # forward may have put another in its place
                one.copy_(self._model.get_buffer(fqn).detach())
        else:
            self._num_evaluations += 1
        total = self._sums.total(losses) if losses else None
        sizes, dim = microbatch_sizes(layout.size, len(outputs)), layout.usual_dim
        whole = concatenate(outputs, sizes, loss=total, loss_leaf=loss_leaf, batch_dim=dim)
        return StepResult(None if total is None else LazyLoss(total.detach), lambda: whole)

    def _buffer(self, fqn: str, *_: str) -> Tensor:
        return self._given.setdefault(fqn, self._model.get_buffer(fqn))

    def _backward(self, waiting: dict[int, tuple[DrawScope, Tensor]]) -> None:
        """Backward of the microbatches that wait for it, in their order or that of the schedule."""
        for index in sorted(waiting, key=self._turns.__getitem__ if self._turns else None):
            scope, root = waiting.pop(index)
            with self._sums.of_microbatch(index):
                scope.backward([(root, None)])

    def _prepare(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any
    ) -> tuple[FlatCall, BatchLayout]:
        self._check_open()
        check_target(self._options, target)
        flat = flatten_call(self._model, args, kwargs, target)
        return flat, self._laid_out(flat, resolve_batch(flat, self._options.batch_dims))

    def _laid_out(self, flat: FlatCall, layout: BatchLayout) -> BatchLayout:
        """The layout of a call, with the batch dimension and memory order of each input's first."""
        dims = {path: dim for path, dim in layout.dims.items() if path in layout.orders}
        if self._first is None:
            check_splits(layout, self._num_microbatches)
        first = self._first or layout
        self._first = first = replace(first, dims=dims | first.dims)
        for path in lone_rows(flat, layout, first) if self._num_microbatches > 1 else ():
            raise lone_row_error(flat, path, layout.size)
        return replace(layout, orders=first.orders)

    def _forward(
        self, flat: FlatCall, part: Mapping[str, Any], scope: DrawScope, *, with_loss: bool
    ) -> tuple[Any, Tensor | None]:
        args, kwargs, target = flat.unflatten(part)
        region = autocast_region(autocast_text(self._options.autocast, self._device.type))
        with region, self._uses.of_microbatch(scope):
            output = self._model(*args, **kwargs)
            if self._options.loss_fn is None:
                return output, own_loss(output)
            if not with_loss:
                return output, None
            with scope.loss():
                return output, check_loss(self._options.loss_fn(output, target), "loss_fn")

    def _differentiable(self, loss: Tensor | None, output: Any) -> Tensor:
        if loss is None:
            raise ConfigError(
                f"the model's output ({type(output).__name__}) has no loss in it",
                where=type(self._model).__name__,
                remedy="give loss_fn=(output, target) -> scalar, or return a scalar, an output "
                "with .loss or a dict with 'loss'",
            )
        loss = check_loss(loss, type(self._model).__name__)
        if not loss.requires_grad and any(p.requires_grad for p in self._model.parameters()):
            raise ConfigError(
                "the loss does not depend on any trainable parameter",
                where=type(self._model).__name__,
                remedy="look for no_grad, detach or item() on the way to the loss",
            )
        return loss

    def _kept(self, output: Any) -> Any:
        """The detached output of a forward, copied where it is in the model's own memory, which
        later microbatches and updates write."""
        own = {memory_of(t) for t in (*self._model.parameters(), *self._model.buffers())}

        def keep(tensor: Tensor) -> Tensor:
            return tensor.detach().clone() if memory_of(tensor) in own else tensor.detach()

        return map_tensors(keep, output)
