"""Microbatch kernels: rank of each sample -> microbatch of each, the same number on all ranks, within the caps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.binpack import best_fit, bins_needed, by_fullness, least_loaded_fit, level, search_fit
from orchdata.native.jit import kernel


@kernel
def samples_by_rank(rank: NDArray[np.int32], num_ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Samples grouped by rank, in their order: (offsets (num_ranks + 1,), samples); -1 is left out."""
    offsets = np.zeros(num_ranks + 1, np.int64)
    for owner in rank:
        if owner >= 0:
            offsets[owner + 1] += 1
    for r in range(num_ranks):
        offsets[r + 1] += offsets[r]
    samples = np.empty(offsets[num_ranks], np.int64)
    cursor = offsets[:num_ranks].copy()
    for sample in range(rank.shape[0]):
        if rank[sample] >= 0:
            samples[cursor[rank[sample]]] = sample
            cursor[rank[sample]] += 1
    return offsets, samples


@kernel
def pack_rank(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    num_bins: int,
    bins: NDArray[np.int32],
) -> bool:
    """Pack one rank's samples into `num_bins` microbatches; False where no packing was found. Writes `bins`."""
    if num_bins == 1:
        bins[:] = 0
        return bins_needed(sizes, caps) == 1
    by_cost = np.argsort(-costs, kind="mergesort")
    if least_loaded_fit(costs, sizes, caps, by_cost, num_bins, bins):
        return True
    order = by_fullness(sizes, caps)
    if best_fit(sizes, caps, order, num_bins, bins):
        return True
    return search_fit(sizes, caps, order, num_bins, bins)


@kernel
def rename(costs: NDArray[np.int64], num_bins: int, bins: NDArray[np.int32], by_cost: bool) -> None:
    """Number one rank's microbatches by descending cost, else by their first sample; empty ones last. In place."""
    work = np.zeros(num_bins, np.int64)
    first = np.full(num_bins, np.int64(costs.shape[0]))
    for item in range(costs.shape[0]):
        work[bins[item]] += costs[item]
        first[bins[item]] = min(first[bins[item]], np.int64(item))
    order = np.argsort(first, kind="mergesort")
    if by_cost:
        order = order[np.argsort(-work[order], kind="mergesort")]
    name = np.empty(num_bins, np.int32)
    for number in range(num_bins):
        name[order[number]] = number
    for item in range(costs.shape[0]):
        bins[item] = name[bins[item]]


@kernel
def split(
    costs: NDArray[np.int64],
    rank: NDArray[np.int32],
    num_ranks: int,
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    num_microbatches: int,
    in_step: bool,
) -> tuple[NDArray[np.int32], int]:
    """Split each rank's samples into microbatches.

    Args:
        costs: int64 (num_samples,).
        rank: int32 (num_samples,), -1 for samples left out.
        num_ranks: at least 1.
        sizes: int64 (num_samples, num_caps), C-contiguous.
        caps: int64 (num_caps,), at least 1.
        num_microbatches: how many; 0 for the fewest that fit.
        in_step: number microbatches by descending cost.

    Returns:
        (microbatch int32 (num_samples,), -1 where rank is -1; their number, at least 1). With num_microbatches given
        and too small, the number needed is returned with an empty array.
    """
    offsets, samples = samples_by_rank(rank, num_ranks)
    count = np.int64(max(1, num_microbatches))
    bins = np.zeros(samples.shape[0], np.int32)
    if num_microbatches == 0:
        for r in range(num_ranks):
            held = samples[offsets[r] : offsets[r + 1]]
            if held.shape[0] > 0:
                count = max(count, bins_needed(sizes[held], caps))
    packed_into = np.zeros(num_ranks, np.int64)
    # What a rank cannot do with `count` it may with more; one that could can still, so none is visited twice.
    for r in range(num_ranks):
        held = samples[offsets[r] : offsets[r + 1]]
        if held.shape[0] == 0:
            continue
        while not pack_rank(costs[held], sizes[held], caps, count, bins[offsets[r] : offsets[r + 1]]):
            count += 1
        packed_into[r] = count
    microbatch = np.full(rank.shape[0], np.int32(-1))
    if 0 < num_microbatches < count:
        return np.empty(0, np.int32), count
    for r in range(num_ranks):
        held = samples[offsets[r] : offsets[r + 1]]
        own = bins[offsets[r] : offsets[r + 1]]
        if count > 1 and held.shape[0] > 0:
            # Ranks packed before the count was raised have more room now; a search that fails keeps what was found.
            again = own.copy()
            if packed_into[r] < count and pack_rank(costs[held], sizes[held], caps, count, again):
                own[:] = again
            level(costs[held], sizes[held], caps, count, own)
            rename(costs[held], count, own, in_step)
        for index in range(held.shape[0]):
            microbatch[held[index]] = own[index]
    return microbatch, count
