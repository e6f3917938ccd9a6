"""Bytes and durations as people read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Bytes in decimal units, as disks and model cards count: 1_500_000_000 is "1.5 GB"."""
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB"))


def format_gib(count: float) -> str:
    """Bytes in binary units, as memory is counted: 2**31 is "2.0 GiB"."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_seconds(seconds: float) -> str:
    """A duration: "8.1 s", "4 min 05 s", "3 h 12 min"."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _scaled(count: float, step: int, units: tuple[str, ...]) -> str:
    if count < step:
        return f"{count:.0f} {units[0]}"
    power = 1
    # Compared after rounding, or 999,999 bytes would print as "1000.0 kB".
    while round(count / step**power, 1) >= step and power < len(units) - 1:
        power += 1
    return f"{count / step**power:.1f} {units[power]}"
