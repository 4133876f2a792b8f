"""`rclone serve http` over a folder: HTTP with ranges and Last-Modified, without etags.

HttpServer() --rclone serve http folder--> a free port; put() writes into the folder
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from servers.processes import end, free_ports, program, start, starting, wait_until
from servers.stores import store_at


class HttpServer:
    """One server, from `with` to its end. It serves the files of a temporary folder, `folder`."""

    options: ClassVar[dict[str, str]] = {"allow_http": "true"}

    def __init__(self) -> None:
        self._temporary = Path(tempfile.mkdtemp(prefix="http-server-"))
        self.folder = self._temporary / "files"
        self.folder.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._process = starting(self._attempt)
        except BaseException:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process:
            end(self._process)
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, key: str) -> str:
        return f"{self.endpoint}/{key}"

    def store(self, folder: str = "", endpoint: str | None = None) -> Any:
        """An obstore store of a folder, which tries each request once."""
        return store_at(f"{endpoint or self.endpoint}/{folder}", self.options)

    def put(self, key: str, content: bytes) -> str:
        """Make a file; returns its URL."""
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return self.url(key)

    def delete(self, key: str) -> None:
        (self.folder / key).unlink()

    def list(self, prefix: str = "") -> list[str]:
        """The keys that begin with a prefix, sorted."""
        files = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        return sorted(key for key in files if key.startswith(prefix))

    def _attempt(self) -> subprocess.Popen[bytes]:
        (self.port,) = free_ports(1)
        self._mark = f"is-it-ready-{self.port}-{os.urandom(8).hex()}"
        (self._temporary / "files" / self._mark).write_bytes(b"yes")
        log = self._temporary / "log"
        command = [str(program("rclone")), "serve", "http", str(self.folder), f"--addr=127.0.0.1:{self.port}"]
        # Files that change are seen at once, and no settings of whoever runs the tests count.
        command += ["--dir-cache-time=0s", "--poll-interval=0", f"--cache-dir={self._temporary / 'cache'}", "--config="]
        process = start(command, log)
        wait_until(self._ready, process, log)
        (self.folder / self._mark).unlink()
        return process

    def _ready(self) -> bool:
        """Whether it is this server that answers: no other has this file."""
        asked = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            asked.request("GET", f"/{self._mark}")
            return asked.getresponse().read() == b"yes"
        except (OSError, http.client.HTTPException):
            return False
        finally:
            asked.close()
