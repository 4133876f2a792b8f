"""What is kept of the counts of one shard: those of its texts, and the sizes of parts that no header contains.

facts --tokenizer, Modality.count--> counts (kept here) --limits, sizes from headers--> costs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from orchdata.loaders.index.index import digest
from orchdata.loaders.index.index_file import refuse_other_source
from orchdata.loaders.index.kept_sizes import FOLDER as SIZES
from orchdata.loaders.index.kept_sizes import KeptSizes, SizesWriter, read_sizes
from orchdata.loaders.index.kept_texts import FOLDER as TEXTS
from orchdata.loaders.index.kept_texts import Kept, KeptTexts, TextsWriter, read_texts
from orchdata.loaders.limits import scan_limits
from orchdata.loaders.recipe import Recipe, plain_fields
from orchdata.loaders.samples.measure import Sizes
from orchdata.loaders.shards.fields import FieldRules
from orchdata.loaders.shards.shard import Facts
from orchdata.loaders.storage.cache import CacheFolder

if TYPE_CHECKING:
    from orchdata.loaders.index.measuring import ShardSample


class KeptCounts(NamedTuple):
    """What is kept of a shard.

    Attributes:
        texts: counts of its texts, if there are any.
        sizes: by modality, of those that count from bytes and have some.
    """

    texts: KeptTexts | None = None
    sizes: Mapping[str, KeptSizes] = {}

    def sizes_of(self, number: int, names: str) -> Sizes:
        """Return what is kept of the parts of a sample, as `KeptSizes.of`."""
        return {
            (name, member): size for name, kept in self.sizes.items() for member, size in kept.of(number, names).items()
        }


class NewCounts:
    """Collects what is to be kept of a shard, sample by sample.

    Attributes:
        has_texts, has_sizes: whether there is more than was kept before.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.texts = TextsWriter(recipe.kinds)
        self.sizes = [SizesWriter(name, recipe.modalities[name].num_extents) for name in recipe.counted_from_bytes]
        self.has_texts = self.has_sizes = False
        self._number = 0

    def put(self, sample: ShardSample, text: Kept | None, sizes: Sizes) -> None:
        """Add what is known of the next sample of the shard."""
        self.texts.put(text, sample.layout)
        for writer in self.sizes if sizes else ():
            writer.put(self._number, sample.names, sizes)
        self.has_texts = self.has_texts or text is not sample.kept
        self.has_sizes = self.has_sizes or len(sizes) > len(sample.sizes)
        self._number += 1


@dataclass(frozen=True, slots=True)
class CountsFiles:
    """The files of one shard.

    Attributes:
        identity: of its facts, to which the files are bound.
        texts: path of the counts of its texts.
        sizes: path of the sizes of each modality that counts from bytes.
    """

    identity: Sequence[str]
    texts: str
    sizes: Mapping[str, str]


class CountsStore:
    """Where a build keeps the counts of shards under one recipe.

    Args:
        cache: the folder.
        recipe: defines the counts.
    """

    def __init__(self, cache: CacheFolder, recipe: Recipe) -> None:
        self._recipe = recipe
        self._texts = str(cache.make(TEXTS))
        self._text_fingerprint = recipe.text_fingerprint()
        self._fingerprints = {name: recipe.size_fingerprint(name) for name in recipe.counted_from_bytes}
        self._sizes = str(cache.make(SIZES)) if self._fingerprints else ""
        self._limits = {name: float(limit) for name, limit in plain_fields(recipe.limits).items()}

    def files_of(self, facts: Facts, url: str, media_root: str | None, rules: FieldRules) -> CountsFiles:
        """Return the files of a shard."""
        shard = [url, media_root, rules.identity(url)]
        texts = f"{self._texts}/{digest([self._text_fingerprint, *shard])}.texts"
        sizes = {name: f"{self._sizes}/{digest([mark, *shard])}.sizes" for name, mark in self._fingerprints.items()}
        return CountsFiles(facts.identity(), texts, sizes)

    def read(self, files: CountsFiles) -> KeptCounts:
        """Return what is kept of a shard. Raises FunctionError if that is of another function of the user's."""
        texts = read_texts(files.texts, files.identity)
        if texts is not None:
            refuse_other_source(texts.source, self._recipe)
        found = {name: read_sizes(path, files.identity, self._limits) for name, path in files.sizes.items()}
        return KeptCounts(texts, {name: sizes for name, sizes in found.items() if sizes is not None})

    def write(self, files: CountsFiles, new: NewCounts, before: KeptCounts) -> None:
        """Keep what is new. Raises StorageError."""
        recipe = self._recipe
        if new.has_texts:
            source = recipe.record.digest if recipe.record is not None and recipe.record.digest else ""
            former = {} if before.texts is None else before.texts.limits
            limits = {name: max(limit, former.get(name, limit)) for name, limit in scan_limits(recipe.limits).items()}
            new.texts.write(files.texts, files.identity, source, limits)
        if new.has_sizes:
            for path, writer in zip(files.sizes.values(), new.sizes, strict=True):
                writer.write(path, files.identity, self._limits)
