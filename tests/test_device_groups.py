"""Groups of GPUs: how they are made, shared and ended, and what their errors say."""

from __future__ import annotations

import os
from functools import partial
from threading import Event as Flag
from typing import Any

import pytest
import torch

from pdcompile.errors import LaunchError
from pdcompile.hardware import devices
from pdcompile.runtime.device import DeviceFailed
from pdcompile.runtime.transport import device_groups
from pdcompile.runtime.transport.links import PeerLost, lost


def test_processes_that_share_a_gpu_count_as_having_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    for text in ("", "0"):
        monkeypatch.setenv("PDCOMPILE_SHARE_GPUS", text)
        devices.apart_for_nccl()
        assert devices.gpus() == 2
        assert devices.gpu(2).index == 2
        assert "NCCL_HOSTID" not in os.environ
    monkeypatch.setenv("PDCOMPILE_SHARE_GPUS", "1")
    assert devices.gpus() == 3
    assert [devices.gpu(number).index for number in range(3)] == [0, 1, 0]
    devices.apart_for_nccl()
    assert os.environ["NCCL_HOSTID"].endswith(" 2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices.gpus() == 0


def test_torch_leaves_errors_of_nccl_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is made with what we tell torch, is tried, and says what NCCL said."""
    told: list[dict[str, str]] = []
    begun: list[str] = []

    class Work:
        def wait(self) -> None:
            begun.append("waited")

    class Group:
        Options = type("Options", (), {})

        def __init__(self, *_: Any) -> None:
            told.append({name: os.environ[name] for name in device_groups.SETTINGS})

        def eager_connect_single_device(self, device: torch.device) -> None:
            if device.type != "cpu":
                raise RuntimeError("NCCL error\nLast error:\nDuplicate GPU detected")

        def __getattr__(self, name: str) -> Any:
            return lambda *_: begun.append(name) or Work()

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    given = partial(device_groups.connected, None, timeout=None)
    given(1, (0, 1), torch.device("cpu"))
    assert [one for one in begun if one != "waited"] == ["allreduce", "recv", "send"]
    assert begun.count("waited") == 3
    given(0, (0, 1, 2), torch.device("cpu"))
    assert begun[-2:] == ["allreduce", "waited"]
    assert told[0] == {**device_groups.SETTINGS, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    with pytest.raises(LaunchError, match="GPUs of ranks 3, 5: Last error: Duplicate GPU"):
        given(5, (3, 5), torch.device("meta"))


def test_what_fails_on_the_device_is_not_taken_for_a_peer() -> None:
    ours = lost(1, "NCCL error: unhandled cuda error\nCuda failure 'device-side assert triggered'")
    assert isinstance(ours, DeviceFailed)
    assert "device-side assert triggered" in str(ours)
    theirs = lost(1, "[tcp.cc:1] Connection closed by peer. This may be")
    assert isinstance(theirs, PeerLost)
    assert theirs.peer == 1


def test_groups_end_side_by_side_and_nobody_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    stuck = Flag()

    def fails() -> None:
        raise RuntimeError("CUDA error")

    def other() -> None:
        stuck.wait()
        ended.append(2)

    monkeypatch.setattr(device_groups, "END_SECONDS", 0.01)
    device_groups.end_all([other, fails])
    device_groups.end_all([partial(ended.append, 1)])
    device_groups.wait_for_ends()
    assert ended == [1]
    stuck.set()
