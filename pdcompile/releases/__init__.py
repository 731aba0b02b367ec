"""Releases of torch and of other packages: which are taken, what differs between them,
and what goes by the internals of torch."""
