"""One call of the user's: checked against what was captured, and cut into microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pdcompile.batch import (
    EVALUATION,
    FlatCall,
    Whole,
    as_one_argument,
    follow_batch,
    lone_row_error,
    lone_rows,
    microbatch_sizes,
    split,
    weights,
)
from pdcompile.errors import ConfigError, InputError, did_you_mean, some
from pdcompile.hardware import devices
from pdcompile.ir.graph import Affine, OpGraph, walk
from pdcompile.ir.value_checks import check_inputs, check_leaf
from pdcompile.options import Options
from pdcompile.runtime.interpreter import Worker
from pdcompile.runtime.outputs import output_ranks
from pdcompile.runtime.session import Session
from pdcompile.runtime.stage.compute import Feed
from pdcompile.runtime.watch.optimizer_watch import refuse_unlike


def begin_call(
    session: Session, kind: str, number: int, flat: FlatCall, *, training: bool, with_loss: bool
) -> list[Feed]:
    """Check a call, agree on it with the other ranks, and cut it: one Feed for each worker.

    Raises InputError, before anything is sent, when it does not fit what was captured;
    ContractError when the ranks make unlike calls.
    """
    session.check_running()
    compiled, cut = session.compiled, Cut(session, training)
    turn = number if training else 0
    part = None if flat.whole is None else cut.here(flat.whole.size, turn)
    paths = needed_paths(session, training=training, with_loss=with_loss)
    with session.refusing():
        if flat.whole is not None:
            _check_turn(flat.whole, number, training=training)
        size = _checked_size(cut, flat, paths if part is None or part else (), part)
        if size is not None:
            _check_values(cut, flat, size, part)
    session.check_changes(training)
    with session.guard():
        size = session.agree(kind, number, size, flat)
        with session.meeting():
            refuse_unlike(session.beside, session.state.tensors, session.optimizer)
    if size is None:
        raise InputError("no input tells the batch size", remedy="pass the model's inputs")
    layout, sizes = replace(compiled.layout, size=size), cut.sizes(size)
    count, scales = len(sizes), list[float]()
    if with_loss and session.wirings[session.stages[-1], training].is_last:
        with session.guard() if session.world is not None else nullcontext():
            scales = weights(session.options.loss_reduction, flat, layout, count)
    feeds = []
    for worker in session.workers:
        wiring = session.wirings[worker.stage, training]
        taken = cut.of(worker, turn, count)
        here = bool(taken) or session.spec.group(worker.stage) == 1
        held = flat.leaves if part == () else wiring.paths(with_loss) if here else ()
        leaves = {path: flat.leaves[path] for path in held}
        if training and compiled.overlaps:
            # Backward comes in a later call, when the caller may have filled its buffers anew.
            leaves = {p: x.clone() if isinstance(x, Tensor) else x for p, x in leaves.items()}
        found = split(leaves, layout, count, part)
        # What other replicas take would keep the whole copy until this feed is dropped.
        own = [one if i in taken else {} for i, one in enumerate(found)]
        feed = Feed(number, own, sizes, [], wiring, with_loss)
        if wiring.is_last:
            feed.keep_outputs = bool(output_ranks(session, training=training))
            feed.weights = scales
        feeds.append(feed)
    return feeds


def _check_turn(whole: Whole, number: int, *, training: bool) -> None:
    """Raise InputError for a part of another minibatch than the one whose turn it is."""
    if whole.turn not in (None, number if training else EVALUATION):
        own = "an evaluation" if whole.turn == EVALUATION else f"minibatch {whole.turn}"
        raise InputError(
            f"this shard has what {own} needs here, and this call is "
            + (f"minibatch {number}" if training else "an evaluation")
            + ": replicas take minibatches in turn",
            where="pipe.shard",
            remedy="give shards to step in the order in which they come, none left out; "
            "pipe.shard(..., evaluation=True) makes those for eval_step and predict",
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut of a session's calls in training or evaluation into microbatches."""

    session: Session
    training: bool

    @property
    def graph(self) -> OpGraph:
        capture = self.session.compiled.capture
        return capture.train if self.training else capture.eval

    def sizes(self, size: int) -> list[int]:
        """Samples of each microbatch; one has all where a batch cannot be cut.

        There are as many as the plan has; fewer, in an evaluation also more, where the capture is
        not right for the sizes that these would have: a short minibatch may leave one sample to
        some, and of a model that loops over its samples a capture is right for one size.
        """
        if not self.session.compiled.layout.splits:
            return [size]
        plan, known = self.session.compiled.plan, self.graph.sizes
        wanted = plan.training.num_microbatches
        return microbatch_sizes(size, known.count(size, wanted, more=not self.training))

    def of(self, worker: Worker, turn: int, count: int) -> Sequence[int]:
        """Microbatches of minibatch `turn` that come to a worker: those that its replica takes, or
        whole minibatches in turn."""
        spec, stage = self.session.spec, worker.stage
        return spec.share(stage, spec.ranks[stage].index(worker.rank), count, turn)

    def here(self, size: int, turn: int) -> tuple[int, ...]:
        """Microbatches of minibatch `turn` of which this process reads samples."""
        if not any(wiring.paths(True) for wiring in self.session.wirings.values()):
            return ()
        count = len(self.sizes(size))
        parts = [self.of(worker, turn, count) for worker in self.session.workers]
        return tuple(sorted({i for part in parts for i in part}))

    def rows_here(self, size: int, turn: int) -> list[int]:
        """Samples of minibatch `turn` that this process reads."""
        sizes = self.sizes(size)
        ends = [*accumulate(sizes)]
        return [row for i in self.here(size, turn) for row in range(ends[i] - sizes[i], ends[i])]


def needed_paths(session: Session, *, training: bool, with_loss: bool) -> tuple[str, ...]:
    """Paths of the call's leaves that this process reads."""
    found: dict[str, None] = {}
    for stage in session.stages:
        wiring = session.wirings[stage, training]
        found.update(dict.fromkeys(wiring.paths(with_loss)))
        if with_loss and wiring.is_last and callable(session.options.loss_reduction):
            dims = session.compiled.layout.dims.items()  # it may count anything that was given
            found.update(dict.fromkeys(path for path, dim in dims if dim is not None))
    return tuple(found)


_OTHER_SHAPE = "pad or convert it to the captured shape and dtype, or make another pipeline"


def _checked_size(
    cut: Cut, flat: FlatCall, needed: tuple[str, ...], part: tuple[int, ...] | None
) -> int | None:
    """The batch size, None where this process holds nothing that tells it.

    `part`: the microbatches whose samples the call has, where it is a part of a minibatch.

    Raises InputError for a missing input, another shape or dtype, or another constant than
    the captured one.
    """
    compiled, graph = cut.session.compiled, cut.graph
    _check_constants(graph, flat)
    for path in needed:
        if flat.leaves.get(path) is None:
            raise _missing(graph, flat, path)
    refuse_modes()
    tensors = {p: leaf for p, leaf in flat.leaves.items() if isinstance(leaf, Tensor)}
    if cut.training:
        _check_trainable(tensors)
    several = compiled.layout.splits and compiled.plan.training.num_microbatches > 1
    _check_written(graph, tensors, several=several)
    for item in graph.inputs:
        if item.path in needed and item.path not in tensors:
            raise InputError(
                f"this input is {flat.leaves[item.path]!r}, captured was a tensor",
                where=item.path,
                remedy="pass a tensor of the captured shape and dtype, or make another pipeline",
            )
        if item.path in tensors:
            check_leaf(graph, item, tensors[item.path], _OTHER_SHAPE)
    if not compiled.layout.splits:
        return compiled.layout.size
    known = {p: tensors.get(p) for p, x in flat.leaves.items() if p != "target" or x is not None}
    present = FlatCall(known, flat.spec)
    layout = follow_batch(present, compiled.layout)
    for path in lone_rows(present, layout, compiled.layout):
        if several or _counts_rows(graph, path):
            raise lone_row_error(flat, path, layout.size)
    size = layout.size if flat.whole is None else flat.whole.size
    sizes = cut.sizes(size)
    told = any(layout.dims[path] is not None for path in tensors)
    if part is not None:
        due = sum(sizes[i] for i in part)
        if told and layout.size != due:
            raise InputError(
                f"{layout.size} samples came of the {due} that this process asked for, of a "
                f"minibatch of {size}",
                remedy="collate_fn has to give a row for each sample that it gets",
            )
    elif not told:
        return None
    check_sizes(graph, sizes, training=cut.training)
    return size


def _check_constants(graph: OpGraph, flat: FlatCall) -> None:
    for path, text in graph.constants:
        if of_target(path) and flat.leaves.get("target", flat) is None:
            continue  # none was given: predict needs none, and `needed` says who does
        found, remedy = "was left out", "pass it as before, or make another pipeline without it"
        now = flat.leaves[path] if path in flat.leaves else default_of(flat, path)
        if isinstance(now, Tensor):
            found, remedy = "is a tensor now", f"pass {text} as before, or a tensor in every call"
        elif path in flat.leaves:
            found = f"is {now!r} now"
            remedy = "make another pipeline for the other value, or pass it as a tensor"
        if repr(now) != text:
            raise InputError(
                f"this input {found}, and was {text} when the model was captured; its value is "
                "part of the plan",
                where=path,
                remedy=remedy,
            )


def _check_trainable(tensors: Mapping[str, Tensor]) -> None:
    for path, leaf in tensors.items():
        if leaf.is_inference():
            what = "was made under torch.inference_mode, and cannot be trained on"
            remedy = "clone() it outside"
        elif leaf.grad_fn is not None:
            what = (
                "is the result of a computation that waits for gradients, which would be computed "
                "once a microbatch"
            )
            remedy = "detach() it, or make that computation a part of the model"
        else:
            continue
        raise InputError(f"this input {what}", where=path, remedy=remedy)


def _counts_rows(graph: OpGraph, path: str) -> bool:
    """True if what is computed of an input depends on its number of rows other than by shape:
    the capture then took the microbatch's size for it."""
    reached = {item.name for item in graph.inputs if item.path == path}
    for op in graph.ops:
        if not reached.isdisjoint(op.inputs):
            if walk((op.args, op.kwargs), Affine):
                return True
            reached.add(op.name)
    return not graph.sizes.holds(1)


def _check_written(graph: OpGraph, tensors: Mapping[str, Tensor], *, several: bool) -> None:
    """Stages write copies of their inputs: what eager would see in another input, or in the next
    of `several` microbatches, they would not."""
    first: dict[int, str] = {}
    others: dict[str, str] = {}  # of the same memory
    for path, tensor in tensors.items():
        other = first.setdefault(tensor.untyped_storage().data_ptr(), path)
        if other != path and tensor.numel():
            others[path], others[other] = other, path
    shared = {item.path for item in graph.inputs if item.batch_dim is None and several}
    if not others and not shared:
        return
    for path, op in graph.written_inputs().items():
        if path in others or path in shared:
            raise InputError(
                f"forward writes this input in place ({op.source}), and "
                + (f"{others[path]!r} is in the same memory" if path in others else
                   "every microbatch takes all of it"),
                where=path,
                remedy="write into a new tensor in forward (a clone() of the input), or pass a "
                "clone()" if path in others else "write into a new tensor in forward (a clone() "
                "of the input); state belongs into a registered buffer",
            )  # fmt: skip


def _missing(graph: OpGraph, flat: FlatCall, path: str) -> InputError:
    """The refusal of a call without this input; names one that the call has instead."""
    inside = {name: one for name, one in flat.leaves.items() if name.startswith(f"{path}[")}
    if inside and not any(isinstance(one, Tensor) for one in inside.values()):
        return InputError(
            "this input was a tensor when the model was captured, and is a container now",
            where=path,
            remedy=f"pass a tensor: torch.tensor({path}), of a list of numbers",
        )
    if of_target(path):
        return InputError(
            "the target is missing", where=path, remedy="pass target=... to step: loss_fn needs it"
        )
    known = {entry.path for entry in graph.inputs} | {name for name, _ in graph.constants}
    surplus = [name for name in flat.leaves if name not in known]
    given, _, _ = flat.unflatten()  # one container may have been passed for all arguments
    near = did_you_mean(path, [] if inside else surplus)
    instead = f", and {some(surplus)} is there, which the first call did not have"
    return InputError(
        f"an input is missing{instead if surplus else ''}",
        where=path,
        remedy=(f"write {path} in place of {surplus[0]}" if near else "")
        or (as_one_argument(given[0]) if len(given) == 1 else "")
        or "pass it: a stage of this process reads it (pipe.needs lists all that it needs)",
    )


def of_target(path: str) -> bool:
    """True if a leaf is one of loss_fn's target."""
    return path == "target" or path.startswith(("target[", "target."))


def _check_values(cut: Cut, flat: FlatCall, size: int, part: tuple[int, ...] | None) -> None:
    """Raise InputError where the model's Python would go another way than in the capture."""
    graph = cut.graph
    if not graph.checks:
        return
    layout, sizes = replace(cut.session.compiled.layout, size=size), cut.sizes(size)
    given = {entry.path: flat.leaves.get(entry.path) for entry in graph.inputs}
    parts = split(given, layout, len(sizes), part)
    for i in range(len(sizes)) if part is None else part:
        check_inputs(graph, parts[i], sizes[i])


def check_sizes(graph: OpGraph, sizes: list[int], *, training: bool) -> None:
    """The model may be another computation for fewer or more samples than were captured."""
    largest, smallest = sizes[0], sizes[-1]
    known = graph.sizes
    if smallest < known.smallest:
        wrong, reason, remedy = smallest, known.below, "leave out, pad or enlarge short minibatches"
    elif known.largest is not None and largest > known.largest:
        remedy = "smaller minibatches, or another pipeline, prepared with one of this size"
        wrong, reason = largest, known.above or "larger ones were not tried when it was captured"
    elif odd := [size for size in sizes if size % known.multiple]:
        raise InputError(
            f"a minibatch of {sum(sizes)} samples in {len(sizes)} microbatches makes one of "
            f"{odd[0]}, whose samples {known.multiple} parts of a stage share",
            where="the batch size",
            remedy=f"minibatches of a multiple of {known.multiple} samples, filled up or cut short",
        )
    else:
        return
    if known.is_one:
        due = known.smallest * (len(sizes) if training else 1)
        remedy = f"minibatches of {due} samples" if training else (
            f"evaluate minibatches of {due} samples or a multiple of it, filled up if need be"
        )  # fmt: skip
    to = f" to {known.largest}" if known.largest != known.smallest else " alone"
    raise InputError(
        f"a minibatch of {sum(sizes)} samples in {len(sizes)} microbatches makes one of {wrong}, "
        f"and the captured model is right for {known.smallest}{to}: {reason}",
        where="the batch size",
        remedy=remedy,
    )


def refuse_modes() -> None:
    """Raise ConfigError inside a mode that would change what the stages compute."""
    if torch.is_inference_mode_enabled():
        raise ConfigError("torch.inference_mode is on", remedy="use torch.no_grad, or nothing")
    if any(torch.is_autocast_enabled(one) for one in (devices.HOST.type, devices.GPU)):
        raise ConfigError(
            "torch.autocast is on around this call, and was not captured",
            remedy="compile(..., autocast='bfloat16') runs model and loss in such a region; or put "
            "it inside of forward",
        )


def default_of(flat: FlatCall, path: str) -> Any:
    """Default that forward takes for an argument that is not passed."""
    return getattr(flat.spec.signature.parameters.get(path), "default", inspect.Parameter.empty)


def refuse_blind_start(options: Options, target: Any, *, started: bool) -> None:
    """Raise InputError where an evaluation would be the first call: loss_fn is captured too."""
    if not started and options.loss_fn is not None and target is None:
        raise InputError(
            "the first call captures the model with its loss_fn, and that needs a target",
            remedy="call pipe.prepare(inputs, target=target) or pipe.eval_step(...) first, or give "
            "example_inputs= and example_target= to compile",
        )
