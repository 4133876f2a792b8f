"""The profile as tables for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchdata.cli.output import human_bytes, overflow_words, plain_table, unread_lines
from orchdata.loaders.amounts import counted
from orchdata.profiling.report.summary import findings, left_out_words, stored_words

if TYPE_CHECKING:
    from orchdata.profiling.profile import Profile
    from orchdata.profiling.ranks.scales import Scale
    from orchdata.profiling.report.summary import Finding

MOST_REASONS = 5


def profile_table(profile: Profile) -> RenderableType:
    """What the dataset holds, how large samples are, and what each number of ranks would see."""
    bad = f"; left out: {counted(profile.bad, 'bad sample')}" if profile.bad else ""
    bad += f"; {profile.unchosen:,} samples that are not chosen" if profile.unchosen else ""
    bad += f"; {counted(profile.failed_shards, 'shard')} cannot be read at all" if profile.failed_shards else ""
    header = (
        f"{counted(profile.samples, 'sample')} in {counted(profile.shards, 'shard')}, {human_bytes(profile.bytes)}, "
        f"{profile.loss_tokens:,} loss tokens{bad}"
    )
    reasons = [f"  {count:,} x {reason}" for reason, count in list(profile.bad_by_reason.items())[:MOST_REASONS]]
    return Group(
        Text(header),
        *(Text(reason, style="yellow") for reason in reasons),
        *_overflow_line(profile),
        *_caps_line(profile),
        *(Text(f"- {_sentence(finding)}") for finding in findings(profile)),
        *map(Text, unread_lines({"names": profile.unread, "others": profile.unread_others})),
        *([_source_table(profile)] if profile.sources else []),
        _modality_table(profile),
        _phase_table(profile),
        _scale_table(profile),
        *([_scope_table(profile)] if any(scale.groups > 1 for scale in profile.scales) else []),
        *(Text(f"- {note}") for note in _notes(profile)),
    )


def _sentence(finding: Finding) -> str:
    shard = finding.shard.rsplit("/", 1)[-1]
    return f"{finding.text} It is {finding.key!r} of {shard}." if shard else finding.text


def _overflow_line(profile: Profile) -> list[Text]:
    parts = [] if profile.overflow is None else overflow_words(asdict(profile.overflow))
    return [Text(f"above TextPreprocessor.max_tokens: {'; '.join(parts)}")] if parts else []


def _caps_line(profile: Profile) -> list[Text]:
    if (caps := profile.caps) is None:
        return []
    of_each = ", ".join(
        f"{phase} {cap:,} ({caps.above[phase]:,} samples above)" for phase, cap in caps.max_tokens.items()
    )
    become = {"own": "get a microbatch each", "drop": "are left out", "error": "would be refused"}[caps.oversize]
    return [Text(f"max_tokens: {of_each}; {caps.samples:,} samples above it {become}")]


def _source_table(profile: Profile) -> Table:
    table = plain_table(
        "\nWhat sources give in an epoch", "source", "share of tokens", "LLM tokens", "samples", "passes"
    )
    for name, source in profile.sources.items():
        table.add_row(name, f"{source.share:.1%}", f"{source.tokens:,}", f"{source.samples:,}", f"{source.passes:.3g}")
    return table


def _modality_table(profile: Profile) -> Table:
    title = f"\nWhat samples are made of{stored_words(profile)}"
    table = plain_table(title, "modality", "share of samples", "samples", "parts", "LLM tokens")
    for name, modality in profile.modalities.items():
        share = f"{modality.share:.1%}"
        table.add_row(name, share, f"{modality.samples:,}", f"{modality.parts:,}", f"{modality.tokens:,}")
    return table


def _phase_table(profile: Profile) -> Table:
    names = ("min", "p25", "p50", "p75", "p95", "p99", "max")
    title = f"\nPositions per sample, of those in the phase{stored_words(profile)}"
    table = plain_table(title, "phase", "total", *names)
    for name, phase in profile.phases.items():
        sizes = [f"{phase.percentiles[column]:,}" if phase.percentiles else "-" for column in names]
        table.add_row(name, f"{phase.positions:,}", *sizes)
    return table


def _scale_table(profile: Profile) -> Table:
    counted = " and micro-steps" if profile.caps and profile.meets_in_micro_steps else ""
    title = f"\nImbalance, max/mean over ranks{counted}: unbalanced -> balanced (1.00 is perfect)"
    gpus = ("GPUs",) if profile.model_parallel > 1 else ()
    micro_steps = ("micro-steps",) if profile.caps else ()
    fill = ("fill",) if any(scale.scopes["global"].fill is not None for scale in profile.scales) else ()
    columns = (*gpus, "batch", *profile.phases, "step", "bound", "speedup", "per phase", *micro_steps, *fill)
    table = plain_table(title, "ranks", *columns)
    for scale in profile.scales:
        phases = [
            f"{phase.unbalanced:.2f} -> {phase.balanced:.2f}" + ("" if name in profile.balanced_phases else " *")
            for name, phase in scale.phases.items()
        ]
        step = f"{scale.step.unbalanced:.2f} -> {scale.step.balanced:.2f}"
        ranks = f"{scale.ranks:,}" + (" r" if scale.with_replacement else "")
        dealt, planned = scale.scopes["none"].microbatches, scale.scopes["global"].microbatches
        table.add_row(
            ranks,
            *([f"{scale.gpus:,}"] if gpus else []),
            _size(scale),
            *phases,
            step,
            f"{scale.step.lower_bound:.2f}",
            f"{scale.speedup:.2f}x",
            _per_phase_speedup(profile, scale.per_phase_speedup),
            *([f"{dealt:.1f} -> {planned:.1f}"] if micro_steps else []),
            *([f"{scale.scopes['none'].fill:.1%} -> {scale.scopes['global'].fill:.1%}"] if fill else []),
        )
    return table


def _size(scale: Scale) -> str:
    if scale.global_batch_size is not None:
        return f"{scale.global_batch_size:,}"
    return f"{scale.global_batch_tokens:,} tokens ({scale.samples:,.0f})"


def _scope_table(profile: Profile) -> Table:
    """Build the table of scopes, for the numbers of ranks that make several groups."""
    scales = [scale for scale in profile.scales if scale.groups > 1]
    title = f"\nScopes, in groups of {scales[0].group_size} ranks: max/mean over ranks, and who reads what"
    micro_steps = ("micro-steps",) if profile.caps else ()
    columns = ("scope", *profile.phases, "step", "speedup", "per phase", *micro_steps, "own streams", "groups/shard")
    has_cache = any(scope.node for scale in scales for scope in scale.scopes.values())
    columns += ("cache hits", "fetched/node") if has_cache else ()
    table = plain_table(title, "ranks", *columns)
    table.columns[1].justify = "left"
    for scale in scales:
        for number, (name, scope) in enumerate(scale.scopes.items()):
            phases = [
                f"{value:.2f}" + ("" if phase in profile.balanced_phases else " *")
                for phase, value in scope.phases.items()
            ]
            table.add_row(
                f"{scale.ranks:,}" if number == 0 else "",
                name,
                *phases,
                f"{scope.step:.2f}",
                f"{scope.speedup:.2f}x",
                "-" if scope.per_phase is None else _per_phase_speedup(profile, scope.per_phase.speedup),
                *([f"{scope.microbatches:.1f}"] if micro_steps else []),
                f"{scope.own_streams:.0%}",
                f"{scope.groups_per_shard:.1f} of {scale.groups:,}",
                *([] if scope.node is None else [f"{scope.node.hits:.0%}", human_bytes(scope.node.fetched_bytes)]),
            )
    return table


def _per_phase_speedup(profile: Profile, speedup: float) -> str:
    return f"{speedup:.2f}x" if len(profile.balanced_phases) > 1 else "-"


def _notes(profile: Profile) -> list[str]:
    waiting = "after each" if profile.caps is None else "after each in each micro-step"
    if not profile.meets_in_micro_steps:
        waiting = "at its end only"
    notes = [
        f"step: the cost model's phases, ranks waiting for each other {waiting}; speedup: an estimate from costs",
        "bound: no assignment of whole samples gets the step below it",
        'per phase: the speedup with encoders balanced apart, Balance(assignment="per_phase"), without the exchange',
    ]
    if profile.caps is not None:
        notes.append(
            "micro-steps: microbatches of each rank in a step; speedup: over samples dealt out within the same caps"
        )
    if any(scale.scopes["global"].fill is not None for scale in profile.scales):
        notes.append(
            "fill: tokens of samples over those of all microbatches of this length; loads count padding, means do not"
        )
    if profile.layout == "padded":
        notes.append("LLM rows are padded to the longest of their microbatch; the mean counts no padding, loads do")
    if profile.ranks_left_out:
        notes.append(left_out_words(profile))
    if profile.model_parallel > 1:
        notes.append(f"a rank is {profile.model_parallel} GPUs, which get the same samples")
    notes += [
        f"per phase, {scale.ranks:,} ranks in nodes of {scale.group_size}: features that cross nodes, "
        + ", ".join(f"{phase} {share:.1%} of the rows" for phase, share in scale.rows_between_groups.items())
        for scale in profile.scales
        if scale.groups > 1 and scale.rows_between_groups
    ]
    unnamed = [name for name in profile.phases if name not in profile.balanced_phases]
    if unnamed:
        notes.append(f"*: {' and '.join(unnamed)}: not balanced and not in the step: the cost model does not name them")
    if not profile.has_cost_model and len(profile.phases) > 1:
        notes.append("no cost model given (--cost): positions cost the same, a patch as much as an LLM token")
    if any(scale.with_replacement for scale in profile.scales):
        notes.append(
            f"r: the dataset ({counted(profile.samples, 'sample')}) has less than this global batch, "
            "so samples were drawn with replacement"
        )
    notes += _locality_notes(profile)
    notes += [note for scale in profile.scales for note in _advice_notes(scale)]
    return notes


def _locality_notes(profile: Profile) -> list[str]:
    reads = profile.read_amplification
    parts = []
    if reads.by_range is not None:
        parts.append(f"{reads.by_range:.2f} by range, in any scope")
    if reads.whole_shards is not None:
        parts.append(f"{reads.whole_shards:.2f} where every shard is read whole, once")
    if reads.by_chunk is not None:
        parts.append(f"{reads.by_chunk:.2f} for Parquet, if each sample reads the column chunks of its row group")
    notes = [f"bytes read for each byte used: {'; '.join(parts)}"] if parts else []
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
    nodes = [scale.scopes["global"].node for scale in profile.scales if scale.groups == 1]
    if nodes and nodes[0] is not None:
        notes.append(
            f"{' and '.join(alone)} ranks on one node with a cache: {nodes[0].hits:.0%} hits from the second epoch on, "
            f"{human_bytes(nodes[0].fetched_bytes)} fetched in each"
        )
    if any(scope.node for scale in grouped for scope in scale.scopes.values()):
        notes.append(
            "cache hits, fetched/node: of a node (a group) with an od.Cache, in each epoch from the second on; in "
            "other scopes than grouped each node reads from every shard, and caches none"
        )
    return notes


def _advice_notes(scale: Scale) -> list[str]:
    """Say what other steps would cost."""
    notes = []
    if scale.better_tokens is not None:
        notes.append(
            f"{scale.ranks:,} ranks: steps of {scale.better_tokens:,} tokens would fill their microbatches, those of "
            f"{scale.global_batch_tokens:,} do not"
        )
    if not scale.changes:
        return notes
    others = []
    for change in scale.changes:
        size = "batch_tokens" if change.change == "batch_size" and scale.batch_size is None else change.change
        what = f"with {change.factor} times the {size}" if change.factor else f"without {size}"
        drawn = ", of samples drawn with replacement" if change.with_replacement else ""
        others.append(f"{change.step:.2f} {what}{_micro_steps(scale, change.microbatches)}{drawn}")
    if (tokens := scale.settings.get("tokens")) is not None:
        others.append(
            f"{1 / (1 - tokens.waiting):.2f} in steps of as many tokens{_micro_steps(scale, tokens.microbatches)}"
        )
    now = f"{scale.step.balanced:.2f}{_micro_steps(scale, scale.scopes['global'].microbatches)}"
    return [*notes, f"{scale.ranks:,} ranks: a step costs {now} of an even one; {'; '.join(others)}"]


def _micro_steps(scale: Scale, microbatches: float) -> str:
    return f" ({microbatches:.1f} micro-steps)" if scale.scopes["global"].microbatches > 1 else ""
