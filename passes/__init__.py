"""Passes: pure functions, one frozen data structure in, the next out."""
