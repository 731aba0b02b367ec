"""One colour for one meaning, on terminals, in pictures and on pages.

Forward is blue, backward green, update amber, a stage violet, a link brown; and so are, in memory,
activations, gradients, optimizer state, weights and messages.  All fills are light enough for `INK`
on them.
"""

from __future__ import annotations

INK = "#10141a"  # text on any fill

#: kinds of work: of even and of odd minibatches, which differ in lightness too
WORK: dict[str, tuple[str, str]] = {
    "forward": ("#7fb2ff", "#b5d3ff"),
    "backward": ("#7fcf9a", "#b4e4c3"),
    "backward to inputs": ("#7fcf9a", "#b4e4c3"),
    "backward to weights": ("#c2cc5e", "#e0e6a6"),
    "update": ("#f0b84f", "#f7d697"),
}
LINK = "#d0a47c"
WEIGHTS = "#ada3ea"
SPARE = "#b9c0c9"  # of no lasting meaning: temporaries
IDLE = "#eef0f3"

#: what memory is full of: its fill, and the lines of a ledger that it adds up
MEMORY: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": (WEIGHTS, ("weights_bytes",)),
    "gradients": (WORK["backward"][0], ("gradients_bytes",)),
    "optimizer state": (WORK["update"][0], ("optimizer_bytes",)),
    "activations": (WORK["forward"][0], ("activations_bytes", "inputs_bytes", "outputs_bytes")),
    "messages": (LINK, ("receive_bytes", "send_bytes")),
    "temporaries": (SPARE, ("workspace_bytes", "temporaries_bytes")),
}
