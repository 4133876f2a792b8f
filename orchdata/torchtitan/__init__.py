"""torchtitan: its trainer over a DataLoader, microbatches of whole optimizer steps.

    DataLoader: torchtitan's BaseDataLoader, around an od.DataLoader
    TrainerMixin: torchtitan's Trainer, with as many microbatches in a step as that has

torchtitan is imported when something of it is used.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
