"""`python -m benchmarks.pictures`: write the pictures of the README and of docs from the stored figures.

With `--check` it writes nothing, and fails where a file differs from its figures. Needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.pictures.draw import pictures

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pictures", description="Write the pictures of the README and of docs."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="where to write (docs/pictures)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file differs")
    options = parser.parse_args()
    stale = []
    for name, make in pictures().items():
        path, made = options.folder / name, make()
        if not options.check:
            options.folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(made)
            sys.stdout.write(f"{path}\n")
        elif not path.is_file() or path.read_bytes() != made:
            stale.append(name)
    if stale:
        sys.exit(
            f"{', '.join(stale)} in {options.folder} differ from benchmarks/results; run python -m benchmarks.pictures"
        )


if __name__ == "__main__":
    main()
