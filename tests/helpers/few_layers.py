"""A target of verbs: the example of a model on the meta device, with two layers."""

from __future__ import annotations

from examples.llama import build_tiny
from pdcompile import Workload


def build() -> Workload:
    return build_tiny(layers=2)
