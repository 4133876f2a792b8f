"""Opening audio with soundfile. Imported late: it loads libsndfile."""

from __future__ import annotations

import io

import soundfile

UNKNOWN_FRAMES = 1 << 48
"""libsndfile says about 2**63 frames where the header tells none (a FLAC that was streamed out)."""


class Sound(soundfile.SoundFile):  # type: ignore[misc]
    """A SoundFile that can also be read, forward, where its length is not known: soundfile seeks after each read."""

    def seekable(self) -> bool:
        return self.frames < UNKNOWN_FRAMES and bool(super().seekable())


def open_sound(data: bytes | memoryview) -> Sound:
    """Open audio in memory. Raises soundfile.LibsndfileError."""
    return Sound(io.BytesIO(data))
