"""A tiny random model of any configuration: the same code and the same kinds of layers, at a thousandth of the size.

    config --tiny_configs--> smaller ones, the smallest first
           --tiny_config---> the first of them of which a model runs
           --tiny_model----> that model, float32, in training mode, without randomness

What is tried on it is true of the code that the user's model runs, and says nothing of its weights.
"""

from orchdata.hf.tiny.model import NoTinyModelError, tiny_config, tiny_model
from orchdata.hf.tiny.shrink import tiny_configs

__all__ = ["NoTinyModelError", "tiny_config", "tiny_configs", "tiny_model"]
