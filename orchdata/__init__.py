"""orchdata: a modality-aware DataLoader that balances multimodal LLM training across ranks and phases.

A name is imported when it is first used (PEP 562), so that `import orchdata` and the command line stay light:
torch alone takes a second. `__init__.pyi` lists the names: lazy_loader and type checkers read it.
"""

from __future__ import annotations

import os
from types import ModuleType

__version__ = "0.1.0"


if not os.path.isdir(os.path.join(os.path.dirname(__file__), "loaders")):
    # A checkout has relative links to the folders that stand next to this one. Without them, those of an installed copy
    # would be imported.
    raise ImportError(f"{os.path.dirname(__file__)} lacks its links: run `pip install -e .` in a whole checkout")

import lazy_loader

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


def _views() -> ModuleType:
    from orchdata import views

    return views


def _html(value: object) -> str:
    """Return what a notebook shows of a value: its `_repr_html_`. No value imports its view, which stands above it."""
    html: str = _views().html_of(value)
    return html
