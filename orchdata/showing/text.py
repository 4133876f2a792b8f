"""Samples as lines for people: what is trained, what is not, and media, each with its number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.text import Text

LONGEST: Final = 600
"""Characters of a stretch of text that are shown."""
_STYLES: Final = {"trained": "green", "masked": "dim", "media": "cyan"}
_KIND_WIDTH: Final = 9
_COUNT_WIDTH: Final = 7


def print_groups(groups: Sequence[dict[str, Any]], ignored: str, files: Sequence[str], *, full: bool) -> None:
    """Print samples, coloured in a terminal; then fields of the shards that are not read, and written files."""
    console = Console(highlight=False)
    for group in groups:
        if "step" in group:
            console.print(Text(_heading(group), style="bold"))
        for sample in group["samples"]:
            _print_sample(console, sample, full=full)
    if ignored:
        console.print(Text(_visible(f"fields of these shards that the recipe does not read: {ignored}")))
    for file in files:
        console.print(Text(_visible(f"saved {file}")), soft_wrap=True)


def _heading(group: dict[str, Any]) -> str:
    samples = [sample for sample in group["samples"] if sample["error"] is None]
    failed = len(group["samples"]) - len(samples)
    costs = []
    for phase, cost in group["cost"].items():
        most = group["largest_cost"][phase]
        costs.append(f"{phase} {cost:,} ({cost / most:.0%} of the largest rank's)" if most else f"{phase} 0")
    return (
        f"epoch {group['epoch']}, step {group['step']}, rank {group['rank']} of {group['ranks']}, microbatch "
        f"{group['microbatch']} of {group['microbatches']}: {len(samples):,} samples, "
        f"{sum(sample['tokens'] for sample in samples):,} tokens, "
        f"{sum(sample['trained_tokens'] for sample in samples):,} trained"
        f"{f', {failed:,} that cannot be loaded' if failed else ''}; cost {', '.join(costs)}\n"
    )


def _print_sample(console: Console, sample: dict[str, Any], *, full: bool) -> None:
    piece = f", piece {sample['piece']}" if sample["piece"] else ""
    source = f" of {sample['source']}" if sample["source"] else ""
    costs = "".join(f", {phase} costs {cost:,}" for phase, cost in sample["costs"].items())
    console.print(
        Text(_visible(f"{sample['key']}{piece}{source}"), style="bold"),
        Text(_visible(f"in {sample['shard']}, row {sample['row']}")),
    )
    console.print(Text(f"{sample['tokens']:,} tokens, {sample['trained_tokens']:,} trained{costs}"))
    if sample["error"] is not None:
        console.print(Text(_visible(sample["error"]), style="red"))
    for span in sample["spans"]:
        kind, content = _content(span, full=full)
        style = _STYLES.get(kind, _STYLES["media"])
        margin = f"{kind:<{_KIND_WIDTH - 1}} {span['tokens']:>{_COUNT_WIDTH - 1},} "
        for number, line in enumerate(content.wrap(console, max(20, console.width - len(margin)))):
            line.rstrip()
            console.print(Text(margin if not number else " " * len(margin), style="dim"), line, sep="", style=style)
    console.print()


def _content(span: dict[str, Any], *, full: bool) -> tuple[str, Text]:
    if "modality" in span:
        sizes = "".join(f", {name} {_shortened(_number(value), full=full)}" for name, value in span["sizes"].items())
        return span["modality"], Text(_visible(f"{span['field']}, {span['positions']:,} positions{sizes}"))
    said = "ids " + " ".join(map(str, span["token_ids"])) if span["text"] is None else span["text"]
    return "trained" if span["trained"] else "masked", Text(_visible(_shortened(said, full=full), kept="\n"))


def _number(value: Any) -> str:
    """A number, or a list of them: what is measured to four digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(_number, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _visible(text: str, *, kept: str = "") -> str:
    """Escape characters that would move the cursor, turn its direction or end a line, except `kept`."""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text
    )


def _shortened(text: str, *, full: bool) -> str:
    if full or len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
