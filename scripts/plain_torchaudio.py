"""Let torchaudio be imported with a torch without CUDA, in the environment that this runs in: for its tests.

torchaudio's wheel on PyPI has compiled libraries that need those of CUDA: importing it fails with a CPU build of
torch. orchdata does without. transformers imports torchaudio wherever it is installed, so that none of its processors
could be tested. This adds two files to site-packages, which put an empty module in the place of the one that loads the
libraries: what is written in Python works (`functional.resample`, `transforms`), `rnnt_loss` and `forced_align` do not.
No file of torchaudio is changed, and with a torch that has CUDA nothing is different.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

NAME = "plain_torchaudio"
MODULE = '''"""Written by orchdata's scripts/plain_torchaudio.py."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _WithoutLibraries(ModuleType):
    """Flags are false, and decorators change nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return False if name.startswith("_IS") else lambda function, *_, **__: function


class _Finder:
    """Finds the module that loads torchaudio's libraries, where torch has no CUDA."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchaudio._extension":
            return None
        import torch

        return ModuleSpec(name, _Finder, is_package=True) if torch.version.cuda is None else None

    @staticmethod
    def create_module(spec):
        return _WithoutLibraries(spec.name)

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.insert(0, _Finder)
'''


def main() -> None:
    """Write both files, again if they are there."""
    site = Path(sysconfig.get_path("purelib"))
    (site / f"{NAME}.py").write_text(MODULE)
    (site / f"{NAME}.pth").write_text(f"import {NAME}\n")


if __name__ == "__main__":
    main()
