"""A server of HTTP that behaves as some do: each oddity is a switch, which a test turns while the server runs.

server = OddServer({"a.bin": content}); server.ignores_range = True
GET /a.bin --refused? redirected? --> content --oddities--> answer; requests() has what came, with all headers
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from email.utils import formatdate
from hashlib import sha256
from typing import ClassVar
from urllib.parse import quote, urlencode

from servers.stub_server import Answer, Seen, StubServer, part_of

_FIRST_MODIFIED = 1_700_000_000
HTML = b"<!doctype html><html><body>Please sign in to this network.</body></html>"


class OddServer(StubServer):
    """A server of `files`, from `with` to its end. All switches are off at first, but `etags`.

    Attributes:
        files: contents by their keys, such as `folder/a.bin`; they may be changed.
        etags: answers carry one, and If-Match is checked; without, If-Match is ignored.
        weak_etags: the etag is a weak one, which no If-Match fits.
        ignores_range: the answer is 200 with the whole file.
        extra_bytes: so many zeros follow what was asked; Content-Length counts them.
        missing_bytes: so many bytes of what was asked are left out at its end; Content-Length says so.
        says_html: the answer is 200 with a page of HTML.
        says_gzip: bodies are compressed, with `Content-Encoding: gzip`, though no one asked for it.
        redirects_to: the answer is 302 to this address with the path and the query of the request after it.
            If it has a path itself, as `file:///etc/hostname`, that alone is where it points.
        shifts_range: Content-Range is so many bytes off, and its bytes are those that were asked.
        hides_size: Content-Range has `*` for the size of the file.
        signature: `sig` in the query must be this, else 403.
        credentials: of basic authentication, as user and password, else 401.
        status: the answer is this status, if it is not 0.
    """

    options: ClassVar[dict[str, str]] = {"allow_http": "true"}

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__()
        self.files = dict(files or {})
        self.etags = True
        self.weak_etags = False
        self.ignores_range = False
        self.extra_bytes = 0
        self.missing_bytes = 0
        self.says_html = False
        self.says_gzip = False
        self.redirects_to = ""
        self.shifts_range = 0
        self.hides_size = False
        self.signature = ""
        self.credentials: tuple[str, str] | None = None
        self.status = 0

    def url(self, key: str, **query: str) -> str:
        return f"{self.endpoint}/{quote(key)}" + (f"?{urlencode(query)}" if query else "")

    def put(self, key: str, content: bytes) -> str:
        """Make a file; returns its URL."""
        self.files[key] = content
        return self.url(key)

    def answer(self, seen: Seen) -> Answer:
        refused = self._refused(seen)
        if refused:
            return refused
        if self.redirects_to:
            return Answer(302, b"", {"Location": self._redirected(seen)})
        if self.says_html:
            return Answer(200, HTML, {"Content-Type": "text/html; charset=utf-8"})
        content = self.files.get(seen.path[1:])
        if content is None:
            return Answer(404, b"no such file")
        headers = {"Last-Modified": formatdate(_FIRST_MODIFIED, usegmt=True)}
        headers["Content-Type"] = "application/octet-stream"
        if self.etags:
            etag = f'"{sha256(content).hexdigest()[:16]}"'
            headers["ETag"] = f"W/{etag}" if self.weak_etags else etag
            if "if-match" in seen.headers and (self.weak_etags or seen.headers["if-match"] != etag):
                return Answer(412, b"changed", headers)
        if self.ignores_range:
            return self._changed(Answer(200, content, headers))
        return self._changed(part_of(content, seen, headers))

    def _refused(self, seen: Seen) -> Answer | None:
        if seen.method not in ("GET", "HEAD"):
            return Answer(405, b"only GET and HEAD")
        if self.status:
            return Answer(self.status, b"odd")
        if self.signature and seen.query.get("sig") != self.signature:
            return Answer(403, b"no valid signature in the query")
        if self.credentials:
            expected = "Basic " + base64.b64encode(":".join(self.credentials).encode()).decode()
            if seen.headers.get("authorization") != expected:
                return Answer(401, b"who are you?", {"WWW-Authenticate": 'Basic realm="odd"'})
        return None

    def _redirected(self, seen: Seen) -> str:
        has_path = "/" in self.redirects_to.partition("://")[2]
        if has_path:
            return self.redirects_to
        return f"{self.redirects_to}{quote(seen.path)}" + (f"?{urlencode(seen.query)}" if seen.query else "")

    def _changed(self, answer: Answer) -> Answer:
        if answer.status == 206:
            span, size = answer.headers["Content-Range"].removeprefix("bytes ").split("/")
            start, last = (int(each) + self.shifts_range for each in span.split("-"))
            answer.headers["Content-Range"] = f"bytes {start}-{last}/{'*' if self.hides_size else size}"
        if answer.status in (200, 206):
            answer.body = answer.body[: max(0, len(answer.body) - self.missing_bytes)] + bytes(self.extra_bytes)
            if self.says_gzip:
                answer.body = gzip.compress(answer.body, mtime=0)
                answer.headers["Content-Encoding"] = "gzip"
        return answer
