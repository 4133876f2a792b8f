"""Tiny models of configurations: every kind of layer stays, they run, and nothing of the user's is touched."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from orchdata.hf.tiny import NoTinyModelError, tiny_configs, tiny_model

transformers = pytest.importorskip("transformers")


def config_of(kind: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **settings)


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
