"""What can go wrong with a request, in a few kinds, the same for all libraries.

error of a client --its map--> Trouble(kind, reason) --> another try, a StorageError, or a StaleIndexError
"""

from __future__ import annotations

import errno
from typing import Final, Literal

from orchdata.loaders.errors import StaleIndexError, StorageError

Kind = Literal["passing", "credentials", "absent", "changed", "exists", "key", "final"]

_NUMBERS: Final[dict[str, int]] = {
    "absent": errno.ENOENT,
    "credentials": errno.EACCES,
    "exists": errno.EEXIST,
    "key": errno.EILSEQ,
}


class Trouble(Exception):
    """A request that failed. Internal.

    Attributes:
        kind: "passing": it is made again; "credentials": they are read again, once; "absent": there is no such object
            or bucket; "changed": the object is another one than was indexed; "exists": a new object was to be created;
            "key": the client cannot have a key, its own or one in a page of a listing; "final": no other try helps.
        reason: on one line, without secrets.
        throttled: whether the server asks for fewer requests.
        is_odd: whether the server answered, and wrongly: that seldom passes, so few attempts are made.
    """

    def __init__(self, kind: Kind, reason: str, *, throttled: bool = False, is_odd: bool = False) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.throttled = throttled
        self.is_odd = is_odd

    def as_error(self, url: str, doing: str, attempts: int) -> StorageError | StaleIndexError:
        """Return the error to raise.

        Args:
            url: of the object, without secrets.
            doing: what failed, such as "cannot be read".
            attempts: number of requests.
        """
        if self.kind == "changed":
            way_out = "run `orchdata index` again, with --to where the index is published"
            return StaleIndexError(url, f"{self.reason}: {way_out}")
        tried = f" ({attempts} attempts)" if attempts > 1 else ""
        # A build does not wait once more for what was waited for here.
        return StorageError(url, f"{doing}: {self.reason}{tried}", _NUMBERS.get(self.kind, errno.ETIME))
