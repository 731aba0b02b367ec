"""Benchmarks start as README and docs say, and keep what people wrote into their pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import convergence
from tests.helpers.launch import ROOT, processes

HELP = """
import runpy, sys
from pathlib import Path

root, outside = sys.argv[1], [path for path in sys.path[1:] if path != sys.argv[1]]
for file in sorted(Path(root, "benchmarks").glob("*.py")):
    if file.name == "models.py":  # a module of theirs
        continue
    for name in [name for name in sys.modules if name.split(".")[0] in ("benchmarks", "tests")]:
        del sys.modules[name]
    sys.path[:], sys.argv[:] = [str(file.parent), *outside], [str(file), "--help"]
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, file
    else:
        raise AssertionError(f"{file} takes no --help")
print("all")
"""


def test_every_benchmark_starts_as_a_script(tmp_path: Path) -> None:
    """As `python benchmarks/X.py` does: its own folder is the first in sys.path, ours in none."""
    run = processes(HELP, 1, tmp_path, str(ROOT))
    assert run.code == 0, run
    assert run.output.endswith("all\n"), run


def test_what_a_person_wrote_about_convergence_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = convergence.Curve(1.0, (1, 2), (3.0, 2.0))
    runs = {run.name: [curve] for run in convergence.RUNS}
    monkeypatch.setattr(convergence, "measured", lambda task, seeds, jobs: runs)
    file = tmp_path / "page.md"
    written = ["--only", "digits", "--write", str(file)]
    convergence.main(written)
    assert file.read_text().endswith(f"{convergence.READING}\n")
    file.write_text(file.read_text() + "\nIt does.\n\nMostly.\n")
    before = file.read_text()
    convergence.main(written)
    assert file.read_text() == before
    assert "<dc:date>" not in file.with_suffix(".svg").read_text()
