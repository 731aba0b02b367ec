"""Planners of problems that other people published: device placement, PipeDream, Piper.

    python -m benchmarks.published plan --import piper bert32.json --devices 64

Each family has a module with the problem, the reader of its files and the evaluator that no search
shares code with (``…_model``), and a folder with its search, on the engine of the planner
(`pdcompile.passes.partition`): down-closed sets and orders (`lattice`), chains of choices and
bisection (`chain_program`).
"""
