"""A user's modality that imports a package of his own late: `planted_helper`, which a test plants whole or broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import orchdata as od


@dataclass(frozen=True, kw_only=True)
class Bytes(od.Modality):
    """A part is its bytes.

    Attributes:
        late: where the package is imported: "count" or "decode".
        says_so: whether `required_modules` names it.
        wraps: whether what the import raises is made a ValueError of the sample, raised from it.
    """

    fields = ("raw",)

    late: str = "decode"
    says_so: bool = False
    wraps: bool = False

    def required_modules(self) -> tuple[str, ...]:
        return ("planted_helper",) if self.says_so else ()

    def arrays(self) -> Mapping[str, od.ArraySpec]:
        return {"bytes": od.ArraySpec((), "uint8")}

    def count(self, data: bytes | memoryview, limits: od.Limits) -> od.PartSize:
        if self.late == "count":
            self._help()
        return od.PartSize(len(data), 1, len(data))

    def decode(self, data: bytes | memoryview, limits: od.Limits) -> Mapping[str, Any]:
        if self.late == "decode":
            self._help()
        return {"bytes": np.frombuffer(data, np.uint8)}

    def _help(self) -> None:
        try:
            import planted_helper
        except Exception as error:
            if not self.wraps:
                raise
            raise ValueError("this part is bad") from error
        planted_helper.help_out()
