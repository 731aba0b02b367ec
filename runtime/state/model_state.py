"""State: the model's tensors by name, and the ranks that hold each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from pdcompile.checkpoint.extra_states import extra_states, set_extra_states, tensor_keys
from pdcompile.compiled import Compiled
from pdcompile.eager.digest import digest
from pdcompile.eager.module_copies import copy_of
from pdcompile.ir.records import TensorInfo
from pdcompile.ir.stage_interface import holding_stages
from pdcompile.runtime.device.rank_device import RankDevice
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.runtime.state.given_state import check_state
from pdcompile.runtime.watch.same_model import allow_forward
from pdcompile.weights import set_tensor


class State:
    """Tensors of the model by canonical FQN, as far as this process holds them.

    The first stage that holds a tensor owns it, and all of its replicas update it; `owned[r]`:
    the trainable parameters of which rank r is the first owner.
    """

    def __init__(self, model: nn.Module, compiled: Compiled, ranks: list[int]) -> None:
        self._model = model
        self._ranks = ranks
        self.keys = tensor_keys(model)  # of a state dict
        graphs = compiled.capture.eval, compiled.capture.train
        self._infos = {**graphs[0].tensors, **graphs[1].tensors}
        self.stages = holding_stages(compiled.interfaces)
        of_stage = compiled.stream.spec.ranks
        self._owners = {fqn: of_stage[stages[0]] for fqn, stages in self.stages.items()}
        self._holders = {
            fqn: [*dict.fromkeys(r for stage in self.stages.get(fqn, ()) for r in of_stage[stage])]
            for fqn in self._infos
        }
        self.owned = [
            [f for f, i in self._infos.items() if i.requires_grad and self._holders[f][0] == rank]
            for rank in range(compiled.stream.spec.num_ranks)
        ]
        self.dtypes = {fqn: dtype_of(info.dtype) for fqn, info in self._infos.items()}
        self.tensors: dict[str, Tensor] = {
            **dict(model.named_parameters()),
            **dict(model.named_buffers()),
            **_own(model, compiled.capture.eval.tensor_values),
            **_own(model, compiled.capture.train.tensor_values),
        }
        self._canonical = {a: fqn for fqn, i in self._infos.items() for a in (fqn, *i.aliases)}

    def owner(self, fqn: str) -> int:
        """The first stage that holds a tensor; stage 0 answers for those that none does."""
        return self.stages.get(fqn, [0])[0]

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the model by its first name, in the order of the model."""
        return self._infos

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The keys of state dicts under which each of their tensors is, by its first name."""
        found: dict[str, tuple[str, ...]] = {}
        for key in self.keys:
            fqn = self._canonical[key]
            found[fqn] = (*found.get(fqn, ()), key)
        return found

    def rebind(self, name: str, buffer: Tensor) -> str:
        """Another tensor is in the place of a buffer; returns its FQN."""
        fqn = self._canonical.get(name, name)
        self.tensors[fqn] = buffer
        return fqn

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this process owns, in the order of the model."""
        mine = set(self._ranks)
        for fqn in self._infos:
            tensor = self.tensors.get(fqn)
            if isinstance(tensor, nn.Parameter) and not mine.isdisjoint(self._owners.get(fqn, ())):
                yield fqn, tensor

    def optimized(self, *, alone: bool) -> list[tuple[str, nn.Parameter]]:
        """Parameters for the optimizer: in a process alone, all of the model."""
        return list(self._model.named_parameters() if alone else self.named_parameters())

    def trainable(self) -> dict[str, Tensor]:
        """Every trainable parameter of the model, in its order."""
        return {f: self.tensors[f] for f, info in self._infos.items() if info.requires_grad}

    def shared(self) -> dict[str, list[int]]:
        """Tensors that this process holds and others do too: all ranks that hold each."""
        mine = set(self._ranks)
        return {
            fqn: holders
            for fqn, holders in self._holders.items()
            if len(holders) > 1 and not mine.isdisjoint(holders)
        }

    def discard_others(self, keep: Collection[str] = ()) -> None:
        """The tensors of the model that no stage of this process holds become meta tensors.

        Those to `keep` are as another pipeline of the model has left them.
        """
        mine = set(self._ranks)
        gone = {
            fqn: _like(tensor, torch.empty_like(tensor, device="meta"))
            for fqn, tensor in self.tensors.items()
            if mine.isdisjoint(self._holders.get(fqn, mine)) and fqn not in keep
        }
        for name in _names(self._model):
            fqn = self._canonical.get(name, name)
            if fqn in gone:
                set_tensor(self._model, name, gone[fqn])
        self.tensors.update(gone)

    def place(self, device: RankDevice) -> None:
        """The tensors that this process holds go to its device: parameters stay the same objects,
        buffers and constants are others, as after model.to(…)."""
        mine = set(self._ranks)
        moved: dict[str, Tensor] = {}
        for fqn, tensor in self.tensors.items() if device.queued else ():
            if mine.isdisjoint(self._holders.get(fqn, mine)) or not device.on_host(tensor):
                continue
            if isinstance(tensor, nn.Parameter):
                gradient, tensor.grad = tensor.grad, None
                tensor.data = device.place(tensor.data)
                tensor.grad = None if gradient is None else device.place(gradient)
            else:
                moved[fqn] = device.place(tensor)
        for name in _names(self._model):
            if (fqn := self._canonical.get(name, name)) in moved:
                set_tensor(self._model, name, moved[fqn])
        self.tensors.update(moved)

    def part(self) -> dict[str, Tensor]:
        """Tensors that this process holds, live and detached, under the model's names."""
        mine = set(self._ranks)
        named = [(key, self._canonical[key]) for key in self.keys]
        own = {
            key: self.tensors[fqn].detach()
            for key, fqn in named
            if not mine.isdisjoint(self._holders[fqn])
        }
        return {**own, **extra_states(self._model)}

    def load(self, state: Mapping[str, Tensor], stages: list[StageWeights]) -> None:
        """Copy values into what this process holds, every version of it.

        Raises InputError, before anything is changed, for a name or shape of another model.
        """
        shapes = {key: self._infos[self._canonical[key]].shape for key in self.keys}
        extra = extra_states(self._model)
        check_state(state, shapes, extra)
        set_extra_states(self._model, state)
        for name, value in state.items():
            if name not in extra:
                self.put(self._canonical[name], value, stages)

    def put(self, fqn: str, value: Tensor, stages: list[StageWeights]) -> None:
        """Copy a value into what this process holds of a tensor, every version of it."""
        held = [stage.load(fqn, value) for stage in stages]
        if not any(held) and not self.tensors[fqn].is_meta:
            self.tensors[fqn].data.copy_(value)

    def whole_model(self, state: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the model with all of its tensors, ties included."""
        model = copy_of(self._model)
        allow_forward(model)
        whole: dict[str, Tensor] = {}
        for name in _names(model):
            fqn = self._canonical[name]
            if name in state:
                whole.setdefault(fqn, _like(self.tensors[fqn], state[name]))
                set_tensor(model, name, whole[fqn])
        return model


def dtype_of(name: str) -> torch.dtype:
    """torch.float32 of "float32"."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _own(model: nn.Module, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that forward uses without their being registered: this process's own, where an
    attribute of the model has the values that were captured, so that writes of it are seen."""
    found = dict(constants)
    modules = dict(model.named_modules())
    for fqn, value in constants.items():
        path, _, name = fqn.rpartition(".")
        own = vars(modules[path]).get(name) if path in modules else None
        if not isinstance(own, Tensor) or own is value:
            continue
        if (own.shape, own.dtype, digest(own)) == (value.shape, value.dtype, digest(value)):
            found[fqn] = own
    return found


def _names(model: nn.Module) -> list[str]:
    """Every name of every parameter and buffer."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return names + [name for name, _ in model.named_buffers(remove_duplicate=False)]


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """The value, as a parameter where the tensor is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value
