"""Random graphs with hostile names and literals that really run, for the tests of the generator.

An op is taken up only if torch accepts it: it is run as it is added, which also tells the shape
and dtype of its value.  Training and evaluation differ in literals and in ops of training alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from pdcompile.ir.execution import Lookup, run_op
from pdcompile.ir.graph import (
    Affine,
    Argument,
    Attr,
    Capture,
    DictOf,
    GraphInput,
    ListOf,
    Op,
    OpGraph,
    Ref,
    Slice,
    TensorInfo,
    TorchLiteral,
    Value,
    walk,
)
from tests.helpers.wild_literals import complexes, floats, integers, names, words

B = 5  # microbatch size: no other size in these graphs is 5
WIDTH = 4


@dataclass
class Wild:
    """A capture, the model that it is of, and leaves of a call."""

    capture: Capture
    model: nn.Module
    inputs: dict[str, torch.Tensor]


@dataclass
class _Builder:
    draw: st.DrawFn
    model: nn.Module = field(default_factory=nn.Module)
    ops: list[Op] = field(default_factory=list)
    twins: list[Op | None] = field(default_factory=list)  # of evaluation; None: training alone
    env: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)  # value of training -> of evaluation
    pool: list[str] = field(default_factory=list)  # values of shape [b, WIDTH], float32
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    draws: dict[str, int] = field(default_factory=dict)
    classes: dict[str, tuple[str, str]] = field(default_factory=dict)

    def pick(self) -> Ref:
        return Ref(self.draw(st.sampled_from(self.pool)))

    def add(
        self,
        target: str,
        args: tuple[Argument, ...],
        *,
        kind: Any = "function",
        path: str = "",
        evaluation: tuple[Argument, ...] | None = None,
        of: str = "",
        **fields: Any,
    ) -> str | None:
        """Append an op; None if torch refuses it.  `of`: whose memory the result shares."""
        name = f"v{len(self.env)}"
        op = Op(
            name, kind, target, args, module_path=path,
            call_index=self.counts.get((path, target), 0),
            source=f"{self.draw(words)}:{len(self.ops)}",
            variable=fields.pop("variable") if "variable" in fields else self.draw(words), **fields,
        )  # fmt: skip
        twin = replace(op, args=args if evaluation is None else evaluation)
        lookup = Lookup(self.model, B)
        before = {key: value.clone() for key, value in self.env.items() if _is_tensor(value)}
        try:
            result = run_op(op, self.env, lookup)
            run_op(twin, {**self.env, **before}, lookup)
        except (RuntimeError, TypeError, ValueError, IndexError, OverflowError):
            self.env.update({key: value for key, value in before.items() if key in op.mutates})
            return None
        self.counts[path, target] = op.call_index + 1
        self.ops.append(op)
        self.twins.append(twin)
        self.env[name] = result
        storage = self.values[of].storage if of else len(self.env)
        shape, dtype = (), "container"
        if _is_tensor(result):
            shape = tuple(Affine(1) if size == B else size for size in result.shape)
            dtype = str(result.dtype).removeprefix("torch.")
        self.values[name] = Value(name, shape, dtype, producer=name, storage=storage)
        if _is_tensor(result) and dtype == "float32" and result.shape == (B, WIDTH):
            self.pool.append(name)
        return name

    def tensor(self, owner: str, kind: str) -> str:
        """A parameter or buffer of a module under a hostile name; returns its FQN."""
        module = _module(self.model, owner)
        name = self.draw(
            names.filter(lambda n: not hasattr(module, n) and n not in module._modules)
        )
        made = torch.randn(WIDTH)
        if kind == "parameter":
            module.register_parameter(name, nn.Parameter(made))
        else:
            module.register_buffer(name, made)
        fqn = self.below(owner, name)
        self.tensors[fqn] = TensorInfo(fqn, kind, (WIDTH,), "float32", kind == "parameter")  # type: ignore[arg-type]
        return fqn

    def name(self, at: str) -> str:
        """A hostile name that is free in a module."""
        module = _module(self.model, at)
        free = names.filter(lambda n: not hasattr(module, n) and n not in module._modules)
        return self.draw(free)

    @staticmethod
    def below(path: str, name: str) -> str:
        return f"{path}.{name}" if path else name

    def linear(self, x: Ref, at: str, name: str, call: int, **fields: Any) -> str | None:
        """A call of a leaf, which is made in the first call."""
        path = self.below(at, name)
        if call == 0:
            _module(self.model, at).add_module(name, nn.Linear(WIDTH, WIDTH))
        shapes = {f"{path}.weight": (WIDTH, WIDTH), f"{path}.bias": (WIDTH,)}
        for fqn, shape in shapes.items():
            self.tensors[fqn] = TensorInfo(fqn, "parameter", shape, "float32", True)
        constructor = (("in_features", WIDTH), ("out_features", WIDTH))
        return self.add(
            "torch.nn.Linear", (x,), kind="module", path=path, parameters=tuple(shapes),
            constructor=constructor, module_call=call, **fields,
        )  # fmt: skip


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _module(root: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else []:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root


def _elementwise(g: _Builder, at: str) -> None:
    word = g.draw(st.sampled_from(["relu", "sin", "neg", "abs", "exp"]))
    g.add(f"torch.{word}", (g.pick(),), path=at)


def _arithmetic(g: _Builder, at: str) -> None:
    word = g.draw(st.sampled_from(["add", "sub", "mul", "truediv", "pow", "mod", "floordiv"]))
    x, number = g.pick(), g.draw(st.one_of(floats, integers))
    other = g.draw(st.one_of(st.just(number), floats))  # in evaluation
    swapped = g.draw(st.booleans())
    pair = [(number, x), (other, x)] if swapped else [(x, number), (x, other)]
    g.add(f"operator.{word}", pair[0], path=at, evaluation=pair[1])


def _two(g: _Builder, at: str) -> None:
    word = g.draw(st.sampled_from(["add", "sub", "mul", "matmul"]))
    x, y = g.pick(), g.pick()
    if word == "matmul":
        turned = g.add("t", (y,), kind="method", path=at, of=y.name)
        square = turned and g.add("operator.matmul", (Ref(turned), x), path=at)
        square = square and g.add("operator.matmul", (y, Ref(square)), path=at)
    else:
        g.add(f"operator.{word}", (x, y), path=at)


def _method(g: _Builder, at: str) -> None:
    x = g.pick()
    low, high = sorted((g.draw(st.floats(-2, 2)), g.draw(st.floats(-2, 2))))
    args = g.draw(
        st.sampled_from(
            [("clamp", (x, low, high)), ("view", (x, Affine(1), WIDTH)), ("nan_to_num", (x, low)),
             ("masked_fill", (x, Ref("mask"), high)), ("reshape", (x, (Affine(1), -1)))]
        )
    )  # fmt: skip
    shares = x.name if args[0] in ("view", "reshape") else ""
    g.add(args[0], args[1], kind="method", path=at, of=shares)


def _complex(g: _Builder, at: str) -> None:
    made = g.add("operator.mul", (g.pick(), g.draw(complexes)), path=at)
    if made:
        g.add("torch.real", (Ref(made),), path=at, of=made)


def _index(g: _Builder, at: str) -> None:
    x = g.pick()
    index = g.draw(
        st.sampled_from(
            [(Slice(), ListOf((3, 2, 1, 0))), (..., None, Slice(None, None, 1)), Slice(), ...,
             (..., Slice(-9, 9)), (Slice(None, 2**40), Slice()), (Ellipsis,)]
        )
    )  # fmt: skip
    part = g.add("operator.getitem", (x, index), path=at, of=x.name)
    if part and g.values[part].shape == (Affine(1), 1, WIDTH):
        g.add("operator.getitem", (Ref(part), (Slice(), 0)), path=at, of=x.name)


def _write(g: _Builder, at: str) -> None:
    copy = g.add("clone", (g.pick(),), kind="method", path=at)
    assert copy is not None
    g.pool.remove(copy)
    number, row = g.draw(st.one_of(floats, integers)), g.draw(st.integers(0, WIDTH - 1))
    if g.draw(st.booleans()):
        what = g.draw(st.sampled_from([number, g.pick()]))
        index = (Slice(), row) if what is number else ...
        done = g.add("operator.setitem", (Ref(copy), index, what), path=at, mutates=(copy,))
        if done:
            g.env[done] = None
    else:
        word = g.draw(st.sampled_from(["iadd", "imul", "isub"]))
        g.add(f"operator.{word}", (Ref(copy), number), path=at, mutates=(copy,), of=copy)
    g.pool.append(copy)


def _split(g: _Builder, at: str) -> None:
    parts = g.add("split", (g.pick(), 2, 1), kind="method", path=at)
    assert parts is not None
    halves = [g.add("operator.getitem", (Ref(parts), i), path=at, of=parts) for i in range(2)]
    order = g.draw(st.permutations(halves))
    form = g.draw(st.sampled_from([ListOf, tuple]))
    g.add("torch.cat", (form(tuple(Ref(name) for name in order if name)), 1), path=at)


def _drop(g: _Builder, at: str) -> None:
    """A random draw that evaluation does not do, or does not have."""
    x = g.pick()
    index = g.draws.get(at, 0)
    name = g.add(
        "torch.nn.functional.dropout",
        (x, 0.5, True),
        path=at,
        evaluation=(x, 0.5, False),
        draw=index,
    )
    if name is None:
        return
    g.draws[at] = index + 1
    if g.draw(st.booleans()):
        g.twins[-1] = None
        g.instead[name] = x.name


def _tensor(g: _Builder, at: str) -> None:
    kind = g.draw(st.sampled_from(["parameter", "buffer"]))
    fqn = g.tensor(at, kind)
    read = {"parameters": (fqn,)} if kind == "parameter" else {"buffers_read": (fqn,)}
    g.add("operator.mul", (g.pick(), Attr(fqn)), path=at, **read)


def _leaf(g: _Builder, at: str) -> None:
    name = g.name(at)
    for call in range(g.draw(st.integers(1, 2))):
        g.linear(g.pick(), at, name, call)


def _chain(g: _Builder, at: str) -> None:
    """Blocks in a row, alike or different in a number or a size of what they do."""
    container = g.below(at, g.name(at))
    leaf, words_of = g.draw(names), (g.draw(words), g.draw(words))
    number = st.one_of(floats, st.just(2.0))
    kinds = g.draw(st.sampled_from(["alike", "numbers", "text"]))
    same, x = g.draw(number), g.pick()
    for i in range(g.draw(st.integers(2, 4))):
        path = g.below(container, str(i))
        _module(g.model, path)
        g.classes[path] = words_of
        y = g.linear(x, path, leaf, 0, variable="")
        factor = g.draw(number) if kinds == "numbers" else same
        word = "sub" if kinds == "text" and i == 1 else "mul"
        scaled = y and g.add(f"operator.{word}", (Ref(y), factor), path=path, variable="y")
        made = scaled and g.add("operator.add", (x, Ref(scaled)), path=path, variable="x")
        if not made:
            return
        x = Ref(made)


def _made(g: _Builder, at: str) -> None:
    number = g.draw(st.one_of(floats, integers, st.booleans()))
    dtype, device = TorchLiteral("dtype", "float32"), TorchLiteral("device", "self")
    full = g.add(
        "torch.full", ((Affine(1), WIDTH), number), path=at,
        kwargs=(("dtype", dtype), ("device", device)),
    )  # fmt: skip
    if full:
        g.add("torch.where", (Ref("mask"), g.pick(), Ref(full)), path=at)


_KINDS: tuple[Callable[[_Builder, str], None], ...] = (
    _elementwise, _arithmetic, _two, _method, _complex, _index, _write, _split, _drop, _tensor,
    _leaf, _made, _chain,
)  # fmt: skip


@st.composite
def captures(draw: st.DrawFn, max_steps: int = 9) -> Wild:
    """Captures of models that nobody would write."""
    g = _Builder(draw)
    torch.manual_seed(draw(st.integers(0, 9)))
    inputs = {"x": torch.randn(B, WIDTH), "mask": torch.rand(B, WIDTH) < 0.5}
    taken = {}
    for name, tensor in inputs.items():
        g.env[name] = tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        g.values[name] = Value(name, (Affine(1), WIDTH), dtype, storage=-len(g.values) - 1)
        taken[name] = GraphInput(
            name, f"batch[{draw(words)!r}]" if draw(st.booleans()) else name, 0
        )
    if len({item.path for item in taken.values()}) < len(taken):
        taken = {name: GraphInput(name, name, 0) for name in inputs}
    g.pool.append("x")
    blocks = _blocks(draw)
    for path in blocks:
        _module(g.model, path)
    for _ in range(draw(st.integers(1, max_steps))):
        draw(st.sampled_from(_KINDS))(g, draw(st.sampled_from(blocks)))
    if not g.ops or g.pool == ["x"]:
        g.add("torch.relu", (Ref("x"),))
    output = (Ref(g.pool[-1]), DictOf(((draw(words), Ref(draw(st.sampled_from(g.pool[1:])))),)))
    classes = {path: (draw(words), f"{draw(words)}:{i}") for i, path in enumerate(blocks)}
    classes |= g.classes
    fewer = output[:1] if draw(st.booleans()) else output  # training may return less
    train = _graph(g, True, g.ops, fewer, tuple(taken.values()), classes)
    ops = [_without(op, g.instead) for op in g.twins if op is not None]
    evaluation = _graph(g, False, ops, _renamed(output, g.instead), tuple(taken.values()), classes)
    leaves = {item.path: inputs[name] for name, item in taken.items()}
    return Wild(Capture(train, evaluation), g.model, leaves)


def _blocks(draw: st.DrawFn) -> list[str]:
    """Paths of modules, each below an earlier one or the root."""
    found = [""]
    for _ in range(draw(st.integers(0, 3))):
        above, name = draw(st.sampled_from(found)), draw(names)
        path = f"{above}.{name}" if above else name
        if path not in found:
            found.append(path)
    return found


def _renamed(argument: Any, instead: Mapping[str, str]) -> Any:
    match argument:
        case Ref(name):
            while name in instead:
                name = instead[name]
            return Ref(name)
        case tuple():
            return tuple(_renamed(item, instead) for item in argument)
        case ListOf(items):
            return ListOf(_renamed(items, instead))
        case DictOf(items):
            return DictOf(tuple((key, _renamed(item, instead)) for key, item in items))
    return argument


def _without(op: Op, instead: Mapping[str, str]) -> Op:
    return replace(op, args=_renamed(op.args, instead), kwargs=_renamed(op.kwargs, instead))


def _graph(
    g: _Builder, training: bool, ops: Sequence[Op], output: Any, inputs: tuple[GraphInput, ...],
    classes: dict[str, tuple[str, str]],
) -> OpGraph:  # fmt: skip
    kept = {op.name for op in ops} | {item.name for item in inputs}
    consumers = {name: tuple(op.name for op in ops if name in op.inputs) for name in kept}
    values = {
        name: replace(value, consumers=consumers[name])
        for name, value in g.values.items()
        if name in kept
    }
    assert all(ref.name in kept for ref in walk(output, Ref))
    return OpGraph(
        training=training, ops=tuple(ops), values=values, inputs=inputs, tensors=dict(g.tensors),
        output=output, loss=None, batch_size=B, classes=classes,
    )  # fmt: skip
