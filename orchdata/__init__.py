"""orchdata: a modality-aware DataLoader that balances multimodal LLM training across ranks and phases.

A name is imported when it is first used (PEP 562), so that `import orchdata` and the command line stay light:
torch alone takes a second. `__init__.pyi` lists the names: lazy_loader and type checkers read it.
"""

from __future__ import annotations

import os
import sys

__version__ = "0.1.0"


def _refuse_mixed_folders() -> None:
    """Raise ImportError if `orchdata` and `orchdata.loaders` come from two copies, or the latter from none.

    A checkout has the folders `orchdata` and `loaders` side by side, and an installation maps them into one package. If
    Python imports the first from the current folder, the others still come from the installed copy.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    sibling = os.path.join(os.path.dirname(here), "loaders")
    finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    specs = (find(f"{__name__}.loaders", __path__) for find in finders)
    spec = next((each for each in specs if each is not None), None)
    way_out = (
        "leave the folder, keep it off sys.path (python -P, or no PYTHONPATH), or install the copy that you mean in "
        f"this environment: {sys.executable} -m pip install -e {os.path.dirname(here)}"
    )
    if spec is None:
        if os.path.isfile(os.path.join(sibling, "__init__.py")):
            raise ImportError(
                f"orchdata is imported from the checkout {os.path.dirname(here)}, which is not installed here, because "
                f"it is on sys.path before any installed one: {way_out}"
            )
        return  # its first import raises
    other, ours = os.path.dirname(spec.origin or ""), (sibling, os.path.join(here, "loaders"))
    if other and other not in ours and os.path.realpath(other) not in map(os.path.realpath, ours):
        raise ImportError(
            f"two copies of orchdata are mixed: `orchdata` is imported from {here}, because that is first on sys.path, "
            f"and `orchdata.loaders` from {other}, which is installed here: {way_out}"
        )


_refuse_mixed_folders()

import lazy_loader  # noqa: E402 - a checkout that is not installed lacks it, and the error above says what to do

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'orchdata' has no attribute {name!r}")
    try:
        return _load(name)
    except Exception as error:
        from orchdata.loaders.errors import broken_package

        broken = broken_package(error)
        if broken is None:
            raise
        raise broken from error
