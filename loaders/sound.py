"""Opening audio with soundfile. Imported late: it loads libsndfile."""

from __future__ import annotations

import io

import soundfile

UNKNOWN_FRAMES = 1 << 48
"""libsndfile says about 2**63 frames where the header tells none (a FLAC that was streamed out)."""


class Sound(soundfile.SoundFile):  # type: ignore[misc]
    """A SoundFile that is only read forward.

    soundfile seeks after each read, which fails where the header tells no length (a FLAC streamed out) or a wrong one.
    """

    def seekable(self) -> bool:
        return False


def open_sound(data: bytes | memoryview) -> Sound:
    """Open audio in memory. Raises soundfile.LibsndfileError."""
    return Sound(io.BytesIO(data))
