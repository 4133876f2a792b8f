"""Seeded synthetic costs: what balancers are measured and tested on. Each function returns int64 (num_samples,)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.costs.model import CostModel
from orchdata.balancers.costs.phase import TransformerCost
from orchdata.bench import ENCODER, LLM, OMNI_COST

# Costs of one sequence of l positions, in token units: a language model of 4,096 hidden units spends as much on
# attention as on its weights at about 24,000 positions, a vision encoder of 1,280 at about 7,700.
LLM_CROSSOVER = 24_576
ENCODER_CROSSOVER = 7_680

LARGE_VISION_COST = CostModel(image=TransformerCost(hidden=3200, layers=45, ffn=12_800), audio=ENCODER, llm=LLM)


def quadratic(lengths: NDArray[np.int64], crossover: int = LLM_CROSSOVER) -> NDArray[np.int64]:
    """Cost of attention and weights: l + l*l / crossover, in 1/16 of a position so that short ones differ too."""
    return (16 * lengths + 16 * lengths * lengths // crossover).astype(np.int64)


def text_lengths(generator: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    """Instruction-tuning text: log-normal, median 450 tokens, at most 8,192."""
    return np.clip(generator.lognormal(6.1, 1.0, num_samples), 8, 8192).astype(np.int64)


def image_patches(generator: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    """Native-resolution images, 1 to 4 a sample, 64 to 6,400 patches each, in multiples of 4."""
    images = generator.geometric(0.6, num_samples).clip(max=4)
    side = generator.lognormal(3.4, 0.4, num_samples).clip(8, 80).astype(np.int64)
    return (images * side * side // 4 * 4).clip(min=64).astype(np.int64)


def speech_frames(generator: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    """Speech clips of 1 to 35 s at 50 positions a second, most between 10 and 17 s (as read speech is cut)."""
    seconds = np.where(
        generator.random(num_samples) < 0.7,
        generator.normal(14.0, 2.0, num_samples),
        generator.uniform(1.0, 35.0, num_samples),
    )
    return (seconds.clip(1.0, 35.0) * 50).astype(np.int64)


def omni_lengths(generator: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    """A mixture: text in all samples, images (merged 4 to 1) in half, audio at 25 tokens a second in a third."""
    images = np.where(generator.random(num_samples) < 0.5, image_patches(generator, num_samples) // 4, 0)
    audio = np.where(generator.random(num_samples) < 0.33, speech_frames(generator, num_samples) // 2, 0)
    return (text_lengths(generator, num_samples) + images + audio).astype(np.int64)


def long_tail(generator: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    """Pareto with exponent 1.3, at most 131,072: a few documents hold a good part of all tokens."""
    return np.clip(256 * (1 + generator.pareto(1.3, num_samples)), 256, 131_072).astype(np.int64)


def audio_phase(generator: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    """Audio encoder of a mixture: two samples in three have no audio and cost nothing in this phase."""
    return np.where(generator.random(num_samples) < 0.33, speech_frames(generator, num_samples), 0).astype(np.int64)


def image_phase(generator: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    """Vision encoder of a mixture: half the samples have no image."""
    return np.where(generator.random(num_samples) < 0.5, image_patches(generator, num_samples), 0).astype(np.int64)


Distribution = Callable[[np.random.Generator, int], NDArray[np.int64]]

DISTRIBUTIONS: Mapping[str, Distribution] = {
    "text": text_lengths,
    "text quadratic": lambda generator, count: quadratic(text_lengths(generator, count)),
    "image": image_patches,
    "image quadratic": lambda generator, count: quadratic(image_patches(generator, count), ENCODER_CROSSOVER),
    "speech": speech_frames,
    "speech quadratic": lambda generator, count: quadratic(speech_frames(generator, count), ENCODER_CROSSOVER),
    "omni": omni_lengths,
    "omni quadratic": lambda generator, count: quadratic(omni_lengths(generator, count)),
    "long tail": long_tail,
    "long tail quadratic": lambda generator, count: quadratic(long_tail(generator, count)),
    "audio phase": audio_phase,
    "image phase": image_phase,
}


def omni_phases(
    generator: np.random.Generator, num_samples: int, cost: CostModel = OMNI_COST
) -> dict[str, NDArray[np.int64]]:
    """Costs by phase of a multimodal mixture, by default under the shapes of an 8B backbone and two encoders of 630M.

    All samples have text; half have 1 to 4 images of the same size, a third has one clip of speech.
    """
    images = np.where(generator.random(num_samples) < 0.5, generator.geometric(0.6, num_samples).clip(max=4), 0)
    side = generator.lognormal(3.4, 0.4, num_samples).clip(8, 80).astype(np.int64) // 2 * 2
    frames = np.where(generator.random(num_samples) < 0.33, speech_frames(generator, num_samples), 0)
    tokens = text_lengths(generator, num_samples) + images * (side * side // 4) + frames // 2
    return {
        "image": cost.sequence_costs("image", side * side) * images,
        "audio": cost.sequence_costs("audio", frames),
        "llm": cost.sequence_costs("llm", tokens),
    }
