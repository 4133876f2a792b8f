"""Notes that a large file was verified on this machine since it booted, so that it is read completely only once.
The time of the note is that of the last use of the file.

A note identifies the file by path, inode, size, mtime and ctime. It is a hidden file in the same folder, one per
machine and boot; if it cannot be written, the file is verified each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import cache
from pathlib import Path

from orchdata.loaders.storage.atomic import remove, write_once
from orchdata.loaders.storage.opening import read_small, record_use

NOTE_SUFFIX = ".verified"
_MOST_BYTES = 64 << 10
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def is_noted(path: Path, status: os.stat_result) -> bool:
    """Return whether a note says that the file, with this status, was verified."""
    try:
        is_right = bool(_boot_id()) and read_small(_note(path), _MOST_BYTES) == _identity(path, status)
    except (OSError, ValueError):
        return False
    still_used(path)
    return is_right


def still_used(path: Path) -> None:
    """Record that a noted file is used; best effort."""
    record_use(_note(path))


def note(path: Path, status: os.stat_result) -> None:
    """Note that the file was verified, with this status before and after; best effort."""
    if not _boot_id():
        return
    with contextlib.suppress(OSError):
        write_once(_note(path), _identity(path, status))


def forget(path: Path) -> None:
    """Remove the note, so that the file is verified at its next use; best effort."""
    remove(_note(path))


def _identity(path: Path, status: os.stat_result) -> bytes:
    identity = {
        "path": os.path.abspath(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
        "boot_id": _boot_id(),
    }
    return json.dumps(identity).encode()


def _note(path: Path) -> Path:
    machine = hashlib.blake2b(_boot_id().encode(), digest_size=8).hexdigest()
    return path.with_name(f".{path.name}.{machine}{NOTE_SUFFIX}")


@cache
def _boot_id() -> str:
    """Return the id of this boot of the machine; "" if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
