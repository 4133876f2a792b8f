"""Amounts as people write them: "50GB" -> bytes, "30d" -> seconds, "2M" -> 2,000,000, 2 and "shard" -> "2 shards"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_BYTES: Final = {"": 1, "b": 1} | {
    unit: base**power
    for power, prefix in enumerate("kmgtp", 1)
    for unit, base in ((f"{prefix}b", 1000), (prefix, 1000), (f"{prefix}ib", 1024))
}


_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def bytes_of(text: str, name: str) -> int:
    """Return a number of bytes: "50GB" (1000), "50GiB" (1024), or "50000000000". Raises ValueError with `name`."""
    return _amount(text, _BYTES, name, "a number of bytes, such as 50GB or 50GiB")


def seconds_of(text: str, name: str) -> int:
    """Return a time in seconds: "90s", "45m", "12h", "30d", "2w". Raises ValueError with `name`."""
    return _amount(text, _SECONDS, name, "a time with its unit, such as 30d, 12h, 45m or 90s")


def count_of(text: str, name: str) -> int:
    """Return a number: "2M", "16k", "16384". Raises ValueError with `name`."""
    return _amount(text, {"": 1, "k": 1000, "m": 1000**2}, name, "a number, such as 16384 or 2M")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it is not one: "1 shard", "2,000 shards"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def these(count: int, noun: str) -> str:
    """Return a number of things that are there in words: "this shard", "these 2,000 shards"."""
    return f"this {noun}" if count == 1 else f"these {counted(count, noun)}"


def _amount(text: str, units: Mapping[str, int], name: str, otherwise: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{name} is {text!r}, and should be {otherwise}")
    return int(float(match[1]) * units[match[2]]) if "." in match[1] else int(match[1]) * units[match[2]]
