"""Samples to look at in a notebook: `od.show`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchdata.dataset.mixed import index_of
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import unchosen_rows
from orchdata.loaders.html.notebook import never_raises, view
from orchdata.loaders.index.index import basename
from orchdata.showing.pictures import SampleView, sample_html, views_of
from orchdata.showing.rows import row_of_number, rows_of_key
from orchdata.showing.runs import shards_of, source_names


@dataclass(frozen=True, repr=False)
class ShownSamples:
    """Samples as the model sees them. A notebook shows text, with what is trained, and pictures of media.

    Attributes:
        views: the samples, and their pictures.
    """

    views: tuple[SampleView, ...]

    def __repr__(self) -> str:
        lines = [
            f"{view.sample.key}: {view.sample.error or f'{view.sample.tokens:,} LLM tokens'}" for view in self.views
        ]
        return "\n".join([f"{len(self.views)} samples", *lines])

    @never_raises
    def _repr_html_(self) -> str:
        names = {view.sample.shard: basename(view.sample.shard) for view in self.views}
        return view(f"{len(self.views)} samples", *(sample_html(each, names.__getitem__) for each in self.views))


def show(dataset: ShardDataset | Mixture, samples: int | str | Sequence[int | str]) -> ShownSamples:
    """Return samples as the model sees them: as `orchdata show`, for a notebook.

    They are read and decoded now, in another process of limited memory. A sample that cannot be loaded says why.

    Args:
        dataset: its index is built where it is missing.
        samples: keys (str) and rows of the index (int), or one of them.

    Raises:
        KeyError: the data set has no sample of this key, or leaves it out.
        IndexError: there is no such row.
    """
    given = [samples] if isinstance(samples, int | str) else list(samples)
    index = index_of(dataset)
    unchosen = unchosen_rows(dataset, index)
    rows: list[int] = []
    for one in given:
        rows += rows_of_key(index, unchosen, one) if isinstance(one, str) else [row_of_number(index, one)]
    return ShownSamples(tuple(views_of(shards_of(dataset, index), rows, source_names(dataset, index, rows))))
