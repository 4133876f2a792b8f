"""Decoders, loaded before the first shard is opened: what the system refuses then is no fault of a file's."""

from __future__ import annotations

from orchdata.loaders.storage.retries import tried


def load_decoders() -> None:
    """Import what reads images and audio. Raises StorageError where it cannot be loaded now."""
    tried("the decoders of images and audio", "cannot be loaded", _load)


def _load() -> None:
    from PIL import Image

    import orchdata.loaders.modalities.image_decode
    import orchdata.loaders.modalities.sound  # noqa: F401

    Image.init()
