"""The sound track of a file with pictures: its length, from its packets, and its samples.

Imported late: it loads FFmpeg's libraries.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError, pass_trouble
from orchdata.loaders.interrupts import interrupts_deferred
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import check_seconds
from orchdata.loaders.modalities.cut_audio import TOLERANCE_SECONDS
from orchdata.loaders.modalities.video.opened import OpenedFile, exact, said

Wave = NDArray[np.float32]
_MICROSECONDS: Final = 1_000_000


class SoundTrack(OpenedFile):
    """The first sound track of a file; must be closed. Raises DecodeError.

    Attributes:
        rate: in Hz; 0 if there is no track.
        frames: samples per channel, from the file's start to the last one's end, according to its packets. If sound
            begins later than the file, silence comes first, so that it stays in time with the pictures.
    """

    rate: int = 0
    frames: int = 0

    def __init__(self, data: bytes | memoryview, limits: Limits) -> None:
        super().__init__(data, limits)
        try:
            if self._stream is not None:
                self._measure()
        except BaseException:
            self.close()
            raise

    def choose(self, options: dict[str, str]) -> None:
        heard = list(self._container.streams.audio)
        self._stream = heard[0] if heard else None
        if self._stream is None:
            return
        self._codec = self._stream.codec_context
        if self._codec is None:
            raise DecodeError(
                "its sound is of a codec that the installed FFmpeg libraries cannot decode: encode it again"
            )
        self._codec.options = options
        self._codec.thread_count = 1
        self._tick = exact(self._stream.time_base)
        begins = self._container.start_time
        self._begins = Fraction(begins, _MICROSECONDS) if begins is not None else Fraction(0)

    def wave(self) -> Wave:
        """Return the mean over its channels, float32 (frames,)."""
        self.open()
        wave = np.zeros(self.frames, np.float32)
        slack, at, came = int(TOLERANCE_SECONDS * self.rate), 0, 0
        with closing(self._blocks()) as blocks:
            for first, block in blocks:
                at = at if came and abs(first - at) <= slack else first  # times are rounded: ignore small gaps
                skipped = max(0, -at)
                end = min(at + len(block), self.frames)
                if end > at + skipped:
                    wave[at + skipped : end] = block[skipped : end - at]
                    came += end - at - skipped
                at += len(block)
        if not came:
            raise DecodeError("damaged sound: nothing of it can be decoded")
        if not np.isfinite(wave).all():
            raise DecodeError("the sound holds NaN or infinite values")
        return wave

    def _measure(self) -> None:
        rate = int(self._codec.sample_rate or 0)
        if rate < 1:
            raise DecodeError(f"damaged sound: a rate of {rate} Hz")
        # Find the end of the last packet.
        ends = last = None
        try:
            with closing(self._packets()) as packets:
                for packet in packets:
                    if packet.size and packet.pts is not None and not packet.is_discard:
                        if packet.is_corrupt:
                            raise DecodeError("damaged sound: it is cut")
                        end = packet.pts + (packet.duration or 0)
                        if ends is None or end >= ends:
                            ends, last = end, packet
            if last is not None and not last.duration:  # Matroska may leave out the length of a packet
                with interrupts_deferred():
                    samples = sum(frame.samples for frame in last.decode())
                ends += round(samples / (rate * self._tick))
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"damaged sound: {said(error)}") from None
        if ends is None:
            raise DecodeError("a track of sound without any")
        # Convert it to samples.
        seconds = ends * self._tick - self._begins
        frames = round(seconds * rate)
        check_seconds(frames, rate, self._limits)
        if frames < 1:
            raise DecodeError("a track of sound without any")
        self.rate, self.frames = rate, frames

    def _first_sample(self, frame: Any) -> int | None:
        """Return the index of the sample at which a frame begins; None if unknown."""
        if frame.sample_rate != self.rate:
            raise DecodeError(f"its sound changes from {self.rate} to {frame.sample_rate} Hz: encode it again")
        if frame.pts is None:
            return None
        sample: int = round((frame.pts * exact(frame.time_base) - self._begins) * self.rate)
        return sample

    def _blocks(self) -> Generator[tuple[int, Wave]]:
        """Yield (first sample, mean over its channels) of consecutive blocks. Must be closed."""
        resampler: Any = None
        expected = 0
        try:
            with closing(self._packets()) as packets:
                for packet in packets:
                    with interrupts_deferred():
                        frames = packet.decode()
                        if frames and resampler is None:
                            resampler = av.AudioResampler(format="fltp", layout=frames[0].layout, rate=self.rate)
                        heard = [(self._first_sample(frame), _plain(resampler, frame)) for frame in frames]
                    for first, blocks in heard:
                        at = expected if first is None else first
                        for block in blocks:
                            yield at, block.mean(axis=0, dtype=np.float32) if len(block) > 1 else block[0]
                            at += block.shape[1]
                        expected = at
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"damaged sound: {said(error)}") from None


def _plain(resampler: Any, frame: Any) -> list[NDArray[np.float32]]:
    """Return samples (channels, samples) within +-1."""
    try:
        return [each.to_ndarray() for each in resampler.resample(frame)]
    except ValueError as error:
        raise DecodeError("its sound changes its channels or format in the middle: encode it again") from error
