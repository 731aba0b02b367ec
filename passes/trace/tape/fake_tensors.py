"""FakeTensors: the fakes of the model's tensors and inputs, and the names of all values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Argument, Attr, Ref, Value, walk
from pdcompile.ir.opaque import tensors_among
from pdcompile.ir.targets import dtype_name
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.assumptions import Findings
from pdcompile.passes.trace.cached_tensors import CachedTensors
from pdcompile.passes.trace.interceptors.size_reads import TracedSize
from pdcompile.passes.trace.tape.arguments import with_parts
from pdcompile.passes.trace.tape.module_table import ModuleTable
from pdcompile.passes.trace.tape.observer import locate, storage_key
from pdcompile.releases.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    NoTorchDispatch,
    NoTorchFunction,
    is_functorch_wrapped_tensor,
)

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # no class of its own that does more
KEEP = "keep what one call leaves for the next in a registered buffer, written in place (copy_)"


class FakeTensors:
    """Every tensor that may appear while the model runs, by identity.

    The model keeps its real tensors; each call gets fakes in their place, so that no tensor of
    the model is written.  All fakes live as long as this object: identities stay unique.
    """

    def __init__(
        self,
        table: ModuleTable,
        mode: FakeTensorMode,
        device: torch.device,
        cached_tensors: CachedTensors,
        home: torch.device,
    ) -> None:
        """`device`: of the fakes; `home`: of the model's tensors, where that is another one."""
        self.home = home
        self._memory: dict[int, torch.UntypedStorage] = {}  # of fakes, by that of their tensors
        self.table = table
        self._cached_tensors = cached_tensors
        self.findings = Findings()
        self.rewritten: frozenset[str] = frozenset()  # buffers that other calls write
        self.mode = mode
        self.device = device
        self._fake_of: dict[int, torch.Tensor] = {}  # id of a real or kept tensor -> its fake
        self.real_of: dict[int, torch.Tensor] = {}  # id of a fake -> the real tensor
        self._attribute: dict[int, str] = {}  # id of a fake -> FQN
        self.value_names: dict[int, str] = {}  # id of a fake -> value name
        self.objects: dict[str, torch.Tensor] = {}
        self._born_requiring: dict[str, bool] = {}
        self._order: list[str] = []
        # By storage key, in the order of first use.
        self._at: dict[int, list[str]] = {}  # value names
        self._model_at: dict[int, list[str]] = {}  # FQNs
        self._kept: list[torch.Tensor] = []
        self.unnamed: dict[int, str] = {}  # id of a constant -> path of its attribute
        self.constants: dict[str, torch.Tensor] = {}
        self._unknown: dict[int, tuple[torch.Tensor, str]] = {}
        self.cached: dict[str, int] = {}  # name of a tensor of an earlier call -> its computation

    def made_in(self, result: Any, path: str) -> None:
        """Remembers the module that returned a tensor whose making was not recorded."""
        for tensor in tensors_among(result):
            if isinstance(tensor, FakeTensor) and not self.known(tensor):
                self._unknown.setdefault(id(tensor), (tensor, path))

    def origin_of(self, arguments: Any) -> str | None:
        """The module that returned one of these tensors without a recorded op, or None."""
        for tensor in tensors_among(arguments):
            if id(tensor) in self._unknown:
                return self._unknown[id(tensor)][1]
        return None

    def faked(self, value: Any) -> Any:
        """The same structure with fakes for real tensors."""
        if isinstance(value, torch.Tensor):
            return self._fake(value)
        if type(value) is TracedSize:
            return int(value)
        return with_parts(value, self.faked)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.value_names or id(tensor) in self._attribute:
            return tensor
        fake = self._fake_of.get(id(tensor))
        if fake is not None:
            return fake
        if (computation := self._cached_tensors.computation_of(tensor)) is not None:
            return self._cached_fake(tensor, computation)
        if isinstance(tensor, FakeTensor):
            return tensor  # a temporary inside a leaf module, or unknown: `name` raises
        fqn = self.table.fqns.get(id(tensor))
        if fqn is None and is_functorch_wrapped_tensor(tensor):
            return tensor  # of a transform: it stands for many values
        if fqn is None:
            fqn = self._constant(tensor)
        if self.table.tensors[fqn].kind == "constant":
            self.constants[fqn] = tensor
        fake = self.fake_like(tensor)
        self._fake_of[id(tensor)] = fake
        self.real_of[id(fake)] = tensor
        self._attribute[id(fake)] = fqn
        self._kept += [fake, tensor]
        self._model_at.setdefault(storage_key(fake), []).append(fqn)
        return fake

    def _cached_fake(self, tensor: torch.Tensor, computation: int) -> torch.Tensor:
        """A fake for a tensor that an earlier recording left in an attribute."""
        with self.mode:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
            ).requires_grad_(tensor.requires_grad)
        self._fake_of[id(tensor)] = fake
        self._kept.append(tensor)
        name = f"cached {len(self.cached)}"
        self.cached[name] = computation
        self.add(name, fake)
        return fake

    def fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake of the same shape, strides, dtype and requires_grad on the capture's device."""
        odd = not tensor.is_leaf or tensor.grad is not None or type(tensor) not in _PLAIN
        odd = odd or tensor.layout is not torch.strided or tensor.is_quantized
        odd = odd or tensor.is_conj() or tensor.is_neg()
        if odd and tensor.device.type != "meta" and self.home == self.device:
            return self.mode.from_tensor(tensor)  # slower, for any tensor
        with NoTorchDispatch(), NoTorchFunction():
            fake = FakeTensor(self.mode, self._without_values(tensor), self.device)
            if tensor.is_leaf:
                fake.requires_grad_(tensor.requires_grad)
            # as its class makes one, without two ops
            fake._is_param = isinstance(tensor, torch.nn.Parameter)
        return fake

    def _without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the meta device with the same layout; what shares memory still does."""
        make, held = partial(torch.empty, device="meta"), tensor.untyped_storage()
        if tensor.device.type == "meta":
            if tensor.is_contiguous():  # as below, in a tenth of the time
                return make(tensor.shape, dtype=tensor.dtype)
            return torch.empty_like(tensor, requires_grad=False)
        if (key := storage_key(tensor)) not in self._memory:
            self._kept.append(tensor)
            self._memory[key] = make(held.nbytes(), dtype=torch.uint8).untyped_storage()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return make(0, dtype=tensor.dtype).set_(self._memory[key], *place)

    def _constant(self, tensor: torch.Tensor) -> str:
        storage_key(tensor)  # refuses what is not dense
        if tensor.requires_grad:
            raise TraceError(
                f"forward uses a tensor of shape {tuple(tensor.shape)}{refusals.NO_PARAMETER}",
                where=locate()[0],
                remedy="register it as nn.Parameter on a module, or detach() it",
            )
        return self.table.constant(tensor, self.unnamed.get(id(tensor), "constant"))

    def add(self, name: str, fake: torch.Tensor | None) -> None:
        """Enters a value; a tensor that has a name already gets the new one.  None: a container of
        tensors, or nothing."""
        self._order.append(name)
        if fake is None:
            return
        self.value_names[id(fake)] = name
        self.objects[name] = fake
        self._born_requiring[name] = fake.requires_grad
        self._at.setdefault(storage_key(fake), []).append(name)

    def known(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.value_names or id(tensor) in self._attribute

    def name(self, tensor: torch.Tensor) -> Argument:
        """The argument that stands for a tensor.

        Raises:
            TraceError: it was made in a way that the tape did not see.
        """
        tensor = self._fake(tensor)
        if id(tensor) in self.value_names:
            return Ref(self.value_names[id(tensor)])
        if id(tensor) in self._attribute:
            return Attr(self._attribute[id(tensor)])
        raise TraceError(
            f"a tensor of shape {tuple(tensor.shape)} comes from a call that capture cannot see "
            "(TorchScript, vmap, a C++ extension, or a tensor kept from an earlier call)",
            remedy="compute it with public torch functions inside forward; " + KEEP,
        )

    def own_any(self, keys: set[int]) -> bool:
        """True if one of these storages belongs to a value or to a tensor of the model."""
        return any(key in self._at or key in self._model_at for key in keys)

    def storage_of(self, name: str) -> int:
        fake = self.objects.get(name)
        return -1 if fake is None else storage_key(fake)

    def buffers_in(self, written: set[int], source: str) -> tuple[str, ...]:
        """Canonical FQNs of the buffers in written storages, in order of first use.

        Raises:
            TraceError: a parameter is written, or a buffer that shares its memory with another one.
        """
        held = self._model_at.items() if written else ()
        fqns = [fqn for key, own in held if key in written for fqn in own]
        for fqn in fqns:
            info = self.table.tensors[fqn]
            if info.kind != "buffer":
                raise refusals.error(refusals.WRITTEN[info.kind], fqn, source)
            other = self.table.shares_memory(fqn)
            if other is not None:
                raise refusals.error(refusals.SHARED_BUFFER, f"{fqn} (shared with {other})", source)
        self.findings.written.update(fqns)
        return tuple(fqns)

    def values_in(self, written: set[int], arguments: Argument) -> tuple[str, ...]:
        """Values in written storages: those among the arguments, else the newest of each."""
        if not written:
            return ()
        names = dict.fromkeys(ref.name for ref in walk(arguments, Ref))
        found = [name for name in names if self.storage_of(name) in written]
        others = written - {self.storage_of(name) for name in found}
        return (*found, *(names[-1] for key, names in self._at.items() if key in others))

    def values(self) -> dict[str, Value]:
        """All values in the order in which they were made, without their consumers."""
        found: dict[str, Value] = {}
        storages = {key: index for index, key in enumerate(self._at)}
        for name in self._order:
            fake = self.objects.get(name)
            if fake is None:
                found[name] = Value(name, (), "container", producer=name)
                continue
            current = self.value_names[id(fake)] == name
            requires = fake.requires_grad if current else self._born_requiring[name]
            found[name] = Value(
                name=name,
                shape=tuple(fake.shape),
                dtype=dtype_name(fake.dtype),
                requires_grad=requires,
                producer=name,
                storage=storages[storage_key(fake)],
                stride_order=stride_order(fake),
            )
        return found


def stride_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dims from largest to smallest stride of a dense layout; () when contiguous."""
    # In plain numbers: asking a fake tensor to permute costs more than the op that made it.
    shape, strides = tuple(tensor.shape), tensor.stride()
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
    given = tuple(range(len(shape)))
    if order == given or _dense(shape, strides, given) or not _dense(shape, strides, order):
        return ()
    return order


def _dense(shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """True if the elements lie one after the other when dims are taken in this order."""
    if 0 in shape:
        return True
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected:
            return False
        expected *= shape[dim]
    return True
