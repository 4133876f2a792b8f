"""A bucket of a real S3 server, and a proxy before it that delays each answer and counts requests: far storage, here.

    loaders --environment: endpoint, credentials--> proxy (delay, counts) --> SeaweedFS

Server and proxy are those of the tests. They run in processes of their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.loading.processes import spent_by

_SUPPORT: Final = Path(__file__).resolve().parents[2] / "tests" / "support"
_BUCKET: Final = "benchmark"
_PUTS: Final = 4
_IN_MEMORY: Final = {"s3.cacheCapacityMB": 1024, "filer.maxMB": 1}
"""Pieces of 1 MB, kept in memory: by default a range costs the server as much CPU as the 4 MB around it."""
_SIGNED_FOR: Final = timedelta(hours=6)


class Seen(NamedTuple):
    """What the proxy saw since some time.

    Attributes:
        requests: for bytes of objects.
        body_bytes: of the answers.
    """

    requests: int = 0
    body_bytes: int = 0


class Servers(NamedTuple):
    """CPU seconds so far, of the proxy and of the server."""

    proxy: float
    server: float

    def since(self, before: Servers) -> Servers:
        return Servers(self.proxy - before.proxy, self.server - before.server)


class FarStore:
    """A bucket, from `far_store`."""

    def __init__(self, server: Any, proxy: Any) -> None:
        self._server = server
        self._proxy = proxy
        self.bucket: Final[str] = server.make_bucket(_BUCKET)

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables under which clients of S3 find the proxy."""
        endpoint = self._proxy.endpoint
        names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "S3_ENDPOINT_URL")
        return dict.fromkeys(names, endpoint) | {
            "AWS_ACCESS_KEY_ID": self._server.access_key,
            "AWS_SECRET_ACCESS_KEY": self._server.secret_key,
            "AWS_REGION": self._server.region,
            "AWS_DEFAULT_REGION": self._server.region,
            "AWS_ALLOW_HTTP": "true",
        }

    def url(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def signed(self, key: str) -> str:
        """A URL that programs can read without credentials."""
        import obstore

        store = self._server.store(self.bucket, endpoint=self._proxy.endpoint)
        return str(obstore.sign(store, "GET", key, _SIGNED_FOR))

    def upload(self, folder: Path, prefix: str) -> None:
        """Store all files of a folder, past the proxy."""
        import obstore

        store = self._server.store(self.bucket)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]

        def put(path: Path) -> None:
            obstore.put(store, f"{prefix}/{path.relative_to(folder)}", path.read_bytes(), use_multipart=False)

        with ThreadPoolExecutor(_PUTS) as pool:
            list(pool.map(put, files))

    def clear(self) -> None:
        """Forget the requests so far."""
        self._proxy.clear()

    def seen(self, since: float, until: float) -> Seen:
        """What was read between two times of `time.monotonic`."""
        requests = [each for each in self._proxy.requests("RANGE", "GET") if since <= each.time < until]
        return Seen(len(requests), sum(each.body_bytes for each in requests))

    def spent(self) -> Servers:
        pids = self._proxy._process.pid, self._server._process.pid
        return Servers(*(sum(each.user + each.system for each in spent_by(pid).values()) for pid in pids))


@contextmanager
def far_store(delay_seconds: float) -> Iterator[FarStore]:
    """Start server and proxy. Until the block ends, the environment says where they are, to child processes too."""
    if str(_SUPPORT) not in sys.path:
        sys.path.append(str(_SUPPORT))
    from servers.proxy import Proxy
    from servers.s3_server import S3Server

    with ExitStack() as opened:
        server = opened.enter_context(S3Server(_IN_MEMORY))
        proxy = opened.enter_context(Proxy(server.endpoint, delay=delay_seconds))
        store = FarStore(server, proxy)
        opened.enter_context(_environment(store.variables))
        yield store


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (*variables, "AWS_PROFILE")}
    os.environ.pop("AWS_PROFILE", None)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
