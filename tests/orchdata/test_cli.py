"""The command line: what is printed where, exit codes, and one clear line for an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from printed import run, run_json
from servers.gcs_server import GcsServer
from servers.s3_server import S3Server
from shard_factory import omni_shards, write_shard
from typer.testing import CliRunner

from orchdata import notices as progress
from orchdata.cli import app, machine
from orchdata.notices import progress_bar


def error_line(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("orchdata: error: ")
    return lines[0]


def write_texts(path: Path, count: int) -> Path:
    text = b"a text that carries loss"
    return Path(write_shard(path, [{"__key__": f"{number:04d}", "txt": text} for number in range(count)]))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A shard of two texts and an image that is none."""
    samples = [{"__key__": key, "txt": text} for key, text in (("one", b"first"), ("two", b"second"))]
    samples.append({"__key__": "bad", "jpg": b"this is no image", "txt": b"third"})
    return Path(write_shard(tmp_path / "mixed.tar", samples))


def test_help_names_what_exists_and_nothing_else() -> None:
    listed = run("--help").stdout
    for command in ("index", "profile", "verify", "synth", "demo", "bench"):
        assert f"  {command}" in listed
    for command in ("pack", "simulate"):
        assert command not in listed


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom orchdata.cli import main\nsys.argv = ['orchdata', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'numba', 'pyarrow', 'plotly'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_output_says_that_tokens_are_bytes_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write_texts(tmp_path / "a.tar", 3)
    (tmp_path / "words_recipe.py").write_text(
        "import orchdata as od\n"
        "def count(text): return [len(word) for word in text.split()]\n"
        "words = od.Recipe(text=od.TextPreprocessor(count, id='1'))\n"
    )
    monkeypatch.chdir(tmp_path)
    for command in ("index", "profile"):
        assert "LLM tokens of text are UTF-8 bytes" in run(command, shard).stdout
        assert "bytes: the recipe" not in run(command, shard, "--recipe", "words_recipe:words").stdout


def test_index_lists_bad_samples_and_compares_them_with_a_budget(mixed: Path) -> None:
    report = run_json("index", mixed, "--max-failures", "50%")
    assert (report["samples"], report["bad"]) == (2, 1)
    failure = report["failures"][0]
    assert (failure["shard"], failure["key"], failure["field"]) == (str(mixed), "bad", "jpg")
    assert sum(report["bad_by_reason"].values()) == 1

    result = run("index", mixed)
    assert result.exit_code == 3
    assert "1 bad samples" in result.stderr
    assert "bad jpg" in result.stderr
    assert "1 of 3 samples cannot be used, and --max-failures allows 0 (1 %)" in result.stderr.splitlines()[-1]
    assert "--max-failures 34%" in result.stderr
    for given, code in {"34%": 0, "1": 0, "33.3%": 3, "0": 3}.items():
        assert run("index", mixed, "--max-failures", given).exit_code == code
    for wrong in ("x", "1.5", "101%", "-1", "nan%", "%"):
        assert run("index", mixed, f"--max-failures={wrong}").exit_code == 2


def test_index_fails_when_no_sample_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text('{"text": 5}\n' * 3)
    result = run("index", path, "--max-failures", "100%")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "orchdata: no sample can be used")


def test_profile_takes_what_training_takes(mixed: Path) -> None:
    arguments = ("--ranks", "2", "--batch-size", "1", "--max-tokens", "2", "--max-tokens", "image=4096")
    options = ("--oversize", "own", "--objective", "sum", "--multiple-of", "2")
    profiled = run_json("profile", mixed, *arguments, *options)
    assert profiled["caps"]["max_tokens"] == {"llm": 2, "image": 4096}
    assert (profiled["caps"]["oversize"], profiled["objective"]) == ("own", "sum")
    assert profiled["caps"]["above"]["image"] == 0 < profiled["caps"]["samples"]
    out = run("profile", mixed, *arguments, *options, "--padded").stdout
    for words in ("micro-steps", "samples above it get a microbatch each", "padded"):
        assert words in out
    shared = ("--encode", "step", "--model-parallel", "2", "--encoder-peers")
    assert "shared by peers" in run("profile", mixed, *arguments, *options, *shared).stdout


def test_profile_of_chosen_samples_is_that_of_them_alone(tmp_path: Path) -> None:
    path, size = write_texts(tmp_path / "all.tar", 40), len(b"a text that carries loss")
    arguments = ("profile", path, "--ranks", "2", "--batch-size", "2")
    assert run_json(*arguments)["unchosen"] == 0
    chosen = run_json(*arguments, "--filter", "key < '0015' and tokens > 3")
    assert (chosen["samples"], chosen["unchosen"], chosen["bad"]) == (15, 25, 0)
    assert (
        chosen["bytes"] == chosen["modalities"]["text"]["tokens"] == chosen["phases"]["llm"]["positions"] == 15 * size
    )
    assert chosen["modalities"]["text"]["samples"] == 15
    assert "25 samples that are not chosen" in run(*arguments, "--filter", "key < '0015'").stdout


def test_recipe_and_cost_are_found_in_the_working_directory(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_training.py").write_text(
        "import orchdata as od\nrecipe = od.Recipe(image=None)\n"
        "cost = od.CostModel(llm=od.PhaseCost(linear=2.0, quadratic=0.5))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ("--recipe", "my_training:recipe", "--cost", "my_training:cost", "--ranks", "1", "--batch-size", "1")
    profiled = run_json("profile", mixed, *arguments)
    assert profiled["has_cost_model"]
    assert profiled["bad"] == 0  # without images the image that is none is not asked for


def test_what_user_code_prints_does_not_end_up_in_the_json(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noisy.py").write_text(
        "import orchdata as od\nprint('imported')\n"
        "def tokenize(text):\n    print('called')\n    return list(text.encode())\n"
        "recipe = od.Recipe(text=od.TextPreprocessor(tokenize, id='noisy'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert run_json("index", mixed, "--recipe", "noisy:recipe", "--max-failures", "1")["samples"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("index", "absent.tar"), "absent.tar"),
        (("index", "notes.docx"), "docx"),
        (("index", "mixed.tar", "--recipe", "no_such_module:recipe"), "no_such_module"),
        (("index", "mixed.tar", "--recipe", "recipe"), "MODULE:NAME"),
        (("index", "mixed.tar", "--recipe", "json:dumps"), "must be an od.Recipe"),
        (("profile", "mixed.tar", "--cost", "json:nothing"), "json:nothing"),
        (("profile", "mixed.tar", "--ranks", "0"), "at least 1, got 0"),
        (("profile", "mixed.tar", "--max-tokens", "image="), "PHASE=NUMBER such as image=32768, got 'image='"),
        (("profile", "mixed.tar", "--max-tokens", "2", "--max-tokens", "llm=9"), "caps llm twice"),
        (("profile", "mixed.tar", "--objective", "wait"), "must be one of barrier, sum, got 'wait'"),
        (("profile", "mixed.tar", "--filter", "tokens <"), "filter 'tokens <': not an expression"),
        (("profile", "mixed.tar", "--filter", "length < 9"), "the columns are tokens, loss_tokens, text_tokens"),
        (("profile", "mixed.tar", "--filter", "tokens > 99999"), "are left out by filter and split"),
        (("profile", "mixed.tar", "--max-tokens", "1"), "use Balance(oversize='own') or 'drop'"),
        (("profile", "mixed.tar", "--model-parallel", "2"), "go together, got --model-parallel 2"),
        (("profile", "mixed.tar", "--batch-size", "0"), "batch_size must be at least 1, got 0"),
        (("synth", "omnibus", "out"), "no description of that name: demo, omni"),
        (("demo", "--steps", "0"), "steps must be at least 1, got 0"),
    ],
)
def test_an_error_is_one_line_that_names_the_value(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(mixed.parent)
    (mixed.parent / "notes.docx").write_bytes(b"")
    assert words in error_line(*arguments)


def test_demo_options_default_to_its_configuration() -> None:
    from inspect import signature

    from orchdata.cli.machine import demo
    from orchdata.demo import DemoConfig

    options = signature(demo).parameters
    defaults = {field.name: field.default for field in fields(DemoConfig) if field.name in options}
    assert {name: options[name].default for name in defaults} == defaults


def test_profile_of_microbatches_of_one_length_says_how_full_they_are(mixed: Path) -> None:
    arguments = ("profile", mixed, "--ranks", "2", "--batch-size", "2", "--length", "2000")
    (layout,) = [each for each in run_json(*arguments)["layouts"] if each["length"] is not None]
    assert layout["length"] == 2000 and 0 < layout["padding"] < 1
    assert ["one", "length,", "2,000", "tokens", f"{layout['padding']:.1%}"] in [
        line.split()[:5] for line in run(*arguments).stdout.splitlines()
    ]


def test_index_with_a_limit_indexes_the_first_shards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    shards = [write_texts(tmp_path / f"{number}.tar", 50) for number in range(4)]
    report = run_json("index", *shards, "--limit", "70")
    assert [report[name] for name in ("shards", "of_shards", "scanned", "samples")] == [2, 4, 2, 70]
    assert "70 samples in 2 shards (the first of 4)" in run("index", *shards, "--limit", "70").stdout
    full = run_json("index", *shards)
    report = run_json("index", *shards, "--limit", "70")
    assert report["totals"] == full["totals"] and report["shards"] == report["of_shards"] == 4


def test_index_with_a_limit_ends_as_index_does(tmp_path: Path) -> None:
    broken = tmp_path / "broken.tar"
    broken.write_bytes(b"this is not a tar, in spite of its name" * 100)
    result = run("index", broken, "--limit", "20")
    assert result.exit_code == 1 and f"shard failed: {broken}" in result.stderr
    shard = write_texts(tmp_path / "a.tar", 50)
    assert run("index", broken, shard, "--limit", "20").exit_code == 3
    assert run("index", broken, shard, "--limit", "20", "--max-failures", "50%").exit_code == 0
    assert run("index", shard, broken, "--limit", "20").exit_code == 0  # it is not reached
    for wrong in ("0", "-5"):
        assert "at least 1" in run("index", shard, f"--limit={wrong}").stderr
    words = "leave --jobs, --out, --share, --index-field, --again out"
    for more in (["--again"], ["--jobs", "2"]):
        assert words in run("index", shard, "--limit", "5", *more).stderr


# `orchdata doctor`: what it says is so, and what is broken makes it fail.


def findings() -> tuple[int, dict[str, dict[str, str]]]:
    result = run("doctor", "--json")
    return result.exit_code, {each["name"]: each for each in json.loads(result.stdout)["findings"]}


def test_a_machine_that_works(private_cache: Path) -> None:
    code, by_name = findings()
    assert code == 0
    assert by_name["numpy"]["found"] == version("numpy")
    assert by_name["cache folder"]["found"].startswith(f"{private_cache}: ")
    assert not [each for each in by_name.values() if each["verdict"] == "broken"]
    printed = run("doctor").stdout
    assert printed.splitlines()[-1] == "all that loading needs is here"
    assert "\x1b" not in printed


@pytest.mark.usefixtures("no_pauses")
def test_a_cache_folder_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "file"))
    code, by_name = findings()
    assert (code, by_name["cache folder"]["verdict"]) == (1, "broken")
    assert run("doctor").stdout.splitlines()[-1] == "1 broken"


@pytest.mark.slow_cases("pyarrow", "soundfile", "torchaudio")
@pytest.mark.parametrize(
    ("package", "error", "verdict", "hint"),
    [
        ("transformers", PackageNotFoundError("transformers"), "missing", "pip install"),
        ("av", OSError("libavcodec.so.62: no such file"), "missing", "pip install --force-reinstall --no-deps 'av"),
        ("torchaudio", RuntimeError("made for\nanother torch"), "missing", "pip install --force-reinstall"),
        ("soundfile", OSError("libsndfile.so.1"), "broken", "pip install --force-reinstall --no-deps 'soundfile"),
        ("pyarrow", ModuleNotFoundError("no C", name="planted_c"), "broken", "pip install 'planted_c'"),
    ],
)
def test_only_a_package_that_loading_needs_is_broken(
    monkeypatch: pytest.MonkeyPatch, package: str, error: Exception, verdict: str, hint: str
) -> None:
    imported = machine.importlib.import_module

    def failing(name: str, *given: Any, **options: Any) -> Any:
        if name == package:
            raise error
        return imported(name, *given, **options)

    monkeypatch.setattr(machine.importlib, "import_module", failing)
    code, by_name = findings()
    assert (code, by_name[package]["verdict"]) == (int(verdict == "broken"), verdict)
    assert " ".join(str(error).split()) in by_name[package]["found"]
    assert by_name[package]["hint"].startswith(hint)


# What long work shows on stderr: a bar in a notebook; elsewhere lines, after two seconds and every half minute.


def test_without_a_terminal_a_line_is_written_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress_bar("indexing") as advance:
        for now[0] in (101.0, 110.0, 131.0, 140.0, 162.0):
            advance(now[0] / 100, 4)
    assert capsys.readouterr().err.splitlines() == ["indexing: 1.1 of 4 (28%)", "indexing: 1.4 of 4 (35%)"]


# The command line over object storage: options that reach the store, and are shown nowhere.


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


def test_unchanged_shards_cost_their_listing(gcs_server: GcsServer, tmp_path: Path) -> None:
    gcs_server.page_size = 10
    gcs_server.make_bucket("bucket")
    for number in range(45):
        shard = write_shard(tmp_path / "a.tar", [{"__key__": "sample", "txt": f"text {number}".encode()}])
        gcs_server.put("bucket", f"data/{number:06d}.tar", Path(shard).read_bytes())
    options = [f"--storage-options={name}={value}" for name, value in gcs_server.options.items()]
    arguments = ["index", "gs://bucket/data/*.tar", "--out", "gs://bucket/train.index", *options, "--json"]
    assert json.loads(CliRunner().invoke(app, arguments).stdout)["scanned"] == 45
    gcs_server.clear()
    report = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert (report["out"], report["scanned"]) == ("gs://bucket/train.index", 0)
    listings = [each.query["prefix"].split("/")[0] for each in gcs_server.requests() if "list-type" in each.query]
    assert listings == ["data"] * 5  # 45 shards in pages of 10
    assert len(gcs_server.requests()) == len(listings) + 1  # the index is written
