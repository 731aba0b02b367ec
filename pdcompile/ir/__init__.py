"""What the model computes: the OpGraph, its text and JSON, and the torch module made of it."""
