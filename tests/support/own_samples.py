"""Samples with parts of modalities of a user's own: what each must get, by its bytes, and what batches gave it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from own_modalities import Points, Tracks, mixed_samples
from shard_factory import RECIPE as PLAIN
from torch import Tensor

import orchdata as od
from orchdata.loaders.recipe import image_grid
from orchdata.planning.route import Route

OWN = {"points": Points(), "tracks": Tracks()}
RECIPE = od.Recipe(image=PLAIN.image, audio=PLAIN.audio, **OWN)
GROUP, STRIDE = 4, 2  # rows of a token
NUM_SAMPLES = 25
COST = od.CostModel(
    image=od.PhaseCost(2.0),
    audio=od.PhaseCost(1.0),
    points=od.PhaseCost(3.0, 0.1),
    tracks=od.PhaseCost(1.0),
    llm=od.PhaseCost(4.0, 0.01),
)


@dataclass
class Expected:
    """A sample's sequence, and the features of each modality's tokens in order: the rows of a token are contiguous."""

    input_ids: list[int]
    labels: list[int]
    mrope: list[list[int]]
    features: dict[str, Tensor]


def token_rows(rows: Tensor, per_token: int) -> Tensor:
    """(num_rows, values) -> (num_tokens, per_token * values), zeros after the last."""
    missing = -len(rows) % per_token
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]).reshape(-1, per_token * rows.shape[1])


def track_rows(values: Tensor, times: Tensor) -> Tensor:
    return torch.cat([values.double(), times[:, None].double()], dim=1)


def features_of(field: str, data: bytes) -> Tensor:
    """By NumPy alone; .npy files have 128 bytes of header."""
    if field.endswith("npy"):
        return token_rows(torch.tensor(np.frombuffer(data, "<f4", offset=128).reshape(-1, 3)).double(), GROUP)
    (length,) = np.frombuffer(data, "<u4", 1, 4).tolist()
    times = torch.tensor(np.frombuffer(data, "<i8", length, 8))
    values = torch.tensor(np.frombuffer(data, "<f4", 2 * length, 8 + 8 * length).reshape(length, 2))
    return token_rows(track_rows(values.to(torch.bfloat16), times), STRIDE)


def expected_of(number: int, sample: Mapping[str, Any]) -> Expected:
    """As `mixed_samples` makes it."""
    clouds = [features_of(field, data) for field, data in sample.items() if field.endswith("npy")]
    tracks = [features_of(field, data) for field, data in sample.items() if field.endswith("track")]
    picture = PLAIN.image.num_tokens(image_grid(80, 60, PLAIN.image))
    grid = tuple(side // PLAIN.image.merge for side in image_grid(80, 60, PLAIN.image))
    sound = PLAIN.audio.num_tokens(round(0.3 * 16_000))
    kind, pieces = number % 5, list[Any]()
    if kind == 0:
        pieces = [(sample["txt"], True)]
    elif kind == 1:
        pieces = ["points", (sample["txt"], True)]
    elif kind == 2:
        pieces = ["tracks", (b" then ", True), "tracks"]
    else:
        said = json.loads(sample["json"])[1]["content"].encode()
        middle = ["points", b" and ", "image"] if kind == 3 else ["tracks", b" is ", "points", b", ", "audio"]
        asked = [b"see ", *middle] if kind == 3 else middle
        pieces = [
            (b"<|im_start|>user\n", False),
            *[(piece, False) if isinstance(piece, bytes) else piece for piece in asked],
            (b"<|im_end|>\n<|im_start|>assistant\n", False),
            (said + b"<|im_end|>\n", True),
        ]
    found = Expected([], [], [[], [], []], {})
    next_position = 0
    for piece in pieces:
        token_ids: list[int]
        if isinstance(piece, tuple):
            text, loss = piece
            found.labels += list(text) if loss else [-100] * len(text)
            found.input_ids += list(text)
            offsets, step = [list(range(len(text)))] * 3, len(text)
        else:
            if piece == "tracks":  # its start_id
                found.input_ids.append(8)
                found.labels.append(-100)
                for axis in found.mrope:
                    axis.append(next_position)
                next_position += 1
            if piece in ("points", "tracks"):
                part = (clouds if piece == "points" else tracks).pop(0)
                held = found.features.get(piece)
                found.features[piece] = part if held is None else torch.cat([held, part])
                count = len(part)
            else:
                count = picture if piece == "image" else sound
            token_ids = [{"image": 256, "audio": 257, "points": 0, "tracks": 7}[piece]] * count
            found.input_ids += token_ids
            found.labels += [-100] * count
            offsets, step = [list(range(count))] * 3, count
            if piece == "tracks":
                offsets, step = [[STRIDE * token for token in range(count)]] * 3, STRIDE * (count - 1) + 1
            if piece == "image":
                rows, cols = np.divmod(np.arange(count), grid[1])
                offsets, step = [[0] * count, rows.tolist(), cols.tolist()], max(grid)
        for axis, offset in zip(found.mrope, offsets, strict=True):
            axis += [next_position + place for place in offset]
        next_position += step
    found.labels[0] = -100
    assert not clouds and not tracks
    return found


SAMPLES = mixed_samples(NUM_SAMPLES)
EXPECTED = {sample["__key__"]: expected_of(number, sample) for number, sample in enumerate(SAMPLES)}


def loader(shard: str, rank: int = 0, num_ranks: int = 1, recipe: od.Recipe = RECIPE, **options: Any) -> od.DataLoader:
    dataset = od.ShardDataset(shard, recipe=recipe)
    dataset.index()
    options = {"global_batch_size": 10, "num_threads": 0, "cost": COST} | options
    return od.DataLoader(dataset, dp=(rank, num_ranks), **options)


def encoded(batch: od.Batch, name: str) -> Tensor:
    """What an encoder would make of a modality that shows each row it was given: (num_tokens, values)."""
    held = batch.media[name]
    if name == "points":
        rows, per_token = held.points.double(), GROUP
    else:
        assert held.values.dtype == torch.bfloat16 and held.times.dtype == torch.int64
        shape = held.times.shape
        rows = track_rows(held.values.reshape(-1, 2), held.times.reshape(-1)).reshape(*shape, 3)
        per_token = STRIDE
    if held.mask is not None:
        assert rows.shape[:2] == held.mask.shape and not rows[~held.mask].any()  # zeros after each part
        parts = [row[mask] for row, mask in zip(rows, held.mask, strict=True)]
    else:
        parts = list(rows.split(held.cu_seqlens.diff().tolist()))
    assert held.max_seqlen == max(map(len, parts))
    return torch.cat([token_rows(part, per_token) for part in parts])


def carry(features: list[Tensor], routes: list[Route]) -> list[Tensor]:
    """What `exchange` does on all ranks, by hand."""
    grouped = []
    for rows, route in zip(features, routes, strict=True):
        assert len(rows) == route.num_rows_in
        if route.zeroed is not None:
            rows = rows.index_fill(0, torch.from_numpy(route.zeroed), 0)
        grouped.append(rows.split(route.send_rows.tolist()))
    return [torch.cat([theirs[rank] for theirs in grouped]) for rank in range(len(routes))]


def delivered(steps: list[list[od.Batch]]) -> dict[str, Expected]:
    """Key -> what a model would see of it, from the batches [rank][microbatch]."""
    found = {}
    for batches in zip(*steps, strict=True):
        arrived = {}
        for name in OWN:
            rows = [encoded(batch, name)[: batch.media[name].num_tokens] for batch in batches]
            arrived[name] = carry(rows, [batch.route(name) for batch in batches]) if batches[0].routes else rows
        for rank, batch in enumerate(batches):
            llm = batch.llm
            width = llm.input_ids.shape[-1]
            merged = {}
            for name in OWN:
                rows = arrived[name][rank]
                embeds = torch.full((llm.input_ids.numel(), rows.shape[1]), torch.nan, dtype=torch.float64)
                merged[name] = embeds.index_copy(0, llm.media_positions[name], rows)
            mrope = llm.position_ids
            mrope = mrope.flatten(1) if llm.restart_position_ids is not None else mrope.reshape(1, -1).expand(3, -1)
            for number, (_, key) in enumerate(batch.sample_ids):
                if llm.attention_mask is None:
                    start = int(llm.cu_seqlens[number])
                    length = min(int(llm.cu_seqlens[number + 1]) - start, len(EXPECTED[key].input_ids))
                    assert (llm.labels[start + length : llm.cu_seqlens[number + 1]] == -100).all()
                else:
                    start, length = number * width, int(llm.attention_mask[number].sum())
                place = slice(start, start + length)
                found[key] = Expected(
                    llm.input_ids.flatten()[place].tolist(),
                    llm.labels.flatten()[place].tolist(),
                    mrope[:, place].tolist(),
                    {
                        name: rows[place][~rows[place].isnan().any(1)]
                        for name, rows in merged.items()
                        if not rows[place].isnan().all()
                    },
                )
    return found


def differ(found: Mapping[str, Expected], expected: Mapping[str, Expected], *, mrope: bool) -> list[str]:
    """Keys of samples that are not what they should be."""
    wrong = sorted(found.keys() ^ expected.keys())
    for key in found.keys() & expected.keys():
        ours, theirs = found[key], expected[key]
        same = (ours.input_ids, ours.labels) == (theirs.input_ids, theirs.labels)
        same &= ours.mrope == (theirs.mrope if mrope else [list(range(len(theirs.labels)))] * 3)
        same &= ours.features.keys() == theirs.features.keys()
        same &= all(torch.equal(rows, theirs.features[name]) for name, rows in ours.features.items() if same)
        wrong += [] if same else [key]
    return wrong
