"""The views of a data set of shards, and of a mixture, in a notebook."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from orchdata.dataset.selection import left_out
from orchdata.dataset.views.chosen_totals import chosen_totals
from orchdata.loaders.amounts import counted
from orchdata.loaders.errors import OrchdataError, one_line
from orchdata.loaders.html import bar, pairs, paragraph, percent, shown, table, view
from orchdata.loaders.index.locations import open_index
from orchdata.loaders.index.totals import Totals
from orchdata.loaders.storage.remote.urls import is_remote

if TYPE_CHECKING:
    from orchdata.dataset.indexed.opened import Opened
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.index.index import Index

_MOST_SOURCES = 50
_MOST_STAGES = 5
_MOST_SECONDS = 0.4
_OF_ALL = "These figures are of all samples, and not only of the chosen ones"


def dataset_view(dataset: ShardDataset, opened: Opened, urls: Sequence[str] | None) -> str:
    """Return the view of the chosen samples. No shard is read, nothing is listed or built, and no network is used.

    Args:
        opened: what the data set has open.
        urls: its shards, if they are known.
    """
    index = opened.index
    if index is None and urls is not None and dataset.index_file is None and not any(map(is_remote, urls)):
        index = open_index(urls, dataset.recipe, reading=dataset.reading)
    title = "ShardDataset" if urls is None else f"ShardDataset of {counted(len(urls), 'shard')}"
    about = [("first shard", urls[0] if urls else "not listed yet")]
    about += [("chosen by", str(selection.describe())) for selection in dataset.selections]
    if index is None:
        return view(title, pairs(about), "<p>Not indexed yet: the first loader does it, or dataset.index().</p>")

    # Without the choice, which may take long or be impossible, the figures of all samples are shown as such.
    totals, note = index.totals, ""
    try:
        totals = _totals_in_time(dataset, index)
    except TimeoutError:
        note = f"{_OF_ALL}, because counting the chosen ones takes long. len(dataset) counts them."
    except (ValueError, OrchdataError) as error:
        note = f"{_OF_ALL}. The chosen ones cannot be counted: {one_line(error)}"
    if dataset.selections and not note:
        about.append(
            ("chosen", f"{_good(totals):,} of {_good(index.totals):,} samples, {totals['llm_tokens']:,} tokens")
        )
    else:
        bad = index.totals["bad"]
        about.append(("samples in the index", f"{index.totals['samples']:,}, {bad:,} of them bad"))
    return view(title, pairs(about), paragraph(note) if note else "", _modalities(totals))


def _good(totals: Totals) -> int:
    return int(totals["samples"] - totals["bad"])


def _modalities(totals: Totals) -> str:
    modalities = totals["modalities"]
    samples = max(1, _good(totals))
    tokens = sum(counts["tokens"] for counts in modalities.values()) or 1
    rows = [
        (
            escape(name),
            bar(counts["samples"] / samples, percent(counts["samples"] / samples)),
            bar(counts["tokens"] / tokens, percent(counts["tokens"] / tokens)),
            f"{counts['tokens']:,}",
        )
        for name, counts in modalities.items()
    ]
    return table(("modality", "share of samples", "share of LLM tokens", "LLM tokens"), rows, numbers_from=3)


def _totals_in_time(dataset: ShardDataset, index: Index) -> Totals:
    """Return totals of the chosen samples.

    Raises:
        TimeoutError: that takes longer than a view may.
        ValueError: a filter cannot be used with this index.
        MissingIndexError: columns of the user's that a filter needs were not read yet.
    """
    until = time.monotonic() + _MOST_SECONDS
    columns = dataset.own_columns(index, may_build=False)
    return chosen_totals(index, left_out(index, dataset.selections, columns, until=until), until=until)


def mixture_view(mixture: Mixture) -> str:
    """Return the view of a mixture. Nothing is read."""
    leaves = mixture.leaves[:_MOST_SOURCES]
    stages = mixture.shares()

    def share(number: int) -> str:
        first = stages[0][1][number]
        later = [f"from {bound:,} {mixture.by}: {percent(shares[number])}" for bound, shares in stages[1:]]
        return bar(first, "<br>".join([percent(first), *later[:_MOST_STAGES], *["…"][: len(later) > _MOST_STAGES]]))

    rows = [
        (shown(leaf.name, 80), share(number), f"{leaf.loss_weight:g}", shown(repr(leaf.dataset), 200))
        for number, leaf in enumerate(leaves)
    ]
    more = len(mixture.leaves) - len(leaves)
    rest = f"<p>and {more:,} more sources</p>" if more > 0 else ""
    columns = ("source", f"share of {mixture.by}", "loss weight", "data")
    title = f"Mixture of {len(mixture.leaves):,} sources, by {mixture.by}"
    return view(title, table(columns, rows, numbers_from=4), rest)
