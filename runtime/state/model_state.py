"""Tensors of the model by name: their first values, and the ranks that hold each.

First values are the model's, or, without values there, a source's.  All ranks start from the
weights of rank 0, as after one process had built the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.checkpoint.extra_states import extra_states, set_extra_states
from pdcompile.compiled import Compiled
from pdcompile.eager.digest import digest, flat_bytes
from pdcompile.eager.module_copies import copy_of, twin_with
from pdcompile.errors import ConfigError, ContractError, InputError, did_you_mean, some
from pdcompile.hardware import devices
from pdcompile.ir.records import TensorInfo
from pdcompile.ir.stage_interface import holding_stages
from pdcompile.options import Options
from pdcompile.problem.deployment import balanced_homes
from pdcompile.runtime.device import RankDevice
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.runtime.transport.launch import World
from pdcompile.runtime.transport.parts_group import PartsGroup
from pdcompile.runtime.watch.same_model import allow_forward
from pdcompile.schedule.registry import flush_schedules
from pdcompile.warn import warn
from pdcompile.weights.source import like, materialise, open_source, registered, set_tensor, slots


def homes_of_replicas(compiled: Compiled, infos: Mapping[str, TensorInfo]) -> dict[str, int]:
    """The replica that updates each parameter, where not every one does: as in the plan, of those
    that training reads.  Others have no gradients, and weigh nothing."""
    spec, sizes = compiled.stream.spec, list[dict[str, int]]()
    trained = {fqn: info.bytes for fqn, info in infos.items() if info.requires_grad}
    for stage in compiled.plan.stages if spec.homes else ():
        sizes.append({fqn: trained.pop(fqn) for fqn in stage.parameters if fqn in trained})
    return dict.fromkeys(trained, 0) | balanced_homes(spec.ranks, sizes) if sizes else {}


def check_state(
    state: Any, shapes: Mapping[str, tuple[int, ...]], extra: Collection[str] = ()
) -> None:
    """Raise InputError unless it holds tensors under names and in shapes of the model.

    Args:
        shapes: of all that can be loaded, by name; a state may hold a part of it.
        extra: names of what modules keep beside tensors.
    """
    if not isinstance(state, Mapping):
        raise InputError(
            f"a state is a dict from names to tensors, and this is of type {type(state).__name__}",
            where="load_state_dict",
            remedy=_instead(state),
        )
    unknown = [name for name in state if name not in shapes and name not in extra]
    if unknown:
        shown = ", ".join(map(str, unknown[:3])) + (", …" if len(unknown) > 3 else "")
        raise InputError(
            f"the model has nothing called {shown} ({len(unknown)} of {len(state)} names)",
            where="load_state_dict",
            remedy=_renamed(state, unknown, shapes),
        )
    tensors = {name: value for name, value in state.items() if name not in extra}
    for name, value in tensors.items():
        remedy = "give what state_dict() returns"
        if not isinstance(value, Tensor):
            found = f"of type {type(value).__name__}, not a tensor"
        elif value.is_meta or value.is_quantized or value.layout is not torch.strided:
            found = f"no dense tensor with values ({value.dtype}, {value.layout}, {value.device})"
        elif tuple(value.shape) != shapes[name]:
            found = f"{tuple(value.shape)}, in the model it is {shapes[name]}"
            remedy = (
                "load a state of a model with the same sizes, or leave this name out: what is left "
                "out keeps its value"
            )
        else:
            continue
        raise InputError(f"{name} is {found}", where="load_state_dict", remedy=remedy)


def _instead(state: Any) -> str:
    if isinstance(state, str | PathLike):
        return f"read the file: load_state_dict(torch.load({str(state)!r}))"
    if isinstance(state, nn.Module):
        return "load_state_dict(model.state_dict())"
    return "give what state_dict() or full_state_dict() returned"


def _renamed(
    state: Mapping[Any, Any], unknown: Sequence[Any], shapes: Mapping[str, tuple[int, ...]]
) -> str:
    for name in unknown:
        if isinstance(state[name], Mapping) and set(state[name]) & set(shapes):
            return f"that is a whole checkpoint: give the part of the model, [{name!r}]"
    first = str(unknown[0])
    for known in shapes:
        if first.endswith(f".{known}"):
            prefix = first.removesuffix(known)
            return (
                f"take off {prefix!r}: {{name.removeprefix({prefix!r}): value for name, value in "
                "state.items()}"
            )
        if known.endswith(f".{first}"):
            prefix = known.removesuffix(first)
            return f"put {prefix!r} before the names: the model holds {known}"
    near = did_you_mean(first, shapes) or f"its names are such as {next(iter(shapes), '')}; "
    return f"{near}load a state of this model"


class State:
    """Tensors of the model by canonical FQN, as far as this process holds them.

    The first stage that holds a tensor owns it, and all of its replicas update it; `owned[r]`:
    the trainable parameters of which rank r is the first owner, or the home (`homes`: the replica
    that updates each, where not all do).
    """

    def __init__(
        self, model: nn.Module, compiled: Compiled, ranks: list[int],
        beside: PartsGroup | None = None,
    ) -> None:  # fmt: skip
        self._model, self._ranks, self.beside = model, ranks, beside
        #: buffers of which a step finds the largest value of all replicas
        self.maxima: set[str] = set()
        self._division = compiled.capture.division
        #: of a state dict
        self.keys = tuple(one.name for one in registered(model) if one.kept)
        graphs = compiled.capture.eval, compiled.capture.train
        #: every tensor of the model by its first name, in the order of the model
        self.infos: Mapping[str, TensorInfo] = {**graphs[0].tensors, **graphs[1].tensors}
        self.stages = holding_stages(compiled.interfaces)
        of_stage = compiled.stream.spec.ranks
        self._owners = {fqn: of_stage[stages[0]] for fqn, stages in self.stages.items()}
        self._holders = {
            fqn: [*dict.fromkeys(r for stage in self.stages.get(fqn, ()) for r in of_stage[stage])]
            for fqn in self.infos
        }
        mine = set(ranks)
        self._elsewhere = {f for f, holders in self._holders.items() if mine.isdisjoint(holders)}
        self.homes = homes_of_replicas(compiled, self.infos)
        spec = compiled.stream.spec
        #: replicas have homes of their own
        self.at_replicas = any(map(spec.gathers, range(len(spec.ranks))))
        homes = {f: ranks[self.homes.get(f, 0)] for f, ranks in self._owners.items()}
        self.owned = [
            [f for f, i in self.infos.items() if i.requires_grad and homes[f] == rank]
            for rank in range(spec.num_ranks)
        ]
        self.dtypes = {fqn: getattr(torch, info.dtype) for fqn, info in self.infos.items()}
        self.tensors: dict[str, Tensor] = {
            **dict(model.named_parameters()),
            **dict(model.named_buffers()),
            **_own(model, compiled.capture.eval.tensor_values),
            **_own(model, compiled.capture.train.tensor_values),
        }
        self._compiled = compiled
        self._canonical = {a: fqn for fqn, i in self.infos.items() for a in (fqn, *i.aliases)}

    def buffer(self, fqn: str, over_replicas: str | None = None) -> Tensor:
        """A buffer for the optimizer, which a step finds as plain PyTorch has it: where replicas
        write it, as the largest of their values ("max").

        Raises:
            ConfigError: this process has none of that name, or training writes it and a step finds
                what only one replica wrote, what a later minibatch did, or is of one part alone.
        """
        if over_replicas not in (None, "max"):
            raise ConfigError(
                f"the optimizer asks for {over_replicas!r} of the values that replicas write",
                where=fqn,
                remedy=f'parameters.buffer({fqn!r}, "max"), or the name alone',
            )
        name = self._canonical.get(fqn, fqn)
        if name not in self.infos or self.infos[name].kind != "buffer" or name in self._elsewhere:
            raise ConfigError(
                "the optimizer asks for this buffer, and no stage of this rank has one of that "
                "name",
                where=fqn,
                remedy="ask for buffers of modules whose parameters it is called with, and cut at "
                'borders of modules alone: constraints=(pdcompile.CutAt("layers.*"),)',
            )
        compiled, stages = self._compiled, self.stages[name]
        spec, why, remedy = compiled.stream.spec, "", ""
        if any(name in compiled.written_buffers(stage) for stage in stages):
            if spec.kind.stream:
                why = "later minibatches write it before a step under this schedule"
                remedy = f"a schedule of {flush_schedules()}"
            elif self.beside is not None:
                why, remedy = "parts of its stage step parameters at homes of their own", "parts=1"
            elif any(len(spec.ranks[stage]) > 1 for stage in stages):
                if spec.homes:
                    why = "replicas of its stage step parameters at homes of their own"
                    remedy = "updates='every'"
                elif over_replicas is None or self.tensors[name].is_complex():
                    why = "each replica of its stage writes its own"
                    remedy = f'parameters.buffer({fqn!r}, "max") for the largest, or replicas=1'
                self.maxima.add(name)
        if why:
            raise ConfigError(
                f"the optimizer asks for this buffer, and {why}", where=fqn, remedy=remedy
            )
        return self.tensors[name]

    def whole_shape(self, fqn: str, own: Tensor | None = None) -> tuple[int, ...]:
        """The shape of a tensor in the model, of which this process has its `own`."""
        shape = self.infos[fqn].shape if own is None else tuple(own.shape)
        shard = self._division.shards.get(fqn)
        return shape if shard is None else shard.whole_shape(shape)

    def whole(self, fqn: str, own: Tensor) -> Tensor:
        """A tensor of the model, from what this process has; all parts of a stage call it."""
        return own if self.beside is None else self.beside.whole(fqn, own)

    def own(self, fqn: str, whole: Tensor) -> Tensor:
        """Return what this process has of a tensor of the model."""
        return whole if self.beside is None else self._division.own(fqn, whole, self.beside.part)

    def own_values(self, fqn: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return this process's part of an optimizer's state of a parameter: what has the shape of
        the parameter is sliced as it is."""
        shape = self.whole_shape(fqn)
        return {
            key: self.own(fqn, one)
            if isinstance(one, Tensor) and one.dim() > 0 and tuple(one.shape) == shape
            else one
            for key, one in values.items()
        }

    def undivided(self) -> nn.Module:
        """The model; where parts have slices of it a twin without values, in its true shapes."""
        if self._division.parts == 1:
            return self._model
        return twin_with(
            self._model, lambda fqn, one: one.new_empty(self.whole_shape(fqn), device="meta")
        )

    def divide(self) -> None:
        """Keep this part's slices of the tensors of the model alone."""
        for fqn in self.beside.division.shards if self.beside is not None else ():
            tensor = self.tensors[fqn]
            if not tensor.is_meta and fqn not in self._elsewhere:
                tensor.data = self.own(fqn, tensor.data).clone()

    def updated_here(self, fqn: str) -> bool:
        """True if the optimizer of this process steps a parameter that the process owns."""
        ranks = self._owners[fqn]
        mine = [n for n, rank in enumerate(ranks) if rank in self._ranks]
        return self.homes.get(fqn, mine[0] if mine else 0) in mine

    def owner(self, fqn: str) -> int:
        """The first stage that holds a tensor; stage 0 answers for those that none does."""
        return self.stages.get(fqn, [0])[0]

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
        """Parameters that this process owns, in the order of the model."""
        mine = set(self._ranks)
        for fqn in self.infos:
            tensor = self.tensors.get(fqn)
            if isinstance(tensor, nn.Parameter) and not mine.isdisjoint(self._owners.get(fqn, ())):
                yield fqn, tensor

    def trainable(self) -> dict[str, Tensor]:
        """Every trainable parameter of the model, in its order."""
        return {f: self.tensors[f] for f, info in self.infos.items() if info.requires_grad}

    def shared(self) -> dict[str, list[int]]:
        """Tensors that this process holds and others do too: all ranks that hold each."""
        return {
            fqn: holders
            for fqn, holders in self._holders.items()
            if len(holders) > 1 and fqn not in self._elsewhere
        }

    def discard_others(self, keep: Collection[str] = ()) -> None:
        """The tensors of the model that no stage of this process holds become meta tensors.

        Those to `keep` are as another pipeline of the model has left them.
        """
        gone = {
            fqn: like(tensor, torch.empty_like(tensor, device="meta"))
            for fqn, tensor in self.tensors.items()
            if fqn in self._elsewhere and fqn not in keep
        }
        self._replace(gone)

    def place(self, device: RankDevice, at_rest: Collection[str] = ()) -> None:
        """The tensors that this process holds go to its device, without those `at_rest`: parameters
        stay the same objects, buffers and constants are others, as after model.to(…)."""
        moved: dict[str, Tensor] = {}
        for fqn, tensor in self.tensors.items() if device.queued else ():
            if fqn in self._elsewhere or fqn in at_rest or not devices.on_host(tensor):
                continue
            if isinstance(tensor, nn.Parameter):
                gradient, tensor.grad = tensor.grad, None
                tensor.data = device.place(tensor.data)
                tensor.grad = None if gradient is None else device.place(gradient)
            else:
                moved[fqn] = device.place(tensor)
        self._replace(moved)

    def _replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Others take the place of some tensors, under all of their names."""
        for *_, name, _ in [*registered(self._model)]:
            if (fqn := self._canonical.get(name, name)) in tensors:
                set_tensor(self._model, name, tensors[fqn])
        self.tensors.update(tensors)

    def part(self) -> dict[str, Tensor]:
        """Tensors that this process holds, live and detached, under the model's names."""
        named = [(key, self._canonical[key]) for key in self.keys]
        own = {k: self.tensors[fqn].detach() for k, fqn in named if fqn not in self._elsewhere}
        return {**own, **extra_states(self._model)}

    def load(self, state: Mapping[str, Tensor], stages: list[StageWeights]) -> None:
        """Copy values into what this process holds, every version of it.

        Raises InputError, before anything is changed, for a name or shape of another model.
        """
        shapes = {key: self.whole_shape(self._canonical[key]) for key in self.keys}
        extra = extra_states(self._model)
        check_state(state, shapes, extra)
        set_extra_states(self._model, state)
        for name, value in state.items():
            if name not in extra:
                self.put(self._canonical[name], value, stages)

    def put(self, fqn: str, value: Tensor, stages: list[StageWeights]) -> None:
        """Copy a value into what this process holds of a tensor, every version of it."""
        value = self.own(fqn, value)
        held = [stage.load(fqn, value) for stage in stages]
        if not any(held) and not self.tensors[fqn].is_meta:
            self.tensors[fqn].data.copy_(value)

    def whole_model(self, state: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the model with all of its tensors, ties included."""
        model = copy_of(self._model)
        allow_forward(model)
        whole: dict[str, Tensor] = {}
        for *_, name, _ in [*registered(model)]:
            fqn = self._canonical[name]
            if name in state:
                whole.setdefault(fqn, like(self.tensors[fqn], state[name]))
                set_tensor(model, name, whole[fqn])
        return model


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


def initial_state(
    model: nn.Module,
    options: Options,
    compiled: Compiled,
    ranks: list[int],
    world: World | None,
) -> State:
    """The tensors that this process's `ranks` hold, with values that are equal on every rank.

    With ``weights=`` a process reads the tensors of its own stages and no others.

    Raises:
        ConfigError: tensors have no values and none are to be had.
        ContractError: ranks that hold one tensor got different values for it.
    """
    beside = None if world is None else world.beside
    if options.weights is None:
        state = State(model, compiled, ranks, beside)
        here = {f: t for f, t in state.tensors.items() if f not in options.held}
        refuse_meta(here)
        if world is not None:
            same_start(world, here)
        state.divide()
        return state
    source = open_source(options.weights, seed=options.seed)
    built = [s.fqn for s in slots(model).values() if not (s.tensor.is_meta or source.stored(s))]
    names = None
    if world is not None:
        held = compiled.stages_of_rank
        mine = [compiled.interfaces[stage] for rank in ranks for stage in held[rank]]
        names = {name for one in mine for name in (*one.parameters, *one.buffers)}
    materialise(model, source, names)
    state = State(model, compiled, ranks, beside)
    refuse_meta({fqn: t for fqn, t in state.tensors.items() if names is None or fqn in names})
    refuse_meta(compiled.capture.train.tensor_values)
    if world is not None:
        same_start(world, {fqn: state.tensors[fqn] for fqn in built})
        same_values(world, state.tensors, state.shared())
    state.divide()
    return state


def refuse_meta(tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for a model without weights: it can be planned, but not run."""
    empty = [fqn for fqn, tensor in tensors.items() if tensor.device.type == "meta"]
    if empty:
        raise ConfigError(
            f"{len(empty)} tensors of the model have no values, they are on the meta device: "
            f"{some(empty)}",
            remedy="say where their values are: weights= a .safetensors file or a function (name, "
            "tensor); or give them values before compile: model.to_empty(device='cpu') and load a "
            "state_dict; `pdcompile plan` plans without",
        )


def same_start(world: World, tensors: Mapping[str, Tensor]) -> None:
    """Compare checksums of all tensors; where ranks differ, everyone takes rank 0's values.

    A program that does not seed its initialisation builds another model on every rank: stages would
    be parts of models that never existed together, and tied copies would disagree.  Every rank of
    the pipeline calls this with the same names in the same order.
    """
    every = world.told({fqn: digest(one) for fqn, one in tensors.items()})
    if all(one == every[0] for one in every):
        return
    for tensor in tensors.values():
        if tensor.numel() == 0:
            continue
        flat = flat_bytes(devices.to_host(tensor))
        with world.peers.log.meeting():
            world.joint.group.broadcast(flat, 0).wait()
        if world.process != 0:
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    if world.process == 0:
        warn(
            "the ranks built different weights: all continue with those of rank 0; call "
            "torch.manual_seed before building the model",
            RuntimeWarning,
        )


def same_values(
    world: World, tensors: Mapping[str, Tensor], shared: Mapping[str, list[int]]
) -> None:
    """Raise ContractError where ranks that hold one tensor gave it different values.

    `shared`: the ranks that hold each tensor that this rank and others hold.
    """
    every = world.told({fqn: digest(tensors[fqn]) for fqn in shared})
    for fqn, ranks in shared.items():
        if len({every[p][fqn] for rank in ranks for p in world.processes[rank]}) > 1:
            raise ContractError(
                f"ranks {', '.join(map(str, ranks))} hold {fqn} with different values",
                where=fqn,
                remedy="give every rank the same files; a function given as weights= draws from "
                "torch's default generator, which is seeded for each name, and from no other",
            )
