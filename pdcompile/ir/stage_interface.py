"""StageInterface: the inputs and outputs of a generated stage, in order."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias

from pdcompile.errors import SourceError
from pdcompile.ir.graph import Size
from pdcompile.parts.shard import Shard

#: attribute of a stage class that was loaded from text: its module, which sys.modules has not
HOME = "_home"


def submodule_of(stage: Any, path: str) -> Any:
    """Submodule of a stage by its path in the model.

    `nn.Module.get_submodule` finds the stage's own methods first: a model may call a part ``loss``.

    Raises:
        KeyError: the stage has no such submodule.
    """
    for name in path.split(".") if path else ():
        stage = stage._modules[name]
    return stage


def module_of(cls: type) -> ModuleType:
    """The module that a stage class was defined in."""
    found: ModuleType = vars(cls).get(HOME) or sys.modules[cls.__module__]
    return found


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor argument or result of a stage's forward.

    `value` names it in the OpGraph; `name` is the Python parameter or variable in the source.
    `path` is set for a graph input (taken from the call), None for a value from another stage.
    `mutated`: the stage writes into it in place, so the runtime clones it on entry.
    `image`: between stages, made by convolutions, which inductor lays out with channels last.
    """

    name: str
    value: str
    path: str | None
    shape: tuple[Size, ...]
    dtype: str
    requires_grad: bool = False
    needs_gradient: bool = False
    batch_dim: int | None = None
    mutated: bool = False
    stride_order: tuple[int, ...] = ()
    image: bool = False


Place: TypeAlias = tuple[int | str, ...]  # keys and indices, outermost first


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """Tensors of one call of an opaque module, by place in its arguments and in its result.

    `form` is the nesting of the result (`pdcompile.ir.opaque.describe`), `rebinds` the buffers that
    it writes by binding new tensors to their names.
    """

    takes: tuple[tuple[Place, tuple[Size, ...]], ...]
    gives: tuple[tuple[Place, tuple[Size, ...], str], ...]
    form: str
    rebinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Signature:
    """One mode (train or eval) of one stage.

    ``forward(*inputs) -> tuple(outputs)``; on the last stage of a model with an outside
    loss_fn, ``loss(*loss_inputs) -> scalar``, whose inputs are outputs of forward and target
    leaves.  `loss` is the value name of the loss (an output of forward when the model returns
    it); None elsewhere.  `draws`: for each random leaf module on this stage, the indices of its
    draws in order of execution (a module may be called on several stages).  `opaque_calls`: for
    each opaque module, the tensors of its calls.
    `unshards`: its forward gathers weights that are split at rest.
    `any_layout`: no op depends on how an image lies in memory.
    `outputs` are the values that later stages and (last stage) the model's own output need.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    loss_inputs: tuple[Port, ...] = ()
    loss: str | None = None
    draws: dict[str, tuple[int, ...]] = field(default_factory=dict)
    opaque_calls: dict[str, tuple[OpaqueCall, ...]] = field(default_factory=dict)
    unshards: bool = False
    any_layout: bool = False


@dataclass(frozen=True, slots=True)
class StageInterface:
    """One generated stage. FQNs are canonical names of the model's tensors that it holds."""

    index: int
    train: Signature
    eval: Signature
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)  # other name in the stage -> canonical

    @property
    def opaque(self) -> tuple[str, ...]:
        """Paths of the opaque modules, the model's own, that this stage runs."""
        return tuple(dict.fromkeys((*self.train.opaque_calls, *self.eval.opaque_calls)))


def holding_stages(interfaces: Sequence[StageInterface]) -> dict[str, list[int]]:
    """Stages that hold each tensor of the model, its owner first."""
    found: dict[str, list[int]] = {}
    for stage, one in enumerate(interfaces):
        for fqn in dict.fromkeys((*one.parameters, *one.buffers, *one.constants)):
            found.setdefault(fqn, []).append(stage)
    return found


def named_results(stage: int, ports: Sequence[Port], results: Any) -> dict[str, Any]:
    """Results of a stage's forward, by value.

    Raises SourceError when it is not one result for each port: the file was edited.
    """
    if isinstance(results, tuple) and len(results) == len(ports):
        return {port.value: one for port, one in zip(ports, results, strict=True)}
    many = isinstance(results, tuple)
    found = f"{len(results)} results" if many else f"a {type(results).__name__}"
    names = ", ".join(port.name for port in ports)
    raise SourceError(
        f"forward of stage {stage} returns {found}, and the plan has a tuple of {len(ports)}: "
        f"{names}",
        where=f"stage_{stage}.py",
        remedy=f"return ({names}{',' if len(ports) == 1 else ''})",
    )


@dataclass(frozen=True, slots=True)
class Sources:
    """Generated (or loaded) source: file name to text. `stage_k.py`, `pipeline.py`, plan.json.

    `constants` are the tensors of kind "constant" by FQN (torch objects, for ``stage_k.pt``),
    `shards` say of which tensors each part of a stage has a slice.
    """

    files: dict[str, str]
    interfaces: tuple[StageInterface, ...]
    edited: tuple[str, ...] = ()  # names of files whose text is not what generate() wrote
    constants: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    shards: Mapping[str, Shard] = field(default_factory=dict, compare=False, repr=False)

    def slices(self, fqn: str, whole: Any) -> Any:
        """A tensor as ``stage_k.pt`` has it: where parts have slices, a list of them."""
        shard = self.shards.get(fqn)
        return [shard.own(whole, p) for p in range(shard.parts)] if shard else whole
