"""orchdata: a modality-aware DataLoader that balances multimodal LLM training across ranks and phases.

Names are imported when first used (PEP 562), so `import orchdata` and the command line stay light:
torch alone takes a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchdata.balance import Balance
    from orchdata.balancers import CostModel, PhaseCost, TransformerCost
    from orchdata.batch import Batch
    from orchdata.dataloader import DataLoader
    from orchdata.dataset import ShardDataset
    from orchdata.foreign.balancing import post_balance
    from orchdata.foreign.peers import StepError
    from orchdata.foreign.step import PostBatch
    from orchdata.layout import Packed, Padded
    from orchdata.loaders.errors import (
        DamagedIndexError,
        DataError,
        MissingIndexError,
        OrchdataError,
        ShardError,
        StaleIndexError,
        StateError,
        StorageError,
        TooManyFailures,
    )
    from orchdata.loaders.limits import Limits
    from orchdata.loaders.order import Shuffle
    from orchdata.loaders.preprocessors import AudioPreprocessor, ImagePreprocessor
    from orchdata.loaders.recipe import Recipe
    from orchdata.loaders.samples import Sample
    from orchdata.loaders.template import ChatTemplate
    from orchdata.loaders.text import TextPreprocessor
    from orchdata.plan import Plan
    from orchdata.policy import ErrorPolicy
    from orchdata.ranks.exchanging import exchange
    from orchdata.ranks.parallel import DataParallel
    from orchdata.ranks.route import Route, make_route

__version__ = "0.1.0"

# Where each public name lives; the imports above say the same to type checkers, and a test compares the two.
_HOMES = {
    "DataLoader": "orchdata.dataloader",
    "ShardDataset": "orchdata.dataset",
    "Recipe": "orchdata.loaders.recipe",
    "ImagePreprocessor": "orchdata.loaders.preprocessors",
    "AudioPreprocessor": "orchdata.loaders.preprocessors",
    "TextPreprocessor": "orchdata.loaders.text",
    "ChatTemplate": "orchdata.loaders.template",
    "Limits": "orchdata.loaders.limits",
    "CostModel": "orchdata.balancers",
    "PhaseCost": "orchdata.balancers",
    "TransformerCost": "orchdata.balancers",
    "Balance": "orchdata.balance",
    "DataParallel": "orchdata.ranks.parallel",
    "Shuffle": "orchdata.loaders.order",
    "Packed": "orchdata.layout",
    "Padded": "orchdata.layout",
    "Batch": "orchdata.batch",
    "Plan": "orchdata.plan",
    "Sample": "orchdata.loaders.samples",
    "exchange": "orchdata.ranks.exchanging",
    "post_balance": "orchdata.foreign.balancing",
    "PostBatch": "orchdata.foreign.step",
    "StepError": "orchdata.foreign.peers",
    "Route": "orchdata.ranks.route",
    "make_route": "orchdata.ranks.route",
    "ErrorPolicy": "orchdata.policy",
    "OrchdataError": "orchdata.loaders.errors",
    "DataError": "orchdata.loaders.errors",
    "ShardError": "orchdata.loaders.errors",
    "MissingIndexError": "orchdata.loaders.errors",
    "DamagedIndexError": "orchdata.loaders.errors",
    "StaleIndexError": "orchdata.loaders.errors",
    "StorageError": "orchdata.loaders.errors",
    "StateError": "orchdata.loaders.errors",
    "TooManyFailures": "orchdata.loaders.errors",
}

__all__ = [
    # Reading
    "DataLoader",
    "ShardDataset",
    "Recipe",
    "ImagePreprocessor",
    "AudioPreprocessor",
    "TextPreprocessor",
    "ChatTemplate",
    "Limits",
    # Balancing
    "CostModel",
    "PhaseCost",
    "TransformerCost",
    "Balance",
    "DataParallel",
    "Shuffle",
    # What arrives
    "Packed",
    "Padded",
    "Batch",
    "Plan",
    "Sample",
    # Between ranks
    "exchange",
    "Route",
    "make_route",
    "post_balance",
    "PostBatch",
    "StepError",
    # What goes wrong
    "ErrorPolicy",
    "OrchdataError",
    "DataError",
    "ShardError",
    "MissingIndexError",
    "DamagedIndexError",
    "StaleIndexError",
    "StorageError",
    "StateError",
    "TooManyFailures",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'orchdata' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
