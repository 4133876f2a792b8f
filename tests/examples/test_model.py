"""The small model: packed equals alone, nothing leaks between items, every parameter takes part."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.train.lanes import make_model_config, make_recipe
from examples.model import (
    ModelConfig,
    MultimodalLM,
    Sizes,
    fit_to_recipe,
    make_cost,
    packed_attention,
    patch_positions,
    strided_frames,
)
from orchdata.loaders.recipe import AudioPreprocessor, ImagePreprocessor, Recipe

SIZES = Sizes(hidden=16, layers=2, ffn=32, num_heads=2)
CONFIG = ModelConfig(llm=SIZES, image=SIZES, audio=SIZES, patch_dim=12, merge=2, num_mels=8)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


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


def test_patches_come_in_merge_blocks() -> None:
    rows, columns = patch_positions(ints(2, 4)[None], 2).tolist()
    assert rows == [0, 0, 1, 1, 0, 0, 1, 1]
    assert columns == [0, 1, 0, 1, 2, 3, 2, 3]


def test_attention_equals_each_sequence_alone() -> None:
    query, key, value = torch.randn(3, 10, 2, 4, dtype=torch.float64).unbind(0)
    together = packed_attention(query, key, value, [3, 1, 6], causal=True)
    ends = pairwise((0, 3, 4, 10))
    alone = [packed_attention(query[a:b], key[a:b], value[a:b], [b - a], causal=True) for a, b in ends]
    torch.testing.assert_close(together, torch.cat(alone))


def test_audio_windows_stop_at_clip_borders() -> None:
    features = torch.arange(1.0, 11.0)[:, None]
    windows, starts, positions = strided_frames(features, ints(0, 4, 10), 2)
    assert windows.tolist() == [[0, 1, 2], [2, 3, 4], [0, 5, 6], [6, 7, 8], [8, 9, 10]]
    assert starts.tolist() == [0, 2, 5]
    assert positions.tolist() == [[0, 1, 0, 1, 2]]


def test_images_are_encoded_alone() -> None:
    model, inputs = make_model(), make_inputs([40], [(2, 4), (4, 6)], [8])
    grids, cu_seqlens, patches = (inputs[f"image_{name}"] for name in ("grid_hw", "cu_seqlens", "patches"))
    together = model.image(patches, cu_seqlens, patch_positions(grids, 2))
    second = model.image(patches[8:], ints(0, 24), patch_positions(grids[1:], 2))
    torch.testing.assert_close(together[2:], second)  # 2x4 patches, merged 2x2, are the first 2 rows


def test_packed_loss_is_the_sum_of_the_samples_losses() -> None:
    model, inputs = make_model(), make_inputs([7, 12], [(2, 2)], [4], used=False)
    total = model(**inputs).loss_sum
    parts = []
    for start, stop in ((0, 7), (7, 19)):
        own = {name: inputs[name][start:stop] for name in ("input_ids", "position_ids", "labels")}
        parts.append(model(**inputs | own | {"cu_seqlens": ints(0, stop - start)}).loss_sum)
    torch.testing.assert_close(total, sum(parts))


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


def test_a_batch_without_targets_still_reaches_every_parameter() -> None:
    model, inputs = make_model(), make_inputs([1], [(2, 2)], [4], used=False)
    out = model(**inputs)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mrope_positions_are_taken() -> None:
    model, inputs = make_model(), make_inputs([20], [(2, 2)], [4])
    plain = model(**inputs).loss_sum
    same = model(**inputs | {"position_ids": inputs["position_ids"].expand(3, -1)}).loss_sum
    other = model(**inputs | {"position_ids": torch.zeros(3, 20, dtype=torch.int64)}).loss_sum
    assert torch.isfinite(same) and torch.isfinite(plain)
    assert not torch.allclose(same, other)


def test_a_batch_without_the_phase_is_refused_by_name() -> None:
    model, inputs = make_model(), make_inputs([20], [(2, 2)], [4])
    text = {name: value for name, value in inputs.items() if not name.startswith("audio")}
    with pytest.raises(ValueError, match="no audio phase"):
        model(**text)


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


def test_the_model_is_fitted_to_the_recipe() -> None:
    recipe = Recipe(
        image=ImagePreprocessor(patch_size=16, merge=3), audio=AudioPreprocessor(num_mels=40, tokens_per_second=50)
    )
    config = fit_to_recipe(CONFIG, recipe)
    assert (config.patch_dim, config.merge) == (768, 3)  # 3 x 16 x 16
    assert (config.num_mels, config.conv_stride, config.pool) == (40, 2, 1)  # 16000 / (50 x 160) = 2 frames a token
    assert fit_to_recipe(CONFIG, Recipe(image=None)).image is None
    assert make_model_config(make_recipe()).num_mels == 80
