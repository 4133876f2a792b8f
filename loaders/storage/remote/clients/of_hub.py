"""Data sets on the Hugging Face hub, `hf://`: each file is read from the commit that was indexed.

    version "blob@commit": what the file has, and the last commit that changed it --> reads of that commit

Another commit of the same repository that leaves a file as it is changes nothing. All ranks read the commit of the
index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from orchdata.loaders.storage.remote.clients.client import Answer, Listed
from orchdata.loaders.storage.remote.clients.of_fsspec import FsspecClient
from orchdata.loaders.storage.remote.clients.trouble import Trouble
from orchdata.loaders.storage.storage import FileVersion

SCHEME: Final = "hf"


class HubClient(FsspecClient):
    """Requests through the filesystem of huggingface_hub. Arguments are those of `FsspecClient`."""

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
