"""The profile in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchdata.cli.output import human_bytes, overflow_words, plain_table, unread_lines
from orchdata.loaders.amounts import counted
from orchdata.profiling import tables
from orchdata.profiling.figures import Figures
from orchdata.profiling.summary import findings, left_out_words, stored_words
from orchdata.profiling.tables import SHARE, SIZES, TEXT

if TYPE_CHECKING:
    from orchdata.profiling.profile import Profile

MOST_REASONS = 5


def profile_table(profile: Profile) -> RenderableType:
    """What the dataset holds, how large samples are, and what each number of ranks would see."""
    bad = f"; left out: {counted(profile.bad, 'bad sample')}" if profile.bad else ""
    bad += f"; {profile.unchosen:,} samples that are not chosen" if profile.unchosen else ""
    bad += f"; {counted(profile.failed_shards, 'shard')} cannot be read at all" if profile.failed_shards else ""
    about = f"{counted(profile.samples, 'sample')} in {counted(profile.shards, 'shard')}, {human_bytes(profile.bytes)}"
    lines = [f"{about}, {profile.loss_tokens:,} loss tokens{bad}"]
    lines += [f"  {count:,} x {reason}" for reason, count in list(profile.bad_by_reason.items())[:MOST_REASONS]]
    if profile.overflow is not None and (cut := overflow_words(profile.overflow)):
        lines.append(f"above TextPreprocessor.max_tokens: {'; '.join(cut)}")
    if (caps := profile.caps) is not None:
        of_each = (f"{phase} {cap:,} ({caps.above[phase]:,} samples above)" for phase, cap in caps.max_tokens.items())
        become = {"own": "get a microbatch each", "drop": "are left out", "error": "would be refused"}[caps.oversize]
        lines.append(f"max_tokens: {', '.join(of_each)}; {caps.samples:,} samples above it {become}")
    for finding in findings(profile):
        of = f" It is {finding.key!r} of {finding.shard.rsplit('/', 1)[-1]}." if finding.shard else ""
        lines.append(f"- {finding.text}{of}")
    lines += unread_lines({"names": profile.unread, "others": profile.unread_others})
    shown = [("What sources give in an epoch", tables.sources(profile))] if profile.sources else []
    shown.append((f"What samples are made of{stored_words(profile)}", tables.modalities(profile)))
    positions = f"Positions per sample, of those in the phase{stored_words(profile)}"
    shown += [(positions, tables.phases(profile)), _scales(profile)]
    if grouped := [scale for scale in profile.scales if scale.groups > 1]:
        shown.append(_scopes(profile, grouped))
    notes = (Text(f"- {note}") for note in _notes(profile))
    return Group(*map(Text, lines), *(_printed(title, table) for title, table in shown), *notes)


def _printed(title: str, table: pa.Table) -> Table:
    printed = plain_table(f"\n{title}", *table.column_names)
    forms = tables.formats(table)
    for column, form in zip(printed.columns, forms, strict=True):
        column.justify = "left" if form in (TEXT, tables.DATA) else column.justify
    for values in zip(*table.to_pydict().values(), strict=True):
        cells = zip(values, forms, strict=True)
        printed.add_row(*(Text(tables.written(cell, "{:.1%}" if form == SHARE else form)) for cell, form in cells))
    return printed


def _scales(profile: Profile) -> tuple[str, pa.Table]:
    counted = " and micro-steps" if profile.caps and profile.meets_in_micro_steps else ""
    rows: list[dict[str, Any]] = []
    for scale in profile.scales:
        row: dict[str, Any] = {"ranks": f"{scale.ranks:,}" + (" r" if scale.with_replacement else "")}
        row |= {"GPUs": f"{scale.gpus:,}"} if profile.model_parallel > 1 else {}
        row["batch"] = f"{scale.global_batch_size or 0:,}"
        if scale.global_batch_size is None:
            row["batch"] = f"{scale.global_batch_tokens:,} tokens ({scale.samples:,.0f})"
        for name, its in [*scale.phases.items(), ("step", scale.step)]:
            star = "" if name == "step" or name in profile.balanced_phases else " *"
            row[name] = f"{its.unbalanced:.2f} -> {its.balanced:.2f}{star}"
        row |= {"bound": f"{scale.step.lower_bound:.2f}", "speedup": f"{scale.speedup:.2f}x"}
        row["per phase"] = _per_phase_speedup(profile, scale.per_phase_speedup)
        dealt, planned = scale.scopes["none"], scale.scopes["global"]
        row |= {"micro-steps": f"{dealt.microbatches:.1f} -> {planned.microbatches:.1f}"} if profile.caps else {}
        row |= {"fill": f"{dealt.fill:.1%} -> {planned.fill:.1%}"} if planned.fill is not None else {}
        rows.append(row)
    title = f"Imbalance, max/mean over ranks{counted}: unbalanced -> balanced (1.00 is perfect)"
    return title, _of_rows(rows)


def _of_rows(rows: list[dict[str, Any]]) -> pa.Table:
    columns = {name: TEXT if name in ("ranks", "scope") else SIZES for name in rows[0]}
    return tables.made(columns, [list(row.values()) for row in rows])


def _scopes(profile: Profile, grouped: list[Figures]) -> tuple[str, pa.Table]:
    """Return the scopes of the numbers of ranks that make several groups."""
    rows: list[dict[str, Any]] = []
    for scale in grouped:
        for number, (name, scope) in enumerate(scale.scopes.items()):
            row: dict[str, Any] = {"ranks": f"{scale.ranks:,}" if number == 0 else "", "scope": name}
            for phase, value in scope.phases.items():
                row[phase] = f"{value:.2f}" + ("" if phase in profile.balanced_phases else " *")
            row |= {"step": f"{scope.step:.2f}", "speedup": f"{scope.speedup:.2f}x"}
            apart = scope.per_phase
            row["per phase"] = "-" if apart is None else _per_phase_speedup(profile, apart.speedup)
            row |= {"micro-steps": f"{scope.microbatches:.1f}"} if profile.caps else {}
            row |= {"own streams": f"{scope.own_streams:.0%}"}
            row["groups/shard"] = f"{scope.groups_per_shard:.1f} of {scale.groups:,}"
            if scope.node is not None:
                row |= {"cache hits": f"{scope.node.hits:.0%}", "fetched/node": human_bytes(scope.node.fetched_bytes)}
            rows.append(row)
    size = grouped[0].group_size
    return f"Scopes, in groups of {size} ranks: max/mean over ranks, and who reads what", _of_rows(rows)


def _per_phase_speedup(profile: Profile, speedup: float) -> str:
    return f"{speedup:.2f}x" if len(profile.balanced_phases) > 1 else "-"


def _notes(profile: Profile) -> list[str]:
    scales, reads = profile.scales, profile.read_amplification
    waiting = "after each" if profile.caps is None else "after each in each micro-step"
    if not profile.meets_in_micro_steps:
        waiting = "at its end only"
    notes = [f"step: the cost model's phases, ranks waiting for each other {waiting}; speedup: an estimate from costs"]
    if not profile.has_cost_model:
        notes = [f"step: all phases, ranks meeting {waiting}; speedup: a ratio of positions, not of time"]
    if any(scale.scopes["global"].fill is not None for scale in scales):
        notes.append("fill: tokens of samples over those of all microbatches; loads count padding, means do not")
    if profile.layout == "padded":
        notes.append("LLM rows are padded to the longest of their microbatch; the mean counts no padding, loads do")
    if profile.ranks_left_out:
        notes.append(left_out_words(profile))
    if profile.model_parallel > 1:
        notes.append(f"a rank is {profile.model_parallel} GPUs, which get the same samples")
    notes += [
        f"per phase, {scale.ranks:,} ranks in nodes of {scale.group_size}: features that cross nodes, "
        + ", ".join(f"{phase} {share:.1%} of the rows" for phase, share in scale.rows_between_groups.items())
        for scale in scales
        if scale.groups > 1 and scale.rows_between_groups
    ]
    unnamed = [name for name in profile.phases if name not in profile.balanced_phases]
    if unnamed:
        notes.append(f"*: {' and '.join(unnamed)}: not balanced and not in the step: the cost model does not name them")
    if any(scale.with_replacement for scale in scales):
        few = f"the dataset ({counted(profile.samples, 'sample')}) has less than this global batch"
        notes.append(f"r: {few}, so samples were drawn with replacement")
    read = {
        "by range, in any scope": reads.by_range,
        "where every shard is read whole, once": reads.whole_shards,
        "for Parquet, if each sample reads the column chunks of its row group": reads.by_chunk,
    }
    if said := [f"{ratio:.2f} {how}" for how, ratio in read.items() if ratio is not None]:
        notes.append(f"bytes read for each byte used: {'; '.join(said)}")
    if alone := [scale for scale in scales if scale.groups == 1]:
        ranks = " and ".join(f"{scale.ranks:,}" for scale in alone)
        notes.append(f"{ranks} ranks are one group (of up to {scales[0].group_size}), where scopes do not differ")
        if (node := alone[0].scopes["global"].node) is not None:
            fetched = (
                f"{node.hits:.0%} hits from the second epoch on, {human_bytes(node.fetched_bytes)} fetched in each"
            )
            notes.append(f"{ranks} ranks on one node with a cache: {fetched}")
    return [*notes, *(note for scale in scales for note in _of_other_steps(scale))]


def _of_other_steps(scale: Figures) -> list[str]:
    """Say what other steps would cost."""

    def micro_steps(microbatches: float) -> str:
        return f" ({microbatches:.1f} micro-steps)" if everywhere.microbatches > 1 else ""

    notes, everywhere = [], scale.scopes["global"]
    if scale.better_tokens is not None:
        filled = f"steps of {scale.better_tokens:,} tokens would fill their microbatches"
        notes.append(f"{scale.ranks:,} ranks: {filled}, those of {scale.global_batch_tokens:,} do not")
    if not scale.changes:
        return notes
    others = []
    for change in scale.changes:
        size = "batch_tokens" if change.change == "batch_size" and scale.batch_size is None else change.change
        what = f"with {change.factor} times the {size}" if change.factor else f"without {size}"
        drawn = ", of samples drawn with replacement" if change.with_replacement else ""
        others.append(f"{change.step:.2f} {what}{micro_steps(change.microbatches)}{drawn}")
    if (tokens := scale.settings.get("tokens")) is not None:
        cost = 1 / (1 - tokens.waiting)
        others.append(f"{cost:.2f} in steps of as many tokens{micro_steps(tokens.microbatches)}")
    now = f"{scale.step.balanced:.2f}{micro_steps(everywhere.microbatches)}"
    return [*notes, f"{scale.ranks:,} ranks: a step costs {now} of an even one; {'; '.join(others)}"]
