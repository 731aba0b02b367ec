"""Reports as a page of Markdown, and in a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.zoo.check import MAX_OPAQUE_FLOPS, RESULTS, Report
from tests.zoo.models import ENTRIES

TOO_OPAQUE = "too much opaque"  # an exact result that does not count
Peers = Mapping[str, Mapping[str, tuple[str, str]]]


def summary(reports: Sequence[Report], peers: Peers) -> str:
    """Summary: how many pass, by result, and how other front ends do on the same models."""
    passed = sum(report.passed for report in reports)
    results = [_result(report) for report in reports]
    counts = {name: results.count(name) for name in (RESULTS[0], TOO_OPAQUE, *RESULTS[1:])}
    lines = [
        f"{passed} of {len(reports)} models pass ({passed / max(len(reports), 1):.1%}): "
        + ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    ]
    listed = [r for r in reports if "pippy" in ENTRIES[r.name].lists]
    if listed:
        lines.append(f"of PiPPy's list {sum(r.passed for r in listed)} of {len(listed)}")
    for name in next(iter(peers.values()), {}):
        found = [peer[name][0] for peer in peers.values()]
        shown = ", ".join(f"{found.count(k)} {k}" for k in ("exact", "wrong", "refused"))
        lines.append(f"{name}: {shown} of {len(found)}")
    return "\n".join(lines)


def page(reports: Sequence[Report], peers: Peers, *, quick: bool) -> str:
    """benchmarks/results/coverage.md."""
    fronts = tuple(next(iter(peers.values()), {}))
    lines = [
        "# Coverage",
        "",
        "Real architectures, small and with random weights, from the list in `tests/zoo`. Made by "
        f"`python benchmarks/coverage.py{' --quick' if quick else ''}"
        f"{' --peers FILE' if fronts else ''} --write`.",
        "",
        "A model **passes** when every cut into 2, 3 and 4 stages (the planner's, random ones in "
        "the model's order, and random ones in a shuffled order) gives what "
        "`pdcompile.reference` gives (eager; of a weight on several stages each stage's gradients "
        "are accumulated apart), to the "
        "last bit: losses, outputs, the gradient of every parameter, buffers and updated "
        "parameters, over two training minibatches of two microbatches with dropout and one "
        "evaluation"
        + ("" if quick else ", and the planner's cuts again without dropout")
        + f". Opaque modules may hold at most {MAX_OPAQUE_FLOPS:.0%} of the FLOPs in "
        "all and an eighth of the parameters each.",
        "",
        "Other results: *refused* by an error that names the line; *crashed* with an error that is "
        "not ours; *caught*: different from eager, and `verify` says so before the first step; "
        "*silent*: different, and nothing says so.",
        "",
        *(f"{line}." for line in summary(reports, peers).splitlines()),
        "",
    ]
    if fronts:
        lines += [
            "The other front ends run the same models in one process and one minibatch (torch's "
            "pipelining cut once, in the middle), judged by the same rule: outputs, loss and "
            "gradients equal to eager's.",
            "",
        ]
    for family in dict.fromkeys(report.family for report in reports):
        own = [report for report in reports if report.family == family]
        heads = ["model", "result", "ops", "opaque", "cuts", *fronts, "why not"]
        lines += [f"## {family[0].upper()}{family[1:]}", "", _row(heads)]
        lines += [_row(["---"] * len(heads))]
        for report in own:
            others = [peers.get(report.name, {}).get(front, ("", ""))[0] for front in fronts]
            lines.append(_row([*_cells(report), *others, _why(report)]))
        lines.append("")
    return "\n".join(lines)


def _cells(report: Report) -> list[str]:
    exact = sum(cut.result == "exact" for cut in report.cuts)
    whole = ""
    if report.opaque:
        whole = f"{report.opaque_flops:.0%} of FLOPs, {report.opaque_parameters:.0%} of parameters"
    ops = f"{report.train_ops} / {report.eval_ops}" if report.train_ops else ""
    cuts = f"{exact} of {len(report.cuts)}" if report.cuts else ""
    return [report.name, _result(report), ops, whole, cuts]


def _result(report: Report) -> str:
    return report.result if report.passed or report.result != "exact" else TOO_OPAQUE


def _why(report: Report) -> str:
    if report.result == "exact":
        return ""
    where = f" ({report.where})" if report.where else ""
    return f"{report.failed_step or report.step}: {report.detail}{where}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
