"""What can go wrong with a request, in a few kinds, the same for all clients.

exception of a client --trouble_of--> Trouble(kind, reason) --> another try, a StorageError, or a StaleIndexError

A status of HTTP decides, where there is one: obstore says it in its text, packages of fsspec have it in attributes.
Without one, what no list here names is taken for something that may pass.
"""

from __future__ import annotations

import errno
import ftplib
import re
from collections.abc import Mapping
from typing import Final, Literal

from orchdata.loaders.errors import StaleIndexError, StorageError, pass_trouble

Kind = Literal["passing", "odd", "credentials", "absent", "changed", "key", "final"]

_NUMBERS: Final[dict[str, int]] = {
    "absent": errno.ENOENT,
    "credentials": errno.EACCES,
    "key": errno.EILSEQ,
}
_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_REFUSED: Final = (PermissionError, ftplib.error_perm)
_MISTAKES: Final = (TypeError, ValueError, AttributeError, LookupError, ImportError, AssertionError, MemoryError)

_STATUS: Final = re.compile(r"status code: (\d{3})|status: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s)\"']+")
_PATH: Final = re.compile(r"pars(e|ing) path|invalid path|control character", re.IGNORECASE)
_METADATA: Final = ("169.254.169.254", "metadata.google.internal", "fd00:ec2::254")
_LOGIN: Final = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "InvalidToken")
_REGION: Final = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_BUSY: Final = re.compile(
    r"""[>("'](RequestTimeout|SlowDown|TooManyRequests|PriorRequestNotComplete|\w*(Throttl|LimitExceeded))\w*[<)"']""",
    re.I,
)
"""Codes, of any status, with which a server asks for another try."""
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")
_NETWORK: Final = (
    (r"dns error|failed to lookup|name or service not known", "the name of the host cannot be resolved"),
    (r"certificate", "the server's certificate is not trusted"),
    (r"timed ?out|kind: timeout\b", "the server did not answer in time"),
    (r"refused", "the server cannot be reached: refused"),
    (r"kind: connect\b", "the server cannot be reached"),
    (r"request or response body|incomplete ?body|kind: (decode|body)\b", "the answer was cut"),
    (r"error sending request|connection", "the connection was lost"),
    (r"content.range|requested (range )?\S+\.\.", "the answer has other bytes than were asked for"),
)
_NAMED: Final = "name the shards with braces, as in train-{000000..000127}.tar"
_NO_CREDENTIALS: Final = (
    "no credentials were found (the address of cloud metadata was asked last): name them in storage_options or in the "
    "environment, or pass anonymous=true for public data"
)


class Trouble(Exception):
    """A request that failed. Internal.

    Attributes:
        kind: "passing": it is made again; "odd": it is, some times; "credentials": they are read again, once;
            "absent": there is no such object or bucket; "changed": the object is another one than was indexed;
            "key": the client cannot have a key, its own or one in a page of a listing; "final": no other try helps.
        reason: on one line, without secrets.
    """

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason

    def as_error(self, url: str, doing: str, attempts: int) -> StorageError | StaleIndexError:
        """Return the error to raise.

        Args:
            url: of the object, without secrets.
            doing: what failed, such as "cannot be read".
            attempts: number of requests.
        """
        if self.kind == "changed":
            way_out = "run `orchdata index` again, with --out if it is an index_file"
            return StaleIndexError(url, f"{self.reason}: {way_out}")
        tried = f" ({attempts} attempts)" if attempts > 1 else ""
        # A build does not wait once more for what was waited for here.
        return StorageError(url, f"{doing}: {self.reason}{tried}", _NUMBERS.get(self.kind, errno.ETIME))


def trouble_of(error: Exception, name: str, words: str) -> Trouble:
    """Return what an exception of a client means. Raises as `pass_trouble` for a mistake of a program.

    Args:
        name: of the bucket, container or host.
        words: the exception on one line, without secrets.
    """
    text = _URL.sub("", str(error))  # words of a key say nothing
    status = next(filter(None, map(_status, _came_from(error, "__cause__"))), 0)
    if "redirect without location" in text.lower():
        status = 301
    code = match[1] if (match := _CODE.search(text)) else ""
    if any(address in str(error) for address in _METADATA):
        if status == 429 or status >= 500:
            return Trouble("passing", f"the cloud metadata, which has the credentials, failed (HTTP {status})")
        return Trouble("final", _NO_CREDENTIALS)
    if status >= 300:
        return _of_status(status, code, text, name)
    kind = type(error).__name__
    if kind == "PreconditionError":
        return Trouble("changed", "was replaced since it was indexed")
    if kind == "InvalidPathError" or _PATH.search(text):
        return Trouble("key", f"a key has parts or characters that obstore cannot have: {words}: {_NAMED}")

    # Some filesystems say that there is no such file for any failure of the network, and name that as the cause.
    causes = _came_from(error, "__cause__", "__context__")[1:]
    if all(isinstance(each, (*_ABSENT, *_REFUSED, *_MISTAKES)) for each in causes):
        if isinstance(error, _ABSENT):
            return Trouble("absent", "no such object")
        if isinstance(error, _REFUSED):
            return Trouble("credentials", f"may not be read with these credentials ({words})")
    if isinstance(error, _MISTAKES) and not any(map(_is_of_network, (error, *causes))):
        pass_trouble(error)
        return Trouble("final", words)

    if "BadScheme" in text or "builder error" in text:
        return Trouble(
            "final", "the endpoint is http://, which is not encrypted: allow it with storage_options allow_http=true"
        )
    if "to load lib" in text:  # of hdfs://
        return Trouble("final", f"{words}: set HADOOP_HOME and JAVA_HOME")
    if kind == "NotSupportedError" or "non-partial response" in text.lower():
        return Trouble("odd", f"the server does not answer ranges of bytes as asked ({words})")
    known = (said for pattern, said in _NETWORK if re.search(pattern, text, re.IGNORECASE))
    return Trouble("passing", next(known, words))


def _of_status(status: int, code: str, text: str, name: str) -> Trouble:
    """Return what an answer of HTTP means that is an error."""
    said = f"HTTP {status} {code}".rstrip()
    if code in _REGION or status in (301, 307):
        where = "name it, as storage_options region=... or AWS_REGION"
        return Trouble("final", f"the bucket is in another region ({said}): {where}")
    if status >= 500 or status in (408, 409, 425, 429) or _BUSY.search(text):
        return Trouble("passing", f"the server failed ({said})")
    if status in (401, 403) or code in _LOGIN:
        if "list request" in text:
            way_out = f"allow it, or {_NAMED}"
            return Trouble("credentials", f"may not be listed with these credentials ({said}): {way_out}")
        return Trouble("credentials", f"may not be read with these credentials ({said})")
    if code in _NO_BUCKET:
        return Trouble("absent", f"there is no bucket {name} ({said})")
    if status in (404, 410):
        return Trouble("absent", f"no such object ({said})")
    if status == 412:
        return Trouble("changed", "was replaced since it was indexed")
    if status == 416:
        return Trouble("changed", "is shorter than when it was indexed (HTTP 416)")
    if status < 400:
        return Trouble("final", f"the server redirects to where no request may go ({said})")
    return Trouble("final", f"the server refuses ({said})")


def _status(error: BaseException) -> int:
    """Return the status of HTTP that an exception has, where its package keeps it; 0 if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # of botocore
        values = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")]
    else:
        names = ("status_code", "status", "code", "http_status")
        values = [getattr(where, name, None) for where in (response, error) for name in names]
    values += [found[1] or found[2]] if (found := _STATUS.search(_URL.sub("", str(error)))) else []
    return next((int(each) for each in values if re.fullmatch(r"[1-5]\d\d", str(each))), 0)


def _came_from(error: BaseException, *names: str) -> list[BaseException]:
    """Return an exception and those from which it came, by these attributes, with the members of groups."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop(0)
        if each is not None and each not in found:
            found.append(each)
            left += [getattr(each, name) for name in names]
            left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return found


def _is_of_network(error: BaseException) -> bool:
    return isinstance(error, OSError) or any("timeout" in each.__name__.lower() for each in type(error).__mro__)
