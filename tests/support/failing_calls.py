"""System calls that fail: a preloaded library (tests/faults/shim.c), the block that arms it, and workers that try.

    Fault --Worker.run--> trial of one scenario in a process with the library --JSON--> what came of it

A worker imports everything once and runs one trial after another, each on a fresh copy of the cache folder. One that
hangs or dies is an outcome too, and the next trial gets a new one.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "faults" / "shim.c"
PROGRAM = Path(__file__).with_name("fault_trials.py")

# As in shim.c.
KINDS = ("open", "create", "read", "write", "sync", "space", "rename", "unlink", "mkdir", "stat", "list", "map", "lock")
KINDS += ("touch", "close", "link")
LASTS = ("once", "same file", "everything")
_NO_ERRNO = {"short": -1, "kill": -2}
_PATH_BYTES = 1024

CUT = ("read", "write")
"""Calls that may give fewer bytes than asked for."""
CHANGES = {"create", "write", "sync", "space", "rename", "unlink", "mkdir", "touch", "link"}
"""Calls after which other things are on the disk than before."""
NO_TROUBLE = ("EINTR", "short")
"""What a system may always say: to be tried again, without a word."""
LASTING = ("EROFS", "EFBIG")
"""What no waiting mends."""
_OF_THE_FILE = {"ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP"}
_ERRNOS = sorted(set(errno.errorcode.values()) - _OF_THE_FILE)
_STRIDE = 37  # coprime to their number: neighbouring calls fail with different ones, and each has its turn


class _Traced(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("call", ctypes.c_char * 24), ("path", ctypes.c_char * 228)]


class _Control(ctypes.Structure):
    _fields_ = [
        ("armed", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("kinds", ctypes.c_uint32),
        ("lasts", ctypes.c_int32),
        ("nth", ctypes.c_uint64),
        ("times", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
        ("injected", ctypes.c_uint64),
        ("first_call", ctypes.c_char * 24),
        ("first_path", ctypes.c_char * _PATH_BYTES),
        ("folders", (ctypes.c_char * _PATH_BYTES) * 2),
        ("trace", _Traced * 4096),
    ]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Which calls fail, and how.

    Attributes:
        name: of an errno; "short" for half of the bytes; "kill" for the end of the process, amid a write.
        nth: the call that fails first, from 1, of those of `kinds`; 0 only counts.
        lasts: "once" (`times` calls), "same file" (every later call on the same path) or "everything".
        times: calls that fail, where it is once.
        kinds: of calls that count, of KINDS.
    """

    name: str = "EIO"
    nth: int = 0
    lasts: str = "once"
    times: int = 1
    kinds: tuple[str, ...] = field(default=KINDS, repr=False)


def kind_of_file(path: str) -> str:
    """A shard by its suffix, a file of the cache by its folder there."""
    if "/cache/" in path:
        return path.split("/cache/", 1)[1].split("/")[0]
    return path.rpartition("/")[2].partition(".")[2]


def every_point(trace: Sequence[Sequence[str]], name: str) -> list[Fault]:
    """What is to be tried at each call of a run without faults.

    The call fails for a moment and for good, each time with another errno, of all there are; a read or a write is cut.
    The process ends at each call that changes something on the disk: before all others it leaves what it leaves there.
    """
    points, turn = [], zlib.crc32(name.encode())
    for nth, (kind, _, path) in enumerate(trace, 1):
        for lasts in ("once", LASTS[1 + nth % 2]):
            turn += _STRIDE
            code = _ERRNOS[turn % len(_ERRNOS)]
            if code in ("EAGAIN", "EACCES") and lasts != "once":
                fails = [each for each in trace[nth - 1 :] if lasts == "everything" or each[2] == path]
                if any(each[0] == "lock" for each in fails):
                    code = "EIO"  # another process has a lock: it is waited for
            if code == "EINTR" and (kind == "close" or lasts != "once"):  # which ends what was begun, and never goes on
                code = "EIO"
            points.append(Fault(name=code, nth=nth, lasts=lasts))
        if kind in CHANGES:
            points.append(Fault(name="kill", nth=nth))
        if kind in CUT:
            points.append(Fault(name="short", nth=nth))
    return points


class Control:
    """The block that the library reads, mapped from the file that FAULT_CONTROL names."""

    def __init__(self, path: str | Path) -> None:
        with open(path, "a+b") as file:
            file.truncate(ctypes.sizeof(_Control))
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Control))
        self._block = _Control.from_buffer(self._map)

    def watch(self, *folders: str | Path) -> None:
        for number, folder in enumerate(folders):
            self._block.folders[number].value = os.fspath(folder).encode()

    def arm(self, fault: Fault) -> None:
        block = self._block
        block.error = _NO_ERRNO.get(fault.name) or getattr(errno, fault.name)
        block.kinds = sum(1 << number for number, kind in enumerate(KINDS) if kind in fault.kinds)
        block.lasts = LASTS.index(fault.lasts)
        block.nth, block.times = fault.nth, fault.times
        block.seen = block.injected = 0
        block.first_call = block.first_path = b""
        ctypes.memset(ctypes.addressof(block.trace), 0, ctypes.sizeof(block.trace))
        block.armed = 1

    def disarm(self) -> dict[str, Any]:
        """What was seen: calls counted and failed, the first that failed, and, where all were let pass, each."""
        block = self._block
        block.armed = 0
        call, path = block.first_call.decode(), block.first_path.decode()
        traced = [] if block.nth else block.trace[: min(block.seen, len(block.trace))]
        trace = [(KINDS[each.kind], each.call.decode(), each.path.decode(errors="replace")) for each in traced]
        return {"seen": block.seen, "injected": block.injected, "call": call, "path": path, "trace": trace}


def compile_shim(folder: Path) -> Path | None:
    """The library, built in `folder`; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"], check=True)
    return library


class Worker:
    """A process with the library that runs trials one at a time.

    Args:
        library: the compiled shim.
        folder: its own; holds the control block and the cache folder of the trial under way.
        data: folder of the shards.
        limit_seconds: for one trial; then its process ends, with its stacks in the outcome.
    """

    def __init__(self, library: Path, folder: Path, data: Path, *, limit_seconds: float = 60) -> None:
        self._folder = folder
        self._limit_seconds = limit_seconds
        folder.mkdir(parents=True, exist_ok=True)
        self._command = [sys.executable, str(PROGRAM), str(folder), str(data)]
        self._environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "FAULT_CONTROL": str(folder / "control"),
            "PYTHONPATH": str(PROGRAM.parent),
            "OMP_NUM_THREADS": "1",
        }
        Control(folder / "control")
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, scenario: str, fault: Fault, **options: Any) -> dict[str, Any]:
        """What came of one trial; see `fault_trials`. "died" or "hung" name themselves."""
        try:
            return self._ask({"scenario": scenario, "fault": asdict(fault), **options})
        except BaseException:
            self.close()  # its answer would be taken for that of the next trial
            raise

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        deadline = time.monotonic() + self._limit_seconds
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                return self._end(request, "hung")
            piece = os.read(process.stdout.fileno(), 1 << 20)
            if not piece:
                return self._end(request, "died")
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._log.close()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        Control(self._folder / "control").disarm()  # one that hung was armed
        self._log = open(self._folder / "log", "wb")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=self._environment
        )
        return self._process

    def _end(self, request: dict[str, Any], outcome: str) -> dict[str, Any]:
        assert self._process is not None
        if outcome == "hung":
            self._process.send_signal(signal.SIGUSR1)  # prints the stacks
            time.sleep(0.5)
            self._process.kill()
        code = self._process.wait()
        self.close()
        text = (self._folder / "log").read_text(errors="replace")[-4000:]
        return {"outcome": outcome, "code": code, "text": text, "request": request}
