"""Bytes and durations, at and around the borders between units."""

from __future__ import annotations

import pytest

from halfbyte.units import format_bytes, format_gib, format_seconds


@pytest.mark.parametrize(
    ("count", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1_000, "1.0 kB", "1000 B"),
        (1_024, "1.0 kB", "1.0 KiB"),
        (999_949, "999.9 kB", "976.5 KiB"),
        (999_950, "1.0 MB", "976.5 KiB"),
        # GLM-5.2-FP8 and its INT4 form, in both units as published.
        (755_600_000_000, "755.6 GB", "703.7 GiB"),
        (450_900_000_000, "450.9 GB", "419.9 GiB"),
        (5 * 10**15, "5000.0 TB", "4547.5 TiB"),
    ],
)
def test_bytes(count: int, decimal: str, binary: str) -> None:
    assert (format_bytes(count), format_gib(count)) == (decimal, binary)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (11_520, "3 h 12 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
