"""Videos from shard to batch: by name like any modality, in every engine, balanced, priced, profiled and verified."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import video_job
from PIL import Image
from rank_jobs import run_ranks
from shard_factory import SKIP_ANY, chat, jpeg, write_shard
from video_clips import VARIABLE, animation, clip, number_of, picture, sound_alone

import orchdata as od
from orchdata.loaders.index.build import build_index
from orchdata.loaders.modalities.image import CLIP_MEAN, CLIP_STD
from orchdata.loaders.shards.shard import Reading

VIDEO = od.VideoPreprocessor(patch_size=8, merge=2, fps=4, min_tokens=1, max_tokens=24, dtype="float32")
RECIPE = od.Recipe(audio=None, video=VIDEO, image=video_job.RECIPE.image)


def samples(count: int = 12) -> list[dict[str, Any]]:
    """Clips of several containers and rates, two in a chat, among images, and text alone, in turn."""
    made = []
    for number in range(count):
        sample: dict[str, Any] = {"__key__": f"s{number:03d}"}
        words = " ".join(["word"] * (3 + number))
        kind = number % 4
        if kind == 0:
            sample |= {"mp4": clip("h264", frames=16 + number), "txt": words.encode()}
        elif kind == 1:
            sample |= {
                "0.webm": clip("vp9", "webm", times=VARIABLE),
                "1.gif": animation(5 + number),
                "jpg": jpeg(60, 40, number),
                "json": chat("compare <video> and <video> with <image>", words),
            }
        elif kind == 2:
            sample["txt"] = words.encode()
        else:
            sample |= {"mkv": clip("h264", "mkv", frames=9), "json": chat("<video> what?", words)}
        made.append(sample)
    return made


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("videos") / "videos.tar", samples())


def loader(shard: str, **options: Any) -> od.DataLoader:
    dataset = od.ShardDataset(shard, recipe=options.pop("recipe", RECIPE))
    return od.DataLoader(dataset, **{"global_batch_size": 6, "num_threads": 0} | options)


def test_a_round_has_the_clips_of_its_micro_steps_one_after_another(shard: str) -> None:
    def encode(name: str, media: Any) -> torch.Tensor:
        shape = media.grid_hw if name == "image" else media.grid_thw
        of_rows = torch.repeat_interleave(shape.prod(1), media.cu_seqlens.diff())[:, None]
        return weights[name] * (media.patches.double() * of_rows).unflatten(0, (-1, 4)).mean(1)

    weights = {name: torch.ones((), dtype=torch.float64, requires_grad=True) for name in ("image", "video")}
    balance = od.Balance(assignment="per_phase", max_tokens=100, oversize="own", encode="step")
    for step in loader(shard, balance=balance).steps():
        assert len(step) > 1
        for group in od.rounds(step, encode):
            for batch in group:
                for name, media in batch.media.items():
                    own = encode(name, media)[: media.num_tokens]
                    assert torch.equal(group.features(batch)[name], own)
                    for rows, sign in ((own, -1), (group.features(batch)[name], 1)):
                        (sign * rows.square().sum()).backward()
            largest = max(weight.grad.abs() for weight in weights.values())
            group.backward()
    assert max(weight.grad.abs() for weight in weights.values()) < 1e-12 * largest


def numbers(batch: od.Batch) -> list[list[int]]:
    """Which pictures of its clip each video of a batch holds."""
    media = batch.media["video"]
    clips = []
    bounds = media.cu_seqlens.tolist()
    for (grid_t, grid_h, grid_w), start, stop in zip(media.grid_thw.tolist(), bounds, bounds[1:], strict=False):
        rows = media.patches[start:stop].reshape(grid_t, grid_h // 2, grid_w // 2, 2, 2, 3, 2, 8, 8)
        pixels = rows.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(grid_t * 2, grid_h * 8, grid_w * 8, 3).numpy()
        bytes_of = (pixels * np.array(CLIP_STD) + np.array(CLIP_MEAN)) * 255
        clips.append([number_of(each) for each in bytes_of])
    return clips


def test_videos_are_in_batches_by_name(shard: str) -> None:
    batch = next(iter(loader(shard, global_batch_size=12, shuffle=False)))
    media = batch.media["video"]
    assert media.patches.shape == (int(media.cu_seqlens[-1]), 3 * 2 * 64) and media.patches.dtype == torch.float32
    assert media.grid_thw.shape == (12, 3) and media.seconds_per_grid.shape == (12,)
    assert len(media.timestamps) == int(media.grid_thw[:, 0].sum())
    inputs = batch.model_inputs()
    assert inputs["video_patches"] is media.patches and inputs["video_grid_thw"] is media.grid_thw
    assert (batch.llm.input_ids == 258).sum() == media.num_tokens == len(batch.llm.video_positions)
    # The first clip has 16 pictures at 24 a second: 4 at the least.
    assert numbers(batch)[0] == [0, 4, 8, 12]
    assert numbers(batch)[1] == [0, 2, 3, 5, 6, 7, 7, 9] or len(numbers(batch)[1]) >= 4


def test_all_engines_build_the_same(shard: str) -> None:
    expected = list(loader(shard))
    for options in ({"num_threads": 3}, {"num_workers": 1, "num_threads": 2}):
        running = loader(shard, **options)
        for ours, theirs in zip(running, expected, strict=True):
            assert ours.sample_ids == theirs.sample_ids
            assert torch.equal(ours.media["video"].patches, theirs.media["video"].patches)
            assert torch.equal(ours.media["video"].timestamps, theirs.media["video"].timestamps)
        del running


@pytest.mark.slow
def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "train.tar", samples(24))
    od.ShardDataset(shard, recipe=video_job.RECIPE).index()
    ranks = run_ranks(video_job.__file__, shard, num_ranks=2, folder=tmp_path)
    for by_rank in ranks:
        assert by_rank["control"] > 1e-5  # or the comparison would say nothing
        assert {name: by_rank[name]["apart"] for name in video_job.CASES if not by_rank[name]["apart"] < 1e-9} == {}
    for name in video_job.CASES:
        assert any(by_rank[name]["rows_away"] for by_rank in ranks) == ("per phase" in name)
        assert all((by_rank[name]["microbatches"] > 1) == ("microbatches" in name) for by_rank in ranks)


def test_positions_of_three_axes(shard: str) -> None:
    recipe = od.Recipe(audio=None, video=VIDEO, image=RECIPE.image)
    batch = next(iter(loader(shard, recipe=recipe, global_batch_size=12, collate_fn=od.Packed(positions="mrope"))))
    first = int(batch.llm.cu_seqlens[0])
    grid_t, grid_h, grid_w = batch.media["video"].grid_thw[0].tolist()
    tokens = grid_t * grid_h * grid_w // 4
    positions = batch.llm.position_ids[:, first : first + tokens + 1]
    assert positions[0, :tokens].reshape(grid_t, -1)[:, 0].tolist() == list(range(grid_t))
    assert positions[:, tokens].tolist() == [max(grid_t, grid_h // 2, grid_w // 2)] * 3


def test_bad_clips_are_lost_one_by_one_and_named(tmp_path: Path) -> None:
    bad = {
        "cut": {"mp4": clip("h264")[:-700], "txt": b"a"},
        "deaf": {"mp4": sound_alone(), "txt": b"a"},
        "text": {"webm": b"no video at all", "txt": b"a"},
        "named": {"frames.json": json.dumps(["0.jpg", "1.jpg"]).encode(), "txt": b"a"},
    }
    good = samples(4)
    shard = write_shard(tmp_path / "bad.tar", [*good, *[{"__key__": key, **fields} for key, fields in bad.items()]])
    index = od.ShardDataset(shard, recipe=RECIPE).index()
    failures = [index.failure(int(row)) for row in index.bad_rows()]
    failed = {failure.key: (failure.shard, failure.field, failure.reason) for failure in failures}
    assert failed.keys() == bad.keys()
    assert all(where == shard for where, _, _ in failed.values())
    assert {key: field for key, (_, field, _) in failed.items()} == {
        "cut": "mp4", "deaf": "mp4", "text": "webm", "named": "frames.json",
    }  # fmt: skip
    assert "cut" in failed["cut"][2] and "only audio" in failed["deaf"][2] and "not a video" in failed["text"][2]


def test_without_pyav_the_error_says_what_to_install(shard: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['av'] = None\n"
        "import orchdata as od\n"
        f"od.ShardDataset({shard!r}, recipe=od.Recipe(audio=None, video=od.VideoPreprocessor(patch_size=7))).index()"
    )
    environment = os.environ | {"ORCHDATA_CACHE": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 1
    assert "pip install 'av>=" in ended.stderr


def test_records_name_videos(tmp_path: Path) -> None:
    media = tmp_path / "media"
    media.mkdir()
    (media / "a.mp4").write_bytes(clip("h264"))
    (media / "b.webm").write_bytes(clip("vp9", "webm"))
    turns = [{"from": "human", "value": "<video> what?"}, {"from": "gpt", "value": "bars"}]
    asked = {"role": "user", "content": [{"type": "video", "video": "b.webm"}, {"type": "text", "text": "what?"}]}
    inside = f"data:video/mp4;base64,{base64.b64encode(clip('h264')).decode()}"
    records = [
        {"id": "llava", "video": "a.mp4", "conversations": turns},
        {"id": "qwen", "messages": [asked, {"role": "assistant", "content": "bars"}]},
        {"id": "two", "videos": ["a.mp4", "b.webm"], "text": "<video> and <video>"},
        {"id": "inside", "video": inside, "conversations": turns},
        {"id": "gone", "video": "c.mp4", "conversations": turns},
        {"id": "plain", "text": "no video at all"},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    dataset = od.ShardDataset(str(path), recipe=RECIPE, media_root=str(media))
    index = dataset.index()
    failures = [index.failure(int(row)) for row in index.bad_rows()]
    assert [(failure.key, failure.field) for failure in failures] == [("gone", "video.0")]
    running = od.DataLoader(dataset, global_batch_size=5, num_threads=0, shuffle=False, on_error=SKIP_ANY)
    batch = next(iter(running))
    assert [key for _, key in batch.sample_ids] == ["llava", "qwen", "two", "inside", "plain"]
    assert len(batch.media["video"].grid_thw) == 5
    assert numbers(batch)[0] == numbers(batch)[2] == numbers(batch)[4] == [0, 6, 12, 18]
    # Without videos in the recipe records that name some are refused, as ever.
    plain = od.ShardDataset(str(path), recipe=od.Recipe(audio=None), media_root=str(media)).index()
    assert len(plain.bad_rows()) == 5


def test_records_list_the_frames_of_videos(tmp_path: Path) -> None:
    media = tmp_path / "media"
    media.mkdir()
    for number in range(40):
        Image.fromarray(picture(number, 64, 48)).save(media / f"{number:02}.png")
    small = media / "small.png"
    Image.fromarray(picture(0, 32, 24)).save(small)
    names = [f"{number:02}.png" for number in range(40)]
    inside = base64.b64encode((media / "39.png").read_bytes()).decode()

    def chat(video: Any, **more: Any) -> list[dict[str, Any]]:
        asked = [{"type": "video", "video": video, **more}, {"type": "text", "text": "what?"}]
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": "bars"}]

    records = [
        {"id": "qwen", "messages": chat(names[:8])},  # two a second by default
        {"id": "rate", "messages": chat(names, fps=20)},
        {"id": "one", "messages": chat([names[7]])},
        {"id": "factory", "videos": [names[4:12], names[20:28]], "text": "<video> and <video>"},
        {"id": "encoded", "videos": [{"frames": [*names[:7], {"bytes": inside}], "fps": 2}], "text": "<video>"},
        {"id": "gone", "messages": chat([*names[:3], "40.png"])},
        {"id": "sizes", "messages": chat([names[0], "small.png"])},
        {"id": "clips", "messages": chat(["a.mp4", "b.mp4"])},
        {"id": "empty", "videos": [{"frames": []}], "text": "<video>"},
        {"id": "flat", "videos": names[:3], "text": "<video> <video> <video>"},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    dataset = od.ShardDataset(str(path), recipe=RECIPE, media_root=str(media))
    index = dataset.index()
    failures = {index.failure(int(row)).key: str(index.failure(int(row))) for row in index.bad_rows()}
    assert failures.keys() == {"gone", "sizes", "clips", "empty", "flat"}
    assert "file 3 of its list: '40.png': no such file" in failures["gone"]
    assert "frames 0 and 1 are 64 x 48 and 32 x 24 pixels" in failures["sizes"]
    assert "'a.mp4': no such file" in failures["clips"] and "no video" in failures["empty"]
    assert "'00.png' is not a video: put the files of one video in a separate list" in failures["flat"]
    options: dict[str, Any] = {"global_batch_size": 5, "shuffle": False, "on_error": SKIP_ANY}
    batch = next(iter(od.DataLoader(dataset, num_threads=0, **options)))
    assert [key for _, key in batch.sample_ids] == ["qwen", "rate", "one", "factory", "encoded"]
    assert numbers(batch) == [
        list(range(8)),
        list(range(0, 40, 5)),
        [7, 7],
        list(range(4, 12)),
        list(range(20, 28)),
        [*range(7), 39],
    ]
    again = next(iter(od.DataLoader(dataset, num_workers=1, **options)))
    assert torch.equal(again.media["video"].patches, batch.media["video"].patches)

    Image.fromarray(picture(9, 64, 48)).save(media / names[5])
    os.utime(media / names[5], ns=(1, 1))
    with pytest.raises(od.DataError, match=r"sample 'qwen', field 'video.0': its list of files was changed"):
        dataset[0]
    again = build_index([str(path)], RECIPE, reading=Reading(media_root=str(media)))
    assert again.build_id != index.build_id and again.bad_rows().tolist() == index.bad_rows().tolist()


def test_what_records_say_of_frames_is_read_or_refused(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(60, 40, number))
    names = [f"{number}.jpg" for number in range(4)]
    item = {"type": "video", "video": names, "sample_fps": 4, "raw_fps": 24, "total_pixels": 9_999, "max_pixels": 99}
    records: list[dict[str, Any]] = [
        {"id": "times", "videos": [{"frames": names, "timestamps": [0, 1, 3, 6]}]},
        {"id": "rate", "videos": [{"frames": names, "fps": 1}]},
        {"id": "item", "messages": [{"role": "user", "content": [item]}, {"role": "assistant", "content": "a"}]},
        {"id": "still", "videos": [{"frames": names, "timestamps": [0, 1, 1, 6]}]},
        {"id": "longer", "videos": [{"frames": names, "duration": 9}]},
    ]
    lines = tmp_path / "records.jsonl"
    lines.write_text("\n".join(json.dumps({"text": "a"} | record) for record in records))
    dataset = od.ShardDataset(str(lines), recipe=RECIPE, media_root=str(tmp_path))
    index = dataset.index()
    failed = {failure.key: failure.reason for failure in map(index.failure, index.bad_rows().tolist())}
    assert failed.keys() == {"still", "longer"}
    assert "do not ascend" in failed["still"] and "'duration', which is not read" in failed["longer"]
    loader = od.DataLoader(dataset, global_batch_size=3, shuffle=False, num_threads=0, on_error=SKIP_ANY)
    spans = next(iter(loader)).media["video"].seconds_per_grid
    assert spans.tolist() == pytest.approx([2 * 2, 2 * 1, 2 * 0.25])
