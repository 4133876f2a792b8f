"""Long texts in pieces: each piece once an epoch, on any ranks, and together the undivided text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_factory import RECIPE, SKIP_ANY, chat, jpeg, write_shard

import orchdata as od
from orchdata.loaders.errors import DataError
from orchdata.loaders.samples.spans import unpacked
from orchdata.loaders.text.preprocessor import FastTokenizer
from orchdata.profiling.profile import profile

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

LIMIT = 40
Row = tuple[list[int], list[int]]
"""Ids and labels."""
Name = tuple[str, str, int]
"""Shard, key and piece."""


def words(number: int, length: int) -> str:
    """Another text for each number."""
    letters = np.random.default_rng(number).integers(ord("a"), ord("z"), max(1, length)).astype(np.uint8)
    return letters.tobytes().decode()


TEXTS = {f"k{number:02d}": words(number, length) for number, length in enumerate([8, 400, 36, 0, 130, 40, 81, 12, 200])}


def jsonl(folder: Path, records: dict[str, Any]) -> str:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": key, **record}) + "\n" for key, record in records.items()))
    return str(path)


def written(kind: str, folder: Path) -> str:
    if kind == "jsonl":
        return jsonl(folder, {key: {"text": text} for key, text in TEXTS.items()})
    if kind == "tar":
        return write_shard(folder / "texts.tar", [{"__key__": key, "txt": TEXTS[key].encode()} for key in TEXTS])
    path = folder / "texts.parquet"
    pq.write_table(pa.table({"__key__": list(TEXTS), "text": list(TEXTS.values())}), path)
    return str(path)


def text_recipe(**options: Any) -> od.Recipe:
    text = {"max_tokens": LIMIT, "overflow": "split", "bos_token_id": 258, "eos_token_id": 259} | options
    return od.Recipe(text=od.TextPreprocessor(**text))


def undivided(dataset: od.ShardDataset) -> dict[tuple[str, str], Row]:
    """What a loader gives of the same data without `max_tokens`."""
    recipe = replace(dataset.recipe, text=replace(dataset.recipe.text, max_tokens=None, overflow="error"))  # type: ignore[type-var]
    whole = od.ShardDataset(list(dataset.urls), recipe)
    loader = od.DataLoader(whole, global_batch_size=4, drop_last=False, dp=(0, 1), num_threads=0)
    return {(shard, key): row for (shard, key, _), row in rows_of(loader).items()}


def rows_of(batches: Iterable[od.Batch]) -> dict[Name, Row]:
    """The rows of batches, each once."""
    rows: dict[Name, Row] = {}
    for batch in batches:
        assert len(batch.pieces) == len(batch.sample_ids)
        bounds = itertools.pairwise(batch.llm.cu_seqlens.tolist())
        for key, piece, (start, stop) in zip(batch.sample_ids, batch.pieces, bounds, strict=False):
            name = (*key, piece)
            assert name not in rows, f"{name} twice"
            rows[name] = batch.llm.input_ids[start:stop].tolist(), batch.llm.labels[start:stop].tolist()
    return rows


def check_pieces(rows: dict[Name, Row], whole: dict[tuple[str, str], Row], limit: int) -> None:
    """Each sample's pieces are all there, and are the sample but for the loss of their first tokens."""
    by_sample: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for shard, key, piece in sorted(rows):
        by_sample.setdefault((shard, key), []).append((piece, rows[shard, key, piece]))
    assert by_sample.keys() == whole.keys()
    for name, pieces in by_sample.items():
        ids, labels = whole[name]
        assert [piece for piece, _ in pieces] == list(range(len(pieces)))
        assert [id for _, row in pieces for id in row[0]] == ids, name
        expected = [-100 if i % limit == 0 and len(ids) > limit else label for i, label in enumerate(labels)]
        assert [label for _, row in pieces for label in row[1]] == expected, name
        assert all(len(row[0]) == limit for _, row in pieces[:-1])


def loaders(dataset: Any, ranks: int, **options: Any) -> list[od.DataLoader]:
    for each in [leaf.dataset for leaf in dataset.leaves] if isinstance(dataset, od.Mixture) else [dataset]:
        each.index()
    common = {"shuffle": True, "seed": 3, "num_threads": 0, "drop_last": False} | options
    return [od.DataLoader(dataset, dp=(rank, ranks), **common) for rank in range(ranks)]


def batches_of(ours: Sequence[od.DataLoader]) -> list[od.Batch]:
    return [batch for loader in ours for batch in loader]


SIZES = {"tokens": {"global_batch_tokens": 150}, "samples": {"global_batch_size": 5}}


@pytest.mark.parametrize(("kind", "size"), [("jsonl", "tokens"), ("tar", "samples"), ("parquet", "tokens")])
def test_an_epoch_has_every_piece_once_on_any_ranks(kind: str, size: str, tmp_path: Path) -> None:
    dataset = od.ShardDataset(written(kind, tmp_path), text_recipe())
    whole = undivided(dataset)
    assert len(dataset) == len(TEXTS) == len(whole)
    alone: list[set[Name]] = []
    for ranks in (1, 2, 3):
        ours = loaders(dataset, ranks, **SIZES[size])
        steps = list(zip(*(loader.steps() for loader in ours), strict=True))
        by_step = [rows_of(batch for share in step for batch in share) for step in steps]
        rows = {name: row for step in by_step for name, row in step.items()}
        assert len(rows) == sum(len(step) for step in by_step) == dataset.num_rows
        check_pieces(rows, whole, LIMIT)
        alone = alone or [set(step) for step in by_step]
        assert [set(step) for step in by_step] == alone, "the same global batches"
    stats = [loader.stats()["overflow"] for loader in ours]
    assert {name: sum(each[name] for each in stats) for name in stats[0]} == dataset.index().totals["overflow"]


def test_the_check_of_pieces_can_fail(tmp_path: Path) -> None:
    dataset = od.ShardDataset(written("jsonl", tmp_path), text_recipe())
    rows, whole = rows_of(batches_of(loaders(dataset, 1, global_batch_size=4))), undivided(dataset)
    check_pieces(rows, whole, LIMIT)
    last = max(name for name in rows if name[2])
    for broken in (
        {name: row for name, row in rows.items() if name != last},
        rows | {last: rows[(*last[:2], 0)]},
        rows | {last: (rows[last][0], rows[last][0])},
    ):
        with pytest.raises(AssertionError):
            check_pieces(broken, whole, LIMIT)
    with pytest.raises(AssertionError, match="twice"):
        rows_of(batches_of(loaders(dataset, 1, global_batch_size=4)) * 2)


def test_a_resume_in_mid_epoch_on_other_ranks(tmp_path: Path) -> None:
    dataset = od.ShardDataset(written("jsonl", tmp_path), text_recipe())
    rows: dict[Name, Row] = {}
    state: Any = None
    for ranks, steps in ((2, 3), (3, 2), (1, None)):
        ours = loaders(dataset, ranks, global_batch_tokens=120, num_workers=1, num_threads=2)
        if state is not None:
            for loader in ours:
                loader.load_state_dict(json.loads(json.dumps(state)))
        streams = [iter(loader.steps()) for loader in ours]
        shares = list(itertools.islice(zip(*streams, strict=True), steps))
        delivered = rows_of(batch for step in shares for share in step for batch in share)
        assert not rows.keys() & delivered.keys()
        rows |= delivered
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
        state = ours[0].state_dict()
    check_pieces(rows, undivided(dataset), LIMIT)


def test_microbatches_of_one_length_are_filled_with_pieces(tmp_path: Path) -> None:
    dataset = od.ShardDataset(written("tar", tmp_path), text_recipe(max_tokens=64))
    recipe = od.Recipe(image=None, audio=None, text=dataset.recipe.text)
    dataset = od.ShardDataset(list(dataset.urls), recipe)
    ours = loaders(dataset, 2, global_batch_size=6, collate_fn=od.Packed(length=64))
    batches = batches_of(ours)
    assert {len(batch.llm.input_ids) for batch in batches} == {64}
    check_pieces(rows_of(batches), undivided(dataset), 64)
    with pytest.raises(ValueError, match="or cut long texts by TextPreprocessor"):
        whole = od.ShardDataset(list(dataset.urls), od.Recipe(image=None, audio=None))
        od.DataLoader(whole, global_batch_size=6, collate_fn=od.Packed(length=64), dp=(0, 1))


def test_sources_of_a_mixture_split_each_by_their_own(tmp_path: Path) -> None:
    options = TOKENIZERS["at once"]()
    one = od.ShardDataset(written("jsonl", tmp_path), text_recipe(**options))
    other = od.ShardDataset(written("tar", tmp_path), text_recipe(max_tokens=25, **options))
    third = od.ShardDataset(written("parquet", tmp_path), text_recipe(max_tokens=None, overflow="error", **options))
    mixed = od.Mixture({"one": od.Source(one), "other": od.Source(other), "third": od.Source(third)}, stop="all")
    for ranks in (1, 2):
        seen: list[dict[Name, Row]] = [{}, {}, {}]  # a source may come in several passes
        for batch in batches_of(loaders(mixed, ranks, global_batch_tokens=500)):
            assert batch.sources is not None
            bounds = itertools.pairwise(batch.llm.cu_seqlens.tolist())
            names = zip(batch.sources.tolist(), batch.sample_ids, batch.pieces, bounds, strict=False)
            for source, key, piece, (start, stop) in names:
                row = batch.llm.input_ids[start:stop].tolist(), batch.llm.labels[start:stop].tolist()
                assert seen[source].setdefault((*key, piece), row) == row
        for rows, (dataset, limit) in zip(seen, [(one, LIMIT), (other, 25), (third, 10**6)], strict=True):
            check_pieces(rows, undivided(dataset), limit)


@dataclass(frozen=True)
class Letters:
    """A tokenizer by stretches with ids that depend on `settings`; it counts its calls."""

    settings: dict[str, int] = field(default_factory=lambda: {"calls": 0, "more": 0})

    def __call__(self, text: str) -> list[int]:
        self.settings["calls"] += 1
        return [ord(letter) % 256 for letter in text] + [7] * self.settings["more"]


def fast() -> Any:
    pytest.importorskip("tokenizers")
    from chat_templates import trained

    return trained()


def bos_tokenizer() -> Any:
    pytest.importorskip("tokenizers")
    from hf_families.families import tokenizer

    return tokenizer(bos_token="<s>", eos_token="</s>", adds_bos=True)


TOKENIZERS = {
    "bytes": dict,
    "bytes and ids around": lambda: {"bos_token_id": 258, "eos_token_id": 259},
    "stretches": lambda: {"tokenizer": Letters(), "id": "letters", "bos_token_id": 300},
    "at once": lambda: {"tokenizer": fast()},
    "at once, ids around": lambda: {"tokenizer": fast(), "bos_token_id": 3, "eos_token_id": 4},
    "at once, a bos of its own": lambda: {"tokenizer": bos_tokenizer()},
}


@pytest.mark.parametrize("limit", [2, 16])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_texts_and_chats_are_cut_where_their_tokens_are(tokenizer: str, limit: int, tmp_path: Path) -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": "Say " * i + "it."} for i in range(6)]
    records = {"text": {"text": "What is left to do? " * 9}, "chat": {"messages": turns}, "short": {"text": "It."}}
    options = {"max_tokens": limit, "overflow": "split"} | TOKENIZERS[tokenizer]()
    dataset = od.ShardDataset(jsonl(tmp_path, records), od.Recipe(text=od.TextPreprocessor(**options)))
    whole = undivided(dataset)
    check_pieces(rows_of(batches_of(loaders(dataset, 2, global_batch_size=3))), whole, limit)
    for i, key in enumerate(records):
        parts = dataset[i].parts
        assert [id for part in parts for id in part.token_ids.tolist()] == whole[dataset.urls[0], key][0]
    loader = od.DataLoader(dataset, batch_size=2, shuffle=True, dp=(0, 1), collate_fn=list, num_threads=0)
    for _ in range(2):
        decoded: dict[str, dict[int, list[int]]] = {}
        for samples in loader:
            for sample in samples:
                assert not sample.parts[0].loss[0]
                ids = decoded.setdefault(sample.key, {})[sample.piece] = []
                for part in sample.parts:
                    ids += part.token_ids.tolist()
                    if part.token_ids.flags.writeable:
                        part.token_ids[:] = 0  # the user's own copy: the one kept for the next epoch stays
        for key, pieces in decoded.items():
            ids, _ = whole[dataset.urls[0], key]
            assert [id for piece in sorted(pieces) for id in pieces[piece]] == ids


def test_a_filter_judges_samples_and_keeps_all_their_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = od.ShardDataset(written("jsonl", tmp_path), text_recipe())
    plain = od.ShardDataset(written("jsonl", tmp_path), text_recipe(max_tokens=None, overflow="error"))
    expressions = ["tokens > 100", "text_tokens <= 140", "bytes > 120", "key in ('k01', 'k07')", "not bad"]
    for chunk in (1 << 20, 5):  # of rows, which may end inside a sample
        monkeypatch.setattr("orchdata.dataset.selection._CHUNK_ROWS", chunk)
        for expression in expressions:
            chosen, wanted = dataset.filter(expression), plain.filter(expression)
            keys = [wanted[i].key for i in range(len(wanted))]
            assert [chosen[i].key for i in range(len(chosen))] == keys
            names = (
                {name[1:] for name in rows_of(batches_of(loaders(chosen, 1, global_batch_size=4)))} if keys else set()
            )
            pieces = {key: max(piece for other, piece in names if other == key) + 1 for key in keys}
            assert len(names) == sum(pieces.values()) == chosen.num_rows
    loss = dataset.index().loss_tokens[dataset.index().find_all(None, "k01")].sum()
    assert len(dataset.filter(f"loss_tokens == {loss} and key == 'k01'")) == 1


def test_samples_that_are_left_count_as_samples(tmp_path: Path) -> None:
    chosen = od.ShardDataset(written("jsonl", tmp_path), text_recipe()).filter("key in ('k01', 'k07')")
    rows = chosen.num_rows
    assert rows > len(chosen) == 2
    with pytest.warns(UserWarning, match=f"the loader has no steps: {rows} usable rows of 2 samples"):
        od.DataLoader(chosen, global_batch_size=100, drop_last=True, dp=(0, 1))


def test_what_is_left_out_by_name_is_left_out_whole(tmp_path: Path) -> None:
    dataset = od.ShardDataset(written("jsonl", tmp_path), text_recipe())
    quarantine = [(dataset.urls[0], "k01"), (dataset.urls[0], "k04")]
    rows = rows_of(batches_of(loaders(dataset, 2, global_batch_size=3, quarantine=quarantine)))
    assert {name[1] for name in rows} == TEXTS.keys() - {"k01", "k04"}
    check_pieces(rows, {name: row for name, row in undivided(dataset).items() if name[1] not in ("k01", "k04")}, LIMIT)


def test_a_text_that_yields_other_tokens_fails_in_all_its_pieces(tmp_path: Path) -> None:
    letters = Letters()
    recipe = text_recipe(tokenizer=letters, id="letters", bos_token_id=None, eos_token_id=None)
    dataset = od.ShardDataset(jsonl(tmp_path, {"long": {"text": "x" * 100}, "other": {"text": "y" * 90}}), recipe)
    assert dataset.num_rows == 6
    letters.settings["more"] = 1
    with pytest.raises(DataError, match=r"'long', field 'json': the index says 100 tokens, the text yields 101"):
        list(od.DataLoader(dataset.filter("key == 'long'"), batch_size=3, dp=(0, 1), num_threads=0))
    letters.settings["more"] = 30  # the first has one piece more then, the other a longer last one
    loader = od.DataLoader(dataset, batch_size=3, dp=(0, 1), num_threads=0, on_error=SKIP_ANY)
    assert rows_of(loader) == {}
    failures = loader.stats()["failures"]
    assert failures["count"] == 6
    assert {each["key"] for each in failures["samples"]} == {"long", "other"}
    reported = {(each["key"], each["reason"].partition(":")[0]) for each in failures["samples"]}
    assert reported == {
        ("long", "the index says 3 pieces, the text yields 4"),
        ("other", "the index says 90 tokens, the text yields 120"),
    }
    share = od.ErrorPolicy("skip", max_failures=2)  # of samples, with any number of pieces
    list(od.DataLoader(dataset, batch_size=3, dp=(0, 1), num_threads=0, on_error=share))


def test_pieces_that_follow_each_other_are_tokenized_once(tmp_path: Path) -> None:
    letters = Letters()
    recipe = text_recipe(tokenizer=letters, id="letters", bos_token_id=None, eos_token_id=None)
    dataset = od.ShardDataset(jsonl(tmp_path, {"a": {"text": "x" * 400}, "b": {"text": "y" * 400}}), recipe)
    assert dataset.num_rows == 20
    letters.settings["calls"] = 0
    loader = od.DataLoader(dataset, batch_size=3, shuffle=True, dp=(0, 1), num_threads=4)
    assert len(rows_of(loader)) == 20
    assert letters.settings["calls"] == 2


def long_texts() -> dict[str, dict[str, Any]]:
    """A text and a chat of some thousand words each."""
    pool = [
        *"What is in the picture ? A cat is on the mat , 12".split(),
        "d\u00e9j\u00e0",
        "vu\n",
        "\U0001f600\U0001f600",
    ]
    drawn = [pool[number] for number in np.random.default_rng(5).integers(0, len(pool), 6000)]
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": " ".join(drawn[150 * i : 150 * i + 150])} for i in range(40)
    ]
    return {"text": {"text": " ".join(drawn)}, "chat": {"messages": turns}}


def llama() -> Any:
    pytest.importorskip("tokenizers")
    from chat_templates import like_llama2

    return like_llama2()


def rendered() -> dict[str, Any]:
    """A model's own template, which says itself how a chat begins and ends."""
    pytest.importorskip("tokenizers")
    from chat_templates import LLAMA3, hf_tokenizer

    tokenizer = hf_tokenizer(LLAMA3, bos="<|begin_of_text|>")
    return {"tokenizer": tokenizer, "template": od.ChatTemplate.from_jinja(tokenizer)}


LONG = TOKENIZERS | {
    "at once, marks for blanks": lambda: {"tokenizer": llama(), "bos_token_id": 1},
    "at once, the model's own template": rendered,
}


@pytest.mark.slow_cases("at once,")
@pytest.mark.parametrize("tokenizer", [name for name in LONG if name.startswith("at once")])
def test_a_piece_is_tokenized_without_the_rest_of_its_text(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LONG[tokenizer]()
    dataset = od.ShardDataset(jsonl(tmp_path, long_texts()), text_recipe(**{"max_tokens": 300, **options}))
    whole = undivided(dataset)
    index = dataset.index()
    assert index.num_samples == 2
    assert index.num_rows > 20
    assert (index.text_start >= 0).all()
    assert any(unpacked(number)[1] for number in index.text_start.tolist()), "pieces begin inside of characters too"
    lengths: list[int] = []
    encode_batch = FastTokenizer.encode_batch

    def counted(self: FastTokenizer, texts: Any, **options: Any) -> Any:
        lengths.extend(map(len, texts))
        return encode_batch(self, texts, **options)

    monkeypatch.setattr(FastTokenizer, "encode_batch", counted)
    check_pieces(rows_of(batches_of(loaders(dataset, 2, global_batch_size=5))), whole, 300)
    assert len(lengths) == index.num_rows
    text = len(long_texts()["text"]["text"])
    assert max(lengths) < text / 5
    lengths.clear()
    assert sum(len(part.token_ids) for part in dataset[0].parts) == len(whole[dataset.urls[0], "text"][0])
    assert max(lengths) == text


def test_a_piece_that_depends_on_text_far_away_is_tokenized_with_it(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    looking = tokenizers.Tokenizer.from_str(fast().to_str())
    # Where a text ends in Z, every "ma" stands alone, so that "mat" is no word of it.
    ahead = tokenizers.pre_tokenizers.Split(tokenizers.Regex("ma(?=[^Z]*Z$)"), "isolated")
    looking.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([ahead, looking.pre_tokenizer])
    text = " the mat is on the mat ," * 300
    records = {"far": {"text": text + "Z"}, "near": {"text": text}}
    dataset = od.ShardDataset(jsonl(tmp_path, records), text_recipe(max_tokens=500, tokenizer=looking))
    index = dataset.index()
    alone = {key: (index.text_start[index.find_all(None, key)] >= 0).tolist() for key in records}
    assert all(alone["near"])
    assert alone["far"] == [False] * (len(alone["far"]) - 1) + [True], "the last sees the end"
    check_pieces(rows_of(batches_of(loaders(dataset, 2, global_batch_size=5))), undivided(dataset), 500)


def test_what_was_cut_is_counted(tmp_path: Path) -> None:
    lengths = {key: len(text) + 2 for key, text in TEXTS.items()}
    above = [length for length in lengths.values() if length > LIMIT]
    split = od.ShardDataset(written("jsonl", tmp_path), text_recipe())
    totals = split.index().totals
    pieces = sum(-(-length // LIMIT) for length in above)
    assert totals["overflow"] == {"truncated": 0, "cut_tokens": 0, "split": len(above), "pieces": pieces}
    cut = od.ShardDataset(written("jsonl", tmp_path), text_recipe(overflow="truncate"))
    lost = sum(length - LIMIT for length in above)
    expected = {"truncated": len(above), "cut_tokens": lost, "split": 0, "pieces": 0}
    assert cut.index().totals["overflow"] == expected
    plain = od.ShardDataset(written("jsonl", tmp_path), text_recipe(max_tokens=None, overflow="error"))
    for name in ("samples", "bad", "bytes", "members", "llm_tokens", "without_loss"):
        assert totals[name] == plain.index().totals[name], name
    assert totals["modalities"] == plain.index().totals["modalities"]
    assert not any(plain.index().totals["overflow"].values())
    assert profile(plain.index(), ranks=(2,), batch_size=2).overflow is None

    (loader,) = loaders(cut, 1, global_batch_size=4)
    rows = rows_of(loader)
    assert loader.stats()["overflow"] == expected
    whole = undivided(cut)
    for (shard, key, piece), row in rows.items():
        assert piece == 0
        assert row == tuple(each[:LIMIT] for each in whole[shard, key])
        assert [id for part in cut[cut.find(key)].parts for id in part.token_ids.tolist()] == row[0]  # type: ignore[index]

    profiled = profile(split.index(), ranks=(2,), batch_size=2)
    assert profiled.samples == len(TEXTS)
    assert profiled.overflow is not None
    assert (profiled.overflow.split, profiled.overflow.pieces) == (len(above), pieces)
    assert profiled.modalities["text"].share == 1.0


def test_samples_with_media(tmp_path: Path) -> None:
    """12 tokens of an image come first."""
    samples = [
        {"__key__": "long", "jpg": jpeg(64, 48), "txt": b"x" * 60},
        {"__key__": "short", "jpg": jpeg(64, 48), "txt": b"x" * 8},
        {"__key__": "late", "jpg": jpeg(64, 48), "json": chat("y" * 50 + "<image>", "z")},
        {"__key__": "unlearned", "json": chat("y" * 50, "z")},
    ]
    path = write_shard(tmp_path / "media.tar", samples)

    def dataset(**options: Any) -> od.ShardDataset:
        return od.ShardDataset(path, od.Recipe(image=RECIPE.image, text=od.TextPreprocessor(**options)))

    def bad(given: od.ShardDataset) -> dict[str, str]:
        failures = [given.index().failure(row) for row in given.index().bad_rows().tolist()]
        return {failure.key: failure.reason for failure in failures}

    whole = undivided(dataset())
    cut = dataset(max_tokens=30, overflow="truncate")
    assert bad(cut).keys() == {"late", "unlearned"}
    assert "media are never cut" in bad(cut)["late"]
    assert "no token with loss" in bad(cut)["unlearned"]
    good = cut.filter("not bad")
    for (shard, key, _), row in rows_of(batches_of(loaders(good, 1, global_batch_size=2))).items():
        assert row == tuple(each[:30] for each in whole[shard, key])
    split = dataset(max_tokens=30, overflow="split")
    assert bad(split).keys() == {"long", "late"}
    assert all("divides text alone" in reason for reason in bad(split).values())
    assert bad(dataset(max_tokens=30)).keys() == {"long", "late", "unlearned"}
    assert bad(dataset(max_tokens=10**6)) == {}
    # A token before the image and one after it, which is a part of it.
    closed = {"overflow": "truncate", "image_start_id": 300, "image_end_id": 301}
    assert "media are never cut" in bad(dataset(max_tokens=13, **closed))["long"]
    assert "long" not in bad(dataset(max_tokens=15, **closed))
