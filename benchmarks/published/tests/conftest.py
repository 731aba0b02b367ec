"""Settings and the verb of the tests of published problems, which `make test SLOW=1` runs."""

from __future__ import annotations

import pytest

from benchmarks.published.command import NAME, app
from pdcompile.cli import main
from tests.conftest import FEW_EXAMPLES  # noqa: F401 - sets the environment of all tests
from tests.helpers.alike import Call


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs ``plan`` in this process: (exit code, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["plan", *words], verbs=app, name=NAME)
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    return run
