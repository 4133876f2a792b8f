"""Print the versions that a run of the tests has, for benchmarks/promises.md."""

import platform
from importlib.metadata import PackageNotFoundError, version

NAMES = (
    "torch",
    "torchaudio",
    "numpy",
    "scipy",
    "numba",
    "pyarrow",
    "pillow",
    "transformers",
    "datasets",
    "accelerate",
)


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}")
    for name in NAMES:
        try:
            print(name, version(name))
        except PackageNotFoundError:
            print(name, "not installed")


if __name__ == "__main__":
    main()
