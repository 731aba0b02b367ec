"""Benchmarks start as README and docs say, and keep what people wrote into their pages."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import compatibility, convergence, unlike_layers
from benchmarks.compatibility import Row
from pdcompile.batch import example_call
from pdcompile.cluster import Cluster
from pdcompile.driver import build
from pdcompile.options import Options
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


@pytest.mark.slow
def test_every_benchmark_starts_as_a_script(tmp_path: Path) -> None:
    """Each starts as `python benchmarks/X.py` does: its own folder is the first in sys.path, ours
    in none."""
    run = processes(HELP, 1, tmp_path, str(ROOT))
    assert run.code == 0, run
    assert run.output.endswith("all\n"), run


def test_what_a_person_wrote_about_convergence_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = convergence.Curve(1.0, (1, 2), (3.0, 2.0))
    runs = {run.name: [curve] for run in convergence.RUNS}
    monkeypatch.setattr(convergence, "measured", lambda task, seeds, jobs, chosen: runs)
    file = tmp_path / "page.md"
    written = ["--only", "digits", "--write", str(file)]
    convergence.main(written)
    assert file.read_text().endswith(f"{convergence.READING}\n")
    file.write_text(file.read_text() + "\nIt does.\n\nMostly.\n")
    before = file.read_text()
    convergence.main(written)
    assert file.read_text() == before
    assert "<dc:date>" not in file.with_suffix(".svg").read_text()


def test_a_row_of_the_page_of_versions_is_replaced_and_others_are_kept() -> None:
    page = (ROOT / "benchmarks" / "results" / "compatibility.md").read_text(encoding="utf-8")
    before, _, rest = page.partition(compatibility.ROWS)
    page = before + 2 * compatibility.ROWS + rest.partition(compatibility.ROWS)[2]  # no rows
    new, old = (Row(torch, "3.11.7", "5.24.0", "1.0.31") for torch in ("2.15.0", "2.9.1"))
    for row in (
        replace(new, models="173 of 175"),
        replace(old, tests="1 passed, 2 failed, 3 skipped"),
        replace(new, tests="5 passed, 0 failed, 0 skipped", date="2026-11-25"),
    ):
        page = compatibility.written(page, row)
    first, second = compatibility.rows_of(page)
    assert first == replace(old, tests="1 passed, 2 failed, 3 skipped")
    assert second.tests == "5 passed, 0 failed, 0 skipped"
    assert (second.models, second.date) == ("173 of 175", "2026-11-25")
    assert page.startswith(before)
    assert page.endswith(rest.partition(compatibility.ROWS)[2])


def test_counts_are_read_from_what_the_runs_print() -> None:
    said = "F.s\n= 2 failed, 7 passed, 1 skipped, 4 deselected, 1 error in 9.00s =\n"
    assert compatibility.tests_of(said) == "7 passed, 3 failed, 1 skipped"
    with pytest.raises(SystemExit, match="did not come to an end"):
        compatibility.tests_of("Killed\n")
    assert compatibility.models_of("a\n3 of 4 models pass (75%)\n") == "3 of 4"
    with pytest.raises(SystemExit, match="did not come to an end"):
        compatibility.models_of("")


def test_sections_of_the_planner_page_that_did_not_run_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("planning.page")
    before = (ROOT / "benchmarks" / "results" / "planner.md").read_text(encoding="utf-8")
    assert page.render([], before) == before
    with pytest.raises(KeyError, match="Device placement"):
        page.render([], "# Another page\n")


@pytest.mark.slow
def test_our_cut_is_faster_than_equal_layers_and_equal_parameters() -> None:
    """Memory and time of the layers rank differently; `unlike_layers` also runs them."""
    pytest.importorskip("transformers")
    ids = torch.zeros(unlike_layers.BATCH, unlike_layers.TOKENS, dtype=torch.int64)
    model, seconds = unlike_layers.model_of(3, 3), list[float]()
    for _, pins in unlike_layers.contestants(model):
        options = Options.given({
            "costs": "estimated", "cluster": Cluster.local(2), "stages": 2, "microbatches": 8,
            "constraints": pins, "verify": "off", "outputs": "none", "progress": False,
        })  # fmt: skip
        plan = build(
            model, example_call(model, {"input_ids": ids, "labels": ids}, None), options
        ).plan
        assert plan.forecast is not None
        seconds.append(plan.forecast.step_seconds)
    ours, equal_layers, equal_parameters = seconds
    assert ours < 0.995 * min(equal_layers, equal_parameters), seconds
