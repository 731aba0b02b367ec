"""Releases of torch and of other packages: which are taken, and what differs between them."""
