"""The profile as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchdata.cli.output import human_bytes

if TYPE_CHECKING:
    from orchdata.profile import Profile

MOST_REASONS = 5
NOTABLE_BOUND = 1.1


def profile_table(profile: Profile) -> RenderableType:
    """What the dataset holds, how large samples are, and what each number of ranks would see."""
    bad = f"; left out: {profile.bad:,} bad samples" if profile.bad else ""
    bad += f"; {profile.failed_shards:,} shards cannot be read at all" if profile.failed_shards else ""
    header = (
        f"{profile.samples:,} samples in {profile.shards:,} shards, {human_bytes(profile.bytes)}, "
        f"{profile.loss_tokens:,} loss tokens{bad}"
    )
    reasons = [f"  {count:,} x {reason}" for reason, count in list(profile.bad_by_reason.items())[:MOST_REASONS]]
    return Group(
        Text(header),
        *(Text(reason, style="yellow") for reason in reasons),
        _modality_table(profile),
        _phase_table(profile),
        _scale_table(profile),
        *(Text(f"- {note}") for note in _notes(profile)),
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _modality_table(profile: Profile) -> Table:
    table = _table("\nWhat samples are made of", "modality", "share of samples", "samples", "parts", "LLM tokens")
    for name, modality in profile.modalities.items():
        share = f"{modality.share:.1%}"
        table.add_row(name, share, f"{modality.samples:,}", f"{modality.parts:,}", f"{modality.tokens:,}")
    return table


def _phase_table(profile: Profile) -> Table:
    names = ("min", "p25", "p50", "p75", "p95", "p99", "max")
    table = _table("\nPositions per sample, of those in the phase", "phase", "total", *names)
    for name, phase in profile.phases.items():
        sizes = [f"{phase.percentiles[column]:,}" if phase.percentiles else "-" for column in names]
        table.add_row(name, f"{phase.positions:,}", *sizes)
    return table


def _scale_table(profile: Profile) -> Table:
    title = "\nImbalance, max/mean over ranks: unbalanced -> balanced (1.00 is perfect)"
    table = _table(title, "ranks", "batch", *profile.phases, "step", "bound", "speedup")
    for scale in profile.scales:
        phases = [
            f"{phase.unbalanced:.2f} -> {phase.balanced:.2f}" + ("" if name in profile.balanced_phases else " *")
            for name, phase in scale.phases.items()
        ]
        step = f"{scale.step.unbalanced:.2f} -> {scale.step.balanced:.2f}"
        ranks = f"{scale.ranks:,}" + (" r" if scale.with_replacement else "")
        table.add_row(
            ranks,
            f"{scale.global_batch_size:,}",
            *phases,
            step,
            f"{scale.step.lower_bound:.2f}",
            f"{scale.speedup:.2f}x",
        )
    return table


def _notes(profile: Profile) -> list[str]:
    notes = [
        "step: the cost model's phases, ranks waiting for each other after each; speedup: an estimate from costs",
        "bound: no assignment of whole samples gets the step below it",
    ]
    unnamed = [name for name in profile.phases if name not in profile.balanced_phases]
    if unnamed:
        why = "no cost model given (--cost), so LLM tokens alone are balanced"
        if profile.has_cost_model:
            why = "the cost model does not name them"
        notes.append(f"*: {' and '.join(unnamed)}: not balanced and not in the step: {why}")
    if any(scale.with_replacement for scale in profile.scales):
        notes.append(
            f"r: the dataset has fewer samples ({profile.samples:,}) than this global batch, "
            "so samples were drawn with replacement"
        )
    notes.extend(_bound_notes(profile))
    return notes


def _bound_notes(profile: Profile) -> list[str]:
    """Where single samples set the pace, say so: no assignment of whole samples can mend it."""
    for scale in profile.scales:
        if scale.step.lower_bound >= NOTABLE_BOUND:
            bound, phase = max((scale.phases[name].lower_bound, name) for name in profile.balanced_phases)
            note = (
                f"from {scale.ranks:,} ranks on the largest samples set the pace, most in {phase} (bound {bound:.2f}): "
                "more samples per rank would help, or fewer tokens in the largest"
            )
            return [note]
    return []
