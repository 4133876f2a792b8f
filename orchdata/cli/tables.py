"""The profile in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchdata.cli.command import human_bytes, overflow_words, plain_table, unread_lines
from orchdata.loaders.amounts import counted
from orchdata.profiling import summary
from orchdata.profiling.summary import DATA, SHARE, TEXT, findings, left_out_words, step_words, stored_words

if TYPE_CHECKING:
    from orchdata.profiling.profile import Profile

MOST_REASONS = 5


def profile_table(profile: Profile) -> RenderableType:
    """Render the sentences and tables of a profile, as the page has them."""
    # What the data set holds, in lines.
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
        above = "above it" if profile.teams is None else "above it in the largest team"
        lines.append(f"max_tokens: {', '.join(of_each)}; {caps.samples:,} samples {above} {become}")
    for finding in findings(profile):
        of = f" It is {finding.key!r} of {finding.shard.rsplit('/', 1)[-1]}." if finding.shard else ""
        lines.append(f"- {finding.text}{of}")
    lines += unread_lines({"names": profile.unread, "others": profile.unread_others})

    # The tables.
    main, stored = profile.main_scale, stored_words(profile)
    waiting = "How uneven ranks are, in positions, not time"
    if profile.has_cost_model:
        waiting = "How long ranks wait, as a share of the step by your cost model"
    shown = [("What sources give in an epoch", summary.sources(profile, profile.sources))] if profile.sources else []
    shown += [
        (f"What samples are made of{stored}", summary.modalities(profile, "samples", "parts")),
        (f"Positions per sample, of those in the phase{stored}", summary.phases(profile)),
        (waiting, summary.settings(profile)),
    ]
    if (in_phases := summary.waiting_in_phases(main)) is not None:
        shown.append((f"In which phases, at {step_words(main)}", in_phases))
    if any(scale.groups > 1 for scale in profile.scales):
        shown.append(("How many groups of ranks read from a shard", summary.groups(profile.scales)))
    shown.append((f"How much of a batch is padding, at {step_words(main)}", summary.layouts(profile)))

    notes = [left_out_words(profile)] if profile.ranks_left_out else []
    if any(scale.less_than_a_step for scale in profile.scales):
        notes.append("all: the data set has less than this global batch, so all of it was planned as one")
    reads = profile.read_amplification
    read = {
        "by range": reads.by_range,
        "where every shard is read whole, once": reads.whole_shards,
        "for Parquet, if each sample reads the column chunks of its row group": reads.by_chunk,
    }
    if said := [f"{ratio:.2f} {how}" for how, ratio in read.items() if ratio is not None]:
        notes.append(f"bytes read for each byte used: {'; '.join(said)}")
    return Group(
        *map(Text, lines),
        *(_printed(title, table) for title, table in shown),
        *(Text(f"- {note}") for note in notes),
    )


def _printed(title: str, table: summary.Table) -> Table:
    printed = plain_table(f"\n{title}", *table.columns)
    forms = ["{:.1%}" if form == SHARE else form for form in table.columns.values()]
    for column, form in zip(printed.columns, forms, strict=True):
        column.justify = "left" if form in (TEXT, DATA) else column.justify
    for row in table.rows:
        printed.add_row(*(Text(summary.written(cell, form)) for cell, form in zip(row, forms, strict=True)))
    return printed
