"""Compares every generated stage with the capture, op by op, without values, at any size.

A stage's own Python runs on tensors of the meta device under a mode that sees each public torch
call, as the tape of a capture does.  Each of them has to be the next op of the stage: the same
function with the same arguments, on the same values, in the same regions and with the same stream
of random numbers.  It is then given that op's result; so a stage that passes computes what the
captured graph computes, in the same order.  Two microbatch sizes tell a number from the size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pdcompile.cluster import HOST_KIND
from pdcompile.eager.autocast import OFF, autocast_region
from pdcompile.errors import PdcompileError, TraceError
from pdcompile.ir.graph import (
    CHECK,
    Affine,
    Argument,
    Attr,
    Capture,
    Op,
    OpGraph,
    Ref,
    rewritten,
    size_at,
    walk,
    written_buffers,
)
from pdcompile.ir.stage_interface import Port, Sources, StageInterface, named_results, submodule_of
from pdcompile.parts.conversions import Alone, using
from pdcompile.passes.codegen.body import cloned_buffers
from pdcompile.passes.codegen.folder import set_draw, stage_classes
from pdcompile.passes.form.expressions import is_default
from pdcompile.passes.form.lifetimes import draws
from pdcompile.passes.stages.boundaries import staged
from pdcompile.passes.stages.chain import fill
from pdcompile.passes.stages.held_tensors import all_tensors
from pdcompile.passes.stages.signatures import Mode
from pdcompile.passes.trace.tape.arguments import (
    open_autocast,
    target_of,
    to_argument,
    with_parts,
    without_defaults,
)
from pdcompile.passes.trace.tape.interceptor import patched
from pdcompile.passes.trace.tape.module_table import constructor_of, qualified_name
from pdcompile.passes.trace.tape.observer import stage_line
from pdcompile.passes.verify.step_runs import failed_stage
from pdcompile.passes.verify.verification import Difference, mode_of
from pdcompile.plan import Plan
from pdcompile.releases.torch_internals import NoTorchFunction, gpu_autocast_anywhere

META = torch.device("meta")
Constructors: TypeAlias = dict[str, tuple[tuple[str, Argument], ...] | None]  # of leaves, by path


def retraced(capture: Capture, plan: Plan, sources: Sources) -> tuple[int, list[Difference]]:
    """The number of ops of all stages in both modes, and of each stage and mode the first one that
    its source does not compute.

    Raises:
        VerifyError: a stage raises.
        SourceError: a source cannot be loaded, or returns more or fewer results than planned.
    """
    on_stages = staged(capture, plan)
    infos = all_tensors(capture)
    written = written_buffers(on_stages.train.graph.ops)
    count, found = 0, []
    for cls, interface in zip(stage_classes(sources), sources.interfaces, strict=True):
        held = (*interface.parameters, *interface.buffers, *interface.constants)
        tensors = {fqn: _empty(infos[fqn].shape, infos[fqn].dtype) for fqn in held}
        with META:
            module = cls()
        fill(module, interface, tensors.__getitem__)
        _fill_opaque(module, interface.opaque, tensors)
        made: Constructors = {}
        for mode in (on_stages.train, on_stages.eval):
            stage = _Stage(mode, interface, plan, module, tensors, written, made)
            count += len(stage.ops)
            for b in _sizes(mode.graph, stage.ops):
                if unlike := stage.follow(b, sources.edited):
                    found.append(unlike.difference(mode.graph, interface.index))
                    break
    return count, found


def _fill_opaque(module: nn.Module, opaque: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    """Puts the tensors of opaque modules, which others may read, into what stands for these."""
    for fqn, tensor in tensors.items():
        if any(fqn.startswith(f"{path}.") for path in opaque):
            owner, (*path, name) = module, fqn.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_buffer(name, tensor)


def _sizes(graph: OpGraph, ops: Sequence[Op]) -> Iterator[int]:
    """Microbatch sizes at which a stage runs: two where something depends on them."""
    b = graph.batch_size
    yield b
    if walk(tuple((op.args, op.kwargs) for op in ops), Affine):
        step = graph.sizes.multiple
        near = (b + step, b + 2 * step, b - step)
        yield from [size for size in near if size > 0 and graph.sizes.holds(size)][:1]


def _empty(shape: Sequence[int], dtype: str) -> Tensor:
    with NoTorchFunction():
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=META)


class _Unlike(Exception):
    """A call of the stage is not the next op (None: all of them ran)."""

    def __init__(self, op: Op | None, instead: str) -> None:
        super().__init__()
        self._op, self._instead = op, instead

    def difference(self, graph: OpGraph, stage: int) -> Difference:
        op, name, first = self._op, "no op", self._instead
        if op is not None:
            name, first = op.name, f"{op.name} ({op.target}) at {op.source}; {self._instead}"
        return Difference(mode_of(graph), "op", name, stage, float("inf"), first=first)


@dataclass(frozen=True, slots=True)
class _Copy:
    """An argument that is a copy of a buffer which later microbatches write."""

    fqn: str


class _Stage:
    """One stage in one mode: the ops to expect, and its module with tensors that have no memory."""

    def __init__(
        self,
        mode: Mode,
        interface: StageInterface,
        plan: Plan,
        module: nn.Module,
        tensors: Mapping[str, Tensor],
        written: frozenset[str],
        constructors: Constructors,
    ) -> None:
        """`written`: buffers that training writes; `constructors`: filled here."""
        self.graph, self.interface, self.training = mode.graph, interface, plan.training
        self.written, self.constructors = written, constructors
        self.ops = [*mode.ops(interface.index), *mode.ops(interface.index, "loss")]
        self.module = module.train(mode.graph.training)
        self.fqns = {id(tensor): fqn for fqn, tensor in tensors.items()}
        self.paths = {id(one): path for path, one in module.named_modules()}
        self.leaves = {op.module_path for op in self.ops if op.kind in ("module", "opaque")}
        for path in {op.module_path for op in self.ops if op.kind == "module"} - set(constructors):
            constructors[path] = constructor_of(submodule_of(module, path))
        self.copied = {op.name: cloned_buffers(op, mode.graph) for op in self.ops}

    def follow(self, b: int, edited: tuple[str, ...]) -> _Unlike | None:
        """Runs the stage at one microbatch size, to where it does not compute the graph's ops.

        Raises:
            VerifyError: it raises.
        """
        follower = _Follower(self, b)
        set_draw(type(self.module), follower.announced)
        try:
            with (
                gpu_autocast_anywhere(),
                follower.watched(),
                torch.set_grad_enabled(self.graph.training),
                autocast_region(self.training.autocast),
                META,
                using(Alone(self.graph.parts)),
                follower,
            ):
                self._run(follower)
        except _Unlike as unlike:
            return unlike
        except PdcompileError:
            raise
        except Exception as error:
            raise failed_stage(self.interface.index, self.graph, error, edited) from error
        return None

    def _run(self, follower: _Follower) -> None:
        k, own = self.interface.index, self.interface
        signature = own.train if self.graph.training else own.eval
        values = {port.value: follower.given(port) for port in signature.inputs}
        results = self.module(*values.values())
        made = named_results(k, signature.outputs, results)
        for port in signature.outputs:
            follower.check_result(port.value, made[port.value])
        if signature.loss_inputs:
            arguments = [
                made[port.value] if port.value in made else follower.given(port)
                for port in signature.loss_inputs
            ]
            loss: Any = self.module.loss
            follower.check_result(signature.loss or "", loss(*arguments))
        follower.finish()


class _Follower(TorchFunctionMode):
    """Compares each call with the next op of a stage, whose result it then has."""

    def __init__(self, stage: _Stage, b: int) -> None:
        super().__init__()
        self._stage, self._b, self._values = stage, b, stage.graph.values
        # Values and tensors of the model that objects stand for; alive, so that ids stay unique.
        self._names: dict[int, Argument | _Copy] = {
            key: Attr(fqn) for key, fqn in stage.fqns.items()
        }
        self._alive: list[Any] = []
        self._items: dict[str, list[Op]] = {}  # by container
        for op in filter(self._is_item, stage.graph.ops):
            self._items.setdefault(op.inputs[0], []).append(op)
        self._ops = [op for op in stage.ops if not self._is_item(op)]
        self._ran = 0
        self._drawn: tuple[str, int] | None = None  # announced for the next random op

    def _is_item(self, op: Op) -> bool:
        """True if an op takes something out of a container, which is no call of torch."""
        if op.target != "operator.getitem" or not isinstance(op.args[0], Ref):
            return False
        return not self._values[op.args[0].name].is_tensor and isinstance(op.args[1], int | str)

    @property
    def _op(self) -> Op | None:
        """The next op; None behind the last one."""
        return self._ops[self._ran] if self._ran < len(self._ops) else None

    def _give(self, one: Any, name: Argument | _Copy) -> Any:
        self._names[id(one)] = name
        self._alive.append(one)
        return one

    def _argument(self, value: Any) -> Any:
        """The argument for a Python value of the stage.

        Raises:
            TraceError: a tensor in it is none of the capture's, or it is no argument.
        """
        return to_argument(self._containers(value), self._tensor, META)

    def _containers(self, value: Any) -> Any:
        if isinstance(value, tuple | dict) and id(value) in self._names:
            return self._names[id(value)]
        return with_parts(value, self._containers)

    def _tensor(self, tensor: Tensor) -> Any:
        if id(tensor) not in self._names:
            raise TraceError("a tensor that no op has made")
        return self._names[id(tensor)]

    def given(self, port: Port) -> Tensor:
        """A tensor for an argument of the stage."""
        shape = [size_at(size, self._b) for size in port.shape]
        found: Tensor = self._give(_empty(shape, port.dtype), Ref(port.value))
        return found

    def check_result(self, name: str, result: Any) -> None:
        """Raises _Unlike unless a result is the value of this name."""
        if self._names.get(id(result)) != Ref(name):
            maker = next((op for op in self._stage.ops if op.name == name), None)
            raise _Unlike(maker, f"{self._file} returns another value in its place")

    def finish(self) -> None:
        """Raises _Unlike unless all ops have run."""
        if self._op is not None or self._drawn is not None:
            raise _Unlike(self._op, f"{self._file} ends without it")

    @property
    def _file(self) -> str:
        return f"stage_{self._stage.interface.index}.py"

    def watched(self) -> AbstractContextManager[None]:
        """Patches calls that pass no torch function."""
        plain_call, plain_apply = nn.Module.__call__, vars(torch.autograd.Function)["apply"]

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._stage.paths.get(id(module))
            if path is None or path not in self._stage.leaves:
                return plain_call(module, *args, **kwargs)
            self._check_module(path, module)
            opaque = path not in self._stage.constructors
            kind, target = "module", qualified_name(type(module))
            if opaque:
                kind, target = "opaque", self._op.target if self._op is not None else ""
            return self._next(kind, target, args, kwargs, path)

        def check(condition: Any, message: str) -> Any:
            return self._next("function", CHECK, (condition, message), {})

        def apply(cls: Any, *args: Any) -> Any:
            plain = plain_apply.__get__(None, cls)
            return self._next(*target_of(plain, args, {}), {})

        return patched(
            (nn.Module, "__call__", __call__),
            (torch.autograd.Function, "apply", classmethod(apply)),
            (torch, "_assert", check),
            (torch, "get_default_device", lambda: META),  # which makes a tensor to find out
        )

    def _check_module(self, path: str, module: nn.Module) -> None:
        """Raises _Unlike for a leaf that is made otherwise than the model's, or in another mode."""
        op = self._op
        if op is None or op.kind != "module" or op.module_path != path:
            return  # `_next` says so
        if self._stage.constructors[path] != op.constructor:
            raise self._unlike(f"has made {path} with other arguments")
        if module.training != self._stage.graph.training:
            raise self._unlike(f"has {path} in another mode")

    def announced(self, where: nn.Module | str, index: int) -> None:
        """Stands for the stage's `draw`."""
        path = where if isinstance(where, str) else self._stage.paths.get(id(where), "")
        if self._drawn is not None:
            raise self._unlike(f"announces a draw of {path!r} after another one")
        self._drawn = path, index

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, str(getattr(func, "__name__", ""))
        if name in ("__get__", "__set__"):
            owner = func.__self__
            own = str(getattr(owner, "__name__", None) or getattr(owner.fget, "__name__", ""))
            if name == "__set__":
                raise self._unlike(f"assigns to .{own}")
            result = func(*args)
            return self._next("getattr", own, args, {}) if isinstance(result, Tensor) else result
        if name in _NO_OPS and (self._op is None or self._op.target != name):
            return func(*args, **kwargs)
        try:
            kind, target, ordered = target_of(func, args, kwargs)
        except TraceError:
            raise self._unlike(f"calls {name}") from None
        return self._next(kind, target, ordered, without_defaults(func, kwargs))  # as captured

    def _next(self, kind: str, target: str, args: Any, kwargs: Any, path: str = "") -> Any:
        """The result of the next op.  Raises _Unlike where this call is another one."""
        op, shown = self._op, f"self.{path}" if path else target
        try:
            given = [self._argument(each) for each in args]
            named = {key: self._argument(each) for key, each in kwargs.items()}
        except TraceError as error:
            raise self._unlike(f"calls {shown}: {error.message}") from None
        called = op is not None and (op.kind, op.target) == (kind, target)
        called = called and (not path or op is None or op.module_path == path)
        other = self._other_arguments(op, given, named) if op is not None and called else ""
        if op is None or not called or other:
            first = given[0] if target == "clone" else None
            if isinstance(first, Attr) and first.fqn in self._stage.written:
                return self._give(torch.empty_like(args[0]), _Copy(first.fqn))
            raise self._unlike(f"calls {shown}{other}")
        if wrong := self._other_region(op) or self._other_draw(op):
            raise self._unlike(f"calls {shown} {wrong}")
        self._ran += 1
        if given and isinstance(given[0], Attr) and given[0].fqn in op.buffers_written:
            return args[0]  # which the stage holds on
        return self._result(op.name)

    def _other_arguments(self, op: Op, given: Sequence[Any], named: Mapping[str, Any]) -> str:
        """The first argument that is not the op's, in words; "" where there is none."""
        copied = self._stage.copied[op.name]
        # Both modes may share a body; in evaluation a copy that nothing writes is the buffer.
        alike = not (self._stage.graph.training or op.mutates or op.buffers_written)

        def actual(part: Any) -> Any:
            return Attr(part.fqn) if alike and isinstance(part, _Copy) else part

        def expected(part: Any) -> Any:
            if isinstance(part, Affine):
                return part.at(self._b)
            return _Copy(part.fqn) if isinstance(part, Attr) and part.fqn in copied else part

        wanted: dict[int | str, Any] = dict(enumerate(rewritten(op.args, expected)))
        wanted |= {key: rewritten(value, expected) for key, value in op.kwargs}
        found: dict[int | str, Any] = dict(enumerate(rewritten(tuple(given), actual)))
        found |= {key: rewritten(value, actual) for key, value in named.items()}
        for key in dict.fromkeys((*wanted, *found)):
            one, other = (each.get(key, _NONE) for each in (wanted, found))
            # By their text, in which 1, 1.0 and True differ, and NaN is NaN.
            if repr(one) != repr(other) and not (
                isinstance(key, str)
                and all(each is _NONE or is_default(op, key, each) for each in (one, other))
            ):
                place = key if isinstance(key, str) else f"argument {key}"
                return f" with another {place} ({_shown(other)} instead of {_shown(one)})"
        return ""

    def _other_region(self, op: Op) -> str:
        """The region that the op should be in, in words; "" where it is."""
        graph = self._stage.graph
        if torch.is_grad_enabled() != (op.enables_grad or (op.grad_enabled and graph.training)):
            return "where autograd records" if torch.is_grad_enabled() else "under torch.no_grad()"
        device = (op.autocast or self._stage.training.autocast or HOST_KIND).partition(":")[0]
        now = open_autocast(device)
        if now == op.autocast or (now is None and op.autocast == f"{device}:{OFF}"):
            return ""
        return f"in the autocast region {now} instead of {op.autocast}"

    def _other_draw(self, op: Op) -> str:
        """The mistake in the stream of a random op, in words; "" where it is the op's."""
        announced, self._drawn = self._drawn, None if op.draw is not None else self._drawn
        if not draws(op) and (op.draw is None or announced is None):
            return ""
        own = op.module_path, op.draw
        return "" if announced == own else f"on the random stream {announced} instead of {own}"

    def _result(self, name: str) -> Any:
        """Stand-in for a value; a container holds its items."""
        value = self._values[name]
        if value.is_tensor:
            shape = [size_at(size, self._b) for size in value.shape]
            return self._give(_empty(shape, value.dtype), Ref(name))
        items: dict[Any, Any] = {
            op.args[1]: self._result(op.name) for op in self._items.get(name, ())
        }
        if all(isinstance(key, int) for key in items):  # some of which nobody reads
            last = max(items, default=-1)
            return self._give(_Items(items.get(i) for i in range(last + 1)), Ref(name))
        return self._give(items, Ref(name))

    def _unlike(self, instead: str) -> _Unlike:
        return _Unlike(self._op, f"{stage_line() or self._file} {instead}")


class _Items(tuple[Any, ...]):
    """Results of an op that has several; one without any is an object of its own too."""


_NONE = Ref("nothing")  # in the place of an argument that is not there
# What passes the mode and is no op: regions, and questions that a shape or a dtype answers.
_NO_OPS = frozenset(
    ("_set_grad_enabled", "size", "dim", "numel", "__len__", "is_floating_point", "is_complex")
)


def _shown(argument: Any) -> str:
    """An argument as a reader may know it."""
    if isinstance(argument, Ref):
        return argument.name
    return argument.fqn if isinstance(argument, Attr) else repr(argument)
