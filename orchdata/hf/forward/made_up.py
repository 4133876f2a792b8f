"""Made-up microbatches of every kind of sample that a recipe allows, by the way that a data set's own samples go.

    files made here --tar--> index under the recipe --> pages --> Batch       one Batch for each kind

Nothing of the user's data is read: the shard and its index lie in a folder of their own, which is removed afterwards.
"""

from __future__ import annotations

import io
import json
import tarfile
import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from orchdata.batch.batch import Batch
from orchdata.building.assembler import Share
from orchdata.building.media_pages import PageSource
from orchdata.building.memory import BufferPool
from orchdata.building.shard_content import PackedAssembler
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.watch import Watch
from orchdata.planning.layout import Layout
from orchdata.planning.plan import Plan

_SAMPLE_RATE: Final = 16_000
# Two of each kind, of different sizes: what a model takes for one shape shows then.
_IMAGES: Final = ((64, 48), (96, 128))
_CLIP_SECONDS: Final = (1.0, 1.6)
_VIDEOS: Final = ((64, 48, 8), (96, 64, 12))
_FRAME_MILLISECONDS: Final = 200
_PROMPT, _ANSWER = "Say what is there.", "A small thing, and nothing else."


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of microbatch.

    Attributes:
        name: what messages call it.
        samples: for each of its samples, modality -> how many parts; {} is text alone.
    """

    name: str
    samples: tuple[Mapping[str, int], ...]


def kinds_of(recipe: Recipe, encoders: Sequence[str]) -> list[Kind]:
    """The kinds of microbatches that a loader may make: without media, each modality alone with text, several parts of
    one modality, and all modalities together.

    Args:
        encoders: modalities that batches have. One of which no file can be made here, a user's own, has no kind of its
            own; batches of the others have its dummy.
    """
    made = [name for name in encoders if name in _MAKERS and name in recipe.modalities]
    unplaced = [name for name in made if not recipe.modalities[name].places]
    if unplaced:  # an encoder-decoder, of which each sample has one
        return [Kind(f"samples of {_called(name)} and text", ({name: 1}, {name: 1})) for name in unplaced]
    kinds = [Kind("samples of text alone", ({}, {}))]
    for name in made:
        kinds.append(Kind(f"samples with {_called(name)}", ({name: 1}, {name: 1})))
        kinds.append(Kind(f"samples with several parts of {name}", ({name: 2}, {})))
    if len(made) > 1:
        kinds.append(Kind(f"samples with {' and '.join(made)} together", (dict.fromkeys(made, 1), {})))
    return kinds


def _called(name: str) -> str:
    return {"image": "an image", "audio": "a clip of audio", "video": "a video"}[name]


class MadeUp:
    """Samples of some kinds, indexed; made by `made_up`."""

    def __init__(self, index: Index, recipe: Recipe, rows: Mapping[str, NDArray[np.int64]]) -> None:
        self._index, self._recipe, self._rows = index, recipe, rows

    def has(self, kind: Kind) -> bool:
        """Return whether the recipe takes all samples of a kind."""
        return kind.name in self._rows

    def why_not(self) -> str:
        """Return what is wrong with the first sample that the recipe refuses; "" if it takes all."""
        bad = self._index.bad_rows()
        return self._index.failure(int(bad[0])).reason if len(bad) else ""

    def batch(self, kind: Kind, encoders: Sequence[str], layout: Layout, *, only: int | None = None) -> Batch | None:
        """A microbatch of a kind, with a dummy of each of `encoders` that none of its samples has; None where a sample
        cannot be decoded.

        Args:
            only: number of the one sample that the microbatch holds; default: all of the kind.
        """
        rows = self._rows[kind.name]
        rows = rows if only is None else rows[only : only + 1]
        source = PageSource(index=self._index, recipe=self._recipe, layout=layout, encoders=tuple(encoders))
        with closing(OpenShards(limits=self._recipe.limits, cache=CacheFolder())) as shards:
            assembler = PackedAssembler(source=source, shards=shards, watch=Watch())
            plan = _plan(self._index, rows)
            assembly = assembler.begin(Share(plan, rank=0, microbatch=0, index=0))
            for task in assembly.fill(BufferPool(max_free_bytes=0)):
                task()
            made = assembly.finish()
        return None if made.failures else made.batch


@contextmanager
def made_up(recipe: Recipe, kinds: Sequence[Kind]) -> Iterator[MadeUp]:
    """Samples of these kinds, indexed under a recipe, while the context lasts.

    A sample is a chat where the recipe takes it, else a prompt with its completion, else plain text. They are in
    the layout that a recipe reads without its `record` function, which would not know them.
    """
    recipe = replace(recipe, record=None, record_id=None)
    with TemporaryDirectory(prefix="orchdata-made-up-") as folder:
        shard = Path(folder) / "samples.tar"
        with tarfile.open(shard, "w") as tar:
            for number, kind in enumerate(kinds):
                for at, parts in enumerate(kind.samples):
                    for form, text in enumerate(_texts(parts, 1 + at)):
                        _add(tar, f"{number}-{at}-{form}", {**_media(parts, at), **text})
        index = build_index([str(shard)], recipe, cache=CacheFolder(Path(folder) / "cache"), num_threads=1)
        yield MadeUp(index, recipe, _usable_rows(index, kinds))


def _usable_rows(index: Index, kinds: Sequence[Kind]) -> dict[str, NDArray[np.int64]]:
    """The rows of each kind's samples, each in the first form that the recipe takes; of kinds that have all theirs."""
    bad = set(index.bad_rows().tolist())
    rows_of_kind: dict[str, NDArray[np.int64]] = {}
    for number, kind in enumerate(kinds):
        rows = []
        for at in range(len(kind.samples)):
            forms = (index.find_all(None, f"{number}-{at}-{form}") for form in range(len(_texts({}, 1))))
            rows.append(next(([row] for first, *_ in forms for row in [first] if row not in bad), []))
        if all(rows):
            rows_of_kind[kind.name] = np.array([row for of_sample in rows for row in of_sample], np.int64)
    return rows_of_kind


def _texts(parts: Mapping[str, int], repeats: int) -> tuple[dict[str, bytes], ...]:
    """The text of a sample, in every form that recipes may take; its answer comes several times over, so that
    neighbours have other lengths.
    """
    answer = " ".join([_ANSWER] * repeats)
    items = [{"type": name} for name, count in parts.items() for _ in range(count)]
    turns = [
        {"role": "user", "content": [*items, {"type": "text", "text": _PROMPT}] if items else _PROMPT},
        {"role": "assistant", "content": answer},
    ]
    pair = {"prompt": _PROMPT, "completion": answer}
    forms: tuple[object, ...] = ({"messages": turns}, pair)
    return (*({"json": json.dumps(form).encode()} for form in forms), {"txt": f"{_PROMPT} {answer}".encode()})


def _media(parts: Mapping[str, int], at: int) -> dict[str, bytes]:
    """The files of a sample, by the names of their members; those of neighbouring samples are of other sizes."""
    files: dict[str, bytes] = {}
    for name, count in parts.items():
        for number in range(count):
            suffix, content = _MAKERS[name](number + at)
            files[f"{number}.{suffix}"] = content
    return files


def _image(number: int) -> tuple[str, bytes]:
    out = io.BytesIO()
    _picture(*_IMAGES[number % len(_IMAGES)], number).save(out, "PNG")
    return "png", out.getvalue()


def _clip(number: int) -> tuple[str, bytes]:
    count = int(_CLIP_SECONDS[number % len(_CLIP_SECONDS)] * _SAMPLE_RATE)
    values = np.random.default_rng(number).normal(scale=3_000, size=count).astype(np.int16)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_SAMPLE_RATE)
        file.writeframes(values.tobytes())
    return "wav", out.getvalue()


def _video(number: int) -> tuple[str, bytes]:
    width, height, count = _VIDEOS[number % len(_VIDEOS)]
    first, *others = (_picture(width, height, frame) for frame in range(count))
    out = io.BytesIO()
    first.save(out, "GIF", save_all=True, append_images=others, duration=_FRAME_MILLISECONDS, loop=0)
    return "gif", out.getvalue()


def _picture(width: int, height: int, seed: int) -> Image.Image:
    """Noise: unlike a blank picture, it has no two patches that are alike."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


_MAKERS: Final = {"image": _image, "audio": _clip, "video": _video}


def _add(tar: tarfile.TarFile, key: str, files: Mapping[str, bytes]) -> None:
    for suffix, content in files.items():
        member = tarfile.TarInfo(f"{key}.{suffix}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def _plan(index: Index, rows: NDArray[np.int64]) -> Plan:
    """All of these rows as one microbatch of one rank."""
    none = np.zeros(len(rows), np.int32)
    tokens = index.llm_tokens[rows].astype(np.int64)
    return Plan(
        epoch=0,
        step=0,
        num_ranks=1,
        num_microbatches=1,
        source=none,
        row=rows,
        rank=none,
        microbatch=none,
        costs={"llm": tokens},
        llm_positions=tokens,
        loss_tokens=int(index.loss_tokens[rows].sum()),
        stream_rank=none,
    )
