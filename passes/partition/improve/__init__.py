"""Changes of a plan, many at a time, that make it better."""
