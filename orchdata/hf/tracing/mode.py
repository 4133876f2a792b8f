"""A model runs without its numbers: shapes and small values are real, large tensors one number, products are counted.

A large tensor of floats is one number seen as a tensor (all strides 0), so that a model of any size takes no memory and
hardly any time. Integers, masks and small tensors are computed as ever: code that branches on them (grids of images,
lengths of clips, windows) runs unchanged. What a model multiplies follows from these and from shapes, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# Operations on tensors of fewer numbers are computed without asking for the size of what they make.
SMALL: Final = 1 << 12
# Floats that an operation makes are one number above this.
LARGE: Final = 1 << 18
# Tensors that are put side by side stay real up to this: scores of attention with a column more, which have a mask.
JOINED: Final = 1 << 26
RANDOM: Final = frozenset(
    f"{name}_" for name in ("uniform", "normal", "random", "exponential", "bernoulli", "log_normal", "cauchy")
)
MADE: Final = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided rand randn rand_like randn_like bernoulli "
    "normal".split()
)
# Scores below it are masked.
MASKED: Final = -1e4
SOFTMAX: Final = (aten._softmax.default, aten._safe_softmax.default)
# Where the first factor stands.
FIRST_FACTOR: Final = {aten.addmm.default: 1, aten.baddbmm.default: 1}


@dataclass(slots=True)
class Product:
    """A matrix product or a convolution; or a softmax, which says what attends.

    Attributes:
        module: name of the module that computes it.
        flops: operations, a multiply and an add as two; 0 of a softmax.
        weight: name of the parameter that it multiplies with; "" where both factors are activations.
        shape: of the result.
        factor: shape of the first factor.
        pairs: of a softmax, and of products of attention: (pairs that attend, all pairs).
    """

    module: str
    flops: int
    weight: str
    shape: tuple[int, ...]
    factor: tuple[int, ...]
    pairs: tuple[int, int] | None = None


class Tracer(TorchDispatchMode):
    """Counts products while it is entered.

    Attributes:
        products: in the order in which they are computed.
        module: name of the module that runs.
        weights: address of a parameter -> its name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []
        self.module = ""
        self.weights: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in RANDOM:
            return args[0]
        if name in MADE:
            return _made(func, args, kwargs)
        if func._overloadpacket in flop_registry:
            return self._multiplied(func, args, kwargs)
        if func.is_view or func is aten._unsafe_view.default:
            return _seen(func, args, kwargs)
        if func in SOFTMAX:
            self._attends(args[0])
        if func._schema.is_mutable:
            return _changed(func, args, kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not tensors:
            return _made(func, args, kwargs) if name in ("zeros", "ones", "full") else func(*args, **kwargs)
        if max(each.numel() for each in tensors) <= SMALL:
            return func(*args, **kwargs)
        return _computed(func, args, kwargs, tensors)

    def _multiplied(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*tree_map(_without_values, args), **tree_map(_without_values, kwargs))
        main = result if isinstance(result, Tensor) else result[0]
        flops = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        addresses = (each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor) and each.dim() > 1)
        weight = next((self.weights[each] for each in addresses if each in self.weights), "")
        factor = args[FIRST_FACTOR.get(func, 0)]
        self.products.append(Product(self.module, flops, weight, tuple(main.shape), tuple(factor.shape)))
        return tree_map(_as_one_number, result)

    def _attends(self, scores: Tensor) -> None:
        """Take note of the pairs that a softmax is over."""
        if scores.dim() < 2:
            return
        distinct = _distinct(scores)
        seen = int((distinct > MASKED).sum()) * (scores.numel() // max(1, distinct.numel()))
        shape = tuple(scores.shape)
        self.products.append(Product(self.module, 0, "", shape, shape, (seen, scores.numel())))


def one_number(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zero, seen as a tensor."""
    return torch.zeros((), dtype=dtype).expand(tuple(shape))


def _is_one_number(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() < 2:
        return False
    return not any(stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)


def _distinct(value: Any) -> Any:
    """A tensor without its repetitions, of which only one is kept along each axis."""
    if not isinstance(value, Tensor) or not value.numel():
        return value
    sizes = zip(value.stride(), value.shape, strict=True)
    return value[tuple(slice(None) if stride or size == 1 else slice(1) for stride, size in sizes)]


def _made(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A tensor without values of its own, or of one value: large ones take no memory, and none is random."""
    if all(each.name != "device" for each in func._schema.arguments):
        return torch.zeros_like(next(each for each in args if isinstance(each, Tensor)))
    shaped = func(*tree_map(_without_values, args), **(tree_map(_without_values, kwargs) | {"device": "meta"}))
    if not shaped.is_floating_point() or shaped.numel() <= LARGE:
        if func._schema.name.removeprefix("aten::") in MADE:
            return torch.zeros(shaped.shape, dtype=shaped.dtype)
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    return one_number(shaped.shape, shaped.dtype)


def _changed(func: Any, args: Any, kwargs: Any) -> Any:
    """A change in place. Of numbers that repeat, what an operation on each number makes of them takes their place."""
    target = args[0] if args else None
    if not isinstance(target, Tensor) or not _repeats(target):
        return func(*args, **kwargs)
    name = func._schema.name.removeprefix("aten::")
    other = getattr(getattr(aten, name.rstrip("_"), None), func._overloadname, None)
    if name == "copy_":
        target.set_(args[1].to(target.dtype).expand(target.shape))
    elif other is not None and torch.Tag.pointwise in other.tags:
        changed: Any = _each_number(other, args, kwargs).to(target.dtype).expand(target.shape)
        target.set_(changed)
    elif target.numel() <= LARGE:
        whole: Any = target.contiguous()
        target.set_(whole)
        func(*args, **kwargs)
    return target


def _repeats(value: Tensor) -> bool:
    return any(not stride and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


def _seen(func: Any, args: Any, kwargs: Any) -> Any:
    """A view; where repeated numbers have no strides for it, of a copy, or of one number if that would be too large."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        whole = args[0]
        if not isinstance(whole, Tensor) or whole.is_contiguous():
            raise
        whole = whole.contiguous() if whole.numel() <= JOINED else one_number(whole.shape, whole.dtype)
        return func(whole, *args[1:], **kwargs)


def _computed(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """Run an operation on tensors, some of which are large."""
    if torch.Tag.pointwise in func.tags or func in (aten._to_copy.default, aten.masked_fill.Tensor):
        return _each_number(func, args, kwargs)
    try:
        result = func(*tree_map(_without_values, args), **tree_map(_without_values, kwargs))
    except Exception:  # noqa: BLE001 - its shape follows from values, which are those of masks and integers
        return func(*args, **kwargs)
    floats = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_floating_point()]
    largest = max((each.numel() for each in floats), default=0)
    if func is aten.cat.default and largest <= JOINED and not all(map(_is_one_number, tensors)):
        return func(*args, **kwargs)
    if largest > LARGE or (floats and any(_is_one_number(each) and each.numel() > LARGE for each in tensors)):
        return tree_map(_as_one_number, result)
    return func(*args, **kwargs)


def _each_number(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on each number: done once for all that repeat."""
    leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    shape = torch.broadcast_shapes(*(each.shape for each in leaves))
    dims = len(shape)

    def aligned(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        result = _distinct(value)
        return result.reshape((1,) * (dims - result.dim()) + tuple(result.shape)) if result.dim() else result

    result = func(*tree_map(aligned, args), **tree_map(aligned, kwargs))
    return tree_map(lambda each: _one_if_alike(each).expand(shape) if isinstance(each, Tensor) else each, result)


def _one_if_alike(value: Tensor) -> Tensor:
    """Return the first number of a tensor if all are equal."""
    if not value.is_floating_point() or value.numel() < 2:
        return value
    first = value[(slice(1),) * value.dim()]
    return first if bool((value == first).all()) else value


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return "meta" if isinstance(value, torch.device) else value


def _as_one_number(value: Any) -> Any:
    """Return one number for floats; integers (indices of a sort) are 0, which is a valid index."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point() and value.numel() > SMALL:
        return one_number(value.shape, value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype)
