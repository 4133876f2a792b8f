"""Merging samples of several sources by virtual time: the next sample is the one with the smallest (time, source)."""

from __future__ import annotations

from typing import Any, Final

from orchdata.native.jit import kernel

FULL: Final = -1
LATER: Final = -2
WIDE: Final = -3


@kernel
def merge(
    times: Any,
    given: Any,
    periods: Any,
    widest: Any,
    sizes: Any,
    heads: Any,
    tails: Any,
    until: int,
    left: int,
    floor: int,
    out_source: Any,
    out_index: Any,
) -> tuple[int, int]:
    """Merge samples until `out_source` is full, or `left` are given; return their number, and why it ended.

    It ends as well with the last sample that a source has at hand, which is then returned; with LATER if all other
    samples come after time `until`; with WIDE if the next sample of a source has more than its `widest`.

    Args:
        times: of the next sample of each source.
        given: the time at which a source has given what it has given.
        sizes: of the samples at hand: sizes[heads[k]:tails[k]] are those of source k.
        floor: the earliest time of a sample.
        out_source, out_index: filled with the source of each sample, and its index in `sizes`.
    """
    count = 0
    while count < len(out_source) and left > 0:
        best = 0
        for source in range(1, len(times)):
            if times[source] < times[best]:
                best = source
        if times[best] > until:
            return count, LATER
        index = heads[best]
        out_source[count], out_index[count] = best, index
        count += 1
        given[best] += sizes[index] * periods[best]
        left -= sizes[index]
        index += 1
        heads[best] = index
        if index == tails[best]:
            return count, best
        if sizes[index] > widest[best]:
            return count, WIDE
        times[best] = max(given[best] + sizes[index] * periods[best], floor)
    return count, FULL
