"""Windows of concatenated documents, held against plain Python that joins the documents of an epoch and cuts them."""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from shard_factory import omni_shards

import orchdata as od
from orchdata.batch.batch import Batch

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

LENGTH, WINDOWS = 64, 6
ORDER: dict[str, Any] = {"shuffle": True, "seed": 3}
SIZES = [1, 1, 2, 3, 40, LENGTH - 1, LENGTH, LENGTH + 1, 150, 400, 5 * LENGTH]
LONG = 10 * LENGTH + 7  # a document of many windows, and of more than one step


class Token(NamedTuple):
    """One token of a document, and whether it is the first there."""

    document: tuple[str, str]
    number: int
    id: int


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> od.ShardDataset:
    return text_dataset(tmp_path_factory.mktemp("text"), 2, 16)


def text_dataset(folder: Path, shards: int, documents: int, seed: int = 0, **recipe: Any) -> od.ShardDataset:
    chosen = random.Random(seed)
    for shard in range(shards):
        sizes = [LONG, *chosen.choices(SIZES, k=documents - 1)]
        texts = ["".join(chosen.choices("abcdefgh", k=size)) for size in sizes]
        (folder / f"s{shard}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return od.ShardDataset(str(folder / "*.jsonl"), recipe=od.Recipe(**recipe))


def loader_of(dataset: Any, rank: int = 0, ranks: int = 1, **options: Any) -> od.DataLoader[Batch]:
    packed = {name: options.pop(name) for name in ("attention", "length", "positions") if name in options}
    layout = od.Packed(**{"length": LENGTH, **packed}, concatenate=True)
    given = {"global_batch_size": WINDOWS, "num_threads": 0, "collate_fn": layout, **ORDER} | options
    if isinstance(dataset, od.ShardDataset):
        dataset.index()
    return od.DataLoader(dataset, dp=(rank, ranks), **given)


def documents_of(dataset: Any, epoch: int, **options: Any) -> list[tuple[str, str]]:
    """The names of the documents in the order of an epoch, from a loader without windows."""
    plain = od.DataLoader(dataset, batch_size=1, num_threads=0, dp=(0, 1), **{**ORDER, **options})
    plain.set_epoch(epoch)
    return [batch.sample_ids[0] for batch in plain]


def stream_of(dataset: Any, epochs: Iterable[int], **options: Any) -> list[Token]:
    """All tokens of these epochs, one after another; the text itself is read from the files."""
    lines: dict[str, list[str]] = {}
    tokens = []
    for name in (name for epoch in epochs for name in documents_of(dataset, epoch, **options)):
        shard, key = name
        text = json.loads(lines.setdefault(shard, Path(shard).read_text().splitlines())[int(key)])["text"]
        tokens += [Token(name, number, id_) for number, id_ in enumerate(text.encode())]
    return tokens


def expected(tokens: Sequence[Token], attention: str = "document") -> dict[str, Any]:
    """What a window of these tokens gives a model."""
    starts = [at for at, token in enumerate(tokens) if at == 0 or token.number == 0]
    pieces = list(zip(starts, [*starts[1:], len(tokens)], strict=True))
    in_window = attention == "window"
    return {
        "input_ids": [token.id for token in tokens],
        "labels": [-100 if at in starts else token.id for at, token in enumerate(tokens)],
        "cu_seqlens": [0, len(tokens)] if in_window else [*starts, len(tokens)],
        "position_ids": [at if in_window else at - max(s for s in starts if s <= at) for at in range(len(tokens))],
        "sample_ids": [tokens[start].document for start, _ in pieces],
        "token_ranges": [(tokens[start].number, tokens[stop - 1].number + 1) for start, stop in pieces],
    }


def next_step(loader: od.DataLoader[Batch]) -> list[Batch]:
    """The next step of a loader: that of the next epoch, if its state is the end of one."""
    return next(share for _ in range(2) for share in loader.steps())


def found(batch: Batch) -> dict[str, Any]:
    llm = batch.llm
    tensors = ("input_ids", "labels", "cu_seqlens", "position_ids")
    return {name: getattr(llm, name).tolist() for name in tensors} | {
        "sample_ids": list(batch.sample_ids),
        "token_ranges": list(batch.token_ranges),
    }


def steps_of(dataset: Any, ranks: int, epochs: Iterable[int], **options: Any) -> dict[tuple[int, int], list[Batch]]:
    """The windows of each (epoch, step) over all ranks, in the order of the step where ranks are dealt windows."""
    steps: dict[tuple[int, int], list[list[Batch]]] = {}
    for rank in range(ranks):
        loader = loader_of(dataset, rank, ranks, **options)
        for epoch in epochs:
            loader.set_epoch(epoch)
            number_of_steps = len(loader.steps())
            shares = list(loader.steps())
            assert len(shares) == number_of_steps
            for number, share in enumerate(shares):
                assert [batch.step for batch in share] == [number] * len(share)
                steps.setdefault((epoch, number), []).append(share)
    for shares in steps.values():
        assert len({len(share) for share in shares}) == 1  # equal microbatches
        assert len({batch.plan.hash for share in shares for batch in share}) == 1
    return {
        place: [batch for batches in zip(*shares, strict=True) for batch in batches] for place, shares in steps.items()
    }


@pytest.mark.parametrize(
    ("ranks", "attention", "order"),
    [
        (1, "document", {"shuffle": od.Shuffle(window=1, streams=3), "seed": 5}),
        (2, "window", {}),
        (3, "document", {}),
        (1, "document", {"shuffle": np.arange(31, 2, -1), "seed": None}),
    ],
)
def test_windows_are_the_documents_of_the_epochs_cut(
    dataset: od.ShardDataset, ranks: int, attention: str, order: dict[str, Any]
) -> None:
    stream, at = stream_of(dataset, range(3), **order), 0
    steps = steps_of(dataset, ranks, range(3), attention=attention, **order)
    for batches in steps.values():
        assert len(batches) == WINDOWS
        for batch in batches:
            assert found(batch) == expected(stream[at : at + LENGTH], attention)
            at += LENGTH
        assert sum(batch.loss_tokens for batch in batches) == batches[0].global_loss_tokens
        assert batches[0].loss_scale == ranks / batches[0].global_loss_tokens
    # What is left of the last epoch is less than a step; a step of each epoch begins in the epoch before.
    assert at == len(stream) // (WINDOWS * LENGTH) * WINDOWS * LENGTH
    assert any(batch.plan.ranges.epoch.min() == 0 for batch in steps[1, 0])  # type: ignore[union-attr]


@pytest.mark.parametrize("ranks", [1, 2])
def test_drop_last_begins_each_epoch_with_its_first_document(dataset: od.ShardDataset, ranks: int) -> None:
    steps = steps_of(dataset, ranks, range(2), drop_last=True)
    for epoch in range(2):
        stream = stream_of(dataset, [epoch])
        number = len(stream) // (WINDOWS * LENGTH)
        mine = [batch for place, batches in steps.items() if place[0] == epoch for batch in batches]
        assert len(mine) == number * WINDOWS
        for at, batch in enumerate(mine):
            assert found(batch) == expected(stream[at * LENGTH : (at + 1) * LENGTH])


def test_engines_build_the_same_windows(dataset: od.ShardDataset) -> None:
    inline = [found(batch) for batch in loader_of(dataset, 1, 2)]
    batches = list(loader_of(dataset, 1, 2, num_workers=1, num_threads=2, prefetch_factor=2))
    assert [found(batch) for batch in batches] == inline
    ranges = batches[0].plan.ranges
    assert ranges is not None
    assert len(ranges.first) == len(batches[0].plan.row) == batches[0].num_step_samples


@pytest.mark.parametrize(("before", "after", "drop_last"), [(1, 2, False), (2, 3, True)])
def test_a_run_continues_on_other_ranks(dataset: od.ShardDataset, before: int, after: int, drop_last: bool) -> None:
    options = {"drop_last": drop_last}
    whole = {
        place: [found(batch) for batch in batches]
        for place, batches in steps_of(dataset, 1, [0, 1, 2], **options).items()
    }
    places = list(whole)
    first = loader_of(dataset, 0, before, **options)
    states = [json.loads(json.dumps(first.state_dict()))]
    for _ in range(2):
        for _ in first.steps():
            states.append(json.loads(json.dumps(first.state_dict())))
    for number, state in enumerate(states):
        if number % 3 and 0 < state["step"] < len(first.steps()) - 1:  # some, and all near the ends of epochs
            continue
        loaders = [loader_of(dataset, rank, after, **options) for rank in range(after)]
        for loader in loaders:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
        shares = zip(*[next_step(loader) for loader in loaders], strict=True)
        assert [found(batch) for batches in shares for batch in batches] == whole[places[number]]


def test_a_state_of_other_windows_is_refused(dataset: od.ShardDataset) -> None:
    loader = loader_of(dataset)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    for options, named in (
        ({"length": 32}, "windows.length is 64 in the state and 32 here"),
        ({"global_batch_size": 4}, "global_batch_size is 6 in the state and 4 here.*allow= cannot change that"),
        ({"drop_last": True}, "windows.drop_last is False in the state and True here"),
    ):
        with pytest.raises(od.StateError, match=named):
            loader_of(dataset, **options).load_state_dict(state, allow=("global_batch_size",))
    whole = od.DataLoader(dataset, global_batch_size=WINDOWS, dp=(0, 1), **ORDER)
    with pytest.raises(od.StateError, match="windows"):
        whole.load_state_dict(state)
    with pytest.raises(od.StateError, match="windows"):
        loader.load_state_dict(whole.state_dict())
    for damage, named in (
        ({"token": state["token"] + 1}, "begins at token"),
        ({"document": state["document"] | {"key": "no"}}, "begins at document"),
    ):
        with pytest.raises(od.StateError, match=named):
            loader.load_state_dict(state | damage)


def test_windows_that_ranks_cannot_share_leave_padding(dataset: od.ShardDataset) -> None:
    with pytest.warns(UserWarning, match="4 of these 16 have no window and are padding. 16 windows would fill them"):
        steps = steps_of(dataset, 16, [0], global_batch_size=12)
    stream = stream_of(dataset, [0])
    for place, batches in steps.items():
        assert len(batches) == 16
        empty = [batch for batch in batches if not batch.sample_ids]
        assert len(empty) == 4
        for batch in empty:
            assert batch.llm.input_ids.tolist() == [0] * LENGTH
            assert batch.llm.cu_seqlens.tolist() == [0, LENGTH]
            assert batch.loss_tokens == 0
            assert batch.samples == ()
        at = place[1] * 12 * LENGTH
        full = [batch for batch in batches if batch.sample_ids]
        assert [found(batch) for batch in full] == [
            expected(stream[start : start + LENGTH]) for start in range(at, at + 12 * LENGTH, LENGTH)
        ]


def test_mrope_positions_count_alike_on_all_axes(dataset: od.ShardDataset) -> None:
    plain, mrope = (next(iter(loader_of(dataset, positions=name))) for name in ("restart", "mrope"))
    assert mrope.llm.position_ids.tolist() == [plain.llm.position_ids.tolist()] * 3
    assert mrope.llm.restart_position_ids is not None
    assert mrope.llm.restart_position_ids.tolist() == plain.llm.position_ids.tolist()


def test_costs_decide_which_rank_has_which_window(dataset: od.ShardDataset) -> None:
    cost = od.CostModel(llm=od.PhaseCost(1.0, 0.5))
    shares = {rank: list(loader_of(dataset, rank, 2, cost=cost).steps()) for rank in range(2)}
    imbalance = {}
    for balance in ("none", "global"):
        loader = loader_of(dataset, 0, 2, cost=cost, balance=balance)
        for _ in loader:
            pass
        assert loader.stats()["fill"] == 1.0
        imbalance[balance] = loader.stats()["step_imbalance"]
    assert imbalance["global"] < imbalance["none"], "a window of one document costs more than one of many"
    stream = stream_of(dataset, [0])
    for step, both in enumerate(zip(*shares.values(), strict=True)):
        at = step * WINDOWS * LENGTH
        windows = [expected(stream[start : start + LENGTH]) for start in range(at, at + WINDOWS * LENGTH, LENGTH)]
        assert sorted(map(str, windows)) == sorted(str(found(batch)) for share in both for batch in share)


def test_places_of_samples_and_kept_fields_follow_pieces(tmp_path: Path) -> None:
    columns = {"text": ["x" * (20 + 7 * number) for number in range(30)], "lang": [f"l{n}" for n in range(30)]}
    pq.write_table(pa.table(columns), tmp_path / "s.parquet")
    dataset = od.ShardDataset(str(tmp_path / "s.parquet"), recipe=od.Recipe(keep=("lang",)))
    for attention in ("document", "window"):
        for batch in loader_of(dataset, attention=attention):
            assert [key for _, key in batch.sample_ids] == [value[1:] for value in batch.fields["lang"]]  # type: ignore[index]
            places = batch.samples
            assert places[0].start == 0  # type: ignore[union-attr]
            lengths = [stop - first for first, stop in batch.token_ranges]
            assert [place.stop - place.start for place in places] == lengths  # type: ignore[union-attr]


class Counted:
    """A tokenizer of bytes that counts its calls by text, and fails for some."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failing: set[str] = set()

    def __call__(self, text: str) -> list[int]:
        self.calls[text] += 1
        if text in self.failing:
            raise ValueError("no such text")
        return list(text.encode())


def test_a_long_document_is_tokenized_once(tmp_path: Path) -> None:
    tokenizer = Counted()
    dataset = text_dataset(tmp_path, 1, 12, text=od.TextPreprocessor(tokenizer, id="counted"))
    dataset.index()
    tokenizer.calls.clear()
    assert sum(LONG > LENGTH and len(batch.sample_ids) for batch in loader_of(dataset))
    long = [text for text in tokenizer.calls if len(text) == LONG]
    assert len(long) == 1
    assert set(tokenizer.calls.values()) == {1}


def test_a_document_that_fails_keeps_its_place_without_labels(tmp_path: Path) -> None:
    tokenizer = Counted()
    dataset = text_dataset(tmp_path, 1, 20, text=od.TextPreprocessor(tokenizer, id="counted"))
    stream = stream_of(dataset, [0])
    whole = [found(batch) for batch in loader_of(dataset)]
    (failed,) = {token.document for token in stream if token.number == LONG - 1}
    tokenizer.failing = {text for text in tokenizer.calls if len(text) == LONG}
    with pytest.raises(od.DataError, match="no such text"):
        list(loader_of(dataset))
    loader = loader_of(dataset, on_error=od.ErrorPolicy("skip", max_failures=20))
    planned = delivered = 0
    for before, batch in zip(whole, loader, strict=True):
        now = found(batch)
        for number, (name, (start, stop)) in enumerate(
            zip(batch.sample_ids, [(place.start, place.stop) for place in batch.samples], strict=True)  # type: ignore[union-attr]
        ):
            if name == failed:
                before["labels"][start:stop] = [-100] * (stop - start)
                before["input_ids"][start:stop] = [0] * (stop - start)
                assert number < len(batch.token_ranges)
        assert now == before
        delivered += batch.loss_tokens
        planned += int(batch.global_loss_tokens) if batch.is_last_microbatch else 0
    assert delivered < planned
    assert loader.stats()["failures"]["count"] > 1  # once in each window


def test_ids_of_start_and_end_are_tokens_of_the_document(tmp_path: Path) -> None:
    recipe = {"text": od.TextPreprocessor(bos_token_id=300, eos_token_id=301)}
    dataset = text_dataset(tmp_path, 1, 12, **recipe)
    ids, labels = [], []
    for batch in loader_of(dataset, shuffle=False):
        ids += batch.llm.input_ids.tolist()
        labels += batch.llm.labels.tolist()
    lines = [json.loads(line)["text"] for line in (tmp_path / "s0.jsonl").read_text().splitlines()]
    wanted = [id_ for line in lines for id_ in (300, *line.encode(), 301)]
    assert ids == wanted[: len(ids)]
    assert 300 not in labels
    assert labels.count(301) == sum(id_ == 301 and at % LENGTH > 0 for at, id_ in enumerate(ids))


def test_sources_of_a_mixture_are_concatenated_in_its_order(tmp_path: Path) -> None:
    datasets = {}
    for name, seed in (("web", 1), ("code", 2)):
        (tmp_path / name).mkdir()
        datasets[name] = text_dataset(tmp_path / name, 1, 20, seed)
        datasets[name].index()
    shares = {"web": 0.7, "code": 0.3}
    sources = {
        name: od.Source(datasets[name], weight=weight, loss_weight=2 * weight) for name, weight in shares.items()
    }
    mixture = od.Mixture(sources, by="tokens", stop="repeat", epoch_tokens=4_000)
    stream, at = stream_of(mixture, range(3)), 0
    steps = steps_of(mixture, 2, range(3))
    for batches in steps.values():
        for batch in batches:
            assert found(batch) == expected(stream[at : at + LENGTH])
            at += LENGTH
            weights = [2 * shares[Path(shard).parent.name] for shard, _ in batch.sample_ids]
            assert batch.loss_weights is not None
            counted = batch.by_source()
            assert sum(each["tokens"] for each in counted.values()) == LENGTH
            assert sum(each["loss_tokens"] for each in counted.values()) == batch.loss_tokens
            assert [float(batch.loss_weights[place][0]) for place in batch.samples] == pytest.approx(weights)  # type: ignore[index]
        weighted = sum(float((batch.loss_weights * (batch.llm.labels != -100)).sum()) for batch in batches)  # type: ignore[operator]
        assert weighted == pytest.approx(batches[0].global_loss_tokens)
    assert at == len(stream) // (WINDOWS * LENGTH) * WINDOWS * LENGTH
    # And a run continues, in the middle of the second epoch, on other ranks.
    loader = loader_of(mixture, 0, 2)
    loader.set_epoch(1)
    whole = iter(loader.steps())
    next(whole)
    state = json.loads(json.dumps(loader.state_dict()))
    loaders = [loader_of(mixture, rank, 3) for rank in range(3)]
    for each in loaders:
        each.load_state_dict(state)
    shares_of = zip(*[next_step(each) for each in loaders], strict=True)
    assert [found(batch) for row in shares_of for batch in row] == [found(batch) for batch in steps[1, 1]]


@pytest.mark.slow_cases("True", "options0", "options2")
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("options", [{"stop": "repeat", "epoch_tokens": 4_000}, {"stop": "all"}, {"stop": "first"}])
def test_windows_continue_with_other_weights(tmp_path: Path, options: dict[str, Any], drop_last: bool) -> None:
    """From the next document on: each document comes whole, and once in each pass, as with the weights before."""
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
    web, code = text_dataset(tmp_path / "web", 1, 20, 1), text_dataset(tmp_path / "code", 1, 20, 2)

    def loader_with(weight: float) -> Any:
        sources = {"web": od.Source(web), "code": od.Source(code, weight=weight)}
        return loader_of(od.Mixture(sources, **options), drop_last=drop_last)

    def pieces_of(batches: Any) -> list[tuple[Any, ...]]:
        """The (epoch, source, pass, row, first token, tokens) of the pieces of a step."""
        plan = batches[0].plan
        columns = (plan.ranges.epoch, plan.source, plan.passes, plan.row, plan.ranges.first, plan.llm_positions)
        return list(zip(*(each.tolist() for each in columns), strict=True))

    def tokens_of(loader: Any, epochs: int) -> tuple[list[list[tuple[Any, ...]]], list[Any]]:
        """The pieces of each step, and the state after it."""
        steps, states = [], []
        for _ in range(epochs):
            for batches in loader.steps():
                steps.append(pieces_of(batches))
                states.append(loader.state_dict())
        return steps, states

    steps, states = tokens_of(loader_with(1), 2)
    with pytest.raises(od.StateError, match="weights are .* in the state and .* here"):
        loader_with(5).load_state_dict(states[0])
    for number in range(len(states))[::-5]:  # from the end of an epoch back
        other = loader_with(5)
        other.load_state_dict(json.loads(json.dumps(states[number])), allow=("weights",))
        begun = other.state_dict()
        later, after = tokens_of(other, 2)
        # Each document's pieces follow each other, and none is left out but at the end of an epoch.
        pieces = [piece for step in [*steps[: number + 1], *later] for piece in step]
        sizes = other._runtime.prepared.spec.plan.batches.counts(np.arange(40)).tolist()
        reached: dict[tuple[Any, ...], int] = {}
        for *document, first, count in pieces:
            assert reached.get(tuple(document), 0) == first
            reached[tuple(document)] = first + count
        cut = [document for document, tokens in reached.items() if tokens < sizes[document[-1]]]
        assert len(cut) <= (4 if drop_last else 1)
        if options["stop"] == "repeat":
            assert len({document[1:] for document in reached}) == len(reached)
        # And it continues from a state before the next step, and from later ones.
        for state, wanted in zip((begun, after[0]), later[:2], strict=False):
            again = loader_with(5)
            again.load_state_dict(json.loads(json.dumps(state)))
            assert pieces_of(next_step(again)) == wanted


def test_the_loop_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "batches.md").read_text()
    block = page.partition("## Pretraining windows")[2].partition("```python\n")[2].partition("```")[0]
    assert len(block.splitlines()) == 10
    text_dataset(tmp_path, 1, 40)
    (tmp_path / "s0.jsonl").rename(tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data.jsonl").rename(tmp_path / "data" / "texts.jsonl")
    weight = torch.nn.Parameter(torch.zeros(()))
    tokens: list[int] = []

    def model(**inputs: Any) -> SimpleNamespace:
        assert inputs["input_ids"].shape == (LENGTH,)
        tokens.append(int((inputs["labels"] != -100).sum()))
        return SimpleNamespace(loss_sum=weight * tokens[-1])

    block = block.replace("4_096", str(LENGTH)).replace("512", "8").replace("num_workers=1", "num_threads=0")
    exec(block, {"od": od, "model": model, "optimizer": torch.optim.SGD([weight], lr=1.0)})
    # The loss of each step is weight * tokens / tokens of the global batch: the gradient is 1.
    assert weight.item() == pytest.approx(-len(tokens) / 8)


def refused(dataset: Any, match: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        loader_of(dataset, **options)


def test_what_windows_cannot_do_is_refused(dataset: od.ShardDataset) -> None:
    for options, named in (
        ({"length": None}, "pass length="),
        ({"global_batch_size": None, "global_batch_tokens": 390}, "pass global_batch_size=6, which is 384 tokens"),
        ({"global_batch_size": None, "global_batch_tokens": [(0, 64), (100, 128)]}, "counted in windows"),
        ({"balance": od.Balance(assignment="per_phase")}, "per_phase"),
        ({"balance": od.Balance(max_tokens=100)}, "leave the cap of llm out"),
        ({"cost": od.CostModel(image=od.PhaseCost(1.0), llm=od.PhaseCost(1.0))}, "names the phases image, llm"),
        ({"global_batch_size": 10_000}, "documents of an epoch have .* tokens.*at most"),
        ({"length": 1_000_000}, "documents of an epoch have .* tokens.*use a smaller length"),
    ):
        refused(dataset, named, **options)
    for layout, named in (
        ({"attention": "window"}, "concatenate=True too"),
        ({"length": 64, "concatenate": True, "multiple_of": 2}, "attention='window'"),
        ({"length": 64, "concatenate": True, "encoder_lengths": {"image": [4]}}, "encoder_lengths"),
    ):
        with pytest.raises(ValueError, match=named):
            od.Packed(**layout)  # type: ignore[arg-type]


def test_media_and_chats_are_refused(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(40)))
    refused(od.ShardDataset(str(tmp_path / "chats.jsonl")), "40 of 40 documents have tokens without a label")
    texts = [{"text": "Some words of a document."}] * 40
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    image = od.Recipe(image=od.ImagePreprocessor(patch_size=16))
    refused(od.ShardDataset(str(tmp_path / "texts.jsonl"), recipe=image), "the recipe says how image is prepared")
    media = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=20))
    refused(media, "the data set has .* parts of image, which cannot be cut: leave media out, by od.Recipe")


def test_a_long_document_is_no_overflow_and_needs_no_splitting(tmp_path: Path) -> None:
    split = od.TextPreprocessor(max_tokens=LENGTH, overflow="split")
    dataset = text_dataset(tmp_path, 1, 20, text=split)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = list(loader_of(dataset))
        for batch in batches:
            assert len(batch.pieces) == len(batch.sample_ids) == len(batch.token_ranges)
    assert max(number for batch in batches for number in batch.pieces) > 0
    places = [
        place for batch in batches for place in zip(batch.sample_ids, batch.pieces, batch.token_ranges, strict=True)
    ]
    assert len(places) == len(set(places))
