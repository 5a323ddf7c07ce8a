"""Sizes and durations, as people write and read them."""

from __future__ import annotations

import pytest

from solver_shard.errors import InputError
from solver_shard.text import format_bytes, format_ns, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("70GiB", 70 * 2**30),
        ("70gib", 70 * 2**30),
        ("70 GB", 70 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("0.1MB", 100_000),
        ("1.0000001KB", 1000),
        ("12", 12),
        ("12B", 12),
        (4096, 4096),
    ],
)
def test_memory_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["70G B", "70G", "GiB", "", "-1GiB", "1e9", "1,5GiB", "70GiB x", "٣GB", True, "nan", "inf", "1..2GB"])
def test_other_memory_sizes_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"cannot read memory size .* write a number and one unit.*'70GiB'"):
        parse_bytes(text)


def test_more_than_any_device_has_is_refused() -> None:
    assert parse_bytes("1048576TiB") == 2**60
    with pytest.raises(InputError, match="more than 2\\^60 bytes"):
        parse_bytes("999999999999999999TiB")


@pytest.mark.parametrize("text", ["0", "0GiB", "0.1B"])
def test_less_than_a_byte_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="less than one byte"):
        parse_bytes(text)
    assert parse_bytes("0", least=0) == 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (70 * 2**30, "70.0 GiB"), (2**40 - 1, "1.00 TiB"), (123 * 2**20, "123 MiB")],
)
def test_bytes_are_shown_with_three_digits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("ns", "text"), [(0, "0 ns"), (999, "999 ns"), (1000, "1.00 us"), (999_999, "1.00 ms"), (12_345_678_901, "12.3 s")]
)
def test_times_are_shown_with_three_digits(ns: int, text: str) -> None:
    assert format_ns(ns) == text
