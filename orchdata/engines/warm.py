"""Warming: compiles or loads the kernels that a loader's steps call, before the first step is waited for.

    a fresh machine --Warming: child processes, a family of kernels each, while shards are indexed--> stored on disk
    stored on disk ---warm: synthetic steps, 0.2 s------------------------------------------------------> loaded

numba compiles one kernel at a time in a process, so only processes compile in parallel. Compiled kernels are stored
next to the source (or in NUMBA_CACHE_DIR, or the user's cache folder), by source file, argument types, CPU and numba's
version: once per machine or image, for all processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchdata.engines.kernel_families import FAMILIES, warm
from orchdata.finalizers import Ending
from orchdata.loaders.limited_process import die_with_parent
from orchdata.native.jit import sources_stamp
from orchdata.notices import in_words, progress_bar

if TYPE_CHECKING:
    from orchdata.building.spec import BuildSpec

_COMPILING = "compiling kernels, once on this machine"
_PATIENCE_SECONDS = 600.0
_FAMILY_SECONDS = 30.0  # on one core


class Warming:
    """A loader's kernels: child processes start to compile those that this machine lacks; `finish` loads all of them.

    If several processes need a family, as the ranks of a node do, one compiles it and the others wait. Children end
    with the loader, and with this process, however it ends.

    Attributes:
        is_over: whether no child runs any more.
    """

    def __init__(self, families: Sequence[str]) -> None:
        missing = [name for name in families if not _is_stored(name)]
        num_children = min(len(missing), len(os.sched_getaffinity(0)))
        self._children: list[subprocess.Popen[bytes]] = []
        self._is_done = False
        if missing and os.environ.get("LOCAL_RANK", "0") == "0":
            seconds = _FAMILY_SECONDS * -(-len(missing) // num_children)
            sys.stderr.write(f"{_COMPILING}: about {in_words(seconds)} (`orchdata warm` does it ahead)\n")
            sys.stderr.flush()
        for number in range(num_children):
            command = [sys.executable, "-P", "-m", "orchdata.engines.warm", *missing[number::num_children]]
            with contextlib.suppress(OSError):  # then this process compiles them, when it needs them
                self._children.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                )
        self._ending = Ending(self, partial(_end, self._children)) if self._children else None
        self.is_over = not self._children

    def wait(self) -> None:
        """Wait until all kernels are compiled, with a progress bar."""
        if self._children:
            with progress_bar(_COMPILING) as progress:
                for done, child in enumerate(self._children):
                    progress(done, len(self._children))
                    with contextlib.suppress(subprocess.TimeoutExpired):  # then this process compiles the missing ones
                        child.wait(_PATIENCE_SECONDS)
        _end(self._children)
        if self._ending is not None:
            self._ending.cancel()
        self.is_over = True

    def finish(self, spec: BuildSpec) -> None:
        """Wait, then load the kernels into this process, once. An error occurs again in the step that needs them."""
        if not self._is_done:
            self.wait()
            with contextlib.suppress(Exception):
                warm(spec)
            self._is_done = True


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    while children:
        with children.pop() as child:  # waits for its end, and closes its pipe
            child.kill()


def _is_stored(family: str) -> bool:
    """Return whether the family's head was compiled after the last change of any kernel's source, by numba's index."""
    head = _head(family)
    # This process may not need numba: it imports numba only if the kernel is not where it usually is.
    usual = _usual_folder(Path(head.py_func.__code__.co_filename))
    if os.access(usual, os.W_OK) and _is_in(usual, head):
        return True
    folder = _cache_folder(head)
    return folder is None or _is_in(folder, head)  # without a folder no process can compile for another


def _is_in(folder: Path, head: Any) -> bool:
    source = Path(head.py_func.__code__.co_filename)
    written = max(changed for _, _, changed in sources_stamp())
    indexes = folder.glob(f"{source.stem}.{head.py_func.__name__}-*.nbi")
    return any(index.stat().st_mtime_ns >= written for index in indexes)


def _head(family: str) -> Any:
    module, _, name = FAMILIES[family].head.partition(":")
    return getattr(import_module(f"orchdata.native.{module}"), name)


def _usual_folder(source: Path) -> Path:
    """Return where numba stores compiled kernels of a file, if it can write there.

    See UserProvidedCacheLocator and InTreeCacheLocator in numba.
    """
    if not (chosen := os.environ.get("NUMBA_CACHE_DIR")):
        return source.parent / "__pycache__"
    folder = os.path.dirname(os.path.abspath(source))
    # The hash names a folder, and protects nothing.
    hashed = hashlib.sha1(folder.encode(), usedforsecurity=False).hexdigest()
    return Path(chosen, f"{os.path.basename(folder)}_{hashed}")


def stored_in() -> list[str]:
    """Return the folders in which compiled kernels of the families are stored."""
    folders = {_cache_folder(_head(name)) for name in FAMILIES}
    return sorted(str(folder) for folder in folders if folder is not None)


def _cache_folder(kernel: Any) -> Path | None:
    stats = getattr(kernel, "stats", None)  # none under NUMBA_DISABLE_JIT
    return None if stats is None or stats.cache_path is None else Path(stats.cache_path)


@contextlib.contextmanager
def _taking_turns(family: str) -> Iterator[None]:
    """Let one process of a machine run at a time, by a file lock, which ends with its process."""
    head = _head(family)
    folder = _cache_folder(head)
    with contextlib.ExitStack() as locks:
        if folder is not None:
            with contextlib.suppress(OSError):  # then all processes compile
                folder.mkdir(parents=True, exist_ok=True)
                lock = locks.enter_context((folder / f"{head.py_func.__name__}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(names: Sequence[str]) -> None:
    """Compile these families, in a child of `Warming`, until its parent is gone."""
    die_with_parent(0)  # the parent keeps the other end of stdin open, and writes nothing
    for name in names:
        with _taking_turns(name):
            FAMILIES[name].call()


if __name__ == "__main__":
    main(sys.argv[1:])
