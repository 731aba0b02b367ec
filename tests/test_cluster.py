"""Clusters from text and TOML, the links between devices, and what a stage gets."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import ClusterError
from pdcompile.problem.deployment import stage_limits

TWO_HOSTS = """
[[devices]]
count = 8
kind = "cuda"
memory = "80 GB"

[[levels]]
name = "nvlink"
size = 4
bandwidth = "100 GB/s"
latency = "5 us"

[[levels]]
name = "ethernet"
size = 2
bandwidth = "25 Gbit/s"
duplex = "half"
"""


def test_bare_text_says_what_it_assumes() -> None:
    cluster = Cluster.parse("2x4")
    assert len(cluster.devices) == 8
    assert cluster.devices[0] == Device("cpu", None, 1.0)
    assert cluster.level_between(0, 3).bytes_per_second == 100e9
    assert cluster.level_between(3, 4).bytes_per_second == 12.5e9
    assert all(level.full_duplex for level in cluster.levels)
    assert "no memory limit" in cluster.notes[0]
    assert "12.5 GB/s between hosts" in cluster.notes[0]


def test_one_number_is_one_host() -> None:
    assert [level.size for level in Cluster.parse(" 4 ").levels] == [4]


@pytest.mark.parametrize("text", ["", "0", "2x0", "x4", "2x", "-2", "a", "2x4x2", "9999999", "²"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="neither"):
        Cluster.parse(text)


def test_local() -> None:
    cluster = Cluster.local(3, memory="2 GiB")
    assert cluster.in_process
    assert cluster.devices == (Device("cpu", 2 * 2**30),) * 3
    assert cluster.level_between(0, 2).bytes_per_second == math.inf


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "2"])
def test_local_wants_a_count(n: object) -> None:
    with pytest.raises(ClusterError):
        Cluster.local(n)  # type: ignore[arg-type]


def test_auto_reads_what_torchrun_set() -> None:
    started = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    cluster = Cluster.auto(started)
    assert [level.size for level in cluster.levels] == [4, 2]
    assert all(level.latency_seconds > 0 for level in cluster.levels)
    assert "gloo" in cluster.notes[0]
    alone = Cluster.auto({})
    assert alone.in_process
    assert len(alone.devices) == 1
    with pytest.raises(ClusterError, match="torchrun"):
        Cluster.auto({"WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4"})
    with pytest.raises(ClusterError):
        Cluster.auto({"WORLD_SIZE": "x"})


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TWO_HOSTS)
    cluster = Cluster.load(str(path))
    assert cluster.devices == (Device("cuda", 80 * 10**9, 1.0),) * 8
    assert cluster.levels == (
        Level("nvlink", 4, 100e9, 5e-6, True),
        Level("ethernet", 2, 3.125e9, 0.0, False),
    )


@pytest.mark.parametrize(
    ("old", "new", "key", "message"),
    [
        ('"100 GB/s"', '"100 GB"', "levels[0].bandwidth", "not a non-negative number"),
        ('"100 GB/s"', '"0 GB/s"', "levels[0].bandwidth", "bandwidth is 0 bytes"),
        ('"100 GB/s"', '"1e-300 GB/s"', "levels[0].bandwidth", "bandwidth is 1e-291 bytes"),
        ('"100 GB/s"', '"-1 GB/s"', "levels[0].bandwidth", "not a non-negative"),
        ('"100 GB/s"', "nan", "levels[0].bandwidth", "not a non-negative"),
        ('"5 us"', '"5 parsec"', "levels[0].latency", "5 parsec"),
        ('"80 GB"', '"80 apples"', "devices[0].memory", "80 apples"),
        ('"80 GB"', "true", "devices[0].memory", "True"),
        ("size = 4", "size = 3", "levels", "multiply to 6"),
        ("size = 4", "size = 0", "levels[0].size", "size is 0"),
        ("size = 4", "size = true", "levels[0].size", "true is not a whole number"),
        ("size = 4", "sise = 4", "levels[0]", 'unknown key "sise"'),
        ("count = 8", "count = -8", "devices[0].count", "-8 devices"),
        ("count = 8", "count = 8\nspeed = 0", "devices[0].speed", "speed is 0.0, not from"),
        ("count = 8", "count = 8\nspeed = 1e-300", "devices[0].speed", "1e-300, not from 1e-6"),
        ("count = 8", "count = 8\nspeed = nan", "devices[0].speed", "speed is nan, not from"),
        ("count = 8", "count = 8\nspeed = inf", "devices[0].speed", "speed is inf, not from"),
        ('"half"', '"both"', "levels[1].duplex", "both"),
        ('kind = "cuda"', "kind = 3", "devices[0].kind", "3 is not text"),
        ("[[devices]]", "[devices]", "devices", "not a list"),
        ("[[devices]]", "surprise = 1\n[[devices]]", "cluster.toml", "unknown key"),
        ("[[devices]]", "notes = [1]\n[[devices]]", "notes[0]", "1 is not text"),
        ("[[devices]]", "[[devices", "cluster.toml", "not TOML"),
    ],
)
def test_wrong_files_name_file_and_key(old: str, new: str, key: str, message: str) -> None:
    assert old in TWO_HOSTS
    with pytest.raises(ClusterError) as caught:
        Cluster.from_toml(TWO_HOSTS.replace(old, new, 1))
    assert "cluster.toml" in str(caught.value.where)
    assert key in str(caught.value.where)
    assert message in caught.value.message
    assert not str(caught.value.where).endswith(":")


def test_devices_without_links_are_told_what_to_add() -> None:
    with pytest.raises(ClusterError, match="4 devices, and nothing of the links") as caught:
        Cluster.from_toml("[[devices]]\ncount = 4\n")
    assert "add a [[levels]] table with name, size = 4" in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot read"):
        Cluster.load(str(tmp_path / "none.toml"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="UTF-8"):
        Cluster.load(str(binary))
    with pytest.raises(ClusterError, match="no devices"):
        Cluster.from_toml("")


def test_one_device_needs_no_level() -> None:
    assert len(Cluster.from_toml("[[devices]]").levels) == 1


def _is_unknown(kind: str) -> bool:
    """True if the text is no other spelling of a kind that is known, such as ``L4``."""
    try:
        Device(kind)
    except ClusterError:
        return False
    return True


DEVICES = st.builds(
    Device,
    st.text(st.characters(codec="utf-8"), max_size=5).filter(_is_unknown),
    st.none() | st.integers(0, 2**50),
    st.floats(1e-3, 1e3),
)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(DEVICES, min_size=1, max_size=4),
    st.floats(1, 1e14) | st.just(math.inf),
    st.floats(0, 10),
    st.booleans(),
)
def test_toml_comes_back(
    sizes: list[int], kinds: list[Device], rate: float, latency: float, duplex: bool
) -> None:
    count = math.prod(sizes)
    devices = tuple(kinds[i % len(kinds)] for i in range(count))
    levels = tuple(Level(f"level{i}", s, rate, latency, duplex) for i, s in enumerate(sizes))
    cluster = Cluster(devices, levels, notes=('a "note"\n\x7f',))
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert Cluster.from_toml(cluster.to_toml()).to_toml() == cluster.to_toml()


def test_no_such_device() -> None:
    with pytest.raises(ClusterError, match="no device 8"):
        Cluster.parse("2x4").level_between(0, 8)


def test_stage_limits() -> None:
    cluster = Cluster.from_toml(TWO_HOSTS)
    limits = stage_limits(cluster, range(5))
    assert [stage.bytes_per_second for stage in limits] == [100e9] * 3 + [3.125e9] * 2
    assert [stage.full_duplex for stage in limits] == [True, True, True, False, False]
    assert {stage.memory_bytes for stage in limits} == {80 * 10**9}
    assert stage_limits(Cluster.local(1), [0])[0].memory_bytes is None


@pytest.mark.parametrize("kind", ["cpu ", " cuda", "H100\n"])
def test_a_kind_with_spaces_is_not_another_one(kind: str) -> None:
    with pytest.raises(ClusterError, match="did you mean"):
        Device(kind)


def test_the_link_of_a_device_to_its_host() -> None:
    text = '[[devices]]\nkind = "a100-80"\nhost_bandwidth = "5 GB/s"\n'
    cluster = Cluster.from_toml(text)
    assert cluster.devices[0].host_rate == 5e9
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert [Device(kind).host_rate for kind in ("a100-80", "h100", "cuda")] == [25e9, 50e9, 12e9]
    for wrong, said in (("0 GB/s", "host_bandwidth is 0"), ("fast", "host_bandwidth")):
        with pytest.raises(ClusterError, match=said):
            Cluster.from_toml(text.replace("5 GB/s", wrong))
