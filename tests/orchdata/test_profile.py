"""Profiles: counts against what was written, imbalance against what can be worked out by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from webdataset import TarWriter

import orchdata as od
from orchdata.loaders.build import build_index
from orchdata.loaders.errors import DataError
from orchdata.loaders.index import Index
from orchdata.loaders.synthetic import synthetic_index
from orchdata.profile import PERCENTILES, count_reasons, profile

RECIPE = od.Recipe(image=od.ImagePreprocessor(patch_size=14, merge=2, min_tokens=1, max_tokens=64))


def _jpeg(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def small(tmp_path: Path) -> Index:
    """Three texts of 10 bytes, one image of 112 x 112 with a text of 2 bytes, one image that is none."""
    path = tmp_path / "small.tar"
    with TarWriter(str(path), encoder=False) as writer:
        for number in range(3):
            writer.write({"__key__": f"text{number}", "txt": b"0123456789"})
        writer.write({"__key__": "image", "jpg": _jpeg(112, 112), "txt": b"ok"})
        writer.write({"__key__": "broken", "jpg": b"this is no image", "txt": b"ok"})
    return build_index([str(path)], RECIPE)


def test_counts_are_those_of_the_usable_samples(small: Index) -> None:
    found = profile(small, ranks=(1,), batch_size=1)
    assert (found.samples, found.bad, found.shards) == (4, 1, 1)
    assert found.bytes == 3 * 10 + len(_jpeg(112, 112)) + 2
    assert (found.modalities["text"].samples, found.modalities["text"].tokens) == (4, 3 * 10 + 2)
    # 112 / 14 = 8 patches a side; merged 2 x 2: 16 tokens.
    image = found.modalities["image"]
    assert (image.samples, image.share, image.parts, image.tokens) == (1, 1 / 4, 1, 16)
    assert found.phases["image"].positions == 64
    assert found.phases["llm"].positions == 3 * 10 + 2 + 16
    assert "audio" not in found.phases


def test_percentiles_cover_the_samples_in_the_phase(small: Index) -> None:
    found = profile(small, ranks=(1,), batch_size=1)
    assert found.phases["image"].percentiles == dict.fromkeys(PERCENTILES, 64)
    assert found.phases["llm"].percentiles["min"] == 10
    assert found.phases["llm"].percentiles["max"] == 18


def test_bad_samples_are_counted_by_reason(small: Index) -> None:
    found = profile(small, ranks=(1,), batch_size=1)
    assert found.bad_by_reason == {"not an image: starts with '...'": 1}


def test_reasons_that_differ_in_names_and_numbers_are_of_one_kind() -> None:
    reasons = ["3 images but 2 placeholders", "7 images but 1 placeholders", "no field 'a', 'b'", "no field 'c'"]
    reasons += ["not valid UTF-8: invalid byte at byte 7", "not valid UTF-8: invalid byte at byte 31"]
    counts = count_reasons(DataError("s.tar", "k", "f", reason) for reason in reasons)
    assert counts == {
        "N images but N placeholders": 2,
        "no field '...'": 2,
        "not valid UTF-8: invalid byte at byte N": 2,
    }


def test_imbalance_of_one_global_batch_worked_out_by_hand(tmp_path: Path) -> None:
    # Lengths 30, 10, 10, 10 on 2 ranks, whatever the order: dealt in turn, one rank has 30 + 10 and the other 20, so
    # max/mean is 40/30; balanced, 30 and 10 + 10 + 10.
    path = tmp_path / "texts.tar"
    with TarWriter(str(path), encoder=False) as writer:
        for number, length in enumerate((30, 10, 10, 10)):
            writer.write({"__key__": str(number), "txt": b"x" * length})
    scale = profile(build_index([str(path)], RECIPE), ranks=(2,), batch_size=2).scales[0]
    assert scale.steps == 1
    assert not scale.with_replacement
    assert scale.phases["llm"].unbalanced == pytest.approx(40 / 30)
    assert scale.phases["llm"].balanced == scale.phases["llm"].lower_bound == 1.0
    assert scale.step == scale.phases["llm"]
    assert scale.speedup == pytest.approx(40 / 30)


def test_a_dataset_smaller_than_a_global_batch_is_drawn_with_replacement_and_says_so(small: Index) -> None:
    one, many = profile(small, ranks=(2, 8), batch_size=2).scales
    assert not one.with_replacement
    assert many.with_replacement
    assert many.global_batch_size == 16
    assert many.steps == 8


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return synthetic_index(tmp_path_factory.mktemp("omni") / "omni.arrow", 20_000, seed=3)


COST = od.CostModel(
    image=od.TransformerCost(hidden=1280, layers=32, ffn=5120),
    audio=od.TransformerCost(hidden=1280, layers=32, ffn=5120),
    llm=od.TransformerCost(hidden=4096, layers=32, ffn=11008),
)


def test_balancing_helps_and_respects_its_bound(omni: Index) -> None:
    found = profile(omni, cost=COST, ranks=(8, 64), batch_size=8)
    assert found.balanced_phases == ("image", "audio", "llm")
    for scale in found.scales:
        assert scale.step.lower_bound <= scale.step.balanced + 1e-12
        assert scale.step.balanced < scale.step.unbalanced
        assert scale.speedup == pytest.approx(scale.step.unbalanced / scale.step.balanced)
        for phase in scale.phases.values():
            assert 1.0 <= phase.lower_bound <= phase.balanced + 1e-12


def test_without_a_cost_model_llm_tokens_are_balanced_and_encoders_reported(omni: Index) -> None:
    found = profile(omni, ranks=(8,), batch_size=16)
    assert not found.has_cost_model
    assert found.balanced_phases == ("llm",)
    assert set(found.phases) == {"image", "audio", "llm"}
    scale = found.scales[0]
    assert scale.step == scale.phases["llm"]
    assert scale.phases["image"].balanced > scale.phases["llm"].balanced


def test_same_arguments_give_the_same_profile(omni: Index) -> None:
    first = profile(omni, cost=COST, ranks=(8, 4096), batch_size=8, seed=5)
    assert first == profile(omni, cost=COST, ranks=(8, 4096), batch_size=8, seed=5)
    assert first != profile(omni, cost=COST, ranks=(8, 4096), batch_size=8, seed=6)


def test_to_dict_is_json(omni: Index) -> None:
    found = profile(omni, cost=COST, ranks=(8,)).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["scales"][0]["phases"]["llm"]["balanced"] >= 1.0


@pytest.mark.parametrize("arguments", [{"ranks": (0,)}, {"ranks": ()}, {"batch_size": 0}, {"steps": 0}])
def test_numbers_below_one_are_refused(omni: Index, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be at least 1"):
        profile(omni, **arguments)  # type: ignore[arg-type]


def test_a_dataset_without_a_usable_sample_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.tar"
    with TarWriter(str(path), encoder=False) as writer:
        writer.write({"__key__": "broken", "jpg": b"this is no image"})
    with pytest.raises(ValueError, match="none of the 1 samples is usable"):
        profile(build_index([str(path)], RECIPE))
