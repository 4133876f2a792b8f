"""The report: a profile, and some samples, as one page of HTML without a script, which loads nothing.

Profile --sentences, tables, drawings--+
ShardDataset | Mixture --samples-------+--> HTML --> a file, whole or not at all
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchdata.loaders.amounts import counted
from orchdata.loaders.html.drawing import check_plots
from orchdata.loaders.html.elements import bar, figure, folded, paragraph, section, table
from orchdata.loaders.html.words import number, percent, shown
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.shared.access import Access
from orchdata.profiling.ranks.settings import SETTINGS
from orchdata.profiling.report.call import arguments_of_call, call_of
from orchdata.profiling.report.names import ShardNames
from orchdata.profiling.report.plots import LABELS, draw_lengths, draw_shares, draw_waiting
from orchdata.profiling.report.style import STYLE
from orchdata.profiling.report.summary import Finding, findings, left_out_words, step_words, stored_words

if TYPE_CHECKING:
    from orchdata.profiling.content import UnlikePart
    from orchdata.profiling.profile import Profile, SourceShare
    from orchdata.profiling.ranks.scales import Scale
    from orchdata.showing.samples import Shown

POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_MOST_ROWS_OF_SOURCES: Final = 1000
_MOST_DRAWN: Final = 10
_GIVEN: Final = ("LLM tokens", "samples", "passes")
_MOST_REASONS: Final = 10
_BYTES: Final = (
    "LLM tokens of text are UTF-8 bytes here, because the recipe has no tokenizer: give it that of your model."
)
_HEADERS: Final = "The index reads headers and texts: `orchdata verify` decodes every sample, and may find more."
_WORDS: Final = (
    ("shard", "a file with samples: a tar, a Parquet file, a list of records"),
    ("part", "one text, picture or recording of a sample"),
    ("LLM token", "what the language model reads: text, and what encoders give for pictures and sound"),
    ("phase", "a part of the model that all ranks run together: an encoder, or the LLM"),
    ("position", "what a phase computes: a patch of a picture, a frame of sound, an LLM token"),
    ("rank", "one of the data-parallel training processes, often a GPU"),
    ("micro-step", "one forward and backward of all ranks; a step may have several"),
    ("in groups, in a grid", "samples move inside groups of ranks alone, or inside groups and across them in turn"),
    ("steps in tokens", "steps of equally many LLM tokens, in place of equally many samples"),
    ("points", "a difference of two shares: from 9 % to 12 % are 3 points"),
)


def page_of(profile: Profile, views: Sequence[Shown], *, named: bool) -> str:
    """Return the page.

    Args:
        views: samples to show.
        named: keys, texts, pictures and error texts of samples may be on the page.
    """
    names = _shard_names(profile, views)
    holds = (
        f"This page holds data: keys of samples, reasons of failures, and {counted(len(views), 'sample')}. Mind who "
        "gets it."
        if named
        else "This page holds no text, picture, key or error text of a sample."
    )
    parts = [
        "<h1>What this data set costs to train on</h1>",
        f'<p class="note">{escape(holds)}</p>',
        paragraph(
            f"{counted(profile.samples, 'sample')} in {counted(profile.shards, 'shard')}, "
            f"{counted(profile.loss_tokens, 'loss token')}, {number(profile.bytes)} bytes. Sizes of media and tokens "
            "are those of the recipe that was given."
        ),
        paragraph(_BYTES) if profile.text_is_bytes else "",
        _summary(profile, names, named=named),
        _call(profile),
        _content(profile),
        _lengths(profile),
        _scales(profile),
        _layouts(profile),
        _largest(profile, names, named=named),
        _unlike(profile, names),
        _failures(profile, names, named=named),
        _unread(profile),
        _samples(views, names),
        section("Words", table(("word", "meaning"), _WORDS, numbers_from=99)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>orchdata report</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _shard_names(profile: Profile, views: Sequence[Shown]) -> ShardNames:
    urls = [sample.shard for sample in profile.largest] + [shard.name for shard in profile.content.shards]
    urls += [failure.shard for failure in profile.failures] + [sample["shard"] for sample in views]
    urls += [advice.largest_shard for scale in profile.scales for advice in scale.advice.values()]
    return ShardNames(urls)


def _summary(profile: Profile, names: ShardNames, *, named: bool) -> str:
    items = "".join(f"<li>{_finding(finding, names, named=named)}</li>" for finding in findings(profile))
    return f'<ul class="summary">{items}</ul>'


def _finding(finding: Finding, names: ShardNames, *, named: bool) -> str:
    text = escape(finding.text)
    if not finding.shard:
        return text
    key = f"{shown(finding.key, 120)} of " if named else "in "
    return f"{text} It is {key}{shown(names(finding.shard), 120)}."


def _content(profile: Profile) -> str:
    total = sum(modality.tokens for modality in profile.modalities.values()) or 1
    colours = _colours(profile)
    modalities = table(
        ("modality", "share of samples", "share of LLM tokens", "samples", "parts", "LLM tokens"),
        [
            (
                escape(name),
                bar(modality.share, percent(modality.share), colours[name]),
                bar(modality.tokens / total, percent(modality.tokens / total), colours[name]),
                f"{modality.samples:,}",
                f"{modality.parts:,}",
                f"{modality.tokens:,}",
            )
            for name, modality in profile.modalities.items()
        ],
        numbers_from=3,
    )
    combinations = table(
        ("samples of", "share of samples", "samples", "LLM tokens"),
        [
            (
                escape(" + ".join(combination.modalities) or "nothing"),
                bar(combination.samples / profile.samples, percent(combination.samples / profile.samples)),
                f"{combination.samples:,}",
                f"{combination.tokens:,}",
            )
            for combination in profile.content.combinations
        ],
        numbers_from=2,
    )
    joint = profile.content.joint
    caption = f"Share of a sample's LLM tokens in {joint.modalities[0]}"
    if len(joint.modalities) == 2:
        caption += f" (first) and in {joint.modalities[1]} (second). A larger square is more samples"
    return section(
        f"What samples are made of{stored_words(profile)}",
        modalities,
        combinations,
        f'<div class="plots">{figure(draw_shares("shares", joint), caption + ".", _joint_table(profile))}</div>',
    )


def _colours(profile: Profile) -> dict[str, int]:
    """Return the colour of each modality, which its phase has too; the LLM has that of text."""
    others = dict.fromkeys(name for name in (*profile.modalities, *profile.phases) if name not in ("text", "llm"))
    return {"text": 0, "llm": 0} | {name: 1 + place % 6 for place, name in enumerate(others)}


def _joint_table(profile: Profile) -> str:
    joint = profile.content.joint
    bins = len(joint.samples)
    rows = []
    for i, row in enumerate(joint.samples):
        for j, count in enumerate(row):
            if count:
                cell = [f"{100 * i // bins} to {100 * (i + 1) // bins} %"]
                if len(joint.modalities) == 2:
                    cell.append(f"{100 * j // bins} to {100 * (j + 1) // bins} %")
                rows.append((*cell, f"{count:,}"))
    return folded("as a table", table((*joint.modalities, "samples"), rows))


def _lengths(profile: Profile) -> str:
    drawn, colours = [], _colours(profile)
    caps = {} if profile.caps is None else profile.caps.max_tokens
    for place, (name, modality) in enumerate(profile.modalities.items()):
        its = modality.lengths
        if its.samples:
            svg = draw_lengths(f"tokens{place}", its.bins, its.percentiles, None, "LLM tokens", colours[name])
            below = folded("as a table", _bins(its.bins, its.percentiles, "LLM tokens"))
            drawn.append(figure(svg, f"{name}: LLM tokens that it gives a sample, over samples that have it.", below))
    for place, (name, phase) in enumerate(profile.phases.items()):
        if phase.samples:
            svg = draw_lengths(
                f"positions{place}", phase.bins, phase.percentiles, caps.get(name), "positions", colours[name]
            )
            below = folded("as a table", _bins(phase.bins, phase.percentiles, "positions"))
            drawn.append(figure(svg, f"Phase {name}: positions that it computes of a sample.", below))
    return section(f"How long samples are{stored_words(profile)}", f'<div class="plots">{"".join(drawn)}</div>')


def _bins(bins: Sequence[int], percentiles: Mapping[str, int], unit: str) -> str:
    rows = [(f"{2**bit:,} to {2 ** (bit + 1) - 1:,}", f"{count:,}") for bit, count in enumerate(bins) if count]
    named = [(name, f"{value:,}") for name, value in percentiles.items()]
    return table((unit, "samples"), rows) + table(("percentile", unit), named)


def _scales(profile: Profile) -> str:
    scales = profile.scales
    settings = [name for name in SETTINGS if any(name in scale.settings for scale in scales)]
    unit = "by your cost model" if profile.has_cost_model else "in positions, not time"
    caption = (
        f"Cost of a step over a perfectly even one, {unit}, against the number of ranks. Bars show one standard error "
        "over steps."
    )
    if any(scale.with_replacement for scale in scales):
        caption += " Hollow: the data set has fewer samples than a step, so they were drawn with replacement."
    shares = "waiting" if profile.has_cost_model else "unevenness"
    rows = [
        (
            f"{scale.ranks:,}",
            LABELS[name],
            bar(its.waiting, percent(its.waiting), settings.index(name)),
            "-" if its.waiting_error is None else f"{100 * its.waiting_error:.1f}",
            f"{its.samples:,.0f}",
            number(its.tokens),
            f"{its.microbatches:.1f}",
            f"{scale.steps}" + (" r" if scale.with_replacement else ""),
        )
        for scale in scales
        for name, its in scale.settings.items()
    ]
    columns = ("ranks", "setting", shares, "error, points", "samples", "LLM tokens", "micro-steps", "steps")
    return section(
        "What ranks wait for" if profile.has_cost_model else "How uneven ranks are",
        f'<div class="plots">{figure(draw_waiting("waiting", scales, settings), caption)}</div>',
        table(columns, rows, numbers_from=3),
        _phases(profile.main_scale, _colours(profile)),
        _groups(scales),
        paragraph("r: samples were drawn with replacement.") if any(each.with_replacement for each in scales) else "",
        paragraph(left_out_words(profile)) if profile.ranks_left_out else "",
    )


def _phases(scale: Scale, colours: Mapping[str, int]) -> str:
    """Where ranks wait, on the ranks that the summary speaks of."""
    with_phases = {name: its for name, its in scale.settings.items() if its.phases}
    if not with_phases:
        return ""
    phases = next(iter(with_phases.values())).phases
    rows = [
        (
            LABELS[name],
            *(bar(its.phases[phase], percent(its.phases[phase]), colours[phase]) for phase in phases),
        )
        for name, its in with_phases.items()
    ]
    return f"<h3>In which phases, at {escape(step_words(scale))}</h3>" + table(
        ("setting", *(f"in {phase}" for phase in phases)), rows, numbers_from=99
    )


def _groups(scales: Sequence[Scale]) -> str:
    rows = [
        (
            f"{scale.ranks:,}",
            f"{scale.groups:,} of {scale.group_size}",
            escape(name),
            f"{scope.groups_per_shard:.1f}",
            f"{scope.groups_per_shard_of_one_stream:.1f}",
        )
        for scale in scales
        if scale.groups > 1
        for name, scope in scale.scopes.items()
    ]
    if not rows:
        return ""
    streams = ", ".join(
        f"od.Shuffle(streams={scale.streams}) at {scale.ranks:,} ranks" for scale in scales if scale.groups > 1
    )
    return (
        "<h3>How many groups of ranks read from a shard</h3>"
        + table(("ranks", "groups", "scope", "groups a shard", "with one stream"), rows, numbers_from=3)
        + f'<p class="note">{escape(f"Groups a shard: with {streams}.")}</p>'
    )


def _layouts(profile: Profile) -> str:
    scale = profile.main_scale
    rows = [
        (
            escape(layout.layout + ("" if layout.length is None else f", {layout.length:,} tokens")),
            bar(layout.padding, percent(layout.padding)),
            f"{layout.microbatches:.1f}",
            f"{layout.steps}",
        )
        for layout in profile.layouts
    ]
    return section(
        "How much of a batch is padding",
        paragraph(f"LLM microbatches at {step_words(scale)}, balanced over all ranks."),
        table(("layout", "padding", "micro-steps", "steps"), rows, numbers_from=2),
    )


def _largest(profile: Profile, names: ShardNames, *, named: bool) -> str:
    phases = tuple(profile.phases)
    scale = profile.main_scale
    rows = [
        (
            shown(sample.key, 120) if named else "-",
            shown(names(sample.shard), 120),
            f"{sample.cost:,.1f}",
            f"{sample.step:.2f}",
            *(f"{sample.positions[phase]:,}" for phase in phases),
        )
        for sample in profile.largest
    ]
    columns = ("key", "shard", "cost over the mean", "step at least", *phases)
    text = (
        f"Step at least: where one rank has the whole sample, a step of {scale.samples / scale.ranks:.3g} samples a "
        "rank costs at least so many times an even one, on any number of ranks. The last columns are positions."
    )
    return section("The largest samples", paragraph(text), table(columns, rows, numbers_from=2))


def _unlike(profile: Profile, names: ShardNames) -> str:
    colours = {name: _colours(profile)[name] for name in profile.modalities}
    content, parts = profile.content, []
    if profile.sources:
        differ = sorted(content.sources, key=lambda each: -each.difference)[:_MOST_DRAWN]
        parts += [
            *_sources(profile.sources),
            "<h3>Sources that differ most from the whole</h3>",
            _shares_of([(shown(each.name, 120), each) for each in differ], "source", colours),
        ]
    if content.shards:
        parts += [
            "<h3>Shards that differ most from the whole</h3>",
            _shares_of([(shown(names(each.name), 120), each) for each in content.shards], "shard", colours),
        ]
    else:
        parts.append(paragraph("No shard of at least 20 samples differs much from the whole."))
    return section(f"Sources and shards that differ{stored_words(profile)}", *parts)


def _sources(sources: Mapping[str, SourceShare]) -> list[str]:
    """Draw the shares of the largest sources; if there are more, a folded table has the figures of all."""
    largest = sorted(sources, key=lambda name: -sources[name].tokens)[:_MOST_DRAWN]
    most = sources[largest[0]].share or 1.0

    def row(name: str, share: str) -> tuple[str, ...]:
        its = sources[name]
        return shown(name, 120), share, f"{its.tokens:,}", f"{its.samples:,}", f"{its.passes:.3g}"

    def drawn(names: Sequence[str], whole: float) -> str:
        rows = [row(name, bar(sources[name].share / whole, percent(sources[name].share))) for name in names]
        return table(("source", "share of tokens", *_GIVEN), rows, numbers_from=2)

    if len(sources) <= _MOST_DRAWN:
        return ["<h3>What sources give in an epoch</h3>", drawn(list(sources), 1.0)]
    listed = list(sources)[:_MOST_ROWS_OF_SOURCES]
    all_of_them = table(
        ("source", "share of tokens", *_GIVEN), [row(name, percent(sources[name].share)) for name in listed]
    )
    if more := len(sources) - len(listed):
        all_of_them += paragraph(f"and {more:,} more sources")
    return [
        f"<h3>What the {_MOST_DRAWN} largest of {len(sources):,} sources give in an epoch</h3>",
        drawn(largest, most),
        '<p class="note">A full bar is the share of the largest source.</p>',
        folded(f"{len(listed):,} sources as a table", all_of_them),
    ]


def _shares_of(named: Sequence[tuple[str, UnlikePart]], what: str, colours: Mapping[str, int]) -> str:
    rows = [
        (
            name,
            *(
                bar(each.shares[modality], percent(each.shares[modality]), colour)
                for modality, colour in colours.items()
            ),
            f"{each.samples:,}",
            f"{each.tokens_per_sample:,.0f}",
        )
        for name, each in named
    ]
    columns = (what, *(f"{name}, of tokens" for name in colours), "samples", "LLM tokens a sample")
    return table(columns, rows, numbers_from=1 + len(colours))


def _failures(profile: Profile, names: ShardNames, *, named: bool) -> str:
    if not profile.bad_by_reason:
        return section("Failures", paragraph(f"No sample failed while it was indexed. {_HEADERS}"))
    counts = profile.bad_by_reason if named else _without_texts(profile.bad_by_reason)
    rows = [(f"{count:,}", shown(names.in_text(reason))) for reason, count in list(counts.items())[:_MOST_REASONS]]
    reasons = paragraph(_HEADERS) + table(("samples", "reason"), rows, numbers_from=99)
    if (more := len(counts) - _MOST_REASONS) > 0:
        reasons += paragraph(f"and {more:,} more reasons")
    examples = ""
    if named:
        examples = "<h3>Examples</h3>" + table(
            ("shard", "key", "field", "reason"),
            [
                (
                    shown(names(each.shard), 120),
                    shown(each.key, 120),
                    shown(each.field, 60),
                    shown(names.in_text(each.reason)),
                )
                for each in profile.failures
            ],
            numbers_from=99,
        )
    return section("Failures", reasons, examples)


def _unread(profile: Profile) -> str:
    """Return the fields that no recipe reads; their names are those of columns and keys, not of samples."""
    rows = [(shown(name), f"{count:,}") for name, count in profile.unread.items()]
    rows += [("values of more fields", f"{profile.unread_others:,}")] if profile.unread_others else []
    if not rows:
        return section("Fields that are not read", paragraph("None, as far as the index says."))
    return section("Fields that are not read", table(("field", "samples that have it"), rows, numbers_from=1))


def _without_texts(counts: Mapping[str, int]) -> dict[str, int]:
    """Return reasons up to what they quote of a sample, or of an exception that quotes it."""
    short: Counter[str] = Counter()
    for reason, count in counts.items():
        short[re.split(r"[:('\"`]", reason, maxsplit=1)[0].strip() or "another reason"] += count
    return dict(short.most_common())


def _samples(views: Sequence[Shown], names: ShardNames) -> str:
    if not views:
        return ""
    from orchdata.showing.views import sample_html

    shown_samples = "".join(sample_html(view, names, names.in_text) for view in views)
    text = "Drawn at random, in the order of the data. Text that is trained is underlined."
    return section(counted(len(views), "sample"), paragraph(text), f'<div class="samples">{shown_samples}</div>')


def _call(profile: Profile) -> str:
    reasons = table(
        ("argument", "reason"),
        [(f"<code>{escape(each.source)}</code>", escape(each.reason)) for each in arguments_of_call(profile)],
        numbers_from=99,
    )
    text = f"For {step_words(profile.main_scale)}:"
    return section("The call that follows", paragraph(text), f"<pre>{escape(call_of(profile))}</pre>", reasons)


def check_report(path: str | Path) -> None:
    """Raise before a profile is made if no report could be written.

    Raises:
        ValueError: the folder is missing, or the path is not one for a file.
        PackageError: matplotlib is missing.
    """
    check_plots()
    try:
        target = Path(path).resolve()
        target.is_dir()
    except (OSError, ValueError) as error:
        raise ValueError(f"the report cannot be written to {os.fspath(path)!r}: {error}") from error
    if not target.parent.is_dir():
        raise ValueError(f"the report cannot be written to {target}: there is no folder {target.parent}; make it first")
    if target.is_dir():
        raise ValueError(f"the report cannot be written to {target}: it is a folder; give a file in it")
    if not os.access(target.parent, os.W_OK):
        raise ValueError(f"the report cannot be written to {target}: you may not write into {target.parent}")


def write_report(profile: Profile, path: str | Path, views: Sequence[Shown], *, named: bool) -> None:
    """Write the page of `page_of`, whole or not at all. Raises StorageError."""
    page = page_of(profile, views, named=named)
    # A file that exists keeps its permissions, and a link its target.
    target = Path(path).resolve()
    access = None
    if target.is_file():
        status = target.stat()
        access = Access(stat.S_IMODE(status.st_mode), status.st_gid)
    # Strings of the data have no lone surrogate left, which UTF-8 lacks; another name may have one.
    write_whole(target, page.encode("utf-8", "backslashreplace"), access)
