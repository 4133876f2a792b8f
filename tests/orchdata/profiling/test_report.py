"""The report: figures of the profile, strings of the data as text alone, a page that loads and runs nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from printed import Page, run
from shard_factory import RECIPE, audio, jpeg, omni_samples, omni_shards, write_shard

import orchdata as od
from orchdata.html import percent, plain
from orchdata.planning.balance import Layout
from orchdata.profiling.content import PERCENTILES, LengthCounts
from orchdata.profiling.page import POLICY, ShardNames
from orchdata.profiling.planned import PlannedStep, PlannedSteps, is_better, make_settings

COST = od.CostModel(image=od.PhaseCost(3.0), audio=od.PhaseCost(1.0), llm=od.PhaseCost(1.0, 0.01))
HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "\u202eright to left",
    "w" * 10_000,
    "zero\x00byte",
    r"$\bad{x}$ _hidden",
    "</style></svg><svg onload=alert(1)>",
)


class SafePage(Page):
    def check_safe(self) -> None:
        """Fail for anything that runs or loads."""
        assert not {"script", "iframe", "object", "embed", "link", "base", "form", "foreignobject"} & {
            tag for tag, _ in self.tags
        }
        ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(ids) == len(set(ids)) > 0
        for tag, attributes in self.tags:
            for name, value in attributes.items():
                assert not name.startswith("on"), f"<{tag} {name}=...>"
                if name in ("src", "href", "xlink:href"):
                    assert value is not None
                    assert value.startswith(("data:image/jpeg;base64,", "#")), f"<{tag} {name}={value[:50]!r}>"
        policies = [attributes["content"] for _, attributes in self.tags if "http-equiv" in attributes]
        assert policies == [POLICY]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> od.ShardDataset:
    return od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=3, samples=40), recipe=RECIPE)


def hostile(folder: Path) -> od.ShardDataset:
    """Keys, captions, and reasons of failures that want to be more than text."""
    samples = [
        {"__key__": f"{number}<b>{'$x$' * 5}", "txt": text.encode(), "jpg": jpeg(40, 30)}
        for number, text in enumerate(HOSTILE)
    ]
    samples += [{"__key__": "<i>bad", "jpg": b"<script>alert(2)</script>", "txt": b"ok"}]
    samples += [{"__key__": f"sound{number}", "wav": audio(0.5), "txt": b"hm"} for number in range(4)]
    return od.ShardDataset(write_shard(folder / "a<b>.tar", samples), recipe=RECIPE)


def write(
    dataset: od.ShardDataset | od.Mixture, folder: Path, *, samples: int = 12, **options: object
) -> tuple[od.Profile, str]:
    profile = dataset.profile(**({"cost": COST, "ranks": (2, 4), "batch_size": 4, "group_size": 2} | options))  # type: ignore[arg-type]
    profile.write_html(folder / "report.html", dataset, samples=samples)
    return profile, (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def shown(dataset: od.ShardDataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[od.Profile, str]:
    return write(dataset, tmp_path_factory.mktemp("shown"))


@pytest.fixture(scope="module")
def shown_hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[od.ShardDataset, od.Profile, str]:
    data = hostile(folder := tmp_path_factory.mktemp("hostile"))
    return data, *write(data, folder)


def test_the_page_has_the_figures_of_the_profile(shown: Any) -> None:
    profile, html = shown
    page = SafePage(html)
    page.check_safe()
    known = profile.to_dict()
    assert known["summary"]
    for sentence in known["summary"]:
        assert sentence in page.text
    assert profile.call in page.text[: page.text.index("Share of samples".lower())]  # at its top
    for scale in known["scales"]:
        for setting in scale["settings"].values():
            assert f"{100 * setting['waiting_error']:.1f}" in page.text
    for modality in known["modalities"].values():
        assert f"{modality['tokens']:,}" in page.text
    for largest in known["largest"]:
        assert largest["key"] in page.text
    pictures = [value for tag, attributes in page.tags if tag == "img" and (value := attributes["src"])]
    assert pictures
    assert "Hollow" not in page.text


def test_strings_of_the_data_stay_text(shown_hostile: Any) -> None:
    html = shown_hostile[2]
    page = SafePage(html)
    page.check_safe()
    assert "<script>alert(1)</script>" in page.text
    assert "<i>bad" in page.text
    assert "\\u202e" in page.text
    assert "\\u0000" in page.text
    assert "w" * 1000 not in page.text  # cut
    assert "\u202e" not in html
    assert "\x00" not in html


@pytest.mark.slow
def test_without_samples_nothing_of_a_sample_is_on_the_page(shown_hostile: Any, tmp_path: Path) -> None:
    data, profile, full = shown_hostile
    profile.write_html(tmp_path / "report.html", data, samples=0)
    html = (tmp_path / "report.html").read_text()
    page = SafePage(html)
    page.check_safe()
    assert not [tag for tag, _ in page.tags if tag == "img"]
    index = data.index()
    for row in range(index.num_rows):
        assert plain(index.key(row)) not in page.text
    assert "alert" not in html
    assert profile.largest[0].key not in page.text
    # The check can fail: with samples, keys and texts are there.
    assert plain(profile.largest[0].key) in SafePage(full).text


@pytest.mark.slow
def test_a_mixture_has_a_part_for_each_source(dataset: od.ShardDataset, tmp_path: Path) -> None:
    mixture = od.Mixture({"<u>one": od.Source(dataset, weight=1), "two": od.Source(hostile(tmp_path), weight=3)})
    profile, html = write(mixture, tmp_path, samples=2)
    page = SafePage(html)
    page.check_safe()
    assert [source.name for source in profile.content.sources] == ["<u>one", "two"]
    assert "<u>one" in page.text
    assert sum(source.samples for source in profile.content.sources) == profile.samples
    assert "What samples are made of (of the stored samples, each once)" in page.text


@pytest.mark.slow_cases("samples")
@pytest.mark.parametrize("by", ["tokens", "samples"])
def test_the_sentence_of_a_mixture_is_of_what_an_epoch_delivers(
    by: Literal["tokens", "samples"], tmp_path: Path
) -> None:
    """A source of sound has a tenth of the samples, and most of the weight."""
    sound = [{"__key__": str(n), "wav": audio(0.5 + n % 3), "txt": b"hm"} for n in range(10)]
    text = [{"__key__": str(n), "txt": b"x" * (40 + n % 7)} for n in range(90)]
    sources = {
        name: od.Source(od.ShardDataset(write_shard(tmp_path / f"{name}.tar", samples), recipe=RECIPE), weight=weight)
        for name, samples, weight in (("sound", sound, 0.8), ("text", text, 0.2))
    }
    mixture = od.Mixture(sources, by=by, stop="repeat", **{f"epoch_{by}": 4000 if by == "tokens" else 400})  # type: ignore[arg-type]
    profile = mixture.profile(ranks=(1,), batch_size=4)
    with_audio = samples = of_audio = tokens = 0
    for batch in od.DataLoader(mixture, batch_size=4, shuffle=True, num_threads=0):
        samples += len(batch.sample_ids)
        with_audio += sum("sound" in shard for shard, _ in batch.sample_ids)
        lengths = batch.llm.lengths[: len(batch.sample_ids)]
        tokens += int(lengths.sum())
        of_audio += 0 if "audio" in batch.llm.dummies else batch.audio.num_tokens
    assert profile.modalities["audio"].share == 0.1
    assert profile.epoch["audio"].token_share == pytest.approx(of_audio / tokens, abs=0.01)
    assert profile.epoch["audio"].share == pytest.approx(with_audio / samples, abs=0.01)
    said = f"Over an epoch of the mixture, {percent(profile.epoch['audio'].share)} of the samples have audio"
    assert [sentence for sentence in profile.summary if sentence.startswith(said)]


def test_a_sample_that_cannot_be_read_now_is_shown_as_that(tmp_path: Path) -> None:
    path = tmp_path / "gone.tar"
    data = od.ShardDataset(
        write_shard(path, [{"__key__": str(number), "txt": b"x" * (number + 1)} for number in range(9)]), recipe=RECIPE
    )
    profile = data.profile(ranks=(2,), batch_size=2)
    content = path.read_bytes()
    path.write_bytes(content[:512] + b"\0" * (len(content) - 512))
    profile.write_html(tmp_path / "report.html", data, samples=2)
    assert SafePage((tmp_path / "report.html").read_text()).text.count("unreadable: ") == 2


def test_shards_are_named_below_their_common_folder_and_without_secrets() -> None:
    name = ShardNames(["s3://bucket/run/train-0.tar", "s3://bucket/run/b/train-1.tar"])
    assert name("s3://bucket/run/b/train-1.tar") == "b/train-1.tar"
    assert ShardNames(["/data/a.tar"])("/data/a.tar") == "a.tar"
    assert ShardNames([])("/data/a.tar") == "/data/a.tar"
    signed = "https://user:secret@host/x/a.tar?signature=secret"
    assert "secret" not in ShardNames([signed, "https://host/y/b.tar"])(signed)


@pytest.mark.slow
def test_without_a_cost_model_nothing_is_said_of_time(dataset: od.ShardDataset, tmp_path: Path) -> None:
    profile, html = write(dataset, tmp_path, cost=None, ranks=(2,))
    assert "positions, not time" in profile.summary[0]
    assert not [sentence for sentence in profile.summary[1:] if "wait" in sentence]
    assert "by your cost model" not in html


def test_text_alone_and_a_single_sample_have_a_page(tmp_path: Path) -> None:
    data = od.ShardDataset(write_shard(tmp_path / "a.tar", [{"__key__": "one", "txt": b"hello"}]), recipe=RECIPE)
    profile, html = write(data, tmp_path, cost=None)
    SafePage(html).check_safe()
    assert profile.content.joint.modalities == ("text",)
    assert "one" in html
    assert "1 sample in 1 shard, " in html
    assert "Hollow" in html  # a step has more samples than the data


LLM = od.CostModel(llm=od.PhaseCost(1.0))


def texts(folder: Path, lengths: Sequence[int]) -> od.ShardDataset:
    samples = [{"__key__": str(number), "txt": b"x" * length} for number, length in enumerate(lengths)]
    return od.ShardDataset(write_shard(folder / "texts.tar", samples), recipe=RECIPE)


def test_an_epoch_of_one_step_is_compared_over_several_epochs(tmp_path: Path) -> None:
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(4, 1, 300)).astype(int).tolist()
    profile = texts(tmp_path, lengths).profile(cost=LLM, ranks=(16,), batch_size=16, group_size=16)
    scale = profile.main_scale
    assert scale.steps >= 8
    assert "none" in scale.settings["joint"].better_than
    assert "brings that to" in profile.summary[1]
    assert "balance=od.Balance()," in profile.call


def test_where_one_sample_sets_the_pace_nothing_is_said_to_help(tmp_path: Path) -> None:
    data = texts(tmp_path, [60_000 if number % 40 == 0 else 50 + number % 7 for number in range(320)])
    profile = data.profile(cost=LLM, ranks=(16,), batch_size=2, group_size=16)
    assert not [sentence for sentence in profile.summary if "brings that to" in sentence]
    assert "balance=od.Balance(scope='none')" in profile.call
    # What is dropped is not among the largest, and makes no batch longer.
    dropped = data.profile(
        cost=LLM, ranks=(4,), batch_size=2, balance=od.Balance(max_tokens=1000, oversize="drop"), group_size=4
    )
    assert max(sample.positions["llm"] for sample in dropped.largest) < 1000
    assert [layout.length for layout in dropped.layouts] == [None, None, 1024]
    assert dropped.phases["llm"].percentiles["max"] == 60_000


def test_reasons_hold_no_secret_and_are_not_endless(tmp_path: Path) -> None:
    secret = "http://user:PASSWORD@127.0.0.1:9/x.jpg?X-Amz-Signature=SIGNATURE"
    lines = [json.dumps({"id": "good", "text": "hello"})]
    lines += [json.dumps({"id": f"k{number}", "text": "hm", "image": secret}) for number in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    profile, html = write(od.ShardDataset(str(tmp_path / "a.jsonl"), recipe=RECIPE), tmp_path, cost=None)
    assert profile.bad == 3
    assert "127.0.0.1" in html
    assert "PASSWORD" not in html
    assert "SIGNATURE" not in html
    assert 'quarantine="bad.jsonl"' in profile.call


@pytest.mark.slow
def test_a_report_that_is_there_keeps_its_mode_and_a_link_its_target(shown: Any, tmp_path: Path) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    shown[0].write_html(link)
    assert link.is_symlink()
    assert "orchdata report" in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("missing/report.html", "give a file in a folder that you may write into"),
        (".", "give a file in a folder that you may write into"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_place_that_takes_no_file_is_named_before_anything_is_measured(
    tmp_path: Path, target: str, said: str
) -> None:
    done = run("profile", tmp_path / "none.tar", "--html", tmp_path / target)
    assert done.exit_code == 1
    assert said in done.output


def test_without_matplotlib_the_error_says_what_to_install(
    dataset: od.ShardDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("profile", *dataset.urls, "--html", tmp_path / "report.html")
    assert done.exit_code == 1
    assert "'matplotlib', which a drawing needs," in done.output
    assert "pip install " in done.output
    assert not (tmp_path / "report.html").exists()


# Standard errors and paired differences of settings, and lengths counted in chunks, against numpy.


def steps(costs: list[int], totals: list[int]) -> PlannedSteps:
    """Steps of 4 ranks in one phase."""
    return PlannedSteps(
        num_ranks=4,
        balanced=("llm",),
        adds_up=True,
        steps=tuple(
            PlannedStep(
                cost=cost, phase_costs={"llm": cost}, totals={"llm": total}, microbatches=1, samples=8, tokens=total
            )
            for cost, total in zip(costs, totals, strict=True)
        ),
    )


def test_waiting_of_steps_worked_out_by_hand() -> None:
    # Ranks work 40 / 4 of 20, and 80 / 4 of 30: they wait for 20 of 50.
    planned = steps([20, 30], [40, 80])
    assert planned.waiting == pytest.approx(20 / 50)
    assert planned.waiting_in("llm") == pytest.approx(20 / 50)
    # Each step's share of the ratio: (cost x (1 - waiting) - work) / mean cost.
    deviations = np.array([20 * 0.6 - 10, 30 * 0.6 - 20]) / 25
    assert planned.waiting_error is not None
    assert planned.waiting_error > 10 * deviations.std(ddof=1) / np.sqrt(2)  # two steps say nearly nothing
    assert steps([20], [40]).waiting_error is None


def test_settings_of_the_same_steps_differ_where_each_step_does() -> None:
    """A small difference in each step is clear, though the steps themselves vary much more."""
    work = np.random.default_rng(1).integers(100, 1000, 16)
    one = steps((work * 2).tolist(), (4 * work).tolist())
    little_less = steps((work * 2 - 5).tolist(), (4 * work).tolist())
    assert is_better(little_less, one, paired=True)
    assert not is_better(one, little_less, paired=True)
    noise = steps((work * 2 + np.tile([40, -40], 8)).tolist(), (4 * work).tolist())
    assert not is_better(noise, one, paired=True)
    assert not is_better(one, noise, paired=True)
    assert not is_better(steps([10], [40]), steps([20], [40]), paired=True)  # one step shows no error


def test_a_setting_names_those_that_it_beats() -> None:
    work = [100, 200, 300, 400]
    totals = [4 * each for each in work]
    settings = make_settings(
        {"none": steps([2 * each for each in work], totals), "joint": steps([each + 1 for each in work], totals)}
    )
    assert settings["joint"].better_than == ("none",)
    assert settings["none"].better_than == ()


@given(st.lists(st.lists(st.integers(0, 5000), max_size=40), min_size=1, max_size=5))
def test_lengths_in_chunks_are_those_of_all(chunks: list[list[int]]) -> None:
    counts = LengthCounts()
    for chunk in chunks:
        counts.add(np.array(chunk, np.int64))
    found = counts.lengths()
    values = np.array([value for chunk in chunks for value in chunk if value], np.int64)
    assert (found.samples, found.total, sum(found.bins)) == (len(values), int(values.sum()), len(values))
    for name, share in PERCENTILES.items():
        if len(values):
            assert found.percentiles[name] == int(np.percentile(values, share, method="lower"))
    for power, count in enumerate(found.bins):
        assert count == int(np.count_nonzero((values >= 2**power) & (values < 2 ** (power + 1))))


# Padding of each layout against the batches of loaders on all ranks, with the dummies that these have.


WITH_AUDIO = od.CostModel(image=od.PhaseCost(3.0), audio=od.PhaseCost(1.0), llm=od.PhaseCost(1.0, 0.01))
STEPS = 8


def omni(folder: Path, ranks: int) -> od.ShardDataset:
    """Images and audio, which few microbatches of two samples have both."""
    return od.ShardDataset(write_shard(folder / "a.tar", omni_samples(2 * ranks * STEPS)), recipe=RECIPE)


def measured(dataset: od.ShardDataset, ranks: int, cost: od.CostModel | None, layout: Layout) -> tuple[float, bool]:
    """The padding of an epoch's batches on all ranks, and whether one of them has a dummy."""
    dataset.index()
    used = held = 0
    common: dict[str, Any] = {"batch_size": 2, "shuffle": True, "drop_last": True, "cost": cost, "collate_fn": layout}
    has_dummies = False
    for rank in range(ranks):
        loader = od.DataLoader(dataset, dp=(rank, ranks), num_threads=0, **common)
        assert len(loader) == STEPS
        for batch in loader:
            used += int(batch.llm.lengths[: len(batch.sample_ids)].sum())
            held += batch.llm.input_ids.numel()
            has_dummies = has_dummies or bool(batch.llm.dummies)
    return 1 - used / held, has_dummies


@pytest.mark.parametrize("layout", [od.Padded(), od.Packed(), od.Padded(empty="zero")], ids=repr)
def test_padding_counts_the_batches_that_lack_a_modality(tmp_path: Path, layout: Layout) -> None:
    dataset = omni(tmp_path, 2)
    expected, has_dummies = measured(dataset, 2, WITH_AUDIO, layout)
    assert has_dummies == (layout.empty == "dummy")
    assert said(dataset, 2, WITH_AUDIO, layout) == pytest.approx(expected)


def said(dataset: od.ShardDataset, ranks: int, cost: od.CostModel | None, layout: Layout) -> float:
    profile = dataset.profile(cost=cost, ranks=(ranks,), batch_size=2, layout=layout)
    return next(each.padding for each in profile.layouts if each.layout == profile.layout)
