"""torchaudio, also with a torch that its compiled libraries do not fit: without them, which resampling, filter banks
and the like do not need.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


def torchaudio() -> Any:
    """The package, with `functional` and `transforms`; skips the test where it is not installed."""
    if find_spec("torchaudio") is None:
        pytest.skip("torchaudio is not installed: nothing to compare with")
    try:
        return _loaded()
    except Exception:
        # A failed import leaves parts of it in sys.modules.
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchaudio"]:
            del sys.modules[name]
        sys.modules["torchaudio._extension"] = _WithoutLibraries("torchaudio._extension")
        return _loaded()


def _loaded() -> Any:
    import_module("torchaudio.transforms")
    return import_module("torchaudio")


class _WithoutLibraries(ModuleType):
    """In place of the module that loads the libraries: flags are false, and decorators change nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return False if name.startswith("_IS") else lambda function, *_, **__: function
