"""torchtitan: its trainer over a DataLoader, microbatches of whole optimizer steps.

    DataLoader: torchtitan's BaseDataLoader, around an od.DataLoader
    TrainerMixin: torchtitan's Trainer, with as many microbatches in a step as that has

torchtitan is imported when something of it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchdata.torchtitan.loader import DataLoader
    from orchdata.torchtitan.trainer import TrainerMixin

_HOMES = {"DataLoader": "orchdata.torchtitan.loader", "TrainerMixin": "orchdata.torchtitan.trainer"}

__all__ = ["DataLoader", "TrainerMixin"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'orchdata.torchtitan' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
