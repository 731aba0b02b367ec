"""Spans: ops that a cut between them would make wrong, and why.

Every rule joins a handful of ops; whatever lies between them on a path is joined afterwards,
because ops of one group that reach each other through an outsider form a cycle of groups
(`close_cycles`), and every stage has to be convex.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from heapq import heappop, heappush

from pdcompile.eager.summation import summation_order
from pdcompile.ir.graph import (
    CHECK,
    DTYPE_BYTES,
    GRADIENT,
    Attr,
    LeftOut,
    Op,
    OpGraph,
    Ref,
    walk,
    written_buffers,
)
from pdcompile.ir.sparse_gradients import makes_sparse, trained_readers
from pdcompile.passes.partition.lattice import components, neighbours, reachable
from pdcompile.passes.stages.boundaries import has_gradient

CONTAINER = "a container and what takes it apart"
UNSENDABLE = "a value that cannot be sent"
VARIES = "a value whose size depends on values"
MUTATION = "in-place writes and what reads the same memory before them"
BUFFER = "readers and writers of a written buffer"
NO_GRADIENT = "readers of a parameter that may get no gradient"
OPAQUE = "calls of an opaque module"
CHECKED = "a check and what it checks"
HOOK = "a hook or flag and the op that makes its tensor"
GRAD = "a gradient taken inside forward"
OUTPUT = "the loss and the model's output"
SPARSE = "a sparse gradient and what it belongs to"
CAST = "uses of one weight that autocast casts once"
AGE = "users of one parameter, which stages have at unlike ages"
CYCLE = "ops between others that stay together"

_FLAGS = ("register_hook", "retain_grad", "requires_grad_")


class Groups:
    """Disjoint sets over 0 … size−1; the root of a set is its smallest member."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))
        self.reasons: Counter[str] = Counter()
        self.joined: list[tuple[int, int, str]] = []  # members of a group, in order, and why

    def find(self, i: int) -> int:
        parent = self.parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, members: Iterable[int], reason: str) -> None:
        """Put members into one group; `reason` counts how many joins it was the cause of."""
        first: int | None = None
        before = -1
        for member in members:
            root = self.find(member)
            if first is None:
                first = root
            elif root != first:
                low, high = min(first, root), max(first, root)
                self.parent[high] = low
                first = low
                self.reasons[reason] += 1
                self.joined.append((before, member, reason))
            before = member

    def join_alike(self, members: Iterable[tuple[Hashable, int]], reason: str) -> None:
        """Put members of the same key into one group."""
        alike = defaultdict[Hashable, list[int]](list)
        for key, member in members:
            alike[key].append(member)
        for those in alike.values():
            self.join(those, reason)

    def why(self, a: int, b: int) -> list[str]:
        """The reasons that join two members of one group, from the one to the other."""
        beside: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for one, other, reason in self.joined:
            beside[one].append((other, reason))
            beside[other].append((one, reason))
        ways: dict[int, list[str]] = {a: []}
        for member in (queue := [a]):
            for other, reason in beside[member]:
                if other not in ways:
                    ways[other] = [*ways[member], reason]
                    queue.append(other)
        return list(dict.fromkeys(ways[b]))

    def members(self) -> dict[int, list[int]]:
        """Root to members, both ascending."""
        found: dict[int, list[int]] = {}
        for i in range(len(self.parent)):
            found.setdefault(self.find(i), []).append(i)
        return found


def join_spans(graph: OpGraph, groups: Groups) -> None:
    """Join what may not be cut. Op i of the graph is member i; the last member is the output."""
    position = {op.name: i for i, op in enumerate(graph.ops)}
    _join_unsendable(graph, groups, position)
    _join_mutations(graph, groups, position)
    _join_buffers(graph, groups, position)
    _join_without_gradient(graph, groups)
    join_sparse(graph, groups, position)
    join_casts(graph, groups)
    _join_calls(graph, groups, position)
    _join_output(graph, groups, position)


def close_cycles(graph: OpGraph, groups: Groups) -> None:
    """Join groups that reach each other both ways, so that the groups form an acyclic graph.

    They reach each other through values, or by the order in which gradients are summed.
    """
    _, after = neighbours(len(graph.ops) + 1, arcs_between(graph, groups))
    groups.join_alike(((part, root) for root, part in enumerate(components(after))), CYCLE)


def arcs_between(graph: OpGraph, groups: Groups) -> list[tuple[int, int]]:
    """Pairs of groups (roots) of which the second may not be on an earlier stage than the first.

    It reads a value of the first, or its gradients are summed later.
    """
    position = {op.name: i for i, op in enumerate(graph.ops)}
    pairs = [(ref.name, len(graph.ops)) for ref in walk(graph.output, Ref)]
    pairs += [(name, i) for i, op in enumerate(graph.ops) for name in op.inputs]
    pairs += [(first, position[second]) for first, second, _ in summation_order(graph)]
    arcs = {
        (groups.find(position[name]), groups.find(target))
        for name, target in pairs
        if name in position
    }
    return sorted((a, b) for a, b in arcs if a != b)


def _join_unsendable(graph: OpGraph, groups: Groups, position: dict[str, int]) -> None:
    # Evaluation returns what training leaves out.
    output = {leaf.name for leaf in walk(graph.output, (Ref, LeftOut))}
    for value in graph.values.values():
        if value.producer is None or (value.dtype in DTYPE_BYTES and not value.varies):
            continue
        reason = VARIES if value.varies else UNSENDABLE if value.is_tensor else CONTAINER
        ends = [position[value.producer], *(position[name] for name in value.consumers)]
        if value.name in output:
            ends.append(len(graph.ops))
        groups.join(ends, reason)


def _join_mutations(graph: OpGraph, groups: Groups, position: dict[str, int]) -> None:
    """Join the first alias of a storage to its last in-place write, with all readers on the way.

    A reader after the last write may be elsewhere: it receives what was written.  Of a graph
    input that is written every reader stays: other stages would take it unwritten from the
    caller.
    """

    def storage(name: str) -> int | str:
        found = graph.values[name].storage
        return found if found >= 0 else name  # of its own, where it is unknown

    #: position of its last writer
    written = {storage(name): i for i, op in enumerate(graph.ops) for name in op.mutates}

    def members() -> Iterator[tuple[int | str, int]]:
        yield from written.items()
        for value in graph.values.values():
            last, made = written.get(storage(value.name), -1), value.producer
            for name in (*value.consumers,) if made is None else (made, *value.consumers):
                if position[name] <= last or (made is None and last >= 0):
                    yield storage(value.name), position[name]

    groups.join_alike(members(), MUTATION)


def _join_buffers(graph: OpGraph, groups: Groups, position: dict[str, int]) -> None:
    written = written_buffers(graph.ops)
    groups.join_alike(((fqn, i) for fqn, i in _users(graph) if fqn in written), BUFFER)
    latest: dict[str, int] = {}  # module -> its last op so far
    for i, op in enumerate(graph.ops):
        if op.buffers_written and not graph.values[op.name].consumers:
            alone, beside = _computed_for(graph, i, position)
            before = latest.get(op.module_path) if beside is None else beside
            groups.join([*alone, *([] if before is None else [before])], BUFFER)
        latest[op.module_path] = i


def _join_without_gradient(graph: OpGraph, groups: Groups) -> None:
    """Parameters that no reader surely gives a gradient: copies of a parameter on other stages
    would send in every microbatch that they have none."""
    unsure = {
        fqn
        for fqn, info in graph.tensors.items()
        if info.kind == "parameter" and info.requires_grad
    }
    for op in graph.ops:
        if has_gradient(graph, (op.name, *op.mutates)):
            unsure.difference_update(op.used_tensors)
    groups.join_alike(((fqn, i) for fqn, i in _users(graph) if fqn in unsure), NO_GRADIENT)


def _computed_for(graph: OpGraph, i: int, position: dict[str, int]) -> tuple[set[int], int | None]:
    """Ops that only a write into a buffer needs, and the last op that something else needs too.

    Evaluation reads the buffer where training has that op's result: were it written on a later
    stage, what follows in evaluation could not be where training has it.  A counter that reads
    nothing is with the op before it in its module.
    """
    alone: set[int] = set()
    beside: int | None = None
    waiting = [-i]  # negative: consumers come before what they read
    while waiting:
        at = -heappop(waiting)
        if at in alone or at == beside:
            continue
        op = graph.ops[at]
        if all(position[name] in alone for name in graph.values[op.name].consumers):
            alone.add(at)
            for name in op.inputs:
                if name in position:
                    heappush(waiting, -position[name])
        elif beside is None:
            beside = at
    return alone, beside


def _join_calls(graph: OpGraph, groups: Groups, position: dict[str, int]) -> None:
    for i, op in enumerate(graph.ops):
        if op.target == CHECK:
            groups.join([i, *_checked(graph, op, position)], CHECKED)
        if op.target.rsplit(".", 1)[-1] in _FLAGS:
            groups.join([i, *(position[n] for n in op.inputs[:1] if n in position)], HOOK)
        if op.target == GRADIENT:
            _join_gradient(graph, groups, position, i)
    calls = ((op.module_path, i) for i, op in enumerate(graph.ops) if op.kind == "opaque")
    groups.join_alike(calls, OPAQUE)


def _checked(graph: OpGraph, check: Op, position: dict[str, int]) -> list[int]:
    """The ops that only work for a check: a stage makes it where its values are."""
    found: list[int] = []
    names = list(check.inputs)
    while len(names) == 1 and names[0] in position:
        value = graph.values[names[0]]
        if value.requires_grad or len(value.consumers) > 1:
            break
        found.append(position[value.name])
        names = list(graph.ops[position[value.name]].inputs)
    return found


def _join_gradient(graph: OpGraph, groups: Groups, position: dict[str, int], i: int) -> None:
    """The ops between what is differentiated and what by: autograd has to see all of them.

    They begin where forward itself marks a tensor, or where a parameter makes one that needs a
    gradient: in evaluation nothing that a stage receives does.  A gradient that is differentiated
    again adds summands for what those ops read, and does it before earlier readers in the middle
    of the span do: these stay here for eager's order.
    """
    op = graph.ops[i]
    by = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("inputs")
    start = {ref.name for ref in walk(by, Ref)} | {attr.fqn for attr in walk(by, Attr)}
    behind = set(start)
    for earlier in reversed(graph.ops[:i]):
        if earlier.name in behind:
            behind.update(earlier.inputs)
            start |= {earlier.name} if earlier.target == "requires_grad_" else set()
    reached, span = set(start), [i]
    for at, earlier in enumerate(graph.ops[:i]):
        if reached.intersection(_reads(earlier)):
            reached.update((earlier.name, *earlier.mutates))
            span.append(at)
    made = {at for name in start for at in _from_a_parameter(graph, position, name)}
    read = {name for at in span for name in _reads(graph.ops[at])}
    first = min(span)
    beside = [
        at
        for at, other in enumerate(graph.ops[first:i], start=first)
        if read.intersection(name for name in _reads(other) if _has_gradient(graph, name))
    ]
    groups.join(sorted({*span, *made, *beside}), GRAD)


def _from_a_parameter(graph: OpGraph, position: dict[str, int], name: str) -> list[int]:
    """The ops on the shortest way to this value from a tensor that needs a gradient by itself."""
    ways = [[name]] if name in position else []
    seen = {name}
    for way in ways:  # grows meanwhile
        op = graph.ops[position[way[-1]]]
        own = any(fqn in graph.tensors and graph.tensors[fqn].requires_grad for fqn in _reads(op))
        if own or op.target == "requires_grad_":
            return [position[one] for one in way]
        inputs = [i for i in op.inputs if i in position and i not in seen]
        seen.update(inputs)
        ways += [[*way, i] for i in inputs if not _is_cut_off(graph, i)]
    return [position[name]] if name in position else []


def _is_cut_off(graph: OpGraph, name: str) -> bool:
    value = graph.values[name]
    return value.is_tensor and not value.requires_grad


def _reads(op: Op) -> tuple[str, ...]:
    return (*op.inputs, *op.attributes, *op.parameters)


def _has_gradient(graph: OpGraph, name: str) -> bool:
    value = graph.values.get(name)
    return value.needs_gradient if value is not None else name in graph.tensors


def _join_output(graph: OpGraph, groups: Groups, position: dict[str, int]) -> None:
    """The output is returned on the last stage, which makes the loss or the last of the output."""
    end = len(graph.ops)
    ends = [i for i, op in enumerate(graph.ops) if op.region == "loss"]
    if graph.loss in position:
        ends.append(position[graph.loss])
    if not ends:
        made = [position[r.name] for r in walk(graph.output, Ref) if r.name in position]
        ends = [max(made)] if made else ([end - 1] if end else [])
    groups.join([end, *ends], OUTPUT)


def join_sparse(graph: OpGraph, groups: Groups, position: dict[str, int]) -> None:
    """Keep sparse gradients off the edges between stages.

    What a stage sends of a tied parameter is the sum over its own readers and later ones, which
    is dense where one of them gives a dense gradient.  So a reader that makes a sparse one stays
    with another reader, unless it comes before one that makes a dense one.
    """
    sparse = [i for i, op in enumerate(graph.ops) if makes_sparse(op)]
    if not sparse:
        return
    inputs = [[position[n] for n in op.inputs if n in position] for op in graph.ops]
    ancestors = reachable(inputs, from_end=False)
    for i in sparse:
        found = [n for n in graph.ops[i].inputs if n in position]
        made = [position[n] for n in found if graph.values[n].needs_gradient]
        groups.join([i, *made], SPARSE)
    for readers in trained_readers(graph).values():
        dense = [i for i in readers if i not in sparse]
        for i in readers:
            if i in sparse and not any(ancestors[other] >> i & 1 for other in dense):
                groups.join([i, dense[-1] if dense else readers[0]], SPARSE)


def join_users(graph: OpGraph, groups: Groups) -> None:
    """Join all ops that use a trained parameter."""
    users = ((fqn, i) for fqn, i in _users(graph) if graph.tensors[fqn].requires_grad)
    groups.join_alike(users, AGE)


def _users(graph: OpGraph) -> Iterator[tuple[str, int]]:
    """Names of tensors, each with every op that uses it."""
    return ((fqn, i) for i, op in enumerate(graph.ops) for fqn in op.used_tensors)


# Ops that run in the lower precision; views of a weight are cast anew each time.
_CASTING = frozenset((
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "einsum",
    "bilinear", "conv1d", "conv2d", "conv3d", "convtranspose1d", "convtranspose2d",
    "convtranspose3d", "convtbc", "chainmatmul", "multidot", "scaleddotproductattention",
    "multiheadattention", "multiheadattentionforward", "lstm", "gru", "rnn", "lstmcell",
    "grucell", "rnncell", "rnntanhcell", "rnnrelucell", "prelu", "vecdot", "tensordot",
))  # fmt: skip


def join_casts(graph: OpGraph, groups: Groups) -> None:
    """Join the ops that share a weight's cast: its gradients are summed in the lower precision
    before they are cast back, which two stages, each with a cast of its own, would not do."""
    users = (
        ((graph.ops[i].autocast, fqn), i)
        for fqn, i in _users(graph)
        if _casts(graph.ops[i])
        and graph.tensors[fqn].requires_grad
        and graph.tensors[fqn].dtype == "float32"
    )
    groups.join_alike(users, CAST)


def _casts(op: Op) -> bool:
    on = op.autocast is not None and not op.autocast.endswith(":off")
    return on and (op.opaque or op.target.rpartition(".")[2].lower().replace("_", "") in _CASTING)
