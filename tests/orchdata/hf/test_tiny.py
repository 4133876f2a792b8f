"""Tiny models of configurations: every kind of layer stays, they run, and nothing of the user's is touched."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from orchdata.hf.tiny import NoTinyModelError, tiny_configs, tiny_model

transformers = pytest.importorskip("transformers")

FEW_PARAMETERS = 50_000_000


def config_of(kind: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **settings)


def kinds_of(config: Any) -> dict[str, set[Any]]:
    """What is said of each layer, by the lists that say it."""
    text = config.get_text_config()
    named = {
        name: value for name, value in vars(text).items() if name.endswith(("layer_types", "block_type", "_layers"))
    }
    return {
        name: set(value)
        for name, value in named.items()
        if isinstance(value, list) and value and type(value[0]) is not int
    }


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "gemma2",
        "gpt_oss",
        "deepseek_v3",
        "qwen3_next",
        "jamba",
        "nemotron_h",
        "llava",
        "qwen2_audio",
        "whisper",
    ],
)
def test_a_model_of_each_is_built_and_keeps_all_kinds_of_layers(kind: str) -> None:
    config = config_of(kind)
    before = config.to_dict()
    model = tiny_model(config)
    assert sum(parameter.numel() for parameter in model.parameters()) < FEW_PARAMETERS
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert kinds_of(model.config) == kinds_of(config)
    assert config.to_dict() == before


def test_what_media_depend_on_stays() -> None:
    vision = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    config = config_of("llava", vision_config=vision, text_config={"model_type": "llama", "vocab_size": 32064})
    tiny = tiny_model(config).config
    for name in ("image_size", "patch_size", "num_channels"):
        assert getattr(tiny.vision_config, name) == getattr(config.vision_config, name)
    assert 4096 == tiny.text_config.vocab_size > tiny.image_token_id  # special tokens lie within fewer tokens


def test_the_same_weights_come_each_time_and_nothing_of_the_user_changes() -> None:
    def drawn() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()  # noqa: NPY002

    config = config_of("llama")
    states = torch.random.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    expected = drawn()
    torch.random.set_rng_state(states[0]), np.random.set_state(states[1]), random.setstate(states[2])  # noqa: NPY002
    first = tiny_model(config)
    assert drawn() == expected
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            second = tiny_model(config)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert other.device.type == "cpu" and other.dtype == torch.float32 and not other.is_inference()
        assert torch.equal(one, other)


def test_without_a_model_the_error_says_what_the_last_attempt_ran_into() -> None:
    broken = config_of("llama", hidden_act="no such activation")
    with pytest.raises(NoTinyModelError, match="no tiny model of llama runs: KeyError.*no such activation"):
        tiny_model(broken)
    assert len(list(tiny_configs(broken))) > 2
