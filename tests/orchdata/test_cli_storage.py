"""The command line over object storage: options that reach the store, and are shown nowhere."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers.gcs_server import GcsServer
from servers.s3_server import S3Server
from shard_factory import omni_shards
from typer.testing import CliRunner

from orchdata.cli import app

SHARDS = 3
SAMPLES = 4
RECIPE = ("--recipe", "shard_factory:RECIPE")


class Stored:
    """Shards in a bucket, and the options that read them."""

    def __init__(self, server: S3Server, bucket: str, folder: Path) -> None:
        self.secrets = (server.access_key, server.secret_key)
        self.pattern, self.index = f"s3://{bucket}/data/*.tar", f"s3://{bucket}/train.index"
        self.options = [f"--storage-options={name}={value}" for name, value in server.options.items()]
        self.as_dict = server.options
        for path in omni_shards(folder, shards=SHARDS, samples=SAMPLES):
            server.put(bucket, f"data/{Path(path).name}", Path(path).read_bytes())

    def run(self, *arguments: object, code: int = 0) -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        assert not any(secret in result.output for secret in self.secrets)
        return result

    def json(self, command: str, *arguments: object) -> Any:
        return json.loads(self.run(command, self.pattern, *RECIPE, *self.options, *arguments, "--json").stdout)


@pytest.fixture
def stored(s3_server: S3Server, new_bucket: Callable[[], str], tmp_path: Path) -> Stored:
    return Stored(s3_server, new_bucket(), tmp_path)


def test_every_command_that_takes_shards_reads_them_from_a_store(stored: Stored) -> None:
    assert stored.json("index")["samples"] == SHARDS * SAMPLES
    assert stored.json("profile", "--ranks", 2)["samples"] == SHARDS * SAMPLES
    assert stored.json("verify", "--jobs", 1)["samples"] == SHARDS * SAMPLES
    assert len(stored.json("show")["groups"][0]["samples"]) == 3


def test_every_command_takes_an_index_file(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = stored.run("index", stored.pattern, *RECIPE, *stored.options, "--out", stored.index)
    assert f"written: {stored.index}\n" in said.stdout
    for command, more in {"profile": ("--ranks", 2), "verify": ("--jobs", 1), "show": ()}.items():
        monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / command))
        stored.json(command, "--index-file", stored.index, *more)
        folders = {path.name for path in (tmp_path / command).iterdir()}
        assert "index" in folders
        assert "costs" not in folders, "nothing was measured"


def test_a_mixture_has_them_for_each_source(stored: Stored, tmp_path: Path) -> None:
    stored.run("index", stored.pattern, *RECIPE, *stored.options, "--out", stored.index)
    options = json.dumps(stored.as_dict)
    source = f"{{paths: '{stored.pattern}', storage_options: {options}, index_file: '{stored.index}'}}"
    (tmp_path / "mixture.yaml").write_text(f"sources:\n  one: {source}\n")
    report = stored.run("profile", tmp_path / "mixture.yaml", *RECIPE, "--ranks", 2, "--json")
    assert json.loads(report.stdout)["samples"] == SHARDS * SAMPLES
    other = stored.run("profile", tmp_path / "mixture.yaml", *stored.options, code=1)
    assert "give the sources in" in other.stderr
    (tmp_path / "mixture.yaml").write_text(f"sources:\n  one: {{paths: a.tar, storage_options: [{options}]}}\n")
    wrong = stored.run("profile", tmp_path / "mixture.yaml", code=1)
    assert "sources.one: storage_options is a dict of option -> value" in wrong.stderr


@pytest.mark.parametrize("given", ["hidden", "=hidden"])
def test_an_option_without_a_name_is_refused_and_not_shown(given: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["index", "s3://bucket/*.tar", "--storage-options", given])
    assert result.exit_code == 1
    assert "--storage-options takes NAME=VALUE" in result.stderr
    assert "hidden" not in result.output


def test_unchanged_shards_cost_their_listing(gcs_server: GcsServer) -> None:
    gcs_server.page_size = 10
    gcs_server.make_bucket("bucket")
    for number in range(45):
        gcs_server.put("bucket", f"data/{number:06d}.tar", text_tar(f"text {number}"))
    options = [f"--storage-options={name}={value}" for name, value in gcs_server.options.items()]
    arguments = ["index", "gs://bucket/data/*.tar", "--out", "gs://bucket/train.index", *options, "--json"]
    assert json.loads(CliRunner().invoke(app, arguments).stdout)["scanned"] == 45
    gcs_server.clear()
    report = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert (report["out"], report["scanned"]) == ("gs://bucket/train.index", 0)
    listings = [each.query["prefix"].split("/")[0] for each in gcs_server.requests() if "list-type" in each.query]
    assert listings == ["data"] * 5  # 45 shards in pages of 10
    assert len(gcs_server.requests()) == len(listings) + 1  # the index is written


def text_tar(text: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        member = tarfile.TarInfo("sample.txt")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()
