"""Samples as bytes: supported values come back, others raise an error, and no message is trusted."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_file_job import __file__ as JOB
from numpy.typing import NDArray
from rank_jobs import run_ranks
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.loaders.index import build
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.facts import load_facts
from orchdata.ranks.wire import ALIGNMENT, WireError, describe, read

TORCH_DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint32, torch.float16, torch.bfloat16]
TORCH_DTYPES += [torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn]

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)) | st.binary()
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


def written(sample: Any) -> NDArray[np.uint8]:
    message = describe(sample)
    assert message.num_bytes % ALIGNMENT == 0
    out = torch.full((message.num_bytes,), 255, dtype=torch.uint8).numpy()
    message.write_to(out)
    return out


def same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return first == second or (math.isnan(first) and math.isnan(second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.mark.slow
@given(trees)
@settings(max_examples=200, deadline=None)
def test_nested_values_come_back_unchanged(sample: Any) -> None:
    assert same(read(written(sample)), sample)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.arange(1, 1 + math.prod(shape)).reshape(shape).to(dtype)
    (back,) = read(written([sent]))
    assert (back.dtype, back.shape) == (sent.dtype, sent.shape)
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (back, sent)]
    assert torch.equal(*bits)


@pytest.mark.parametrize("dtype", ["?", "u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "<c16"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_an_array_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    sent = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    back = read(written({"array": sent}))["array"]
    assert (back.dtype.str, back.shape) == (sent.dtype.str, sent.shape)
    assert back.tobytes() == sent.tobytes()


def test_any_strides_and_orders_are_sent_by_value() -> None:
    tensor = torch.arange(12).reshape(3, 4)
    array = np.arange(12).reshape(3, 4)
    strided = torch.tensor([1 + 2j]).conj()
    sent = [tensor.T, tensor[:, ::2], torch.ones(1).expand(3), strided, np.asfortranarray(array), array[::-1, ::2]]
    for back, wanted in zip(read(written(sent)), sent, strict=True):
        assert type(back) is type(wanted)
        assert back.tolist() == wanted.tolist()


def test_arrays_that_arrive_are_writable_and_share_no_storage() -> None:
    first, second = read(written([torch.zeros(3), np.zeros(3)]))
    first[0] = second[0] = 7
    assert first.tolist() == second.tolist() == [7, 0, 0]
    assert first.untyped_storage().nbytes() == 12  # torch.save writes no more than that


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"meta": [{1, 2}]}, r"sample\['meta'\]\[0\] is a builtins.set"),
        ([np.array([None])], r"sample\[0\] is a numpy array of dtype object"),
        ({"a": {(1, 2): 3}}, r"sample\['a'\] has the key \(1, 2\) of type tuple"),
        ([torch.ones(2, requires_grad=True)], r"sample\[0\] requires grad"),
        ([torch.eye(2).to_sparse()], r"sample\[0\] is a tensor of torch.float32, layout torch.sparse_coo"),
        (torch.nn.Parameter(torch.ones(2)), r"sample is a torch.nn.parameter.Parameter"),
    ],
)
def test_any_other_value_raises_an_error_with_its_path(sample: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        describe(sample)


def test_a_message_cut_anywhere_raises_an_error() -> None:
    message = written({"text": "abc", "array": np.arange(40), "tensor": torch.ones(9)})
    for length in range(len(message)):
        with pytest.raises(WireError):
            read(message[:length])


@pytest.mark.parametrize(
    "header",
    [
        '["pickle",1]',
        '["bytes",-5]',
        '["bytes",999999]',
        '["bytes","5"]',
        '["array","|O",[1]]',
        '["array","i4,f4",[1]]',
        '["array","(1,2)i4",[1]]',
        '["array","f8,(",[1]]',
        '["array","<02",[1]]',
        '["array","a10",[1]]',
        '["array",["<i8"],[1]]',
        '["array","<i8",[1.0]]',
        '["array","<i8",5]',
        '["array","<i8",[0,4611686018427387904]]',
        '["tensor","int64",[0,9223372036854775808]]',
        '["array","<i8",[-1]]',
        '["array","<i8",[4611686018427387904,4]]',
        '["tensor","Tensor",[1]]',
        '["tensor","float32",[-1,-1]]',
        '["dict","a"]',
        '["dict",["list"],1]',
        '{"a":1}',
        "[]",
        "[[]]",
        "not json",
        '["int","zz"]',
    ],
)
def test_a_forged_header_raises_an_error(header: str) -> None:
    forged = np.zeros(128, np.uint8)
    forged[:16] = written(None)[:16]
    forged[8] = len(header)
    forged[16 : 16 + len(header)] = np.frombuffer(header.encode(), np.uint8)
    with pytest.raises(WireError):
        read(forged)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_message_is_read_or_raises_wire_error(data: st.DataObject) -> None:
    message = written({"text": "abc", "array": np.arange(4), "items": [1, (2.5, None)]}).copy()
    for _ in range(3):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        read(message)


# Ranks without an index build it together; another process does the work of one that is lost.


FORK = multiprocessing.get_context("fork")
SHARDS = 9


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return omni_shards(tmp_path, shards=SHARDS, samples=3)


def test_ranks_measure_each_shard_once_and_see_the_same(shards: list[str], tmp_path: Path) -> None:
    given = {"paths": shards, "ranks_per_node": 3, "folder": str(tmp_path)}
    ranks = run_ranks(JOB, json.dumps(given), num_ranks=3, folder=tmp_path)
    measured = [name for rank in ranks for name in rank["measured"]]
    assert sorted(measured) == sorted(Path(shard).name for shard in shards)
    keys = [key for rank in ranks for key in rank["keys"]]
    assert len(keys) == len(set(keys)) == 3 * SHARDS


def test_ranks_that_may_not_build_raise_an_error(shards: list[str]) -> None:
    with pytest.raises(od.MissingIndexError, match="index='build'"):
        od.DataLoader(od.ShardDataset(shards, RECIPE), dp=(0, 2))
    with pytest.raises(ValueError, match="'build', 'require'"):
        od.DataLoader(od.ShardDataset(shards, RECIPE), index="never")  # type: ignore[arg-type]


@contextmanager
def at_a_shard(shards: list[str]) -> Iterator[int]:
    """A process that measures the first shard, and never ends."""
    at_it = FORK.Event()

    def stuck(url: str, *arguments: object, **options: object) -> object:
        if url == shards[0]:
            at_it.set()
            signal.pause()
        return load_facts(url, *arguments, **options)  # type: ignore[arg-type]

    def child() -> None:
        build.load_facts = stuck
        build_index(shards, RECIPE, num_threads=1)

    process = FORK.Process(target=child, daemon=True)
    process.start()
    assert at_it.wait(60)
    try:
        yield process.pid or 0
    finally:
        process.kill()
        process.join()


def test_another_process_measures_the_shard_of_a_lost_one(shards: list[str]) -> None:
    done: list[str] = []
    rest = threading.Event()

    def progress(built: build.BuildProgress) -> None:
        done.append(built.url)
        if len(done) == SHARDS - 1:
            rest.set()

    with at_a_shard(shards) as pid:
        ours = threading.Thread(target=build_index, args=(shards, RECIPE), kwargs={"progress": progress})
        ours.start()
        assert rest.wait(60)
        assert shards[0] not in done, "another process measures it"
        os.kill(pid, signal.SIGKILL)
        ours.join(60)
        assert not ours.is_alive()
    assert sorted(done) == sorted(shards)
    assert len(build_index(shards, RECIPE)) == 3 * SHARDS
