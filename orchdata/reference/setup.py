"""What the demo trains: the recipe, the model's sizes, and the cost model that follows from them."""

from __future__ import annotations

from dataclasses import replace

from orchdata.balancers import CostModel, PhaseCost, TransformerCost
from orchdata.loaders.recipe import AudioPreprocessor, ImagePreprocessor, Recipe
from orchdata.reference.model import ModelConfig, Sizes


def make_recipe() -> Recipe:
    """Images of 4 to 256 tokens (at most 448 x 448 pixels), audio at 25 tokens a second, text as UTF-8 bytes."""
    return Recipe(
        image=ImagePreprocessor(patch_size=14, merge=2, min_tokens=4, max_tokens=256, dtype="float32"),
        audio=AudioPreprocessor(num_mels=80),
    )


def make_model_config(recipe: Recipe) -> ModelConfig:
    """About a million parameters, fitting the recipe: what one CPU core trains at a few steps a second."""
    config = ModelConfig(
        llm=Sizes(hidden=128, layers=3, ffn=512),
        image=Sizes(hidden=64, layers=3, ffn=256),
        audio=Sizes(hidden=64, layers=3, ffn=256),
    )
    return fit_to_recipe(config, recipe)


def fit_to_recipe(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """The same sizes, for the patches and frames that the recipe makes; a modality it lacks gets no encoder."""
    image, audio = recipe.image, recipe.audio
    if image is not None:
        config = replace(config, patch_dim=3 * image.patch_size**2, merge=image.merge)
    if audio is not None:
        frames_per_token = audio.sample_rate // (audio.tokens_per_second * audio.hop_length)
        config = replace(
            config,
            num_mels=audio.num_mels,
            conv_stride=audio.conv_stride,
            pool=frames_per_token // audio.conv_stride,
        )
    return replace(config, image=config.image if image else None, audio=config.audio if audio else None)


def make_cost(config: ModelConfig) -> CostModel:
    """Floating-point operations of each phase, from the model's sizes."""
    llm = config.llm
    return CostModel(
        image=_encoder_cost(config, config.image, config.patch_dim, config.merge**2),
        audio=_encoder_cost(config, config.audio, (config.conv_stride + 1) * config.num_mels, config.pool),
        llm=TransformerCost(
            hidden=llm.hidden,
            layers=llm.layers,
            ffn=llm.ffn,
            vocab=config.vocab_size,
            causal=True,
            recompute=config.checkpoint,
        ),
    )


def _encoder_cost(config: ModelConfig, sizes: Sizes | None, in_dim: int, group: int) -> PhaseCost | None:
    """The transformer, and around it the embedding and the projector, which matter in a model this small."""
    if sizes is None:
        return None
    hidden, trainable = sizes.hidden, not config.freeze_encoders
    transformer = TransformerCost(
        hidden=hidden,
        layers=sizes.layers,
        ffn=sizes.ffn,
        trainable=trainable,
        recompute=config.checkpoint,
        stem_macs=in_dim * hidden,
    ).phase_cost()
    # As `connector_macs`, but for the gradient of the first layer's input, which a frozen encoder does not need.
    projector = 2 * group * hidden**2 * (3 if trainable else 2) + 2 * hidden * config.llm.hidden * 3
    return PhaseCost(transformer.linear + projector, transformer.quadratic)
