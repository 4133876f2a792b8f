"""Which packages a process loads for a recipe: all that decoding needs, or only what counting needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from shard_factory import omni_shards

JOB = """
import sys
from orchdata.cli import main
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.recipe import load_required

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
    assert (indexed, loaded) == ("False", "False")
