"""``pdcompile doctor``: what is here, what is wrong with it, and a self-test that can fail."""

from __future__ import annotations

import json
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import pdcompile
from pdcompile.batch.step_result import LazyLoss
from pdcompile.cli import self_test
from pdcompile.cli.doctor import report
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.hardware import checkup as module
from pdcompile.hardware import host
from pdcompile.hardware.checkup import Line, checkup
from pdcompile.passes.costs.machines import Machine
from pdcompile.passes.probe.links import DeviceSpeed
from pdcompile.passes.probe.probed import Probed
from pdcompile.releases.packages import in_range
from pdcompile.schedule.registry import KINDS, allowed
from tests.helpers import launch
from tests.helpers.alike import Call
from tests.helpers.report_data import plan
from tests.helpers.simulated_gpu import GPU, SimulatedGpu

TORCHRUN = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


def said(lines: list[Line], state: str) -> str:
    return "\n".join(f"{line.text} | {line.remedy}" for line in lines if line.state == state)


def test_this_host_is_described(call: Call) -> None:
    code, out, _ = call("doctor", "--json")
    document = json.loads(out)
    assert code == 0, said([Line(**one) for one in document["lines"]], "wrong")
    about = [line["about"] for line in document["lines"]]
    assert list(dict.fromkeys(about)) == [
        "versions", "processes", "memory", "disk", "network", "devices",
    ]  # fmt: skip
    assert any(line["text"].startswith("torch ") for line in document["lines"])


def test_a_report_of_nothing_is_not_asked_for(call: Call, tmp_path: Path) -> None:
    code, _, err = call("doctor", "-o", str(tmp_path / "report.md"))
    assert code == 2
    assert "no effect without --devices" in err


def test_the_table_says_what_to_do(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    code, out, _ = call("doctor")
    assert code == 1
    assert "GLOO_SOCKET_IFNAME names 'ib7'" in out
    assert "or unset it" in out


@pytest.mark.parametrize(
    ("has", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.13,<2.14", True),
        ("2.14.0", ">=2.13,<2.14", False),
        ("2.12.1", ">=2.13,<2.14", False),
        ("15.0", ">=14", True),
        ("3", "", True),
    ],
)
def test_versions_are_held_against_what_is_wanted(has: str, wanted: str, fits: bool) -> None:
    assert in_range(has, wanted) == fits


def test_packages_that_are_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch<2,>=1.9", "no-such-package>=7", "ruff>=1; extra == 'lint'"]
    monkeypatch.setattr(module, "requires", lambda _: wanted)
    wrong = said(checkup(environ={}), "wrong")
    assert f"torch {metadata.version('torch')} is not <2,>=1.9" in wrong
    assert "no-such-package is not installed | pip install 'no-such-package>=7'" in wrong
    assert "ruff" not in wrong


def test_processes_threads_and_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cores", lambda: 2)
    monkeypatch.setattr(host, "own_address", lambda: "127.0.1.1")
    lines = checkup(environ=TORCHRUN)
    assert "4 processes, 2 of them on this host, 2 cores here" in said(lines, "ok")
    assert "no other host can reach" in said(lines, "wrong")
    assert "no other host can reach" in said(checkup(environ={}), "look")  # nobody knows how many
    alone = TORCHRUN | {"LOCAL_WORLD_SIZE": TORCHRUN["WORLD_SIZE"], "MASTER_ADDR": "127.0.0.1"}
    assert "no other host can reach" in said(checkup(environ=alone), "ok")
    assert "MASTER_ADDR" not in said(checkup(environ=alone), "wrong")
    lines = checkup(environ=TORCHRUN | {"MASTER_ADDR": "127.0.0.1"})
    assert "MASTER_ADDR=127.0.0.1 is 127.0.0.1, which is on each host" in said(lines, "wrong")
    lines = checkup(environ=TORCHRUN | {"OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "lo"})
    assert "2 processes of 4 threads share 2 cores" in said(lines, "look")
    assert "OMP_NUM_THREADS=1, or fewer processes" in said(lines, "look")
    assert said(lines, "wrong") == ""
    lines = checkup(processes=4, environ={"OMP_NUM_THREADS": "1"})
    assert "4 processes, 2 cores here" in said(lines, "ok")
    assert "4 processes of 1 threads share 2 cores" in said(lines, "look")
    assert "OMP_NUM_THREADS=1, or" not in said(lines, "look")
    assert "OMP_NUM_THREADS is not set" in said(checkup(environ={}), "look")
    lines = checkup(environ={"MASTER_ADDR": "no host.invalid", "OMP_NUM_THREADS": "1"})
    assert "MASTER_ADDR='no host.invalid' is not found" in said(lines, "wrong")


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = host.memory_bytes()
    assert whole is not None
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert host.memory_bytes() == host._physical()
    (tmp_path / "memory.max").write_text("5000000\n")
    assert host.memory_bytes() == 5_000_000
    assert host.free_bytes() == 4_999_000
    assert "only 5.00 MB free of 5.00 MB" in said(checkup(environ={}), "look")
    monkeypatch.setattr(host, "free_bytes", lambda: None)
    assert "does not say how much memory is free" in said(checkup(environ={}), "look")
    monkeypatch.setattr(host, "disk_bytes", lambda _: 5)
    assert "5 B free for this folder" in said(checkup(environ={}), "look")


def test_gpus_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 2 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    lines = checkup(environ=TORCHRUN)
    assert "GPU 0: NVIDIA H100, 1.00 GB free of 2.00 GB" in said(lines, "ok")
    assert "2 processes on this host, and 1 GPUs" in said(lines, "look")


def test_a_plan_is_held_against_the_world(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan().to_json(), encoding="utf-8")
    ranks = plan().num_ranks
    assert f"its {ranks} ranks can run in one process here" in said(
        checkup(path, environ={"OMP_NUM_THREADS": "1"}), "ok"
    )
    code, out, _ = call("doctor", "--plan", str(path), "--processes", "7", "--json")
    assert code == 1
    assert json.loads(out)["status"] == "wrong"
    assert f"the plan is for {ranks} processes, and there are 7" in out
    assert "cannot read the plan" in said(checkup(tmp_path / "none.json", environ={}), "wrong")


# The self-test


@pytest.fixture
def one_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "KINDS", {"1f1b": KINDS["1f1b"]})


@pytest.mark.usefixtures("one_schedule")
def test_one_that_differs_or_is_refused_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(LazyLoss, "__float__", lambda loss: loss.item() + torch.rand(()).item())
        (found,) = self_test.self_test(0, 1, torch.device("cpu"))
    assert not found.passed
    assert found.result == "DIFFERS"
    monkeypatch.setattr(self_test, "_cluster", lambda *_: "2x8:h10")
    (found,) = self_test.self_test(0, 1, torch.device("cpu"))
    assert found.result == "DID NOT RUN"
    assert "no machines of the name" in found.said


@pytest.mark.usefixtures("one_schedule")
def test_a_weight_that_is_no_number_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pdcompile.Pipeline.full_state_dict

    def broken(pipe: pdcompile.Pipeline) -> dict[str, torch.Tensor]:
        state = plain(pipe)
        return {**state, "layers.1.weight": state["layers.1.weight"] * float("nan")}

    monkeypatch.setattr(pdcompile.Pipeline, "full_state_dict", broken)
    (found,) = self_test.self_test(0, 1, torch.device("cpu"))
    assert found.result == "DIFFERS"


@pytest.mark.slow
@pytest.mark.usefixtures("one_schedule")
def test_it_runs_on_a_gpu_that_is_there() -> None:
    with SimulatedGpu() as gpu:
        (found,) = self_test.self_test(0, 1, GPU)
    assert found.passed
    assert found.step_seconds > 0
    assert found.result == "equal, every bit"
    assert gpu.violations == []
    assert gpu.ops["stream 1"]


def test_the_report_can_be_pasted() -> None:
    speed = DeviceSpeed("here", "CPU, one thread", "cpu", 10**9, Machine(5e10, 1e10, 4e-6))
    cluster = Cluster((Device(),), (Level("host", 1, 1e9),))
    outcomes = [self_test.Outcome("gpipe", 0.0, 0.01), self_test.Outcome("2bw", None, said="no")]
    text = report(
        [Line("memory", "look", "little")], Probed(cluster, (speed,), None), outcomes, 9.6
    )
    assert "1 of 2 schedules equal the reference, on 1 x CPU, one thread, one process; 10 s" in text
    assert "| gpipe | equal, every bit | 10.0 ms |" in text
    assert "| 2bw | DID NOT RUN: no |  |" in text
    assert "memory: LOOK: little" in text


@pytest.mark.slow
def test_all_schedules_on_two_ranks(tmp_path: Path) -> None:
    script = "import sys; from pdcompile.cli import main; main(sys.argv[1:])"
    run = launch.torchrun(script, 2, tmp_path, "doctor", "--devices", "-o", "report.md")
    assert run.code == 0, run
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    count = len(allowed("any"))
    assert f"{count} of {count} schedules equal the reference" in text
    assert "host: 2 blocks" in text


def test_the_command_tests_what_is_here(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(self_test, "KINDS", {"gpipe": KINDS["gpipe"]})
    code, out, err = call("doctor", "--devices", "-o", str(tmp_path / "report.md"))
    assert code == 0, err
    assert "1 of 1 schedules equal the reference" in out
    assert (tmp_path / "report.md").read_text(encoding="utf-8").rstrip() == out.rstrip()


def test_a_folder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("pdcompile.hardware.checkup.requires", requires)
    lines = [line for line in checkup() if line.about == "versions"]
    assert lines[0].state == "look"
    assert "not installed" in lines[0].text
    assert not any(line.state == "wrong" for line in lines)
    monkeypatch.setattr("importlib.metadata.version", requires)
    assert pdcompile.__version__ == "0+source"
