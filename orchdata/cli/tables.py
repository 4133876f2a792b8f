"""The profile as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchdata.cli.output import human_bytes

if TYPE_CHECKING:
    from orchdata.profile.profile import Profile
    from orchdata.profile.scales import Scale

MOST_REASONS = 5


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
        *([_scope_table(profile)] if any(scale.groups > 1 for scale in profile.scales) else []),
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
    table = _table(title, "ranks", "batch", *profile.phases, "step", "bound", "speedup", "per phase")
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
            f"{scale.per_phase_speedup:.2f}x" if len(profile.balanced_phases) > 1 else "-",
        )
    return table


def _scope_table(profile: Profile) -> Table:
    """Of the numbers of ranks that make several groups."""
    scales = [scale for scale in profile.scales if scale.groups > 1]
    title = f"\nScopes, in groups of {scales[0].group_size} ranks: max/mean over ranks, and who reads what"
    columns = ("scope", *profile.phases, "step", "speedup", "own streams", "groups/shard")
    table = _table(title, "ranks", *columns)
    table.columns[1].justify = "left"
    for scale in scales:
        for place, (name, scope) in enumerate(scale.scopes.items()):
            phases = [
                f"{value:.2f}" + ("" if phase in profile.balanced_phases else " *")
                for phase, value in scope.phases.items()
            ]
            table.add_row(
                f"{scale.ranks:,}" if place == 0 else "",
                name,
                *phases,
                f"{scope.step:.2f}",
                f"{scope.speedup:.2f}x",
                f"{scope.own_streams:.0%}",
                f"{scope.groups_per_shard:.1f} of {scale.groups:,}",
            )
    return table


def _notes(profile: Profile) -> list[str]:
    notes = [
        "step: the cost model's phases, ranks waiting for each other after each; speedup: an estimate from costs",
        "bound: no assignment of whole samples gets the step below it",
        'per phase: the speedup with encoders balanced apart, Balance(assignment="per_phase"), without the exchange',
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
    notes += _locality_notes(profile)
    notes += [note for scale in profile.scales for note in _advice_notes(scale)]
    return notes


def _locality_notes(profile: Profile) -> list[str]:
    reads = profile.read_amplification
    by_range = "" if reads.by_range is None else f"{reads.by_range:.2f} by range, whatever the scope; "
    notes = [f"bytes read for each byte used: {by_range}{reads.whole_shards:.2f} where every shard is read whole, once"]
    alone = [f"{scale.ranks:,}" for scale in profile.scales if scale.groups == 1]
    if alone:
        size = profile.scales[0].group_size
        notes.append(f"{' and '.join(alone)} ranks are one group (of up to {size}), where scopes do not differ")
    grouped = [scale for scale in profile.scales if scale.groups > 1]
    if grouped:
        steps = max(scale.locality_steps for scale in grouped)
        notes[:0] = [
            "own streams: samples that stay in the group of ranks whose streams (parts of the dataset) they are from",
            f"groups/shard: groups that read from a shard in {steps} steps in a row: its fetches, if fetched whole",
        ]
    return notes


def _advice_notes(scale: Scale) -> list[str]:
    """What holds the step back, and what would help, in the phase that loses most."""
    held = [(advice.cost_share * (advice.imbalance - 1), name) for name, advice in scale.advice.items()]
    name = max(held)[1]
    advice = scale.advice[name]
    if advice.limit == "nothing":
        return []
    largest = f"{advice.largest_key!r} of {advice.largest_shard.rsplit('/', 1)[-1]}"
    why = f"{advice.samples_per_rank:.1f} samples per rank do not fill the ranks evenly"
    if advice.limit == "giant sample":
        why = f"samples above the mean load of a rank: {advice.giants:,}, up to {advice.largest:.1f} x it ({largest})"
    ways = {
        "context parallel": "such samples shared by up to {} ranks each (context parallelism): {:.2f}",
        "more samples": "{} x the batch: {:.2f}",
    }
    helps = [ways[remedy.remedy].format(remedy.factor, remedy.imbalance) for remedy in advice.remedies]
    return [
        f"{scale.ranks:,} ranks, {name}: {advice.imbalance:.2f} at best in a usual step of {scale.steps}: {why}",
        *([f"  would help: {'; '.join(helps)}"] if helps else []),
    ]
