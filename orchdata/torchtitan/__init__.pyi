"""The public names, for type checkers and for `__init__.py`, which reads this file: a name stands here alone."""

from .loader import DataLoader as DataLoader
from .loader import TrainerMixin as TrainerMixin
