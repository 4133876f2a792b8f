"""Mixtures through a DataLoader: the same steps on any ranks and workers, resumed anywhere, with other weights too."""

# ruff: noqa: F811 (a fixture is imported)

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from digests import content
from mixed_data import data, mixture, planned  # noqa: F401
from rank_loaders import loaders, steps_of
from shard_factory import RECIPE, SKIP_ANY, omni_shards, write_shard

import orchdata as od
from orchdata.order.mixture import MixtureOrder
from orchdata.planning.plan import Plan

pytestmark = pytest.mark.usefixtures("same_cache")


def held_by(step: Sequence[Any]) -> list[tuple[str, ...]]:
    """(shard, key, digest of its sequence) of a step's samples, over all ranks; one may come in two passes."""
    return sorted(sequence for share in step for sequence in content(share)[0])


@pytest.mark.slow_cases("options0", "options2")
@pytest.mark.parametrize("options", [{}, {"stop": "all", "epoch_tokens": None}, {"by": "samples"}])
def test_global_batches_are_the_same_on_any_ranks(data: dict[str, od.ShardDataset], options: dict[str, Any]) -> None:
    mixed = mixture(data, **options)
    alone = steps_of(loaders(mixed, 1))
    expected = [held_by(step) for step in alone]
    assert len(expected) == len(loaders(mixed, 1)[0]) > 5
    taken = [each for step in alone for each in planned(step)]
    assert len(taken) == len(set(taken)), "each (source, pass, row) once"
    for ranks in (2, 3, 8):
        assert [held_by(step) for step in steps_of(loaders(mixed, ranks))] == expected


def test_each_source_is_read_by_its_own_recipe(data: dict[str, od.ShardDataset]) -> None:
    """To the bit as from a loader of its own."""
    seen: dict[str, dict[Any, bytes]] = {}
    for name, dataset in [*data.items(), ("mixed", mixture(data, stop="all", epoch_tokens=None))]:
        (loader,) = [od.DataLoader(dataset, batch_size=4, seed=1, dp=(0, 1), num_threads=0)]
        for batch in loader:
            bounds = itertools.pairwise(batch.llm.cu_seqlens.tolist())
            for key, (start, stop) in zip(batch.sample_ids, bounds, strict=False):
                arrays = batch.llm.input_ids[start:stop], batch.llm.labels[start:stop]
                seen.setdefault(name, {})[key] = b"".join(each.numpy().tobytes() for each in arrays)
    apart = seen["omni"] | seen["chat"] | seen["text"]
    assert len(apart) == 30 + 20 + 9
    assert seen["mixed"] == apart


@pytest.mark.slow
def test_mixtures_in_mixtures_share_out_a_weight(data: dict[str, od.ShardDataset]) -> None:
    inner = od.Mixture({"chat": od.Source(data["chat"], weight=3), "text": od.Source(data["text"], weight=1)})
    nested = od.Mixture(
        {"omni": od.Source(data["omni"], weight=1), "words": od.Source(inner, weight=2, loss_weight=0.5)},
        stop="repeat",
        epoch_tokens=60_000,
    )
    (loader,) = loaders(nested, 1, num_workers=1, num_threads=1)
    for _ in loader.steps():
        pass
    by_source = loader.stats()["sources"]
    total = sum(counts["tokens"] for counts in by_source.values())
    longest = max(int(dataset.index().llm_tokens.max()) for dataset in data.values())
    for name, share in {"omni": 1 / 3, "words/chat": 1 / 2, "words/text": 1 / 6}.items():
        assert abs(by_source[name]["tokens"] / total - share) <= max(0.005, 2 * longest / total)
    assert by_source["words/text"]["passes"] > by_source["omni"]["passes"] > 1


@pytest.mark.slow
def test_weights_change_where_the_state_stands_and_again(data: dict[str, od.ShardDataset]) -> None:
    before = mixture(data, (8, 1, 1), epoch_tokens=20_000)
    ours = loaders(before, 2)
    first = steps_of(ours, 4)
    state = ours[0].state_dict()
    after = mixture(data, (1, 8, 1), epoch_tokens=20_000)
    with pytest.raises(od.StateError, match=r"weights are {.*: 0\.8[,}].* in the state .* allow"):
        loaders(after, 1, state)
    (middle,) = loaders(after, 1, state, ("weights",))
    second = steps_of([middle], 6)
    again = middle.state_dict()
    assert again["given"]["is_changed"]
    # The same weights as the state's need no `allow` any more; on other ranks too.
    kept = [planned(step) for step in steps_of(loaders(after, 3, again))]
    assert kept == [planned(step) for step in steps_of(loaders(after, 1, again))]
    last = mixture(data, (1, 1, 8), epoch_tokens=20_000)
    (ending,) = loaders(last, 1, again, ("weights",), num_workers=1, num_threads=1)
    third = steps_of([ending])
    assert ending.state_dict()["given"]["changed"] == again["given"]["now"]
    taken = [each for step in (*first, *second, *third) for each in planned(step)]
    assert len(taken) == len(set(taken)), "nothing comes twice"
    by_pass = Counter((source, number) for source, number, _ in taken)
    whole = {(source, number) for source, number in by_pass if (source, number + 1) in by_pass}
    sizes = [dataset.index().num_samples for _, dataset in sorted(data.items())]
    assert all(by_pass[source, number] == sizes[source] for source, number in whole), "nothing is left out"
    for steps, heaviest in ((first, "omni"), (second, "chat"), (third, "text")):
        tokens = Counter[str]()
        for step in steps:
            for share in step:
                for batch in share:
                    for name, counts in batch.by_source().items():
                        tokens[name] += counts["tokens"]
        assert tokens.most_common(1)[0][0] == heaviest
    (later,) = loaders(last, 1, ending.state_dict())
    assert [planned(step) for step in steps_of([later], 3)] == [planned(step) for step in steps_of([ending], 3)]


@pytest.mark.slow
def test_workers_that_are_kept_learn_of_other_weights(data: dict[str, od.ShardDataset]) -> None:
    ours = loaders(mixture(data, (8, 1, 1)), 1)
    steps_of(ours, 4)
    state = ours[0].state_dict()
    after = mixture(data, (1, 8, 1))
    kept = {"num_workers": 1, "num_threads": 1, "persistent_workers": True}
    (loader,) = loaders(after, 1, **kept)
    for _ in loader.steps():  # its workers stay, with the plan of its own weights
        pass
    loader.load_state_dict(state, allow=("weights",))
    expected = steps_of(loaders(after, 1, state, ("weights",)))
    assert [held_by(step) for step in steps_of([loader])] == [held_by(step) for step in expected]
    loader.close()


def test_other_weights_between_epochs_leave_out_nothing(data: dict[str, od.ShardDataset]) -> None:
    ours = loaders(mixture(data, epoch_tokens=3000), 1)
    first = steps_of(ours)
    (later,) = loaders(mixture(data, (1, 9, 9), epoch_tokens=3000), 1, ours[0].state_dict(), ("weights",))
    assert later.state_dict()["epoch"] in (0, 1)
    rest = [step for _ in range(4) for step in steps_of([later])]
    taken = [each for step in (*first, *rest) for each in planned(step)]
    assert len(taken) == len(set(taken))
    by_pass = Counter((source, number) for source, number, _ in taken)
    sizes = [dataset.index().num_samples for _, dataset in sorted(data.items())]
    assert all(count == sizes[source] for (source, number), count in by_pass.items() if (source, number + 1) in by_pass)


def test_stages_follow_each_other(data: dict[str, od.ShardDataset]) -> None:
    stages = [(0, {"omni": 1}), (3000, {"chat": 1, "text": 1}), (6000, {"chat": 1})]
    (loader,) = loaders(mixture(data, stages=stages, epoch_tokens=20_000), 1)
    at, seen = 0, []
    for step in steps_of([loader]):
        plan = step[0][0].plan
        for source, tokens in zip(plan.source.tolist(), plan.llm_positions.tolist(), strict=True):
            seen.append((at, plan.sources[source]))
            at += tokens
    for position, name in seen:
        assert name in next(weights for bound, weights in reversed(stages) if bound <= position)


def test_loss_weights_are_planned_into_the_denominator(data: dict[str, od.ShardDataset]) -> None:
    """Per-token losses of 1, weighted and scaled, add up to 1 over ranks and microbatches."""
    weighted = {"omni": 1.0, "chat": 0.25, "text": 3.0}
    sources = {name: od.Source(dataset, loss_weight=weighted[name]) for name, dataset in data.items()}
    mixed = od.Mixture(sources, stop="all")
    for options in ({}, {"collate_fn": od.Padded()}, {"balance": od.Balance(max_tokens=400, oversize="own")}):
        for step in steps_of(loaders(mixed, 2, **options), 4):
            total = 0.0
            for share in step:
                for batch in share:
                    assert batch.loss_weights.shape == batch.llm.labels.shape
                    weights = batch.loss_weights * (batch.llm.labels != -100)
                    total += float(weights.sum()) * batch.loss_scale / batch.dp_size
            plan = step[0][0].plan
            expected = sum(
                weighted[name] * tokens
                for name, tokens in zip(plan.sources, plan.source_loss_tokens.tolist(), strict=True)
            )
            assert step[0][0].global_loss_tokens == pytest.approx(expected)
            assert total == pytest.approx(1.0, abs=1e-5)
    (plain,) = loaders(mixture(data), 1)
    assert next(iter(plain)).loss_weights is None


def test_quarantine_and_failures_are_of_their_source(data: dict[str, od.ShardDataset], tmp_path: Path) -> None:
    broken = [{"__key__": "bad", "jpg": b"no image", "txt": b"x"}, {"__key__": "good", "txt": b"fine"}]
    bad = od.ShardDataset(write_shard(tmp_path / "broken.tar", broken), RECIPE)
    mixed = od.Mixture({"bad": od.Source(bad), "omni": od.Source(data["omni"])}, stop="all")
    with pytest.raises(od.DataError, match="broken.tar"):
        loaders(mixed, 1)
    for options in ({"on_error": SKIP_ANY}, {"quarantine": [("broken.tar", "bad")]}):
        (loader,) = loaders(mixed, 1, **options)
        named = [name for batch in loader for name in batch.sample_ids]
        assert [key for shard, key in named if shard.endswith("broken.tar")] == ["good"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda data: od.Mixture({}), "takes names and their od.Source"),
        (lambda data: od.Mixture({"a": data["omni"]}), "source 'a' must be an od.Source, got ShardDataset"),
        (lambda data: od.Source(data["omni"], weight=-1), "Source.weight must be a number of at least 0, got -1"),
        (lambda data: mixture(data, (0, 0, 0)), "every source of the mixture has weight 0"),
        (lambda data: mixture(data, stop="all"), "epoch_tokens is for stop='repeat'"),
        (lambda data: mixture(data, stages=[(5, {"omni": 1})]), "ascending from 0; one begins at 5"),
        (lambda data: mixture(data, stages=[(0, {"omi": 1})]), "names 'omi'; the sources are omni, chat, text"),
        (lambda data: loaders(mixture(data, (1, 1e-12, 1)), 1), "'chat' has 1.0e-12 of the weight"),
        (lambda data: loaders(mixture(data, epoch_tokens=10), 1), "epoch_tokens=10 is less than one sample has"),
        (lambda data: od.Mixture({"a": od.Source(mixture(data))}), "'a' is a mixture with stop='repeat', and the one"),
    ],
)
def test_what_cannot_be_is_refused(data: dict[str, od.ShardDataset], make: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make(data)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"text": od.TextPreprocessor(lambda text: [1], id="other")}, "text.id, 'bytes"),
        ({"image": replace(RECIPE.image, patch_size=16)}, "image.patch_size, 8 and 16"),
        ({"text": od.TextPreprocessor(image_token_id=900)}, "ids of image"),
    ],
)
def test_recipes_that_make_other_tensors_are_refused(
    data: dict[str, od.ShardDataset], other: dict[str, Any], what: str
) -> None:
    odd = od.ShardDataset(data["text"].urls, replace(RECIPE, **other))
    mixed = od.Mixture({"omni": od.Source(data["omni"]), "odd": od.Source(odd)})
    with pytest.raises(ValueError, match="sources '(odd' and 'omni|omni' and 'odd)' differ in") as error:
        loaders(mixed, 1)
    assert what.split(",")[0] in str(error.value)


def test_states_of_other_mixtures_and_broken_ones_are_refused(data: dict[str, od.ShardDataset]) -> None:
    (loader,) = loaders(mixture(data), 1)
    steps_of([loader], 2)
    state = loader.state_dict()
    fewer = {name: dataset for name, dataset in data.items() if name != "text"}
    with pytest.raises(od.StateError, match="mixture.sources.text"):
        loaders(mixture(fewer, (1, 1)), 1, state)
    with pytest.raises(od.StateError, match="mixture.by is 'tokens' in the state and 'samples' here"):
        loaders(mixture(data, by="samples"), 1, state)
    again = loaders(mixture(data), 1, state)[0].state_dict()
    assert again == state


# States of mixtures: what they say is checked, and their size does not grow with the number of stages.


WEIGHTS = [{"omni": 5, "chat": 3, "text": 1}, {"omni": 1, "chat": 3, "text": 2}, {"chat": 3, "text": 1}]


@pytest.mark.slow
def test_a_state_is_small_with_many_stages_and_sources(data: dict[str, od.ShardDataset]) -> None:
    names = [f"source-{number:02d}" for number in range(50)]
    rng = np.random.default_rng(0)
    stages = [(400 * k, dict(zip(names, rng.uniform(0.1, 1, 50).tolist(), strict=True))) for k in range(1000)]
    sources = {name: od.Source(data[("omni", "chat", "text")[k % 3]]) for k, name in enumerate(names)}
    mixed = od.Mixture(sources, stages=stages, stop="repeat", epoch_tokens=400_000)
    (loader,) = loaders(mixed, 1)
    steps = iter(loader.steps())
    for _ in range(5):
        next(steps)
    state = loader.state_dict()
    assert "changed" in state["given"]
    assert len(json.dumps(state)) < 20_000
    assert loaders(mixed, 1, state)[0].state_dict() == state
    other = od.Mixture(
        {**sources, names[0]: od.Source(data["text"])}, stages=stages, stop="repeat", epoch_tokens=400_000
    )
    with pytest.raises(od.StateError, match="source-00"):
        loaders(other, 1, state)


def test_a_state_that_says_what_cannot_be_is_refused(data: dict[str, od.ShardDataset]) -> None:
    mixed = mixture(data, stages=list(zip((0, 2000, 4500), WEIGHTS, strict=True)))
    (loader,) = loaders(mixed, 1)
    steps_of([loader], 6)
    state = loader.state_dict()
    wrong = {"now": {}, "weights": [1], "begun": None, "start": {"samples": [0], "tokens": [0]}}
    for given in ([], None, {}, *(state["given"] | {field: value} for field, value in wrong.items())):
        with pytest.raises(od.StateError, match="have given"):
            loaders(mixed, 1, state | {"given": given})
    counts = [each + 1 for each in state["given"]["now"]["samples"]]
    with pytest.raises(od.StateError, match="has given other amounts at this position"):
        loaders(mixed, 1, state | {"given": state["given"] | {"now": state["given"]["now"] | {"samples": counts}}})


@pytest.mark.parametrize("engine", [{"num_threads": 0}, {"num_threads": 2}], ids=["inline", "threads"])
def test_an_error_of_the_order_belongs_to_its_step_which_is_tried_again(
    engine: dict[str, Any], data: dict[str, od.ShardDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [held_by([step]) for step in loaders(mixture(data), 1, **engine)[0].steps()]
    (loader,) = loaders(mixture(data), 1, **engine)
    samples = MixtureOrder.samples

    def failing(order: MixtureOrder, epoch: int, start: int, stop: int) -> Any:
        if start:
            raise OSError("the index cannot be read now")
        return samples(order, epoch, start, stop)

    monkeypatch.setattr(MixtureOrder, "samples", failing)
    steps = iter(loader.steps())
    delivered = [held_by([next(steps)])]
    with pytest.raises(OSError, match="cannot be read now"):
        next(steps)
    monkeypatch.undo()
    delivered += [held_by([step]) for step in loader.steps()]
    assert delivered == expected


# Runs over mixtures of all kinds of sources, cut anywhere and continued on other ranks: the undisturbed sequence.


EPOCHS = 2
Taken = list[tuple[int, int, int]]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> dict[str, od.ShardDataset]:
    folder = tmp_path_factory.mktemp("kinds")
    texts = [{"text": "word " * (1 + 3 * number % 17)} for number in range(40)]
    (folder / "lines.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in texts))
    pq.write_table(pa.table({"text": ["x" * (1 + 7 * number % 90) for number in range(25)]}), folder / "rows.parquet")
    tar = [{"__key__": f"t{number}", "txt": b"y" * (1 + 5 * number % 60)} for number in range(30)]
    lines = od.ShardDataset(folder / "lines.jsonl", RECIPE)
    datasets = {
        "tar": od.ShardDataset(write_shard(folder / "texts.tar", tar), RECIPE).split("train", 0.8),
        "rows": od.ShardDataset(folder / "rows.parquet", RECIPE),
        "lines": lines.filter("tokens < 80"),
        "held": lines.filter("tokens >= 80"),
        "omni": od.ShardDataset(omni_shards(folder, shards=2, samples=10), RECIPE),
    }
    for dataset in datasets.values():
        dataset.index()
    return datasets


def mixture_of(
    kinds: dict[str, od.ShardDataset], *, stop: str, by: str, staged: bool, weights: tuple[int, ...]
) -> od.Mixture:
    inner = {name: od.Source(kinds[name], weight=weight) for name, weight in zip(kinds, weights, strict=False)}
    words = od.Mixture({name: inner.pop(name) for name in ("lines", "held", "rows")})
    outer = {"omni": inner["omni"], "tar": inner["tar"], "words": od.Source(words, weight=weights[1])}
    options: dict[str, Any] = {"epoch_tokens": 2500} if stop == "repeat" else {}
    if staged:
        outer = {name: od.Source(source.dataset) for name, source in outer.items()}
        stages = [
            (0, {"omni": 1, "tar": 3}),
            (30, {"omni": 2, "tar": 1, "words": 4}),
            (900, {"tar": 1, "words": 2, "omni": 1}),
        ]
        options["stages"] = stages
    return od.Mixture(outer, stop=stop, by=by, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Stretch:
    ranks: int
    rank: int
    steps: int


def taken(plan: Plan) -> Taken:
    assert plan.passes is not None
    return list(zip(plan.source.tolist(), plan.passes.tolist(), plan.row.tolist(), strict=True))


def run(dataset: od.Mixture, stretches: list[Stretch], **options: Any) -> list[tuple[int, int, Taken]]:
    """(epoch, step, samples) of two epochs, the stretches in turn; the last one goes to the end."""
    all_steps: list[tuple[int, int, Taken]] = []
    state: Any = None
    for number, stretch in enumerate(stretches):
        rank = stretch.rank % stretch.ranks
        loader = od.DataLoader(dataset, dp=(rank, stretch.ranks), seed=5, num_threads=0, **options)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        left = 10**9 if number == len(stretches) - 1 else stretch.steps
        while left and loader.state_dict()["epoch"] < EPOCHS:
            epoch, steps = loader.state_dict()["epoch"], iter(loader.steps())
            for step in itertools.islice(steps, left):
                all_steps.append((epoch, step[0].step, taken(step[0].plan)))
                left -= 1
            steps.close()  # type: ignore[attr-defined]
        state = loader.state_dict()
    return all_steps


@pytest.mark.slow_cases("all")
@pytest.mark.parametrize("stop", ["all", "repeat"])
def test_a_resume_at_every_step_and_a_second_one(kinds: dict[str, od.ShardDataset], stop: str) -> None:
    mixed = mixture_of(kinds, stop=stop, by="tokens", staged=True, weights=(3, 1, 4, 1, 5))
    options = {"shuffle": od.Shuffle(streams=2), "global_batch_tokens": 1000}
    undisturbed = run(mixed, [Stretch(1, 0, 0)], **options)
    for position in range(len(undisturbed)):
        cut = [Stretch(2, 1, position), Stretch((8, 1, 3)[position % 3], position, 2), Stretch(3, 0, 0)]
        assert run(mixed, cut, **options) == undisturbed


@pytest.mark.slow_cases("all")
@pytest.mark.parametrize("stop", ["all", "repeat"])
def test_global_batches_hold_the_same_bits_on_any_ranks(kinds: dict[str, od.ShardDataset], stop: str) -> None:
    mixed = mixture_of(kinds, stop=stop, by="tokens", staged=stop == "repeat", weights=(3, 1, 4, 1, 5))
    contents = []
    for ranks in (1, 2, 3, 8):
        balance = od.Balance(scope="grid" if ranks == 8 else "global", group_size=2 if ranks == 8 else None)
        ours = [
            od.DataLoader(
                mixed, dp=(rank, ranks), global_batch_tokens=600, shuffle=True, balance=balance, num_threads=0
            )
            for rank in range(ranks)
        ]
        steps = zip(*(loader.steps() for loader in ours), strict=True)
        shares = [[content(share) for share in step] for step in steps]
        contents.append([[sorted(x for share in step for x in share[kind]) for kind in (0, 1)] for step in shares])
    assert len(contents[0]) > 4
    assert contents[1:] == contents[:1] * 3
