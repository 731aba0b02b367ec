"""Autocast regions as text: ``cpu:bfloat16``, or ``cpu:off`` where one is switched off in another.

Ops, plans and JSON hold the text; only this file makes and reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from pdcompile.cluster import GPU_KIND, HOST_KIND, Device
from pdcompile.errors import ConfigError

if TYPE_CHECKING:
    import torch

OFF = "off"
# What files for GPUs say where their tensors are on the CPU.
NO_CASTS = "on the CPU torch.autocast('cuda') casts nothing: dtypes are not those of a GPU"
DTYPES = ("bfloat16", "float16")


def autocast_text(given: Any, device: str = HOST_KIND) -> str | None:
    """The text for the option ``autocast=``: a dtype, its name, or a ``torch.autocast`` object.

    Args:
        device: kind of the device that the model runs on; a torch.autocast object and the text of
            a region (``cuda:bfloat16``, as plans have it) have their own.

    Raises:
        ConfigError: it is none of these, or a dtype that autocast does not have.
    """
    if given is None:
        return None
    if hasattr(given, "fast_dtype") and hasattr(given, "device"):
        if not getattr(given, "_enabled", True):
            _check_switched_off(given)
            return None
        if not getattr(given, "_cache_enabled", True):
            raise ConfigError(
                "autocast without its cache (cache_enabled=False) is not available",
                remedy="leave cache_enabled out: weights are then cast once a microbatch",
            )
        given, device = given.fast_dtype, str(given.device)
    name = str(given).removeprefix("torch.")
    stated, _, dtype = name.partition(":")
    if stated in (HOST_KIND, GPU_KIND):
        device, name = stated, dtype
    if name not in DTYPES:
        raise ConfigError(
            f"autocast={given!r} is not a dtype of an autocast region",
            remedy="bfloat16 or float16 (--autocast bfloat16); in Python also torch.bfloat16, "
            "a torch.autocast(…), or None for no region",
        )
    return f"{device}:{name}"


def _check_switched_off(given: Any) -> None:
    """Raises ConfigError where torch may have switched a region off, and not the user."""
    import torch

    if str(given.device) == GPU_KIND and not torch.cuda.is_available():
        raise ConfigError(
            "torch finds no GPU here and switches every torch.autocast('cuda', …) off, so that "
            "autocast= names no region",
            remedy="give its dtype (autocast='bfloat16'), which is the region of the devices that "
            "the plan is for, or None for no region",
        )


def on_gpu(text: str | None) -> bool:
    """True if a region is that of GPUs."""
    return (text or "").partition(":")[0] == GPU_KIND


def region_dtype(text: str | None) -> torch.dtype | None:
    """The dtype to which a region casts."""
    if text is None or text.endswith(OFF):
        return None
    import torch

    found: torch.dtype = getattr(torch, text.rpartition(":")[2])
    return found


def autocast_region(text: str | None) -> AbstractContextManager[Any]:
    """The context manager for a text; an empty one for None.

    A GPU's region casts nothing of the CPU's, and can be opened on a host without a GPU.
    """
    if text is None:
        return nullcontext()
    import torch

    from pdcompile.releases.torch_internals import gpu_autocast_anywhere

    device, _, dtype = text.rpartition(":")
    if dtype == OFF:
        return torch.autocast(device or HOST_KIND, enabled=False)
    with gpu_autocast_anywhere():
        return torch.autocast(device or HOST_KIND, dtype=getattr(torch, dtype))


def regions_of(text: str | None, device: torch.device) -> AbstractContextManager[None]:
    """Context of code for which the region is opened, on `device`: where that is the CPU,
    a GPU's regions cast there what they cast on a GPU."""
    if not (on_gpu(text) and device.type == HOST_KIND):
        return nullcontext()
    from pdcompile.releases.gpu_casts import gpu_casts_on_cpu

    return gpu_casts_on_cpu()


def other_region(text: str | None, devices: Iterable[Device]) -> str:
    """Reason why a region is not that of the devices that stages are for; "" where it is.

    What a region casts depends on where the tensors are: on a GPU softmax and norms are computed in
    float32, for example, and on the CPU they are not.
    """
    region = (text or "").partition(":")[0]
    own = {one.kind: HOST_KIND if one.on_host else GPU_KIND for one in devices}
    kinds = sorted(kind for kind, its in own.items() if its != region)
    if not region or not kinds:
        return ""
    return (
        f"the model was captured in the autocast region of {region}, and that of "
        f"{', '.join(kinds)} casts other ops"
    )


def note_on_region(text: str | None, devices: Iterable[Device]) -> Iterator[str]:
    """A note where a region is not that of the devices that stages are for."""
    if other := other_region(text, devices):
        yield (
            f"{other}: dtypes and bytes are those of the former, and its stages do not run there; "
            "autocast=<dtype> is the region of the devices"
        )
