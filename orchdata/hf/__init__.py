"""Hugging Face models: their processors as recipes, and batches as the arguments of their forward.

    processor --recipe--> od.Recipe       config --Inputs--> batches whose model_inputs() have the model's own names
    config --cost--> od.CostModel         model, batch --encode--> features, per phase
                                          outputs, batch --loss--> the scaled loss
    TrainerMixin, accelerate: transformers' Trainer, and Accelerate, over a DataLoader

transformers is imported when something of it is used; `pip install 'orchdata[hf]'` brings it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchdata.hf.from_processor import recipe
    from orchdata.hf.inputs import Inputs
    from orchdata.hf.model_cost import cost
    from orchdata.hf.scaled_loss import loss
    from orchdata.hf.towers import encode
    from orchdata.hf.training.accelerate import accelerate
    from orchdata.hf.training.trainer import TrainerMixin

_HOMES = {
    "recipe": "orchdata.hf.from_processor",
    "Inputs": "orchdata.hf.inputs",
    "loss": "orchdata.hf.scaled_loss",
    "encode": "orchdata.hf.towers",
    "cost": "orchdata.hf.model_cost",
    "TrainerMixin": "orchdata.hf.training.trainer",
    "accelerate": "orchdata.hf.training.accelerate",
}

__all__ = ["Inputs", "TrainerMixin", "accelerate", "cost", "encode", "loss", "recipe"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'orchdata.hf' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
