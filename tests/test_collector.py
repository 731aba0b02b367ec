"""The collector's pace is changed for a pass, and only where a user left it as it was."""

import gc
import subprocess
import sys

import pytest

from pdcompile.pass_runner import ALLOCATIONS, collecting_seldom


@pytest.mark.parametrize("first", [0, 700, 2 * ALLOCATIONS])
def test_collecting_seldom_gives_the_thresholds_back(first: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(first, 9, 8)
    try:
        with collecting_seldom():
            assert gc.get_threshold() == (ALLOCATIONS if first == 700 else first, 9, 8)
        assert gc.get_threshold() == (first, 9, 8)
    finally:
        gc.set_threshold(*before)


def test_the_command_ends_without_collections() -> None:
    """Handlers run in reverse order: the one that looks is registered before the command's."""
    look = "atexit.register(lambda: print(gc.get_freeze_count() > 1_000))"
    program = f"import atexit, gc; {look}; from pdcompile.cli import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"
