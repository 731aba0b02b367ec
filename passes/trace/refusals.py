"""The refusals of capture: message and remedy of each in one place, and remedies for errors that
the user's Python raised, by the arguments it was given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pdcompile.batch import as_one_argument
from pdcompile.errors import TraceError
from pdcompile.passes.trace.tape.observer import locate
from pdcompile.releases.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


class SizeByValues(TraceError):
    """The size of a result depends on values."""


class Ended(BaseException):
    """Ends a run, of which enough is known.  Not an Exception: forward must not catch it."""


class ForwardRaised(TraceError):
    """The model's own Python raised, which is the cause of this error."""


class NeverOpaque(TraceError):
    """A refusal that holds for opaque modules too."""


Refusal = tuple[str, str]  # message with {} for the offender, remedy

LOSS_AS_TENSOR = (
    "return the loss as the tensor that it is, without item() or float(): gradients need it"
)
LOSS_WITH_PARAMETERS = (
    "a module that is not trained: eval() and requires_grad_(False) once, before the first step; "
    "else let the model hold the module that has it, and return the loss (no loss_fn then)"
)
NO_PARAMETER = " that requires grad and is not a parameter of the model"
APART = ", or move these lines into a submodule, which is then opaque"
READ: Refusal = (
    "forward reads the value of a tensor ({})",
    "keep the decision in tensors (torch.where, masking), decide by shapes and configuration"
    + APART,
)
_HOOK: Refusal = (
    "forward registers a hook on a tensor ({})",
    "compute in forward instead; hooks on parameters may be registered before compile",
)
_BACKWARD: Refusal = (
    "forward runs autograd itself ({})",
    "return what has to be differentiated and let the training step do it",
)
STORAGE: Refusal = (
    "forward changes the storage or the flags of a tensor ({})",
    "make a new tensor with the shape or flag that you need",
)
ASSIGNED: Refusal = (
    "forward assigns to an attribute of a tensor ({})",
    "use a function that returns a new tensor, or an in-place method such as copy_()",
)
UNKNOWN_DRAW: Refusal = (
    "{} draws random numbers, but is not a known random function",
    "draw with a function of torch such as torch.rand or F.dropout",
)
CHANGED_STATE: Refusal = (
    "forward changes the Python attribute {}",
    "keep state that changes per call in a registered buffer and write it in place (add_, copy_)",
)
CHANGED_WITH_GRADIENT: Refusal = (
    CHANGED_STATE[0],
    "return it from forward (return out, aux) to who computes with it in the same call, as what "
    "an opaque module sets is not captured; a later call gets it as an input, detached",
)
CHANGED_OUTSIDE: Refusal = (
    "a call leaves something in {} that another call may find",
    "keep state that changes per call in a registered buffer and write it in place (add_, copy_); "
    "count and log between steps, from result.loss and result.outputs",
)
REBOUND: Refusal = (
    "forward rebinds {} to a new tensor",
    "write the buffer in place: self.buffer.copy_(new) instead of self.buffer = new, which may "
    "bind tensors of its shape and dtype only, without a gradient",
)
SHARED_BUFFER: Refusal = (
    "forward writes the buffer {} in place, in memory that two buffers share",
    "register one of them, and take the other one from it in forward (self.both[0])",
)
DEFAULT_DTYPE: Refusal = (
    "forward runs operators under another default dtype ({})",
    "give dtypes where tensors are made (torch.ones(n, dtype=…)), and leave the default alone",
)
ATTENTION: Refusal = (
    "forward runs operators with other kernels for attention ({})",
    "choose kernels around compile and step (torch.backends.cuda.enable_math_sdp), for the whole "
    "process, not inside of forward",
)
UNREPEATABLE: Refusal = (
    "{} gives other results when it is called again on the same numbers",
    "keep what changes from call to call in a registered buffer that forward writes in place "
    "(add_, copy_), draw random numbers with torch, and pass times and step numbers as inputs",
)
OUTSIDE_RANDOM: Refusal = (
    "forward draws from or seeds {}",
    "draw with torch functions (torch.rand, F.dropout) or before forward is called; draw with "
    "np.random.… and random.… by these names, and seed outside",
)
OUTSIDE_VALUE: Refusal = (
    "forward computes with random numbers that are not torch's ({})",
    "draw with torch functions (torch.rand, F.dropout); an array may be drawn in a function at the "
    "top level of a file for torch.tensor(array)" + APART,
)
SEED: Refusal = (
    "forward asks for the seed (torch.initial_seed), which every step changes",
    "draw with torch functions (torch.rand, F.dropout), or keep the number in an attribute",
)
WRITTEN: dict[str, Refusal] = {
    "parameter": (
        "forward writes the parameter {} in place",
        "change parameters in the optimizer; keep state that forward updates in a buffer",
    ),
    "constant": (
        "forward writes the unregistered tensor {} in place",
        "register it: self.register_buffer(name, tensor)",
    ),
}
RECOMPUTED_WRITE: Refusal = (
    "torch.utils.checkpoint runs {} a second time in backward, which writes its buffers again",
    "switch checkpointing off for it: what to recompute is decided by the plan",
)
RECOMPUTED_DRAW: Refusal = (
    "torch.utils.checkpoint draws other random numbers when it recomputes {}",
    "leave preserve_rng_state=True, or switch checkpointing off: the plan says what to recompute",
)
UNTRACKED: Refusal = (
    "a call that capture cannot see writes tensors or draws random numbers ({})",
    "compute it with public torch functions inside forward",
)

BY_VALUE: Refusal = (
    "the shape of {} depends on values",
    "use a form of fixed shape (torch.where, masked_fill, topk with a fixed k)" + APART,
)
TRANSFORM: Refusal = (
    "forward uses a torch.func transform (vmap, grad, jvp) around {}",
    "write the batched computation out, or move these lines into a submodule that returns tensors, "
    "which is then opaque (a BlockMask is none: call create_block_mask in the module that calls "
    "flex_attention, or use create_mask with F.scaled_dot_product_attention)",
)
FLEX_KERNEL: Refusal = (
    "forward calls {}, whose kernel is no operator",
    "call it in a submodule, which is then opaque",
)
FLEX_BACKWARD: Refusal = (
    "forward calls {} on values that need a gradient, and its backward is a kernel of its own, "
    "which torch has none of on CPUs",
    "F.scaled_dot_product_attention(q, k, v, attn_mask=create_mask(mask_mod, B, H, Q, KV)) trains "
    "with the same mask, with create_mask of torch.nn.attention.flex_attention, called in a "
    "submodule of its own (a score_mod that adds a bias: add it to a float attn_mask); frozen "
    "layers may keep flex_attention",
)
BLOCK_MASK: Refusal = (
    "the input {} is a BlockMask of FlexAttention, whose function is no data",
    "pass the tensors that its mask_mod reads, and call create_block_mask in forward",
)
OBJECT: Refusal = (
    "the input {} is an object, and what forward reads of it may change from call to call",
    "give it to the model as an attribute (self.settings = …), whose changes are noticed, or pass "
    "the tensors, numbers and strings that forward reads of it",
)
COMPILED = (
    "call the function as it is, without torch.compile (flex_attention instead of "
    "torch.compile(flex_attention); attn_implementation='sdpa' of a Hugging Face model, whose "
    "'flex_attention' compiles itself)"
)

# Tensor methods and torch functions, by name.
REFUSED: dict[str, Refusal] = {
    **dict.fromkeys(
        ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__",
         "numpy", "__array__", "__contains__", "is_nonzero", "equal", "allclose"),
        READ,
    ),
    **dict.fromkeys(
        ("register_hook", "register_post_accumulate_grad_hook", "retain_grad"), _HOOK
    ),
    "backward": _BACKWARD,
    **dict.fromkeys(
        ("set_", "resize_", "resize_as_", "share_memory_", "swap_tensors", "detach_"),
        STORAGE,
    ),
}  # fmt: skip


def error(
    refusal: Refusal, offender: str, where: str | None, kind: type[TraceError] = TraceError
) -> TraceError:
    """The error for a refusal."""
    return kind(refusal[0].format(offender), where=where, remedy=refusal[1])


@contextmanager
def as_refusals(func: Any) -> Iterator[None]:
    """Raises a TraceError where a fake tensor has no value to read, or an op no shape rule."""
    try:
        yield
    except DataDependentOutputException as caught:
        raise error(READ, name_of(func), locate()[0]) from caught
    except DynamicOutputShapeException as caught:
        what, where = f"the result of {name_of(func)}", locate()[0]
        raise error(BY_VALUE, what, where, SizeByValues) from caught
    except UnsupportedOperatorException as caught:
        raise TraceError(
            f"torch has no shape rule for {caught.func}",
            where=locate()[0],
            remedy="register a fake implementation with torch.library.register_fake",
        ) from caught


def name_of(func: Any) -> str:
    """The name of a function or a module of torch in messages; runs no code of the user."""
    how = " with momentum=None" * (getattr(func, "__dict__", {}).get("momentum", 0) is None)
    return str(getattr(func, "__name__", type(func).__name__)) + how


def remedy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The remedy for an error that forward raised."""
    if len(args) == 1 and not kwargs:
        hint = as_one_argument(args[0])
        if hint:
            return hint
    for name, given in (*enumerate(args), *kwargs.items()):
        if _numbers(given):
            which = f"argument {name}" if isinstance(name, int) else f"{name}="
            return f"{which} is a list of numbers: pass a tensor, torch.tensor(…)"
    return "run the model once on the example inputs without pdcompile"


def remedy_of_loss(target: Any) -> str:
    """The remedy for an error that loss_fn raised."""
    if _numbers(target):
        return "the target is a list of numbers: pass a tensor, torch.tensor(target)"
    return "run model and loss_fn once on the example inputs and target without pdcompile"


def tell_of_loss(refusal: TraceError) -> None:
    """Rewords a refusal for loss_fn, which was running when it arose."""
    refusal.message = re.sub("^forward ", "loss_fn ", refusal.message)
    refusal.remedy = (refusal.remedy or "").removesuffix(APART) or None
    if refusal.message.endswith(("(item)", "(__float__)")):
        refusal.remedy = LOSS_AS_TENSOR
    elif refusal.message.endswith(NO_PARAMETER) or "writes the unregistered" in refusal.message:
        refusal.remedy = LOSS_WITH_PARAMETERS


def _numbers(given: Any) -> bool:
    """True if a value is a list of numbers, or of such lists."""
    if not isinstance(given, list) or not given:
        return False
    return all(isinstance(part, bool | int | float) or _numbers(part) for part in given)
