"""The modalities that come with the library, in the order of their phases."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from orchdata.loaders.modalities.audio import AudioPreprocessor
from orchdata.loaders.modalities.image import ImagePreprocessor
from orchdata.loaders.modalities.modality import Modality
from orchdata.loaders.modalities.video.files import VideoFiles

BUILTINS: Final = MappingProxyType[str, type[Modality]]({"image": ImagePreprocessor, "audio": AudioPreprocessor})
"""Name -> class. Facts of shards keep their headers, whatever the recipe."""

ON_REQUEST: Final = MappingProxyType[str, type[Modality]]({"video": VideoFiles})
"""Name -> class of what a recipe has to ask for: facts keep no header of it, but records may name its files."""

KINDS: Final = ("text", *BUILTINS)
"""Kinds of members in the facts of a shard, by their codes there."""

TEXT: Final = 0

UNUSED: Final = 254
"""Kind, under a recipe, of a member that it leaves alone."""

OTHER: Final = 255
"""Kind of a member that is neither text nor what a modality reads; under a recipe, of none of its own."""

NUM_FACTS: Final = max(kind.num_facts for kind in BUILTINS.values())
