"""What notebooks show of values, and what is drawn of them. A value asks `orchdata` for its view, and imports none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.batch.batch import Batch, arrays_in_words
from orchdata.batch.tensors import shown as shape_of
from orchdata.dataloader import DataLoader, facts_of
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.selection import left_out
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.html import axes_of, bar, pairs, paragraph, percent, shown, table, view
from orchdata.loaders.amounts import counted
from orchdata.loaders.errors import OrchdataError, one_line
from orchdata.loaders.index.index import open_index
from orchdata.loaders.index.table import Totals
from orchdata.loaders.samples.sample import MediaPart, Sample, TextPart
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import basename
from orchdata.planning.plan import Plan
from orchdata.profiling.content import chosen_totals
from orchdata.profiling.page import profile_view, write_report
from orchdata.profiling.profile import Profile
from orchdata.showing import ShownSamples, sample_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["html_of", "plan_plot", "write_report"]

MOST_BYTES: Final = 300_000
_MOST_RANKS = 64
_PERCENTILES = (0, 10, 50, 90, 100)
_MOST_SOURCES = 50
_MOST_STAGES = 5
_MOST_SECONDS = 0.4
_MOST_LINES = 50
_OF_ALL = "These figures are of all samples, and not only of the chosen ones"


def html_of(value: object) -> str:
    """Return the view of a value. One that cannot be shown now, or only in too many bytes, is shown as its repr."""
    html = ""
    with suppress(Exception):
        html = next(make for kind, make in VIEWS.items() if isinstance(value, kind))(value)
    if html and len(html.encode("utf-8", "replace")) <= MOST_BYTES:
        return html
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001
        text = object.__repr__(value)
    return f"<pre>{shown(text, 2000)}</pre>"


def plan_view(plan: Plan) -> str:
    """Return the view of a plan in a notebook: each rank's load, or percentiles of them above 64 ranks."""
    about = [("epoch, step", f"{plan.epoch}, {plan.step}"), ("samples", f"{len(plan.row):,}")]
    about += [("microbatches of a rank", f"{plan.num_microbatches}"), ("hash", plan.hash)]
    tables = [
        f"<strong>{name}</strong>{_loads(plan.loads_unbalanced(name), plan.loads(name), plan.num_ranks)}"
        for name in plan.phases
        if plan.costs[name].any()
    ]
    title = f"Plan of {plan.num_ranks:,} ranks: loads over the mean load, dealt out in turn and as planned"
    return view(title, pairs(about), *tables)


def _loads(before: NDArray[np.int64], after: NDArray[np.int64], num_ranks: int) -> str:
    before = np.repeat(before, len(after) // len(before))  # where peers encode, each repeats its rank's parts
    mean, largest = max(float(after.mean()), 1e-9), max(int(before.max()), int(after.max()), 1)
    if len(after) > _MOST_RANKS:
        places = np.array(_PERCENTILES)
        before, after = np.percentile(before, places), np.percentile(after, places)
        names = ["least", *(f"{place} %" for place in _PERCENTILES[1:-1]), "largest"]
    else:
        peers = len(after) // num_ranks
        names = [f"rank {gpu // peers}" + f", peer {gpu % peers}" * (peers > 1) for gpu in range(len(after))]
    rows = [
        (name, *(bar(load / largest, f"{load / mean:.2f}") for load in loads))
        for name, *loads in zip(names, before.tolist(), after.tolist(), strict=True)
    ]
    return table(("", "in turn", "planned"), rows, numbers_from=3)


def dataset_view(dataset: ShardDataset) -> str:
    """Return the view of the chosen samples. No shard is read, nothing is listed or built, and no network is used."""
    index, urls = dataset._opened.index, dataset._urls
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
        until = time.monotonic() + _MOST_SECONDS
        columns = dataset.own_columns(index, may_build=False)
        totals = chosen_totals(index, left_out(index, dataset.selections, columns, until=until), until=until)
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
    modalities, samples = totals["modalities"], max(1, _good(totals))
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
    names = ("modality", "share of samples", "share of LLM tokens", "LLM tokens")
    return view(title, pairs(about), paragraph(note) if note else "", table(names, rows, numbers_from=3))


def _good(totals: Totals) -> int:
    return int(totals["samples"] - totals["bad"])


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


def batch_view(batch: Batch) -> str:
    """Return counts, and the shapes of all tensors: nothing is copied from a GPU."""
    about = [
        ("position", f"step {batch.step}, microbatch {batch.microbatch} of {batch.num_microbatches}"),
        ("device", batch.llm.input_ids.device),
        ("samples", f"{len(batch.sample_ids):,}"),
        ("tokens", f"{batch.llm.input_ids.numel():,}, {batch.loss_tokens:,} trained"),
        ("input_ids", shape_of(batch.llm.input_ids)),
    ]
    for name, media in batch.media.items():
        what = f"{counted(len(media.cu_seqlens) - 1, 'item')} of {counted(media.num_tokens, 'token')}"
        if batch._is_dummy(name):
            what = "none; a dummy, without which this rank would not run the encoder"
        about.append((name, f"{what}: {arrays_in_words(media)}"))
    return view("Batch", pairs(about))


def sample_view(sample: Sample) -> str:
    """Return sizes of text and media."""
    texts = [part for part in sample.parts if isinstance(part, TextPart)]
    tokens, trained = sum(len(part.token_ids) for part in texts), sum(int(part.loss.sum()) for part in texts)
    about = [("shard", sample.shard), ("key", sample.key), ("text", f"{tokens:,} tokens, {trained:,} trained")]
    about += [(part.modality, repr(part)) for part in sample.parts if isinstance(part, MediaPart)]
    about += [("fields", ", ".join(sample.fields))] if sample.fields else []
    return view("Sample", pairs(about[:_MOST_LINES]))


VIEWS: Final[Mapping[type, Callable[[Any], str]]] = {
    Batch: batch_view,
    DataLoader: lambda loader: view(type(loader).__name__, pairs(facts_of(loader))),  # what its repr says
    Mixture: mixture_view,
    Plan: plan_view,
    Profile: profile_view,
    Sample: sample_view,
    ShardDataset: dataset_view,
    ShownSamples: lambda shown: view(
        f"{len(shown.samples)} samples", *(sample_html(each, basename) for each in shown.samples)
    ),
}


def plan_plot(plan: Plan, axes: Axes | None) -> Axes:
    """Draw the loads of ranks before and after balancing, summed over phases. Return the axes."""
    axes = axes_of(axes)
    ranks = np.arange(plan.num_ranks)
    scale = {phase: plan.peers_of(phase) for phase in plan.phases}
    before = np.sum([plan.loads_unbalanced(phase) * scale[phase] for phase in plan.phases], axis=0)
    waits = [plan.waits(phase).sum(axis=1).reshape(plan.num_ranks, -1).max(axis=1) for phase in plan.phases]
    after = np.sum(waits, axis=0)
    mean = max(float(after.mean()), 1e-9)
    axes.bar(ranks - 0.2, before / mean, width=0.4, label="in turn", color="#b0b0b0")
    axes.bar(ranks + 0.2, after / mean, width=0.4, label="planned", hatch="//")
    axes.axhline(1.0, linestyle="--", linewidth=1, color="black", label="mean")
    axes.set_xlabel("rank")
    axes.set_ylabel("load over the mean")
    axes.legend()
    return axes
