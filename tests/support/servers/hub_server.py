"""A stub of the Hugging Face hub for `hf://datasets/user/name@revision/path`, as far as HfFileSystem asks it.

    GET /api/datasets/user/name[/revision/REV]      the repository, with the commit that a revision names
    GET /api/datasets/user/name/tree/REV[/path]     folders and files, `page_size` on a page
    POST /api/datasets/user/name/paths-info/REV     what is at some paths
    GET, HEAD /datasets/user/name/resolve/REV/path  a file, with ranges

Set HF_ENDPOINT to `endpoint` before huggingface_hub is imported, or give `options` to fsspec. All files are sent at
once: the real hub redirects to another host for large ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha1
from typing import Any
from urllib.parse import parse_qs, urlencode

from servers.stub_server import Answer, Seen, StubServer, part_of

_DATE = "2024-01-02T03:04:05.000Z"


@dataclass(slots=True)
class Repository:
    """Files by commits, and what names the commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    changed: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of each commit: file -> the last commit that changed it."""

    def commit(self, revision: str) -> str | None:
        return self.names.get(revision, revision if revision in self.commits else None)


class HubServer(StubServer):
    """A server of data sets, from `with` to its end."""

    def __init__(self, page_size: int = 1000, token: str = "") -> None:
        super().__init__()
        self.page_size = page_size
        self.token = token
        self._repositories: dict[str, Repository] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for `fsspec.filesystem("hf", ...)`: one of its own, without what others have cached."""
        return {"endpoint": self.endpoint, "token": self.token or False, "skip_instance_cache": True}

    def commit(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Add files to a data set `user/name`, in a new commit that a revision then names; returns the commit."""
        repository = self._repositories.setdefault(name, Repository())
        before = repository.commits.get(repository.names.get(revision, ""), {})
        commit = sha1(f"{name} {len(repository.commits)}".encode(), usedforsecurity=False).hexdigest()
        repository.commits[commit] = before | files
        last = repository.changed.get(repository.names.get(revision, ""), {})
        new = {path: commit for path, content in files.items() if before.get(path) != content}
        repository.changed[commit] = last | new
        repository.names[revision] = commit
        return commit

    def answer(self, seen: Seen) -> Answer:
        if self.token and seen.headers.get("authorization") != f"Bearer {self.token}":
            return _refusal(401, "GatedRepo", "no valid token")
        parts = seen.path.strip("/").split("/")
        is_interface = parts[0] == "api"
        parts = parts[is_interface:]
        repository = self._repositories.get("/".join(parts[1:3])) if parts[0] == "datasets" else None
        if repository is None:
            return _refusal(404, "RepoNotFound", "Repository not found")
        name, what, rest = "/".join(parts[1:3]), parts[3] if len(parts) > 3 else "revision", parts[4:]
        commit = repository.commit(rest[0] if rest else "main")
        if commit is None:
            return _refusal(404, "RevisionNotFound", f"Invalid rev id: {rest[0]}")
        files, path = repository.commits[commit], "/".join(rest[1:])
        if is_interface and what == "revision":
            return _said({"_id": name, "id": name, "sha": commit, "private": False, "tags": [], "siblings": []})
        if is_interface and what == "tree":
            return self._tree(files, path, seen, repository.changed[commit])
        if is_interface and what == "paths-info":
            entries = [_entry(files, each, repository.changed[commit]) for each in _paths(seen)]
            return _said([each for each in entries if each])
        if not is_interface and what == "resolve":
            return _file(files, path, commit, seen)
        return _refusal(404, "", f"the stub of the hub knows no {seen.method} {seen.path}")

    def _tree(self, files: dict[str, bytes], path: str, seen: Seen, changed: dict[str, str]) -> Answer:
        prefix = f"{path}/" if path else ""
        below = [name for name in files if name.startswith(prefix)]
        if prefix and not below:
            return _refusal(404, "EntryNotFound", f"{path} does not exist")
        found = {name for name in below if "/" not in name[len(prefix) :]} | {
            f"{prefix}{name[len(prefix) :].split('/')[0]}" for name in below
        }
        if seen.query.get("recursive", "").lower() in ("true", "1"):
            found = {each for name in below for each in _with_folders(name) if each.startswith(prefix)}
        entries = [entry for each in sorted(found) if (entry := _entry(files, each, changed))]
        start = int(seen.query.get("cursor", 0))
        answer = _said(entries[start : start + self.page_size])
        if start + self.page_size < len(entries):
            query = urlencode({**seen.query, "cursor": start + self.page_size})
            answer.headers["Link"] = f'<http://{seen.headers["host"]}{seen.path}?{query}>; rel="next"'
        return answer


def _paths(seen: Seen) -> list[str]:
    if "json" in seen.headers.get("content-type", ""):
        asked = json.loads(seen.body)["paths"]
        return [asked] if isinstance(asked, str) else list(asked)
    return parse_qs(seen.body.decode())["paths"]


def _with_folders(name: str) -> Iterator[str]:
    """A path and the folders that it is in."""
    parts = name.split("/")
    for number in range(1, len(parts) + 1):
        yield "/".join(parts[:number])


def _entry(files: dict[str, bytes], path: str, changed: dict[str, str]) -> dict[str, Any] | None:
    """What is said of a file or of a folder."""
    last = {"lastCommit": {"id": changed.get(path, "0" * 40), "title": "a commit", "date": _DATE}}
    if path in files:
        content = files[path]
        return {"type": "file", "oid": _oid(content), "size": len(content), "path": path, **last}
    if any(name.startswith(f"{path}/") for name in files):
        return {"type": "directory", "oid": _oid(path.encode()), "size": 0, "path": path, **last}
    return None


def _oid(content: bytes) -> str:
    return sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False).hexdigest()


def _file(files: dict[str, bytes], path: str, commit: str, seen: Seen) -> Answer:
    if path not in files:
        return _refusal(404, "EntryNotFound", f"{path} does not exist")
    headers = {"ETag": f'"{_oid(files[path])}"', "X-Repo-Commit": commit, "Content-Type": "application/octet-stream"}
    return part_of(files[path], seen, headers)


def _said(value: Any) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _refusal(status: int, code: str, said: str) -> Answer:
    return Answer(status, json.dumps({"error": said}).encode(), {"X-Error-Code": code, "X-Error-Message": said})
