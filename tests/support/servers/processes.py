"""Servers in processes of their own: free ports, a start that is tried again, a wait for the first answer, and the end.

    ProcessServer.__enter__ --> _attempt(): choose ports, start a process --> ready()? --yes--> the process
                                   ^----------- it ended: a port was taken ----'

All listen on 127.0.0.1 alone.
"""

from __future__ import annotations

import http.client
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

START_SECONDS = 120
"""What a server may take until its first answer: it takes some three seconds on an idle machine."""
TRIES = 5
# Its first act: prctl(PR_SET_PDEATHSIG, SIGKILL), which the program then has too. Popen's own hook before a program
# starts would do, but newer Pythons warn of it in a process that has threads.
_ENDS_WITH_ITS_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
_chance = random.SystemRandom()  # a test may seed the shared generator: then two runs would take the same ports


class Ended(Exception):
    """A process ended before it was ready."""


def free_ports(number: int) -> list[int]:
    """Loopback ports that are free now. They lie below those that the system gives to clients."""
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < number:
            port = _chance.randrange(11_000, 32_000)
            made = held.enter_context(socket.socket())
            try:
                made.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
        return ports


def program(name: str) -> Path:
    """A program that a wheel of the `dev` extra installed next to this Python."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise FileNotFoundError(
            f"no program {path}: the dev extra brings it (pip install -c constraints.txt -e '.[dev]')"
        )
    return path


def start(arguments: list[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A process that ends with this one, even if this one is killed. What it prints goes to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _ENDS_WITH_ITS_PARENT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """By SIGKILL and its pid: nothing of a test server is worth a slow end."""
    process.kill()
    process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Ask until the answer is yes."""
    until = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None:
            raise Ended(f"{process.args!r} ended with {process.returncode}; it said:\n{last_words(log)}")
        if time.monotonic() > until:
            end(process)
            raise TimeoutError(f"{process.args!r} is not ready after {START_SECONDS} s; it said:\n{last_words(log)}")
        time.sleep(0.05)


def last_words(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


def answers(port: int) -> bool:
    """Whether a server takes connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def asked(port: int, method: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """The status and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class ProcessServer(ABC):
    """One server, from `with` to its end, with a temporary folder."""

    port: int

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="server-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            for number in range(1, TRIES + 1):
                try:
                    self._process = self._attempt()
                    break
                except Ended:  # at once: one of its ports was taken
                    if number == TRIES:
                        raise
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process:
            end(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @abstractmethod
    def _attempt(self) -> subprocess.Popen[bytes]:
        """Choose ports, start a process, and return it when it answers."""
