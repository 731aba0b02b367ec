"""One installed name, from a checkout with links, from a wheel and from an sdist without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

from pdcompile.errors import LaunchError
from pdcompile.releases import packages

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_checkout(folder: Path) -> Path:
    """The sources of this checkout, links kept as links."""
    leave = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis", "out", "build"
    )
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=leave))


def normal(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_links_are_relative_and_right() -> None:
    for name in ("passes", "runtime"):
        assert os.readlink(ROOT / "pdcompile" / name) == f"../{name}"


def test_every_dependency_is_pinned() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[normal(name)] = version
    wanted = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    assert {normal(requirement) for requirement in wanted} - {"pdcompile"} - set(pins) == set()
    assert pins["torch"] == "2.13.0"
    assert not [version for version in pins.values() if "+" in version or not version]


def test_the_range_of_torch_is_one() -> None:
    (wanted,) = (one for one in PROJECT["project"]["dependencies"] if normal(one) == "torch")
    assert wanted == f"torch{packages.TORCH}"
    assert packages.in_range(torch.__version__, packages.TORCH)


@pytest.mark.parametrize(
    ("release", "fits"),
    [("2.11.0", True), ("2.15.1+cu130", True), ("2.10.1", False), ("2.16.0.dev20261101", False)],
)
def test_releases_of_torch_are_told_apart(release: str, fits: bool) -> None:
    if fits:
        packages.check_torch(release)
        return
    with pytest.raises(LaunchError, match=f"torch {release} is installed, and pdcompile is made"):
        packages.check_torch(release)


@pytest.mark.slow
def test_another_torch_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """A refusal comes from what needs torch, and not from what does without."""
    script = """
        import sys
        import torch
        torch.__version__ = "2.10.0"
        from pdcompile.cli import main
        for words in (["schedule", "mine.csv"], ["plan", sys.argv[1]]):
            try:
                main(words)
            except SystemExit as end:
                print(f"{words[0]} ends with {end.code}")
    """
    (tmp_path / "mine.csv").write_text("0F0,0B0\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), f"{ROOT}/examples/mlp.py:build"],
        cwd=tmp_path, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "schedule ends with 0" in done.stdout, done.stderr
    assert "plan ends with 2" in done.stdout
    assert (
        f"error: torch 2.10.0 is installed, and pdcompile is made for torch {packages.TORCH}\n"
        f"  remedy: pip install 'torch{packages.TORCH}'\n"
    ) in done.stderr


def test_make_takes_another_torch_into_an_environment_of_its_own() -> None:
    def steps(*given: str) -> str:
        return run("make", "--dry-run", "--always-make", "venv", *given, cwd=ROOT)

    pinned, other = steps(), steps("TORCH=2.15.0", "NEWEST=1")
    assert "-m venv --clear .venv\n" in pinned
    assert "-c constraints.txt -e" in pinned
    assert "torch==" not in pinned
    assert "-m venv --clear .venv-torch-2.15.0-newest\n" in other
    assert "-c .venv-torch-2.15.0-newest/constraints.txt -e" in other
    assert "torch==2.15.0" in other
    (line,) = (line for line in other.splitlines() if line.startswith("sed "))
    pins = run("sh", "-c", line.partition(" > ")[0], cwd=ROOT).splitlines()
    assert {"torch", "setuptools", "transformers", "timm"}.isdisjoint(map(normal, pins))
    assert {"torchvision", "numpy"} <= {*map(normal, pins)}


def test_lost_links_are_explained(tmp_path: Path) -> None:
    """A ZIP unpacked without links leaves `passes` a small text file."""
    package = tmp_path / "pdcompile"
    package.mkdir()
    shutil.copy(ROOT / "pdcompile" / "__init__.py", package)
    (package / "passes").write_text("../passes", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", "import pdcompile"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "git clone -c core.symlinks=true" in done.stderr


@pytest.mark.parametrize(
    ("python", "message"),
    [
        (None, "install Python 3.11 or newer"),
        ('#!/bin/sh\ncase "$1$2" in --version) echo Python 3.9.2;; *) exit 1;; esac\n', "too old"),
        ('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\n', "apt-get install python3-venv"),
    ],
)
def test_make_venv_says_what_is_missing(tmp_path: Path, python: str | None, message: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    interpreter = tmp_path / "some-python"
    if python is not None:
        interpreter.write_text(python, encoding="utf-8")
        interpreter.chmod(0o755)
    command = ["make", "venv", f"PYTHON={interpreter}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stdout
    assert not (tmp_path / ".venv").exists()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this checkout, built offline."""
    folder = tmp_path_factory.mktemp("packaging")
    checkout, built = copy_checkout(folder / "checkout"), folder / "built"
    for kind in ("sdist", "wheel"):
        program = f"from setuptools.build_meta import build_{kind} as build; build('{built}')"
        run(sys.executable, "-c", program, cwd=checkout)
    return built


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """A new environment with the wheel alone; what it depends on is borrowed from this one."""
    environment = built.parent / "environment"
    run(sys.executable, "-m", "venv", str(environment), cwd=built)
    (wheel,) = built.glob("*.whl")
    python = str(environment / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel), cwd=built)
    (packages,) = environment.glob("lib/python*/site-packages")
    borrowed = sysconfig.get_path("purelib")  # its own .pth files, editable installs, are not read
    (packages / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    return environment


@pytest.mark.slow
def test_the_archives_hold_one_name_and_no_links(built: Path, tmp_path: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        extras = re.findall(r"^Provides-Extra: (.*)$", file.read(about).decode(), re.MULTILINE)
    assert {"pdcompile/passes/__init__.py", "pdcompile/runtime/__init__.py"} <= set(names)
    assert {"pdcompile/py.typed", "pdcompile/clusters/h100.toml"} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pdcompile"}
    assert "hf" in extras

    with tarfile.open(archive) as file:
        assert not [member.name for member in file if member.issym()]
        file.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    run(
        *pip, "--no-build-isolation", "--no-compile", "--target", str(target), str(unpacked),
        cwd=tmp_path,
    )  # fmt: skip
    program = "import pdcompile, pdcompile.passes, pdcompile.runtime; print(pdcompile.__file__)"
    shown = run(sys.executable, "-c", program, cwd=tmp_path, env={"PYTHONPATH": str(target)})
    assert shown.strip() == str(target / "pdcompile" / "__init__.py")


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(installed: Path, tmp_path: Path) -> None:
    """The command, the twenty lines of the README under torchrun, and types for the user's own."""
    command, python = str(installed / "bin" / "pdcompile"), str(installed / "bin" / "python")
    alone = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    where = "import pdcompile; print(pdcompile.__file__)"
    assert run(python, "-c", where, cwd=tmp_path, env=alone).startswith(str(installed))
    version = PROJECT["project"]["version"]
    said = run(command, "--version", cwd=tmp_path, env=alone)
    assert said.startswith(f"pdcompile {version}, torch ")
    drawn = run(command, "schedule", "1f1b", "--stages", "2", cwd=tmp_path, env=alone)
    assert "rank 1" in drawn
    shutil.copy(ROOT / "examples" / "train.py", tmp_path)
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    said = run(*launch, "--local-ranks-filter=0", "train.py", cwd=tmp_path, env=alone)
    assert said.split()[::2] == ["0", "5", "10", "15"]
    user = tmp_path / "user.py"
    user.write_text(
        "import torch, pdcompile\n"
        "pipe = pdcompile.compile(torch.nn.Linear(2, 2), stages=2)\n"
        "pipe.step(1)\n"
        "pipe.stepp(1)\n",
        encoding="utf-8",
    )  # fmt: skip
    checked = [sys.executable, "-m", "mypy", "--python-executable", python, "user.py"]
    done = subprocess.run(checked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.count("error:") == 1, done.stdout
    assert 'user.py:4: error: "Pipeline" has no attribute "stepp"' in done.stdout
