"""Balanced per phase: which rank encodes an image, which one trains its text, and what travels between them."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_uppercase

import numpy as np

from benchmarks.pictures.diagrams.canvas import Canvas
from benchmarks.pictures.drawn_plans import IMAGES, SAMPLES
from benchmarks.report.results import figure, numbers, titled
from orchdata.bench import Report

_ROW, _TOP, _GROUP_GAP = 21.0, 76.0, 12.0
_ENCODED, _TRAINED = 300.0, 420.0  # where bars of images end, where bars of samples begin


def draw_exchange(stored: Report) -> Canvas:
    """Images on the left, by the rank that encodes them; samples on the right, by the rank that trains them."""
    images, samples = titled(stored, IMAGES), titled(stored, SAMPLES)
    sample, encoder = numbers(images, "sample").astype(np.int64), numbers(images, "encoded by").astype(np.int64)
    home = numbers(samples, "trained by").astype(np.int64)
    positions, tokens = numbers(images, "positions").astype(np.int64), numbers(samples, "tokens").astype(np.int64)
    ranks = int(max(home.max(), encoder.max())) + 1
    moved = int((encoder != home[sample]).sum())
    waits = {
        way: figure(stored, f"share of the step of images that ranks wait, {way}")
        for way in ("unbalanced", "balanced", "per phase")
    }

    # Every rank has as many rows on both sides as it needs on the fuller one, so that both stand side by side.
    rows = [max(int((encoder == rank).sum()), int((home == rank).sum())) for rank in range(ranks)]
    tops = [_TOP + sum(rows[:rank]) * _ROW + rank * _GROUP_GAP for rank in range(ranks)]
    bottom = tops[-1] + rows[-1] * _ROW
    canvas = Canvas(
        bottom + 76,
        "Encoders balanced apart: one rank encodes an image, another one may train its sample",
        f"{len(sample)} images on the left, grouped by the rank that encodes them; {len(home)} samples on the right, "
        f"grouped by the rank that trains them. {moved} images have a bold arrow to another rank: their features are "
        f"exchanged. Ranks wait {waits['unbalanced']:.0%} of this step if samples are dealt out in turn, "
        f"{waits['balanced']:.0%} if whole samples are balanced, {waits['per phase']:.0%} if each phase is.",
    )
    canvas.text(20, 32, "Who encodes the images", size=14, bold=True)
    canvas.text(20, 52, "bars: patches of the image")
    canvas.text(_TRAINED - 8, 32, "Who trains the samples", size=14, bold=True)
    canvas.text(_TRAINED - 8, 52, "bars: tokens of the sample")
    canvas.text((_ENCODED + _TRAINED) / 2, _TOP - 6, "exchange", anchor="middle")
    for rank in range(ranks):
        height = rows[rank] * _ROW + 4
        canvas.box(14, tops[rank] - 4, _ENCODED - 2, height, "ground", radius=4)
        canvas.box(_TRAINED - 12, tops[rank] - 4, 706 - _TRAINED + 12, height, "ground", radius=4)
        canvas.text(22, tops[rank] + 13, f"rank {rank}", bold=True)
        canvas.text(698, tops[rank] + 13, f"rank {rank}", bold=True, anchor="end")

    # Bars are to one scale on each side: positions of the encoder, tokens of the LLM.
    trained_y: dict[int, float] = {}
    for rank in range(ranks):
        for index, number in enumerate(np.flatnonzero(home == rank).tolist()):
            y, width = tops[rank] + index * _ROW, int(tokens[number]) / int(tokens.max()) * 200
            canvas.box(_TRAINED, y, width, _ROW - 4, "llm")
            canvas.text(_TRAINED + 5, y + 13, ascii_uppercase[number], colour="label")
            trained_y[number] = y + (_ROW - 4) / 2
    for rank in range(ranks):
        for index, number in enumerate(np.flatnonzero(encoder == rank).tolist()):
            of = int(sample[number])
            y, width = tops[rank] + index * _ROW, int(positions[number]) / int(positions.max()) * 200
            canvas.box(_ENCODED - width, y, width, _ROW - 4, "image")
            words = f"image of {ascii_uppercase[of]}"
            canvas.text(_ENCODED - 5, y + 13, words, anchor="end", colour="label")
            ends = (_ENCODED + 3, y + (_ROW - 4) / 2, _TRAINED - 3, trained_y[of])
            if encoder[number] == home[of]:
                canvas.line(*ends, width=1.2, dash="3 3")
            else:
                canvas.arrow(*ends, width=2)
    _legend(canvas, bottom + 26, f"{moved} of {len(sample)}", waits)
    return canvas


def _legend(canvas: Canvas, y: float, moved: str, waits: Mapping[str, float]) -> None:
    canvas.line(20, y - 4, 50, y - 4, width=1.2, dash="3 3")
    canvas.text(58, y, "stays on its rank")
    canvas.arrow(210, y - 4, 244, y - 4, width=2)
    canvas.text(252, y, f"its features go to another rank ({moved})")
    canvas.text(20, y + 30, "Ranks wait", bold=True)
    canvas.text(110, y + 30, f"dealt out in turn: {waits['unbalanced']:.0%}")
    canvas.text(280, y + 30, f"whole samples balanced: {waits['balanced']:.0%}")
    canvas.text(700, y + 30, f"each phase balanced: {waits['per phase']:.0%}", bold=True, anchor="end")
