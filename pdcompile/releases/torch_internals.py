"""Torch's internals: every private name of torch's modules that pdcompile uses, and no other file.

Torch promises nothing about them from one release to the next.  What a release changed is decided
here, beside the name, so that all other files are the same for every torch that is taken.  Private
attributes of torch's objects (``module._parameters``, ``tensor._version``, ``op._schema``) are used
where they are needed: they are older than the first of these releases, and the same in all of them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pdcompile.releases.packages import check_torch

check_torch(torch.__version__)  # before a name is missed that only other releases have

import torch.distributed as dist
import torch.optim.optimizer as optimizers
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd import graph
from torch.distributed import distributed_c10d
from torch.utils import checkpoint
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode",
    "OpOverload", "OpOverloadPacket", "TorchDispatchMode", "UnsupportedOperatorException",
    "is_functorch_wrapped_tensor", "maybe_current_level", "no_dispatch_modes", "pytree",
]  # fmt: skip

Root = tuple[Any, Tensor | None]  # tensor or gradient edge, and its gradient (None: 1)

# Where torch's functions are, besides its public namespaces.
NN_FUNCTIONS: Any = torch._C._nn
VARIABLE_FUNCTIONS: Any = torch._C._VariableFunctions

# What errors say, in the words of these releases: an op of tensors of two devices, and autograd's
# engine on fake tensors of a GPU that is not there.
TWO_DEVICES = "at least two devices", "found two different devices"
NO_GPU = "Cannot access accelerator device", "hasPrimaryContext expects a valid device index"
ASSERT: Callable[..., Any] = torch._assert
# Those that ask torch for a device where none is given.
CONSTRUCTORS = frozenset(one.__name__ for one in _device_constructors())

# Whether torch's profiler is on, and a switch of whether this thread tells it what it runs.
profiler_records: Callable[[], bool] = torch._C._autograd._profiler_enabled
record_functions: Callable[[bool], None] = torch._C._autograd._enable_record_function

# A kernel of a GPU that waits for so many cycles.
queue_sleep: Callable[[int], None] = torch.cuda._sleep

# Modes and dispatch.


class TorchDispatchMode(_TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose handler is called as it is: torch would keep dynamo away from it, which
    has nothing to do here, in more time than most handlers take."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


NoTorchFunction: Any = torch._C.DisableTorchFunction  # and no function mode
NoTorchDispatch: Any = torch._C._DisableTorchDispatch
function_mode: Callable[[], Any] = torch.overrides._get_current_function_mode
without_function_mode: Callable[[], Any] = torch.overrides._pop_mode_temporarily
dispatch_keys: Callable[[Tensor], Any] = torch._C._dispatch_keys
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count


def convolution_kernel(
    given: Tensor, weights: Tensor, bias: Tensor | None, how: Sequence[Any], sizes: Any
) -> tuple[str, torch.memory_format]:
    """The kernel that torch chooses for a convolution, and the layout that it works in.

    `how`: stride and the further arguments of ``aten.convolution``; `sizes`: of the bias, in a
    backward.  A kernel without a public name is "???".
    """
    chosen = torch._C._select_conv_backend(given, weights, bias, *how, sizes)
    return chosen.name, torch._C._conv_determine_backend_memory_format(given, weights, chosen)


# Places that a capture patches: modules, and names in them.
Place = tuple[Any, str]
# A region of torch.utils.checkpoint that is not reentrant.  Since 2.14 it is a function that takes
# keywords; the one of before is a shell around it, which torch itself does not call.
_REGION = "_checkpoint_without_reentrant_generator"
_OF_KEYWORDS = f"{_REGION}_impl"
CHECKPOINT_REGION: Place = (
    checkpoint,
    _OF_KEYWORDS if hasattr(checkpoint, _OF_KEYWORDS) else _REGION,
)


def _in_flex_attention(name: str, value: Any) -> AbstractContextManager[Any]:
    home = sys.modules.get("torch.nn.attention.flex_attention")  # None: nobody has imported it
    return nullcontext() if home is None else patch.object(home, name, value)


def flex_attention_checked(check: Callable[..., None]) -> AbstractContextManager[Any]:
    """Calls this instead of the check of devices, which comes before flex_attention compiles."""
    return _in_flex_attention("_validate_device", check)


def flex_attention_uncompiled() -> AbstractContextManager[Any]:
    """Runs flex_attention without compiling itself, which it cannot below a mode for functions: the
    same operator either way."""
    return _in_flex_attention("_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


MODULE_MOVE: Place = (nn.Module, "_apply")  # of ``module.to(…)`` and its like
DropoutNd: type[nn.Module] = nn.modules.dropout._DropoutNd

default_store: Callable[[], Any] = distributed_c10d._get_default_store


# c10::DeviceType, and the table of what knows how to talk to devices of each.
_CUDA, _META, _DEVICE_TYPES = 1, 14, 21
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"


def fake_gpus_have_gradients() -> bool:
    """Autograd records fake tensors of a GPU from now on, without a GPU too; False: it cannot.

    It asks a device for its stream, and a build without CUDA has nobody who answers: the process
    would abort.  Where there is no GPU, a build with CUDA is told by fake modes to answer as the
    meta device does (``_ensureCUDADeviceGuardSet``), and another one here.
    """
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return True
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(library, _GUARDS)
    except (OSError, ValueError):  # another system, or another torch
        return False
    guards[_CUDA] = guards[_CUDA] or guards[_META]
    return guards[_CUDA] is not None


@contextmanager
def gpu_autocast_anywhere() -> Iterator[None]:
    """Regions of ``torch.autocast("cuda")`` can be made on a host without a GPU: fake tensors of
    one are cast in them as its tensors are."""
    with (
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
    ):
        yield


@contextmanager
def gpu_autocast_on_cpu() -> Iterator[None]:
    """Regions of GPUs and of the CPU are of both, whoever made them and when: what opens them runs
    on the CPU and is cast there, and a model that asks for the region of GPUs is told of it."""
    autocast: Any = torch.autocast
    enter, leave = autocast.__enter__, autocast.__exit__
    twins: list[Any] = []

    def __enter__(self: Any) -> Any:
        other = {"cuda": "cpu", "cpu": "cuda"}.get(self.device)
        twin = nullcontext() if other is None else autocast(other, self.fast_dtype, self._enabled)
        twins.append(twin)
        if other is not None:
            enter(twin)
        return enter(self)

    def __exit__(self: Any, *error: Any) -> Any:
        twin = twins.pop()
        found = leave(self, *error)
        if isinstance(twin, autocast):
            leave(twin, *error)
        return found

    patched = patch.multiple(autocast, __enter__=__enter__, __exit__=__exit__)
    with patched, gpu_autocast_anywhere():
        yield


@functools.cache
def kernels_of_region(kind: str) -> frozenset[str]:
    """Names of the ATen ops that an autocast region of this kind of device casts, or widens."""
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[kind]
    every = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    names = (name for library, _, name in every if library == "aten")
    return frozenset(name for name in names if has_kernel(f"aten::{name}", key))


def seeded_ops() -> frozenset[str]:
    """Names of the ATen ops that draw random numbers, without those of their overloads."""
    found = set()
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        if name.startswith("aten::"):
            with suppress(RuntimeError):  # without a schema it is no operator
                _, _, tags = torch._C._get_operation_overload(name, overload)
                if torch.Tag.nondeterministic_seeded in tags:
                    found.add(name.removeprefix("aten::"))
    return frozenset(found)


def has_kernel(name: str, key: str) -> bool:
    """True if the dispatcher has a kernel of this op (``aten::exp``) for this key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def op_of(name: str) -> OpOverload:
    """The ATen op of a name as the dispatcher has it (``softmax.int``, ``exp``)."""
    base, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, base), overload or "default")
    return found


@contextmanager
def region_kernels(
    kernels: Mapping[str, Callable[..., Any] | None], key: str = "AutocastCPU"
) -> Iterator[None]:
    """The CPU's autocast region calls these for ATen ops by name; None: casts nothing of one.

    Args:
        key: of the dispatcher, for the region of another device, or for what is not a region.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*overridden")  # it is what is asked for
            for name, kernel in kernels.items():
                library.impl(op_of(name), kernel or torch.library.fallthrough_kernel, key)
        yield
    finally:
        library._destroy()


def outside_autocast() -> Any:
    """Context of calls of a kernel of a region that it must not be called for again."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys = keys.add(torch._C.DispatchKey.AutocastCUDA)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def region_preserves_rng(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if a region's second run draws what the first drew; arguments of CHECKPOINT_REGION."""
    return bool(kwargs["preserve_rng_state"] if "preserve_rng_state" in kwargs else args[1])


def run_backward(
    roots: Sequence[Root], leaves: Sequence[Tensor] = (), *, again: bool = False
) -> None:
    """Backward from roots, in their order, to these leaves, to all for (); `again`: autograd's
    graph is kept.

    The engine itself, which no function mode sees: `torch.autograd.backward` takes as long to look
    at its arguments as the engine for a layer.
    """
    gradients = [torch.ones_like(one) if came is None else came for one, came in roots]
    graph._engine_run_backward(
        tuple([one for one, _ in roots]), tuple(gradients), again, False, tuple(leaves),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def gloo_options() -> Any:
    """Options of a gloo process group, with `_timeout` and `_devices`."""
    return dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """The hooks around an optimizer's own step; None: those around the step of every optimizer."""
    own = optimizer is not None
    owner, name = (optimizer, "_optimizer_step") if own else (optimizers, "_global_optimizer")
    tables = (getattr(owner, f"{name}_{when}_hooks") for when in ("pre", "post"))
    return [hook for table in tables for hook in table.values()]


def import_compiler() -> None:
    """Imports torch's compiler now: torch does at the first optimizer, checkpoint or other call
    that the compiler leaves alone, and it takes seconds."""
    importlib.import_module("torch._dynamo")


def quiet_shape_errors() -> AbstractContextManager[Any]:
    """Keeps torch from logging the traceback of every shape error before it raises it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    return patch.object(logger, "disabled", True)  # a level would empty all loggers' caches
