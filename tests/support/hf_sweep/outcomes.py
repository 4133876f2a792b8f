"""What becomes of a family: its samples through a loader and a tiny model, and the same model by its own processor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from hf_families.samples import as_image, as_wave, clip, picture
from shard_factory import write_shard
from torch.nn import functional as F

import orchdata as od
from hf_sweep.configs import config_of
from hf_sweep.processors import processor_of
from orchdata.hf.forward.models import models_of
from orchdata.hf.tiny.model import undisturbed

TOLERANCE = 1e-4
_CAPTIONS = ("a small thing", "two of them, side by side", "nothing")

Word = Literal["exact", "differs", "crashes", "runs", "refused", "not built"]


@dataclass(frozen=True)
class Outcome:
    """What became of a family.

    Attributes:
        word: "exact": within `TOLERANCE` of the model fed by its own processor; "runs": its processor could not be
            asked; "refused" before the first step; "not built": no processor, or no model, can be made of defaults.
        layout: "packed" or "padded"; "" where there is no loader.
        detail: the message, the error or the difference.
    """

    model_type: str
    word: Word
    layout: str
    detail: str


def outcome_of(model_type: str, folder: Path) -> Outcome:
    """Run a family's samples: none, one and several of each modality of its recipe."""
    try:
        processor = processor_of(model_type)
    except Exception as error:
        return Outcome(model_type, "not built", "", _shown(error))
    try:
        recipe = od.hf.recipe(processor)
        tokens = {name: modality.slot.token_id for name, modality in recipe.modalities.items()}
        config = config_of(model_type, processor, tokens)
        inputs = od.hf.Inputs(config)
    except (ValueError, TypeError) as error:
        return Outcome(model_type, "refused", "", _shown(error))
    layout = "padded" if inputs.padded else "packed"
    samples = _samples(recipe)
    loader, told = _loader(recipe, inputs, samples, folder / f"{model_type}.tar")
    if loader is None:
        return Outcome(model_type, "refused", layout, told)
    with undisturbed():
        model = next(models_of(inputs.config), None)
    if model is None:
        return Outcome(model_type, "not built", layout, told or "no tiny model")
    try:
        found = sum(_loss(model.forward, batch) for batch in loader)
    except Exception as error:
        return Outcome(model_type, "crashes", layout, f"{_shown(error)} {told}")
    try:
        expected = _references(model.forward, processor, samples)
    except Exception as error:
        return Outcome(model_type, "runs", layout, f"its own processor: {_shown(error)} {told}")
    difference = abs(found / expected - 1)
    return Outcome(model_type, "exact" if difference < TOLERANCE else "differs", layout, f"{difference:.0e} {told}")


Sample = tuple[Sequence[bytes], Sequence[bytes], str]


def _samples(recipe: od.Recipe) -> list[Sample]:
    images = [picture(64, 48, 0), picture(90, 130, 1), picture(200, 60, 2)] if recipe.image is not None else []
    clips = [clip(1.0, 0), clip(1.7, 1), clip(0.8, 2)] if recipe.audio is not None else []
    if recipe.audio is not None and not recipe.audio.places:
        return [((), clips[:1], _CAPTIONS[0]), ((), clips[1:2], _CAPTIONS[1])]
    return [(images[:1], clips[:1], _CAPTIONS[0]), (images[1:], clips[1:], _CAPTIONS[1]), ((), (), _CAPTIONS[2])]


def _loader(recipe: od.Recipe, inputs: Any, samples: Sequence[Sample], path: Path) -> tuple[Any, str]:
    rows = []
    for number, (images, clips, text) in enumerate(samples):
        row: dict[str, Any] = {"__key__": f"s{number}", "txt": text.encode()}
        row |= {f"{at}.png": data for at, data in enumerate(images)}
        row |= {f"{at}.wav": data for at, data in enumerate(clips)}
        rows.append(row)
    dataset = od.ShardDataset(write_shard(path, rows), recipe=recipe)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            loader = od.DataLoader(dataset, batch_size=len(rows), collate_fn=inputs, num_threads=0)
        except (ValueError, TypeError, RuntimeError) as error:
            return None, _shown(error)
    told = [str(each.message) for each in said if "orchdata" in str(each.filename) or "forward" in str(each.message)]
    return loader, " | ".join(told)


def _loss(model: Any, batch: Any) -> float:
    with torch.no_grad():
        outputs = model(**batch.model_inputs())
        return float(od.hf.loss(outputs, batch)) / batch.loss_scale


def _references(model: Any, processor: Any, samples: Sequence[Sample]) -> float:
    """The summed loss of the captions: of all samples as one batch of the processor's own, else one at a time."""
    try:
        return _reference(model, processor, samples)
    except Exception:
        return sum(_reference(model, processor, [sample]) for sample in samples)


def _reference(model: Any, processor: Any, samples: Sequence[Sample]) -> float:
    image, audio = (getattr(processor, name, None) or "" for name in ("image_token", "audio_token"))
    texts = [image * len(images) + audio * len(clips) + text for images, clips, text in samples]
    given: dict[str, Any] = {"text": texts, "return_tensors": "pt", "padding": True}
    if any(images for images, _, _ in samples):
        given["images"] = [[as_image(data) for data in images] for images, _, _ in samples]
        if len(samples) == 1:
            given["images"] = given["images"][0]
    if any(clips for _, clips, _ in samples):
        given["audio"] = [as_wave(data) for _, clips, _ in samples for data in clips]
    inputs = dict(processor(**given))
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    total = 0.0
    for row, (_, _, text) in enumerate(samples):
        ids = inputs["input_ids"][row]
        (real,) = inputs["attention_mask"][row].nonzero(as_tuple=True)
        count = len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
        labels = torch.full_like(ids, -100)
        labels[real[-count:]] = ids[real[-count:]]
        labels[real[0]] = -100
        total += float(F.cross_entropy(logits[row, :-1].float(), labels[1:], ignore_index=-100, reduction="sum"))
    return total


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
