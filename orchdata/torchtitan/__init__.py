"""torchtitan: its trainer over a DataLoader, microbatches of whole optimizer steps; imported when something of it is
used.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
