"""The planner's benchmark, one section a module; `benchmarks/planner.py` runs them."""
