"""`scripts/plain_torchaudio.py`: torchaudio is imported without its compiled libraries, where torch has no CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "plain_torchaudio.py"
USE = "import torchaudio; print(torchaudio.decorated(3), torchaudio.available)"


def test_what_is_written_in_python_is_there_without_the_libraries(tmp_path: Path) -> None:
    package = tmp_path / "torchaudio"
    (package / "_extension").mkdir(parents=True)
    (package / "_extension" / "__init__.py").write_text("raise OSError('libcudart.so.13')\n")
    (package / "__init__.py").write_text(
        "from torchaudio._extension import _IS_ALIGN_AVAILABLE as available, fail_if_no_align\n"
        "@fail_if_no_align\n"
        "def decorated(value): return value\n"
    )
    status, said = used(tmp_path, "-S")
    assert status and "libcudart.so.13" in said  # as it is without the script
    spec = spec_from_file_location("plain_torchaudio", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "sitecustomize.py").write_text(script.MODULE)
    status, said = used(tmp_path)
    assert (status, said) == (0, "3 False") if torch.version.cuda is None else status


def used(folder: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *options, "-c", USE],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]
