"""Messages of rank 0 are read only where they come from rank 0 of this run; sockets are our own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.errors import LaunchError
from pdcompile.runtime.transport.start_up import Seal, key
from tests.helpers.launch import processes

SOON = timedelta(seconds=30)
SECRET = "a secret of sixteen characters or more"


def waiting(store: Any) -> Any:
    return lambda keys: store.wait(keys, SOON)


def seals(store: Any, size: int = 2) -> list[Seal]:
    return [Seal(store, rank, size, waiting(store)) for rank in range(size)]


@given(st.binary(max_size=200), st.data())
def test_whatever_is_changed_is_not_read(payload: bytes, data: st.DataObject) -> None:
    first, second = seals(dist.HashStore())
    first.check()
    sealed = first.closed(payload)
    assert second.opened(sealed) == payload
    place = data.draw(st.integers(0, len(sealed) - 1))
    changed = bytearray(sealed)
    changed[place] ^= data.draw(st.integers(1, 255))
    for wrong in (bytes(changed), sealed[:place], sealed + b"\0"):
        with pytest.raises(LaunchError, match="is not signed with this run's key"):
            second.opened(wrong)


def test_what_was_sent_in_another_run_is_not_read() -> None:
    store = dist.HashStore()
    first, second = seals(store)
    old = first.closed(b"a plan")
    assert second.opened(old) == b"a plan"
    one = Seal(store, 1, 2, waiting(store))  # it has drawn another number
    with pytest.raises(LaunchError, match="somebody else wrote it"):
        one.opened(old)
    told = str(store.get("drawn/0"), "utf-8")
    store.set("drawn/1", told)  # nor if the store says that it drew the old one
    with pytest.raises(LaunchError):
        one.opened(old)


@pytest.mark.slow
def test_a_pickle_of_somebody_else_is_not_loaded(tmp_path: Path) -> None:
    done = processes(FORGED, 2, tmp_path)
    assert "rank 1: LaunchError: what rank 1 got in place of rank 0's plan" in done.output, done
    assert "executed" not in done.output, done


FORGED = """
import os, pickle
import pdcompile, torch
from pdcompile.errors import PdcompileError
from pdcompile.runtime.transport import launch

class Hostile:
    def __reduce__(self):
        return print, ("executed",)

rank = int(os.environ["RANK"])
x = torch.randn(4, 4)
if rank == 0:  # whoever writes into the store, without the key
    options = pdcompile.options.Options.given({})
    store = launch._fresh_store([0, 1], None)
    store.set("program/0", store.get("program/1"))
    store.set("drawn/0", "00 00")
    store.set("made", bytes(32) + pickle.dumps(Hostile()))
    store.wait(["drawn/1"])
else:
    try:
        pdcompile.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), x,
                          optimizer=None, costs="estimated", progress=False).predict(x)
    except PdcompileError as error:
        print(f"rank 1: {type(error).__name__}: {error.message}", flush=True)
"""


def test_ranks_with_unlike_keys_do_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    first = Seal(store, 0, 2, waiting(store))
    monkeypatch.setenv("PDCOMPILE_KEY", SECRET)
    second = Seal(store, 1, 2, waiting(store))
    for seal, text in ((first, "rank 1 has another key than rank 0"), (second, "rank 0 has")):
        with pytest.raises(LaunchError, match=text) as caught:
            seal.check()
        assert "export PDCOMPILE_KEY=" in str(caught.value.remedy)
    with pytest.raises(LaunchError):
        second.opened(first.closed(pickle.dumps(1)))
    store.set("drawn/1", "é é")
    with pytest.raises(LaunchError, match="rank 1 has another key"):
        first.check()


def test_the_variable_has_to_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCOMPILE_KEY", SECRET)
    assert len(key()) == 32
    for short in ("", "fifteen letters"):
        monkeypatch.setenv("PDCOMPILE_KEY", short)
        with pytest.raises(LaunchError, match=f"has {len(short)} characters, and at least 16"):
            key()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PDCOMPILE_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".config" / "pdcompile" / "key"


def test_a_users_key_is_made_once_and_is_private(home: Path) -> None:
    made = key()
    assert len(made) == 32
    assert home.stat().st_mode & 0o777 == 0o600
    assert home.parent.stat().st_mode & 0o077 == 0
    assert key() == made
    assert [*home.parent.iterdir()] == [home]


def test_processes_that_make_it_at_once_agree(home: Path) -> None:
    program = "from pdcompile.runtime.transport.start_up import key; print(key().hex())"
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert len({one.communicate()[0] for one in started}) == 1
    assert len(key()) == 32


@pytest.mark.parametrize("wrong", ["mode", "size", "link", "folder"])
def test_a_key_that_others_may_know_is_refused(wrong: str, home: Path) -> None:
    key()
    if wrong == "mode":
        home.chmod(0o644)
    elif wrong == "size":
        home.write_bytes(b"short")
    else:
        home.unlink()
        if wrong == "link":
            (home.parent / "other").write_bytes(bytes(32))
            home.symlink_to("other")
        else:
            home.mkdir()
    with pytest.raises(LaunchError) as caught:
        key()
    assert caught.value.where == str(home)
    assert "PDCOMPILE_KEY" in str(caught.value.remedy)


def test_a_home_that_cannot_be_written_needs_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDCOMPILE_KEY")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match="cannot be made or read: Not a directory"):
        key()


SOCKETS = """
import os
import torch
from tests.helpers import models
from tests.helpers.pipelines import by_hand

def listening():
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")}
    found = []
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{name}").read().splitlines()[1:]:
            local, state, inode = (line.split()[n] for n in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in mine:
                found.append(f"{name} {local.partition(':')[0]}")
    return found

before = listening()
inputs, target = models.batch_for("mlp", 8)
pipe = by_hand(models.mlp(), 2, inputs, target, loss_fn=models.loss_for("mlp"), microbatches=4,
               schedule="1f1b", optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
               max_grad_norm=1.0).prepare()
pipe.step(inputs, target=target)
print("rank", os.environ["RANK"], "before", before, "open", sorted(set(listening())), flush=True)
pipe.close()
print("rank", os.environ["RANK"], "after", [one for one in listening() if one not in before],
      flush=True)
"""


def test_one_host_listens_on_loopback_alone(tmp_path: Path) -> None:
    done = processes(SOCKETS, 2, tmp_path)
    for rank in range(2):
        assert f"rank {rank} before [] open ['tcp 0100007F']" in done.output, done.output
        assert f"rank {rank} after []" in done.output, done.output
    assert "Exception ignored" not in done.output, done.output
