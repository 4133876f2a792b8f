"""What recipes are known by: subclasses, parameters, and what no fingerprint would see."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from own_modalities import Cropped, Loud, Lowered, Points, Shouted, Tracks
from own_samples import loader
from shard_factory import audio, chat, jpeg, write_shard

import orchdata as od

IMAGE = {"patch_size": 8, "merge": 2, "min_tokens": 1, "max_tokens": 12, "dtype": "float32"}


SUBCLASSES: dict[str, dict[str, Any]] = {
    "image": {"image": Cropped(**IMAGE)},  # type: ignore[arg-type]
    "audio": {"audio": Loud()},
    "template": {"text": od.TextPreprocessor(template=Shouted())},
    "text": {"text": Lowered()},
}


BASES: dict[str, Any] = {"image": od.ImagePreprocessor(**IMAGE)}  # type: ignore[arg-type]


def test_subclasses_are_obeyed(tmp_path: Path) -> None:
    sample = {"jpg": jpeg(64, 32), "wav": audio(0.3), "json": chat("<image> and <audio> SO", "Be it")}
    shard = write_shard(tmp_path / "a.tar", [{"__key__": "a", **sample}])

    def only(**changed: Any) -> od.Batch:
        (batch,) = loader(shard, recipe=od.Recipe(**BASES | changed), cost=None)
        return batch

    plain = only()
    cropped = only(**SUBCLASSES["image"]).media["image"]
    assert cropped.grid_hw.tolist() == [[4, 4]] and plain.image.grid_hw.tolist() == [[4, 8]]
    assert len(cropped.patches) == 16
    left = plain.image.patches.reshape(2, 4, 4, -1)[:, :2].reshape(16, -1)  # merged tokens, row by row
    assert (cropped.patches - left).abs().mean() < 0.05 < (cropped.patches - left.flip(0)).abs().mean()
    assert torch.equal(only(**SUBCLASSES["audio"]).audio.features, plain.audio.features * 2)

    def text(batch: od.Batch) -> str:
        return bytes(batch.text.input_ids.tolist()).decode()

    assert text(plain) == "<|im_start|>user\n and  SO<|im_end|>\n<|im_start|>assistant\nBe it<|im_end|>\n"
    assert text(only(**SUBCLASSES["template"])) == "USER! and  SO<|im_end|>\nASSISTANT!Be it<|im_end|>\n"
    assert text(only(**SUBCLASSES["text"])) == text(plain).lower()
    assert (only(text=Lowered(shift=1)).text.input_ids - 1).tolist() == list(text(plain).lower().encode())


@pytest.mark.slow
def test_subclasses_have_fingerprints_of_their_own_in_every_process() -> None:
    recipes = {name: od.Recipe(**BASES | changed) for name, changed in SUBCLASSES.items()}
    recipes |= {
        "none": od.Recipe(**BASES),
        "image, other parameter": od.Recipe(image=Cropped(half=False, **IMAGE)),  # type: ignore[arg-type]
        "text, other parameter": od.Recipe(**BASES, text=Lowered(shift=1)),
        "template, other parameter": od.Recipe(**BASES, text=od.TextPreprocessor(template=Shouted(mark="?"))),
        "points": od.Recipe(points=Points()),
        "points, other parameter": od.Recipe(points=Points(group=3)),
        "points, other name": od.Recipe(clouds=Points()),
        "tracks": od.Recipe(points=Tracks()),
        "keep": od.Recipe(keep=("cls",)),
    }
    prints = {name: recipe.fingerprint() for name, recipe in recipes.items()}
    assert len(set(prints.values())) == len(prints)
    program = "import pickle, sys; print(*[recipe.fingerprint() for recipe in pickle.load(sys.stdin.buffer)])"
    code = f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}; {program}"
    finished = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(list(recipes.values())), capture_output=True, check=True
    )
    assert finished.stdout.decode().split() == list(prints.values())


@pytest.mark.parametrize(
    ("recipe", "fingerprint"),
    [
        (od.Recipe(), "9dd9203dc2ed2cfbe7179db61c02a615"),
        (od.Recipe(audio=None), "3791b5c3df3c0bd9dc3fba3af8ab5260"),
        (od.Recipe(image=None, audio=None), "def8a2c3c029dfee61bed392968eb5d2"),
        (
            od.Recipe(
                image=od.ImagePreprocessor(patch_size=16, max_tokens=256, dtype="uint8"),
                audio=od.AudioPreprocessor(num_mels=80),
                text=od.TextPreprocessor(
                    eos_token_id=5, template=od.ChatTemplate(suffix="\n"), image_placeholder="<img>"
                ),
                limits=od.Limits(image_pixels=10**6),
            ),
            "476f2f83ecfd630551269b5d751bc61c",
        ),
    ],
)
def test_fingerprints_of_plain_recipes_stay(recipe: od.Recipe, fingerprint: str) -> None:
    """Indexes that people have belong to these: they change with what recipes give, and only then."""
    assert recipe.fingerprint() == fingerprint


class Loose(od.Modality):
    """Not a dataclass: what it holds is no part of it."""

    fields = ("loose",)

    def __init__(self, size: int) -> None:
        self.size = size

    def arrays(self) -> Mapping[str, od.ArraySpec]:
        return {"rows": od.ArraySpec((self.size,))}


def test_what_a_fingerprint_would_not_see_is_refused() -> None:
    with pytest.raises(TypeError, match="Loose is no dataclass, so that .* its size: make it a frozen dataclass"):
        od.Recipe(loose=Loose(3)).fingerprint()
