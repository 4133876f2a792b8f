"""The report: a profile, and some samples, as one page of HTML without a script, which loads nothing; and the view of a
notebook.

Profile --sentences, tables, drawings--+
ShardDataset | Mixture --samples-------+--> HTML --> a file, whole or not at all

Drawings are SVG whose text stays text, and whose colours come from the page's style. Each is 340 wide, which fits a
phone. Labels are ours: no string of the data is drawn.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import unchosen_rows
from orchdata.html import bar, check_plots, number, paragraph, plain, shown, view
from orchdata.html import table as html_table
from orchdata.loaders.amounts import counted
from orchdata.loaders.index.index import Index
from orchdata.loaders.storage.local import write_whole
from orchdata.loaders.storage.remote.urls import identity
from orchdata.profiling import summary
from orchdata.profiling.content import Figures
from orchdata.profiling.planned import SETTINGS, SettingName
from orchdata.profiling.summary import (
    CODE,
    DATA,
    LABELS,
    SHARE,
    TEXT,
    Finding,
    Table,
    arguments_of_call,
    call_of,
    findings,
    left_out_words,
    step_words,
    stored_words,
)
from orchdata.showing import Shown, sample_html, with_pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_MOST_ROWS_OF_SOURCES: Final = 1000
_MOST_DRAWN: Final = 10
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
    ("shared by teams", "2, 4, 8, ... ranks share a long sequence; what sharing costs counts as waiting"),
    ("points", "a difference of two shares: from 9 % to 12 % are 3 points"),
)


def profile_view(profile: Figures) -> str:
    """Return the view of a notebook. It names no sample: `Profile.write_html` writes a page of all figures."""
    scale, unit, waits = profile.main_scale, "in positions, not time", "less positions than the fullest rank"
    if profile.has_cost_model:
        unit, waits = "by your cost model", "ranks wait"
    rows = [(LABELS[name], its.waiting, its.costliest) for name, its in scale.settings.items()]
    waiting = Table({"balanced": TEXT, waits: SHARE, "costliest step over an even one": "{:.2f}"}, rows)
    return view(
        f"Profile of {counted(profile.samples, 'sample')} in {counted(profile.shards, 'shard')}",
        f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in profile.summary)}</ul>",
        _table(summary.modalities(profile)),
        paragraph(f"At {step_words(scale)}, {unit}:") + _table(waiting),
    )


def _table(table: Table, series: Callable[[int, int], int] = lambda row, column: 0) -> str:
    """Return a table as HTML. `series`: row and column of a share -> colour of its bar."""
    forms = list(table.columns.values())
    texts = [place for place, form in enumerate(forms) if place == 0 or form in (TEXT, DATA, CODE, SHARE)]
    rows = []
    for row, values in enumerate(table.rows):
        cells = []
        for column, (value, form) in enumerate(zip(values, forms, strict=True)):
            text = escape(summary.written(value, form))
            if form == SHARE:
                text = bar(value, text, series(row, column))
            elif value is not None and form in (DATA, CODE):
                text = f"<bdi>{text}</bdi>" if form == DATA else f"<code>{text}</code>"
            cells.append(text)
        rows.append(cells)
    return html_table(list(table.columns), rows, numbers_from=texts[-1] + 1)


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _folded(title: str, content: str) -> str:
    """Return HTML that a click opens; print shows it."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _figure(drawing: str, caption: str, below: str = "") -> str:
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption>{below}</figure>"


def page_of(profile: Figures, samples: Sequence[Shown], *, named: bool) -> str:
    """Return the page. `named`: keys, texts, pictures and error texts of samples may be on it."""
    urls = [sample.shard for sample in profile.largest] + [shard.name for shard in profile.content.shards]
    names = ShardNames([*urls, *(each.shard for each in profile.failures), *(each["shard"] for each in samples)])
    # Each modality has the colour of its phase; the LLM has that of text.
    others = dict.fromkeys(name for name in (*profile.modalities, *profile.phases) if name not in ("text", "llm"))
    colours = {"text": 0, "llm": 0} | {name: 1 + place % 6 for place, name in enumerate(others)}
    holds = "This page holds no text, picture, key or error text of a sample."
    if named:
        holds = (
            f"This page holds data: keys of samples, reasons of failures, and {counted(len(samples), 'sample')}. Mind "
            "who gets it."
        )
    about = (
        f"{counted(profile.samples, 'sample')} in {counted(profile.shards, 'shard')}, "
        f"{counted(profile.loss_tokens, 'loss token')}, {number(profile.bytes)} bytes. Sizes of media and tokens "
        "are those of the recipe that was given."
    )
    items = "".join(f"<li>{_finding(finding, names, named=named)}</li>" for finding in findings(profile))
    call = Table({"argument": CODE, "reason": TEXT}, arguments_of_call(profile))
    of_a_step = paragraph(f"For {step_words(profile.main_scale)}:")
    drawn = "".join(sample_html(sample, names, names.in_text) for sample in samples)
    shown_as = paragraph("Drawn at random, in the order of the data. Text that is trained is underlined.")
    unread = summary.unread(profile)
    parts = [
        "<h1>What this data set costs to train on</h1>",
        f'<p class="note">{escape(holds)}</p>',
        paragraph(about),
        paragraph(_BYTES) if profile.text_is_bytes else "",
        f'<ul class="summary">{items}</ul>',
        _section("The call that follows", of_a_step, f"<pre>{escape(call_of(profile))}</pre>", _table(call)),
        _content(profile, colours),
        _lengths(profile, colours),
        _scales(profile, colours),
        _section(
            "How much of a batch is padding",
            paragraph(f"LLM microbatches at {step_words(profile.main_scale)}, balanced over all ranks."),
            _table(summary.layouts(profile)),
        ),
        _largest(profile, names, named=named),
        _unlike(profile, names, colours),
        _failures(profile, names, named=named),
        _section(
            "Fields that are not read",
            _table(unread) if unread.rows else paragraph("None, as far as the index says."),
        ),
        _section(counted(len(samples), "sample"), shown_as, f'<div class="samples">{drawn}</div>') if samples else "",
        _section("Words", _table(Table({"word": TEXT, "meaning": TEXT}, _WORDS))),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>orchdata report</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


class ShardNames:
    """Names of shards relative to their common folder, without queries and user names of their URLs."""

    def __init__(self, urls: Sequence[str]) -> None:
        names = [identity(url) for url in urls] or [""]
        start = os.path.commonprefix(names)  # noqa: RUF071 - names are cut after their last common slash
        self._folder = start[: start.rfind("/") + 1]

    def in_text(self, text: str) -> str:
        """Return a message in which shards, too, are named relative to their common folder."""
        return text.replace(self._folder, "") if len(self._folder) > 1 else text

    def __call__(self, url: str) -> str:
        name = identity(url)
        return name[len(self._folder) :] if len(name) > len(self._folder) else name.rsplit("/", 1)[-1]


def _finding(finding: Finding, names: ShardNames, *, named: bool) -> str:
    text = escape(finding.text)
    if not finding.shard:
        return text
    key = f"{shown(finding.key, 120)} of " if named else "in "
    return f"{text} It is {key}{shown(names(finding.shard), 120)}."


def _content(profile: Figures, colours: Mapping[str, int]) -> str:
    joint, rows = profile.content.joint, list(profile.modalities)
    caption = f"Share of a sample's LLM tokens in {joint.modalities[0]}"
    if len(joint.modalities) == 2:
        caption += f" (first) and in {joint.modalities[1]} (second). A larger square is more samples"
    as_table = _folded("as a table", _table(summary.joint_shares(joint)))
    return _section(
        f"What samples are made of{stored_words(profile)}",
        _table(summary.modalities(profile, "samples", "parts"), lambda row, _: colours[rows[row]]),
        _table(summary.combinations(profile)),
        f'<div class="plots">{_figure(draw_shares("shares", joint), caption + ".", as_table)}</div>',
    )


def _lengths(profile: Figures, colours: Mapping[str, int]) -> str:
    caps = {} if profile.caps is None else profile.caps.max_tokens
    drawn = []

    def draw(ids: str, name: str, its: Figures, cap: int | None, unit: str, caption: str) -> None:
        if its.samples:
            svg = draw_lengths(ids, its.bins, its.percentiles, cap, unit, colours[name])
            below = _folded("as a table", "".join(map(_table, summary.bins_of(its, unit))))
            drawn.append(_figure(svg, caption, below))

    for place, (name, its) in enumerate(profile.modalities.items()):
        caption = f"{name}: LLM tokens that it gives a sample, over samples that have it."
        draw(f"tokens{place}", name, its.lengths, None, "LLM tokens", caption)
    for place, (name, its) in enumerate(profile.phases.items()):
        caption = f"Phase {name}: positions that it computes of a sample."
        draw(f"positions{place}", name, its, caps.get(name), "positions", caption)
    return _section(f"How long samples are{stored_words(profile)}", f'<div class="plots">{"".join(drawn)}</div>')


def _scales(profile: Figures, colours: Mapping[str, int]) -> str:
    scales = profile.scales
    settings = [name for name in SETTINGS if any(name in scale.settings for scale in scales)]
    some_short = any(scale.less_than_a_step for scale in scales)
    unit = "by your cost model" if profile.has_cost_model else "in positions, not time"
    caption = (
        f"Cost of a step over a perfectly even one, {unit}, against the number of ranks. Bars show one standard error "
        "over steps."
    )
    if some_short:
        caption += " Hollow: the data set has less than a step, so all of it was planned as one."
    of_rows = [settings.index(name) for scale in scales for name in scale.settings]
    parts = [
        f'<div class="plots">{_figure(draw_waiting("waiting", scales, settings), caption)}</div>',
        _table(summary.settings(profile), lambda row, _: of_rows[row]),
    ]
    in_phases = summary.waiting_in_phases(profile.main_scale)
    if in_phases is not None:
        of_columns = [colours.get(title.removeprefix("in "), 0) for title in in_phases.columns]
        parts.append(f"<h3>In which phases, at {escape(step_words(profile.main_scale))}</h3>")
        parts.append(_table(in_phases, lambda _, column: of_columns[column]))
    if grouped := [scale for scale in scales if scale.groups > 1]:
        streams = ", ".join(f"od.Shuffle(streams={scale.streams}) at {scale.ranks:,} ranks" for scale in grouped)
        parts.append("<h3>How many groups of ranks read from a shard</h3>" + _table(summary.groups(scales)))
        parts.append(f'<p class="note">{escape(f"Groups a shard: with {streams}.")}</p>')
    parts += [paragraph("all: the data set has less than a step.")] if some_short else []
    parts += [paragraph(left_out_words(profile))] if profile.ranks_left_out else []
    return _section("What ranks wait for" if profile.has_cost_model else "How uneven ranks are", *parts)


def _largest(profile: Figures, names: ShardNames, *, named: bool) -> str:
    scale = profile.main_scale
    text = (
        f"Step at least: where one rank has the whole sample, a step of {scale.samples / scale.ranks:.3g} samples a "
        "rank costs at least so many times an even one, on any number of ranks. The last columns are positions."
    )
    return _section("The largest samples", paragraph(text), _table(summary.largest(profile, names, named=named)))


def _unlike(profile: Figures, names: ShardNames, colours: Mapping[str, int]) -> str:
    content, modalities = profile.content, list(profile.modalities)
    of_columns = [0, *(colours[name] for name in modalities), 0, 0]
    parts: list[str] = []
    if profile.sources:
        # The largest sources, and of all others a folded table.
        sources = sorted(profile.sources, key=lambda name: -profile.sources[name].tokens)
        parts = ["<h3>What sources give in an epoch</h3>", _table(summary.sources(profile, sources[:_MOST_DRAWN]))]
        if others := sources[_MOST_DRAWN:]:
            left = len(others) - _MOST_ROWS_OF_SOURCES
            rest = paragraph(f"and {left:,} more sources") if left > 0 else ""
            folded = _table(summary.sources(profile, others[:_MOST_ROWS_OF_SOURCES])) + rest
            parts.append(_folded(f"{len(others):,} smaller sources", folded))
        differ = sorted(content.sources, key=lambda each: -each.difference)[:_MOST_DRAWN]
        parts.append("<h3>Sources that differ most from the whole</h3>")
        parts.append(_table(summary.unlike(differ, "source", str, modalities), lambda _, column: of_columns[column]))
    if content.shards:
        parts.append("<h3>Shards that differ most from the whole</h3>")
        table = summary.unlike(content.shards, "shard", names, modalities)
        parts.append(_table(table, lambda _, column: of_columns[column]))
    else:
        parts.append(paragraph("No shard of at least 20 samples differs much from the whole."))
    return _section(f"Sources and shards that differ{stored_words(profile)}", *parts)


def _failures(profile: Figures, names: ShardNames, *, named: bool) -> str:
    if not profile.bad_by_reason:
        which = "No chosen sample" if profile.unchosen else "No sample"
        return _section("Failures", paragraph(f"{which} failed while it was indexed. {_HEADERS}"))
    counts = profile.bad_by_reason
    if not named:
        # Reasons up to what they quote of a sample, or of an exception that quotes it.
        short: Counter[str] = Counter()
        for reason, count in counts.items():
            short[re.split(r"[:('\"`]", reason, maxsplit=1)[0].strip() or "another reason"] += count
        counts = dict(short.most_common())
    rows = [(count, plain(names.in_text(reason))) for reason, count in list(counts.items())[:_MOST_REASONS]]
    parts = [paragraph(_HEADERS), _table(Table({"samples": "{:,}", "reason": DATA}, rows))]
    if (more := len(counts) - _MOST_REASONS) > 0:
        parts.append(paragraph(f"and {more:,} more reasons"))
    if named:
        table = Table(
            dict.fromkeys(("shard", "key", "field", "reason"), DATA),
            [
                [
                    plain(names(its.shard), 120),
                    plain(its.key, 120),
                    plain(its.field, 60),
                    plain(names.in_text(its.reason)),
                ]
                for its in profile.failures
            ],
        )
        parts += ["<h3>Examples</h3>", _table(table)]
    return _section("Failures", *parts)


def check_report(path: str | Path) -> None:
    """Raise ValueError, OSError or PackageError before a profile is made if no report could be written."""
    check_plots()
    target = Path(path).resolve()
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise ValueError(f"the report cannot be written to {target}: give a file in a folder that you may write into")


def write_report(
    profile: Figures, path: str | Path, dataset: ShardDataset | Mixture | None, index: Index | None, samples: int
) -> None:
    """Write the page with some usable samples of a data set, drawn at random, whole or not at all. Raises StorageError.

    Without a data set there are none; with `samples` of 0 the page names no sample either.
    """
    check_report(path)
    drawn: list[Shown] = []
    if dataset is not None and index is not None and samples:
        unused = np.union1d(unchosen_rows(dataset, index), index.bad_rows())
        usable = np.delete(np.arange(index.num_rows), unused)
        count = min(samples, len(usable))
        places = np.random.default_rng(profile.seed).choice(len(usable), size=count, replace=False, shuffle=False)
        drawn = with_pictures(dataset, index, sorted(usable[places].tolist()))
    page = page_of(profile, drawn, named=samples > 0)
    # A file that exists keeps its permissions, and a link its target.
    target = Path(path).resolve()
    mode = stat.S_IMODE(target.stat().st_mode) if target.is_file() else None
    # Strings of the data have no lone surrogate left, which UTF-8 lacks; another name may have one.
    write_whole(target, page.encode("utf-8", "backslashreplace"))
    if mode is not None:
        target.chmod(mode)


LIGHT: Final = (
    "--paper:#ffffff;--ink:#1a1a1a;--muted:#555555;--line:#c8c8c8;--soft:#f2f4f7;"
    "--s0:#005a9c;--s1:#b34700;--s2:#00704d;--s3:#9b3b77;--s4:#6b5b00;--s5:#404040;--s6:#6a35b8;--s7:#a0211c;"
)
DARK: Final = (
    "--paper:#14171c;--ink:#ececec;--muted:#b4b9c2;--line:#4a505a;--soft:#20252d;"
    "--s0:#7cc4ff;--s1:#ffa061;--s2:#4fd6a6;--s3:#f29ccc;--s4:#e6d36b;--s5:#d0d0d0;--s6:#c5a3ff;--s7:#ff9d94;"
)
STYLE: Final = f"""
:root{{color-scheme:light dark;{LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}
@media print{{:root{{color-scheme:light;{LIGHT}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1180px;padding:16px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}}
bdi,code,pre,.sample p{{overflow-wrap:anywhere}}
h1{{font-size:24px;margin:8px 0}}
h2{{font-size:19px;margin:32px 0 8px;border-top:1px solid var(--line);padding-top:16px}}
h3{{font-size:15px;margin:16px 0 4px}}
p{{max-width:75ch;margin:8px 0}}
.note,figcaption,summary{{color:var(--muted);font-size:13px}}
.summary li{{margin:6px 0;max-width:75ch}} .summary{{padding-left:20px;font-size:16px}}
.plots{{display:flex;flex-wrap:wrap;gap:16px}}
figure{{margin:8px 0;flex:0 1 340px;max-width:340px}} figure svg{{display:block;max-width:100%}}
table{{border-collapse:collapse;width:100%;font-size:13px;margin:8px 0}}
th,td{{text-align:left;vertical-align:top;padding:4px 8px;border-bottom:1px solid var(--line)}}
th{{color:var(--muted);font-weight:600}}
th.n,td.n{{text-align:right;font-variant-numeric:tabular-nums}}
.bar{{display:inline-block;width:90px;height:10px;background:var(--soft);border:1px solid var(--line);
vertical-align:middle;print-color-adjust:exact;-webkit-print-color-adjust:exact}}
td:has(>.bar){{white-space:nowrap}} td:has(>bdi){{min-width:9em}}
.bar>span{{display:block;height:100%}}
pre{{background:var(--soft);padding:12px;white-space:pre-wrap;font:13px/1.5 ui-monospace,monospace}}
.samples{{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:16px}}
.sample{{border:1px solid var(--line);padding:12px;min-width:0}} .sample p{{white-space:pre-wrap;font-size:13px}}
.trained{{background:var(--soft);border-bottom:2px solid var(--s0)}}
.picture{{line-height:0}} .picture img{{max-width:100%;height:auto}}
@media (max-width:1000px){{.bar{{width:48px}}}}
@media (max-width:640px){{
thead{{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}}
tr{{display:block;border-bottom:1px solid var(--line);padding:6px 0}}
td,td.n{{display:flex;align-items:center;justify-content:space-between;gap:12px;border:0;padding:2px 0;
text-align:right}}
td::before{{content:attr(data-of);color:var(--muted);text-align:left;flex:0 0 40%}}
.samples{{grid-template-columns:minmax(0,1fr)}}
}}
@media print{{
body{{padding:0;max-width:none}}
h1,h2,h3,h2+p,thead{{break-after:avoid}} h2{{margin-top:20px;padding-top:10px}}
figure>svg,tr,h2+p,.sample,.summary li{{break-inside:avoid}}
.plots{{display:block;orphans:1;widows:1}} figure{{display:inline-block;width:340px;vertical-align:top}}
figure:only-child{{display:block}}
th,td{{padding:2px 6px}}
.plots table{{font-size:11px;line-height:1.2;margin:4px 0}} .plots th,.plots td{{padding:0 6px}}
details::details-content{{content-visibility:visible;block-size:auto}}
.samples{{grid-template-columns:repeat(3,minmax(0,1fr));gap:8px}} .sample{{padding:8px}}
.picture img{{max-height:200px}}
}}
"""

WIDTH: Final = 340
_MARKS: Final = "oXsD^vP*"
# Colours that stand for those of the style sheet until the drawing is text.
_STANDS_FOR: Final = {"#010101": "--ink", "#010102": "--muted", "#010103": "--line", "#010104": "--paper"} | {
    f"#01020{number}": f"--s{number}" for number in range(8)
}
_OF: Final = {name: colour for colour, name in _STANDS_FOR.items()}


@contextmanager
def _drawing(name: str, height: int) -> Iterator[tuple[Axes, list[str]]]:
    """Draw in the axes that are given; the list has the SVG afterwards: a part of a page, with ids of its own."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 11.5,
        **dict.fromkeys(inked, _OF["--ink"]),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), _OF["--muted"]),
        "grid.color": _OF["--line"],
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.unicode_minus"), False),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    }
    drawn: list[str] = []
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure.add_subplot(), drawn
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for side in ("width", "height"):  # in pixels
        svg = re.sub(rf'(<svg[^>]*?) {side}="([\d.]+)pt"', rf'\1 {side}="\2"', svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    for colour, variable in _STANDS_FOR.items():
        svg = svg.replace(colour, f"var({variable})")
    drawn.append(svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "", 1).replace("xlink:href", "href"))


def draw_lengths(
    name: str, bins: Sequence[int], percentiles: Mapping[str, int], cap: int | None, unit: str, series: int
) -> str:
    """Draw how many samples have which length, in bins from 2^b for b from 0, with median, 99th percentile and cap."""
    with _drawing(name, 190) as (axes, drawn):
        first = next((bit for bit, count in enumerate(bins) if count), 0)
        for bit, count in enumerate(bins[first:], first):
            axes.bar(2**bit * 1.5, count, width=2**bit * 0.9, color=_OF[f"--s{series}"])
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(_short)
        top = max(bins, default=1)
        marks = [("median", percentiles.get("p50"), "--"), ("99 %", percentiles.get("p99"), ":")]
        marks += [("cap", cap, "-")]
        for label, value, dashes in marks:
            if value:
                axes.axvline(value, color=_OF["--ink"], linestyle=dashes, linewidth=1.2, label=label)
        axes.set_ylim(0, top * 1.05)
        _count_axis(axes)
        axes.set_xlabel(unit)
        axes.set_ylabel("samples")
        _legend(axes, 3)
    return drawn[0]


def draw_shares(name: str, joint: Figures) -> str:
    """Draw how many samples have which shares of their tokens in one or two modalities."""
    with _drawing(name, 300 if len(joint.modalities) == 2 else 190) as (axes, drawn):
        bins = len(joint.samples)
        if len(joint.modalities) == 1:
            for place, (count,) in enumerate(joint.samples):
                axes.bar((place + 0.5) / bins, count, width=0.09, color=_OF["--s0"])
            _count_axis(axes)
            axes.set_ylabel("samples")
        else:
            from matplotlib.patches import Rectangle

            most = max(max(row) for row in joint.samples) or 1
            for i, row in enumerate(joint.samples):
                for j, count in enumerate(row):
                    if count:
                        # The area says how many samples there are, so no colour scale is needed.
                        side = max(0.12, (count / most) ** 0.5) / bins
                        x, y = (i + 0.5) / bins - side / 2, (j + 0.5) / bins - side / 2
                        axes.add_patch(Rectangle((x, y), side, side, color=_OF["--s0"]))
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
            axes.set_ylabel("share in the second")
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        axes.set_xlabel("share in the first" if len(joint.modalities) == 2 else "share of the sample's tokens")
    return drawn[0]


def draw_waiting(name: str, scales: Sequence[Figures], settings: Sequence[SettingName]) -> str:
    """Draw the cost of a step over a perfectly even one, against the number of ranks: a line for each setting, hollow
    where the data set has less than a step.
    """
    with _drawing(name, 330) as (axes, drawn):
        for number, setting in enumerate(settings):
            points = [(scale, scale.settings[setting]) for scale in scales if setting in scale.settings]
            colour = _OF[f"--s{number}"]
            costs = [1 / (1 - its.waiting) for _, its in points]
            axes.plot([scale.ranks for scale, _ in points], costs, color=colour, linewidth=1.2)
            for (scale, its), cost in zip(points, costs, strict=True):
                spread = 0.0 if its.waiting_error is None else its.waiting_error * cost**2
                axes.errorbar(scale.ranks, cost, yerr=spread, color=colour, linewidth=1, capsize=2)
                look: dict[str, Any] = {
                    "color": colour,
                    "markerfacecolor": "none" if scale.less_than_a_step else colour,
                }
                axes.plot(scale.ranks, cost, _MARKS[number], markersize=6, **look)
            axes.plot([], [], _MARKS[number], linestyle="-", color=colour, label=LABELS[setting])
        axes.set_xscale("log", base=2)
        axes.set_xticks([scale.ranks for scale in scales])
        axes.xaxis.set_major_formatter(lambda ranks, _: f"{ranks:,.0f}")
        axes.minorticks_off()
        axes.grid(visible=True, axis="y")
        axes.set_xlabel("ranks")
        axes.set_ylabel("cost of a step, 1 is even")
        _legend(axes, 2)
    return drawn[0]


def _legend(axes: Axes, columns: int) -> None:
    look = {"frameon": False, "borderpad": 0, "handlelength": 1.6, "fontsize": 11}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, **look)


def _count_axis(axes: Axes) -> None:
    """Label whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.yaxis.set_major_formatter(_short)


def _short(value: float, _: object = None) -> str:
    """Return a number for an axis: 800, 1,024, 64k, 1.3M."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / size * (10 if name == 'k' else 1):.3g}{name}"
    return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"
