"""What is planned for comparison with each paper: every setting is a declared assumption, none fits a reported number.

What the papers report stands in `REPORTED`, with where we have it from and what of it no balancing of data gives.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.mixes import Lengths, Media, Mix
from orchdata.balancers import CostModel, TransformerCost
from orchdata.planning.balance import Balance

GROUP_SIZE = 8  # GPUs of a node.

_TEXT = Lengths(median=450, sigma=1.0, least=8, most=8_192)
_IMAGES = Media(
    positions=Lengths(median=1_024, sigma=0.8, least=64, most=6_400, multiple_of=4), positions_a_token=4, most=4
)
_SPEECH = Media(positions=Lengths(median=600, sigma=0.5, least=50, most=1_750, multiple_of=2), positions_a_token=2)
# As long as 17.6 texts in LLM tokens, on average: exp(0.8**2 / 2) medians of 2 positions a token, texts of 742 tokens.
_LONG_AUDIO = Media(
    positions=Lengths(median=19_000, sigma=0.8, least=100, most=60_000, multiple_of=2), positions_a_token=2
)

_LLM_72B = TransformerCost(
    hidden=8192, layers=80, ffn=29_568, heads=64, kv_heads=8, vocab=152_064, causal=True, gated=True
)
_LLM_8B = TransformerCost(
    hidden=4096, layers=32, ffn=14_336, heads=32, kv_heads=8, vocab=128_256, causal=True, gated=True
)
_VISION_6B = TransformerCost(hidden=3200, layers=45, ffn=12_800)
_AUDIO_2B = TransformerCost(hidden=2048, layers=40, ffn=8_192)
_ENCODER_630M = TransformerCost(hidden=1280, layers=32, ffn=5_120)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the table: a mix under a model, on so many ranks.

    Attributes:
        paper: whose setting it resembles.
        name: of the row, with `samples_per_rank` added.
        model_words: the model in words.
        ranks: data-parallel ranks that wait for each other after each phase of each micro-step.
        samples_per_rank: in a step, mean.
        balance: caps, if any.
    """

    paper: str
    name: str
    mix: Mix
    model: CostModel
    model_words: str
    ranks: int
    samples_per_rank: int
    balance: Balance = Balance()

    @property
    def title(self) -> str:
        """The row's name."""
        return f"{self.name}, {self.ranks:,} x {self.samples_per_rank}"


_ORCH_MIX = Mix(
    text=_TEXT,
    media={"image": _IMAGES, "audio": _SPEECH},
    kinds={(): 0.3, ("image",): 0.35, ("audio",): 0.25, ("image", "audio"): 0.1},
)
_ORCH_MODEL = CostModel(image=_VISION_6B, audio=_AUDIO_2B, llm=_LLM_72B)
_OMNI_MODEL = CostModel(image=_ENCODER_630M, audio=_ENCODER_630M, llm=_LLM_8B)
_VISION_MODEL = CostModel(image=_ENCODER_630M, llm=_LLM_8B)
_OMNI_CAP = Balance(max_tokens=32_768, oversize="own")


def _vision_mix(images: int) -> Mix:
    return Mix(text=_TEXT, media={"image": _IMAGES}, kinds={("image",): images / 10, (): 1 - images / 10})


CASES: tuple[Case, ...] = (
    *(
        Case(
            paper="OrchMLLM",
            name="image, audio, text; 80B",
            mix=_ORCH_MIX,
            model=_ORCH_MODEL,
            model_words="LLM 72B, image encoder 5.5B, audio encoder 2.0B, all trained",
            ranks=2_560,
            samples_per_rank=samples,
        )
        for samples in (2, 8, 32)
    ),
    *(
        Case(
            paper="MegaScale-Omni",
            name=f"image : text = {images} : {10 - images}",
            mix=_vision_mix(images),
            model=_VISION_MODEL,
            model_words="LLM 8B, image encoder 0.63B, all trained",
            ranks=512,
            samples_per_rank=64,
            balance=_OMNI_CAP,
        )
        for images in (1, 3, 5, 7, 9)
    ),
    Case(
        paper="MegaScale-Omni",
        name="image, long audio, text",
        mix=Mix(
            text=_TEXT,
            media={"image": _IMAGES, "audio": _LONG_AUDIO},
            kinds={(): 0.34, ("image",): 0.33, ("audio",): 0.33},
        ),
        model=_OMNI_MODEL,
        model_words="LLM 8B, two encoders of 0.63B, all trained",
        ranks=512,
        samples_per_rank=64,
        balance=_OMNI_CAP,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineCase:
    """Sequences of equal LLM length and unequal images in a 1F1B pipeline.

    Attributes:
        groups: data-parallel groups, each a pipeline; they wait for each other at the end of a step.
        stages: the first is the encoder, the last the generator, the others share the LLM evenly.
        microbatches: of a group in a step, one sequence each.
        heavy: mean time of the encoder's and of the generator's stage over that of an LLM stage.
        image_tokens: of a sequence; encoder and generator take time in proportion, the LLM always the same.
    """

    groups: int = 16
    stages: int = 8
    microbatches: int
    heavy: float
    image_tokens: Lengths = Lengths(median=1_500, sigma=1.0, least=64, most=8_192)

    @property
    def title(self) -> str:
        """The row's name."""
        return f"{self.groups} groups x {self.microbatches} microbatches, ends {self.heavy:g} x an LLM stage"


PIPELINES: tuple[PipelineCase, ...] = tuple(
    PipelineCase(microbatches=count, heavy=heavy) for heavy in (1.0, 0.5) for count in (16, 40, 80)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """What a paper reports of its whole system.

    Attributes:
        gain: in its words, roughly.
        known_from: what of the paper we have read.
        beyond_data: what of the gain is not data balancing.
    """

    paper: str
    gain: str
    known_from: str
    beyond_data: str


REPORTED: tuple[Reported, ...] = (
    Reported(
        paper="OrchMLLM",
        gain="up to 3.1x Megatron-LM's throughput; 41.6 % MFU, 84B on 2,560 H100",
        known_from="abstract",
        beyond_data="the baseline's parallelism, the node-wise all-to-all, features sent once, overlap with computing",
    ),
    Reported(
        paper="MegaScale-Omni",
        gain="1.27x to 7.57x over four systems",
        known_from="abstract",
        beyond_data="long-short sequence parallelism, resharding from encoders to LLM, parallelism of each, kernels",
    ),
    Reported(
        paper="MegaScale-Omni",
        gain="without workload balancing 45.9 to 50.7 % less throughput: 1.85x to 2.03x with it; tri-modal up to 2.01x",
        known_from="a digest, not checked against the paper",
        beyond_data="by the digest the first is balancing alone; the second is of the whole system",
    ),
    Reported(
        paper="DistTrain",
        gain="up to 2.2x Megatron-LM's throughput; 54.7 % MFU, 72B on 1,172 GPUs",
        known_from="abstract",
        beyond_data="GPUs chosen for encoder, LLM and generator apart, preprocessing on other machines, communication",
    ),
)
