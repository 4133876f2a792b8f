"""Make torchaudio importable beside a CPU-only torch.

torchaudio's wheel carries extension libraries that are linked against CUDA; beside a torch without CUDA,
`import torchaudio` fails on them. torchaudio supports being without: `functional.resample`, `transforms` and
`compliance.kaldi` then work, `rnnt_loss` and `forced_align` do not. So, and only where `torch.version.cuda`
is None, this removes `torchaudio/lib/*.so` from the environment it runs in. Running it twice is harmless.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def main() -> None:
    """Remove the libraries where they cannot work, and say what was done."""
    spec = importlib.util.find_spec("torchaudio")  # finds it without importing it
    if spec is None or spec.origin is None:
        raise SystemExit("torchaudio is not installed in this environment: nothing to do")
    if torch.version.cuda is not None:
        print(f"torch {torch.__version__} has CUDA: torchaudio is left as it is")
        return
    libraries = sorted((Path(spec.origin).parent / "lib").glob("*.so"))
    for library in libraries:
        library.unlink()
    print(f"torch {torch.__version__} has no CUDA: removed {len(libraries)} torchaudio extension libraries")


if __name__ == "__main__":
    main()
