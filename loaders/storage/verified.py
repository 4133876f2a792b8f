"""Notes that a large file was verified on this machine since it started, so that it is read in full only once.

A note names the very file: path, inode, size, times of change. It lies beside it, hidden, one a machine and start;
where it cannot be written the file is verified each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import cache
from pathlib import Path

from orchdata.loaders.storage.atomic import remove, write_once
from orchdata.loaders.storage.shared.files import read_small

NOTE_SUFFIX = ".verified"
_MOST_BYTES = 64 << 10
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def is_noted(path: Path, status: os.stat_result) -> bool:
    """Whether a note says that the file, which has this status now, was verified."""
    try:
        return bool(_boot_id()) and read_small(_note(path), _MOST_BYTES) == _identity(path, status)
    except (OSError, ValueError):
        return False


def note(path: Path, status: os.stat_result) -> None:
    """Keep that the file, which had this status before and after, was verified; best effort."""
    if not _boot_id():
        return
    with contextlib.suppress(OSError):
        write_once(_note(path), _identity(path, status))


def forget(path: Path) -> None:
    """The file is to be verified at its next use; best effort."""
    remove(_note(path))


def _identity(path: Path, status: os.stat_result) -> bytes:
    told = {
        "path": os.path.abspath(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
        "boot_id": _boot_id(),
    }
    return json.dumps(told).encode()


def _note(path: Path) -> Path:
    machine = hashlib.blake2b(_boot_id().encode(), digest_size=8).hexdigest()
    return path.with_name(f".{path.name}.{machine}{NOTE_SUFFIX}")


@cache
def _boot_id() -> str:
    """Another one after each start of the machine; empty where the system gives none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
