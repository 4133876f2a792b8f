"""What becomes of a family: its samples through a loader and a tiny model, and the same model by its own processor."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from hf_families.families import FAMILIES, Family
from hf_families.reference import reference
from hf_families.samples import as_image, as_wave, clip, made_up, picture, write_samples
from hf_families.through_orchdata import Mode, errors, make_loader, trained
from shard_factory import write_shard
from torch.nn import functional as F

import orchdata as od
from hf_sweep.chats import messages, rendered, template
from hf_sweep.configs import default_config, with_tokens
from hf_sweep.fitting import CLASS_TOKENS, align, counts_of, settings_of, writes
from hf_sweep.processors import processor_of
from orchdata.hf.families import model_class, takes, thinker
from orchdata.hf.tiny import built, tiny_configs, undisturbed

TOLERANCE = 1e-4
_NO_MODEL = "no small model of its default configuration runs on a text"
_CAPTIONS = ("a small thing", "two of them, side by side", "nothing")

Word = Literal["exact", "alone", "differs", "crashes", "runs", "refused", "not built"]


@dataclass(frozen=True)
class Outcome:
    """What became of a family.

    Attributes:
        word: "exact": within `TOLERANCE` of the model fed by its own processor; "alone": one sample a step is, and
            several are refused; "runs": its processor could not be asked; "crashes": no small model takes the batches;
            "refused" before the first step; "not built": no processor, or no model, can be made of
            defaults.
        layout: "packed" or "padded"; "" where there is no loader.
        detail: the message, the error or the difference.
    """

    model_type: str
    word: Word
    layout: str
    detail: str


@dataclass(frozen=True)
class Sample:
    """Media, and what is said of them."""

    images: Sequence[bytes]
    clips: Sequence[bytes]
    answer: str


def outcome_of(model_type: str, folder: Path) -> Outcome:
    """Run a family's samples: none, one and several of each modality of its recipe. Of a family that the parity tests
    have, its loss and gradients there.
    """
    proven = FAMILIES.get(model_type.removesuffix("_thinker"))
    if proven is not None:
        return _proven(model_type, proven, folder)
    try:
        processor = _fitted(model_type)
        processor.chat_template = template(processor)
    except Exception as error:
        return Outcome(model_type, "not built", "", _shown(error))
    try:
        recipe = od.hf.recipe(processor)
        tokens = {name: modality.slot.token_id for name, modality in recipe.modalities.items()}
        config = with_tokens(default_config(model_type), processor, tokens)
        inputs = od.hf.Inputs(config)
    except (ValueError, TypeError) as error:
        return Outcome(model_type, "refused", "", _shown(error))
    layout = "padded" if inputs.padded else "packed"
    samples = _samples(recipe, processor)
    loader, message = _loader(recipe, inputs, samples, folder / f"{model_type}.tar")
    is_alone = "change each other" in message
    if is_alone:
        samples = [each for each in samples if max(len(each.images), len(each.clips)) <= 1]
        inputs = replace(inputs, probe=False)
        loader, message = _loader(recipe, inputs, samples, folder / f"{model_type}.tar", size=1)
    if loader is None:
        return Outcome(model_type, "refused", layout, message)
    found = _compared(Outcome(model_type, "not built", layout, ""), inputs, processor, loader, samples)
    return replace(found, word="alone") if is_alone and found.word == "exact" else found


def _fitted(model_type: str) -> Any:
    """A processor that belongs to the default configuration."""
    processor, config = processor_of(model_type), thinker(default_config(model_type))
    settings = settings_of(processor, config)
    first = processor = processor_of(model_type, **settings)
    align(processor, config)
    known = inspect.signature(type(processor).__init__).parameters
    with suppress(Exception):  # models that cannot be asked have the number that their processor says
        for counts in counts_of(first, config):
            processor = processor_of(model_type, **settings, **{name: counts[name] for name in counts if name in known})
            align(processor, config)
            for name in counts.keys() - known.keys():
                setattr(processor, name, counts[name])
            if CLASS_TOKENS not in counts or writes(processor, config):
                return processor
    return processor


def _proven(model_type: str, family: Family, folder: Path) -> Outcome:
    processor, model = family.build()
    layout = "packed" if family.packed else "padded"
    samples = made_up(family)
    shards = write_samples(family, samples, folder)
    try:
        loader = make_loader(family, model, processor, shards, Mode(padded=not family.packed))
    except (ValueError, TypeError) as error:
        return Outcome(model_type, "refused", layout, _shown(error))
    difference = max(errors(trained(model, loader), reference(family, model, processor, samples)))
    return Outcome(model_type, "exact" if difference < TOLERANCE else "differs", layout, f"{difference:.0e}")


def _compared(row: Outcome, inputs: Any, processor: Any, loader: Any, samples: Sequence[Sample]) -> Outcome:
    """Compare the loss of the loader's batches to that of the processor's own samples, on the first small model that
    takes the batches.
    """
    error = ""
    for model in _models(inputs.config):
        try:
            found = sum(_loss(model, batch) for batch in loader)
        except Exception as raised:
            error = _shown(raised)
            continue
        try:
            expected = sum(_reference(model, processor, sample) for sample in samples)
        except Exception as raised:
            return Outcome(row.model_type, "runs", row.layout, f"its own processor: {_shown(raised)}")
        difference = abs(found / expected - 1)
        word: Word = "exact" if difference < TOLERANCE else "differs"
        return Outcome(row.model_type, word, row.layout, f"{difference:.0e}")
    return Outcome(row.model_type, "crashes" if error else "not built", row.layout, error or _NO_MODEL)


def _models(config: Any) -> Iterator[Any]:
    """Small random models that run on a text."""
    kind = model_class(config)
    for smaller in tiny_configs(thinker(config)):
        for attention in ("sdpa", "eager"):
            try:
                with undisturbed():
                    model = built(kind, smaller, attention).eval()
            except Exception:
                continue
            yield model
            break


def _samples(recipe: od.Recipe, processor: Any) -> list[Sample]:
    """Samples with one part of each modality, with several where the processor takes them, and with none."""
    images = [picture(64, 48, 0), picture(90, 130, 1), picture(200, 60, 2)] if recipe.image is not None else []
    clips = [clip(1.0, 0), clip(1.7, 1), clip(0.8, 2)] if recipe.audio is not None else []
    if recipe.audio is not None and not recipe.audio.places:
        return [Sample((), clips[:1], _CAPTIONS[0]), Sample((), clips[1:2], _CAPTIONS[1])]
    several = Sample(images[1:], clips[1:], _CAPTIONS[1])
    try:
        _inputs(processor, several)
    except Exception:
        several = Sample(images[1:2], clips[1:2], _CAPTIONS[1])
    return [Sample(images[:1], clips[:1], _CAPTIONS[0]), several, Sample((), (), _CAPTIONS[2])]


def _loader(
    recipe: od.Recipe, inputs: Any, samples: Sequence[Sample], path: Path, *, size: int | None = None
) -> tuple[Any, str]:
    """A loader, or None and why there is none.

    Args:
        size: samples of a batch; default: all of them.
    """
    rows = []
    places = all(modality.places for modality in recipe.modalities.values())
    for number, sample in enumerate(samples):
        chat = {"messages": messages(len(sample.images), len(sample.clips), sample.answer)}
        row: dict[str, Any] = {"__key__": f"s{number}"}
        row |= {"json": json.dumps(chat).encode()} if places else {"txt": sample.answer.encode()}
        row |= {f"{at}.png": data for at, data in enumerate(sample.images)}
        row |= {f"{at}.wav": data for at, data in enumerate(sample.clips)}
        rows.append(row)
    dataset = od.ShardDataset(write_shard(path, rows), recipe=recipe)
    try:
        loader = od.DataLoader(
            dataset,
            batch_size=size or len(rows),
            balance=od.Balance(max_samples=size),
            collate_fn=inputs,
            num_threads=0,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        return None, _shown(error)
    return loader, ""


def _loss(model: Any, batch: Any) -> float:
    with torch.no_grad():
        outputs = model(**_as_float32(batch.model_inputs()))
        return float(od.hf.loss(outputs, batch)) / batch.loss_scale


def _reference(model: Any, processor: Any, sample: Sample) -> float:
    """The summed loss of a sample's answer, by the processor's own way."""
    inputs = _inputs(processor, sample)
    with torch.no_grad():
        if "mm_token_type_ids" not in takes(model.config):
            inputs.pop("mm_token_type_ids", None)
        logits = model(**_as_float32(inputs), use_cache=False).logits
    ids = inputs["input_ids"][0]
    count = len(processor.tokenizer(sample.answer, add_special_tokens=False)["input_ids"])
    labels = torch.full_like(ids, -100)
    labels[-count:] = ids[-count:]
    return float(F.cross_entropy(logits[0, :-1].float(), labels[1:], ignore_index=-100, reduction="sum"))


def _inputs(processor: Any, sample: Sample) -> dict[str, Any]:
    """What a processor makes of a sample."""
    text = rendered(processor, len(sample.images), len(sample.clips), sample.answer)
    given: dict[str, Any] = {"text": [text], "return_tensors": "pt", "return_mm_token_type_ids": True}
    if sample.images:
        given["images"] = [[as_image(data) for data in sample.images]]
    if sample.clips:
        given["audio"] = [as_wave(data) for data in sample.clips]
    try:
        return dict(processor(**given))
    except Exception:
        if sample.images:  # some take no lists of lists
            return dict(processor(**{**given, "images": given["images"][0]}))
        if sample.clips:
            raise
        return dict(processor.tokenizer(text, return_tensors="pt"))  # some take no text alone


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _as_float32(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a model in float32: of weights of half precision, and bytes that are made values on the device."""
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.uint8)
    return {
        name: value.float() if isinstance(value, torch.Tensor) and value.dtype in kinds else value
        for name, value in arguments.items()
    }
