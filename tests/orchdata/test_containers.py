"""Containers of the user's: the same samples over engines, ranks and resume; kept facts; one clear error for misuse."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from own_containers import Arrays, Broken, Folders, Lists, Sqlites, Zips, values_of, written, zip_file
from shard_factory import RECIPE, SKIP_ANY, jpeg, omni_samples, write_shard
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app
from orchdata.loaders.index.build import BuildProgress, build_index
from orchdata.loaders.shards.container import ShardSource, identity_of
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.local import LocalFile

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
REPOSITORY = Path(__file__).resolve().parents[2]

Given = dict[od.Container, Path]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return written(tmp_path_factory.mktemp("containers"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def steps(dataset: od.ShardDataset | od.Mixture, **options: Any) -> list[Any]:
    loader = od.DataLoader(dataset, batch_size=2, shuffle=True, seed=3, **options)
    return [contents(batch) for batch in loader]


def contents(batch: od.Batch) -> tuple[Any, ...]:
    images = batch.media["image"].arrays["patches"].float().sum().item() if "image" in batch.media else 0
    return batch.sample_ids, batch.llm.input_ids.tolist(), images


@pytest.mark.parametrize("kind", [Zips, Arrays, Sqlites, Folders])
def test_containers_keep_the_contract(given: Given, kind: type[od.Container]) -> None:
    container = next(each for each in given if type(each) is kind)
    fields = od.check_container(container, given[container], other_process=kind is Zips)
    expected = {
        Zips: {"jpg": "image", "json": "text", "cls": "other"},
        Arrays: {"text": "text", "score": "other"},
        Sqlites: {"image": "image", "json": "text"},
        Folders: {"jpg": "image", "caption": "text"},
    }
    assert fields == expected[kind]


def test_samples_are_equal_over_engines_ranks_and_resume(given: Given) -> None:
    for container, path in given.items():
        dataset = od.ShardDataset(path, RECIPE, containers=[container])
        inline = steps(dataset)
        assert inline == steps(dataset, num_threads=2)
        if isinstance(container, Zips | Sqlites | Folders):
            assert inline == steps(dataset, num_workers=1)

        # Two ranks get the same samples, each once.
        parts = [steps(dataset, dp=(rank, 2)) for rank in range(2)]
        keys = sorted(key for part in parts for ids, *_ in part for key in ids)
        assert len(set(keys)) == len(dataset)

        # Resume after the first step, in another loader.
        first = od.DataLoader(dataset, batch_size=2, shuffle=True, seed=3)
        batches = iter(first)
        next(batches)
        again = od.DataLoader(pickle.loads(pickle.dumps(dataset)), batch_size=2, shuffle=True, seed=3)
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [contents(batch) for batch in again] == inline[1:]


def test_a_second_start_scans_nothing_and_a_change_is_noticed(tmp_path: Path) -> None:
    paths = [str(zip_file(tmp_path / f"{number}.zip", 4)) for number in range(3)]
    measured: list[bool] = []

    def build(container: od.Container) -> list[bool]:
        measured.clear()
        reading = od.ShardDataset(paths, RECIPE, containers=[container]).reading

        def note(done: BuildProgress) -> None:
            measured.append(done.measured)

        build_index(paths, RECIPE, reading=reading, progress=note)
        return sorted(measured)

    assert build(Zips()) == [True] * 3
    assert build(Zips()) == [False] * 3
    dataset = od.ShardDataset(paths, RECIPE, containers=[Zips()])
    assert len(dataset) == 12
    zip_file(Path(paths[1]), 6)
    os.utime(paths[1], ns=(1, 1))
    with pytest.warns(UserWarning, match=r"1\.zip changed since the index was built"):
        assert len(od.ShardDataset(paths, RECIPE, containers=[Zips()])) == 14
    assert build(Zips()) == [False] * 3
    assert build(OtherZips()) == [True] * 3  # another description


@dataclass(frozen=True)
class OtherZips(Zips):
    version = 2


def test_a_changed_folder_is_noticed(tmp_path: Path) -> None:
    for name in ("photos/cat/1.jpg", "photos/cat/2.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(jpeg(32, 32))
    assert len(od.ShardDataset(tmp_path / "photos", RECIPE, containers=[Folders()])) == 2
    assert len(od.ShardDataset(tmp_path / "photos", RECIPE, containers=[Folders()])) == 2
    (tmp_path / "photos/cat/3.jpg").write_bytes(jpeg(40, 32))
    with pytest.warns(UserWarning, match="changed since the index was built"):
        assert len(od.ShardDataset(tmp_path / "photos", RECIPE, containers=[Folders()])) == 3


def test_an_index_is_of_its_containers(tmp_path: Path) -> None:
    path = str(zip_file(tmp_path / "a.zip", 3))
    one, other = (od.ShardDataset(path, RECIPE, containers=[each]).index() for each in (Zips(), OtherZips()))
    assert one.path != other.path
    assert one.fingerprint != other.fingerprint
    info = one.shards[0]
    assert info.container
    assert ShardInfo.of_list(json.loads(json.dumps(info.as_list()))) == info
    with pytest.raises(od.ContainerError, match="indexed with a container of yours: pass the same containers="):
        from orchdata.loaders.shards.open import OpenShards

        OpenShards(limits=od.Limits(), cache=None).get(path, info)  # type: ignore[arg-type]


def test_users_functions_get_what_a_container_gives(given: Given) -> None:
    path = next(path for container, path in given.items() if isinstance(container, Arrays))
    recipe = od.Recipe(record=values_of, record_id="1")
    dataset = od.ShardDataset(path, recipe, containers=[Arrays()])
    (text,) = dataset[3].parts
    assert bytes(text.token_ids.tolist()) == b"words of row 3, once more"

    renamed = od.ShardDataset(path, columns={"text": "caption", "score": "text"}, containers=[Arrays()])
    assert dict(renamed.columns) == {"text": "caption", "score": "text"}
    with pytest.raises(ValueError, match="columns renames 'absent', and no sample has a field"):
        od.ShardDataset(path, columns={"absent": "other"}, containers=[Arrays()]).index()

    kept = od.ShardDataset(path, od.Recipe(keep=("score", "text")), containers=[Arrays()])
    assert kept[2].fields == {"score": b"1.0", "text": b"words of row 2"}


def test_a_mixture_reads_one_suffix_with_two_containers(tmp_path: Path) -> None:
    paths = [zip_file(tmp_path / f"{name}.zip", 4, prefix=name) for name in "ab"]
    sources = {
        path.stem: od.Source(od.ShardDataset(path, RECIPE, containers=[container]), weight=1)
        for path, container in zip(paths, (Zips(), OtherZips()), strict=True)
    }
    mixture = od.Mixture(sources, by="samples")
    assert mixture.containers == (Zips(), OtherZips())
    assert steps(mixture) == steps(mixture, num_threads=2)


@dataclass(frozen=True)
class ListedZips(Zips):
    """It has a list, and so no hash."""

    names: list[str] = field(default_factory=list)


def test_shards_of_several_kinds_are_one_data_set(tmp_path: Path) -> None:
    tar = write_shard(tmp_path / "a.tar", omni_samples(3))
    zipped = str(zip_file(tmp_path / "b.zip", 4))
    dataset = od.ShardDataset([tar, zipped], RECIPE, containers=[ListedZips(names=["x"])])
    assert len(dataset) == 7
    assert [bool(info.container) for info in dataset.index().shards] == [False, True]
    assert steps(dataset) == steps(dataset, num_threads=2)
    with pytest.raises(FileNotFoundError, match="no such shard"):
        od.ShardDataset(str(tmp_path / "absent.zip"), containers=[Zips()])
    with pytest.raises(ValueError, match="is given twice"):
        od.ShardDataset([zipped, str(tmp_path / "*.zip")], containers=[Zips()])
    (tmp_path / "link.zip").symlink_to(zipped)
    with pytest.raises(ValueError, match="are the same file"):
        od.ShardDataset([zipped, str(tmp_path / "link.zip")], containers=[Zips()]).index()


@pytest.mark.slow
def test_commands_take_containers(given: Given, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_data.py").write_text("from own_containers import Zips\nzips = Zips()\n")
    path = next(str(path) for container, path in given.items() if isinstance(container, Zips))
    named = ["--container", "my_data:zips"]
    for command, *more in (["index"], ["profile", "--ranks=2"], ["show"], ["verify", "--jobs=1"]):
        done = CliRunner().invoke(app, [command, path, *named, *more, "--json"])
        assert done.exit_code == 0, done.output
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(f'sources:\n  a: {{paths: ["{path}"], weight: 1, containers: ["my_data:zips"]}}\n')
    refused = CliRunner().invoke(app, ["profile", str(mixture)])
    assert "take the container out of the file and give --container" in " ".join(refused.output.split())
    for options in (["--allow-recipes"], []):
        if not options:
            mixture.write_text(f'sources:\n  a: {{paths: ["{path}"], weight: 1}}\n')
        done = CliRunner().invoke(app, ["profile", str(mixture), *options, *([] if options else named), "--json"])
        assert done.exit_code == 0, done.output


@dataclass(frozen=True)
class Held(Broken):
    value: Any = None

    def describe(self) -> dict[str, Any]:
        return {"class": "Held"}


class Hidden(Broken):
    def __init__(self) -> None:
        self.secret = 3


def lines(folder: Path, text: str = "one bad two") -> str:
    path = folder / "a.lines"
    path.write_text(text)
    return str(path)


REFUSED: dict[str, tuple[Any, str]] = {
    "not a list": (Zips(), "containers is a list of values of subclasses of od.Container"),
    "a lambda": ([Held(value=lambda: 0)], "container Held.value is a lambda in line .* which does not pickle"),
    "no dataclass": ([Hidden()], "Hidden is no dataclass, so that no fingerprint would see its secret"),
    "describe": ([Broken("describe")], "container Broken: describe() raised TypeError: Object of type object"),
    "claims nothing": ([Broken("claims nothing")], "no container of containers= claims it"),
    "unused": ([Broken(), Zips()], "container Zips claims none of the 1 paths"),
    "two": ([Broken(), Held()], "a.lines: container Broken and container Held both claim it"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_container_that_is_no_value_is_refused(tmp_path: Path, what: str) -> None:
    containers, message = REFUSED[what]
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises((ValueError, TypeError), match=pattern) as raised:
        od.ShardDataset(lines(tmp_path), containers=containers)
    if what not in ("not a list", "claims nothing"):
        assert isinstance(raised.value, od.ContainerError)


OF_THE_DATA = {
    "open": "a.lines: container Broken: open() raised RuntimeError: no key for this file",
    "open returns": "a.lines: container Broken: facts() raised AttributeError: 'bytes' object has no attribute 'facts'",
    "keys": "a.lines: container Broken: facts() returned a str: return a table with the columns key and field",
    "numbers": "a.lines: container Broken: facts() gives the key or field 0: these are strings",
    "no keys": "a.lines: container Broken: facts() has no rows: no samples",
    "same keys": "container Broken: samples 0 and 2 both have the key 'line0'",
    "same fields": "container Broken: facts() gives two fields with the name 'text'",
    "few": "container Broken: read() returned 0 values for 1 rows",
    "sample": "sample 'line1', field 'text': container Broken: read([1]) raised ZeroDivisionError",
    "type": "sample 'line1', field 'text': container Broken: read() returned a dict: return bytes, or a str",
}


@pytest.mark.parametrize("how", OF_THE_DATA)
def test_what_fails_for_a_shard_or_sample_is_a_data_error(tmp_path: Path, how: str) -> None:
    dataset = od.ShardDataset(lines(tmp_path), containers=[Broken(how)])
    index = dataset.index()
    failures = [index.failure(row) for row in index.bad_rows().tolist()]
    assert failures, how
    assert OF_THE_DATA[how] in str(failures[0])
    with pytest.raises(od.DataError):
        od.DataLoader(dataset, batch_size=1)
    if how in ("sample", "type"):
        assert len(failures) == 1
        with pytest.warns(UserWarning):
            loader = od.DataLoader(dataset, batch_size=1, on_error=SKIP_ANY)
        assert [key for batch in loader for _, key in batch.sample_ids] == ["line0", "line2"]


def test_what_says_nothing_about_the_data_is_no_data_error(tmp_path: Path) -> None:
    path = lines(tmp_path)
    for how, kind in (("disk", od.StorageError), ("package", od.PackageError)):
        reading = od.ShardDataset(path, containers=[Broken(how)]).reading
        with pytest.raises(kind):
            build_index([path], od.Recipe(), reading=reading, retry_seconds=0)


COUNTED = {"calls": 0}


@dataclass(frozen=True)
class Moody(Broken):
    """Its samples differ each time."""

    def open(self, source: od.ShardSource) -> Any:
        shard = super().open(source)
        shard._make = lambda line: COUNTED.update(calls=COUNTED["calls"] + 1) or line * COUNTED["calls"]
        return shard


def test_a_container_that_changes_its_mind_is_found(tmp_path: Path) -> None:
    with pytest.raises(od.ContainerError, match=r"facts\(\) and read\(\) must give the same each"):
        od.check_container(Moody(), lines(tmp_path))
    dataset = od.ShardDataset(lines(tmp_path), containers=[Moody()])
    with pytest.raises(od.DataError, match=r"must return the same each time"):
        list(od.DataLoader(dataset, batch_size=1))


def test_a_file_object_has_no_position_before_its_start(tmp_path: Path) -> None:
    path = tmp_path / "cut.bin"
    path.write_bytes(b"0123456789")
    file = ShardSource(LocalFile(str(path))).file()
    assert (file.seek(-4, os.SEEK_END), file.read()) == (6, b"6789")
    for position, whence in ((-16, os.SEEK_END), (-1, os.SEEK_SET)):
        with pytest.raises(ValueError, match="is before the start of"):
            file.seek(position, whence)


def test_the_example_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = (REPOSITORY / "docs/containers.md").read_text()
    zips, _, check, folders = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "data").mkdir()
    zip_file(tmp_path / "data/a.zip", 3)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "1.jpg").write_bytes(jpeg(32, 32))
    # Pickling needs a module.
    (tmp_path / "module_of_the_docs.py").write_text(f"{zips}\n{folders}")
    import module_of_the_docs as example

    assert len(example.dataset) == 3
    exec(compile(check.replace(")  #", ", other_process=False)  #"), "docs", "exec"), {**vars(example)})
    assert [sample.key for sample in example.photos] == ["1", "1"]


def test_fields_are_indexed_and_kept_as_members_of_a_tar_are(tmp_path: Path) -> None:
    path = tmp_path / "a.list"
    path.write_text(json.dumps([(f"k{n}", {"txt": "x", "lang": code}) for n, code in enumerate(("de", "en", "fr"))]))
    data = od.ShardDataset(path, containers=[Lists()], index_fields=("lang",))
    assert [data.filter(f"lang == '{code}'")[0].key for code in ("en", "fr")] == ["k1", "k2"]


def test_a_shard_that_was_damaged_after_it_was_indexed_is_stale_under_skip_too(tmp_path: Path) -> None:
    path = zip_file(tmp_path / "a.zip", 30)
    loader = od.DataLoader(od.ShardDataset(path, containers=[Zips()]), batch_size=4, on_error=SKIP_ANY)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(od.StaleIndexError, match="since it was indexed"):
        list(loader)


@pytest.mark.slow
def test_text_files_are_one_document_each(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("first line\n\nthird line\n")
    (tmp_path / "two.TXT").write_text("ä")
    (tmp_path / "three.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "four.txt").write_bytes(b"\xff")
    recipe = od.Recipe(image=None, audio=None)
    data = od.ShardDataset([f"{tmp_path}/*.[tT]*"], recipe, containers=[od.TextFiles()])
    with pytest.warns(UserWarning, match=r"1 of 4 samples are left out .*UTF-8"):
        (batch,) = od.DataLoader(data, batch_size=4, on_error=SKIP_ANY)
    texts = dict(zip((key for _, key in batch.sample_ids), batch.samples, strict=True))
    found = {key: bytes(batch.llm.input_ids[where].tolist()).decode() for key, where in texts.items()}
    assert found == {"one": "first line\n\nthird line\n", "two": "ä", "three": "packed"}
    od.check_container(od.TextFiles(), tmp_path / "one.txt")
    for wrong in ((), "txt", ("txt",)):
        with pytest.raises(ValueError, match="suffix"):
            od.TextFiles(wrong)  # type: ignore[arg-type]


def test_a_container_of_a_script_has_one_identity_in_its_workers() -> None:
    ours = type("Mine", (Lists,), {"__module__": "__main__"})
    in_worker = type("Mine", (Lists,), {"__module__": "__mp_main__"})
    assert identity_of(ours()) == identity_of(in_worker())
