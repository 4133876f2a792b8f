"""Write benchmarks/huggingface_models.md's list of causal models whose sequences ranks can share, by trying each.

python scripts/shared_models.py            writes it, in minutes
python scripts/shared_models.py --check    fails where it is another one
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "benchmarks" / "huggingface_models.md"
MARKS = ("<!-- written by scripts/shared_models.py -->\n", "<!-- end -->\n")
REASONS = (
    ("does not look", "Refused: attention is not looked up by a name"),
    ("rotary positions", "Refused: rotary positions depend on the longest position"),
    ("does not know", "Refused: attention that kernels of packed sequences do not know (softcap, sinks, biases)"),
    ("trains otherwise", "Refused: other layers or masks, which see one slice alone"),
    ("takes no slices", "Refused: the forward raises an error"),
    ("asks for packed rows", "Refused: a decoder apart, or media whose positions in packed rows are not known"),
    ("could not be tried", "Refused: no tiny model of the default configuration trains"),
    ("", "Refused: media, or tokens that see ahead"),
)


def verdicts() -> dict[str, str]:
    """The reason of each model type of text; "" where sequences can be shared."""
    from transformers.models.auto import modeling_auto

    import orchdata as od

    found = {}
    for kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            sharing = od.hf.Inputs(kind(), padded=False, probe=False).sharing
            found[kind.model_type] = "" if sharing.shares else sharing.why
        except Exception as error:  # noqa: BLE001 - of a default configuration anything is possible
            found[kind.model_type] = f"could not be tried: {type(error).__name__}: {error}"
        print(kind.model_type, found[kind.model_type] or "shared", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, str]) -> str:
    """The lists, as Markdown."""
    lists: dict[str, list[str]] = {"Shared, exact": [kind for kind, why in found.items() if not why]}
    for kind, why in found.items():
        if why:
            lists.setdefault(next(said for part, said in REASONS if part in why), []).append(kind)
    shared = ", ".join(f"`{kind}`" for kind in sorted(lists["Shared, exact"]))
    rows = [f"- Shared, exact, {len(lists['Shared, exact'])}: {shared}"]
    rows += [f"- {said}, {len(lists[said])}" for _, said in REASONS if said in lists]
    versions = f"transformers {version('transformers')} and torch {version('torch').partition('+')[0]}"
    return "\n".join((f"Of {versions}: {len(found)} causal models.", "", *rows, ""))


def main(*, check: bool) -> bool:
    """Write the table, or return whether it is as it was."""
    page = PAGE.read_text()
    before, after = re.escape(MARKS[0]), re.escape(MARKS[1])
    written = re.sub(f"(?s){before}.*{after}", lambda _: MARKS[0] + table(verdicts()) + MARKS[1], page)
    if not check:
        PAGE.write_text(written)
    return written == page


if __name__ == "__main__":
    sys.exit(not main(check="--check" in sys.argv) and "--check" in sys.argv)
