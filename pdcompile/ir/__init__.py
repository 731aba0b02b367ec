"""The OpGraph: a model's computation as data, as text and JSON, and as a torch module."""
