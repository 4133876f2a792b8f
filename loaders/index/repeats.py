"""Refusing the same shard under two paths: every sample of it would come twice."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

from orchdata.loaders.storage.files import PLAIN_FILES


def refuse_repeats(urls: Sequence[str], *, num_threads: int) -> None:
    """Refuse shards that are the same file, by a symbolic link or a hard link.

    Raises:
        ValueError: naming both paths. Missing shards are ignored: opening them raises the error.
        StorageError: a shard cannot be checked now.
    """
    with ThreadPoolExecutor(num_threads, thread_name_prefix="orchdata-stat") as pool:  # for slow network file systems
        shares = list(
            pool.map(
                lambda first: [PLAIN_FILES.file_number(url) for url in urls[first::num_threads]], range(num_threads)
            )
        )
    seen: dict[Hashable, list[str]] = {}
    for at, url in enumerate(urls):
        number = shares[at % num_threads][at // num_threads]
        if number is None:
            continue
        same_number = seen.setdefault(number, [])
        for other in same_number:
            if how := PLAIN_FILES.why_same(other, url):
                raise ValueError(
                    f"{url} and {other} are the same file ({how}), and every sample would come twice: name one of them"
                )
        same_number.append(url)
