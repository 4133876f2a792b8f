"""A package that is missing or broken is one clear error, and never a sample's failure: while indexing, loading and
verifying, under every policy, in every engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import orchdata as od
from orchdata.loaders.errors import PackageError
from orchdata.loaders.index.build import build_index

SUPPORT = Path(__file__).resolve().parents[1] / "support"
REASONS = {"ImportError": "ImportError: planted", "RuntimeError": "RuntimeError: planted"}
PACKAGES = {
    "soundfile": "media",
    "simplejpeg": "media",
    "PIL": "media",
    "zstandard": "media",
    "numba": "media",
    "av": "video",
    "tokenizers": "chat",
    "jinja2": "chat",
    "transformers": "hf",
}
HEALTHY = [3, 0]
"""Samples, and failures."""


def run(folder: Path, *cases: tuple[str, str, str]) -> list[dict[str, Any]]:
    paths = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, SUPPORT / "broken_packages_job.py", folder, json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(outcome: dict[str, Any]) -> None:
    """Each attempt names the package and the cause, no sample is blamed, and the index is sound afterwards."""
    package, error, _ = outcome["case"]

    def is_named(value: Any) -> bool:
        return value[0] == "PackageError" and f"'{package}'" in value[1] and f"({REASONS[error]}): " in value[1]

    assert is_named(outcome["index"]), outcome
    attempts = {name: value for name, value in outcome["load"].items() if name != "verify"}
    assert len(attempts) == 6
    for name, value in attempts.items():
        assert is_named(value) and value[2] == 0, (name, value)
    assert is_named(outcome["load"]["verify"]), outcome
    assert outcome["after"] == HEALTHY


@pytest.mark.slow
def test_a_broken_package_is_one_error_and_no_bad_sample(tmp_path: Path) -> None:
    (said,) = run(tmp_path, ("soundfile", "RuntimeError", "media"))
    check(said)


@pytest.mark.slow
def test_so_is_each_package_that_is_missing(tmp_path: Path) -> None:
    for outcome in run(tmp_path, *((package, "ImportError", recipe) for package, recipe in PACKAGES.items())):
        check(outcome)


def test_what_the_process_that_measures_parquet_lacks_is_no_fault_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = pa.array(["some", "text", "some"]).dictionary_encode()
    shard = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": words}), shard)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pyarrow.compute':\n"
        "            raise OSError('planted.so')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(broken))
        with pytest.raises(PackageError, match=r"'pyarrow', which reading Parquet needs, .*planted\.so"):
            build_index([shard], od.Recipe(), retry_seconds=0)
    index = build_index([shard], od.Recipe())
    assert (len(index), len(index.bad_rows())) == (3, 0)
