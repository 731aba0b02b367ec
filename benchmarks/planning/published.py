"""Figures that others published for the same inputs, and where the inputs lie."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_DEFAULT = Path(__file__).parents[2].parent / "shared" / "reference"
REFERENCE = Path(os.environ.get("PDCOMPILE_REFERENCE", _DEFAULT))

# Contiguous optimum, and seconds of the authors' dynamic program run to its end
# ('Efficient Algorithms for Device Placement of DNN Graph Operators', NeurIPS 2020).
PLACEMENT = {
    "LayerGraphs/bert24_inference": (17.789906, 0.03),
    "LayerGraphs/bert24_training": (41.745812, 0.05),
    "LayerGraphs/resnet50_inference": (33.774666, 0.3),
    "LayerGraphs/gnmt_inference": (32.910658, 43.0),
    "OperatorGraphs/bert_l-3_inference": (27.918568, 2.4),
    "OperatorGraphs/bert_l-3_training": (65.303149, 11.0),
    "OperatorGraphs/resnet50_inference": (124.348850, 0.2),
}

# devices, GiB of each: seconds per sample of Piper and of PipeDream-2BW's planner in its code
# ('Piper: Multidimensional Planner for DNN Parallelization', NeurIPS 2021, and its repository).
PIPER = {
    (8, 8): (0.16585575, 0.230978),
    (32, 8): (0.0415154504, 0.0513510889),
    (64, 8): (0.0202005503, 0.0257245478),
    (128, 8): (0.0101208803, 0.0129112773),
    (512, 8): (0.00256112785, 0.00330132436),
    (64, 2): (0.0320300812, 0.12333875),
    (128, 1): (0.03887175, None),
    (8, 80): (0.12200726935, 0.12200726935),
    (512, 80): (0.00227252011, 0.00241478679),
}

PIPER_SECONDS = (0.15, 11.0)  # of Piper's program, for 8 and for 512 devices

# network, cluster: configuration and speed-up over data-parallel
# ('PipeDream: Generalized Pipeline Parallelism for DNN Training', SOSP 2019, Table 1).
SOSP = {
    ("vgg16", "A"): ("15-1", "5.28"),
    ("vgg16", "B"): ("15-1", "2.98"),
    ("alexnet", "A"): ("15-1", "4.92"),
    ("resnet50", "A"): ("16 (data-parallel)", "1"),
    ("resnet50", "B"): ("16 (data-parallel)", "1"),
    ("gnmt", "A"): ("straight", "1.5 to 3.1"),
    ("gnmt", "B"): ("straight", "1.5 to 3.1"),
}


def optimizer() -> dict[str, dict[str, Any]]:
    """PipeDream's optimizer on its profiles: [network][name of the cluster]."""
    path = REFERENCE / "pipedream" / "published_optimizer.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found
