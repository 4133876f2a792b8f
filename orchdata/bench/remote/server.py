"""A server of the files in a folder by HTTP, with ranges, etags, and a delay before each answer: far storage, here.

It runs in a process of its own, so that its work does not count as the loader's.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CHUNK_BYTES = 1 << 20


@contextmanager
def served(folder: Path, delay_seconds: float) -> Iterator[str]:
    """Serve a folder while the block runs; yield the URL of the folder."""
    program = "import sys; from orchdata.bench.remote.server import main; main(*sys.argv[1:])"
    command = [sys.executable, "-c", program, str(folder), str(delay_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the end of an answer may wait 40 ms for an acknowledgement of its beginning
    folder = Path()
    delay_seconds = 0.0

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""

    def _answer(self, *, with_body: bool) -> None:
        time.sleep(self.delay_seconds)
        path = self.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            self._refuse(404)
            return
        status = path.stat()
        etag = f'"{hashlib.blake2b(f"{path} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:32]}"'
        if self.headers.get("If-Match", etag) != etag:
            self._refuse(412)
            return
        start, stop = 0, status.st_size
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is not None:
            start, stop = int(asked[1]), min(int(asked[2]) + 1, status.st_size)
            if start >= stop:
                self._refuse(416)
                return
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{status.st_size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", etag)
        self.send_header("Last-Modified", formatdate(status.st_mtime, usegmt=True))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_body:
            with path.open("rb") as file:
                file.seek(start)
                while start < stop and (data := file.read(min(_CHUNK_BYTES, stop - start))):
                    self.wfile.write(data)
                    start += len(data)

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def main(folder: str, delay_seconds: str) -> None:
    """Serve until this process is killed, or its standard input is closed. Prints the port."""
    _Handler.folder, _Handler.delay_seconds = Path(folder), float(delay_seconds)
    server = _Server(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
