"""The lists of models in docs/huggingface_models.md: what the command that writes them finds, and in its format."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers", minversion="5.23")

import transformers

SCRIPT = Path(__file__).parents[1] / "scripts" / "hf_families.py"


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hf_families_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hf_families_script"] = module  # Dataclasses look themselves up there.
    spec.loader.exec_module(module)
    return module


hf_families = _loaded()
LISTS = hf_families.PAGE.read_text().partition(hf_families.BEGIN)[2].partition(hf_families.END)[0]


def listed(model_type: str, lists: str = LISTS) -> tuple[str, str]:
    """(heading, kind) of a model in the lists."""
    heading = ""
    for line in lists.splitlines():
        heading = line.removeprefix("### ") if line.startswith("### ") else heading
        kind = line.removeprefix("- ").partition(": ")[0].rpartition(", ")[0]
        if heading in hf_families.HEADINGS.values() and f"`{model_type}`" in line:
            return heading, kind
    raise AssertionError(f"{model_type} is in no list")


@pytest.mark.filterwarnings("ignore")  # libraries about themselves, and what the probe says of padded models
def test_the_lists_say_what_the_command_finds(tmp_path: Path) -> None:
    if f"Of transformers {transformers.__version__} " not in LISTS:
        pytest.skip("the page is of another transformers")
    for name, word in (("llama", "packed"), ("gpt_oss", "padded"), ("mamba2", "padded")):
        row = hf_families.row_of(name, tmp_path)
        assert row == hf_families.Row(name, True, word, no_cost=row.no_cost)
        assert bool(row.no_cost) is (name == "mamba2")  # whose layers have a state
        assert listed(name) == (hf_families.HEADINGS[word], "Text")


def test_a_refusal_of_neighbours_is_distinguished_from_others() -> None:
    assert hf_families._refused("aa lets samples of a microbatch, or their padding, change each other: on") == (
        "alone",
        "",
    )
    word, why = hf_families._refused("ValueError: BbProcessor has no image_token. Texts alone take od.hf.recipe(...)")
    assert (word, why) == ("refused", "BbProcessor has no image_token")


def test_the_lists_have_the_commands_format_and_all_models() -> None:
    rows = [
        hf_families.Row("aa", True, "packed"),
        hf_families.Row("bb", False, "refused", "its reason", "no tower"),
        hf_families.Row("cc", False, "untried", "CcProcessor requires the librosa library", "no tower"),
        hf_families.Row("dd", False, "alone"),
    ]
    page = hf_families.written(f"before\n{hf_families.BEGIN}\nold\n{hf_families.END}\nafter\n", rows)
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert listed("aa", page) == (hf_families.HEADINGS["packed"], "Text")
    assert listed("bb", page) == (hf_families.HEADINGS["refused"], "Images, clips, videos")
    assert listed("dd", page) == (hf_families.HEADINGS["alone"], "Images, clips, videos")
    assert "- `bb`: its reason\n" in page and "`librosa` is not installed here, 1: `cc`" in page
    assert "`od.hf.cost` is derived for 2. Of those above it has none for 1" in page
    first = re.compile(r"Of transformers [\d.]+ and torch [\d.]+: (\d+) models\.")
    assert first.search(page)
    if f"Of transformers {transformers.__version__} " in LISTS:
        found = first.search(LISTS)
        assert found and int(found[1]) == len(hf_families.model_types())
    with pytest.raises(ValueError, match="has no"):
        hf_families.written("nothing", rows)
