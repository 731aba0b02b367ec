"""The OpGraph: what a model computes, as data, as text and JSON, and as a torch module."""
