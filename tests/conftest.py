"""Rules for all tests: none reads or writes the user's cache of measured times, or key, and
none sees a GPU, so that they find on every machine the same.

Processes that tests start inherit it.  A test of the cache itself names a folder of its own.
Where slow tests are left out (`-m "not slow"`), properties are tried on fewer examples, of a test
marked ``sample(n)`` run n cases, and the fixture `fast` says so to tests that go through cases of
their own.
No example of a property has a deadline, nor is one made too slowly: other programs may have the
cores.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:  # imports torch, which not all tests need
    from tests.helpers.alike import Call

os.environ["PDCOMPILE_CACHE"] = "off"
os.environ["PDCOMPILE_KEY"] = "the key of all ranks that tests start"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Several workers share the cores: threads that wait for each other would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else every process that tests start, workers among them, would compile anew what it imports.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
hypothesis.settings.register_profile(
    "no deadline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("no deadline")

FEW_EXAMPLES = 6
_SETTINGS = "_hypothesis_internal_use_settings"  # where @settings leaves what it was given


@pytest.fixture(scope="session", autouse=True)
def one_capture_a_model() -> Iterator[None]:
    """`pdcompile.compile` captures a model that is like a known one once for all tests, files of
    installed packages, which a capture beside a plan has digests of, are read once, and options of
    all verbs are declared once.  No compilation says that it takes long: a busy machine's do."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:  # which not all tests need
            from tests.helpers.captures import capture_once, digest_once

            patch.setattr("pdcompile.driver.capture", capture_once)
            patch.setattr("pdcompile.report.progress.FIRST", 3600.0)
            patch.setattr("pdcompile.passes.stages.capture_file._digest", digest_once)
        if "typer" in sys.modules:
            from typer.main import get_command

            patch.setattr("typer.main.get_command", cache(get_command))
        yield


@pytest.fixture
def captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test capture each of its models anew: it is about how they are captured."""
    from pdcompile.passes.trace import capture

    monkeypatch.setattr("pdcompile.driver.capture", capture)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a verb in this process: (exit code, stdout, stderr)."""
    from pdcompile.cli import main

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def fast(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests are left out, and with them most of many similar cases."""
    return _is_fast(request.config)


def _is_fast(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "not slow")


class _Waiting:
    """Says every so often, while others run the tests, which one takes so long."""

    FIRST, LATER = 10.0, 60.0  # seconds

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._running, self._done = session, dict[str, float](), 0
        self._began, self._ended = time.monotonic(), threading.Event()
        threading.Thread(target=self._tell, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._done += 1

    def pytest_sessionfinish(self) -> None:
        self._ended.set()

    def _tell(self) -> None:
        wait = self.FIRST
        while not self._ended.wait(wait):
            wait, now, running = self.LATER, time.monotonic(), [*self._running.items()]
            name, since = min(running, key=lambda one: one[1], default=("collection", self._began))
            left = max(self._session.testscollected - self._done, 0)
            self._session.config.get_terminal_writer().write(
                f"\n{now - self._began:.0f} s: {name} has run for {now - since:.0f} s, "
                f"{left} tests are left\n",
                flush=True,
            )


def pytest_sessionstart(session: pytest.Session) -> None:
    workers = session.config.getoption("numprocesses", None)
    if workers and "PYTEST_XDIST_WORKER" not in os.environ:
        session.config.pluginmanager.register(_Waiting(session))
        from tests.helpers.forking import start

        start()  # one for all workers


def _import_in_turn(config: pytest.Config) -> None:
    """Import all modules of tests, each worker from another one on: what has no bytecode yet, as on
    a clean checkout, is compiled by one of them, and has it when the others come to it."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    files = [file for path in config.args for file in sorted(Path(path).rglob("test_*.py"))]
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):  # pytest will say it
            import_module(".".join(file.with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """No garbage is looked for while modules are imported, which stay to the end; and later ten
    times less often, as stages and graphs are many small objects that stay for a test."""
    gc.disable()
    try:
        _import_in_turn(session.config)
        found = yield
        if "PYTEST_XDIST_WORKER" in os.environ:  # which compiles sooner or later
            from pdcompile.releases.torch_internals import import_compiler

            import_compiler()
        return found
    finally:
        gc.freeze()  # collections, and captures, need not look at it again
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sampled = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            sampled[item.nodeid.partition("[")[0]].append(item)
    for cases in sampled.values():
        (wanted,) = cases[0].get_closest_marker("sample").args
        fast = {n * len(cases) // wanted for n in range(wanted)}
        for n, item in enumerate(cases):
            if n not in fast:
                item.add_marker("slow")
    for item in items if _is_fast(config) else ():
        test = getattr(item, "obj", None)
        given = getattr(test, _SETTINGS, None)
        if given is not None and not hasattr(test, "few"):
            few = min(FEW_EXAMPLES, (given.max_examples + 1) // 2)
            setattr(test, _SETTINGS, hypothesis.settings(given, max_examples=few))
            test.few = few  # one function may be several items
