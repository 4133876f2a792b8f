"""A stub of Google's storage, as far as obstore's GCSStore asks it: the XML interface, not that of JSON.

    GET, HEAD /bucket/key    ranges, If-Match, If-None-Match; ETag, Last-Modified and x-goog-generation come with it
    PUT /bucket/key          x-goog-if-generation-match: 0 for a key that must not exist
    DELETE /bucket/key
    GET /bucket?list-type=2  prefix, delimiter, pages of `page_size` keys by continuation-token

It checks no credentials, and answers clients of S3 too, with `s3_options`. What it answers has been read off Google's
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
from typing import Any
from xml.sax.saxutils import escape

from servers.stores import store_at
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

    @property
    def s3_options(self) -> dict[str, str]:
        """`storage_options` for URLs such as `s3://bucket/`."""
        keys = {"access_key_id": "key", "secret_access_key": "secret"}
        return {"endpoint": self.endpoint, "region": "us-east-1", "allow_http": "true", **keys}

    def store(self, bucket: str, endpoint: str | None = None) -> Any:
        """An obstore store of a bucket, which tries each request once."""
        return store_at(f"gs://{bucket}/", self.options_at(endpoint))

    def make_bucket(self, name: str) -> str:
        self._buckets.setdefault(name, {})
        return name

    def put(self, bucket: str, key: str, content: bytes) -> str:
        """Store an object; returns its etag."""
        with self._lock:
            self._generation += 1
            self._buckets[bucket][key] = Stored(content, self._generation, time.time())
            return self._buckets[bucket][key].etag

    def get(self, bucket: str, key: str) -> bytes:
        return self._buckets[bucket][key].content

    def delete(self, bucket: str, key: str) -> None:
        del self._buckets[bucket][key]

    def list(self, bucket: str, prefix: str = "") -> list[str]:
        """The keys of a bucket that begin with a prefix, sorted."""
        return sorted(key for key in self._buckets[bucket] if key.startswith(prefix))

    def answer(self, seen: Seen) -> Answer:
        bucket, _, key = seen.path[1:].partition("/")
        if bucket not in self._buckets:
            return _error(404, "NoSuchBucket")
        if not key:
            return self._page(bucket, seen.query) if seen.method == "GET" else _error(405, "MethodNotAllowed")
        stored = self._buckets[bucket].get(key)
        match seen.method:
            case "PUT":
                return self._put(bucket, key, stored, seen)
            case "GET" | "HEAD" if stored:
                return _read(stored, seen)
            case "DELETE" if stored:
                self.delete(bucket, key)
                return Answer(204)
            case "GET" | "HEAD" | "DELETE":
                return _error(404, "NoSuchKey")
        return _error(405, "MethodNotAllowed")

    def _put(self, bucket: str, key: str, stored: Stored | None, seen: Seen) -> Answer:
        asked = seen.headers.get("x-goog-if-generation-match")
        if asked is not None and int(asked) != (stored.generation if stored else 0):
            return _error(412, "PreconditionFailed")
        self.put(bucket, key, seen.body)
        return Answer(200, b"", self._buckets[bucket][key].headers)

    def _page(self, bucket: str, query: Mapping[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        rows: list[str] = []
        last = ""
        more = False
        for key in self.list(bucket, prefix):
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


def _read(stored: Stored, seen: Seen) -> Answer:
    if seen.headers.get("if-match", stored.etag) != stored.etag:
        return _error(412, "PreconditionFailed")
    if seen.headers.get("if-none-match") == stored.etag:
        return Answer(304, b"", {"ETag": stored.etag})
    return part_of(stored.content, seen, stored.headers)


def _row(key: str, stored: Stored) -> str:
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
    said = f"<Key>{escape(key)}</Key><LastModified>{modified}</LastModified><ETag>{escape(stored.etag)}</ETag>"
    return f"<Contents>{said}<Size>{len(stored.content)}</Size></Contents>"


def _folder(name: str) -> str:
    return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"


def _error(status: int, code: str) -> Answer:
    said = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Answer(status, said.encode(), {"Content-Type": "application/xml"})
