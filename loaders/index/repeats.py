"""The same shard under two paths: refused, since every sample of it would come twice."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from orchdata.loaders.storage.paths import status_at
from orchdata.loaders.storage.retries import tried


def refuse_repeats(urls: Sequence[str], *, num_threads: int) -> None:
    """Refuse shards that are one file: by a symbolic link, or by a hard link.

    Files of equal device and inode are looked at closer, as network file systems repeat inodes: they are one file where
    their real path is one, or where the file has several links and size and time of change are equal too.

    Raises:
        ValueError: naming both paths. Shards that are not there are left to whoever opens them.
        StorageError: a shard cannot be looked at now.
    """
    with ThreadPoolExecutor(num_threads, thread_name_prefix="orchdata-stat") as pool:  # a network file system waits
        shares = list(pool.map(lambda first: [status_at(url) for url in urls[first::num_threads]], range(num_threads)))
    seen: dict[tuple[int, int], list[str]] = {}
    for place, url in enumerate(urls):
        status = shares[place % num_threads][place // num_threads]
        if status is None or not stat.S_ISREG(status.st_mode):
            continue
        same_inode = seen.setdefault((status.st_dev, status.st_ino), [])
        for other in same_inode:
            if how := _are_one(other, url, status):
                raise ValueError(
                    f"{url} and {other} are the same file ({how}), and every sample would come twice: name one of them"
                )
        same_inode.append(url)


def _are_one(one: str, other: str, status: os.stat_result) -> str | None:
    """How two paths of equal device and inode are one file; None where they are not known to be."""
    real = _real_path(one)
    if real == _real_path(other):
        return f"both are {real}"
    first = status_at(one)
    if first is None or min(first.st_nlink, status.st_nlink) < 2:
        return None
    same = (first.st_size, first.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    return "hard links to it" if same else None


def _real_path(url: str) -> str:
    # Strict: else a folder that cannot be looked at for a moment is taken for one that is no link.
    return tried(url, "cannot be looked at", lambda: os.path.realpath(url, strict=True))
