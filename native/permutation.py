"""Keyed permutations of small and huge ranges: position -> sample, computed one by one, without a table.

A permutation of [0, size) is a Feistel network on the rectangle a x b, a = ceil(sqrt(size)), b = ceil(size / a): rounds
add a keyed hash of one coordinate to the other, a bijection for any hash (Black and Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002). Values at or above `size` follow their cycle until they are inside.

`shuffled_rows` composes them into the order of an epoch: streams, blocks of 256 consecutive samples, windows of blocks.
Everything is uint64: numba turns uint64 with int64 into float64.

Keys -> 64-bit hashes: the same on every machine, for any neighbours in memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import Ints, kernel

BLOCK = 256  # consecutive samples that move together before a window mixes them

# Even numbers. A round moves little where the sides are short: below 24, chi-square sees a bias on ranges of up to 8.
_SMALL, _SMALL_ROUNDS, _ROUNDS = np.uint64(64), 24, 6

_BLOCK = np.uint64(BLOCK)
_ZERO, _ONE, _TWO, _THREE = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)
_HALF, _SIGN = np.uint64(32), np.uint64(63)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_A, _SHIFT_B, _SHIFT_C = np.uint64(30), np.uint64(27), np.uint64(31)


@kernel
def derive_key(key: np.uint64, value: np.uint64) -> np.uint64:
    """Return the key of child `value` of `key`: a splitmix64 step (Steele, Lea, Flood 2014), distinct for all."""
    x = (key ^ (value * _GOLDEN)) + _GOLDEN
    x = (x ^ (x >> _SHIFT_A)) * _MIX_A
    x = (x ^ (x >> _SHIFT_B)) * _MIX_B
    return x ^ (x >> _SHIFT_C)


@kernel
def _hash32(value: np.uint64, key: np.uint64) -> np.uint64:
    """Return 32 hashed bits."""
    x = (value + key) * _MIX_A
    x = (x ^ (x >> _SHIFT_C)) * _MIX_B
    return x >> _HALF


@kernel
def _side(size: np.uint64) -> np.uint64:
    """Return ceil(sqrt(size)), exactly."""
    side = np.uint64(np.sqrt(np.float64(size)))
    while side * side < size:
        side += _ONE
    return side


@kernel
def _permute_one(value: np.uint64, size: np.uint64, a: np.uint64, b: np.uint64, key: np.uint64) -> np.uint64:
    while True:
        right = value // a
        left = value - right * a
        round_key = key
        for _ in range((_SMALL_ROUNDS if size <= _SMALL else _ROUNDS) // 2):
            # hash * a >> 32 is a number below a; both sides stay below 2**32, so the product fits.
            left += (_hash32(right, round_key) * a) >> _HALF
            if left >= a:
                left -= a
            round_key += _GOLDEN
            right += (_hash32(left, round_key) * b) >> _HALF
            if right >= b:
                right -= b
            round_key += _GOLDEN
        value = right * a + left
        if value < size:
            break
    # Rounds on odd sides are only even permutations, a bias of small ranges: half of the keys swap 0 and 1.
    if value <= _ONE and size > _ONE and key >> _SIGN == _ONE:
        value ^= _ONE
    return value


@kernel
def permute(size: np.uint64, key: np.uint64, values: NDArray[np.uint64]) -> None:
    """Replace each of `values` (n,), all below `size` <= 2**62, by its image under the permutation `key`."""
    a = _side(size)
    b = (size + a - _ONE) // a
    for i in range(values.shape[0]):
        values[i] = _permute_one(values[i], size, a, b, key)


@kernel
def odd_slot(stream_key: np.uint64, slots: np.uint64) -> np.uint64:
    """Return the slot of the incomplete block among the blocks of its stream."""
    return derive_key(stream_key, _THREE) % slots


@kernel
def blocks_in_sequence(num_samples: np.uint64, streams: np.uint64, key: np.uint64, out: NDArray[np.uint64]) -> None:
    """Write the blocks of each stream to `out` (num_blocks,), in the sequence that they have in `shuffled_rows`. Blocks
    are numbered from one stream to the next, in the sequence of the samples.
    """
    first = _ZERO  # slot and block at which the stream begins
    for stream in range(streams):
        stream = np.uint64(stream)
        stream_key = derive_key(key, stream)
        length = (num_samples - stream + streams - _ONE) // streams
        blocks, slots = length // _BLOCK, (length + _BLOCK - _ONE) // _BLOCK
        if blocks > _ZERO:
            whole = out[first : first + blocks]
            for block in range(blocks):
                whole[block] = block
            permute(blocks, derive_key(stream_key, _ONE), whole)
        if slots > blocks:
            # Whole blocks from the slot of the incomplete one on come one slot later.
            odd, slot = odd_slot(stream_key, slots), blocks
            while slot > odd:
                out[first + slot] = out[first + slot - _ONE]
                slot -= _ONE
            out[first + odd] = blocks
        for slot in range(first, first + slots):
            out[slot] += first
        first += slots


@kernel
def _start_of(slot: np.uint64, odd: np.uint64, rest: np.uint64) -> np.uint64:
    """Return the number of samples in the slots before one; slot `odd` has `rest`, the others whole blocks."""
    return slot * _BLOCK if slot <= odd else (slot - _ONE) * _BLOCK + rest


@kernel
def _slot_of(offset: np.uint64, odd: np.uint64, rest: np.uint64) -> np.uint64:
    """Return the slot of an offset in a stream."""
    if offset < odd * _BLOCK:
        return offset // _BLOCK
    return odd if offset < odd * _BLOCK + rest else (offset - rest) // _BLOCK + _ONE


@kernel
def shuffled_rows(
    num_samples: np.uint64,
    window: np.uint64,
    streams: np.uint64,
    key: np.uint64,
    start: np.uint64,
    out: NDArray[np.uint64],
) -> None:
    """Write the samples at positions start, start + 1, ... to `out` (n,): a permutation of [0, num_samples) by `key`.

    Position p belongs to stream p % streams. A stream is a contiguous range of samples, cut into blocks from its first
    sample on: whole ones, and an incomplete last one. Whole blocks are permuted, the last one is among them at a keyed
    slot; each `window` of slots (as equal in number as possible, never more) is one range of samples that are permuted.
    So a window has whole blocks for any key, and sums over blocks give sums over windows.
    """
    stop = start + np.uint64(out.shape[0])
    for stream in range(streams):
        stream = np.uint64(stream)
        first = start + (stream + streams - start % streams) % streams
        if first >= stop:
            continue
        length = (num_samples - stream + streams - _ONE) // streams
        extra = num_samples % streams
        begin = stream * (num_samples // streams) + min(stream, extra)

        stream_key = derive_key(key, stream)
        block_key = derive_key(stream_key, _ONE)
        window_key = derive_key(stream_key, _TWO)
        blocks, rest = length // _BLOCK, length % _BLOCK
        slots, odd = blocks, blocks  # `odd`: the slot of the incomplete block
        if rest > _ZERO:
            slots = blocks + _ONE
            odd = odd_slot(stream_key, slots)
        windows = (slots + window - _ONE) // window
        block_a = _side(blocks) if blocks > _ZERO else _ONE
        block_b = (blocks + block_a - _ONE) // block_a

        index = first // streams
        at = first - start
        low, high = _ZERO, _ZERO  # [low, high) is the current window
        size, a, b, here_key = _ONE, _ONE, _ONE, _ZERO
        while at < stop - start:
            if index >= high:
                # The window of slot j is the largest w with w * slots // windows <= j.
                this = ((_slot_of(index, odd, rest) + _ONE) * windows - _ONE) // slots
                low = _start_of(this * slots // windows, odd, rest)
                high = _start_of((this + _ONE) * slots // windows, odd, rest)
                size = high - low
                a = _side(size)
                b = (size + a - _ONE) // a
                here_key = derive_key(window_key, this)
            offset = low + _permute_one(index - low, size, a, b, here_key)
            slot = _slot_of(offset, odd, rest)
            block = blocks
            if slot < odd:
                block = _permute_one(slot, blocks, block_a, block_b, block_key)
            elif slot > odd:
                block = _permute_one(slot - _ONE, blocks, block_a, block_b, block_key)
            out[at] = begin + block * _BLOCK + offset - _start_of(slot, odd, rest)
            index += _ONE
            at += streams


_PRIME, _START = np.uint64(0x100000001B3), np.uint64(0xCBF29CE484222325)


@kernel
def finished(value: np.uint64) -> np.uint64:
    """Mix 64 bits, as splitmix64 finishes."""
    value = (value ^ (value >> _SHIFT_A)) * _MIX_A
    value = (value ^ (value >> _SHIFT_B)) * _MIX_B
    return value ^ (value >> _SHIFT_C)


@kernel
def hash_keys(offsets: Ints, data: NDArray[np.uint8], seed: np.uint64, out: NDArray[np.uint64]) -> None:
    """Write FNV-1a of each string in `data` by its `offsets`, int64 (n + 1,), with the seed mixed into the start and
    the finish of splitmix64.
    """
    start = finished(_START ^ seed)
    for i in range(out.size):
        value = start
        for at in range(offsets[i], offsets[i + 1]):
            value = (value ^ np.uint64(data[at])) * _PRIME
        out[i] = finished(value)
