"""docs/planner.md: the method, and every table with the command that prints it."""

from __future__ import annotations

from collections.abc import Sequence

from planning.tables import Table

TEXT = """\
# The planner

This page is written by `python benchmarks/planner.py --write docs/planner.md`. Every table names the
command that prints it; a figure in the text is quoted from the table next to it. Inputs are those of
their authors and lie outside this repository (`PDCOMPILE_REFERENCE`). "gap" is (objective − lower
bound) / objective; **0 means proved optimal**, up to 1e-5 for integer rounding. CPU seconds are user
and system time of a fresh process on one core, the interpreter's start included; MB is its peak
resident memory.

## Method

A plan is a monotone map from a graph to the stages of a pipeline. All kinds of problems go through the
same steps:

1. **Reduce** what no optimal plan can tell apart: nodes that must share a stage become one group,
   order edges are reduced to the necessary ones, values with the same set of users become one value.
   Each reduction is a property test: the optimum before and after is the same.
2. **Find a plan** by dynamic programming. Where the graph has few down-closed sets (a chain, or nearly
   one) over all of them, which is exact; otherwise over many linear orders of it, and the best counts.
3. **Bound and prove.** Work that precedes and follows a node limits the stages on which it can be;
   what is left is an integer program in *stage thresholds*, x[v,k] = (stage of v ≥ k), solved by
   CP-SAT with the plan of step 2 as its upper bound. Weights are rounded down to integers at a scale
   that is a power of two, so a bound of the rounded problem is one of the problem itself.
4. **Check.** The answer is computed again by a module that shares no code with the search, straight
   from the file's own numbers. That value is the objective that is printed.

`--time-limit` and Ctrl-C end the search with the best plan so far; its gap is then what was proved by
then. Equal seeds give equal answers as long as neither happens.

## Device placement

{placement}

The objective is the largest load of a device, as the paper defines it: work, and each value that crosses
the device's border once. The published seconds are those of the authors' exact dynamic program; it counts
every down-closed set, and its time grows with their number ({placement_slowest} is where they are many).
Start-up is {startup_seconds:.2f} CPU s of each figure here, {startup_with_solver_seconds:.2f} when OR-Tools is needed. Our objectives differ
from the published ones by at most {worst_relative_difference:.1e} (relative), which is the digits that were published.

## PipeDream's profiles

PipeDream's optimizer is a dynamic program over antichains and levels of bandwidth. Its cost model is
reproduced exactly: all-reduce added to compute, not overlapped; transfers over a boundary a term of their
own; the objective is the slowest of all. The question is then only who finds the better plan.

{pipedream_summary}

{pipedream_text}

With a memory limit there is nothing to compare: the published option accepts plans that do not fit.
{memory_text}

{memory}

All rows:

<details>

{pipedream}

</details>

## The papers' table

What PipeDream's paper reports is measured on real clusters; what follows is predicted, ours and its
optimizer's, from the profiles that its authors published, with data-parallel (one stage on all workers) in
the same cost model. So configurations can be compared, and speed-ups only in kind.

{papers_profiles}

{papers}

{papers_text}

{papers_bandwidths}

{bandwidths_text}

{papers_straight}

{straight_text}

## Piper's BERT-32

{piper}

{piper_text}

## Scale

{scale}

{scale_text}

## Our own problems

{own}

{own_text}

## Random problems

{random}

{random_text}
"""
