"""Names of members: path -> (key, field) by WebDataset's conventions, field -> modality and encoding."""

from __future__ import annotations

import re

from orchdata.loaders.modality import AUDIO, IMAGE, TEXT

OTHER = 255
"""Kind of a field that is ignored: neither text, image nor audio."""

RAW, GZIP, SPARSE, PARQUET = 0, 1, 2, 3
"""How a member's bytes are stored: as they are, gzipped, in a sparse tar member, in a Parquet cell."""

IMAGE_SUFFIXES = frozenset(
    "jpg jpeg jpe jfif png apng webp gif bmp dib tif tiff ppm pgm pbm pnm pfm jp2 j2k avif".split()
)
AUDIO_SUFFIXES = frozenset("wav wave flac mp3 mp2 ogg oga opus aif aiff aifc au snd caf w64 rf64".split())
TEXT_SUFFIXES = frozenset("txt text transcript transcription caption json jsn jsonl".split())

# webdataset's own expressions (tariterators.base_plus_ext and tar_file_iterator), so that no name is split otherwise.
_SPLIT = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")


def split_name(name: str) -> tuple[str, str] | None:
    """(key, lower-cased field) of a member; None for `__meta__` names and names without a dot: no part of a sample."""
    if name.startswith("__") and _META.match(name):
        return None
    match = _SPLIT.match(name)
    return None if match is None else (match[1], match[2].lower())


def classify(field: str) -> tuple[int, int]:
    """(kind, encoding) of a field by its last suffix: "0.jpg" is an image, "txt.gz" gzipped text, "audio.pth" other."""
    suffix = field.rpartition(".")[2]
    if suffix in IMAGE_SUFFIXES:
        return IMAGE, RAW
    if suffix in AUDIO_SUFFIXES:
        return AUDIO, RAW
    if suffix in TEXT_SUFFIXES:
        return TEXT, RAW
    if suffix == "gz" and field[:-3].rpartition(".")[2] in TEXT_SUFFIXES:
        return TEXT, GZIP
    return OTHER, RAW


def printable(name: str) -> str:
    """A name as valid Unicode: bytes that are not UTF-8 (surrogates, as tarfile decodes them) become escapes."""
    if name.isascii():
        return name
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
