"""First values of a session's tensors: the model's, or, without values there, a source's."""

from __future__ import annotations

from torch import nn

from pdcompile.compiled import Compiled
from pdcompile.options import Options
from pdcompile.runtime.state.model_state import State
from pdcompile.runtime.state.same_start import refuse_meta, same_start, same_values
from pdcompile.runtime.transport.launch import World
from pdcompile.weights import materialise, open_source, slots


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
    if options.weights is None:
        state = State(model, compiled, ranks)
        here = {f: t for f, t in state.tensors.items() if f not in options.held}
        refuse_meta(here)
        if world is not None:
            same_start(world, here)
        return state
    source = open_source(options.weights, seed=options.seed)
    built = [s.fqn for s in slots(model).values() if not (s.tensor.is_meta or source.stored(s))]
    names = None
    if world is not None:
        held = compiled.stages_of_rank
        mine = [compiled.interfaces[stage] for rank in ranks for stage in held[rank]]
        names = {name for one in mine for name in (*one.parameters, *one.buffers)}
    materialise(model, source, names)
    state = State(model, compiled, ranks)
    refuse_meta({fqn: t for fqn, t in state.tensors.items() if names is None or fqn in names})
    refuse_meta(compiled.capture.train.tensor_values)
    if world is not None:
        same_start(world, {fqn: state.tensors[fqn] for fqn in built})
        same_values(world, state.tensors, state.shared())
    return state
