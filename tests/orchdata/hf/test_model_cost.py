"""Costs of whole models in training against the operations that torch counts in a step of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
from hf_families.families import FAMILIES
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import orchdata as od

SIDE, PATCH = 112, 14
GRID = (16, 24)


@dataclass(frozen=True)
class Tiny:
    """A model and one part of each of its modalities."""

    name: str  # of hf_families
    # Phase -> (positions of the part, model -> its features, a tensor, and what else must join the loss).
    parts: dict[str, tuple[int, Callable[[Any], tuple[torch.Tensor, list[torch.Tensor]]]]]
    # Part of its configuration, name and value of settings that are otherwise.
    changed: tuple[tuple[str, str, Any], ...] = ()

    def make_model(self) -> Any:
        model = FAMILIES[self.name].build()[1]
        config = model.config
        for part, name, value in self.changed:
            setattr(getattr(config, part), name, value)
        for each in (config, *(getattr(config, name) for name in config.sub_configs if getattr(config, name, None))):
            each._attn_implementation = "eager"
        return type(model)._from_config(config)


def _joined(output: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    features = output if isinstance(output, torch.Tensor | list | tuple) else output.pooler_output
    if isinstance(features, list | tuple):
        features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
    deepstack = getattr(output, "deepstack_features", None) or ()
    return features.reshape(-1, features.shape[-1]), [torch.cat(list(each)) for each in deepstack]


def squares(count: int, *, side: int = SIDE, **inputs: Any) -> tuple[int, Callable[[Any], Any]]:
    """`count` images of the tower's own size."""

    def run(model: Any) -> Any:
        shape = inputs.get("shape", (count,))
        more = {name: value for name, value in inputs.items() if name != "shape"}
        return _joined(model.get_image_features(pixel_values=torch.rand(*shape, 3, side, side), **more))

    return count * (side // PATCH) ** 2, run


def grid(patch_values: int) -> tuple[int, Callable[[Any], Any]]:
    positions = GRID[0] * GRID[1]

    def run(model: Any) -> Any:
        pixels, grid_thw = torch.rand(positions, patch_values), torch.tensor([[1, *GRID]])
        return _joined(model.get_image_features(pixel_values=pixels, image_grid_thw=grid_thw))

    return positions, run


def qwen2_audio(model: Any) -> Any:
    encoded = model.model.audio_tower(torch.rand(1, 128, 500)).last_hidden_state
    return _joined(model.model.multi_modal_projector(encoded))


def omni_audio(model: Any) -> Any:
    features, mask = torch.rand(1, 128, 400), torch.ones(1, 400, dtype=torch.long)
    return _joined(model.get_audio_features(input_features=features, feature_attention_mask=mask))


def tiles(side: int = SIDE) -> tuple[int, Callable[[Any], Any]]:
    """1 x 2 tiles, and the whole in small."""
    return squares(3, side=side, shape=(1, 3), image_sizes=torch.tensor([[side, 2 * side]]))


TINY = {
    "Llama": Tiny("llama", {}),
    "Qwen3": Tiny("qwen3", {}),
    "LLaVA-1.5": Tiny("llava", {"image": squares(1)}),
    "LLaVA-NeXT": Tiny("llava_next", {"image": tiles()}),
    "LLaVA-OneVision": Tiny("llava_onevision", {"image": tiles(98)}),
    "InternVL": Tiny("internvl", {"image": squares(3)}),
    "Idefics3": Tiny("idefics3", {"image": squares(3, shape=(1, 3))}),
    "Gemma-3": Tiny("gemma3", {"image": squares(1)}, (("text_config", "sliding_window", 4096),)),
    "PaliGemma": Tiny("paligemma", {"image": squares(1)}),
    "PaliGemma, a head unused": Tiny("paligemma", {"image": squares(1)}, (("vision_config", "vision_use_head", True),)),
    "Qwen2-VL": Tiny("qwen2_vl", {"image": grid(1176)}),
    "Qwen2.5-VL": Tiny("qwen2_5_vl", {"image": grid(1176)}),
    "Qwen3-VL": Tiny("qwen3_vl", {"image": grid(1536)}),
    "Qwen2-Audio": Tiny("qwen2_audio", {"audio": (250, qwen2_audio)}),
    "Qwen2.5-Omni": Tiny("qwen2_5_omni", {"image": grid(1176), "audio": (200, omni_audio)}),
}


class Adapted(nn.Module):
    """A layer with a low-rank adapter, named as PEFT names them."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.base_layer(values) + self.lora_B["default"](self.lora_A["default"](values))


def adapt(module: nn.Module) -> None:
    """Add adapters to all layers of a module, and freeze the rest."""
    module.requires_grad_(False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Adapted(child))


def step_flops(family: Tiny, model: Any, text_tokens: int) -> tuple[int, float]:
    """(LLM positions, operations) of a forward and, where anything is trained, its backward."""
    with FlopCounterMode(display=False) as counter:
        embeds, joined = [model.get_input_embeddings()(torch.ones(1, text_tokens, dtype=torch.long))], []
        for _, run in family.parts.values():
            features, more = run(model)
            embeds.append(features[None])
            joined += more
        sequence = torch.cat(embeds, dim=1)
        hidden = model.get_decoder()(inputs_embeds=sequence, use_cache=False).last_hidden_state
        loss = model.get_output_embeddings()(hidden).sum() + sum(each.sum() for each in joined)
        if loss.requires_grad:
            loss.backward()
    return sequence.shape[1], float(counter.get_total_flops())


WITHIN = 0.02
# torch's count of eager attention is of all pairs of positions.
ALL_PAIRS: dict[str, Any] = {"llm": {"causal": False}}
# What is frozen -> how the same is said of a config; adapters are no part of one.
FROZEN: dict[str, tuple[str, ...] | None] = {
    "nothing": (),
    "towers": ("towers",),
    "llm": ("llm",),
    "towers and llm": ("towers", "llm"),
    "all": ("towers", "connector", "llm"),
    "towers, adapters": None,
}
TOWERS = ("visual", "vision_tower", "vision_model", "audio_tower")
CONNECTORS = ("multi_modal_projector", "connector", "merger", "deepstack_merger_list", "audio_tower.proj", "projector")
TOKENS = 40


def total(cost: od.CostModel, positions: dict[str, int]) -> float:
    return sum(each.at(positions[phase]) for phase, each in zip(cost.phases, cost.costs, strict=True))


def freeze(model: Any, frozen: str) -> None:
    model.requires_grad_(frozen != "all")
    for module in (model.get_decoder(), model.get_output_embeddings()):
        module.requires_grad_(frozen in ("nothing", "towers"))
    if "adapters" in frozen:
        adapt(model.get_decoder())
        # As PEFT does where layers are recomputed.
        model.get_input_embeddings().register_forward_hook(lambda _, __, embeds: embeds.requires_grad_())
    for name, module in model.named_modules():
        if name.endswith(TOWERS):
            module.requires_grad_("towers" not in frozen and frozen != "all")
    for name, module in model.named_modules():
        if name.endswith(CONNECTORS):
            module.requires_grad_(frozen != "all")


def check(name: str, frozen: str, **wrong: Any) -> None:
    family = TINY[name]
    model = family.make_model()
    config = copy.deepcopy(model.config)
    freeze(model, frozen)
    length, flops = step_flops(family, model, TOKENS)
    positions = {"llm": length} | {phase: part[0] for phase, part in family.parts.items()}
    read = od.hf.cost(model, **ALL_PAIRS)
    assert total(read, positions) == pytest.approx(flops, rel=WITHIN)
    if wrong:
        assert total(od.hf.cost(model, **ALL_PAIRS, **wrong), positions) != pytest.approx(flops, rel=WITHIN)
    if (words := FROZEN[frozen]) is not None:
        said = [each for word in words for each in (family.parts if word == "towers" else [word])]
        said = [word for word in said if family.parts or word == "llm"]
        assert od.hf.cost(config, frozen=said, **ALL_PAIRS) == read
        assert od.hf.cost(config.to_dict(), frozen=said, **ALL_PAIRS) == read


@pytest.mark.parametrize(("name", "frozen"), [*zip(TINY, cycle(FROZEN), strict=False), ("InternVL", "nothing")])
def test_a_step_costs_what_torch_counts(name: str, frozen: str) -> None:
    check(name, frozen)


def test_tiles_are_sequences_of_their_own() -> None:
    check("Idefics3", "all", image={"window": None})


@pytest.mark.parametrize(
    ("frozen", "part"), [((), None), (("audio",), "encoder"), (("llm",), "decoder"), (("audio", "llm"), "")]
)
def test_a_decoder_attends_to_the_whole_window_of_its_encoder(frozen: tuple[str, ...], part: str | None) -> None:
    model = FAMILIES["whisper"].build()[1].float()
    config = model.config
    config._attn_implementation = "eager"
    if part is not None:
        (getattr(model.model, part) if part else model).requires_grad_(False)
    if part == "decoder":
        model.proj_out.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        tokens = torch.ones(1, TOKENS, dtype=torch.long)
        logits = model(input_features=torch.rand(1, 80, 500), decoder_input_ids=tokens, use_cache=False).logits
        if logits.requires_grad:
            logits.sum().backward()
    read = od.hf.cost(model, **ALL_PAIRS)
    assert read == od.hf.cost(config, frozen=frozen, **ALL_PAIRS)
    assert total(read, {"audio": 250, "llm": TOKENS}) == pytest.approx(counter.get_total_flops(), rel=WITHIN)


def test_low_rank_adapters_take_two_thirds() -> None:
    config = FAMILIES["qwen3"].build()[1].config
    (trained,), (adapted,) = od.hf.cost(config).costs, od.hf.cost(config, lora="llm").costs
    assert adapted.linear == pytest.approx(trained.linear * 2 / 3)
    assert adapted.quadratic == trained.quadratic  # attention has no weights


def test_a_phase_may_be_given_whole_or_left_out() -> None:
    config = FAMILIES["llava"].build()[1].config
    measured = od.PhaseCost(3.0)
    found = od.hf.cost(config, image=measured, llm={"recompute": "full"})
    assert found.costs == (measured, od.TransformerCost.from_config(config, "llm", recompute="full").phase_cost())
    assert od.hf.cost(config, image=None).phases == ("llm",)


def test_what_is_said_must_be_there() -> None:
    config = FAMILIES["llava"].build()[1].config
    with pytest.raises(ValueError, match="frozen has 'audio', it may name image, llm, connector"):
        od.hf.cost(config, frozen="audio")
    with pytest.raises(ValueError, match="lora has 'connector', it may name image, llm"):
        od.hf.cost(config, lora=("connector",))
    with pytest.raises(ValueError, match="'llm' is in frozen and in lora"):
        od.hf.cost(config, lora=("llm",), frozen=["llm"])


def test_a_model_says_itself_what_trains() -> None:
    model = FAMILIES["llama"].build()[1]
    with pytest.raises(ValueError, match="frozen= is for configs"):
        od.hf.cost(model, frozen="llm")
    wrapped = nn.Module()
    wrapped.module = model  # as DistributedDataParallel has it
    assert od.hf.cost(wrapped) == od.hf.cost(model)
    with pytest.raises(ValueError, match="Linear has no config"):
        od.hf.cost(nn.Linear(2, 2))
    elsewhere = nn.Module()
    elsewhere.language, elsewhere.config = model, FAMILIES["llava"].build()[1].config
    with pytest.raises(ValueError, match="named as those of an image tower.*give its config"):
        od.hf.cost(elsewhere)


def test_configs_that_are_not_read_say_what_to_write() -> None:
    config = FAMILIES["llama"].build()[1].config.to_dict()
    with pytest.raises(ValueError, match="lists 3 layer_types for num_hidden_layers=2"):
        od.hf.cost(config | {"layer_types": ["full_attention"] * 3})
    with pytest.raises(ValueError, match=r"kv_lora_rank=8.*llm=TransformerCost\(...\) or llm=PhaseCost\(...\)"):
        od.hf.cost(config | {"kv_lora_rank": 8})
    unknown = {"model_type": "new", "vision_config": {"model_type": "seen", "patch_size": 14}, "text_config": config}
    with pytest.raises(ValueError, match=r"no rule for the image phase of new.*image=od.PhaseCost"):
        od.hf.cost(unknown)
    assert od.hf.cost(unknown, image=od.PhaseCost(2.0)).phases == ("image", "llm")
    assert od.hf.cost(unknown, image=None) == od.hf.cost(config)
    for other in ({**unknown, "encoder_config": {"model_type": "heard"}}, {"model_type": "dia"}):
        with pytest.raises(ValueError, match="does not read a (new|dia) config, which has (encoder_config|no text)"):
            od.hf.cost(other)


def test_videos_pass_the_image_tower_a_temporal_patch_at_a_time() -> None:
    from transformers import LlamaConfig, Qwen3VLConfig

    vision = {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 64}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3VLConfig(vision_config=vision, text_config=text | {"num_key_value_heads": 4})
    found = od.hf.cost(config, video_patches=100)
    assert found.phases == ("image", "video", "llm")
    image, video, _ = found.costs
    assert video.at(700) == pytest.approx(7 * image.at(100))
    assert image.at(700) > 1.01 * video.at(700)
    with pytest.raises(ValueError, match="has an image tower"):
        od.hf.cost(LlamaConfig(), video_patches=100)
