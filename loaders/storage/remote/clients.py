"""Clients of object storage: through obstore (S3, Google Cloud Storage, Azure, HTTP), and through fsspec (`hf://`,
`msc://`, and every scheme that a package has registered).

obstore finds credentials in the environment and on machines of AWS. It reads no profiles (boto3 reads their
credentials, region and endpoint), and takes a session token of the environment for keys that were given. Its own
retries are off: those of `requests` are the same for all clients.

fsspec cannot read on a condition. Size and version of an object are looked at when it is first read in a process, and
again after `_LOOK_SECONDS`: bytes of an object that is replaced in between are not noticed until then.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import PackageError
from orchdata.loaders.storage.remote.requests import Answer, Buffer, Client, Listed, Trouble, trouble_of
from orchdata.loaders.storage.remote.urls import HTTP, ObjectUrl, without_secrets
from orchdata.loaders.storage.storage import FileVersion, fits

_KEYS: Final[tuple[str, ...]] = ("access_key_id", "secret_access_key", "session_token", "token")
_OTHER_CREDENTIALS: Final = {"skip_signature", "role_arn", "web_identity_token_file", "credential_provider"}
_OF_ENVIRONMENT: Final = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
_FILES: Final = (("SHARED_CREDENTIALS", "credentials"), ("CONFIG", "config"))


def with_aws_settings(config: Mapping[str, Any], profile: str | None) -> dict[str, Any]:
    """Return the settings of a store of S3, with what a profile of AWS adds to them (None: AWS_PROFILE, or the default
    one). Given settings count first, then the environment. Raises ValueError for no such profile; PackageError without
    boto3.
    """
    settings = dict(config)
    given = {name.lower().removeprefix("aws_"): name for name in settings}
    if {"access_key_id", "secret_access_key"} <= given.keys():
        keys = {each: settings.pop(given[each]) for each in _KEYS if each in given}
        # Without a session token of the environment, which is of other keys.
        settings["credential_provider"] = lambda: {
            "access_key_id": keys["access_key_id"],
            "secret_access_key": keys["secret_access_key"],
            "token": keys.get("session_token") or keys.get("token"),
            "expires_at": None,
        }
    has_credentials = bool(given.keys() & (_OTHER_CREDENTIALS | set(_KEYS))) or (
        profile is None and any(map(os.environ.get, _OF_ENVIRONMENT))
    )
    has_endpoint, has_region = given.keys() & {"endpoint", "endpoint_url"}, given.keys() & {"region", "default_region"}
    files = [Path(os.environ.get(f"AWS_{name}_FILE") or f"~/.aws/{file}").expanduser() for name, file in _FILES]
    if (profile is None and not any(file.exists() for file in files)) or (
        has_credentials and has_endpoint and has_region
    ):
        return settings

    try:
        import boto3
        from botocore.configprovider import ConfiguredEndpointProvider
        from botocore.exceptions import ProfileNotFound
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise PackageError("boto3", str(error), way_out("boto3", error), "a profile of AWS") from error
    try:
        session = boto3.Session(profile_name=profile)
    except ProfileNotFound as error:
        raise ValueError(f"AWS has no such profile on this machine: {error}") from None
    if not has_credentials and session.get_credentials() is not None:
        settings["credential_provider"] = Boto3CredentialProvider(session)
    if session.region_name and not has_region:
        settings["region"] = os.environ.get("AWS_REGION") or session.region_name
    if not has_endpoint:  # which may be named for S3 alone
        of_profile = session._session
        provider = ConfiguredEndpointProvider(of_profile.full_config, of_profile.get_scoped_config(), "s3")
        if endpoint := provider.provide():
            settings["endpoint"] = endpoint
    return settings


SCHEMES: Final = ("s3", "gs", "az", *HTTP)
"""Schemes of URLs that obstore reads."""

_CLIENT: Final = {
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers", "http1_only", "http2_only"),
    *("http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "http2_max_frame_size"),
    *("pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url"),
    "randomize_addresses",
    *("read_timeout", "root_certificate", "timeout", "user_agent"),
}
_OURS: Final = ("anonymous", "profile", "retry_seconds")
_READ_TIMEOUT: Final = "30s"
_TIMEOUT: Final = "1h"  # for a whole answer, however slowly it comes: `read_timeout` ends one that stalls
_PUBLIC: Final = {*_OURS, *("endpoint", "region", "account_name", "container_name", "skip_signature")} | (
    _CLIENT - {"default_headers", "proxy_url"}
)
"""Options with values that may be shown."""


class ObstoreClient(Client):
    """Requests to a bucket, container or host through obstore, or through a store of the user's, used as it is."""

    def __init__(self, url: ObjectUrl, options: Mapping[str, Any], store: Any = None) -> None:
        self._url = url
        self._options = {
            name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()
        }
        self._is_given = store is not None
        self._obstore = library()
        self._secrets = [
            each
            for name, each in self._options.items()
            if name not in _PUBLIC and each not in ("true", "false") and len(each) > 3
        ]
        self._secrets += [url.query, url.user, *url.user.split(":", 1)[1:], *map(unquote, url.user.split(":", 1)[1:])]
        self._store = self._opened() if store is None else store

    def get(self, key: str, start: int, stop: int, version: str) -> Answer:
        # A weak etag never fits a condition: what the answer says is compared.
        match = {"if_match": version} if version.startswith('"') else {}

        def answer() -> Answer:
            result = self._obstore.get(self._store, key, options={"range": (start, stop), **match})
            file, begin = _version_of_meta(result.meta), result.range[0]
            return Answer(memoryview(result.bytes()), begin, file)

        return self._called(answer)

    def head(self, key: str) -> FileVersion:
        if self._url.query:  # a signature is for one method
            first = {"range": (0, 1)}
            return self._called(lambda: _version_of_meta(self._obstore.get(self._store, key, options=first).meta))
        return self._called(lambda: _version_of_meta(self._obstore.head(self._store, key)))

    def pages(self, folder: str, after: str, *, deep: bool = True) -> Iterator[list[Listed]]:
        where = folder.rstrip("/") or None
        listing: Iterator[Any]
        if deep:
            listing = self._called(
                lambda: self._obstore.list(self._store, where, offset=after or None, chunk_size=1000)
            )
        else:
            found = self._called(lambda: self._obstore.list_with_delimiter(self._store, where))["objects"]
            listing = iter([[each for each in found if each["path"] > after]])
        while (page := self._called(lambda: next(listing, None))) is not None:
            yield [Listed(each["path"], _version_of_meta(each)) for each in page]

    def put(self, key: str, data: Buffer) -> None:
        self._called(lambda: self._obstore.put(self._store, key, bytes(data)))

    def refresh(self) -> bool:
        if self._is_given:
            return False
        self._store = self._opened()
        return True

    def _opened(self) -> Any:
        from obstore.store import HTTPStore, from_url

        url = self._url
        for name in ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "azure_storage_endpoint"):
            endpoint = self._options.get(name)
            # obstore panics at a request to one that is no URL. It is not shown: it may have a password anywhere.
            if endpoint is not None and not re.match(r"https?://[^/?#\s]", endpoint):
                raise ValueError(
                    f"storage_options {name} must be a URL such as https://storage.example.com, with its scheme"
                )
        client: dict[str, Any] = {"read_timeout": _READ_TIMEOUT, "timeout": _TIMEOUT}
        client |= {name: value for name, value in self._options.items() if name in _CLIENT}
        config: dict[str, Any] = {
            name: value for name, value in self._options.items() if name not in (*_CLIENT, *_OURS)
        }
        if url.scheme in HTTP:
            if url.user:
                word = base64.b64encode(unquote(url.user).encode()).decode()
                client["default_headers"] = {"authorization": f"Basic {word}"}
            if url.scheme == "http":
                client["allow_http"] = "true"
            if config:
                raise ValueError(
                    f"storage_options has {', '.join(sorted(config))}, which {url.scheme}:// does not take"
                )
        elif "anonymous" in self._options:
            config["skip_signature"] = self._options["anonymous"]
        if url.scheme == "s3":
            config = with_aws_settings(config, self._options.get("profile"))
            # obstore reads it only where no client options are given.
            client.setdefault("allow_http", os.environ.get("AWS_ALLOW_HTTP", "false"))
        settings: dict[str, Any] = {"client_options": client, "retry_config": {"max_retries": 0}}
        try:
            if url.scheme in HTTP:
                return HTTPStore.from_url(f"{url.root}/{url.query}", **settings)
            return from_url(f"{url.root}/", **config, **settings)
        except BaseException as error:  # obstore panics for some values, which is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            words = self._words(error)
        way = ' (storage_options={"account_name": ...}, or AZURE_STORAGE_ACCOUNT_NAME)' if url.scheme == "az" else ""
        raise ValueError(f"{url.root} cannot be opened with these storage_options: {words}{way}")

    def _words(self, error: BaseException) -> str:
        first = str(error).split("\n\nDebug source", 1)[0]
        return without_secrets(" ".join(first.split()), self._secrets)[:300]


def library() -> Any:
    """Return the package obstore. Raises PackageError."""
    try:
        import obstore
        import obstore.exceptions
    except ImportError as error:
        raise PackageError("obstore", str(error), way_out("obstore", error), "object storage") from error
    return obstore


def _version_of_meta(meta: Any) -> FileVersion:
    """Return size and version: the etag, or the time of change where the server has no etags."""
    if tag := meta["e_tag"]:
        # Listings of Azure have no quotes, and answers have them.
        return FileVersion(meta["size"], tag if tag.startswith(('"', "W/")) else f'"{tag}"')
    changed = meta["last_modified"]
    return FileVersion(meta["size"], f"of {changed:%Y-%m-%dT%H:%M:%SZ}" if changed and changed.year > 1970 else "")


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
            at = self._files.resolve_path(self._path(key))
            path = str(type(at)(at.repo_type, at.repo_id, commit, at.path_in_repo).unresolve())  # of any revision
            found = self._looked_at(path)
            now = FileVersion(found.size, version if found.version == blob else f"{found.version}@{commit}")
            if now.version != version:
                return Answer(b"", start, now)
            # Without a cache of its own: it would read ahead.
            data = self._files.cat_file(path, start=start, end=stop, cache_type="none")
            return Answer(memoryview(data), start, now)

        return self._called(answer)

    def pages(self, folder: str, after: str, *, deep: bool = True) -> Iterator[list[Listed]]:
        def check_repository() -> None:
            # A listing of one that is missing, or may not be read, would only be empty.
            try:
                self._files.resolve_path(self._path(folder.rstrip("/")))
            except FileNotFoundError:
                reason = "there is no such repository or revision on the hub, or none that this token may read"
                raise Trouble("absent", reason) from None

        self._called(check_repository)
        yield from super().pages(folder, after, deep=deep)

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
