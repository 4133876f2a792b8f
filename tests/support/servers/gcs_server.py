"""A stub of Google's storage, as far as obstore's GCSStore asks it: the XML interface, not that of JSON.

    GET, HEAD /bucket/key    ranges, If-Match; ETag, Last-Modified and x-goog-generation come with it
    PUT /bucket/key
    GET /bucket?list-type=2  prefix, delimiter, pages of `page_size` keys by continuation-token

It checks no credentials. What it answers has been read off Google's
documentation: the real service may say more.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from xml.sax.saxutils import escape

from servers.stub_server import Answer, Seen, StubServer, part_of


@dataclass(frozen=True, slots=True)
class Stored:
    content: bytes
    generation: int
    modified: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.content, usedforsecurity=False).hexdigest()}"'

    @property
    def headers(self) -> dict[str, str]:
        headers = {"ETag": self.etag, "Last-Modified": formatdate(self.modified, usegmt=True)}
        return headers | {"x-goog-generation": str(self.generation), "Content-Type": "application/octet-stream"}


class GcsServer(StubServer):
    """A server, from `with` to its end."""

    def __init__(self, page_size: int = 1000) -> None:
        super().__init__()
        self.page_size = page_size
        self._buckets: dict[str, dict[str, Stored]] = {}
        self._generation = 0
        self._lock = threading.Lock()

    @property
    def options(self) -> dict[str, str]:
        return self.options_at()

    def options_at(self, endpoint: str | None = None) -> dict[str, str]:
        """`storage_options`, in obstore's names, for URLs such as `gs://bucket/`.

        `base_url` with `skip_signature` would do for reads. But for a write obstore asks Google's machines for a token
        then, at an address that is not on loopback. This key says that none is needed.
        """
        key = {"gcs_base_url": endpoint or self.endpoint, "disable_oauth": True}
        key |= {"client_email": "", "private_key": "", "private_key_id": ""}
        return {"service_account_key": json.dumps(key), "allow_http": "true"}

    def make_bucket(self, name: str) -> str:
        self._buckets.setdefault(name, {})
        return name

    def put(self, bucket: str, key: str, content: bytes) -> str:
        """Store an object; returns its etag."""
        with self._lock:
            self._generation += 1
            self._buckets[bucket][key] = Stored(content, self._generation, time.time())
            return self._buckets[bucket][key].etag

    def answer(self, seen: Seen) -> Answer:
        bucket, _, key = seen.path[1:].partition("/")
        if bucket not in self._buckets:
            return _error(404, "NoSuchBucket")
        if not key:
            return self._page(bucket, seen.query) if seen.method == "GET" else _error(405, "MethodNotAllowed")
        stored = self._buckets[bucket].get(key)
        if seen.method == "PUT":
            self.put(bucket, key, seen.body)
            return Answer(200, b"", self._buckets[bucket][key].headers)
        if stored is None:
            return _error(404, "NoSuchKey")
        if seen.headers.get("if-match", stored.etag) != stored.etag:
            return _error(412, "PreconditionFailed")
        return part_of(stored.content, seen, stored.headers)

    def _page(self, bucket: str, query: Mapping[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        rows: list[str] = []
        last = ""
        more = False
        for key in sorted(key for key in self._buckets[bucket] if key.startswith(prefix)):
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if end < 0 else key[: end + 1]
            if name <= after or name == last:
                continue
            if len(rows) == self.page_size:
                more = True
                break
            rows.append(_folder(name) if end >= 0 else _row(name, self._buckets[bucket][key]))
            last = name
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        said = f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        said += "".join(rows) + "</ListBucketResult>"
        return Answer(200, said.encode(), {"Content-Type": "application/xml"})


def _row(key: str, stored: Stored) -> str:
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
    said = f"<Key>{escape(key)}</Key><LastModified>{modified}</LastModified><ETag>{escape(stored.etag)}</ETag>"
    return f"<Contents>{said}<Size>{len(stored.content)}</Size></Contents>"


def _folder(name: str) -> str:
    return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"


def _error(status: int, code: str) -> Answer:
    said = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Answer(status, said.encode(), {"Content-Type": "application/xml"})
