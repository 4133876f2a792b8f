"""A modality whose parts end, hang or fill the process that decodes them, by what their bytes say."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import orchdata as od


@dataclass(frozen=True, kw_only=True)
class Traps(od.Modality):
    """One number a part, unless its bytes name another end; "abort once PATH" is one where PATH is not."""

    fields = ("trap",)

    def arrays(self) -> Mapping[str, od.ArraySpec]:
        return {"values": od.ArraySpec((), "float32")}

    def count(self, data: bytes | memoryview, limits: od.Limits) -> od.PartSize:
        return od.PartSize(positions=1, tokens=1)

    def decode(self, data: bytes | memoryview, limits: od.Limits) -> Mapping[str, Any]:
        way, _, rest = bytes(data).decode().partition(" ")
        if way == "abort" and (not rest or not Path(rest.removeprefix("once ")).exists()):
            if rest:
                Path(rest.removeprefix("once ")).touch()
            os.abort()
        if way == "exit":
            os._exit(7)
        if way == "tell":
            partial = Path(rest.split()[0] + ".part")
            partial.write_text(str(os.getpid()))
            partial.rename(rest.split()[0])
        while way in ("hang", "tell"):
            time.sleep(1)
        held = []
        while way == "allocate":
            held.append(bytearray(64 << 20))
        if way == "raise":
            raise ValueError("a trap")
        return {"values": np.ones(1, np.float32)}


RECIPE = od.Recipe(
    image=od.ImagePreprocessor(max_tokens=64), limits=od.Limits(sample_decoded_bytes=1 << 30), trap=Traps()
)
