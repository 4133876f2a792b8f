"""Opening audio with soundfile. Imported late: it loads libsndfile."""

from __future__ import annotations

import io

import soundfile

from orchdata.loaders.modalities.cut_audio import unclosed_wav

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
    stream = io.BytesIO(data)
    start = unclosed_wav(data)
    if start:  # libsndfile takes a size of 0 at its word
        stream.seek(start - 4)
        stream.write((len(data) - start).to_bytes(4, "little"))
        stream.seek(0)
    return Sound(stream)
