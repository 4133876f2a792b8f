"""What of a training step is computed, against torch's own count of forward and backward of a real decoder."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from orchdata.balancers import TransformerCost

LENGTH = 48
# torch counts the fused kernels of other devices; the CPU's take and give the same.
aten = torch.ops.aten
FUSED = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query, key, value
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: (
        sdpa_backward_flop_count(grad, query, key, value)
    ),
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 50,
    "hidden_act": "silu",
}


def step_flops(*, weights: bool, inputs: bool, flash: bool, recompute: bool = False) -> tuple[float, float]:
    """(products with weights, attention) of a forward and, where there is one, its backward."""
    from transformers import AutoConfig, AutoModelForCausalLM

    implementation = "sdpa" if flash else "eager"
    config = AutoConfig.for_model(**CONFIG, attn_implementation=implementation)
    model = AutoModelForCausalLM.from_config(config).train().requires_grad_(weights)
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": True})
    embeds = torch.randn(1, LENGTH, 64, requires_grad=inputs or weights)
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        logits = model(inputs_embeds=embeds, use_cache=False).logits
        if inputs or weights:
            logits.sum().backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for op, flops in counts.items() if op in ("aten.mm", "aten.addmm"))
    return products, sum(counts.values()) - products


def cost(**training: Any) -> tuple[float, float]:
    # Eager kernels, and torch's count of fused ones, take all pairs of positions.
    found = TransformerCost.from_config(CONFIG, causal=False, **training).phase_cost()
    return found.linear * LENGTH, found.quadratic * LENGTH**2


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(
    ("weights", "inputs"), [(True, True), (False, True), (False, False)], ids=["trained", "through", "frozen"]
)
def test_passes_are_those_that_torch_counts(weights: bool, inputs: bool, flash: bool) -> None:
    counted = step_flops(weights=weights, inputs=inputs, flash=flash)
    assert cost(trainable=weights, input_gradients=inputs, flash=flash) == counted


def test_recomputed_layers_run_again_and_the_vocabulary_does_not() -> None:
    counted = step_flops(weights=True, inputs=True, flash=False, recompute=True)
    assert cost(recompute="full") == cost(recompute=True) == counted
    assert counted != step_flops(weights=True, inputs=True, flash=False)


def test_selective_recomputation_is_of_attention_alone() -> None:
    (products, attention), (_, forward) = cost(), cost(trainable=False)
    assert cost(recompute="selective") == (products, attention + forward)
    assert cost(recompute="selective", flash=True) == (products, 4.5 * forward)  # 1 + 1 + 2.5


@pytest.mark.parametrize(
    ("training", "stem", "connector"),
    [
        ({}, 2, 3),
        ({"trainable": False}, 1, 3),
        ({"trainable": False, "connector_trainable": False}, 1, 1),
        ({"trainable": False, "connector_trainable": False, "input_gradients": True}, 1, 2),
        ({"recompute": "full"}, 2, 3),
    ],
)
def test_stem_and_connector_have_passes_of_their_own(training: dict[str, Any], stem: int, connector: int) -> None:
    plain = {"hidden": 8, "layers": 2, "ffn": 16, **training}
    bare = TransformerCost(**plain).phase_cost().linear
    assert TransformerCost(**plain, stem_macs=10).phase_cost().linear == bare + 2 * 10 * stem
    assert TransformerCost(**plain, connector_macs=10).phase_cost().linear == bare + 2 * 10 * connector
