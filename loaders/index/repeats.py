"""Refusing the same shard under two paths: every sample of it would come twice."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from orchdata.loaders.storage.paths import status_at
from orchdata.loaders.storage.retries import tried


def refuse_repeats(urls: Sequence[str], *, num_threads: int) -> None:
    """Refuse shards that are the same file, by a symbolic link or a hard link.

    Network file systems reuse inodes, so an equal device and inode is not enough: the real paths must be equal too, or
    the file must have several links, and size and modification time be equal.

    Raises:
        ValueError: naming both paths. Missing shards are ignored: opening them raises the error.
        StorageError: a shard cannot be checked now.
    """
    with ThreadPoolExecutor(num_threads, thread_name_prefix="orchdata-stat") as pool:  # for slow network file systems
        shares = list(pool.map(lambda first: [status_at(url) for url in urls[first::num_threads]], range(num_threads)))
    seen: dict[tuple[int, int], list[str]] = {}
    for number, url in enumerate(urls):
        status = shares[number % num_threads][number // num_threads]
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
    """Return why two paths of equal device and inode are the same file; None if they may be different files."""
    real = _real_path(one)
    if real == _real_path(other):
        return f"both are {real}"
    first = status_at(one)
    if first is None or min(first.st_nlink, status.st_nlink) < 2:
        return None
    same = (first.st_size, first.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    return "hard links to it" if same else None


def _real_path(url: str) -> str:
    # Strict: otherwise a link that cannot be read for a moment would be taken for a plain folder.
    return tried(url, "cannot be looked at", lambda: os.path.realpath(url, strict=True))
