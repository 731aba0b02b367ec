"""Walk successive programs with tokens: local rules rank by rank, then all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy

from pdcompile.errors import DeadlockError, ScheduleError
from pdcompile.passes.check.exchange import Exchange, shortest_cycle, waited_for
from pdcompile.passes.check.tokens import Tokens
from pdcompile.passes.check.transfers import Violation
from pdcompile.schedule import Action, Instruction, Kind, Phase, Schedule
from pdcompile.schedule.instruction import TRANSFERS
from pdcompile.schedule.program import side_by_side
from pdcompile.schedule.spec import Broadcast, PipelineSpec

STEP, FLUSH, GRADIENTS, REFRESH = "", "+flush", "+gradients", "+refresh"
EVALUATION, NORMS, BUFFERS, BROADCAST = "+eval", "+norms", "+buffers", "+broadcast"
PROGRAMS = (STEP, FLUSH, GRADIENTS, REFRESH, EVALUATION, NORMS, BUFFERS, BROADCAST)
RADIUS = 3  # instructions of an excerpt, before and after
MAX_RANKS = 4
COLLECTIVES = {NORMS: Kind.NORMS, BUFFERS: Kind.BUFFERS}  # programs of one exchange and no more


class Walk:
    """The token state of all ranks between programs; `run` proves one more program."""

    def __init__(
        self,
        spec: PipelineSpec,
        *,
        ordered: bool = False,
        forward_only: bool = False,
        minibatches: int = 0,
    ):
        """After so many minibatches, with nothing in flight."""
        self.spec = spec
        self.forward_only = forward_only
        self.tokens: dict[int, dict[int, Tokens]] = {}
        for rank, stages in spec.holders:
            for s in stages:
                made = Tokens(
                    spec, s, spec.ranks[s].index(rank), forward_only=forward_only, puts_off=ordered
                )
                made.begin(minibatches)
                self.tokens.setdefault(rank, {})[s] = made
        self.exchange = Exchange(spec, ordered=ordered)
        self.base = minibatches  # calls of step so far
        self.num_programs = 0
        self.num_instructions = 0

    def run(self, program: Schedule, broadcasts: Sequence[Broadcast] = ()) -> None:
        """Prove one more program, which shares by `broadcasts` what is not computed in it.

        Raises:
            DeadlockError: some ranks wait for each other; carries the shortest cycle.
            ScheduleError: any other broken rule, with rank, instruction and excerpt.
        """
        kind = program.name.removeprefix(self.spec.name)
        if kind not in PROGRAMS or (kind == EVALUATION) != self.forward_only:
            raise ScheduleError(
                f"program {program.name!r} does not belong to schedule {self.spec.name!r}"
            )
        if len(program.columns) != self.spec.num_ranks:
            raise ScheduleError(
                f"{program.name} has {len(program.columns)} columns for {self.spec.num_ranks} ranks"
            )
        for _, tokens in self.each() if kind == REFRESH else ():
            tokens.made(tokens.weights_out, (tokens.steps - 1, -1))
        for rank, column in enumerate(program.columns):
            self._run_column(program, rank, column)
        try:
            self.exchange.run(program, self.base)
            if self.exchange.walk.standing:
                raise self._deadlock(program)
            count = self._coverage() if kind in (STEP, GRADIENTS, EVALUATION) else 0
            tells = any(tokens.loss_after for _, tokens in self.each())
            losses = self.spec.losses(count, self.base) if tells else []
            self.exchange.expect([*broadcasts, *losses], COLLECTIVES.get(kind))
            self._end(program, kind)
        except Violation as error:
            raise self._error(program, error.rank, error.position, str(error)) from None
        self.num_programs += 1
        self.num_instructions += sum(map(len, program.columns))
        if kind == STEP:
            self.base += 1

    def _end(self, program: Schedule, kind: str) -> None:
        drained = kind != STEP or not self.spec.kind.stream
        base, updates = self.base + (kind == STEP), kind in (STEP, FLUSH)
        for rank, tokens in self.each():
            try:
                tokens.end_call(base, drained=drained, updates=updates)
            except Violation as error:
                message = f"at the end of the program: {error}"
                raise self._error(program, rank, -1, message) from None

    def copy(self) -> Walk:
        """The same state, to prove another continuation from it."""
        other = deepcopy(self, {id(self.spec): self.spec})
        other.num_programs = other.num_instructions = 0
        return other

    def each(self) -> Iterator[tuple[int, Tokens]]:
        """The tokens of every stage, with the rank that they are on."""
        for rank, held in self.tokens.items():
            for tokens in held.values():
                yield rank, tokens

    def state(self) -> tuple[object, ...]:
        """All that the future depends on, relative to the next call."""
        return (
            tuple(tokens.state(self.base) for _, tokens in self.each()),
            self.exchange.state(self.base),
        )

    def _run_column(self, program: Schedule, rank: int, column: tuple[Instruction, ...]) -> None:
        held = self.tokens.get(rank, {})
        position, base = 0, self.base
        try:
            for position, one in enumerate(column):  # noqa: B007  (read in the handler)
                tokens = held.get(one.stage)
                if tokens is None:
                    self._of_rank(program, one, bool(held))
                    continue
                tokens.do(one, base)
                if len(held) > 1 and one.action.kind is Kind.NORMS:
                    for other in held.values():  # the norms are those of the whole rank
                        if other is not tokens:
                            other.do(one, base)
        except Violation as error:
            raise self._error(program, rank, position, str(error)) from None

    def _of_rank(self, program: Schedule, one: Instruction, holds: bool) -> None:
        """Check what is about no stage: broadcasts, the user's norms, losses where none is."""
        kind = one.action.kind
        shares = one.stage == -1 and one.action.phase is not Phase.LOCAL and kind not in TRANSFERS
        if kind is Kind.NORMS:
            shares = shares and program.name.endswith(NORMS)
        elif kind is Kind.LOSS:
            shares = shares and not holds and one.action is Action.HEAR_LOSS
        if not shares or one.minibatch or one.target >= 0:
            raise Violation(f"stage {one.stage} does not run on this rank")

    def _coverage(self) -> int:
        """Every microbatch forward once on every stage (backward: nothing is left over)."""
        done = [
            sorted(i for rank in ranks for i in self.tokens[rank][stage].done)
            for stage, ranks in enumerate(self.spec.ranks)
        ]
        most = max((one[-1] for one in done if one), default=-1) + 1
        for stage, one in enumerate(done):
            wrong = [i for i in range(most) if one.count(i) != 1] if one != [*range(most)] else []
            if wrong or most == 0:
                times = one.count(wrong[0]) if wrong else 0
                raise Violation(
                    f"stage {stage} runs forward of microbatch {wrong[0] if wrong else 0} "
                    f"{times} times, expected once",
                    self.spec.ranks[stage][0],
                )
        return most

    def _error(self, program: Schedule, rank: int, position: int, message: str) -> ScheduleError:
        column = program.columns[rank]
        position = position % len(column) if column else 0
        named = f" ({column[position]})" if column else ""
        return ScheduleError(
            f"rank {rank}, instruction {position}{named}: {message}",
            where=f"{program.name}, program {self.num_programs}\n"
            + excerpt(program, {rank: position}),
        )

    def _deadlock(self, program: Schedule) -> DeadlockError:
        standing = self.exchange.walk.standing
        cycle = shortest_cycle({rank: waited_for(*one) for rank, one in standing.items()})
        links, marks = [], {}
        for rank in cycle:
            link = f"rank {rank} ({self._stage(rank)})"
            if rank in standing:
                step, _ = standing[rank]
                links.append(f"{link} at {step.one}, {_of(step.one)}")
                marks[rank] = step.position
            else:
                links.append(f"{link}, which has finished")
                marks[rank] = max(0, len(program.columns[rank]) - 1)
        if cycle[-1] in standing:
            links.append(f"rank {cycle[0]}")
        return DeadlockError(
            "deadlock: " + " waits for ".join(links),
            where=f"{program.name}, program {self.num_programs}\n" + excerpt(program, marks),
        )

    def _stage(self, rank: int) -> str:
        stages = list(self.tokens.get(rank, ()))
        return f"stage {', '.join(map(str, stages))}" if stages else "no stage"


def _of(one: Instruction) -> str:
    where = f"minibatch {one.minibatch:+d}" if one.minibatch else "this minibatch"
    return f"microbatch {one.microbatch} of {where}" if one.microbatch >= 0 else where


def excerpt(schedule: Schedule, marks: Mapping[int, int]) -> str:
    """The instructions around `marks` (rank → index in its column), one column a rank."""
    ranks = sorted(marks)[:MAX_RANKS]
    cells = []
    for rank in ranks:
        column, mark = schedule.columns[rank], marks[rank]
        cell = [f"rank {rank}"]
        for index in range(mark - RADIUS, mark + RADIUS + 1):
            text = f"{index}: {column[index]}" if 0 <= index < len(column) else ""
            cell.append(text + " <-- here" if index == mark else text)
        cells.append(cell)
    lines = [f"  {row}" for row in side_by_side(cells)]
    if len(marks) > MAX_RANKS:
        lines.append(f"  … and {len(marks) - MAX_RANKS} more ranks")
    return "\n".join(line.rstrip() for line in lines)
