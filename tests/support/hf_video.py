"""Qwen-VL families with their own video processors, chats about videos, and what Hugging Face makes of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision_operators  # noqa: F401

pytest.importorskip("torchvision", reason="transformers makes video processors with torchvision alone")

import av
import torch
from hf_families.families import FAMILIES
from hf_families.reference import Measured, measured
from shard_factory import jpeg, write_shard
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata
from video_clips import VARIABLE, animation, clip

import orchdata as od
from orchdata.hf.video import HFVideos
from orchdata.loaders.limits import Limits
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
