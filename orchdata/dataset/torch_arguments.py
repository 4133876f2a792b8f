"""Arguments of a DataLoader that torch's has, checked as torch checks them: the same errors, in the same words."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import IterableDataset


def check_combination(
    dataset: Any,
    *,
    batch_size: Any,
    default_batch_size: int,
    shuffle: Any,
    sampler: Any,
    batch_sampler: Any,
    drop_last: Any,
    num_threads: int | None,
) -> None:
    """Raise ValueError for arguments that exclude each other."""
    if isinstance(dataset, IterableDataset):
        for name, given in (("shuffle", shuffle or None), ("sampler", sampler), ("batch_sampler", batch_sampler)):
            if given is not None:
                raise ValueError(
                    f"DataLoader with IterableDataset: expected unspecified {name} option, but got {name}={given}"
                )
        if num_threads:
            raise ValueError("num_threads load several samples at once, and an IterableDataset gives one after another")
    if sampler is not None and shuffle:
        raise ValueError("sampler option is mutually exclusive with shuffle")
    if batch_sampler is not None:
        # batch_size=1 is what a caller passes who copies torch's default.
        if batch_size != default_batch_size or shuffle or sampler is not None or drop_last:
            raise ValueError(
                "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last"
            )
    elif batch_size is None and drop_last:
        raise ValueError(
            "batch_size=None option disables auto-batching and is mutually exclusive with drop_last: there is no "
            "remainder to drop"
        )


def check_workers(num_workers: Any, timeout: Any, multiprocessing_context: Any) -> None:
    """Raise ValueError or TypeError; warn where more processes are asked for than there are cores."""
    if isinstance(num_workers, int) and num_workers < 0:
        raise ValueError(
            f"num_workers option should be non-negative; use num_workers=0 to disable multiprocessing. "
            f"num_workers must be at least 0, got {num_workers}"
        )
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__"):
        raise ValueError(f"timeout is a number of seconds, 0 for no limit, got {timeout!r}")
    if not timeout >= 0:
        raise ValueError(
            f"timeout is a number of seconds, 0 for no limit: timeout option should be non-negative, got {timeout!r}"
        )
    _check_context(multiprocessing_context, num_workers)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if isinstance(num_workers, int) and num_workers > cores:
        warnings.warn(
            f"This DataLoader will create {num_workers} worker processes, and this process has {cores} cores: "
            "excessive worker creation might get DataLoader running slow or even freeze; lower num_workers",
            stacklevel=4,
        )


def _check_context(context: Any, num_workers: Any) -> None:
    if context is None:
        return
    if not num_workers:
        raise ValueError(
            "multiprocessing_context can only be used with multi-process loading (num_workers > 0), but got "
            f"num_workers={num_workers}: leave it out, or give num_workers"
        )
    known = multiprocessing.get_all_start_methods()
    if isinstance(context, str) and context not in known:
        raise ValueError(
            f"multiprocessing_context option should specify a valid start method in {known!r}, but got "
            f"multiprocessing_context={context!r}"
        )
    if not isinstance(context, str | BaseContext):
        raise TypeError(
            "multiprocessing_context option should be a valid context object or a string specifying the start method, "
            f"but got multiprocessing_context={context}"
        )


def base_seed(generator: torch.Generator | None) -> int:
    """What torch's loader draws at each `iter()`, with or without workers: worker k is seeded with this, plus k."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
