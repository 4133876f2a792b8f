"""Hugging Face models: their processors as recipes, and batches as the arguments of their forward.

    processor --recipe--> od.Recipe       config --Inputs--> batches whose model_inputs() have the model's own names
    config --cost--> od.CostModel         model, batch --encode--> features, per phase
                                          outputs, batch --loss--> the scaled loss
    TrainerMixin, accelerate: transformers' Trainer, and Accelerate, over a DataLoader

transformers is imported when something of it is used; the extra `hf` installs it.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
