"""What others find in media that were delivered, held against the index by which steps were planned."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import soundfile
from PIL import Image, ImageOps

from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.modalities.audio_decode import Sound
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.sample import TextPart
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder


def recounted(index: Index, recipe: Recipe, delivered: Collection[tuple[str, str]]) -> list[str]:
    """What differs: pixels by Pillow, frames of clips by soundfile (within 1 % or 50 ms), tokens by decoding."""
    shards = OpenShards(limits=recipe.limits, cache=CacheFolder())
    bad = set(index.bad_rows().tolist())
    different = []
    for row in range(index.num_samples):
        if row not in bad:
            sample = StoredSample(index, shards, row)
            if (sample.shard, sample.key) in delivered:
                different += [f"{sample.key}: {what}" for what in _differences(index, sample, recipe)]
    shards.close()
    return different


def _differences(index: Index, sample: StoredSample, recipe: Recipe) -> Iterator[str]:
    payloads = sample.read(recipe)
    for part in sample.parts:
        member = sample.members[sample.member_of(part)]
        data = bytes(payloads[sample.member_of(part)])
        check = {"image": _image, "audio": _audio, "video": _video}[index.modality_of(part)]
        if what := check(data, member.header):
            yield f"{member.field}: {what}"
    decoded = sample.decode(recipe).parts
    texts = [part for part in decoded if isinstance(part, TextPart)]
    media = int(index.part_tokens[sample.parts.start : sample.parts.stop].sum())
    tokens = sum(len(part.token_ids) for part in texts) + media
    if tokens != index.llm_tokens[sample.row]:
        yield f"{tokens} tokens, the index has {index.llm_tokens[sample.row]}"
    loss = sum(int(np.sum(part.loss)) for part in texts)
    if loss != index.loss_tokens[sample.row]:
        yield f"{loss} loss tokens, the index has {index.loss_tokens[sample.row]}"


def _image(data: bytes, header: tuple[int, ...]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                size: Any = ImageOps.exif_transpose(image).size
        except Exception as error:
            return f"delivered, but Pillow raises {type(error).__name__}: {error}"
    return "" if size == header[:2] else f"Pillow finds {size} pixels, the index {header}"


def _video(data: bytes, header: tuple[int, ...]) -> str:
    """Pictures that PyAV shows when it decodes the whole file, where it takes all of it; and those that its packets
    hold, of which a decoder passes over damaged ones.
    """
    import av

    lenient: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    try:
        with av.open(io.BytesIO(data), **lenient) as file:
            stream = file.streams.video[0]
            packets = [packet for packet in file.demux(stream) if packet.size and not packet.is_discard]
        with av.open(io.BytesIO(data), **lenient) as file:
            stream = file.streams.video[0]
            shown = [(frame.pts, frame) for frame in file.decode(stream)]
            times = {at for at, _ in shown if at is not None}
            first = shown[0][1]
            turned = round(first.rotation / 90) % 2
            size = (first.height, first.width) if turned else (first.width, first.height)
            span = float((max(times) - min(times)) * stream.time_base)
    except av.FFmpegError:
        return ""  # damaged after the part that was taken
    except Exception as error:
        return f"delivered, but PyAV raises {type(error).__name__}: {error}"
    frames, seconds = header[2], header[3] / header[4]
    held = {packet.pts for packet in packets if packet.pts is not None}
    first = next((packet.pts for packet in packets if packet.is_keyframe and packet.pts is not None), 0)
    counts = {len(times), len(held), sum(at >= first for at in held)}  # players start with one that stands alone
    if frames not in counts or size != header[:2] or (frames == len(times) and span > seconds):
        return f"PyAV shows {len(times)} frames of {size} pixels over {span:.3f} s, the index {header}"
    return ""


def _audio(data: bytes, header: tuple[int, ...]) -> str:
    frames, rate = header[:2]
    try:
        try:
            values, found_rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
            found = len(values)
        except (ValueError, soundfile.LibsndfileError):  # it needs a length, which a stream has not
            with Sound(data) as sound:
                blocks = iter(lambda: len(sound.read(1 << 16, dtype="float32", always_2d=True)), 0)
                found, found_rate = sum(itertools.islice(blocks, 1 << 12)), sound.samplerate
    except Exception as error:
        return f"delivered, but soundfile raises {type(error).__name__}: {error}"
    if found_rate != rate or abs(found - frames) > max(0.01 * frames, 0.05 * rate):
        return f"soundfile finds {found} frames at {found_rate} Hz, the index {header}"
    return ""
