"""What every server of objects must do, asked through obstore."""

from __future__ import annotations

from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError

CONTENT = bytes(range(256)) * 8


def read(store: Any, key: str, start: int, end: int, **options: Any) -> bytes:
    return bytes(obstore.get(store, key, options={"range": (start, end), **options}).bytes())


def keys_of(store: Any, prefix: str | None = None) -> list[str]:
    return sorted(each["path"] for some in obstore.list(store, prefix) for each in some)


def check_reads_and_lists(store: Any, key: str) -> None:
    """What every server of objects does: `key` has CONTENT, and there is no other key."""
    assert read(store, key, 250, 600) == CONTENT[250:600]
    assert read(store, key, 2000, 9000) == CONTENT[2000:]
    assert bytes(obstore.get(store, key).bytes()) == CONTENT
    assert obstore.head(store, key)["size"] == len(CONTENT)
    assert keys_of(store) == [key]
    with pytest.raises(FileNotFoundError):
        read(store, "no-such-key", 0, 1)


def check_conditions(store: Any, key: str) -> None:
    """If-Match: the object has this etag still. Create: there is no such key yet."""
    etag = obstore.head(store, key)["e_tag"]
    assert read(store, key, 3, 7, if_match=etag) == CONTENT[3:7]
    with pytest.raises(PreconditionError):
        read(store, key, 3, 7, if_match='"another"')
    obstore.put(store, "created", b"one", mode="create", use_multipart=False)
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "created", b"two", mode="create", use_multipart=False)
    assert bytes(obstore.get(store, "created").bytes()) == b"one"
    obstore.delete(store, "created")
    assert keys_of(store) == [key]
