from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from orchdata.building.memory import BufferPool, Returns

LARGE = (1024, 1024)  # 4 MiB of float32, well above what malloc serves


def test_a_tensor_over_a_slice_keeps_the_memory() -> None:
    pool = BufferPool()
    array = pool.empty(LARGE, np.float32)
    array[:] = 7
    tensor = torch.from_numpy(array)[5:6].view(torch.int32).view(torch.float32)
    del array
    gc.collect()
    assert pool.free_bytes() == 0
    pool.empty(LARGE, np.float32)[:] = 0
    assert tensor.eq(7).all()
    del tensor
    gc.collect()
    assert pool.free_bytes() > 0


@pytest.mark.parametrize("megabytes", [range(9, 17), range(16, 8, -1), (9, 16, 10, 15, 11, 14, 12, 13)])
def test_batches_of_different_sizes_share_memory(megabytes: Iterable[int]) -> None:
    # One at a time is used: for any sizes, no more is kept than the largest needs.
    pool = BufferPool()
    for size in megabytes:
        array = pool.take(size << 20)
        assert len(array) == size << 20
        del array
        assert pool.free_bytes() <= 16 << 20


def test_collecting_an_array_calls_no_function_of_pythons() -> None:
    # What a signal raises there would be forgotten.
    pool = BufferPool()
    array = pool.take(4 << 20)
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    del array
    sys.setprofile(None)
    assert called == []
    assert pool.free_bytes() == 4 << 20


def test_an_array_that_comes_back_is_reported_once() -> None:
    returns = Returns[str]()
    arrays = [np.empty(9, np.uint8) for _ in range(3)]
    for name, array in zip("abc", arrays, strict=True):
        returns.expect(array, name)
    view = torch.from_numpy(arrays[1])[2:]
    arrays.clear()
    del array
    assert (sorted(returns.take()), len(returns)) == (["a", "c"], 1)
    del view
    assert (len(returns), list(returns.take()), list(returns.take())) == (0, ["b"], [])
