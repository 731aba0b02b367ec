"""Counts how many bytes of tensors are alive, storage by storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.costs import cpu_kernels, tried_kernels
from pdcompile.releases.torch_internals import TorchDispatchMode


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the untyped storages that ops return while it is on, each once, until they die.

    `now_bytes` is what is alive, also after the mode has been left; `peak_bytes` the most that
    was alive when an op had just returned.  What a kernel allocates and frees inside is not seen,
    except what `inside` knows.  Storages of the tensors in `given` are never counted.  Works on
    real tensors of any device and on fake ones, which have sizes but no memory.
    """

    def __init__(
        self, given: Iterable[Tensor] = (), inside: Callable[..., int] | None = None
    ) -> None:
        """`inside`: bytes of a kernel by op, arguments and result; None: those of a CPU's."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._inside = cpu_kernels.inside if inside is None else inside
        self.now_bytes = 0
        self.peak_bytes = 0
        self._given: dict[int, torch.UntypedStorage] = {}  # kept, or an address might come again
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.give(given)

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Excludes tensors from now on; they must not have been counted yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._given[storage._cdata] = storage

    def reset_peak(self) -> None:
        """Forgets what was alive before; the peak begins at what is alive now."""
        self.peak_bytes = self.now_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self.result(func, args, kwargs or {})
        result = tried_kernels.completed(func, args, result)
        for tensor in tensors_among(result):
            if tensor.layout == torch.strided:
                self._see(tensor.untyped_storage(), func, args)
        inside = self._inside(func, args, result)
        self.now_bytes += inside
        self.sample()
        self.now_bytes -= inside
        return result

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op."""
        return func(*args, **kwargs)

    def sample(self) -> None:
        """Notes what is alive now as a candidate for the peak."""
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def size_of(self, storage: torch.UntypedStorage, func: Any, args: tuple[Any, ...]) -> int:
        """Bytes of a storage that an op returned for the first time."""
        return storage.nbytes()

    def _see(self, storage: torch.UntypedStorage, func: Any, args: tuple[Any, ...]) -> None:
        key = storage._cdata
        if key in self._given or key in self._alive:
            return
        size = self.size_of(storage, func, args)

        def died(_: Any) -> None:
            del self._alive[key]
            self.now_bytes -= size

        self._alive[key] = weakref.ref(storage, died)
        self.now_bytes += size


@contextmanager
def saved_storages() -> Iterator[dict[int, torch.UntypedStorage]]:
    """Collects the storages, by address, that autograd would keep for a backward of what runs
    inside; nothing else of them is kept."""
    found: dict[int, torch.UntypedStorage] = {}  # held, or an address might come again

    def pack(tensor: Tensor) -> None:  # a result that its own node keeps would never die
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
