"""Building tiny models, away from what the user has set: random state, default dtype and device, modes of autograd."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from orchdata.hf.families import model_class, takes, thinker
from orchdata.hf.tiny.shrink import parts, text_part, tiny_configs, with_positions

MOST_PARAMETERS: Final = 60_000_000
_TOKENS: Final = 24
_TRIED: Final = 6
"""Tokens of the text that a model must run on."""


class NoTinyModelError(ValueError):
    """No tiny model of a configuration can be built, or none runs on a text."""


def tiny_config(config: Any, attn_implementation: str | None = None) -> Any:
    """The smallest of `tiny_configs` of which a model can be built and runs on a text.

    Raises as `tiny_model`.
    """
    return tiny_model(config, attn_implementation).config


def tiny_model(config: Any, attn_implementation: str | None = None, positions: int | None = None) -> Any:
    """A tiny random model of a configuration, on the CPU, in float32 and in training mode.

    Its weights are the same at each call, and so large that every input matters to its logits. Random state, default
    dtype and device, and modes of autograd of the caller have no influence, and are untouched.

    Args:
        config: of a model of transformers that is trained on text; of Qwen-Omni the thinker's is taken.
        attn_implementation: default: what the configuration says, or else what transformers chooses.
        positions: the most that its language model knows; default: as many as the configuration says.

    Raises:
        NoTinyModelError: with the error of the last attempt as its cause.
        ValueError: a configuration without a model.
    """
    config = thinker(config)
    kind, last = model_class(config), None
    for smaller in tiny_configs(config):
        if positions is not None:
            with_positions(smaller, positions)
        try:
            with undisturbed():
                return built(kind, smaller, attn_implementation)
        except Exception as error:  # noqa: BLE001 - classes of all kinds, on untried sizes
            last = error
    raise NoTinyModelError(f"no tiny model of {config.model_type} runs: {type(last).__name__}: {last}") from last


def built(kind: Any, config: Any, attention: str | None) -> Any:
    """One model of a class and a small configuration, that runs on a text. Raises what it raises, and NoTinyModelError
    for one that is too large. For use within `undisturbed`.
    """
    for _, each in parts(config) if attention else ():
        each._attn_implementation = attention
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(config).parameters())
    if count > MOST_PARAMETERS:
        raise NoTinyModelError(f"{count:,} parameters, {MOST_PARAMETERS:,} at most")
    model = kind(config)
    _draw_weights(model)
    model = model.float().train()
    if not getattr(config, "is_encoder_decoder", False):  # they want to hear or see something first
        try_text(model, config)
    return model


def try_text(model: Any, config: Any) -> None:
    """Raises what the model raises of a text alone, and NoTinyModelError."""
    arguments: dict[str, Any] = {"input_ids": text_of(config, _TRIED)[None], "use_cache": False}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in takes(config):
            arguments[name] = torch.zeros_like(arguments["input_ids"])
    with torch.no_grad():
        logits = model(**arguments).logits
    if not bool(logits.isfinite().all()):
        raise NoTinyModelError("its logits are not finite")


def text_of(config: Any, length: int, seed: int = 0) -> Tensor:
    """(length,) int64: tokens of a text, none of which is special; some come again, as in any text."""
    said = [
        value
        for _, each in parts(config)
        for name, value in vars(each).items()
        if name.endswith(("_id", "_index", "_ids"))
    ]
    special = {token for value in said for token in (value if isinstance(value, list | tuple) else [value])}
    vocabulary = text_part(config).vocab_size
    usual = [token for token in range(min(vocabulary, 512)) if token not in special][:_TOKENS]
    drawn = torch.randint(len(usual), (length,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(usual)[drawn]


def _draw_weights(model: nn.Module) -> None:
    """Weights large enough that every input matters; those of initialisation hide what is zero or nearly so."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.05 * drawn)
            else:
                parameter.copy_(drawn * min(0.3, parameter.shape[-1] ** -0.5))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run by torch's and transformers' defaults, silently, and leave everything as it was."""
    from transformers.utils import logging

    python, level = random.getstate(), logging.get_verbosity()
    arrays = np.random.get_state()  # noqa: NPY002 - what models draw from
    dtype, tokens = torch.get_default_dtype(), torch.random.get_rng_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.device("cpu"))
        warnings.simplefilter("ignore")
        try:
            logging.set_verbosity_error()
            torch.set_default_dtype(torch.float32)
            # Of torch.manual_seed also the accelerators' state would be lost.
            torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002
            torch.random.set_rng_state(tokens)
            torch.set_default_dtype(dtype)
            logging.set_verbosity(level)
