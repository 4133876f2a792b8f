"""Images of Hugging Face's processors: CPU time of this library and of the processors' own class.

    the same bytes --od.hf.images.image_modality--> the batch's arrays
                   --Pillow, image processor------> tensors, equal to the bit

Published settings, or a class's defaults, of both backends where torchvision is installed. JPEGs are what data sets
hold; BMPs are hardly decoded, so that what is left is the preparation alone.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from benchmarks.command import run_command
from orchdata.bench import Result, WideTable, interleave
from orchdata.engines.engine import use_one_thread
from orchdata.hf.images import HFImages, image_modality
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import read_header, stored_dtype

LIMITS = Limits()
SIZES = ((120, 90), (500, 400), (1600, 1200), (300, 1800))
_SQUARE_336 = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
_SIDES = range(384, 384 * 7, 384)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2-VL": ("Qwen2VLImageProcessor", {}),
    "GLM-4V": ("Glm4vImageProcessor", {}),
    "GLM-4.6V": ("Glm46VImageProcessor", {}),
    "PaddleOCR-VL": ("PaddleOCRVLImageProcessor", {}),
    "LLaVA-1.5 (CLIP, 336)": ("CLIPImageProcessor", _SQUARE_336),
    "LLaVA-NeXT, defaults": ("LlavaNextImageProcessor", {}),
    "LLaVA-NeXT, 336": ("LlavaNextImageProcessor", _SQUARE_336),
    "LLaVA-OneVision": (
        "LlavaOnevisionImageProcessor",
        {"image_grid_pinpoints": [[high, wide] for high in _SIDES for wide in _SIDES]},
    ),
    "InternVL, 12 tiles": (
        "GotOcr2ImageProcessor",
        {"size": {"height": 448, "width": 448}, "crop_to_patches": True, "max_patches": 12},
    ),
    "SmolVLM": ("SmolVLMImageProcessor", {}),
    "Gemma-3": ("Gemma3ImageProcessor", {}),
    "PaliGemma": ("SiglipImageProcessor", {"size": {"height": 224, "width": 224}}),
    "Gemma-4, its own class": ("Gemma4ImageProcessor", {}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesBench:
    """What to measure.

    Attributes:
        repeats: of each image in each way, in turn, after one that does not count.
    """

    repeats: int = 9


@dataclass(frozen=True)
class Pair:
    """One image, ready to be prepared in both ways."""

    data: bytes
    images: HFImages
    processor: Any

    def ways(self) -> dict[str, Callable[[], object]]:
        header = read_header(type(self.images), len(self.data), lambda size: self.data[:size], LIMITS)
        size = self.images.count_header(header, LIMITS)
        out = {
            name: np.empty((size.num_rows if spec.per == "row" else 1, *spec.row_shape), stored_dtype(spec.dtype))
            for name, spec in self.images.arrays().items()
        }

        def ours() -> dict[str, Any]:
            self.images.decode_into(memoryview(self.data), size, out, LIMITS)
            return out

        def theirs() -> Any:
            picture = ImageOps.exif_transpose(Image.open(io.BytesIO(self.data))).convert("RGB")
            return self.processor([picture], return_tensors="pt")

        return {"ours": ours, "theirs": theirs}


def run(config: ImagesBench) -> list[Result | WideTable]:
    """Measure. Raises ValueError for no repeats."""
    if config.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {config.repeats}")
    use_one_thread()
    backends = ("Pillow", "torchvision") if find_spec("torchvision") else ("Pillow",)
    return [_table(kind, backend, config) for backend in backends for kind in ("JPEG", "BMP")]


def _table(kind: str, backend: str, config: ImagesBench) -> WideTable:
    rows: list[tuple[str | float | None, ...]] = []
    for name, pairs in _cases(kind, backend):
        numbers: list[float] = []
        for pair in pairs:
            times = interleave(pair.ways(), repeats=config.repeats, clock=time.thread_time)
            ours, theirs = median(times["ours"]), median(times["theirs"])
            ratios = [one / other for one, other in zip(times["theirs"], times["ours"], strict=True)]
            numbers += [ours * 1e3, theirs * 1e3, median(ratios)]
        rows.append((name, *numbers))
    columns = [f"{wide} x {high}: {what}" for wide, high in SIZES for what in ("ours", "theirs", "times as long")]
    note = "CPU ms an image, medians; the last of each three is the median ratio of the pairs"
    return WideTable(
        title=f"{kind} images, {backend} backend", columns=("processor", *columns), rows=tuple(rows), note=note
    )


def _cases(kind: str, backend: str) -> Iterator[tuple[str, list[Pair]]]:
    import transformers

    for name, (kind_of, settings) in CASES.items():
        found = getattr(transformers, kind_of + ("Pil" if backend == "Pillow" else ""), None)
        if found is None:  # of an older transformers
            continue
        processor = found(**settings)
        images = image_modality(processor, patch_size=14)
        yield name, [Pair(picture(*size, kind), images, processor) for size in SIZES]


def picture(width: int, height: int, kind: str) -> bytes:
    """A file of a smooth picture."""
    coarse = np.random.default_rng(0).integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


if __name__ == "__main__":
    run_command("benchmarks.images", ImagesBench, run)
