"""A file with pictures and sound, in memory and opened by PyAV: its packets say when pictures are shown and how long
the sound is; what is asked for is decoded from the last keyframe on.

libav reads a memory file directly, not bytes through Python callbacks: an exception of a signal handler in a function
that C calls would be lost. The same happens where PyAV raises, for example at the end of a file: its wheels run some
Python to build a traceback. Each file is decoded by the thread that uses it, without threads of libav.

Imported late: it loads FFmpeg's libraries.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from fractions import Fraction
from itertools import islice
from typing import Any, Final, TypeVar, cast

import av
import numpy as np
from av.sidedata.sidedata import SideDataContainer, Type
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from orchdata.loaders.child_process import interrupts_deferred
from orchdata.loaders.errors import DecodeError, StorageError, pass_trouble
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.image_decode import Pixels
from orchdata.loaders.modalities.modality import TOLERANCE_SECONDS, check_pixels, check_seconds
from orchdata.loaders.modalities.video.containers import ENCODE_AGAIN, Timeline, check_tables, check_whole, format_of

TOGETHER: Final = 16
"""Number of packets that are read before Ctrl-C is handled."""
_AS_BYTES: Final[dict[str, Any]] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
"""Titles and the like may have any encoding; PyAV 19 and later never decodes them."""
SAYS_DAMAGE: Final = {"err_detect": "crccheck+explode"}
"""Decoding is strict: otherwise decoders fill in damaged data without an error."""

Self = TypeVar("Self", bound="OpenedFile")


class OpenedFile:
    """An open file, to be closed; a context manager. Subclasses choose their stream in `choose` each time it is opened,
    and scan its packets in `scan` once. Raises DecodeError.
    """

    def __init__(self, data: bytes | memoryview, limits: Limits) -> None:
        self._limits = limits
        self._format = format_of(data)
        check_whole(memoryview(data), self._format)
        if self._format == "mp4":
            check_tables(memoryview(data))
        self._container: Any = None
        self._stream: Any = None
        with interrupts_deferred():
            self._memory = os.memfd_create("orchdata-video", os.MFD_CLOEXEC)
            self._close_memory = weakref.finalize(self, os.close, self._memory)
        try:
            with open(self._memory, "wb", closefd=False) as file:
                file.write(data)
            self.open()
            self.scan()
        except BaseException:
            self.close()
            raise

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            container.close()
        self._close_memory()

    def open(self) -> None:
        """Open the file at its start, even if it is open."""
        if self._container is not None:
            self._container.close()
        path = f"/proc/self/fd/{self._memory}"
        options = {"max_pixels": str(self._limits.image_pixels)}
        try:
            with interrupts_deferred():
                self._container = av.open(path, format=self._format, options=options, **_AS_BYTES)
        except (FileNotFoundError, PermissionError) as error:  # from /proc: the memory file always exists
            raise StorageError(path, f"cannot be opened, and video is read through it: {error.strerror}") from error
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"not a readable video: {said(error)}") from None
        self.choose(options | SAYS_DAMAGE)

    def choose(self, options: dict[str, str]) -> None:
        """Set `_stream`, and its decoder with these options."""

    def scan(self) -> None:
        """Read what packets say; nothing is decoded."""

    def _use(self, stream: Any, options: dict[str, str], what: str) -> None:
        """Choose a stream."""
        self._stream, self._codec = stream, stream.codec_context
        if self._codec is None:
            raise DecodeError(f"{what} codec that the installed FFmpeg libraries cannot decode: encode it again")
        self._codec.options = options
        self._codec.thread_count = 1

    @contextmanager
    def _demuxed(self) -> Iterator[Iterator[Any]]:
        """Yield PyAV's packets of the stream, from here on. Their memory is freed only by an explicit close."""
        packets = self._container.demux(self._stream)
        try:
            yield packets
        finally:
            with interrupts_deferred():
                packets.close()

    def _packets(self) -> Generator[Any]:
        """Yield packets of the stream from here on, and an empty one that flushes a decoder. Must be closed."""
        with self._demuxed() as packets:
            while True:
                with interrupts_deferred():
                    some = list(islice(packets, TOGETHER))
                yield from some
                if len(some) < TOGETHER:
                    return


def exact(rational: Any) -> Fraction:
    """A rational number of PyAV; 0 if the file does not contain it."""
    return Fraction(rational.numerator, rational.denominator) if rational else Fraction(0)


def said(error: Any) -> str:
    return str(error.strerror or error).split("\n")[0][:200]


Pictures = Generator[Pixels]

_SHOWN_VP8: Final = 0x10
_SLANTED: Final = 1000
"""In the matrix of a turn by quarters, its nonzero numbers are at least this many times larger than the others."""
_MATRIX: Final = Type.DISPLAYMATRIX
_HVCC_LAYERS: Final = 21
_ATTACHED: Final = av.stream.Disposition.attached_pic
"""A cover picture, which is not part of the video."""


class VideoFile(OpenedFile):
    """Pictures of the first video stream of a file; must be closed. Raises DecodeError."""

    timeline: Timeline  # times of the pictures, in the order in which they are shown

    def size(self) -> tuple[int, int]:
        """(width, height) as displayed, of the first picture."""
        with closing(self.frames([0])) as frames:
            height, width = next(frames).shape[:2]
        return width, height

    def frames(self, numbers: Sequence[int]) -> Pictures:
        """Yield upright pictures (height, width, 3), uint8, by their indices in the timeline, ascending.

        Close the generator if not all are used: a Ctrl-C while it is garbage-collected would be lost.
        """
        ticks, last = self.timeline.ticks, -1
        pixels: Pixels | None = None
        with closing(self._pictures(sorted(set(numbers)))) as pictures:
            for number in numbers:
                if number != last or pixels is None:
                    at, frame = next(pictures)
                    assert at == ticks[number]
                    pixels, last = self._upright(frame), number
                yield pixels

    def choose(self, options: dict[str, str]) -> None:
        streams = self._container.streams
        shown = [stream for stream in streams.video if not stream.disposition & _ATTACHED]
        if not shown:
            has_audio = any(stream.type == "audio" for stream in streams)
            raise DecodeError(f"no video in it{', only audio' if has_audio else ''}")
        self._use(shown[0], options, "a video of a")
        check_pixels(self._codec.width, self._codec.height, self._limits, "video")
        self._reformatter = VideoReformatter()

    def scan(self) -> None:
        """Read when pictures are shown from their packets."""
        ticks: list[int] = []
        starts: list[int] = []  # of keyframes
        keyframes: list[int] = []  # the same, including those that an edit leaves out
        last = None
        hides = self._codec.name in ("vp8", "libvpx")  # packets of these may contain a picture that is never shown
        try:
            with closing(self._packets()) as packets:
                for packet in packets:
                    if not packet.size or (hides and not memoryview(packet)[0] & _SHOWN_VP8):
                        continue
                    if packet.is_corrupt:
                        raise DecodeError(f"damaged video: it is cut after {len(ticks)} frames")
                    at, is_keyframe = packet.pts, packet.is_keyframe
                    if is_keyframe and not keyframes:
                        ticks.clear()  # those before it cannot be decoded
                    if len(keyframes) == 1 and not is_keyframe and (at is None or at < keyframes[0]):
                        continue  # shown before the first keyframe, and made from a picture that was cut off
                    if at is None:
                        raise DecodeError(
                            "it does not say when its frames are shown: write it again (`ffmpeg -fflags +genpts -i "
                            "in.mkv out.mkv`)"
                        )
                    keyframes += [at] * is_keyframe
                    if not packet.is_discard:
                        starts += [at] * is_keyframe
                        ticks.append(at)
                        last = packet.duration
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"damaged video: {said(error)}, after {len(ticks)} frames") from None
        # Build the timeline from the times.
        self._begins = keyframes[0] if keyframes else 0
        last_ticks = last if self._format == "gif" else None  # a GIF has only delays
        self.timeline = Timeline.of(ticks, exact(self._stream.time_base), last_ticks)
        # Pictures of a GIF are made from those before them, although its packets claim to be keyframes.
        self._starts = sorted(starts)[: 1 if self._format == "gif" else None]

    def _pictures(self, numbers: list[int]) -> Generator[tuple[int, Any]]:
        """Yield (time, picture), decoded from the last keyframe before it."""
        ticks = self.timeline.ticks[numbers].tolist()
        groups: dict[int, deque[int]] = {}
        for tick in ticks:
            groups.setdefault(bisect_right(self._starts, tick) - 1, deque()).append(tick)
        # Whether the decoder can skip a picture that no other is made from, before it reads the packet. In HEVC there
        # must be one temporal layer, by `hvcC` (ISO/IEC 14496-15): pictures of higher ones may still be made from it.
        spares = self._codec.name in ("h264", "mpeg4")
        if self._codec.name == "hevc":
            extra = self._codec.extradata or b""
            spares = len(extra) > _HVCC_LAYERS and extra[0] == 1 and extra[_HVCC_LAYERS] >> 3 & 7 == 1
        for start, pending in groups.items():
            can_seek = start >= 0 and self._format != "gif"
            try:
                with interrupts_deferred():
                    if can_seek:
                        self._container.seek(self._starts[start], stream=self._stream)
            except av.FFmpegError:
                can_seek = False
            if can_seek:
                with suppress(DecodeError):
                    yield from self._decoded(pending, self._starts[start], spares=spares)
            if pending:  # there is no such keyframe, or the file cannot seek to it: decode from its start
                self.open()
                yield from self._decoded(pending, self._begins, spares=False)

    def _decoded(self, pending: deque[int], begins: int, *, spares: bool) -> Generator[tuple[int, Any]]:
        """Yield pictures shown at these ascending times, and remove the times. Raises if a picture is missing.

        Pictures shown before the keyframe at `begins` may be made from missing ones; `spares` skips what nothing is
        made from.
        """
        with closing(self._all_from_here(begins, frozenset(pending) if spares else None)) as frames:
            for frame in frames:
                if frame.pts is None or frame.pts < begins:
                    continue
                if frame.pts > pending[0] or frame.is_corrupt:
                    break
                if frame.pts < pending[0]:
                    continue
                yield pending.popleft(), frame
                if not pending:
                    return
        number = int(np.searchsorted(self.timeline.ticks, pending[0]))
        raise DecodeError(f"damaged video: frame {number} of {self.timeline.frames} cannot be decoded {ENCODE_AGAIN}")

    def _all_from_here(self, begins: int, wanted: frozenset[int] | None) -> Generator[Any]:
        """Yield pictures; if only some are wanted, without others that nothing is made from."""
        frames: list[Any] | None = []
        self._led = False
        try:
            with self._demuxed() as packets:
                while frames is not None:
                    with interrupts_deferred():
                        frames = self._next_frames(packets, begins, wanted)
                    yield from frames or ()
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"damaged video: {said(error)} {ENCODE_AGAIN}") from None

    def _next_frames(self, packets: Iterator[Any], begins: int, wanted: frozenset[int] | None) -> list[Any] | None:
        """Return the pictures of the next packets that have any; None after the last packet.

        Errors of a picture shown before the one at which decoding began are ignored. In H.264 the first other picture
        may be reported as wrong only because its commands remove the missing ones; an error then shows in the picture
        itself.
        """
        for _ in range(TOGETHER):
            packet = next(packets, None)
            if packet is None:
                return None
            if wanted is not None:
                self._codec.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            leads = packet.pts is None or packet.pts < begins
            led, self._led = self._led, (leads or packet.pts == begins) and self._codec.name == "h264"
            try:
                frames: list[Any] = packet.decode()
            except av.InvalidDataError:
                if not leads and not led:
                    raise
                continue
            if frames:
                return frames
        return []

    def _upright(self, frame: Any) -> Pixels:
        check_pixels(frame.width, frame.height, self._limits, "video")
        turned = _turned(frame)
        try:
            plain = self._reformatter.reformat(frame, format="rgb24", threads=1)
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"video of {frame.format.name} pixels, which cannot be made RGB: {said(error)}") from None
        pixels: Any = plain.to_ndarray()
        return np.ascontiguousarray(turned(pixels))


def _turned(frame: Any) -> Callable[[Pixels], Pixels]:
    """Return how to turn and mirror a picture by the matrix of its file (ISO/IEC 14496-12, 8.3.2)."""
    with interrupts_deferred():
        # Not `frame.side_data`: the frame keeps it, and it references the frame. Its pixels would stay in memory until
        # a garbage collection, possibly many clips later.
        matrix = cast(Any, SideDataContainer)(frame).get(_MATRIX)
    if matrix is None:
        return lambda pixels: pixels
    # The pixel at x, y is shown at a x + c y, b x + d y.
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
    swaps = abs(a) + abs(d) < abs(b) + abs(c)
    (along, down), rest = ((c, b), (a, d)) if swaps else ((a, d), (b, c))
    if _SLANTED * max(map(abs, rest)) > min(abs(along), abs(down)) or not (along and down):
        raise DecodeError("a video that its file turns by no quarter: encode it again as it is to be seen")
    flips = tuple(slice(None, None, -1 if sign < 0 else 1) for sign in (down, along))
    return lambda pixels: (pixels.transpose(1, 0, 2) if swaps else pixels)[flips]


Wave = NDArray[np.float32]
_MICROSECONDS: Final = 1_000_000


class SoundTrack(OpenedFile):
    """The first sound track of a file; must be closed. Raises DecodeError."""

    rate: int = 0  # in Hz; 0 if there is no track
    # Samples per channel, from the file's start to the last one's end, according to its packets. If sound begins later
    # than the file, silence comes first, so that it stays in time with the pictures.
    frames: int = 0

    def choose(self, options: dict[str, str]) -> None:
        heard = list(self._container.streams.audio)
        if not heard:
            return
        self._use(heard[0], options, "its sound is of a")
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

    def scan(self) -> None:
        """Find the end of the last packet."""
        if self._stream is None:
            return
        rate = int(self._codec.sample_rate or 0)
        if rate < 1:
            raise DecodeError(f"damaged sound: a rate of {rate} Hz")
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
                        heard = []
                        for frame in frames:
                            if frame.sample_rate != self.rate:
                                raise DecodeError(
                                    f"its sound changes from {self.rate} to {frame.sample_rate} Hz: encode it again"
                                )
                            pts, tick = frame.pts, exact(frame.time_base)
                            heard.append((pts, tick, _plain(resampler, frame)))
                    for pts, tick, blocks in heard:
                        at = expected if pts is None else round((pts * tick - self._begins) * self.rate)
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
