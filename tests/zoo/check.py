"""One model of the zoo through the whole compiler: is every cut the model, to the last bit?

    python -m tests.zoo.check gpt2 t5          # in this process, one line each

What is compared: two training minibatches of two microbatches and one evaluation, generated
stages on the runtime in one process against `pdcompile.reference`: losses, outputs, all
gradients, buffers and parameters.
"""

from __future__ import annotations

import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from pdcompile import reference
from pdcompile.batch import BatchLayout, FlatCall, example_call, resize, resolve_batch
from pdcompile.compiled import Compiled
from pdcompile.driver import make_plan
from pdcompile.errors import PdcompileError, VerifyError
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Sources
from pdcompile.layout_search import LayoutSearch
from pdcompile.options import Options
from pdcompile.options.configuration import configure
from pdcompile.pass_runner import PassRunner
from pdcompile.passes import codegen
from pdcompile.passes.check import check as prove
from pdcompile.passes.stages import boundaries
from pdcompile.passes.trace import capture
from pdcompile.passes.verify import verify
from pdcompile.plan import Plan
from pdcompile.planner import Planner
from pdcompile.runtime.pipeline import Pipeline
from tests.helpers.fidelity import compare
from tests.zoo.case import BATCH, Case, Entry, build
from tests.zoo.random_cuts import random_cut
from tests.zoo.shares import largest_opaque_parameters, opaque_flops, opaque_paths
from tests.zoo.trajectory import Trajectory, differences, follow

MICROBATCHES = 2
DROPOUT = 0.1
MAX_OPAQUE_FLOPS = 0.1
MAX_OPAQUE_PARAMETERS = 1 / 8

# From best to worst; a model has the worst result of its cuts.
RESULTS = ("exact", "refused", "crashed", "caught", "silent")


@dataclass(slots=True)
class Cut:
    """One way of cutting and what came of it."""

    stages: int
    kind: str  # planner | random | shuffled
    dropout: bool
    result: str = "exact"
    detail: str = ""


@dataclass(slots=True)
class Report:
    """Everything that is known about one model.

    result: ``exact``; ``refused`` by an error of ours; ``crashed`` by any other; ``caught``:
    different from eager, and verify says so; ``silent``: different, and verify does not.
    """

    name: str
    family: str
    result: str = "exact"
    step: str = "build"  # how far it came: build, eager, capture, compare, plan, generate, run
    failed_step: str = ""  # where the worst result came from
    detail: str = ""
    where: str = ""
    parameters: int = 0
    train_ops: int = 0
    eval_ops: int = 0
    opaque: tuple[str, ...] = ()
    opaque_flops: float = 0.0
    opaque_parameters: float = 0.0
    cuts: list[Cut] = field(default_factory=list)
    cpu_seconds: float = 0.0

    @property
    def captured(self) -> bool:
        """Capture under the rule that little may be opaque."""
        return (
            self.train_ops > 0
            and self.opaque_flops <= MAX_OPAQUE_FLOPS
            and self.opaque_parameters <= MAX_OPAQUE_PARAMETERS
        )

    @property
    def passed(self) -> bool:
        return self.captured and self.result == "exact"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        cuts = [Cut(**cut) for cut in data.pop("cuts")]
        return Report(**{**data, "opaque": tuple(data["opaque"])}, cuts=cuts)

    def line(self) -> str:
        share = f"opaque {self.opaque_flops:.0%}" if self.opaque else ""
        cuts = f"{sum(c.result == 'exact' for c in self.cuts)}/{len(self.cuts)} cuts"
        head = f"{self.result:8} {self.name:28} {self.train_ops:5} ops {cuts:11} {share}"
        why = f"{self.failed_step or self.step}: {self.detail}" if self.result != "exact" else ""
        return f"{head} {why} {f'@ {self.where}' if self.where else ''}".rstrip()


def check(
    entry: Entry, *, thorough: bool = True, progress: Callable[[Report], None] = lambda r: None
) -> Report:
    """Build the model and try it.

    thorough: planner's cut and three random ones into 2, 3 and 4 stages, and the planner's again
    without dropout; otherwise the planner's cuts and two random ones, with dropout.
    progress: called before every step, so that a process that dies has said where it was.
    """
    report = Report(entry.name, entry.family)
    started = time.process_time()
    with _failures(report):
        for dropout in (DROPOUT, 0.0) if thorough else (DROPOUT,):
            _check_case(report, build(entry, dropout), dropout > 0, thorough, progress)
    report.cpu_seconds = round(time.process_time() - started, 1)
    return report


def _check_case(
    report: Report,
    case: Case,
    dropout: bool,
    thorough: bool,
    progress: Callable[[Report], None],
) -> None:
    def enter(step: str) -> None:
        report.step = step
        progress(report)

    enter("build")
    report.parameters = sum(p.numel() for p in case.model.parameters())
    options = Options(
        loss_fn=case.loss_fn,
        optimizer=None,
        microbatches=MICROBATCHES,
        costs="estimated",
        outputs="all",
        time_limit=0,  # the best cut that is found at once; its proof is of no interest here
        batch_dims=case.batch_dims,
        keep_model=True,
    )
    enter("eager")
    alone = partial(
        reference, case.model, loss_fn=case.loss_fn, optimizer=None, microbatches=MICROBATCHES,
        batch_dims=case.batch_dims, keep_model=True,
    )  # fmt: skip
    expected = follow(alone(), case)
    if not expected.finite:
        raise ArithmeticError("eager itself gives values that are not finite")
    enter("capture")
    flat = example_call(case.model, case.inputs(0), case.target(0))
    layout = resolve_batch(flat, case.batch_dims)
    found = capture(case.model, flat, layout, case.loss_fn, microbatch_size=BATCH // MICROBATCHES)
    report.train_ops, report.eval_ops = len(found.train.ops), len(found.eval.ops)
    report.opaque = opaque_paths(found)
    report.opaque_flops = opaque_flops(case, report.opaque)
    report.opaque_parameters = largest_opaque_parameters(case.model, report.opaque)
    enter("compare")
    size = layout.size if found.train.sizes.holds(layout.size) else found.train.batch_size
    call = resize(flat, layout, size) if layout.splits else flat
    compare(case.model, found, call, replace(layout, size=size))
    for cut, make in _cuts(report.name, case, found, options, dropout, thorough):
        with _failures(report, cut):
            enter("plan")
            plan = make()
            if plan is None:
                continue
            enter("generate")
            sources = codegen.generate(found, plan)
            enter("run")
            # Each stage accumulates the gradients of its own uses of a tied weight.
            wanted = follow(alone(plan=plan), case) if plan.tied else expected
            lines = differences(wanted, _run(case, options, found, plan, sources, layout))
            if lines:
                cut.result = _verified(case, found, plan, sources, flat, layout)
                cut.detail = f"{lines[0]} (and {len(lines) - 1} more)"
                _note(report, cut.result, cut.detail, f"{cut.kind} cut into {cut.stages}")
        report.cuts.append(cut)


def _cuts(
    name: str, case: Case, found: Capture, options: Options, dropout: bool, thorough: bool
) -> Iterator[tuple[Cut, Callable[[], Plan | None]]]:
    for stages in (2, 3, 4):
        randoms = ["random", "random", "shuffled"] if thorough else ["random", "shuffled"]
        if not dropout or not (thorough or stages == 3):
            randoms = []
        yield (
            Cut(stages, "planner", dropout),
            partial(_planned, case, found, options, stages),
        )
        for i, kind in enumerate(randoms):
            seed = zlib.crc32(f"{name} {stages} {i}".encode())
            make = partial(random_cut, found, stages, BATCH, MICROBATCHES, seed)
            yield Cut(stages, kind, dropout), partial(make, shuffled=kind == "shuffled")


def _planned(case: Case, found: Capture, options: Options, stages: int) -> Plan:
    own = replace(options, stages=stages)
    chosen = configure(own, batch_size=BATCH, splits=True, num_ranks=None)
    flat = example_call(case.model, case.inputs(0), case.target(0))
    layout = resolve_batch(flat, case.batch_dims)
    microbatch = partial(resize, flat, layout) if layout.splits else lambda _: flat
    step = PassRunner()
    planner = Planner(case.model, found, own, chosen, step.listener)
    return make_plan(planner, microbatch, step, LayoutSearch(False, step.listener))


def _run(
    case: Case,
    options: Options,
    found: Capture,
    plan: Plan,
    sources: Sources,
    layout: BatchLayout,
) -> Trajectory:
    eval_edges = boundaries.eval_edges(found, plan, BATCH // MICROBATCHES)
    compiled = Compiled(found, plan, sources, eval_edges, layout, prove(plan))
    with Pipeline(case.model, options, lambda *_: compiled, (None, None)) as pipe:
        return follow(pipe, case)


def _verified(
    case: Case, found: Capture, plan: Plan, sources: Sources, flat: FlatCall, layout: BatchLayout
) -> str:
    """Whether verify notices what differs."""
    try:
        report = verify(found, plan, sources, case.model, flat, layout, case.loss_fn)
    except VerifyError:
        return "caught"
    return "silent" if report.exact else "caught"  # it says: equal up to rounding


@contextmanager
def _failures(report: Report, cut: Cut | None = None) -> Iterator[None]:
    """Turn what is raised into a result of the report, and of the cut in which it happened."""
    try:
        yield
    except PdcompileError as error:
        caught = isinstance(error, VerifyError) and report.step == "compare"
        result, detail = "caught" if caught else "refused", error.message.splitlines()[0]
        where = error.where or ""
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        first = (str(error).splitlines() or [""])[0]
        result, detail, where = "crashed", f"{type(error).__name__}: {first}", _place(frame)
    else:
        return
    if cut is not None:
        cut.result, cut.detail = result, detail
    _note(report, result, detail, where)


def _note(report: Report, result: str, detail: str, where: str) -> None:
    """Keep the worst result."""
    if RESULTS.index(result) > RESULTS.index(report.result):
        report.result, report.detail, report.where = result, detail, where
        report.failed_step = report.step


def _place(frame: traceback.FrameSummary) -> str:
    return f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno}"


def main(names: list[str]) -> int:
    """Check the named models in this process, one after another."""
    from tests.zoo.models import chosen

    worst = 0
    for entry in chosen(tuple(names)):
        report = check(entry)
        print(report.line(), flush=True)
        worst |= not report.passed
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
