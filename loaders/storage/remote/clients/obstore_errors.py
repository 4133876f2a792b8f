"""What the exceptions of obstore mean. Some have no class of their own: their text has the HTTP status and the kind."""

from __future__ import annotations

import re
from typing import Final

from orchdata.loaders.storage.remote.clients.trouble import Trouble

_STATUS: Final = re.compile(r"status code: (\d{3})|status: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_KIND: Final = re.compile(r"kind: ([A-Z][a-zA-Z]+)")
_ADDRESSES: Final = ("169.254.169.254", "metadata.google.internal", "fd00:ec2::254")
_THROTTLED: Final = (429, 503)
_EXPIRED: Final = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_REGION: Final = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_WRONG: Final = ("SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "AuthenticationFailed")
_SKEWED: Final = ("RequestTimeTooSkewed", "RequestInTheFuture")
_OTHER: Final = (*_EXPIRED, *_REGION, *_WRONG, *_SKEWED)
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s)\"']+")
_NO_RANGES: Final = re.compile(r"non-partial response", re.IGNORECASE)
_WRONG_RANGE: Final = re.compile(r"content.range|requested (range )?\S+\.\.", re.IGNORECASE)
_OF_PATHS: Final = ("control character", "parse path", "parsing path", "invalid path")
_NAMED: Final = "name the shards with braces, as in train-{000000..000127}.tar"
_UNLISTED: Final = f"allow it, or {_NAMED}"
_NO_CREDENTIALS: Final = (
    "no credentials were found (the address of cloud metadata was asked last): name them as storage_options{} or in "
    "the environment, or pass anonymous=true for public data"
)
_CREDENTIALS: Final = {
    "s3": " access_key_id and secret_access_key",
    "gs": " service_account",
    "az": " account_key or sas_key",
}


def trouble_of(error: Exception, name: str, words: str) -> Trouble:
    """Return what an exception of obstore means.

    Args:
        name: of the bucket, container or host.
        words: the first line of the exception, without secrets.
    """
    text = str(error)
    asks_metadata = any(address in text for address in _ADDRESSES)
    text = _URL.sub("", text)  # words of a key say nothing
    status_match, code_match = _STATUS.search(text), _CODE.search(text)
    status = int(status_match[1] or status_match[2]) if status_match else 0
    if asks_metadata:
        if status in _THROTTLED or status >= 500:
            return Trouble("passing", f"the cloud metadata, which has the credentials, failed (HTTP {status})")
        return Trouble("final", _NO_CREDENTIALS.format(_CREDENTIALS.get(name.partition(":")[0], "")))
    code = code_match[1] if code_match else ""
    said = " ".join(filter(None, (f"HTTP {status}" if status else "", code)))
    found = _of_class(error, name, said, code) or _of_status(status, code, said, text, name)
    if found is not None:
        return found
    if "BadScheme" in text or "builder error" in text:
        return Trouble(
            "final", "the endpoint is http://, which is not encrypted: allow it with storage_options allow_http=true"
        )
    ignores_ranges = status in (0, 200) and _NO_RANGES.search(text) is not None
    if "NotSupported" in type(error).__name__ or ignores_ranges:
        return Trouble("final", f"the server does not answer ranges of bytes as asked ({words})")
    if status in (0, 200, 206) and _WRONG_RANGE.search(text):
        return Trouble("passing", f"the answer has other bytes than were asked for ({words})", is_odd=True)
    if "InvalidPath" in type(error).__name__ or any(each in text.lower() for each in _OF_PATHS):
        return Trouble("key", f"a key has parts or characters that no path of obstore can have: {words}: {_NAMED}")
    kind = _KIND.search(text)
    known = _network_words(text, "" if kind is None else kind[1])
    return Trouble("passing", known or words, is_odd=not known)


def _of_class(error: Exception, name: str, said: str, code: str) -> Trouble | None:
    from obstore import exceptions

    if isinstance(error, FileNotFoundError):
        if code in _NO_BUCKET:
            return Trouble("absent", f"there is no bucket {name} (HTTP 404)")
        return Trouble("absent", "no such object (HTTP 404)")
    if isinstance(error, exceptions.PreconditionError):
        return Trouble("changed", "was replaced since it was indexed")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) and code not in _OTHER:
        return Trouble("credentials", f"may not be read with these credentials ({said or 'HTTP 403'})")
    return None


def _of_status(status: int, code: str, said: str, text: str, name: str) -> Trouble | None:
    if code in _EXPIRED:
        return Trouble("credentials", f"the credentials have expired ({said})")
    if code in _WRONG:
        return Trouble("credentials", f"the credentials are wrong ({said})")
    if code in _SKEWED:
        return Trouble("credentials", f"the clock of this machine and that of the server differ ({said})")
    if code in _REGION or status in (301, 307) or "redirect without location" in text.lower():
        where = "name it, as storage_options region=... or AWS_REGION"
        return Trouble("final", f"the bucket is in another region{f' ({said})' if said else ''}: {where}")
    if status in (401, 403):
        if "list request" in text:
            return Trouble("credentials", f"may not be listed with these credentials ({said}): {_UNLISTED}")
        return Trouble("credentials", f"may not be read with these credentials ({said})")
    if code in _NO_BUCKET:
        return Trouble("absent", f"there is no bucket {name} ({said})")
    if status == 404:
        return Trouble("absent", f"there is no bucket {name}, or no such object ({said})")
    if status == 416:
        return Trouble("changed", "is shorter than when it was indexed (HTTP 416)")
    if status in _THROTTLED:
        return Trouble("passing", f"the server is too busy ({said})", throttled=True)
    if status >= 500 or status in (408, 409) or code == "RequestTimeout":
        return Trouble("passing", f"the server failed ({said})")
    if status >= 400:
        return Trouble("final", f"the server refuses ({said})")
    return Trouble("final", f"the server redirects to where no request may go ({said})") if status >= 300 else None


def _network_words(text: str, kind: str) -> str:
    """Return what an error of the network is, in words; "" if it is not known."""
    lower = text.lower()
    if "dns error" in lower or "failed to lookup" in lower:
        return "the name of the host cannot be resolved"
    if "certificate" in lower:
        return "the server's certificate is not trusted"
    if "timedout" in lower.replace(" ", "") or kind == "Timeout":
        return "the server did not answer in time"
    if kind == "Connect":
        refused = ": refused" if "refused" in lower else ""
        return f"the server cannot be reached{refused}"
    if "request or response body" in lower or "incompletebody" in lower.replace(" ", "") or kind in ("Decode", "Body"):
        return "the answer was cut"
    if "error sending request" in lower or "connection" in lower:
        return "the connection was lost"
    return ""
