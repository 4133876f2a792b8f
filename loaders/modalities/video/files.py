"""Video files -> their header, without decoding them: shared by all modalities that are read from video files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.failures import as_failure
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import check_pixels
from orchdata.loaders.modalities.image_header import READS_IMAGES, load_formats
from orchdata.loaders.modalities.modality import Header, Heads, Modality, PartSize
from orchdata.loaders.modalities.video.containers import is_video, plain_header
from orchdata.native.scan.media import FOUND

UNREAD: Final = tuple("avi wmv flv mpg mpeg m2ts mts ogv".split())
"""Videos too; their error says what to do, because a sample without its clip would be learned as text only."""
_PIXEL_BYTES: Final = 32
"""For a picture as decoded and as RGB, and for up to sixteen that a decoder keeps as references."""


class VideoFiles(Modality):
    """A modality read from video files and lists of frames.

    A header is (width, height, frames, numerator and denominator of seconds), as displayed. It comes from the tables of
    a plain MP4, and for all other files from a scan of packets.
    """

    fields = tuple("mp4 m4v mov 3gp webm mkv gif frames.json video.json".split()) + UNREAD
    words = ("video", "video_url")
    plural = "videos"
    column_words = frozenset("video videos clip clips movie movies".split())
    hf_feature = "Video"
    listed = "image"
    num_facts = 5

    def required_modules(self) -> tuple[str, ...]:
        return (*READS_IMAGES, "av", "orchdata.loaders.modalities.video.file")

    def set_up_process(self) -> None:
        load_formats()  # for frames that a record lists

    @staticmethod
    def scan(heads: Heads) -> None:
        data = heads.buffer.data
        heads_of = zip(heads.starts.tolist(), heads.available.tolist(), heads.sizes.tolist(), strict=True)
        for number, (start, available, size) in enumerate(heads_of):
            status, header = plain_header(data[start : start + available], size)
            heads.status[number] = status
            if status == FOUND:
                heads.facts[number] = header

    @classmethod
    def probe(cls, data: bytes, limits: Limits) -> Header:
        from orchdata.loaders.modalities.video.decode import header_of, open_video

        with as_failure(DecodeError, "damaged video"), open_video(data, limits) as video:
            return header_of(video, video.size())

    @staticmethod
    def from_frames(files: Sequence[bytes], metadata: Mapping[str, Any]) -> bytes:
        from orchdata.loaders.modalities.video.frame_list import frame_list

        return frame_list(files, metadata)

    @staticmethod
    def seconds(header: Header) -> float:
        return header[3] / max(1, header[4])

    @classmethod
    def matches_magic(cls, head: bytes) -> bool:
        return is_video(head)

    @staticmethod
    def checked_header(header: Header, limits: Limits) -> tuple[int, int, int, Fraction]:
        """Return (width, height, frames, seconds) of a clip that may be decoded. Raises DecodeError for others."""
        width, height, frames, numerator, denominator = header
        if min(header) < 1:
            raise DecodeError(
                f"not a readable video: its header says {frames} frames of {width} x {height} pixels in "
                f"{numerator} / {denominator} s"
            )
        check_pixels(width, height, limits, "video")
        seconds = Fraction(numerator, denominator)
        if seconds > limits.audio_seconds:
            raise DecodeError(f"video of {float(seconds):.0f} s, above Limits.audio_seconds={limits.audio_seconds:g}")
        return width, height, frames, seconds

    def decoding_bytes(self, parts: Sequence[tuple[Header, PartSize]]) -> int:
        """Memory of a decoder for the largest of them: they are decoded one after the other."""
        return _PIXEL_BYTES * max([header[0] * header[1] for header, _ in parts])
