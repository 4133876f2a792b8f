"""The small model: packed equals alone, nothing leaks between items, every parameter takes part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from examples.model import (
    ModelConfig,
    MultimodalLM,
    Sizes,
    make_cost,
)

SIZES = Sizes(hidden=16, layers=2, ffn=32, num_heads=2)
CONFIG = ModelConfig(llm=SIZES, image=SIZES, audio=SIZES, patch_dim=12, merge=2, num_mels=8)


def make_inputs(
    lengths: list[int], grids: list[tuple[int, int]], clips: list[int], *, used: bool = True
) -> dict[str, Any]:
    """Inputs of one microbatch; `used=False` makes every image and clip a dummy."""
    generator = torch.Generator().manual_seed(1)
    total, patches, frames = sum(lengths), sum(h * w for h, w in grids), sum(clips)
    labels = torch.randint(0, 256, (total,), generator=generator)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    labels[cu_seqlens[:-1].long()] = -100
    image_tokens, audio_tokens = (patches // 4, frames // 4) if used else (0, 0)
    places = torch.randperm(total, generator=generator)[: image_tokens + audio_tokens]
    return {
        "input_ids": torch.randint(0, 256, (total,), generator=generator),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "labels": labels,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max(lengths),
        "image_patches": torch.randn(patches, 12, generator=generator, dtype=torch.float64),
        "image_grid_hw": torch.tensor(grids, dtype=torch.int32),
        "image_cu_seqlens": torch.tensor([0] + [h * w for h, w in grids]).cumsum(0).int(),
        "image_positions": places[:image_tokens],
        "audio_features": torch.randn(frames, 8, generator=generator, dtype=torch.float64),
        "audio_cu_seqlens": torch.tensor([0, *clips]).cumsum(0).int(),
        "audio_positions": places[image_tokens:],
    }


def make_model(config: ModelConfig = CONFIG) -> MultimodalLM:
    torch.manual_seed(0)
    return MultimodalLM(config).double()


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_every_trainable_parameter_has_a_gradient(used: bool, frozen: bool, checkpointed: bool) -> None:
    config = ModelConfig(
        llm=SIZES, image=SIZES, audio=SIZES, patch_dim=12, num_mels=8, freeze_encoders=frozen, checkpoint=checkpointed
    )
    model, inputs = make_model(config), make_inputs([30, 9], [(2, 2), (4, 2)], [4, 12], used=used)
    model(**inputs).loss_sum.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if used and parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.any(), name
    frozen_names = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert bool(frozen_names) == frozen
    assert not any("projector" in name for name in frozen_names)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_cost_model_counts_the_operations_that_torch_counts(frozen: bool) -> None:
    config = ModelConfig(llm=SIZES, image=SIZES, audio=SIZES, patch_dim=12, num_mels=8, freeze_encoders=frozen)
    model, inputs = make_model(config), make_inputs([50, 20], [(4, 6), (2, 2)], [40, 8])
    inputs["labels"][:] = 1  # every position is predicted but the last of all
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**inputs).loss_sum.backward()

    costs = dict(zip(make_cost(config).phases, make_cost(config).costs, strict=True))
    image = costs["image"].at(24) + costs["image"].at(4)
    audio = costs["audio"].at(20) + costs["audio"].at(4)
    # Plain matrix products compute all pairs of positions, also those that a causal kernel skips.
    llm = costs["llm"].at(50) + costs["llm"].at(20) + costs["llm"].quadratic * (50**2 + 20**2)
    last = 3 * 2 * SIZES.hidden * config.vocab_size
    assert counter.get_total_flops() == image + audio + llm - last
