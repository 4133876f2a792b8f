"""What becomes of every family of the installed transformers that has a processor: one line each, and a count.

    python scripts/sweep_families.py [model_type ...]

Processors and configurations are built offline, of their classes' defaults with made-up tokenizers, and made to fit
each other. A family takes some 5 to 30 seconds of a core. With `make .venv/torchvision` more processors can be built.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / ".venv" / "torchvision")]


def main(names: list[str]) -> int:
    """Print the table; 1 where a family crashes or differs after its loader was made."""
    import torchvision_operators  # noqa: F401 - before transformers, which looks for torchvision once
    import transformers
    from hf_sweep.outcomes import outcome_of
    from hf_sweep.processors import model_types

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}")
    words: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in names or model_types():
            found = outcome_of(name, Path(folder))
            words[found.word] += 1
            print(f"{name:26} {found.word:9} {found.layout:6} {found.detail}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in words.most_common()))
    return int(bool(words["crashes"] or words["differs"]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
