"""Install the wheel as a newcomer does, `pip install` in a fresh environment, and run `orchdata demo` there.

    python scripts/try_wheel.py [--folder FOLDER]

No constraints, nothing of this checkout on sys.path, and nothing repaired by hand: the newest versions of the
requirements have to work. The environment takes some gigabytes, since pip chooses a torch with CUDA, and is removed.
Where there is no room for it, it is not tried, and the script says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = ("orchdata", "loaders", "balancers", "native", "datasets", "pyproject.toml", "README.md", "LICENSE")
FREE_BYTES = 14 << 30
"""A torch with CUDA and its libraries are 6 GB installed and 3 GB on their way."""
NOT_HERE = ("PYTHONPATH", "VIRTUAL_ENV", "PIP_REQUIRE_VIRTUALENV", "PIP_CONSTRAINT")


def main() -> None:
    """Build, install, run, and remove all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="where the environment lies meanwhile; default: the system's")
    parent = parser.parse_args().folder or Path(tempfile.gettempdir())
    free = shutil.disk_usage(parent).free
    if free < FREE_BYTES:
        print(
            f"not tried: {parent} has {free / 1e9:.0f} GB free, and an environment with the newest torch may take "
            f"{FREE_BYTES / 1e9:.0f} GB; give another with --folder"
        )
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and not without removing it
    with tempfile.TemporaryDirectory(prefix="orchdata-wheel-", dir=parent) as folder:
        try_in(Path(folder))


def try_in(folder: Path) -> None:
    """Raises SystemExit where a command fails."""
    wheel = built(folder)
    venv.create(folder / "environment", with_pip=True)
    command = folder / "environment" / "bin" / "orchdata"
    run(folder, command.with_name("python"), "-m", "pip", "install", "--quiet", wheel)
    run(folder, command, "doctor")  # which tells the versions
    run(folder, command, "synth", "omni", "omni", "--samples", "16")  # by name: the wheel has the descriptions
    run(folder, command, "warm")
    before = compiled(folder)
    run(folder, command, "demo")
    if not before or compiled(folder) != before:
        raise SystemExit(f"`orchdata demo` compiled what `orchdata warm` had not: {compiled(folder) - before}")


def compiled(folder: Path) -> set[Path]:
    """Return the files in which numba stores compiled kernels, next to the source or in the user's folder of caches."""
    return set(folder.rglob("*.nbc"))


def built(folder: Path) -> Path:
    """Build the wheel from a copy: setuptools leaves a folder, and its old files would get into the next wheel."""
    source, out = folder / "source", folder / "wheel"
    source.mkdir()
    for name in SOURCES:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    run(folder, sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, source)
    return next(out.glob("orchdata-*.whl"))


def run(folder: Path, *command: str | Path) -> None:
    """Run it outside the checkout, and say how long it took."""
    clean = {name: value for name, value in os.environ.items() if name not in NOT_HERE}
    clean |= {"ORCHDATA_CACHE": str(folder / "cache"), "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    started = time.perf_counter()
    done = subprocess.run(list(map(str, command)), cwd=folder, env=clean, check=False)
    shown = " ".join([Path(command[0]).name, *(str(each) for each in command[1:])])
    print(f"{time.perf_counter() - started:.0f} s: {shown[:100]}", flush=True)
    if done.returncode:
        raise SystemExit(f"failed with status {done.returncode}: {shown}")


if __name__ == "__main__":
    main()
