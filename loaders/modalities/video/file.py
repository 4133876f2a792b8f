"""A video file: when its pictures are shown, from its packets, and the pictures that are asked for.

    bytes --memory file--> libav --packets--> Timeline         packets, from the last whole picture on --> pictures

Imported late: it loads FFmpeg's libraries.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Final, cast

import av
import numpy as np
from av.sidedata.sidedata import SideDataContainer, Type
from av.video.reformatter import VideoReformatter

from orchdata.loaders.errors import DecodeError, pass_trouble
from orchdata.loaders.interrupts import interrupts_held
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import above_pixels
from orchdata.loaders.modalities.image_decode import Pixels
from orchdata.loaders.modalities.video.opened import TOGETHER, OpenedFile, exact, said
from orchdata.loaders.modalities.video.timeline import ANEW, Timeline

Pictures = Generator[Pixels]

_SHOWN_VP8: Final = 0x10
_SLANTED: Final = 1000
"""How many times larger than the others a matrix' numbers are that turn by quarters."""
_MATRIX: Final = Type.DISPLAYMATRIX
_HVCC_LAYERS: Final = 21
_ATTACHED: Final = av.stream.Disposition.attached_pic
"""A picture of its cover, which players show beside it."""


class VideoFile(OpenedFile):
    """Pictures of the first video stream of a file; to be closed. Raises DecodeError.

    Attributes:
        timeline: of the pictures, in the order in which they are shown.
    """

    timeline: Timeline

    def __init__(self, data: bytes | memoryview, limits: Limits) -> None:
        super().__init__(data, limits)
        try:
            self._scan()
        except BaseException:
            self.close()
            raise

    def size(self) -> tuple[int, int]:
        """(width, height) as displayed, of the first picture."""
        with closing(self.frames([0])) as frames:
            height, width = next(frames).shape[:2]
        return width, height

    def frames(self, numbers: Sequence[int]) -> Pictures:
        """Upright pictures (height, width, 3), uint8, by their places in the timeline, ascending.

        To be closed where not all are asked for: Ctrl-C in a generator that is collected would be forgotten.
        """
        ticks, last = self.timeline.ticks, -1
        pixels: Pixels | None = None
        with closing(self._pictures(sorted(set(numbers)))) as found:
            for number in numbers:
                if number != last or pixels is None:
                    at, frame = next(found)
                    assert at == ticks[number]
                    pixels, last = self._upright(frame), number
                yield pixels

    def choose(self, options: dict[str, str]) -> None:
        streams = self._container.streams
        shown = [stream for stream in streams.video if not stream.disposition & _ATTACHED]
        if not shown:
            held = sorted({stream.type for stream in streams if stream.type == "audio"})
            raise DecodeError(f"no video in it{', only audio' if held else ''}")
        self._stream = shown[0]
        self._codec = self._stream.codec_context
        if self._codec is None:
            raise DecodeError("a video whose codec the installed FFmpeg libraries cannot decode: encode it anew")
        reason = above_pixels(self._codec.width, self._codec.height, self._limits, "video")
        if reason is not None:
            raise DecodeError(reason)
        self._codec.options = options
        self._codec.thread_count = 1
        self._reformatter = VideoReformatter()

    def _scan(self) -> None:
        """When pictures are shown, by their packets; nothing is decoded."""
        ticks: list[int] = []
        starts: list[int] = []
        whole: list[int] = []  # as `starts`, with those that an edit leaves out
        last = None
        hides = self._codec.name in ("vp8", "libvpx")  # whose packets may hold a picture that is never shown
        try:
            with closing(self._packets()) as packets:
                for packet in packets:
                    if not packet.size or (hides and not memoryview(packet)[0] & _SHOWN_VP8):
                        continue
                    if packet.is_corrupt:
                        raise DecodeError(f"damaged video: it is cut behind {len(ticks)} frames")
                    at, stands_alone = packet.pts, packet.is_keyframe
                    if stands_alone and not whole:
                        ticks.clear()  # nothing leads to those before it
                    if len(whole) == 1 and not stands_alone and (at is None or at < whole[0]):
                        continue  # shown before the first that stands alone, and made from one that was cut off
                    if at is None:
                        raise DecodeError(
                            "it does not say when its frames are shown: write it anew (`ffmpeg -fflags +genpts -i "
                            "in.mkv out.mkv`)"
                        )
                    whole += [at] * stands_alone
                    if not packet.is_discard:
                        starts += [at] * stands_alone
                        ticks.append(at)
                        last = packet.duration
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"damaged video: {said(error)}, behind {len(ticks)} frames") from None
        self._begins = whole[0] if whole else 0
        told = last if self._format == "gif" else None  # delays are all that a GIF has
        self.timeline = Timeline.of(ticks, exact(self._stream.time_base), told)
        # Pictures of a GIF are made from those before them, whatever its packets say.
        self._starts = sorted(starts)[: 1 if self._format == "gif" else None]

    def _pictures(self, numbers: list[int]) -> Generator[tuple[int, Any]]:
        """(when it is shown, picture), decoded from the last picture before it that stands alone."""
        ticks = self.timeline.ticks[numbers].tolist()
        groups: dict[int, deque[int]] = {}
        for tick in ticks:
            groups.setdefault(bisect_right(self._starts, tick) - 1, deque()).append(tick)
        for place, pending in groups.items():
            if place >= 0 and self._seek(place):
                with suppress(DecodeError):
                    yield from self._decoded(pending, self._starts[place], spares=self._knows_nonreference())
            if pending:  # there is no such place, or the file does not lead there: from its start, then
                self.open()
                yield from self._decoded(pending, self._begins, spares=False)

    def _knows_nonreference(self) -> bool:
        """Whether the decoder leaves out a picture that no other is made from when it is told to, before its packet.

        In HEVC such pictures may still serve those of higher temporal layers: there must be one layer, as `hvcC` says
        (ISO/IEC 14496-15, 8.3.3.1).
        """
        if self._codec.name == "hevc":
            extra = self._codec.extradata or b""
            return len(extra) > _HVCC_LAYERS and extra[0] == 1 and extra[_HVCC_LAYERS] >> 3 & 7 == 1
        return self._codec.name in ("h264", "mpeg4")

    def _seek(self, place: int) -> bool:
        if self._format == "gif":
            return False
        try:
            with interrupts_held():
                self._container.seek(self._starts[place], stream=self._stream)
        except av.FFmpegError:
            return False
        return True

    def _decoded(self, pending: deque[int], begins: int, *, spares: bool) -> Generator[tuple[int, Any]]:
        """Pictures shown at these times, ascending, which are taken from them. Raises for one that does not come.

        Args:
            begins: when a picture that stands alone is shown. Those shown before it may lack what they are made from.
            spares: whether others that nothing is made from are left out.
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
        raise DecodeError(f"damaged video: frame {number} of {self.timeline.frames} cannot be decoded {ANEW}")

    def _all_from_here(self, begins: int, wanted: frozenset[int] | None) -> Generator[Any]:
        """Pictures; without those that nothing is made from, where only some are wanted."""
        frames: list[Any] | None = []
        self._led = False
        try:
            with self._demuxed() as packets:
                while frames is not None:
                    with interrupts_held():
                        frames = self._next_frames(packets, begins, wanted)
                    yield from frames or ()
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"damaged video: {said(error)} {ANEW}") from None

    def _next_frames(self, packets: Iterator[Any], begins: int, wanted: frozenset[int] | None) -> list[Any] | None:
        """What the next packets show, if they do; None behind the last.

        A picture shown before the one that decoding began with may be made from others, which are lacking. The first
        one that is not may be said to be wrong for no more than H.264's commands to forget these; whether it is, its
        picture says.
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
        reason = above_pixels(frame.width, frame.height, self._limits, "video")
        if reason is not None:
            raise DecodeError(reason)
        turned = _turned(frame)
        try:
            plain = self._reformatter.reformat(frame, format="rgb24", threads=1)
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"video of {frame.format.name} pixels, which cannot be made RGB: {said(error)}") from None
        pixels: Any = plain.to_ndarray()
        return np.ascontiguousarray(turned(pixels))


def _turned(frame: Any) -> Callable[[Pixels], Pixels]:
    """How a picture is turned and mirrored, by the matrix of its file (ISO/IEC 14496-12, 8.3.2): the pixel at x, y is
    shown at a x + c y, b x + d y. Raises DecodeError for turns that are no quarters.
    """
    with interrupts_held():
        # Not `frame.side_data`, which the frame keeps and which holds the frame: its pixels would stay in memory until
        # garbage is collected, and that may be many clips later.
        held = cast(Any, SideDataContainer)(frame).get(_MATRIX)
    if held is None:
        return lambda pixels: pixels
    a, b, _, c, d = np.frombuffer(bytes(held), np.int32)[:5].tolist()
    swaps = abs(a) + abs(d) < abs(b) + abs(c)
    (along, down), rest = ((c, b), (a, d)) if swaps else ((a, d), (b, c))
    if _SLANTED * max(map(abs, rest)) > min(abs(along), abs(down)) or not (along and down):
        raise DecodeError("a video that its file turns by no quarter: encode it anew as it is to be seen")
    flips = tuple(slice(None, None, -1 if sign < 0 else 1) for sign in (down, along))
    return lambda pixels: (pixels.transpose(1, 0, 2) if swaps else pixels)[flips]
