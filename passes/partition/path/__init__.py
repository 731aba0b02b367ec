"""Flush schedules of almost-chains: bounds and plans along the heaviest path of a model."""
