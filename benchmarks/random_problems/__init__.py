"""Families of random small problems for `benchmarks/sweep.py`."""
