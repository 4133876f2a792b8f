"""Samples as bytes: supported values come back, others raise an error, and no message is trusted."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

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
