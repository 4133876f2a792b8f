"""What a profile asks of the recipes of its data: how long dummies are, and whether a processor made them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchdata.dataset.mixture import Mixture
from orchdata.loaders.text.jinja import JinjaTemplate

if TYPE_CHECKING:
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.index.index import Index
    from orchdata.loaders.recipe import Recipe


def dummy_tokens(index: Index, dataset: ShardDataset | Mixture | None) -> dict[str, int]:
    """Return the LLM tokens of each modality's dummy; 1 if the recipe is not known, as of an index alone."""
    recipes = _recipes_of(dataset)
    modalities = recipes[0].modalities if recipes else {}  # as batches of a mixture have them
    return {name: modalities[name].dummy().tokens if name in modalities else 1 for name in index.modalities[1:]}


def is_of_processor(dataset: ShardDataset | Mixture | None) -> bool:
    """Return whether a recipe was made by `od.hf.recipe`: its model takes the batches of `od.hf.Inputs`.

    A modality of a processor says so, and of a recipe for text alone its template.
    """
    return any(
        recipe.of_processor or (not recipe.modalities and isinstance(recipe.text.template, JinjaTemplate))
        for recipe in _recipes_of(dataset)
    )


def _recipes_of(dataset: ShardDataset | Mixture | None) -> list[Recipe]:
    if isinstance(dataset, Mixture):
        return [leaf.dataset.recipe for leaf in dataset.leaves]
    return [] if dataset is None else [dataset.recipe]
