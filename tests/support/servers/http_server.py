"""`rclone serve http` over a folder: HTTP with ranges and Last-Modified, without etags.

HttpServer() --rclone serve http folder--> a free port; put() writes into the folder
"""

from __future__ import annotations

import http.client
import os
import subprocess
from typing import ClassVar

from servers.processes import ProcessServer, asked, free_ports, program, start, wait_until


class HttpServer(ProcessServer):
    """One server, from `with` to its end. It serves the files of a temporary folder, `folder`."""

    options: ClassVar[dict[str, str]] = {"allow_http": "true"}

    def __init__(self) -> None:
        super().__init__()
        self.folder = self._folder / "files"
        self.folder.mkdir()

    def url(self, key: str) -> str:
        return f"{self.endpoint}/{key}"

    def put(self, key: str, content: bytes) -> str:
        """Make a file; returns its URL."""
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return self.url(key)

    def _attempt(self) -> subprocess.Popen[bytes]:
        (self.port,) = free_ports(1)
        self._mark = f"is-it-ready-{self.port}-{os.urandom(8).hex()}"
        (self.folder / self._mark).write_bytes(b"yes")
        log = self._folder / "log"
        command = [str(program("rclone")), "serve", "http", str(self.folder), f"--addr=127.0.0.1:{self.port}"]
        # Files that change are seen at once, and no settings of whoever runs the tests count.
        command += ["--dir-cache-time=0s", "--poll-interval=0", f"--cache-dir={self._folder / 'cache'}", "--config="]
        process = start(command, log)
        wait_until(self._ready, process, log)
        (self.folder / self._mark).unlink()
        return process

    def _ready(self) -> bool:
        """Whether it is this server that answers: no other has this file."""
        try:
            return asked(self.port, "GET", f"/{self._mark}") == (200, b"yes")
        except (OSError, http.client.HTTPException):
            return False
