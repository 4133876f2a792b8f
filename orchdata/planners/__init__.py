"""Plans of a run before anything is rented: seconds, memory and GPUs of layouts, by a documented model.

modules, cluster, real global batches --formulas--> cells --closed forms--> layouts --simulate--> seconds of each step
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
