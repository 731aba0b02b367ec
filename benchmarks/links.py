"""Rates of gloo between two processes of this host: seconds a message, bytes per second.

    python benchmarks/links.py

`Cluster.auto` assumes such figures when nothing else is said about the links.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

SIZES = (4, 65_536, 1_048_576, 16_777_216)
REPEATS = 30


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return subprocess.run([*command, "--nproc-per-node=2", __file__], check=False).returncode
    dist.init_process_group("gloo")
    for size in SIZES:
        message = torch.zeros(size, dtype=torch.uint8)
        round_trip(message)  # the first one connects
        seconds = statistics.median(round_trip(message) for _ in range(REPEATS)) / 2
        if dist.get_rank() == 0:
            rate = size / seconds / 1e9
            print(f"{size:>10} B  {seconds * 1e6:>10.0f} us one way  {rate:>8.3f} GB/s", flush=True)
    dist.destroy_process_group()
    return 0


def round_trip(message: torch.Tensor) -> float:
    """Seconds until a message came back."""
    began = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(message, 1)
        dist.recv(message, 1)
    else:
        dist.recv(message, 0)
        dist.send(message, 0)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
