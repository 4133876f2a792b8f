"""The profile of a dataset: its content, and what N ranks would lose to imbalance, as a frozen value.

Profile --report/--> sentences, a DataLoader call, a page of HTML
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchdata.dataset.mixed import index_of
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.amounts import counted
from orchdata.loaders.html.notebook import never_raises
from orchdata.planning.balance import Balance, Objective, Oversize
from orchdata.profiling.content import Content
from orchdata.profiling.failures import FailureExample
from orchdata.profiling.largest import LargestSample
from orchdata.profiling.lengths import Lengths
from orchdata.profiling.ranks.layouts import LayoutPadding
from orchdata.profiling.ranks.scales import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from orchdata.showing.samples import Shown

_MAIN_RANKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Modality:
    """One modality of the usable samples.

    Attributes:
        samples: samples that have it; `share` is their fraction of all usable samples.
        parts: images or audio clips; for text the samples that have any.
        tokens: positions it gives the LLM; for text everything that is not media, including special tokens.
        lengths: LLM tokens that it gives a sample, over the samples that have it.
    """

    samples: int
    share: float
    parts: int
    tokens: int
    lengths: Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Positions that one phase of a model computes.

    Attributes:
        samples: samples that enter the phase.
        positions: their sum: patches before merging, audio frames entering attention, or LLM tokens.
        percentiles: percentiles of the positions of a sample, over the samples that enter the phase; empty if none do.
        bins: samples with positions from 2^b up to 2^(b+1), for b from 0.
    """

    samples: int
    positions: int
    percentiles: Mapping[str, int]
    bins: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadAmplification:
    """Bytes read from storage for each byte of the members that samples use, estimated from the index.

    Attributes:
        by_range: samples of plain tars, read one by one in any order and scope: their members, and the gaps between
            members read together. Of up to 1,000 samples spread over the dataset; None without a plain tar.
        whole_shards: every shard read once from end to end, as a compressed tar is when it is decompressed: below 1 if
            compression saves more than the unused bytes. Multiply by `groups_per_shard` if each group reads on its own.
            None if records name media in other files.
        by_chunk: samples of Parquet, if each is read with the column chunks of its whole row group: where the order
            jumps between more row groups than fit in memory. From the footers of a few files; None without Parquet.
    """

    by_range: float | None
    whole_shards: float | None
    by_chunk: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """Positions per microbatch and rank, and the samples above them.

    Attributes:
        max_tokens: phase -> cap.
        oversize: treatment of samples above a cap: "own" microbatches, or "drop": left out of the order.
        above: phase -> samples above its cap.
        samples: samples above any cap.
    """

    max_tokens: Mapping[str, int]
    oversize: Oversize
    above: Mapping[str, int]
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Overflow:
    """The effect of `TextPreprocessor.overflow` on samples.

    Attributes:
        truncated: number of truncated samples; `cut_tokens` are the LLM tokens that they lost.
        split: number of split samples; `pieces` is the number of their pieces.
    """

    truncated: int
    cut_tokens: int
    split: int
    pieces: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """One source of a mixture in its first epoch.

    Attributes:
        samples, tokens: samples and LLM tokens, as steps measure them, that it gives; `share` is the fraction of the
            epoch's tokens.
        usable: usable samples of the source.
        passes: passes through the source.
    """

    samples: int
    tokens: int
    share: float
    usable: int
    passes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochModality:
    """What an epoch of a mixture delivers of a modality, by the weights of the sources.

    Attributes:
        share: share of the samples that have it.
        token_share: share of the LLM tokens.
    """

    share: float
    token_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The content of a dataset, and its cost on N ranks.

    `samples` are the usable ones. All other numbers are about them, except `bad` samples and `failed_shards`, of which
    nothing could be read. In phases, caps and scales the pieces of a split sample count separately, as a loader draws
    them.

    Attributes:
        overflow: None without `TextPreprocessor.max_tokens`, or if no sample is above it.
        unchosen: samples that the data set leaves out by `filter` and `split`; no other number contains them.
        layout: "packed" or "padded".
        objective: see `Balance`: whether ranks wait after each phase of each micro-step.
        balance: other arguments of `Balance` than its defaults, which all settings share.
        multiple_of, length: LLM sequences are padded to a multiple of this; and tokens of every microbatch, if all have
            one length.
        model_parallel: GPUs of a rank.
        caps: None without `max_tokens`.
        text_is_bytes: LLM tokens of text are UTF-8 bytes, because a recipe has no tokenizer; False for an index alone,
            which does not know.
        is_of_processor: a recipe is one of `od.hf.recipe`, so the model takes batches of `od.hf.Inputs`; False for an
            index alone.
        ranks_left_out: default numbers of ranks that were not planned: their step would have more than 16 times the
            samples, or tokens, of the data.
        sources: sources of a mixture, by name; empty without a mixture.
        epoch: modality -> what the first epoch of a mixture delivers; empty without a mixture. `modalities`, `phases`,
            `content` and `largest` are of the stored samples, each once.
        unread: field that is not read -> number of samples that have it, the most frequent first.
        unread_others: the sum of the counts of all other fields.
        failures: examples of bad samples, at most three for each of the ten most frequent reasons.
        content: what samples are made of.
        largest: of the samples that are not dropped, those that cost the most, at most ten.
        layouts: padding of LLM microbatches in each layout, on the ranks of `main_scale`.
    """

    shards: int
    failed_shards: int
    samples: int
    bad: int
    unchosen: int
    bad_by_reason: Mapping[str, int]
    bytes: int
    loss_tokens: int
    overflow: Overflow | None
    read_amplification: ReadAmplification
    modalities: Mapping[str, Modality]
    phases: Mapping[str, Phase]
    balanced_phases: tuple[str, ...]
    has_cost_model: bool
    layout: Literal["packed", "padded"]
    balance: Mapping[str, Any]
    multiple_of: int
    length: int | None
    objective: Objective
    model_parallel: int
    caps: Caps | None
    seed: int
    ranks_left_out: tuple[int, ...]
    text_is_bytes: bool
    is_of_processor: bool
    sources: Mapping[str, SourceShare]
    epoch: Mapping[str, EpochModality]
    unread: Mapping[str, int]
    unread_others: int
    failures: tuple[FailureExample, ...]
    content: Content
    largest: tuple[LargestSample, ...]
    layouts: tuple[LayoutPadding, ...]
    scales: tuple[Scale, ...]

    def __repr__(self) -> str:
        """Return one line; `to_dict` returns all figures."""
        ranks = ", ".join(f"{scale.ranks:,}" for scale in self.scales)
        what = f"{counted(self.samples, 'sample')} in {counted(self.shards, 'shard')}, planned for {ranks} ranks"
        return f"Profile({what}: {next(iter(self.summary), 'nothing to say')})"

    @never_raises
    def _repr_html_(self) -> str:
        from orchdata.profiling.report.notebook import profile_view

        return profile_view(self)

    @property
    def main_scale(self) -> Scale:
        """The number of ranks that a summary speaks of: the first of at least 64, else the largest."""
        return main_scale(self.scales)

    @property
    def meets_in_micro_steps(self) -> bool:
        """Whether ranks wait for each other in each micro-step, in joint assignment."""
        return Balance(objective=self.objective).price.meets_in_micro_steps

    @property
    def summary(self) -> tuple[str, ...]:
        """What the profile says, in sentences, the most important first."""
        from orchdata.profiling.report.summary import findings

        return tuple(finding.text for finding in findings(self))

    @property
    def call(self) -> str:
        """The `od.DataLoader(...)` call that follows, for the ranks of `main_scale`: Python source with comments."""
        from orchdata.profiling.report.call import call_of

        return call_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values: plain dicts, lists, strings and finite numbers."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), allow_nan=False))
        return {"summary": list(self.summary), **plain, "call": self.call}

    def write_html(self, path: str | Path, dataset: ShardDataset | Mixture | None = None, *, samples: int = 12) -> None:
        """Write a report: one page of HTML that loads nothing and runs no script.

        The page holds keys and reasons of failures, and some samples: mind who gets it.

        Args:
            path: file to write, in a folder that exists; an existing file is replaced whole.
            dataset: the data set of this profile, from which samples are read; None for a page without samples.
            samples: number of samples to show, drawn at random; 0 for a page without any text, picture, key or error
                text of a sample.

        Raises:
            ValueError: `samples` below 0, a path that is not a file's, or a data set that is not that of this profile.
            PackageError: matplotlib, of the extra `plots`, is missing.
            StorageError: the file cannot be written.
        """
        from orchdata.profiling.report.page import check_report, write_report
        from orchdata.profiling.report.samples import drawn_views

        if samples < 0:
            raise ValueError(f"samples must be at least 0, got {samples}")
        check_report(path)
        views: list[Shown] = []
        if dataset is not None and samples:
            # A shard that changed since it was indexed has samples that cannot be read.
            index = index_of(dataset, check=False)
            if len(index.shards) != self.shards or index.num_samples != self.samples + self.bad + self.unchosen:
                raise ValueError(
                    f"the data set has {index.num_samples:,} samples in {len(index.shards):,} shards, and is not that "
                    "of this profile: give the data set that was profiled, or none"
                )
            views = drawn_views(dataset, index, samples, self.seed)
        write_report(self, path, views, named=samples > 0)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the cost of a step over an even one against the number of ranks, for each setting. Return the axes.

        Args:
            ax: axes of matplotlib; None for those of a new figure.

        Raises PackageError if matplotlib, of the extra `plots`, is missing.
        """
        from orchdata.profiling.report.plots import plot_profile

        return plot_profile(self.scales, ax)


def main_scale(scales: Sequence[Scale]) -> Scale:
    """Return the first scale of at least 64 ranks, else the one of the most ranks."""
    return next((scale for scale in scales if scale.ranks >= _MAIN_RANKS), max(scales, key=lambda scale: scale.ranks))
