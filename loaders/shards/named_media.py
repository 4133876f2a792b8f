"""The media that a JSON record names: by path, as a `data:` URL, or in base64.

Supported are the keys of LLaVA, LLaMA-Factory, ms-swift and Qwen (`image`, `images`, `audio`, `audios`: a name, a list
of names, {"path"} or {"bytes"}), items in the content of a turn ({"type": "image", "image": ...}, `image_url`,
`input_audio`), and the `file_name` columns of a media folder with a table. Fields are `image.0`, `image.1`, ...

Names come from data: only files inside one folder are opened, and nothing else is touched. Of object storage, only
objects below one URL are read. The index keeps a few bits of each etag, which are compared with the etag of each
answer.
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple
from unicodedata import normalize
from urllib.parse import quote, unquote

from orchdata.loaders.errors import DecodeError, StaleIndexError, StorageError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, ON_REQUEST, OTHER
from orchdata.loaders.modalities.modality import Modality
from orchdata.loaders.shards.fields import classify
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.local import read_at
from orchdata.loaders.storage.remote.objects import PIECE_BYTES, Ahead, Looks, ObjectRange
from orchdata.loaders.storage.remote.urls import HTTP, check_key, identity, is_remote, scheme_of
from orchdata.loaders.storage.storage import FileVersion, ReadBytes, stamp_of_version, stamped, tried
from orchdata.loaders.text.messages import Repeating, kind_of, says_nothing, shown
from orchdata.loaders.text.template import NOT_DECODED, record_keys

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//)?")
MISSING: Final = "no such file"
# The texts of these errors are part of a scan's `_state`, and of the digest in kept facts: a change measures again.
_NAME_ERRORS: Final = {
    errno.ENOENT: MISSING,
    errno.ENOTDIR: f"{MISSING}: a part of its path is none",
    errno.ELOOP: "its links go round in a circle",
    errno.ENAMETOOLONG: "too long for the name of a file; base64 is read where its first bytes are those of its media",
}
EMPTY_ROOT: Final = (
    "media_root is an empty folder, so none of the files that records name exists: mount the file system that belongs "
    "there, or pass the folder of the files as media_root="
)
MISSING_NAMES: Final = 10
"""Number of names of missing files that are kept for an error."""


class MediaFile:
    """An open file, with its size, and a stamp of its modification time (STAMP_BITS bits), by which a change is
    noticed.
    """

    def __init__(self, folder: MediaFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._path = f"{folder.root}/{name}"
        self.fd, status = tried(self._path, "cannot be opened", lambda: folder.opened(name))
        self.size = status.st_size
        self.stamp = stamp_of(status)

    def read(self, size: int) -> bytes:
        """Read the first `size` bytes; fewer if the file is shorter now. Raises StorageError; DecodeError if it was
        replaced.
        """

        def read() -> bytes:
            try:
                return read_at(self.fd, 0, size)
            except OSError as error:
                if error.errno == errno.ESTALE:  # a network file system dropped the handle: open the file again
                    self._reopen()
                raise

        return tried(self._path, "cannot be read", read)

    def _reopen(self) -> None:
        fresh, status = self._folder.opened(self._name)
        try:
            if (status.st_size, stamp_of(status)) != (self.size, self.stamp):
                raise DecodeError(f"{shown_name(self._name)} was replaced while it was read")
            os.dup2(fresh, self.fd, inheritable=False)
        finally:
            os.close(fresh)


class MediaFolder:
    """A folder in which names from data are looked up; links are followed inside of it. Safe from many threads.

    Attributes:
        missing: some of the names without a file.
        has_files: whether any name had a file.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.missing: list[str] = []
        self.has_files = False
        self._real: str | None = None  # without links, with a slash at its end

    def prepare(self, names: Sequence[str]) -> None:
        """Each file is looked at when it is opened."""

    @contextmanager
    def open(self, name: str) -> Iterator[MediaFile]:
        """Open the file with this name. Raises DecodeError if there is none, it is outside the folder, or no regular
        file; StorageError if it cannot be opened now, or the folder does not exist.
        """
        if name.startswith("/"):  # an absolute path, which may be below the folder
            roots = (root.rstrip("/") for root in (self.root, os.path.realpath(self.root)))
            root = next((root for root in roots if name.startswith(f"{root}/")), None)
            name = name if root is None else name[len(root) :].lstrip("/")
        file = MediaFile(self, checked_name(name))
        try:
            yield file
        finally:
            os.close(file.fd)

    def opened(self, name: str) -> tuple[int, os.stat_result]:
        """Open a file for reading, in one attempt; return its descriptor and status. Raises OSError, and as `open`."""
        # Check the path through an O_PATH descriptor, then open that descriptor for reading: pipes and devices are
        # never touched, and no link can be put in place between the check and the opening.
        path_fd = self._open_path(name)
        try:
            status = os.fstat(path_fd)
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError(f"{shown_name(name)} is no regular file")
            if self._real is None:
                self._real = os.path.realpath(self.root, strict=True).rstrip("/") + "/"
            if not os.readlink(f"/proc/self/fd/{path_fd}").startswith(self._real):
                raise DecodeError(f"{shown_name(name)} leads out of media_root by a link")
            return os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_CLOEXEC), status
        finally:
            os.close(path_fd)

    def _open_path(self, name: str) -> int:
        try:
            try:
                path_fd = os.open(f"{self.root}/{name}", os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                for form in () if name.isascii() else ("NFC", "NFD"):  # macOS writes another than other systems
                    with suppress(FileNotFoundError):
                        path_fd = os.open(f"{self.root}/{normalize(form, name)}", os.O_PATH | os.O_CLOEXEC)
                        break
                else:
                    raise
        except OSError as error:
            reason = _NAME_ERRORS.get(error.errno or 0)
            if reason is None:
                raise
            self._check_root()
            if len(self.missing) < MISSING_NAMES and error.errno != errno.ENAMETOOLONG:
                self.missing.append(name)
            raise DecodeError(f"{shown_name(name)}: {reason}") from None
        self.has_files = True
        return path_fd

    def _check_root(self) -> None:
        """Raise StorageError if the folder is gone or empty (a missing mount): then no file is known to be missing."""

        def is_empty() -> bool:
            self._real = os.path.realpath(self.root, strict=True).rstrip("/") + "/"
            with os.scandir(self.root) as entries:
                return next(entries, None) is None

        if tried(self.root, "media_root cannot be looked into", is_empty):
            raise StorageError(self.root, EMPTY_ROOT, errno.ENODATA)


Found = tuple[dict[str, list[str]], set[str]]
"""Missing files by media_root, and each media_root that has some of its files."""


class MissingMedia:
    """The missing files of all shards of one build, by media_root. Safe from many threads."""

    def __init__(self) -> None:
        self._missing: dict[str, list[str]] = {}
        self._has_files: set[str] = set()
        self._lock = threading.Lock()

    def add(self, folder: Folder) -> None:
        """Add the missing files of one shard."""
        self.add_found(({folder.root: folder.missing}, {folder.root} if folder.has_files else set()))

    def take(self) -> Found:
        """Return what was added, and forget it."""
        with self._lock:
            found = self._missing, self._has_files
            self._missing, self._has_files = {}, set()
            return found

    def add_found(self, found: Found) -> None:
        """Add what another process has found."""
        with self._lock:
            for root, names in found[0].items():
                self._missing.setdefault(root, []).extend(names)
            self._has_files |= found[1]

    def check(self) -> None:
        """Raise StorageError if records name many files below a folder, and none of them exists."""
        for root, names in self._missing.items():
            if root not in self._has_files and len(names) >= MISSING_NAMES:
                shown = ", ".join(map(shown_name, names[:3]))
                reason = (
                    f"media_root has none of the files that records name ({shown}, ...): pass the folder where their "
                    "paths begin as media_root=, or mount the file system that belongs there"
                )
                raise StorageError(root, reason, errno.ENOENT)


def checked_name(name: str) -> str:
    """Return a name that is a relative path without "..". Raises DecodeError for any other."""
    shown = shown_name(name)
    if name.startswith(("http:", "https:")):
        raise DecodeError(f"{shown} is a URL, and nothing is downloaded: fetch the file, and name it by its path")
    if _SCHEME.match(name) and "://" in name:
        raise DecodeError(f"{shown} is a URL, and none is opened: name the file by its path below media_root")
    if name.startswith(("/", "~", "\\")) or re.match(r"[A-Za-z]:[\\/]", name):
        raise DecodeError(f"{shown} is an absolute path that is not below media_root: write it relative to media_root")
    if ".." in name.replace("\\", "/").split("/"):
        raise DecodeError(f"{shown} leads upwards (..): write it relative to media_root")
    if "\0" in name:
        raise DecodeError(f"{shown} holds a NUL")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise DecodeError(f"{shown} is not valid Unicode") from None
    return name


def shown_name(name: str) -> str:
    """Shorten a name from data for an error message: it may be megabytes of something else."""
    return repr(name if len(name) <= 80 else name[:80] + "...")


def stamp_of(status: os.stat_result) -> int:
    """Return STAMP_BITS bits of the modification time."""
    return stamp_of_version(str(status.st_mtime_ns))


def joined_stamp(stamps: Sequence[int]) -> int:
    """Return the joint stamp of listed files, STAMP_BITS bits; the stamp itself if there is one file."""
    return stamps[0] if len(stamps) == 1 else stamp_of_version(" ".join(map(str, stamps)))


_CLASSES: Final = {**BUILTINS, **ON_REQUEST}
_CODES: Final = {name: KINDS.index(name) if name in KINDS else OTHER for name in ("text", *_CLASSES)}
_RECORD_KEYS: Final = record_keys(_CLASSES)
_ITEM_TYPES: Final = {word: name for name, kind in _CLASSES.items() for word in (name, *kind.words)}
_CHATS: Final = ("messages", "conversations", "conversation")
_ITEM_NAMES: Final = ("path", "url", "base64")
"""Keys of an item besides that of its type, as in transformers."""
_CONTENTS: Final = ("content", "value")
_NAMING: Final = frozenset((*_RECORD_KEYS, *_CHATS, *_CONTENTS))
_BEGINNINGS: Final = tuple(BUILTINS)
_LISTED: Final = "frames"
FILE_NAMES: Final = re.compile(r"(?:.*_)?file_names?")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/\s]{24,}(?:=+\s*)?")  # linear time: its parts match disjoint characters
_TAG: Final = re.compile(rf"<({'|'.join(('img', *BUILTINS))})>[^<>\n]+\.\w{{2,5}}</\1>")
_NUMBERED: Final = re.compile(r"_?\d+(_?(file_?)?(path|name))?")
_PATHS: Final = re.compile(rf"{_NUMBERED.pattern}|s?_?((file_?)?(path|name)|file)s?")
_FILES_WORDS: Final = "path file filename file_name filepath file_path img img_path photo picture recording sound wav"
_FILES: Final = frozenset(word + ending for word in _FILES_WORDS.split() for ending in ("", "s"))
"""Keys, besides those of a modality, under which people write the path of an image or clip."""
_UNREAD: Final = frozenset(_CODES[name] for name in BUILTINS)
_NO_PATH: Final = re.compile(r"://|\n")
_SNIFFED: Final = 24  # characters of base64: 18 bytes
_DATA_URL: Final = re.compile(r"data:[^,]{0,256};base64,", re.IGNORECASE)


class NamedMedia(NamedTuple):
    """One image or clip that a record names: by its path, in base64 (`encoded`), as a list of files (frames of a video)
    with the other keys of the record about them (`metadata`), or an error.
    `kind` is the code of its modality in the facts; OTHER if facts keep no header of it.
    """

    field: str
    kind: int
    path: str | None = None
    encoded: str | None = None
    error: str | None = None
    files: tuple[NamedMedia, ...] = ()
    metadata: Mapping[str, Any] = {}

    def parts(self) -> tuple[NamedMedia, ...]:
        """Return the listed files, or itself if there are none."""
        return self.files or (self,)

    def joined(self, contents: Sequence[bytes]) -> bytes:
        """Join the contents of the listed files into one item of its modality."""
        return _CLASSES[self.field.partition(".")[0]].from_frames(contents, self.metadata)

    def decoded(self, limits: Limits) -> bytes:
        """Decode the base64. Raises DecodeError."""
        size = 3 * (len(self.encoded or "") // 4)
        if size > limits.member_bytes:
            raise DecodeError(f"{size + 3} bytes in base64, above Limits.member_bytes={limits.member_bytes}")
        try:
            return base64.b64decode("".join((self.encoded or "").split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise DecodeError(f"not valid base64: {error}") from None


def media_of(value: Any, *, file_names: bool) -> list[NamedMedia]:
    """Return the media of a record, by modality, in the order in which they are named. Raises DecodeError if it names
    media in two ways that differ, or in tags of its text.
    `file_names`: whether its `file_name` columns name media, as in the table of a media folder.
    """
    is_record = isinstance(value, dict)
    # Most records of text name no media: none of their keys does, or has turns.
    if (
        not file_names
        and is_record
        and _NAMING.isdisjoint(value)
        and not any(key.startswith(_BEGINNINGS) for key in value)
    ):
        return _unread_name(value)
    # Names under keys of the record, and names in its turns.
    by_key: dict[str, list[Any]] = {}
    in_turns: dict[str, list[Any]] = {}
    if is_record:
        if isinstance(value, Repeating) and not value.keys().isdisjoint((*_RECORD_KEYS, *_CHATS)):
            raise DecodeError("a key comes twice in the record")
        for key, modality in _RECORD_KEYS.items():
            names = _list_of(value[key]) if key in value else []
            if names and by_key.setdefault(modality, names) != names:
                raise DecodeError(f"{key!r} and another key both name {modality}, but not the same: keep one of them")
        if file_names:
            _add_files(value, by_key)
    for modality, name in _items(value):
        in_turns.setdefault(modality, []).append(name)

    # If both are there they must agree.
    media = []
    for modality, kind in _CODES.items():
        turn_names = in_turns.get(modality, [])
        names = by_key.get(modality) or turn_names
        if turn_names and names != turn_names:
            raise DecodeError(f"a key and the turns both name {modality}, but not the same: keep one of them")
        media += [_media(modality, number, name) for number, name in enumerate(names)]
        if modality in BUILTINS and is_record:
            media += _unread_key_error(value, modality, kind, _NUMBERED if names else _PATHS)
    return media if media or not is_record else _unread_name(value)


def _unread_name(record: Mapping[str, Any]) -> list[NamedMedia]:
    """Return an error if a record that names no media has the path of an image or clip under a key for files.

    Addresses are left out: a page of the web may be called `a.jpg`. So are other keys: a title may be, too.
    """
    for key in record:  # in the record's sequence: the error is part of what is stored, and equal in all processes
        if key in _FILES:
            for name in _list_of(record[key]):
                kind = classify(name.lower())[0] if isinstance(name, str) and _NO_PATH.search(name) is None else OTHER
                if kind in _UNREAD:
                    return [_not_read(key, name, KINDS[kind], kind)]
    return []


def _not_read(key: str, name: str, modality: str, kind: int) -> NamedMedia:
    one = f"call the key {modality!r}, as columns= does"
    if _NUMBERED.search(key):
        one = f"name all of a record in one list, under '{modality}s'"
    error = f"{shown(key)} names {shown(name)}, but this key is not read, and the model would be "
    error += f"trained on the text without it: {one}. To read text alone: "
    error += f"{modality}=None in the recipe, or a Recipe(record=...) that leaves the key out"
    return NamedMedia(f"{modality}.0", kind, error=error)


def _unread_key_error(value: Mapping[str, Any], modality: str, kind: int, keys: re.Pattern[str]) -> list[NamedMedia]:
    """Return an error if a record names a file of this modality under a key that is not read; `keys`: what follows the
    modality in such a key. A record that names files under a key that is read may have paths of others; a numbered key
    is one more of the same.
    """
    for key in value:
        if key.startswith(modality) and keys.fullmatch(key, len(modality)):
            for name in _list_of(value[key]):
                if isinstance(name, str) and classify(name.lower())[0] == kind:
                    return [_not_read(key, name, modality, kind)]
    return []


def _list_of(value: Any) -> list[Any]:
    """Return a name or a list of names as a list, without empty values such as None; numbers stay, as wrong names."""
    listed = value if isinstance(value, list) else [value]
    return [name for name in listed if not says_nothing(name)]


def _add_files(value: Mapping[str, Any], by_key: dict[str, list[Any]]) -> None:
    for key, names in value.items():
        if FILE_NAMES.fullmatch(key):
            for name in _list_of(names):
                kind = classify(name.lower())[0] if isinstance(name, str) else OTHER
                if kind in (OTHER, 0):
                    raise DecodeError(f"{shown(key)} names {shown(str(name))}, which is none of: {', '.join(BUILTINS)}")
                by_key.setdefault(KINDS[kind], []).append(name)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (modality, name) of the media items in the turns of a record. Raises DecodeError for names in text tags."""
    if isinstance(value, dict):
        turns = [value[key] for key in _CHATS if isinstance(value.get(key), list)][:1] or [[value]]
    else:
        turns = [value] if isinstance(value, list) else []
    for turn in turns[0] if turns else ():
        turn = turn if isinstance(turn, dict) else {}
        content = next((turn[key] for key in _CONTENTS if turn.get(key) is not None), None)
        tag = _TAG.search(content) if isinstance(content, str) else None
        if tag is not None:
            raise DecodeError(
                f"{shown(tag[0])} names a file in the text: write a placeholder there, and its path under a key"
            )
        for item in content if isinstance(content, list) else ():
            if isinstance(item, dict):
                kind = item.get("type")
                kind = next((key for key in _ITEM_TYPES if item.get(key) is not None), None) if kind is None else kind
                if isinstance(kind, str) and kind in _ITEM_TYPES:
                    # {"type": "audio", "audio_url": ...}, or Anthropic's {"source": {...}}
                    modality = _ITEM_TYPES[kind]
                    keys = (kind, *(word for word in _ITEM_TYPES if _ITEM_TYPES[word] == modality), *_ITEM_NAMES)
                    named = next((item[key] for key in keys if item.get(key) is not None), None)
                    if named is None and isinstance(item.get("source"), dict):
                        named = item["source"]
                    for name in _names_of_item(modality, item, named):
                        yield modality, name


def _names_of_item(modality: str, item: Mapping[str, Any], value: Any) -> list[Any]:
    """Return the names of an item. A list of files is one part if its modality allows that (a video of frames)."""
    names = _list_of(value)
    kind = _CLASSES[modality]
    if not kind.listed or not isinstance(value, list) or (len(names) == 1 and not _is_piece(names[0], kind)):
        return names
    return [{**{key: one for key, one in item.items() if key != "type" and one is not value}, _LISTED: names}]


def _is_piece(value: Any, kind: type[Modality]) -> bool:
    """Return whether a name is that of one of the files that a part is made of (a frame), not of a whole part."""
    if not kind.listed or not isinstance(value, str):
        return False
    name = value.lower()
    return classify(name)[0] == _CODES[kind.listed] and not name.endswith(tuple(f".{ending}" for ending in kind.fields))


def _media(modality: str, number: int, value: Any) -> NamedMedia:
    field, kind, encoded = f"{modality}.{number}", _CODES[modality], False

    # A list of files, such as the frames of a video.
    if listed := _CLASSES[modality].listed:
        value = {_LISTED: value} if isinstance(value, list) else value
        if isinstance(value, dict) and isinstance(value.get(_LISTED), list):
            files = tuple(_media(listed, at, one) for at, one in enumerate(value[_LISTED]))
            metadata = {key: one for key, one in value.items() if key != _LISTED}
            return NamedMedia(field, kind, files=files, metadata=metadata, error=None if files else "an empty list")

    # One string: a path, a data: URL or base64.
    if isinstance(value, dict):  # {"bytes", "path"}, {"url"}, {"data", "format"}
        key = next((key for key in ("bytes", "data", "path", "url") if isinstance(value.get(key), str)), None)
        encoded = key in ("bytes", "data")
        value = value[key] if key is not None else value
    if not isinstance(value, str):
        error = f"{kind_of(value)}, not a path, a data: URL or base64"
        if isinstance(value, dict | list):
            error += f": store the file, not its decoded content ({NOT_DECODED})"
        return NamedMedia(field, kind, error=error)
    if value[:5].lower() == "data:":
        match = _DATA_URL.match(value)
        if match is None:
            return NamedMedia(field, kind, error="a data: URL that is not base64")
        return NamedMedia(field, kind, encoded=value[match.end() :])
    if encoded or _is_base64(value, modality):
        return NamedMedia(field, kind, encoded=value)
    if _is_piece(value, _CLASSES[modality]):
        error = f"{shown(value)} is not a {modality}: put the files of one {modality} in a separate list, [[...]]"
        return NamedMedia(field, kind, error=error)
    return NamedMedia(field, kind, path=value)


def _is_base64(text: str, modality: str) -> bool:
    """Return whether a string is base64 of this modality, by its first bytes: base64 of a JPEG can look like a path."""
    if len(text) < _SNIFFED or not _BASE64.fullmatch(text, 0, _SNIFFED):
        return False
    head = base64.b64decode(text[:_SNIFFED].encode(), validate=False)
    return bool(_CLASSES[modality].matches_magic(head[:16])) and _BASE64.fullmatch(text) is not None


_HEAD_BYTES: Final = 32 << 10
"""Bytes that are read to find a header; more if they do not suffice."""


class MediaObject:
    """An object, with its size, and a stamp of its etag (STAMP_BITS bits), by which a change is noticed."""

    def __init__(self, folder: ObjectFolder, name: str, file: FileVersion) -> None:
        self.size = file.size
        self.stamp = stamp_of_version(file.version)
        self._folder = folder
        self._name = name
        self._file = file
        self._head = b""

    def read(self, size: int) -> bytes:
        """Read the first `size` bytes; fewer if the object is shorter. Raises StorageError, DecodeError."""
        size = min(size, self.size)
        if size > len(self._head):
            stop = min(self.size, max(size, _HEAD_BYTES))
            self._head = self._folder.content(self._name, self._file, stop)
        return self._head[:size]


class ObjectFolder:
    """The objects below one URL. Safe from many threads.

    Attributes:
        missing: some of the names without an object.
        has_files: whether any name had an object.
    """

    def __init__(self, root: str, files: Files, reads: ReadBytes | None = None) -> None:
        self.root = root.rstrip("/")
        self.missing: list[str] = []
        self.has_files = False
        self._files = files
        self._reads = reads
        self._is_http = scheme_of(root) in HTTP
        self._looks = Looks(files.objects)
        self._is_checked = False

    def prepare(self, names: Sequence[str]) -> None:
        """Find sizes and versions of these names together. Names that cannot be read are left out. Raises
        StorageError.
        """
        urls = []
        for name in names:
            with suppress(DecodeError):
                urls.append(self._url(self._checked(name)))
        self._looks.find(urls)

    @contextmanager
    def open(self, name: str) -> Iterator[MediaObject]:
        """Open the object with this name, as `MediaFolder.open`."""
        name = self._checked(name)
        file = self._looked(name)
        if file is None:
            self._check_root()
            if len(self.missing) < MISSING_NAMES:
                self.missing.append(name)
            raise DecodeError(f"{shown_name(name)}: {MISSING}")
        self.has_files = True
        yield MediaObject(self, name, file)

    def indexed(self, name: str, size: int, stamp: int | None) -> bytes:
        """Return the content of an object that was indexed with this size and stamp; None: in another place. Raises
        StorageError; DecodeError if it is another one now, or there is none.
        """
        name = self._checked(name)
        return self.content(name, self._version(name, size, stamp), size)

    def _version(self, name: str, size: int, stamp: int | None) -> FileVersion:
        """Return which version of an object to read. One that is read in pieces has the same version in all of them."""
        if stamp is not None:
            return FileVersion(size, stamped(stamp))
        if size <= PIECE_BYTES:
            return FileVersion(size, "")
        return FileVersion(size, "" if (found := self._looked(name)) is None else found.version)

    def _looked(self, name: str) -> FileVersion | None:
        url = self._url(name)
        self._looks.find([url])
        return self._looks.known[url]

    def content(self, name: str, file: FileVersion, stop: int) -> bytes:
        """Return the first bytes of an object. Raises StorageError, DecodeError."""
        if not stop:
            return b""
        try:
            return bytes(self._files.objects.read(ObjectRange(self._url(name), file, 0, stop), self._reads))
        except StaleIndexError as error:
            raise DecodeError(f"{shown_name(name)} was changed since it was indexed ({error.reason})") from None
        except StorageError as error:
            if not error.is_absent:
                raise
            self._check_root()
            raise DecodeError(f"{shown_name(name)}: {MISSING}") from None

    def expect(self, wanted: Sequence[tuple[str, int, int | None]]) -> Ahead:
        """Begin to read objects (name, size, stamp), as of `indexed`. Keep the result until they were read."""
        ranges = []
        for name, size, stamp in wanted:
            with suppress(DecodeError, StorageError):
                name = self._checked(name)
                if size:
                    ranges.append(ObjectRange(self._url(name), self._version(name, size, stamp), 0, size))
        return self._files.objects.expect(ranges, self._reads)

    def _url(self, name: str) -> str:
        """Return the URL of the object with a name. A name is no URL: in HTTP, "%20", "#" and "?" of it are quoted."""
        return f"{self.root}/{quote(name) if self._is_http else name}"

    def _checked(self, name: str) -> str:
        """Return the key below the root, without "." and empty parts, as a file system reads a path. A full URL below
        the root is allowed. Raises DecodeError for any other.
        """
        if is_remote(name) and (url := identity(name)).startswith(f"{self.root}/"):
            name = url[len(self.root) + 1 :]
            name = unquote(name) if self._is_http else name
        key = "/".join(part for part in checked_name(name).split("/") if part not in ("", "."))
        if not key:
            raise DecodeError(f"{shown_name(name)} names a folder")
        try:
            check_key(self._url(key))
        except ValueError as error:
            raise DecodeError(f"{shown_name(name)}: {error}") from None
        return key

    def _check_root(self) -> None:
        """Raise StorageError if nothing is below the root: then no object is known to be missing."""
        if self._is_checked or self._is_http:
            return
        try:
            is_empty = next(self._files.objects.pages(f"{self.root}/"), None) is None
        except StorageError as error:
            if error.errno != errno.EILSEQ:  # of an object that is there
                raise
            is_empty = False
        if is_empty:
            raise StorageError(self.root, EMPTY_ROOT, errno.ETIME)  # a build does not wait for it
        self._is_checked = True


Folder = MediaFolder | ObjectFolder


def folder_of(root: str | None, files: Files, reads: ReadBytes | None = None) -> Folder | None:
    """Return the folder of files that records name: on this machine, or in object storage."""
    if root is None:
        return None
    return ObjectFolder(root, files, reads) if is_remote(root) else MediaFolder(root)
