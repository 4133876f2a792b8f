"""Tournament tree kernels: keys (num_ranks,) -> the smallest, kept up to date as keys change.

A key has its rank in its lowest bits, so the root shows the winner. Unlike a heap it has no branch to mispredict.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

NEVER = (1 << 63) - 1  # Key of a rank that may not win.


@kernel
def tournament(keys: NDArray[np.int64], tree: NDArray[np.int64]) -> None:
    """Play all matches: the leaf of rank r is tree[len(tree) // 2 + r], each node has the smaller key of its children.

    Args:
        keys: int64 (num_ranks,).
        tree: int64 (2 * leaves,), leaves a power of two and at least num_ranks; written.
    """
    leaves = tree.shape[0] // 2
    tree[:] = NEVER
    tree[leaves : leaves + keys.shape[0]] = keys
    for node in range(leaves - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])


@kernel
def replay(tree: NDArray[np.int64], node: int, key: int) -> None:
    """Write a leaf and replay its matches."""
    tree[node] = key
    while node > 1:
        key = min(key, tree[node ^ 1])
        node >>= 1
        tree[node] = key


@kernel
def winner(tree: NDArray[np.int64], first: int, stop: int) -> int:
    """Return the smallest key of the ranks from `first` to `stop` - 1, at least one."""
    left = first + tree.shape[0] // 2
    right = stop + tree.shape[0] // 2
    best = np.int64(NEVER)
    while left < right:
        if left & 1:
            best = min(best, tree[left])
            left += 1
        if right & 1:
            right -= 1
            best = min(best, tree[right])
        left >>= 1
        right >>= 1
    return best
