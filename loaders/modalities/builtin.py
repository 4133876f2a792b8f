"""The modalities that come with the library, in the order of their phases."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from orchdata.loaders.modalities.audio import AudioPreprocessor
from orchdata.loaders.modalities.image import ImagePreprocessor
from orchdata.loaders.modalities.modality import Modality
from orchdata.loaders.modalities.video.preprocessor import VideoFiles

BUILTINS: Final = MappingProxyType[str, type[Modality]]({"image": ImagePreprocessor, "audio": AudioPreprocessor})
"""Name -> class. Facts of shards store their headers under every recipe."""

ON_REQUEST: Final = MappingProxyType[str, type[Modality]]({"video": VideoFiles})
"""Name -> class of modalities that a recipe must name: facts store no header, but records may name their files."""

UNDECODED: Final = MappingProxyType[str, str](
    {
        "image": "heic heif hif jxl jxr tga psd dng exr",
        "audio": "m4a m4b aac wma opus weba amr ac3 ape mka",
        "video": "mpe ogm vob mxf",
    }
)
"""Name -> endings of files that its class does not decode."""

KINDS: Final = ("text", *BUILTINS)
"""Kinds of members in the facts of a shard; the index is the code."""

TEXT: Final = 0

UNUSED: Final = 254
"""Kind, under a recipe, of a member that it ignores."""

OTHER: Final = 255
"""Kind of a member that is neither text nor read by a modality; under a recipe, by none of its modalities."""

NUM_FACTS: Final = max(kind.num_facts for kind in BUILTINS.values())
