"""Random numbers that do not depend on how a model is cut.

Eager PyTorch draws from one generator in program order, so a model that runs in pieces, on
several ranks and with microbatches interleaved would draw other numbers.  Here every random op
has a stream of its own, named by (seed, minibatch, microbatch, module path, draw index); the
default generator is re-seeded before each one, or on CPUs, while other threads live that may draw,
one that nobody else has (`OwnDraws`).

The draw index counts, within one microbatch's forward (model, then loss_fn under the path
``loss_fn``), every call of a random function or of a random leaf module below its module path:
the leaf's own FQN, or for a function the FQN of the innermost running module.  It counts whether
or not the call draws in this mode (eval, p=0), so that train and eval agree.  Calls inside a leaf
module or a random function are not counted: the op is seeded once, on entry.  Draws from numpy's
or Python's generator count as one draw for each call of the function of a module that makes them,
or else one for each number or array (`pdcompile.ir.python_draws`).  A module's FQN is
its first name in ``model.named_modules()``; one without a name (made during forward) counts as
part of its caller.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from pdcompile.eager.own_draws import OwnDraws, other_threads
from pdcompile.errors import ConfigError
from pdcompile.hardware import devices
from pdcompile.ir import python_draws
from pdcompile.releases.torch_internals import (
    NN_FUNCTIONS,
    VARIABLE_FUNCTIONS,
    DropoutNd,
    OpOverload,
    OpOverloadPacket,
    Root,
    flex_attention_uncompiled,
    function_mode,
    run_backward,
    seeded_ops,
    without_function_mode,
)

LOSS_PATH = "loss_fn"
CallKey = tuple[str, int]  # of a module: its FQN, and how often it had been called before

# Their public faces carry the same name in torch, torch.Tensor, torch.nn.functional, torch._C._nn.
SEEDED_OPS = seeded_ops()

# Python functions of torch that reach one of the above and that a TorchFunctionMode sees as
# one call, without what they call inside.
_COMPOSITE = {
    F: """dropout1d dropout2d dropout3d gumbel_softmax multi_head_attention_forward
          fractional_max_pool2d fractional_max_pool2d_with_indices _fractional_max_pool2d
          fractional_max_pool3d fractional_max_pool3d_with_indices _fractional_max_pool3d""",
    nn.init: """uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_
                kaiming_normal_ orthogonal_ sparse_""",
    torch: "svd_lowrank pca_lowrank lobpcg",
}  # fmt: skip

_RANDOM_MODULES: tuple[type[nn.Module], ...] = (
    DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase, nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)  # fmt: skip


def _public_functions() -> frozenset[Any]:
    found: set[Any] = set()
    for name in SEEDED_OPS:
        for home in (torch, VARIABLE_FUNCTIONS, torch.Tensor, F, NN_FUNCTIONS):
            function = getattr(home, name, None)
            # torch.random is a module, torch.seed-like attributes are not ops
            if callable(function) and not isinstance(function, type):
                found.add(function)
    for home, names in _COMPOSITE.items():
        found.update(getattr(home, name) for name in names.split())
    return frozenset(found)


_FUNCTIONS = _public_functions()


def is_random_function(func: Callable[..., Any]) -> bool:
    """True if a public torch function, method or ATen op may draw from a generator.

    `func` is what ``__torch_function__`` receives: ``F.dropout``, ``torch.rand``,
    ``torch.Tensor.normal_``, ``torch.ops.aten.bernoulli`` (packet or overload).
    """
    if isinstance(func, OpOverload):
        return torch.Tag.nondeterministic_seeded in func.tags
    if isinstance(func, OpOverloadPacket):
        return func.__name__ in SEEDED_OPS and func._qualified_op_name.startswith("aten::")
    try:
        return func in _FUNCTIONS
    except TypeError:  # an unhashable callable is not one of torch's
        return False


def is_leaf(module: nn.Module) -> bool:
    """True if capture records the module as one op: a torch.nn built-in that runs no other module.

    Subclasses of built-ins are user code, not leaves.  MultiheadAttention is a leaf although
    it has a child (out_proj), whose weight it reads without calling it.  Containers
    (Sequential, …) never are, nor are modules with forward hooks: a hook is the user's code.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    home = type(module).__module__
    if not home.startswith("torch.nn.modules.") or home == "torch.nn.modules.container":
        return False
    return isinstance(module, nn.MultiheadAttention) or next(module.children(), None) is None


def is_random_module(module: nn.Module) -> bool:
    """True if the module is a leaf that may draw (RReLU, dropouts; attention with dropout, …)."""
    drops = getattr(module, "dropout", None) != 0  # of attention and recurrent layers
    return isinstance(module, _RANDOM_MODULES) and drops and is_leaf(module)


def seed_of(seed: int, minibatch: int, microbatch: int, module_path: str, draw: int) -> int:
    """The 64-bit seed of one random draw: a stable hash, equal in every process and release.

    `minibatch` counts the training calls (`step`, `forward_backward`) from 0; the n-th
    evaluation call (`eval_step`, `predict`, from 0) has ``evaluation_minibatch(n)``.
    Only the low 32 bits reach the CPU's Mersenne twister, all 64 reach CUDA's Philox.
    """
    text = f"{seed}:{minibatch}:{microbatch}:{draw}:{module_path}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def evaluation_minibatch(call: int) -> int:
    """The minibatch index that names the streams of an evaluation call, which is negative."""
    return -1 - call


#: what `reseed` seeds: the CPU's generator, or the one that stands for it, and the GPU's inside
#: `preserved_rng` of a GPU
_seeded: tuple[torch.Generator, ...] = (torch.default_generator,)
#: the threads of the calls that run, one thread as often as calls are in one another
_calling: list[threading.Thread] = []
_entering = threading.Lock()


class _Here(threading.local):
    own: OwnDraws | None = None  # of the `preserved_rng` that is open in this thread


_here = _Here()


def reseed(seed: int) -> None:
    """Re-seeds the CPU generator that is drawn from (1 µs), and that of the GPU around which
    `preserved_rng` is open.

    Those of numpy and Python are seeded too where the op is a `PythonDraw`.
    """
    python_draws.announce(seed)
    for generator in _seeded:
        generator.manual_seed(seed)


def drawing() -> AbstractContextManager[Any]:
    """Context of what may draw, after its `reseed`."""
    return _here.own or nullcontext()


def begin_draw(seed: int) -> None:
    """`reseed` for what draws until `end_draw`, or until the next begins."""
    reseed(seed)
    if _here.own is not None:
        _here.own.open()


def end_draw() -> None:
    """End the draw that has begun."""
    if _here.own is not None:
        _here.own.close()


@contextmanager
def preserved_rng(
    device: torch.device | None = None, *, from_ops: bool = False, apart: bool = False
) -> Iterator[None]:
    """Restores the state of the caller's generators (the CPU's, and that of a GPU `device`;
    Python's and numpy's) at the end; inside, `reseed` seeds them all.

    `from_ops`: see `python_draws.preserved`.  `apart`: what draws inside is in `drawing()` or
    between `begin_draw` and `end_draw`, so that other threads may draw meanwhile.
    """
    global _seeded
    host, outer = torch.default_generator, (_seeded, _here.own)
    others = _seeded[1:]
    if device is not None and device.type == devices.GPU:
        others = (devices.generator(device),)
    own = OwnDraws() if apart and not others and other_threads() else None
    states = {one: one.get_state() for one in (host, *others) if own is None}
    _here.own, _seeded = own, (host if own is None else own.generator, *others)
    try:
        with python_draws.preserved(from_ops=from_ops):
            yield
    finally:
        end_draw()
        for generator, state in states.items():
            generator.set_state(state)
        _seeded, _here.own = outer


@contextmanager
def one_thread() -> Iterator[None]:
    """Context of a call of a pipeline or reference: no other thread is in one, as each would draw
    from what the other has seeded.

    Refused and not waited for: on two ranks the calls may begin in unlike orders.

    Raises:
        ConfigError: another thread is.
    """
    here = threading.current_thread()
    with _entering:
        if _calling and _calling[-1] is not here:
            raise ConfigError(
                "two threads are in calls of pipelines or references at the same time, whose "
                "random numbers come from the one default generator of torch",
                where=f"thread {here.name!r}, while {_calling[-1].name!r} is in a call",
                remedy="call them from one thread, or run each in processes of its own",
            )
        _calling.append(here)
    try:
        yield
    finally:
        _calling.pop()


class DrawScope(torch.overrides.TorchFunctionMode):
    """Runs eager modules with the streams of one microbatch.

    Inside ``with DrawScope(model, seed, minibatch, microbatch) as scope:`` every counted call is
    re-seeded; ``with scope.loss():`` runs the loss function.  `draws` lists what was counted, as
    (module path, draw index), in order.  The caller's generator is not preserved here: wrap
    the whole minibatch in `preserved_rng`.

    Call ``scope.backward(…)`` after it: a region under `torch.utils.checkpoint` runs again in
    backward, and has to draw what it drew in forward.  Its recomputation starts from
    the generator state that checkpoint saved, whose seed says after which draw of the forward it
    begins; from there the recorded seeds are used in order.
    """

    def __init__(self, model: nn.Module, seed: int, minibatch: int, microbatch: int) -> None:
        super().__init__()
        self.draws: list[tuple[str, int]] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stream = (seed, minibatch, microbatch)
        self._counters: dict[str, Iterator[int]] = defaultdict(count)
        self._calls: dict[str, Iterator[int]] = defaultdict(count)
        self.running: list[CallKey] = [("", 0)]  # calls of modules, the innermost last
        self._in_leaf = False
        self._replaying = False
        self._following: dict[int, int] = {}  # seed of one draw -> seed of the next
        self._last = seed_of(*self._stream, "", -1)
        self._drawing: FrameType | None = None  # of the function that draws in Python
        self._around = ExitStack()

    def __enter__(self) -> DrawScope:
        # Unlisted draws must not depend on the generator's earlier state either.
        reseed(self._last)
        self._around.enter_context(python_draws.watched(self._drawn))
        self._around.enter_context(flex_attention_uncompiled())
        if _here.own is not None:
            self._around.enter_context(_here.own.stands_for_default())
        plain = nn.Module.__call__

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.call(module, plain, args, kwargs)

        self._around.enter_context(patch.object(nn.Module, "__call__", __call__))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._around.close()
        self._drawing = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._in_leaf and is_random_function(func):
            self.draw()
            with drawing():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Names draws of functions inside, outside any module of the model, ``loss_fn``."""
        outer, self.running = self.running, [(LOSS_PATH, 0)]
        try:
            yield
        finally:
            self.running = outer

    def backward(self, roots: Sequence[Root]) -> None:
        """`run_backward` for a forward in this scope, after it.

        Runs in the scope once more, to draw again.  A function mode handles the call of autograd's
        own and is off meanwhile, so the engine is called directly.
        """
        self._replaying = True
        try:
            with self:
                run_backward(roots)
        finally:
            self._replaying = False

    def draw(self) -> None:
        """Seeds the generator for the next draw of the innermost module."""
        if self._replaying:
            following = self._following.get(_seeded[0].initial_seed())
            if following is not None:
                reseed(following)
            return
        path, _ = self.running[-1]
        index = next(self._counters[path])
        self.draws.append((path, index))
        seed = seed_of(*self._stream, path, index)
        self._following[self._last] = seed
        self._last = seed
        reseed(seed)

    def _drawn(self, _: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function that draws in Python, on the stream of the op that it is part of."""
        frame = python_draws.drawing_frame(sys._getframe(2))
        if not self._in_leaf and (frame is None or frame is not self._drawing):
            self._drawing = frame
            self.draw()
            python_draws.begin()
        return function(*args, **kwargs)

    def call(self, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module's ``__call__``, which is `running` meanwhile."""
        path = self._names.get(id(module))
        if path is None or self._in_leaf:
            return plain(module, *args, **kwargs)
        self.running.append((path, next(self._calls[path])))
        try:
            if not is_leaf(module):
                return plain(module, *args, **kwargs)
            if draws := is_random_module(module):
                self.draw()
            self._in_leaf = True
            # As in plain eager: any function mode turns off attention's fast path.
            eager = without_function_mode() if function_mode() is self else nullcontext()
            with drawing() if draws else nullcontext(), eager:
                return plain(module, *args, **kwargs)
        finally:
            self._in_leaf = False
            self.running.pop()
