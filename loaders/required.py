"""Loads the Python packages that a recipe needs, before the first sample. A missing or broken package is one error that
names it, and never a sample's failure.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Final

from orchdata.loaders.environment import OWN
from orchdata.loaders.errors import (
    NOT_DATA,
    OrchdataError,
    PackageError,
    is_refusal,
    package_error,
    pass_broken_package,
)
from orchdata.loaders.modalities.builtin import BUILTINS
from orchdata.loaders.modalities.modality import Modality
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.text.preprocessor import TextPreprocessor

_DEPTH: Final = 1_000


def load_required(recipe: Recipe, *, decodes: bool = True) -> None:
    """Import everything that a recipe needs for reading, measuring and, unless not `decodes`, decoding. Repeated calls
    are cheap. Raises ValueError for a recursion limit below Python's default (nested JSON would look damaged),
    PackageError for a failed import or set-up, StorageError if the system cannot do it now, TypeError for wrong
    `required_modules`.
    """
    if (depth := sys.getrecursionlimit()) < _DEPTH:
        raise ValueError(f"sys.getrecursionlimit() is {depth}, below Python's default: sys.setrecursionlimit({_DEPTH})")
    _load(recipe.text, "the recipe's text", decodes)
    for name, modality in recipe.modalities.items():
        _load(modality, f"the recipe's {name}", decodes)


def load_for_scanning(recipe: Recipe) -> None:
    """`load_required` without what only decoding needs, and also the readers of headers of media that the recipe leaves
    out: facts of shards contain these too. A broken one of these is an error only when such a header is met.
    """
    load_required(recipe, decodes=False)
    load_built_in(decodes=False)


def load_built_in(*, decodes: bool = True) -> None:
    """Import the readers of images and audio, as far as that succeeds; decoding needs more. Raises StorageError."""
    for name, kind in BUILTINS.items():
        with contextlib.suppress(PackageError):
            _load(kind(), name, decodes)


def _load(user: TextPreprocessor | Modality, needed_by: str, decodes: bool) -> None:
    modules = user.required_modules()
    if not isinstance(modules, tuple | list) or not all(isinstance(name, str) for name in modules):
        raise TypeError(f"{type(user).__name__}.required_modules() must return a tuple of names, got {modules!r}")
    calls: list[tuple[Callable[[], object], str]] = [(partial(import_module, module), module) for module in modules]
    set_up = user._set_up_counting if isinstance(user, Modality) and not decodes else user.set_up_process
    for call, module in [*calls, (set_up, modules[0] if modules else "")]:
        attempt = partial(_attempt, call, needed_by, module.partition(".")[0])
        tried(f"what {needed_by} needs", "cannot be loaded", attempt)


def _attempt(call: Callable[[], object], needed_by: str, package: str) -> None:
    """Call it. An error of the system passes, to be tried again; any other is the package's, if one is known."""
    try:
        call()
    except (*NOT_DATA, OrchdataError):
        raise
    except Exception as error:
        if is_refusal(error):
            raise
        known = package if package != OWN else ""
        pass_broken_package(error, needed_by, known)
        if not package:  # a user's own `set_up_process`: its exception says what is wrong
            raise
        raise package_error(error, needed_by, known) from error
