"""Small byte-level BPE tokenizers with the special tokens of published ones: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SENTENCES = (
    "What is in the picture, and where is it?",
    "Compare the first image with the second one.\n\nThe first image shows a chart of three columns.",
    "The speaker says that nothing is left to do. You are a helpful assistant.",
    "user\nassistant\nsystem\nmodel\n USER: ASSISTANT: User: Assistant: Picture 1: Audio 1: Here is the original image",
)


@cache
def _merges() -> str:
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bare.train_from_iterator(SENTENCES, trainer)
    bare.decoder = decoders.ByteLevel()
    return bare.to_str()


def tokenizer(
    special: Sequence[str] = (),
    *,
    named: Mapping[str, str] | None = None,
    adds_bos: bool = False,
    kind: type[Any] | None = None,
    **options: Any,
) -> Any:
    """A fast tokenizer."""
    from transformers import PreTrainedTokenizerFast

    named = dict(named or {})
    inner = Tokenizer.from_str(_merges())
    known = [text for key, text in options.items() if key.endswith("_token")]
    for text in dict.fromkeys([*known, *special, *named.values()]):
        inner.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    if adds_bos:
        bos = options["bos_token"]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A $B:1",
            special_tokens=[(bos, inner.token_to_id(bos))],
        )
    return (kind or PreTrainedTokenizerFast)(tokenizer_object=inner, extra_special_tokens=named, **options)
