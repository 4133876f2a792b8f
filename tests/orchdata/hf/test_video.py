"""Videos of Hugging Face processors: what HFVideos counts, writes and decodes is what the processor itself gives."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torchvision_operators  # noqa: F401 - before torchvision

pytest.importorskip("torchvision", reason="transformers makes video processors with torchvision alone")
pytest.importorskip("transformers")

import av
import numpy as np
import torch
from hf_families.families import FAMILIES
from hf_families.reference import Measured, errors, measured, trained
from PIL import Image
from shard_factory import jpeg, write_shard
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata
from video_clips import VARIABLE, animation, clip

import orchdata as od
from orchdata.hf.video import HFVideos, video_modality
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.image_decode import resized
from orchdata.loaders.modalities.modality import read_header

NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
LIMITS = Limits()


def video_processor(name: str, **settings: Any) -> Any:
    """Small pictures and few of them, so that tests are short."""
    side = 32 if name == "qwen3_vl" else 28
    kind = Qwen3VLVideoProcessor if name == "qwen3_vl" else Qwen2VLVideoProcessor
    # Of Qwen3-VL the budget is that of all pictures together.
    size = {"shortest_edge": 4 * side * side, "longest_edge": (60 if name == "qwen3_vl" else 8) * side * side}
    given = {"size": size, "do_sample_frames": True, "fps": 6, "cap_pixels_per_frame": False}
    return kind(**given | settings)


def processor_of(name: str, **settings: Any) -> Any:
    found = FAMILIES[name].processor()
    found.video_processor = video_processor(name, **settings)
    return found


@cache
def built(name: str) -> Any:
    return processor_of(name)


@cache
def recipe_of(name: str) -> od.Recipe:
    return od.hf.recipe(built(name), video=True, tokens_per_second=4)


def model_of(name: str) -> Any:
    """Its vision_config.tokens_per_second is the default of transformers', 4."""
    return FAMILIES[name].model(built(name))


def every_frame(data: bytes) -> torch.Tensor:
    """(frames, 3, height, width), uint8, by PyAV."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


def metadata_of(data: bytes, videos: HFVideos) -> VideoMetadata:
    """Return what a decoder would report to transformers: frames, and frames / seconds."""
    width, height, frames, numerator, denominator = read_header(
        type(videos), len(data), lambda count: data[:count], LIMITS
    )
    fps = float(frames * denominator / numerator)
    others = {
        "width": width,
        "height": height,
        "duration": numerator / denominator,
        "frames_indices": list(range(frames)),
    }
    return VideoMetadata(total_num_frames=frames, fps=fps, **others)


CLIPS = {
    "mp4": lambda: clip("h264", frames=40, size=(160, 96)),
    "few": lambda: clip("h264", frames=5, rate=10, size=(90, 130)),
    "odd": lambda: clip("vp9", "webm", frames=30, rate=15, size=(131, 77)),
    "variable": lambda: clip("h264", "mkv", times=VARIABLE, size=(96, 96)),
    "gif": lambda: animation(9, (120, 70)),
    "two": lambda: clip("h264", frames=2, rate=1, size=(64, 64)),
}


def chats(count: int = 6) -> list[dict[str, Any]]:
    """Chats about videos, images and nothing, in turn."""
    clips, found = list(CLIPS.items()), []
    for number in range(count):
        name, make = clips[number % len(clips)]
        suffix = {"odd": "webm", "variable": "mkv", "gif": "gif"}.get(name, "mp4")
        asked: list[dict[str, Any]] = [{"type": "video"}, {"type": "text", "text": "what moves?"}]
        fields = {f"0.{suffix}": make()}
        if number % 3 == 1:
            asked += [{"type": "image"}, {"type": "video"}]
            fields |= {"0.jpg": jpeg(90, 60, number), "1.mp4": CLIPS["two"]()}
        if number % 4 == 3:
            asked, fields = [{"type": "text", "text": "say something"}], {}
        turns = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [{"type": "text", "text": "a bar " * (1 + number)}]},
        ]
        found.append({"__key__": f"c{number:03d}", **fields, "json": json.dumps({"messages": turns}).encode()})
    return found


def write(folder: Path, count: int = 6) -> str:
    return write_shard(folder / "videos.tar", chats(count))


def inputs_of(name: str, sample: dict[str, Any]) -> dict[str, Any]:
    """The model's arguments for one sample, by transformers' own processor."""
    from PIL import Image

    processor, videos = built(name), recipe_of(name).video
    turns = json.loads(sample["json"])["messages"]
    text = processor.apply_chat_template(turns, tokenize=False)
    clips = [data for field, data in sample.items() if field.split(".")[-1] in ("mp4", "webm", "mkv", "gif")]
    images = [Image.open(io.BytesIO(sample["0.jpg"])).convert("RGB")] if "0.jpg" in sample else None
    given: dict[str, Any] = {"text": [text], "images": images, "return_tensors": "pt"}
    if clips:
        given |= {"videos": [every_frame(data) for data in clips]}
        given |= {"video_metadata": [metadata_of(data, videos) for data in clips]}
    return dict(processor(**given))


def reference(name: str, model: Any, samples: Sequence[dict[str, Any]], labels: dict[str, list[int]]) -> Measured:
    """Each sample alone through transformers' processor and model, which computes positions itself."""
    return measured(
        model,
        (inputs_of(name, each) | {"labels": torch.tensor([labels[each["__key__"]]])} for each in samples),
    )


def loader(name: str, model: Any, shard: str, *, balance: Any = "global", padded: bool = False) -> od.DataLoader:
    dataset = od.ShardDataset(shard, recipe=recipe_of(name))
    return od.DataLoader(
        dataset,
        global_batch_size=len(dataset.index()),
        collate_fn=od.hf.Inputs(model.config, padded=padded),
        cost=od.hf.cost(model.config, video_patches=24),
        balance=balance,
        num_threads=0,
    )


def labels_of(name: str, shard: str) -> dict[str, list[int]]:
    """Of each sample, by its key, as our batches have them."""
    dataset = od.ShardDataset(shard, recipe=recipe_of(name))
    loader = od.DataLoader(dataset, global_batch_size=len(dataset.index()), num_threads=0, dp=(0, 1))
    found: dict[str, list[int]] = {}
    for batch in loader:
        bounds = batch.llm.cu_seqlens.tolist()
        for (_, key), start, stop in zip(batch.sample_ids, bounds, bounds[1:], strict=False):
            found[key] = batch.llm.labels[start:stop].tolist()
    return found


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
        videos=[every_frame(data)],
        video_metadata=[metadata_of(data, videos)],
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
    whole, shown = every_frame(data), Image.open(io.BytesIO(content))
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
    model, shard = model_of(name), write(tmp_path)
    for batch in loader(name, model, shard):
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
    model, shard = model_of(name), write(tmp_path)
    expected = reference(name, model, chats(), labels_of(name, shard))
    rounds = od.Balance(assignment="per_phase", max_tokens=400, oversize="own", encode="step")
    for options in ({}, {"padded": True}, {"balance": rounds}):
        found = errors(trained(model, loader(name, model, shard, **options)), expected)
        assert max(found) < TOLERANCE
    assert loader(name, model, shard, balance=rounds).plan_at(0, 0).rounds is not None

    def noisy(inputs: dict[str, Any]) -> dict[str, Any]:
        pixels = inputs["pixel_values_videos"]
        return inputs | {"pixel_values_videos": torch.randn(pixels.shape, dtype=pixels.dtype)}

    control = errors(trained(model, loader(name, model, shard), noisy), expected)
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
    dataset = od.ShardDataset(write(tmp_path), recipe=od.hf.recipe(built("qwen2_5_vl"), video=True))
    with pytest.raises(ValueError, match="tokens_per_second=4"):
        od.DataLoader(dataset, global_batch_size=2, collate_fn=od.hf.Inputs(model.config), num_threads=0)


def test_processors_without_videos_are_refused() -> None:
    with pytest.raises(TypeError, match="no video processor"):
        video_modality(built("qwen2_5_vl").tokenizer)
