"""Other storage, through fsspec: `hf://`, `msc://`, and every scheme that a package has registered.

fsspec cannot read on a condition. Size and version of an object are looked at when it is first read in a process, and
again after `_LOOK_SECONDS`: bytes of an object that is replaced in between are not noticed until then.
"""

from __future__ import annotations

import errno
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import PackageError
from orchdata.loaders.storage.remote.clients.client import Answer, Buffer, Listed
from orchdata.loaders.storage.remote.clients.fsspec_errors import trouble_of
from orchdata.loaders.storage.remote.clients.trouble import Trouble
from orchdata.loaders.storage.remote.stamps import fits
from orchdata.loaders.storage.remote.urls import ObjectUrl, without_secrets
from orchdata.loaders.storage.storage import FileVersion

T = TypeVar("T")

_LOOK_SECONDS: Final = 60.0
_PAGE: Final = 1000
_MARKS: Final = ("ETag", "etag", "e_tag", "blob_id", "sha", "md5Hash", "generation", "version_aware_id", "mtime")
_OWN: Final = ("retry_seconds",)


class FsspecClient:
    """Requests through a filesystem of fsspec.

    Args:
        url: of an object in it.
        options: `storage_options`, as the filesystem names them.
        store: a filesystem of the user's, used as it is.
    """

    is_conditional = False
    _details: Mapping[str, Any] = {}  # arguments for all that is known of a file

    def __init__(self, url: ObjectUrl, options: Mapping[str, Any], store: Any = None) -> None:
        self.name = url.root
        self._scheme = url.scheme
        self._place = url.place
        self._secrets = [value for value in map(str, options.values()) if len(value) > 3]
        self._secrets += [url.user, *map(unquote, url.user.split(":", 1)[1:])]
        self._seen: dict[str, tuple[float, FileVersion]] = {}
        self._lock = threading.Lock()
        self._store = store
        self._at = f"{url.scheme}://{url.user}@{url.place}" if url.user else f"{url.scheme}://{url.place}"
        self._given = {name: value for name, value in options.items() if name not in _OWN}
        try:
            self._called(lambda: self._files)
        except Trouble as trouble:
            if trouble.kind != "passing":  # a server that cannot be reached is asked again by each request
                raise ValueError(trouble.reason) from None

    @cached_property
    def _files(self) -> Any:
        """The filesystem; some connect when they are made."""
        if self._store is not None:
            return self._store
        try:
            import fsspec
        except ImportError as error:
            raise PackageError("fsspec", str(error), way_out("fsspec", error), self._at) from error
        try:
            return fsspec.core.url_to_fs(self._at, **self._given)[0]
        except ImportError as error:
            raise PackageError(
                self._scheme, str(error), f"install the package that fsspec names for {self._scheme}://", self.name
            ) from error
        except Exception as error:  # noqa: BLE001 - each kind is mapped
            trouble = self._trouble(error)
        if self._scheme not in fsspec.available_protocols():
            way = (
                f"no package knows the scheme {self._scheme}://: install the one that registers it with fsspec, or "
                "pass store="
            )
        else:
            made = inspect.signature(fsspec.get_filesystem_class(self._scheme).__init__).parameters.values()
            names = [each.name for each in made if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]
            way = f"names in storage_options are {', '.join(names)}"
        raise Trouble(trouble.kind, f"{self.name} cannot be opened: {trouble.reason}: {way}")

    def get(self, key: str, start: int, stop: int, version: str) -> Answer:
        def answer() -> Answer:
            now = self._looked(key)
            if not fits(version, now.version):
                return Answer(b"", start, now)  # whoever asked compares the versions
            return Answer(memoryview(self._files.cat_file(self._path(key), start=start, end=stop)), start, now)

        return self._called(answer)

    def head(self, key: str) -> FileVersion:
        return self._called(lambda: self._look(key))

    def pages(self, folder: str, after: str, *, deep: bool = True) -> Iterator[list[Listed]]:
        def find() -> list[Listed]:
            path, start = self._path(folder.rstrip("/")), len(self._path(""))
            self._files.invalidate_cache()
            try:
                if deep:
                    found = self._files.find(path, detail=True, **self._details, **self._raising()).values()
                else:
                    found = self._files.ls(path, detail=True, **self._details)
            except FileNotFoundError as error:
                if self._trouble(error).kind != "absent":
                    raise
                return []
            files = [each for each in found if each["type"] != "directory"]
            return sorted(Listed(each["name"][start:].lstrip("/"), self._version_of(each)) for each in files)

        listed = [each for each in self._called(find) if each.key > after]
        for begin in range(0, len(listed), _PAGE):
            yield listed[begin : begin + _PAGE]

    def put(self, key: str, data: Buffer, *, create: bool) -> None:
        path = self._path(key)

        def write() -> None:
            if create and self._files.exists(path):
                raise Trouble("exists", "there is an object of this name")
            self._files.makedirs(self._files._parent(path), exist_ok=True)
            self._files.pipe_file(path, bytes(data))

        self._called(write)

    def delete(self, key: str) -> None:
        self._called(lambda: self._files.rm_file(self._path(key)))

    def refresh(self) -> bool:
        return False

    def _raising(self) -> dict[str, Any]:
        """Return arguments with which `find` fails where a folder does: that of fsspec leaves the folder out."""
        from fsspec.asyn import AsyncFileSystem
        from fsspec.spec import AbstractFileSystem

        kind = type(self._files)
        finds = getattr(kind, "_find", kind.find)
        return {"on_error": "raise"} if finds in (AbstractFileSystem.find, AsyncFileSystem._find) else {}

    def _path(self, key: str) -> str:
        protocols = self._files.protocol
        if self._scheme not in ([protocols] if isinstance(protocols, str) else protocols):
            return f"{self._place}/{key}"  # of a filesystem of the user's, under another name
        return str(self._files._strip_protocol(f"{self._scheme}://{self._place}/{key}"))

    def _called(self, call: Callable[[], T]) -> T:
        """Return `call()`. Raises Trouble, which does not refer to the exception: that may have secrets."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - each kind is mapped
            trouble = self._trouble(error)
        raise trouble

    def _looked(self, key: str) -> FileVersion:
        with self._lock:
            seen = self._seen.get(key)
        if seen is not None and time.monotonic() - seen[0] < _LOOK_SECONDS:
            return seen[1]
        return self._look(key)

    def _look(self, key: str) -> FileVersion:
        path = self._path(key)
        self._files.invalidate_cache(self._files._parent(path))
        version = self._version_of(self._files.info(path, **self._details))
        with self._lock:
            self._seen[key] = time.monotonic(), version
        return version

    def _version_of(self, info: Mapping[str, Any]) -> FileVersion:
        if info.get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, "a folder", "")
        mark = next((info[name] for name in _MARKS if info.get(name)), None)
        if mark is None and info.get("last_modified") is not None:
            mark = info["last_modified"]
        if mark is None and hasattr(self._files, "ukey"):
            mark = self._files.ukey(info["name"])
        return FileVersion(int(info["size"]), str(mark))

    def _words(self, error: Exception) -> str:
        return without_secrets(" ".join(f"{type(error).__name__}: {error}".split()), self._secrets)[:300]

    def _trouble(self, error: Exception) -> Trouble:
        return error if isinstance(error, Trouble) else trouble_of(error, self._words(error))


def is_filesystem(store: Any) -> bool:
    """Return whether a store of the user's is a filesystem of fsspec."""
    return hasattr(store, "cat_file") and hasattr(store, "_strip_protocol")
