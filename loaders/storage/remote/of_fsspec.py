"""Other storage, through fsspec: `hf://`, `msc://`, and every scheme that a package has registered.

fsspec cannot read on a condition. Size and version of an object are looked at when it is first read in a process, and
again after `_LOOK_SECONDS`: bytes of an object that is replaced in between are not noticed until then.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final
from urllib.parse import unquote

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import PackageError
from orchdata.loaders.storage.remote.requests import Answer, Buffer, Client, Listed, Trouble, trouble_of
from orchdata.loaders.storage.remote.urls import ObjectUrl, without_secrets
from orchdata.loaders.storage.storage import FileVersion, fits

_LOOK_SECONDS: Final = 60.0
_PAGE: Final = 1000
_MARKS: Final = ("ETag", "etag", "e_tag", "blob_id", "sha", "md5Hash", "generation", "version_aware_id", "mtime")


class FsspecClient(Client):
    """Requests through a filesystem of fsspec, which `storage_options` open, or one of the user's (`store`), used as it
    is.
    """

    _details: Mapping[str, Any] = {}  # arguments for all that is known of a file

    def __init__(self, url: ObjectUrl, options: Mapping[str, Any], store: Any = None) -> None:
        self._url = url
        self._store = store
        self._options = {name: value for name, value in options.items() if name != "retry_seconds"}
        self._secrets = [value for value in map(str, options.values()) if len(value) > 3]
        self._secrets += [url.user, *map(unquote, url.user.split(":", 1)[1:])]
        self._seen: dict[str, tuple[float, FileVersion]] = {}
        self._lock = threading.Lock()

    @cached_property
    def _files(self) -> Any:
        """The filesystem. Some connect when they are made, so that each attempt of a request may make it."""
        if self._store is not None:
            return self._store
        try:
            import fsspec
        except ImportError as error:
            raise PackageError("fsspec", str(error), way_out("fsspec", error), self._url.root) from error
        try:
            fsspec.get_filesystem_class(self._url.scheme)
        except ValueError:
            way = "pass its file system as store=, or name the data by s3://, gs://, az://, hf:// or https://"
            raise ValueError(f"fsspec knows no file system of {self._url.scheme}://: {way}") from None
        user = f"{self._url.user}@" if self._url.user else ""
        return fsspec.core.url_to_fs(f"{self._url.scheme}://{user}{self._url.place}", **self._options)[0]

    def get(self, key: str, start: int, stop: int, version: str) -> Answer:
        def answer() -> Answer:
            with self._lock:
                looked, now = self._seen.get(key, (0.0, FileVersion(0, "")))
            if not looked or time.monotonic() - looked >= _LOOK_SECONDS:
                now = self._look(key)
            if not fits(version, now.version):
                return Answer(b"", start, now)
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
                if trouble_of(error, self._url.root, self._words(error)).kind != "absent":
                    raise
                return []
            files = [each for each in found if each["type"] != "directory"]
            return sorted(Listed(each["name"][start:].lstrip("/"), self._version_of(each)) for each in files)

        listed = [each for each in self._called(find) if each.key > after]
        for begin in range(0, len(listed), _PAGE):
            yield listed[begin : begin + _PAGE]

    def put(self, key: str, data: Buffer) -> None:
        path = self._path(key)

        def write() -> None:
            self._files.makedirs(self._files._parent(path), exist_ok=True)
            self._files.pipe_file(path, bytes(data))

        self._called(write)

    def _raising(self) -> dict[str, Any]:
        """Return arguments with which `find` fails where a folder does: that of fsspec leaves the folder out."""
        from fsspec.asyn import AsyncFileSystem
        from fsspec.spec import AbstractFileSystem

        kind = type(self._files)
        finds = getattr(kind, "_find", kind.find)
        return {"on_error": "raise"} if finds in (AbstractFileSystem.find, AsyncFileSystem._find) else {}

    def _path(self, key: str) -> str:
        protocols, (scheme, place, *_) = self._files.protocol, self._url
        if scheme not in ([protocols] if isinstance(protocols, str) else protocols):
            return f"{place}/{key}"  # of a filesystem of the user's, under another name
        return str(self._files._strip_protocol(f"{scheme}://{place}/{key}"))

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
        mark = next((info[name] for name in (*_MARKS, "last_modified") if info.get(name)), None)
        if mark is None and hasattr(self._files, "ukey"):
            mark = self._files.ukey(info["name"])
        return FileVersion(int(info["size"]), str(mark))

    def _words(self, error: BaseException) -> str:
        return without_secrets(" ".join(f"{type(error).__name__}: {error}".split()), self._secrets)[:300]


class HubClient(FsspecClient):
    """Requests through the filesystem of huggingface_hub: each file is read from the commit that was indexed.

        version "blob@commit": what the file has, and the last commit that changed it --> reads of that commit

    Another commit of the same repository that leaves a file as it is changes nothing.
    """

    _details: Mapping[str, Any] = {"expand_info": True}  # with the last commit of each file

    def get(self, key: str, start: int, stop: int, version: str) -> Answer:
        blob, _, commit = version.partition("@")
        if not commit:
            return super().get(key, start, stop, version)

        def answer() -> Answer:
            path = self._path_at(key, commit)
            found = self._looked_at(path)
            now = FileVersion(found.size, version if found.version == blob else f"{found.version}@{commit}")
            if now.version != version:
                return Answer(b"", start, now)
            # Without a cache of its own: it would read ahead.
            data = self._files.cat_file(path, start=start, end=stop, cache_type="none")
            return Answer(memoryview(data), start, now)

        return self._called(answer)

    def pages(self, folder: str, after: str, *, deep: bool = True) -> Iterator[list[Listed]]:
        self._called(lambda: self._check_repository(folder))
        yield from super().pages(folder, after, deep=deep)

    def _check_repository(self, folder: str) -> None:
        """Raise Trouble if there is none, or none that may be read: a listing of it would only be empty."""
        try:
            self._files.resolve_path(self._path(folder.rstrip("/")))
        except FileNotFoundError:
            raise Trouble(
                "absent", "there is no such repository or revision on the hub, or none that this token may read"
            ) from None

    def _path_at(self, key: str, commit: str) -> str:
        """Return the path of a file at a commit, for any revision in the URL."""
        at = self._files.resolve_path(self._path(key))
        return str(type(at)(at.repo_type, at.repo_id, commit, at.path_in_repo).unresolve())

    def _looked_at(self, path: str) -> FileVersion:
        """Return size and blob of a file at a commit, which never change."""
        with self._lock:
            seen = self._seen.get(path)
        if seen is None:
            self._files.info(path)  # lists its folder, once for all files in it
            found = next(each for each in self._files.dircache[self._files._parent(path)] if each["name"] == path)
            seen = 0.0, FileVersion(int(found["size"]), str(found["blob_id"]))
            with self._lock:
                self._seen[path] = seen
        return seen[1]

    def _version_of(self, info: Mapping[str, Any]) -> FileVersion:
        file = super()._version_of(info)
        commit = info.get("last_commit")
        return FileVersion(file.size, f"{info['blob_id']}@{commit.oid}") if commit is not None else file


def is_filesystem(store: Any) -> bool:
    """Return whether a store of the user's is a filesystem of fsspec."""
    return hasattr(store, "cat_file") and hasattr(store, "_strip_protocol")
