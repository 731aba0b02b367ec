"""Probe: runs the model on real tensors to see the effects of its opaque modules.

Every call of these modules is watched from outside: the tensors that it returns, reads, writes and
keeps for backward, its random draws and floating-point operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from pdcompile.batch import FlatCall
from pdcompile.batch.call import copied
from pdcompile.eager.autocast import autocast_region, regions_of
from pdcompile.eager.modes import in_mode
from pdcompile.eager.module_copies import buffers_of, rebound, write_rebound
from pdcompile.eager.randomness import (
    CallKey,
    is_random_function,
    is_random_module,
    preserved_rng,
)
from pdcompile.errors import TraceError
from pdcompile.hardware import devices
from pdcompile.ir import python_draws
from pdcompile.ir.opaque import describe, tensors_among
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.comparison.step_values import same
from pdcompile.passes.trace.constants import shuffled
from pdcompile.passes.trace.interceptors.flex_attention import refuse_backward
from pdcompile.passes.trace.interceptors.generators import Sentinel, Unseeded
from pdcompile.passes.trace.python_state import State, kept_buffers, lines_of_assignments
from pdcompile.passes.trace.refusals import remedy
from pdcompile.passes.trace.subject import Subject
from pdcompile.passes.trace.tape.interceptor import patched
from pdcompile.passes.trace.tape.module_table import ModuleTable
from pdcompile.passes.trace.tape.observer import (
    effects,
    is_dense,
    locate,
    source_of_traceback,
    storage_key,
    written_by,
)
from pdcompile.releases.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    flex_attention_checked,
    flex_attention_uncompiled,
    is_functorch_wrapped_tensor,
)


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a call returned.

    `shares` is the first tensor in the same storage, ("input", i) or ("output", i), to which the
    offset is relative.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    shares: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """The effects of one call of an opaque module."""

    result: Any
    made: tuple[Made, ...] = ()
    form: str = ""
    buffers: tuple[str, ...] = ()  # canonical FQNs of those that it wrote
    rebinds: tuple[str, ...] = ()  # of those by ``self.buffer = new``
    hooks: tuple[str, ...] = ()  # forward hooks in it
    flops: int = 0
    saved_bytes: int = 0
    reason: str = ""  # why the module cannot be one op, "" if it can


Observed = dict[CallKey, ObservedCall]


def _check_repeats(
    subject: Subject, opaque: Mapping[str, TraceError], found: Observed, again: Observed
) -> None:
    """Raises TraceError where a second run on the same numbers gave other results.

    The module then depends on a counter in a global variable, a generator of its own or a clock,
    whose values in the stages would not be those in eager.
    """
    for key, one in found.items():
        other = again.get(key)
        if one.reason or (other is not None and _equal(one.result, other.result)):
            continue
        name = f"{key[0]!r} ({subject.table.classes[key[0]][0]})"
        raise refusals.error(refusals.UNREPEATABLE, name, opaque[key[0]].where)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tensors_among(one), tensors_among(other), strict=False)
    return all(not devices.on_host(a) or same_values(a, b) for a, b in pairs)


def both(one: ObservedCall, other: ObservedCall) -> ObservedCall:
    """One call, seen in runs on different values."""
    if not one.reason and not alike(one, other):
        reason = "returns a result whose shape depends on values"
        return replace(one, result=None, reason=reason)
    return replace(
        one,
        buffers=tuple(sorted({*one.buffers, *other.buffers})),
        rebinds=tuple(sorted({*one.rebinds, *other.rebinds})),
        flops=max(one.flops, other.flops),
        saved_bytes=max(one.saved_bytes, other.saved_bytes),
    )


def alike(one: ObservedCall, other: ObservedCall) -> bool:
    """True if two calls returned tensors of the same shapes, in the same form."""
    shapes = [[(made.shape, made.dtype) for made in call.made] for call in (one, other)]
    return one.form == other.form and shapes[0] == shapes[1]


def made_by(inputs: list[Tensor], outputs: list[Tensor]) -> tuple[Made, ...]:
    """The returned tensors, with what they share with the inputs and with each other."""
    first: dict[int, tuple[str, int, int]] = {}
    for i, tensor in enumerate(inputs):
        first.setdefault(storage_key(tensor), ("input", i, int(tensor.storage_offset())))
    found = []
    for i, tensor in enumerate(outputs):
        shares = first.setdefault(storage_key(tensor), ("output", i, int(tensor.storage_offset())))
        own = shares[:2] == ("output", i)
        found.append(
            Made(
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                offset=int(tensor.storage_offset()) - (0 if own else shares[2]),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
                shares=None if own else shares[:2],
            )
        )
    return tuple(found)


def same_values(a: Tensor, b: Tensor) -> bool:
    """True if two tensors are equal to the last bit; true where they cannot be compared."""
    return a.layout != torch.strided or a.is_meta or same(a, b)


def probe(
    subject: Subject, flat: FlatCall, paths: Mapping[str, TraceError], *, training: bool
) -> Observed:
    """Runs the model and returns the effects of each call of the modules at `paths`, which are
    opaque for these reasons.

    A second run, on the same numbers, must give the same results; a third one, on them in another
    order, shows whether the shapes of results depend on values.  Buffers, modes, attributes and
    generators are as before afterwards.

    Raises:
        TraceError: the model cannot be run, draws outside of torch, or changes Python state that
            its results depend on.
    """
    with in_mode(subject.model, training):
        before = start = State(subject.model)
        assigned: dict[tuple[int, str], str] = {}
        run = partial(_run, subject, paths=frozenset(paths), assigned=assigned)
        try:
            try:
                found = run(flat)
            except TraceError as error:
                if "saved tensor hooks" not in error.message:
                    raise
                start.restore()
                run = partial(run, hooks=False)  # torch.func transforms do not run below them
                found = run(flat)
            # Changes outside of the opaque modules are checked by the recordings.
            change = start.change(assigned, within=paths)
            if change is not None:
                # Models set things up in their first call.  The second one, made from there, must
                # be the same computation, and change nothing.
                start = State(subject.model)
                found = _repeated(run, flat, found, change)
                if start.change(assigned, within=paths) is not None:
                    raise change
            start.restore()
            _check_repeats(subject, paths, found, run(flat))
            start.restore()
            with suppress(TraceError):  # such inputs are refused: results are checked at every call
                again = run(shuffled(flat))
                found |= {key: both(found[key], again[key]) for key in found if key in again}
            return found
        finally:
            before.restore()


def _repeated(
    run: Callable[[FlatCall], Observed], flat: FlatCall, first: Observed, change: TraceError
) -> Observed:
    try:
        second = run(flat)
    except TraceError:
        raise change from None
    if list(first) != list(second) or not all(map(alike, first.values(), second.values())):
        raise change
    return second


def _run(
    subject: Subject,
    flat: FlatCall,
    *,
    paths: frozenset[str],
    assigned: dict[tuple[int, str], str],
    hooks: bool = True,
) -> Observed:
    model = subject.model
    leaves = copied(flat.leaves)
    args, kwargs, _ = flat.unflatten(leaves)
    watch = _OpaqueWatch(model, subject.table, paths, hooks=hooks)
    sentinel = Sentinel()
    given = (leaf.device for leaf in leaves.values() if isinstance(leaf, Tensor))
    device = next(given, devices.HOST)
    unseeded = Unseeded(lambda: watch.draws, lambda: locate()[0])
    try:
        with (
            preserved_rng(),
            kept_buffers(model),
            watch.calls(),
            lines_of_assignments(assigned, lambda: locate()[0]),
            python_draws.watched(sentinel.follow),
            flex_attention_uncompiled(),
            flex_attention_checked(refuse_backward),
            patched((torch.random, "default_generator", unseeded)),
            regions_of(subject.autocast, device),
            autocast_region(subject.autocast or f"{device.type}:off"),
            torch.enable_grad(),
            watch,
            watch.functions,
        ):
            model(*args, **kwargs)
            sentinel.check(None, whole=True)
    except TraceError:
        raise
    except Exception as error:
        raise refusals.ForwardRaised(
            f"the model's forward raised {type(error).__name__}: {error}",
            where=source_of_traceback(error),
            remedy=remedy(args, kwargs),
        ) from error
    return watch.found


class _Functions(TorchFunctionMode):
    """Counts the random functions that are running: their draws have streams in eager too."""

    def __init__(self) -> None:
        super().__init__()
        self.announced = 0
        self.generator = False  # one was passed explicitly

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.generator = self.generator or kwargs.get("generator") is not None
        with self.running() if is_random_function(func) else nullcontext():
            return func(*args, **kwargs)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a random function or module."""
        self.announced += 1
        try:
            yield
        finally:
            self.announced -= 1


class _OpaqueWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor of the run, and records the effects of opaque modules."""

    supports_higher_order_operators = True

    def __init__(
        self, model: nn.Module, table: ModuleTable, paths: frozenset[str], *, hooks: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hooks = hooks
        self.table = table
        self.paths = paths
        self.functions = _Functions()
        self.found: dict[CallKey, ObservedCall] = {}
        self._calls: dict[str, int] = {}
        self._tensors = {
            storage_key(tensor): fqn
            for fqn, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        self._foreign: set[int] = set()  # storages of activations made outside of the module
        self._path = ""  # of the module that is running
        self.draws = 0  # so far, in opaque modules
        self._clear()

    def _clear(self) -> None:
        self._own: set[int] = set()
        self._written: set[int] = set()
        self._strays: dict[str, None] = {}
        self._flops = 0
        self._hidden_draw = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = _keys(result)
        if not self._path:
            self._foreign |= made
            return result
        for key in _keys((args, kwargs)):
            self._reads(key)
        if isinstance(func, OpOverload):  # FlexAttention is none: it writes and draws nothing
            self._note_effects(func, args, kwargs, result)
        fresh = made - _keys((args, kwargs))
        self._own |= fresh
        self._foreign -= fresh
        return result

    def _note_effects(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._written |= _keys(list(written_by(func, args, kwargs)))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self._flops += count(*args, **kwargs, out_val=result)
        if effects(func)[0]:
            self.draws += 1
            self._hidden_draw = self._hidden_draw or not self.functions.announced

    def _reads(self, key: int) -> None:
        if key in self._own:
            return
        fqn = self._tensors.get(key)
        if fqn is not None and not self._inside(fqn):
            self._strays[f"the model's {fqn!r}"] = None
        elif key in self._foreign:
            self._strays["a tensor that is not among its arguments"] = None

    def _inside(self, fqn: str) -> bool:
        info = self.table.tensors[self.table.fqns[id(self.table.objects[fqn])]]
        return any(name.startswith(f"{self._path}.") for name in (info.fqn, *info.aliases))

    def calls(self) -> AbstractContextManager[None]:
        """Watches the calls of opaque modules while this is open."""
        plain = nn.Module.__call__

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.table.names.get(id(module))
            if path is None or self._path or path not in self.paths:
                draws = self._path and is_random_module(module)
                with self.functions.running() if draws else nullcontext():
                    return plain(module, *args, **kwargs)
            number = self._calls.get(path, 0)
            self._calls[path] = number + 1
            return self._watched(plain, module, (path, number), args, kwargs)

        return patched((nn.Module, "__call__", __call__))

    def _watched(self, plain: Any, module: nn.Module, key: CallKey, args: Any, kwargs: Any) -> Any:
        inputs = tensors_among((args, kwargs))
        own = dict(module.named_buffers(prefix=key[0]))
        places = buffers_of(module.modules())
        if any(map(is_functorch_wrapped_tensor, (*inputs, *own.values(), *module.parameters()))):
            inside = refusals.error(refusals.TRANSFORM, key[0], locate()[0])
            inside.module_path = key[0]  # its caller is opaque instead, and may lend it weights
            raise inside
        before = [tensor.detach().clone() for tensor in inputs]
        buffers = {fqn: buffer.clone() for fqn, buffer in own.items()}
        self._clear()
        self._own = _keys(inputs)
        self.functions.generator = False
        saved: dict[int, int] = {}
        held = set(self._tensors) | self._own

        def pack(tensor: Tensor) -> Tensor:
            if is_dense(tensor) and storage_key(tensor) not in held:
                saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # a result that its own node keeps would never die

        self._path, rebinds = key[0], set[str]()
        try:
            saving: Any = nullcontext()
            if self.hooks:
                saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with saving:
                result = plain(module, *args, **kwargs)
            rebinds = {self.table.fqns[id(one)] for one in write_rebound(places)}
        finally:
            self._path = ""
        for owner, name, _ in rebound(places):
            path = self.table.names[id(owner)]
            raise refusals.error(refusals.REBOUND, f"{path}.{name}", self.table.classes[path][1])
        written = {self._tensors[each] for each in self._written if each in self._tensors}
        written |= {fqn for fqn, b in own.items() if not same_values(b, buffers[fqn])} | rebinds
        names = {self.table.fqns.get(id(self.table.objects.get(fqn)), fqn) for fqn in written}
        changed = any(not same_values(a, b) for a, b in zip(inputs, before, strict=True))
        outputs = tensors_among(result)
        reason = self._reason(inputs, outputs, names, changed=changed)
        try:
            form = describe(result)
        except TypeError as error:
            form, reason = "", f"returns a {error}"
        self.found[key] = ObservedCall(
            result=result if not reason else None,
            made=() if reason else made_by(inputs, outputs),
            form=form,
            buffers=tuple(sorted(names)),
            rebinds=tuple(sorted(rebinds)),
            hooks=_forward_hooks(module),
            flops=self._flops,
            saved_bytes=sum(saved.values()),
            reason=reason,
        )
        self._foreign |= _keys(outputs)
        return result

    def _reason(
        self, inputs: list[Tensor], outputs: list[Tensor], written: set[str], *, changed: bool
    ) -> str:
        """The reason why the watched call cannot be one op, "" if it can."""
        if changed or self._written & _keys(inputs):
            return "writes into its arguments"
        for fqn in sorted(written):
            if self.table.tensors[fqn].kind != "buffer":
                return f"writes the parameter {fqn!r}"
        for stray in self._strays:
            return f"reads {stray}"
        if self._hidden_draw or self.functions.generator:
            return "draws random numbers in a way that cannot be repeated"
        if _keys(outputs) & set(self._tensors):
            return "returns a parameter or buffer"
        if not all(map(is_dense, (*inputs, *outputs))):
            return "takes or returns a tensor that is not dense"
        return ""


def _forward_hooks(module: nn.Module) -> tuple[str, ...]:
    """Forward hooks in a module, as ``path in it: name of the hook``."""
    return tuple(
        f"{path}: {name}" if path else name
        for path, one in module.named_modules()
        for hook in (*one._forward_pre_hooks.values(), *one._forward_hooks.values())
        for name in (getattr(hook, "__qualname__", type(hook).__qualname__),)
    )


def _keys(value: Any) -> set[int]:
    return {storage_key(tensor) for tensor in tensors_among(value) if is_dense(tensor)}
