"""Stages of a cut: the plan over ops, what crosses boundaries, arguments and names."""
