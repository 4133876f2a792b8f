"""Videos of Hugging Face processors: what HFVideos counts, writes and decodes is what the processor itself gives."""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import hf_video
import torch
from hf_families.through_orchdata import errors, trained
from hf_video import CLIPS, LIMITS, NAMES, built, chats, inputs_of, model_of, processor_of, recipe_of
from PIL import Image

import orchdata as od
from orchdata.hf.video import video_modality
from orchdata.loaders.modalities.image_decode import resized
from orchdata.loaders.modalities.modality import read_header

pytestmark = pytest.mark.cpus

TOLERANCE = 1e-8


def decoded(videos: Any, data: bytes) -> tuple[Any, np.ndarray]:
    size = videos.count_header(read_header(type(videos), len(data), lambda count: data[:count], LIMITS), LIMITS)
    out = np.full((size.num_rows, videos.patch_dim), 7, np.float32)
    videos.decode_into(data, size, {"pixel_values_videos": out}, LIMITS)
    return size, out


def assert_as_processor(processor: Any, videos: Any, data: bytes) -> None:
    size, out = decoded(videos, data)
    given = processor(
        text=[f"see {processor.video_token} now"],
        videos=[hf_video.every_frame(data)],
        video_metadata=[hf_video.metadata_of(data, videos)],
        return_tensors="pt",
    )
    np.testing.assert_array_equal(out, given["pixel_values_videos"].numpy())
    for name, values in videos.extras([size]).items():
        theirs = np.asarray(given[name])
        np.testing.assert_array_equal(values, theirs, err_msg=name)
        assert values.dtype == theirs.dtype
    text = "".join(piece if isinstance(piece, str) else processor.video_token * piece for piece in videos.expand(size))
    whole = processor.tokenizer(f"see {text} now")["input_ids"]
    assert whole == given["input_ids"][0].tolist()
    assert whole.count(videos.slot.token_id) == size.tokens


@pytest.mark.parametrize("native", [True, False], ids=["ours", "theirs"])
@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("name", NAMES)
def test_counts_text_and_pixels_are_the_processors(name: str, kind: str, native: bool) -> None:
    videos = recipe_of(name).video
    assert videos.native
    assert_as_processor(built(name), dataclasses.replace(videos, native=native), CLIPS[kind]())


@pytest.mark.parametrize("name", NAMES)
def test_values_become_the_pictures_that_were_taken(name: str) -> None:
    videos, data = recipe_of(name).video, CLIPS["mp4"]()
    size, out = decoded(videos, data)
    suffix, content = videos.to_file(data, size, {"pixel_values_videos": out}, LIMITS)
    whole, shown = hf_video.every_frame(data), Image.open(io.BytesIO(content))
    assert suffix == "png" and shown.n_frames == size.extent[3] > 2
    for place, number in enumerate(videos.numbers(size)):
        shown.seek(place)
        width, height = shown.size
        expected = resized(
            whole[number].permute(1, 2, 0).contiguous().numpy(), (width, height), "torchvision", "bicubic"
        )
        assert np.array_equal(np.asarray(shown.convert("RGB")), expected)


SETTINGS: dict[str, dict[str, Any]] = {
    "all pictures": {"do_sample_frames": False},
    "so many pictures": {"fps": None, "num_frames": 4},
    "capped": {"cap_pixels_per_frame": True, "max_video_tokens": 16},
    "another rate, few": {"fps": 3.5, "max_frames": 6},
    "three pictures a patch": {"temporal_patch_size": 3},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_processors(name: str, settings: str) -> None:
    processor = processor_of(name, **SETTINGS[settings])
    videos = video_modality(processor, tokens_per_second=4)
    for kind in ("mp4", "odd"):
        assert_as_processor(processor, videos, CLIPS[kind]())


@pytest.mark.parametrize("name", NAMES)
def test_positions_are_the_models(name: str, tmp_path: Path) -> None:
    model, shard = model_of(name), hf_video.write(tmp_path)
    for batch in hf_video.loader(name, model, shard):
        inputs = batch.model_inputs()
        bounds = batch.llm.cu_seqlens.tolist()
        seen = 0
        for (_, key), start, stop in zip(batch.sample_ids, bounds, bounds[1:], strict=False):
            theirs = inputs_of(name, next(sample for sample in chats() if sample["__key__"] == key))
            assert inputs["input_ids"][0, start:stop].tolist() == theirs["input_ids"][0].tolist()
            asked = {
                each: theirs.get(each)
                for each in ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
            }
            positions, _ = model.model.get_rope_index(**asked)
            assert torch.equal(inputs["position_ids"][1:, 0, start:stop], positions[:, 0])
            seen += "video_grid_thw" in theirs
        assert seen >= 3


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.slow), "qwen3_vl"])
def test_loss_and_gradients_are_the_models(name: str, tmp_path: Path) -> None:
    model, shard = model_of(name), hf_video.write(tmp_path)
    expected = hf_video.reference(name, model, chats(), hf_video.labels_of(name, shard))
    rounds = od.Balance(assignment="per_phase", max_tokens=400, oversize="own", encode="step")
    for options in ({}, {"padded": True}, {"balance": rounds}):
        found = errors(trained(model, hf_video.loader(name, model, shard, **options)), expected)
        assert max(found) < TOLERANCE
    assert hf_video.loader(name, model, shard, balance=rounds).plan_at(0, 0).rounds is not None

    def noisy(inputs: dict[str, Any]) -> dict[str, Any]:
        pixels = inputs["pixel_values_videos"]
        return inputs | {"pixel_values_videos": torch.randn(pixels.shape, dtype=pixels.dtype)}

    control = errors(trained(model, hf_video.loader(name, model, shard), noisy), expected)
    assert control[0] > 1e-4 and control[1] > 1e-4


def test_a_recipe_is_a_value() -> None:
    videos = recipe_of("qwen2_5_vl").video
    assert pickle.loads(pickle.dumps(videos)) == videos
    recipe = recipe_of("qwen2_5_vl")
    again = od.hf.recipe(built("qwen2_5_vl"), video=True, tokens_per_second=4)
    other = od.hf.recipe(processor_of("qwen2_5_vl", fps=3), video=True, tokens_per_second=4)
    assert recipe.fingerprint() == again.fingerprint() != other.fingerprint()
    assert od.hf.recipe(built("qwen2_5_vl")).video is None


def test_another_pace_than_the_models_is_refused(tmp_path: Path) -> None:
    model = model_of("qwen2_5_vl")
    dataset = od.ShardDataset(hf_video.write(tmp_path), recipe=od.hf.recipe(built("qwen2_5_vl"), video=True))
    with pytest.raises(ValueError, match="tokens_per_second=4"):
        od.DataLoader(dataset, global_batch_size=2, collate_fn=od.hf.Inputs(model.config), num_threads=0)


def test_processors_without_videos_are_refused() -> None:
    with pytest.raises(TypeError, match="no video processor"):
        video_modality(built("qwen2_5_vl").tokenizer)
