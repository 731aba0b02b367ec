"""The planner's space beyond the straight cut: replicas, recomputation, warm-up, placement."""
