"""Which packages a process loads for a recipe: all that decoding needs, or only what counting needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from own_modalities import Points
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.loaders import required

JOB = """
import sys
from orchdata.loaders.index.build import build_index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_required

index = build_index(sys.argv[1:], Recipe())
assert not len(index.bad_rows())
print(len(index), "torch" in sys.modules)
load_required(Recipe())
print("torch" in sys.modules)
"""


def test_an_index_of_images_and_audio_is_built_without_torch(tmp_path: Path) -> None:
    urls = omni_shards(tmp_path, shards=1, samples=6)
    done = subprocess.run([sys.executable, "-c", JOB, *urls], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6", "False", "True"]


def test_a_modality_of_the_user_is_set_up_wherever_its_parts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clips(od.AudioPreprocessor):
        def set_up_process(self) -> None:
            called.append("clips")

    class Cloud(Points):
        def set_up_process(self) -> None:
            called.append("cloud")

    for load in (required.load_for_scanning, required.load_required):
        called: list[str] = []
        load(od.Recipe(audio=Clips(), points=Cloud()))
        assert sorted(called) == ["clips", "cloud"]


def test_torchaudio_is_for_processes_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("orchdata.loaders.resampling.torchaudio_transforms", lambda: asked.append("torchaudio"))
    required.load_for_scanning(RECIPE)
    assert not asked
    required.load_required(RECIPE)
    assert asked
