"""What verify lists is what an epoch refuses: hostile files, and samples that end, hang or fill a process."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from hostile import add_member
from shard_factory import jpeg, omni_samples, write_shard
from typer.testing import CliRunner
from verified_samples import RECIPE

import orchdata as od
from orchdata.building.pages import IndexedShards
from orchdata.cli import app
from orchdata.loaders.index.build import build_index
from orchdata.quarantine import write_quarantine
from orchdata.verifying import Verification, compare_shard, verify

Keys = list[tuple[str, str]]
FEW_FIELDS = ("jpg", "png", "wav", "mp3", "txt", "json")


def verified(shards: Sequence[str], recipe: od.Recipe = RECIPE, *, timeout: float = 120.0) -> Verification:
    dataset = od.ShardDataset(shards, recipe)
    return verify(build_index(dataset.urls, recipe), recipe, jobs=2, timeout=timeout)


def epoch(
    shards: Sequence[str], recipe: od.Recipe = RECIPE, *, quarantine: Path | None = None
) -> tuple[Keys, list[od.DataError]]:
    """What it delivers, and what it fails for; under a quarantine it raises."""
    failures: list[od.DataError] = []
    policy = od.ErrorPolicy("skip", max_failures=None, handler=failures.append)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = od.DataLoader(
            od.ShardDataset(shards, recipe),
            batch_size=4,
            on_error=policy if quarantine is None else "raise",
            quarantine=quarantine,
            num_threads=0,
        )
        return [key for batch in loader for key in batch.sample_ids], failures


def check_against_epochs(
    shards: Sequence[str], verified_failures: Verification, tmp_path: Path, recipe: od.Recipe = RECIPE
) -> None:
    """The listed are those that an epoch fails for, by all four fields; without them an epoch fails for none."""
    delivered, failures = epoch(shards, recipe)
    assert sorted(failure.args for failure in verified_failures) == sorted(failure.args for failure in failures)
    write_quarantine(tmp_path / "bad.jsonl", verified_failures)
    assert sorted(epoch(shards, recipe, quarantine=tmp_path / "bad.jsonl")[0]) == sorted(delivered)


def hostile_shard(folder: Path, fixtures: Path, step: int) -> list[str]:
    """Every `step`-th file of the hostile fixtures as a member of one tar and, where it is a shard, as itself."""
    files = [path for path in sorted((fixtures / "hostile").rglob("*")) if path.is_file()][::step]
    members = folder / "members.tar"
    with tarfile.open(members, "w") as archive:
        for number, path in enumerate(files):
            add_member(archive, f"h{number:04d}.{FEW_FIELDS[number % len(FEW_FIELDS)]}", path.read_bytes())
            add_member(archive, f"h{number:04d}.{path.suffix[1:].lower() or 'txt'}x.txt", b"next to")
            add_member(archive, f"own{number:04d}{path.suffix.lower() or '.txt'}", path.read_bytes())
    shards = [str(members)]
    for number, path in enumerate(path for path in files if path.suffix in (".tar", ".parquet")):
        shards.append(str(folder / f"{number}-{path.name}"))
        shutil.copy(path, shards[-1])
    return shards


def everything(folder: Path, traps: dict[str, str]) -> list[str]:
    """Good samples, some that only decoding tells, traps among good ones, keys that come back, and no gzip file."""
    whole = jpeg(120, 90)
    samples: list[dict[str, bytes | str]] = omni_samples(10)
    samples.append({"__key__": "cut", "jpg": whole[: len(whole) // 2], "txt": b"cut in its pixels"})
    samples.append({"__key__": "none", "jpg": b"no image at all", "txt": b"known to the index"})
    for key, way in traps.items():
        samples.append({"__key__": f"{key}-before", "txt": b"good", "trap": b"harmless"})
        samples.append({"__key__": key, "txt": b"bad", "trap": way.encode()})
    shards = [write_shard(folder / "some.tar", samples), str(folder / "twice.tar"), str(folder / "lost.tar.gz")]
    with tarfile.open(shards[1], "w") as archive:
        for name in ("a.txt", "b.txt", "a.txt", "c.txt"):
            add_member(archive, name, b"text")
    Path(shards[2]).write_bytes(b"\x1f\x8b\x08 no gzip file")
    return shards


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # soundfile's, over hostile files
def test_what_is_listed_is_what_an_epoch_refuses(tmp_path: Path, fixtures_dir: Path) -> None:
    shards = everything(tmp_path, {"raise": "raise"}) + hostile_shard(tmp_path, fixtures_dir, 16)
    out = tmp_path / "out.jsonl"
    named = ["--recipe", "verified_samples:RECIPE", "--jobs", "1", "--json", "--out", str(out)]
    ended = CliRunner().invoke(app, ["verify", *shards, *named])
    assert ended.exit_code == 1, ended.output
    report, rows = json.loads(ended.stdout), [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == report["failures"] and report["bad"] == len(rows)
    failures = [od.DataError(**row) for row in rows]
    listed = [failure.key for failure in failures if failure.shard in shards[:3]]
    assert listed == ["cut", "none", "raise", "a", "a", ""]
    assert report["bad_when_decoded"] >= 2 and report["samples"] > 20
    check_against_epochs(shards, failures, tmp_path, RECIPE)
    # A list without one of them does not pass.
    write_quarantine(out, [failure for failure in failures if failure.key != "cut"])
    with pytest.raises(od.DataError, match="'cut', field 'jpg'"):
        epoch(shards, RECIPE, quarantine=out)


@pytest.mark.slow
def test_a_sound_data_set_has_nothing_to_list(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / "ok.tar", omni_samples(10))]
    assert verified(shards) == Verification(num_samples=10, failures=(), num_indexed_bad=0)
    ended = CliRunner().invoke(app, ["verify", *shards])
    assert ended.exit_code == 0 and "10 good samples" in ended.stdout


@pytest.mark.slow
def test_what_ends_or_fills_a_process_is_named(tmp_path: Path) -> None:
    traps = {"a": "abort", "b": "allocate", "c": "exit", "d": "raise", "e": f"abort once {tmp_path / 'was here'}"}
    shards = everything(tmp_path, traps)
    verification = verified(shards)
    reasons = {failure.key: failure.reason for failure in verification.failures if failure.shard == shards[0]}
    assert sorted(reasons.keys() & traps.keys()) == ["a", "b", "c", "d"]
    assert (tmp_path / "was here").exists()  # it ended one process, and not the next
    assert "killed by signal: Aborted under 2147483648 bytes of memory and twice" in reasons["a"]
    assert f"went beyond {2 << 30} bytes of memory" in reasons["b"]
    assert "ended with status 7" in reasons["c"]
    assert "ValueError: a trap" in reasons["d"]
    write_quarantine(tmp_path / "bad.jsonl", verification.failures)
    assert len(epoch(shards, quarantine=tmp_path / "bad.jsonl")[0]) == verification.num_samples == 10 + 5 + 1 + 2


@pytest.mark.slow
def test_what_hangs_is_named(tmp_path: Path) -> None:
    verification = verified(everything(tmp_path, {"a": "hang", "b": "hang"}), timeout=10.0)
    reasons = [failure.reason for failure in verification.failures if "timed out after 10 seconds" in failure.reason]
    assert len(reasons) == 2


@pytest.mark.slow
def test_nothing_is_left_when_verifying_is_given_up(tmp_path: Path) -> None:
    shards = everything(tmp_path, {"a": f"tell {tmp_path / 'pid'} and hang"})

    def stop(done: int, _total: int) -> None:
        while done < 11 or not (tmp_path / "pid").exists():  # the worker is at the one that hangs
            if done < 11:
                return
            os.sched_yield()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(build_index(shards, RECIPE), RECIPE, jobs=1, progress=stop)
    worker = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(worker, 0)
            if Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                raise ProcessLookupError  # dead, and its new parent slow to notice
            os.sched_yield()


def test_a_shard_changed_in_place_is_stale(tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w") as archive:
        add_member(archive, "a.txt", b"text")
    index = build_index([str(shard)], RECIPE)
    compare_shard(IndexedShards(index=index, build_id=index.build_id, recipes=(RECIPE,)), 0)
    status, data = shard.stat(), bytearray(shard.read_bytes())
    data[:1] = b"z"
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    with shard.open("r+b") as file:
        file.write(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(od.StaleIndexError, match="another checksum"):
        compare_shard(IndexedShards(index=index, build_id=index.build_id, recipes=(RECIPE,)), 0)


def test_a_recipe_that_does_not_pickle_is_refused_by_name(tmp_path: Path) -> None:
    recipe = od.Recipe(text=od.TextPreprocessor(lambda text: [1] * len(text), id="lambda"))
    with pytest.raises(TypeError, match=r"recipes\[0\]\.text.* is a lambda"):
        verified([write_shard(tmp_path / "a.tar", omni_samples(2))], recipe)


@pytest.mark.parametrize("options", [{"jobs": 0}, {"timeout": 0.0}, {"timeout": float("nan")}])
def test_arguments_are_checked(options: dict[str, float], tmp_path: Path) -> None:
    index = build_index([write_shard(tmp_path / "a.tar", omni_samples(1))], RECIPE)
    with pytest.raises(ValueError, match="at least 1 and timeout above 0"):
        verify(index, RECIPE, **options)  # type: ignore[arg-type]


def test_a_list_never_replaces_a_shard(tmp_path: Path) -> None:
    shard = tmp_path / "a.jsonl"
    shard.write_text('{"text": "my only data"}\n')
    (tmp_path / "link.jsonl").symlink_to(shard)
    for out in (shard, tmp_path / "link.jsonl"):
        ended = CliRunner().invoke(app, ["verify", str(shard), "--out", str(out)])
        assert ended.exit_code == 1 and "is one of the shards" in ended.stderr
    assert shard.read_text() == '{"text": "my only data"}\n'
