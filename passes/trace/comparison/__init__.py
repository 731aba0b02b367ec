"""Graph and eager model, compared bit for bit."""
