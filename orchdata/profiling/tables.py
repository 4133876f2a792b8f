"""A profile as tables of pyarrow, which the terminal, the page and a notebook render.

The metadata of a column say how its cells are written: a format of Python, SHARE, DATA or CODE. Text of the data is
without secrets and unseen characters, and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from orchdata.html import number, percent, plain
from orchdata.profiling.content import Figures
from orchdata.profiling.planned import SettingName

TEXT: Final = "{}"
DATA: Final = "data"
CODE: Final = "code"
SHARE: Final = "share"
COUNT: Final = "{:,}"
SIZES: Final = "{:>}"
"""Text that is a size: to the right, as numbers are."""
LABELS: Final[Mapping[SettingName, str]] = {
    "none": "none",
    "llm": "LLM tokens alone",
    "joint": "whole samples",
    "per_phase": "per phase",
    "grouped": "in groups",
    "grid": "in a grid",
    "tokens": "steps in tokens",
    "teams": "shared by teams",
    "peers": "shared by peers",
}


def made(columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> pa.Table:
    """Return a table. Columns are title -> how their cells are written; None is an empty cell."""
    cells = list(zip(*rows, strict=True)) or [()] * len(columns)
    arrays = [pa.array(values) for values in cells]
    fields = [
        pa.field(title, array.type, metadata={"format": form})
        for (title, form), array in zip(columns.items(), arrays, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def formats(table: pa.Table) -> list[str]:
    """Return how the cells of each column are written."""
    return [field.metadata[b"format"].decode() for field in table.schema]


def written(value: Any, form: str) -> str:
    """Return a cell as plain text."""
    if value is None:
        return "-"
    if form == SHARE:
        return percent(value)
    return str(value) if form in (DATA, CODE) else form.format(value)


def modalities(profile: Figures) -> pa.Table:
    total = sum(its.tokens for its in profile.modalities.values()) or 1
    columns = {"modality": TEXT, "share of samples": SHARE, "share of LLM tokens": SHARE}
    columns |= {"samples": COUNT, "parts": COUNT, "LLM tokens": COUNT}
    rows = [
        (name, its.share, its.tokens / total, its.samples, its.parts, its.tokens)
        for name, its in profile.modalities.items()
    ]
    return made(columns, rows)


def combinations(profile: Figures) -> pa.Table:
    columns = {"samples of": TEXT, "share of samples": SHARE, "samples": COUNT, "LLM tokens": COUNT}
    rows = [
        (" + ".join(its.modalities) or "nothing", its.samples / profile.samples, its.samples, its.tokens)
        for its in profile.content.combinations
    ]
    return made(columns, rows)


def joint_shares(joint: Figures) -> pa.Table:
    bins = len(joint.samples)
    names = [f"{100 * place // bins} to {100 * (place + 1) // bins} %" for place in range(bins)]
    rows = [
        (*(names[place] for place in (i, j)[: len(joint.modalities)]), count)
        for i, row in enumerate(joint.samples)
        for j, count in enumerate(row)
        if count
    ]
    return made({**dict.fromkeys(joint.modalities, TEXT), "samples": COUNT}, rows)


def bins_of(its: Figures, unit: str) -> tuple[pa.Table, pa.Table]:
    """Return samples by length in bins of a factor of 2, and percentiles."""
    rows = [(f"{2**bit:,} to {2 ** (bit + 1) - 1:,}", count) for bit, count in enumerate(its.bins) if count]
    return made({unit: TEXT, "samples": COUNT}, rows), made({"percentile": TEXT, unit: COUNT}, its.percentiles.items())


def phases(profile: Figures) -> pa.Table:
    names = ("min", "p25", "p50", "p75", "p95", "p99", "max")
    columns = {"phase": TEXT, "total": COUNT, **dict.fromkeys(names, COUNT)}
    rows = [(name, its.positions, *map(its.percentiles.get, names)) for name, its in profile.phases.items()]
    return made(columns, rows)


def settings(profile: Figures) -> pa.Table:
    columns = {"ranks": COUNT, "setting": TEXT, "waiting" if profile.has_cost_model else "unevenness": SHARE}
    columns |= {"error, points": "{:.1f}", "samples": "{:,.0f}", "LLM tokens": SIZES, "micro-steps": "{:.1f}"}
    rows = [
        (
            scale.ranks,
            LABELS[name],
            its.waiting,
            None if its.waiting_error is None else 100 * its.waiting_error,
            its.samples,
            number(its.tokens),
            its.microbatches,
            f"{scale.steps}" + (" all" if scale.less_than_a_step else ""),
        )
        for scale in profile.scales
        for name, its in scale.settings.items()
    ]
    return made({**columns, "steps": SIZES}, rows)


def waiting_in_phases(scale: Figures) -> pa.Table | None:
    """Return where ranks wait; None if they meet at the end of the step only."""
    with_phases = {name: its for name, its in scale.settings.items() if its.phases}
    if not with_phases:
        return None
    names = tuple(next(iter(with_phases.values())).phases)
    rows = [(LABELS[name], *(its.phases[phase] for phase in names)) for name, its in with_phases.items()]
    return made({"setting": TEXT, **{f"in {phase}": SHARE for phase in names}}, rows)


def groups(scales: Sequence[Figures]) -> pa.Table:
    columns = {"ranks": COUNT, "groups": TEXT, "scope": TEXT, "groups a shard": "{:.1f}", "with one stream": "{:.1f}"}
    rows = [
        (
            scale.ranks,
            f"{scale.groups:,} of {scale.group_size}",
            name,
            its.groups_per_shard,
            its.groups_per_shard_of_one_stream,
        )
        for scale in scales
        if scale.groups > 1
        for name, its in scale.scopes.items()
    ]
    return made(columns, rows)


def layouts(profile: Figures) -> pa.Table:
    rows = [
        (
            its.layout + ("" if its.length is None else f", {its.length:,} tokens"),
            its.padding,
            its.microbatches,
            its.steps,
        )
        for its in profile.layouts
    ]
    return made({"layout": TEXT, "padding": SHARE, "micro-steps": "{:.1f}", "steps": COUNT}, rows)


def largest(profile: Figures, name: Callable[[str], str], *, named: bool) -> pa.Table:
    columns = {"key": DATA, "shard": DATA, "cost over the mean": "{:,.1f}", "step at least": "{:.2f}"}
    rows = [
        (
            plain(its.key, 120) if named else None,
            plain(name(its.shard), 120),
            its.cost,
            its.step,
            *its.positions.values(),
        )
        for its in profile.largest
    ]
    return made({**columns, **dict.fromkeys(profile.phases, COUNT)}, rows)


def unlike(parts: Sequence[Figures], what: str, name: Callable[[str], str], modalities: Sequence[str]) -> pa.Table:
    columns = {what: DATA, **{f"{modality}, of tokens": SHARE for modality in modalities}, "samples": COUNT}
    rows = [
        (plain(name(its.name), 120), *map(its.shares.get, modalities), its.samples, its.tokens_per_sample)
        for its in parts
    ]
    return made({**columns, "LLM tokens a sample": "{:,.0f}"}, rows)


def sources(profile: Figures, names: Iterable[str] | None = None) -> pa.Table:
    rows = []
    for name in profile.sources if names is None else names:
        its = profile.sources[name]
        rows.append((plain(name, 120), its.share, its.tokens, its.samples, its.passes))
    columns = {"source": DATA, "share of tokens": SHARE, "LLM tokens": COUNT, "samples": COUNT, "passes": "{:.3g}"}
    return made(columns, rows)


def unread(profile: Figures) -> pa.Table:
    """Return the fields that no recipe reads, with the samples that have them."""
    rows = [(plain(name), count) for name, count in profile.unread.items()]
    rows += [("values of more fields", profile.unread_others)] if profile.unread_others else []
    return made({"field": DATA, "samples that have it": COUNT}, rows)
