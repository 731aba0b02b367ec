"""Profiles in PipeDream's format, like those of networks that lie in no folder here.

Shapes of graph and proportions of numbers follow the networks; the numbers are drawn.
"""

from __future__ import annotations

import random

MB = 1e6


class Writer:
    """Collects node and edge lines; `text()` is a graph.txt."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes: list[str] = []
        self.edges: list[str] = []

    def add(
        self,
        description: str,
        inputs: list[str],
        *,
        time: float = 0.0,
        activation: float = 0.0,
        parameters: float = 0.0,
        parts: tuple[float, ...] = (),
    ) -> str:
        """A node of about `time` milliseconds; `parts`: sizes of a tuple's entries."""
        name = f"node{len(self.nodes) + 1}"
        forward = round(time * self.random.uniform(0.25, 0.4), 3)
        backward = round(time * self.random.uniform(0.5, 0.8), 3)
        size = f"[{'; '.join(map(str, parts))}]" if parts else f"{activation:.1f}"
        self.nodes.append(
            f"{name} -- {description} -- forward_compute_time={forward:.3f}, "
            f"backward_compute_time={backward:.3f}, activation_size={size}, "
            f"parameter_size={parameters:.3f}"
        )
        self.edges.extend(f"\t{source} -- {name}" for source in inputs)
        return name

    def text(self) -> str:
        return "\n".join(self.nodes + self.edges)

    def conv(self, source: str, time: float, activation: float, parameters: float) -> str:
        """Convolution, batch norm, ReLU."""
        conv = self.add(
            "Conv2d(3x3)", [source], time=time, activation=activation, parameters=parameters
        )
        norm = self.add(
            "BatchNorm2d", [conv], time=0.3 * time, activation=activation, parameters=4096
        )
        return self.add("ReLU(inplace)", [norm], time=0.15 * time, activation=activation)


def residual(blocks: int, seed: int = 1) -> str:
    """ResNet with bottleneck blocks; 33 of them are about a ResNet-101."""
    w = Writer(seed)
    at = w.conv(w.add("Input0", []), 20, 400 * MB, 4e4)
    for block in range(blocks):
        size = 200 * MB / (1 + 4 * block / blocks)
        inner = w.conv(at, 3, size / 4, 3e5 * (1 + block))
        inner = w.conv(inner, 6, size / 4, 9e5 * (1 + block))
        inner = w.add("Conv2d(1x1)", [inner], time=4, activation=size, parameters=3e5 * (1 + block))
        inner = w.add("BatchNorm2d", [inner], time=2, activation=size, parameters=8192)
        side = at
        if block % 8 == 0:
            side = w.add("Conv2d(1x1)", [at], time=3, activation=size, parameters=1e6)
            side = w.add("BatchNorm2d", [side], time=1.5, activation=size, parameters=8192)
        total = w.add("Add(inplace)", [inner, side], activation=size)
        at = w.add("ReLU(inplace)", [total], time=1, activation=size)
    at = w.add("AvgPool2d", [at], time=0.5, activation=1 * MB)
    w.add("Linear(2048, 1000)", [at], time=1, activation=0.5 * MB, parameters=8.2e6)
    return w.text()


def dense(layers: tuple[int, ...] = (6, 12, 24, 16), seed: int = 2) -> str:
    """DenseNet: every layer reads all layers of its block."""
    w = Writer(seed)
    at = w.conv(w.add("Input0", []), 10, 200 * MB, 4e4)
    for block, count in enumerate(layers):
        size = 60 * MB / 3**block
        at = w.add("BatchNorm2d", [at], time=1, activation=size * 2)
        for _ in range(count):
            inner = w.conv(at, 2, size, 2e5)
            inner = w.add("Conv2d(3x3)", [inner], time=3, activation=size / 4, parameters=1.5e5)
            at = w.add("Concat(1)", [at, inner], activation=size * 2)
            at = w.add("BatchNorm2d", [at], time=1, activation=size * 2, parameters=4e3)
        at = w.conv(at, 4, size, 5e5)
    w.add("Linear(1024, 1000)", [at], time=1, activation=0.5 * MB, parameters=4.1e6)
    return w.text()


def translation(encoders: int, decoders: int, seed: int = 3) -> str:
    """GNMT: LSTM layers with residuals, attention over the encoder for every decoder layer."""
    w = Writer(seed)
    source, target = w.add("Input0", []), w.add("Input1", [])
    size = 6.2 * MB
    at = w.add("Embedding", [source], time=7, activation=size, parameters=1.3e8)
    at = w.add("EmuBidirLSTM", [at], time=8, activation=2 * size, parameters=6.7e7)
    for layer in range(encoders):
        inner = w.add("Dropout(p=0.2)", [at], time=0.2, activation=size)
        lstm = w.add("LSTM(1024, 1024)", [inner], time=7, parts=(size, 1e5, 1e5), parameters=3.4e7)
        out = w.add("__getitem__(0)", [lstm], activation=size)
        w.add("__getitem__(1)", [lstm], activation=1e5)
        at = w.add("Add", [out, at], activation=size) if layer else out
    hidden = w.add("hidden", [])
    words = w.add("Embedding", [target], time=0.4, activation=size, parameters=1.3e8)
    entry = w.add("__getitem__(0)", [hidden])
    attention = w.add(
        "RecurrentAttention",
        [words, entry, at],
        time=10,
        parts=(size, 1e5, 1e5, size, 3e5),
        parameters=4.2e7,
    )
    out = w.add("__getitem__(0)", [attention], activation=size)
    w.add("__getitem__(1)", [attention], activation=1e5)
    context = w.add("__getitem__(2)", [attention], activation=1e5)
    for layer in range(decoders):
        inner = w.add("Dropout(p=0.2)", [out], time=0.2, activation=size)
        inner = w.add("Concat(2)", [inner, context], activation=size)
        state = w.add(f"__getitem__({layer + 1})", [hidden])
        lstm = w.add(
            "LSTM(2048, 1024)", [inner, state], time=8, parts=(size, 1e5, 1e5), parameters=5e7
        )
        fresh = w.add("__getitem__(0)", [lstm], activation=size)
        w.add("__getitem__(1)", [lstm], activation=1e5)
        out = w.add("Add", [fresh, out], activation=size) if layer else fresh
    w.add("Classifier", [out], time=7, activation=1.9e8, parameters=1.3e8)
    return w.text()


def inception(modules: int = 11, seed: int = 4) -> str:
    """Inception v3: modules of four branches, the last ones with branches that split again."""
    w = Writer(seed)
    at = w.add("Input0", [])
    for layer in range(5):
        at = w.conv(at, 12, 300 * MB / (1 + layer), 5e4 * (1 + layer))
    for module in range(modules):
        size = 60 * MB / (1 + module / 3)
        heavy = 3e5 * (1 + module)
        ends = [w.conv(at, 3, size, heavy)]
        for depth in (2, 3):
            inner = at
            for _ in range(depth):
                inner = w.conv(inner, 4, size, heavy)
            if module >= modules - 2:
                ends += [w.conv(inner, 3, size, heavy), w.conv(inner, 3, size, heavy)]
            else:
                ends.append(inner)
        pooled = w.add("AvgPool2d", [at], time=1, activation=size)
        ends.append(w.conv(pooled, 3, size, heavy))
        at = w.add("Concat(1)", ends, activation=size * len(ends))
    at = w.add("AvgPool2d", [at], time=1, activation=1 * MB)
    w.add("Linear(2048, 1000)", [at], time=1, activation=0.5 * MB, parameters=8.2e6)
    return w.text()


def cells(count: int = 12, seed: int = 5) -> str:
    """NASNet: every cell reads the two cells before it, so no node is on all paths."""
    w = Writer(seed)
    before = w.conv(w.add("Input0", []), 10, 100 * MB, 1e4)
    at = w.conv(before, 5, 80 * MB, 1e5)

    def separable(source: str, size: float, heavy: float) -> str:
        for _ in range(2):
            source = w.add("ReLU", [source], time=0.5, activation=size)
            source = w.add("Conv2d(dw)", [source], time=3, activation=size, parameters=1e4)
            source = w.add("Conv2d(pw)", [source], time=2, activation=size, parameters=heavy)
            source = w.add("BatchNorm2d", [source], time=0.6, activation=size, parameters=2e3)
        return source

    for cell in range(count):
        size = 40 * MB / (1 + 3 * cell // count)
        heavy = 5e4 * (1 + cell)
        left, right = w.conv(before, 2, size, heavy), w.conv(at, 2, size, heavy)
        sums = []
        for pair in range(5):
            one = separable(left if pair % 2 else right, size, heavy)
            if pair < 2:
                other = separable(left, size, heavy)
            elif pair < 4:
                other = w.add("AvgPool2d", [left], time=1, activation=size)
            else:
                other = right
            sums.append(w.add("Add", [one, other], activation=size))
        before, at = at, w.add("Concat(1)", [left, *sums], activation=6 * size)
    at = w.add("AvgPool2d", [at], time=1, activation=1 * MB)
    w.add("Linear(1056, 1000)", [at], time=1, activation=0.5 * MB, parameters=4.2e6)
    return w.text()
