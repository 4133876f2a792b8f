"""Tars made up for tests, and what is read of them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.storage.local import LocalFile


def shard(path: Path, limits: Limits | None = None) -> TarShard:
    return TarShard(str(path), LocalFile(path), limits=limits or Limits())


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def rows(path: Path, limits: Limits | None = None) -> list[dict[str, Any]]:
    return shard(path, limits).facts().table.arrow().to_pylist()


def wav(frames: int, rate: int) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.zeros(frames), rate, format="WAV")
    return out.getvalue()
