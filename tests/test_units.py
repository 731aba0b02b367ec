"""Units: what people write, and what files get back."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.errors import ConfigError
from pdcompile.units import (
    exact_bytes,
    exact_rate,
    exact_seconds,
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
    three_digits,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80 GB", 80 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("4096 B", 4096),
        ("12 KB", 12_000),
        ("12 kB", 12_000),
        ("1e3 MB", 10**9),
        (" 7 KiB ", 7168),
        (17, 17),
        ("0 B", 0),
        ("1152921504606846977 B", 2**60 + 1),
    ],
)
def test_bytes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25 Gbit/s", 3.125e9), ("100 GB/s", 1e11), ("1 GiB/s", 2.0**30), ("8 Mbit/s", 1e6), (5, 5.0)],
)
def test_rates(text: str | int, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("5 us", 5e-6), ("5 µs", 5e-6), ("1.5 ms", 1.5e-3)])
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    "text", ["80", "80 gb", "80 Gb", "-1 GB", "GB", "", "1 GB/s", "nan GB", "1,5 GB", "1_0 GB", -3]
)
def test_wrong_bytes_name_text_and_units(text: str | int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text, what="memory", where="cluster.toml: devices[0].memory")
    assert repr(text) in str(caught.value)
    assert "GiB" in str(caught.value)
    assert "cluster.toml: devices[0].memory" in str(caught.value)


@pytest.mark.parametrize("value", [True, None, 1.5, [1]])
def test_wrong_types(value: object) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(value)  # type: ignore[arg-type]


def test_half_a_byte_and_too_much() -> None:
    assert parse_bytes("7.45 GiB") == int(7.45 * 2**30)
    with pytest.raises(ConfigError, match="too large"):
        parse_bytes("1e300 GB")
    with pytest.raises(ConfigError, match="too large"):
        parse_rate("1e300 PB/s")
    for seconds in ("1e200 s", 1e200):
        with pytest.raises(ConfigError, match="too large"):
            parse_seconds(seconds)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, True])
def test_numbers_that_are_no_rate(rate: float) -> None:
    with pytest.raises(ConfigError):
        parse_rate(rate)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (80 * 10**9, "80.0 GB"), (999_600, "1.00 MB")],
)
def test_formatted_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_formatted_flops() -> None:
    assert [format_flops(n) for n in (0, 7, 6_442_450_944)] == ["0 FLOP", "7 FLOP", "6.44 GFLOP"]


def test_formatted_rates_and_seconds() -> None:
    assert format_rate(12.5e9) == "12.5 GB/s"
    assert format_rate(float("inf")) == "unlimited"
    assert format_seconds(0.00125) == "1.25 ms"
    assert format_seconds(0) == "0 s"
    assert format_seconds(90) == "90.0 s"


@given(st.integers(0, 2**60))
def test_exact_bytes_come_back(count: int) -> None:
    assert parse_bytes(exact_bytes(count)) == count


@given(st.floats(0, 1e18))
def test_exact_rates_and_seconds_come_back(number: float) -> None:
    assert parse_rate(exact_rate(number)) == number
    assert parse_seconds(exact_seconds(number)) == number


@given(st.integers(0, 10**16))
def test_three_digits_come_back(count: int) -> None:
    for up in (True, False):
        number, text = three_digits(count, up=up)
        assert parse_bytes(text) == number
        assert len(text.split()[0].replace(".", "")) <= 3
        assert count <= number <= 1.01 * count + 1 if up else number <= count <= 1.01 * number + 1


def test_an_amount_that_a_message_names_can_be_pasted() -> None:
    assert parse_bytes("20838400 bytes") == 20838400


@pytest.mark.parametrize("parse", [parse_bytes, parse_rate])
@pytest.mark.parametrize("value", ["9" * 5000, 10**5000, 10**400], ids=["text", "long", "wide"])
def test_more_digits_than_python_converts(parse: Callable[..., float], value: int | str) -> None:
    unit = "/s" if parse is parse_rate else ""
    amount = f"{value} GB{unit}" if isinstance(value, str) else value
    with pytest.raises(ConfigError, match="too large") as caught:
        parse(amount)
    assert len(str(caught.value)) < 300


def test_small_counts_are_not_nothing() -> None:
    assert [format_count(one) for one in (0.1, 0.104, 9.96, 10.4, 12345.6)] == [
        "0.1", "0.1", "10", "10", "12,346",
    ]  # fmt: skip
