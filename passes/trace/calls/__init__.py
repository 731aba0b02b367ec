"""State that calls of a model leave behind, and whether later calls depend on it."""
