"""Features -> the positions of their tokens in the sequence."""

from __future__ import annotations

from torch import Tensor

from orchdata.batch.tensors import MediaBatch


def merge_features(embeds: Tensor, features: Tensor, positions: Tensor) -> Tensor:
    """Put rows of `features` (num_rows, hidden) at `positions` (num_tokens,) of `embeds` (..., hidden).

    Positions count through all dimensions of `embeds` but the last. Rows after num_tokens belong to a dummy. Raises
    ValueError for fewer rows than positions.
    """
    num_tokens = positions.shape[0]
    if features.shape[0] < num_tokens:
        raise ValueError(
            f"{num_tokens} tokens are expected by the sequence, the features have {features.shape[0]} rows"
        )
    if features.shape[-1] != embeds.shape[-1]:
        raise ValueError(f"features are {features.shape[-1]} wide, embeddings {embeds.shape[-1]}")
    rows = embeds.reshape(-1, embeds.shape[-1])
    return rows.index_copy(0, positions, features[:num_tokens].to(embeds.dtype)).view(embeds.shape)


def token_rows(name: str, media: MediaBatch, features: Tensor) -> Tensor:
    """Return the rows of an encoder's output that go into the sequence, (num_rows, hidden)."""
    if features.dim() == 2:
        return features
    if media.mask is None or media.token_places is None:
        raise ValueError(f"{name} features have shape {tuple(features.shape)}, expected (num_tokens, hidden)")
    if features.dim() != 3 or features.shape[0] != media.mask.shape[0]:
        raise ValueError(
            f"{name} features have shape {tuple(features.shape)}, expected (num_tokens, hidden) or "
            f"({media.mask.shape[0]}, max_tokens, hidden)"
        )
    item, token = media.token_places
    return features[item, token]
