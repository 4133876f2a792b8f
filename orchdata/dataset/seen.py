"""What people look at in a data set of shards: its profile, some of its samples, and its view in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from orchdata.loaders.html.elements import bar, table
from orchdata.loaders.html.notebook import pairs, view
from orchdata.loaders.html.words import percent, shown
from orchdata.loaders.index.locations import open_index
from orchdata.loaders.storage.remote.urls import is_remote

if TYPE_CHECKING:
    from orchdata import CostModel, Profile, ShownSamples
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.index.index import Index

_MOST_SOURCES = 50


class Seen:
    """A data set that `od.profile` and `od.show` take."""

    def profile(
        self,
        *,
        cost: CostModel | None = None,
        ranks: Sequence[int] | None = None,
        batch_size: int = 8,
        **others: Any,
    ) -> Profile:
        """Return what the samples are made of, and what numbers of ranks would lose to imbalance.

        The index is built where it is missing. No sample is decoded.

        Args:
            cost: the model's cost; with None every phase costs its positions.
            ranks: numbers of data-parallel ranks to plan for; None for 8 to 2,560, as far as the data suffice.
            batch_size: samples per rank and step.
            others: other arguments of `od.profile`: balance, layout, model_parallel, batch_tokens, group_size, streams,
                seed, steps, cache_bytes.

        Raises as `od.profile`.
        """
        import orchdata

        return orchdata.profile(self, cost=cost, ranks=ranks, batch_size=batch_size, **others)  # type: ignore[arg-type]

    def show(self, samples: int | str | Sequence[int | str]) -> ShownSamples:
        """Return samples as the model sees them, for a notebook: text with what is trained, pictures, sound.

        The samples are read now. See `od.show`.
        """
        import orchdata

        return orchdata.show(self, samples)  # type: ignore[arg-type]


def dataset_view(dataset: ShardDataset, opened: Index | None, urls: Sequence[str] | None) -> str:
    """Return the view of shards. No shard is read, nothing is listed or built, and no network is used.

    Args:
        opened: its index, if it is open.
        urls: its shards, if they are known.
    """
    index = opened
    if index is None and urls is not None and dataset.index_store is None and not any(map(is_remote, urls)):
        index = open_index(urls, dataset.recipe, reading=dataset.reading)
    title = "ShardDataset" if urls is None else f"ShardDataset of {len(urls):,} shards"
    about = [("first shard", urls[0] if urls else "not listed yet")]
    about += [("chosen by", str(selection.describe())) for selection in dataset.selections]
    if index is None:
        return view(title, pairs(about), "<p>Not indexed yet: the first loader does it, or dataset.index().</p>")
    samples = max(1, index.num_samples - len(index.bad_rows()))
    modalities = index.totals["modalities"]
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
    about.append(("samples in the index", f"{index.num_samples:,}, {len(index.bad_rows()):,} of them bad"))
    columns = ("modality", "share of samples", "share of LLM tokens", "LLM tokens")
    return view(title, pairs(about), table(columns, rows, numbers_from=3))


def mixture_view(mixture: Mixture) -> str:
    """Return the view of a mixture. Nothing is read."""
    leaves = mixture.leaves[:_MOST_SOURCES]
    rows = [(shown(leaf.name, 80), shown(repr(leaf.dataset), 200)) for leaf in leaves]
    more = len(mixture.leaves) - len(leaves)
    rest = f"<p>and {more:,} more sources</p>" if more > 0 else ""
    title = f"Mixture of {len(mixture.leaves):,} sources, by {mixture.by}"
    return view(title, table(("source", "data"), rows, numbers_from=2), rest)
