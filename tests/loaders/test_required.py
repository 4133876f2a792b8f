"""Which packages a process loads for a recipe: all that decoding needs, or only what counting needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from own_modalities import Points
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.loaders import required
from orchdata.loaders.environment import is_installed

JOB = """
import sys
from orchdata.cli import main
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_required

try:
    main()
except SystemExit as ended:
    assert not ended.code
print()
print("torch" in sys.modules)
load_required(Recipe())
print("torch" in sys.modules)
"""


def test_the_command_indexes_images_and_audio_without_torch(tmp_path: Path) -> None:
    urls = omni_shards(tmp_path, shards=1, samples=6)
    done = subprocess.run([sys.executable, "-c", JOB, "index", *urls, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *report, indexed, loaded = done.stdout.splitlines()
    found = json.loads("\n".join(report))
    assert (found["samples"], found["bad"]) == (6, 0)
    # Decoding sound imports torchaudio, and torchaudio imports torch.
    assert (indexed, loaded) == ("False", str(is_installed("torchaudio")))


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
