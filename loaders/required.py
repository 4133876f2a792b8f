"""What a recipe needs of the Python environment, loaded before the first sample: what is missing or broken is one error
that names it, and never a sample's failure.
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


def load_required(recipe: Recipe) -> None:
    """Import all that reading, measuring and decoding under a recipe need, in this process. Cheap where that was done.

    Raises:
        ValueError: this process allows less recursion than Python does by default: nested JSON would look damaged.
        PackageError: something cannot be imported, or set up with what was imported, whatever that raises.
        StorageError: the system refuses it now (no file descriptors left), after some tries.
        TypeError: `required_modules` of a modality gives no tuple of names.
    """
    if (depth := sys.getrecursionlimit()) < _DEPTH:
        raise ValueError(f"sys.getrecursionlimit() is {depth}, below Python's default: sys.setrecursionlimit({_DEPTH})")
    _load(recipe.text, "the recipe's text")
    for name, modality in recipe.modalities.items():
        _load(modality, f"the recipe's {name}")


def load_for_scanning(recipe: Recipe) -> None:
    """`load_required`, and what reads the headers of media that the recipe leaves out: facts of shards have these too.
    What is broken there is an error where such a header is met.
    """
    load_required(recipe)
    load_built_in()


def load_built_in() -> None:
    """Import what reads images and audio, as far as it can be imported. Raises StorageError."""
    for name, kind in BUILTINS.items():
        with contextlib.suppress(PackageError):
            _load(kind(), name)


def _load(held: TextPreprocessor | Modality, needed_by: str) -> None:
    modules = held.required_modules()
    if not isinstance(modules, tuple | list) or not all(isinstance(name, str) for name in modules):
        raise TypeError(f"{type(held).__name__}.required_modules() must give a tuple of names, got {modules!r}")
    for module in modules:
        _call(partial(import_module, module), needed_by, module.partition(".")[0])
    _call(held.set_up_process, needed_by, modules[0].partition(".")[0] if modules else "")


def _call(call: Callable[[], object], needed_by: str, package: str) -> None:
    """Call it, again while the system refuses it; whatever else it raises is the package's, where one is known."""

    def attempt() -> None:
        try:
            call()
        except (*NOT_DATA, OrchdataError):
            raise
        except Exception as error:
            if is_refusal(error):
                raise
            known = package if package != OWN else ""
            pass_broken_package(error, needed_by, known)
            if not package:  # a user's own `set_up_process` says itself what is wrong
                raise
            raise package_error(error, needed_by, known) from error

    tried(f"what {needed_by} needs", "cannot be loaded", attempt)
