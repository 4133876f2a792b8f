"""orchdata: a modality-aware DataLoader that balances multimodal LLM training across ranks and phases.

Names are imported when first used (PEP 562), so `import orchdata` and the command line stay light:
torch alone takes a second.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchdata.balancers import CostModel, MoE, PhaseCost, TransformerCost
    from orchdata.batch.batch import Batch
    from orchdata.batch.megatron import megatron_packed
    from orchdata.batch.step_info import StepInfo
    from orchdata.dataloader import DataLoader
    from orchdata.dataset.mixture import Mixture, Source
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.delivery.policy import ErrorPolicy
    from orchdata.loaders.errors import (
        DamagedIndexError,
        DataError,
        FunctionError,
        MissingIndexError,
        OrchdataError,
        PackageError,
        ShardError,
        StaleIndexError,
        StateError,
        StepError,
        StorageError,
        TooManyFailures,
    )
    from orchdata.loaders.limits import Limits
    from orchdata.loaders.modalities.audio import AudioPreprocessor
    from orchdata.loaders.modalities.image import ImagePreprocessor
    from orchdata.loaders.modalities.modality import ArraySpec, Modality, PartSize, Slot
    from orchdata.loaders.modalities.video.preprocessor import VideoPreprocessor
    from orchdata.loaders.recipe import Recipe
    from orchdata.loaders.records import Media
    from orchdata.loaders.samples.sample import Sample
    from orchdata.loaders.text.preprocessor import TextPreprocessor
    from orchdata.loaders.text.template import ChatTemplate
    from orchdata.order.order import Shuffle
    from orchdata.planning.balance import Balance
    from orchdata.planning.layout import Packed, Padded
    from orchdata.planning.plan import Plan
    from orchdata.planning.route import Route, make_route
    from orchdata.post_balancing.loader import post_balance
    from orchdata.post_balancing.step import PostBatch
    from orchdata.ranks.exchange import exchange
    from orchdata.ranks.parallel import DataParallel

__version__ = "0.1.0"

# The module of each public name. The imports above say the same to type checkers, and a test compares the two.
_HOMES = {
    "DataLoader": "orchdata.dataloader",
    "ShardDataset": "orchdata.dataset.shard_dataset",
    "Mixture": "orchdata.dataset.mixture",
    "Source": "orchdata.dataset.mixture",
    "Recipe": "orchdata.loaders.recipe",
    "ImagePreprocessor": "orchdata.loaders.modalities.image",
    "AudioPreprocessor": "orchdata.loaders.modalities.audio",
    "VideoPreprocessor": "orchdata.loaders.modalities.video.preprocessor",
    "Modality": "orchdata.loaders.modalities.modality",
    "ArraySpec": "orchdata.loaders.modalities.modality",
    "PartSize": "orchdata.loaders.modalities.modality",
    "Slot": "orchdata.loaders.modalities.modality",
    "TextPreprocessor": "orchdata.loaders.text.preprocessor",
    "ChatTemplate": "orchdata.loaders.text.template",
    "Limits": "orchdata.loaders.limits",
    "CostModel": "orchdata.balancers",
    "MoE": "orchdata.balancers",
    "PhaseCost": "orchdata.balancers",
    "TransformerCost": "orchdata.balancers",
    "Balance": "orchdata.planning.balance",
    "DataParallel": "orchdata.ranks.parallel",
    "Shuffle": "orchdata.order.order",
    "Packed": "orchdata.planning.layout",
    "Padded": "orchdata.planning.layout",
    "Batch": "orchdata.batch.batch",
    "Plan": "orchdata.planning.plan",
    "StepInfo": "orchdata.batch.step_info",
    "megatron_packed": "orchdata.batch.megatron",
    "Sample": "orchdata.loaders.samples.sample",
    "exchange": "orchdata.ranks.exchange",
    "post_balance": "orchdata.post_balancing.loader",
    "PostBatch": "orchdata.post_balancing.step",
    "StepError": "orchdata.loaders.errors",
    "Route": "orchdata.planning.route",
    "make_route": "orchdata.planning.route",
    "ErrorPolicy": "orchdata.delivery.policy",
    "OrchdataError": "orchdata.loaders.errors",
    "DataError": "orchdata.loaders.errors",
    "ShardError": "orchdata.loaders.errors",
    "MissingIndexError": "orchdata.loaders.errors",
    "DamagedIndexError": "orchdata.loaders.errors",
    "StaleIndexError": "orchdata.loaders.errors",
    "StorageError": "orchdata.loaders.errors",
    "PackageError": "orchdata.loaders.errors",
    "StateError": "orchdata.loaders.errors",
    "TooManyFailures": "orchdata.loaders.errors",
    "FunctionError": "orchdata.loaders.errors",
    "Media": "orchdata.loaders.records",
}

__all__ = [
    # Reading
    "DataLoader",
    "ShardDataset",
    "Mixture",
    "Source",
    "Recipe",
    "ImagePreprocessor",
    "AudioPreprocessor",
    "VideoPreprocessor",
    "Modality",
    "ArraySpec",
    "PartSize",
    "Slot",
    "Media",
    "TextPreprocessor",
    "ChatTemplate",
    "Limits",
    # Balancing
    "CostModel",
    "MoE",
    "PhaseCost",
    "TransformerCost",
    "Balance",
    "DataParallel",
    "Shuffle",
    # Results
    "Packed",
    "Padded",
    "Batch",
    "Plan",
    "Sample",
    "StepInfo",
    # Between ranks
    "megatron_packed",
    "exchange",
    "Route",
    "make_route",
    "post_balance",
    "PostBatch",
    # Errors
    "ErrorPolicy",
    "OrchdataError",
    "DataError",
    "ShardError",
    "MissingIndexError",
    "DamagedIndexError",
    "StaleIndexError",
    "StorageError",
    "PackageError",
    "StateError",
    "TooManyFailures",
    "FunctionError",
    "StepError",
]


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


def __getattr__(name: str) -> object:
    if name in ("hf", "torchtitan"):  # subpackages, which import their own names when first used
        return import_module(f"orchdata.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'orchdata' has no attribute {name!r}")
    try:
        value = getattr(import_module(home), name)
    except Exception as error:
        from orchdata.loaders.errors import broken_package

        broken = broken_package(error)
        if broken is None:
            raise
        raise broken from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
