"""``python -m benchmarks.published``."""

from benchmarks.published.command import NAME, app
from pdcompile.cli import main

main(verbs=app, name=NAME)
