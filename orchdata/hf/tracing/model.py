"""A model built from its config without memory, and run on shapes alone.

    config --built--> TracedModel --run(model -> ...)--> products

Layers that are alike are run once: what follows from shapes is the same in each.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from orchdata.hf.tracing.mode import Product, Tracer

# Attributes by which layers count themselves.
_NUMBERS = frozenset(("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index", "training"))
_PLAIN = (bool, int, float, str, type(None))
_Call = tuple[list[Product], Any, str, Any]


class TracedModel:
    """A model whose large tensors have no memory.

    Attributes:
        model: of transformers, in evaluation mode.
        lists: names of its lists of layers.
    """

    def __init__(self, config: Any, kind: type[Any]) -> None:
        self._tracer = Tracer()
        config = prepared(config)
        with self._entered():
            self.model: nn.Module = kind._from_config(config, dtype=torch.float32).eval()
        self._tracer.weights = {each.untyped_storage().data_ptr(): name for name, each in self.model.named_parameters()}
        self._known: dict[Any, _Call] = {}
        self._reuses = True
        self.lists = [name for name, each in self.model.named_modules() if isinstance(each, nn.ModuleList)]
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(_entering(self._tracer, name, module))
            module.register_forward_hook(_leaving(self._tracer, name), always_call=True)
        for name in self.lists:
            self._share(name, config)

    def run(self, call: Callable[[Any], Any]) -> list[Product]:
        """Return the products of `call(model)`. Raises what the model raises."""
        try:
            return self._run(call, reuses=True)
        except Exception:  # noqa: BLE001 - of layers that leave something for those after them
            return self._run(call, reuses=False)

    def _run(self, call: Callable[[Any], Any], *, reuses: bool) -> list[Product]:
        self._known.clear()
        self._reuses = reuses
        self._tracer.products, self._tracer.module = [], ""
        with self._entered():
            call(self.model)
        self._known.clear()
        return self._tracer.products

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with torch.device("cpu"), torch.no_grad(), _reference_kernels(), sdpa_kernel(SDPBackend.MATH):
            state = torch.get_rng_state()
            try:
                with self._tracer:
                    yield
            finally:
                torch.set_rng_state(state)

    def _share(self, name: str, config: Any) -> None:
        """Have each layer of a list take what a layer like it did."""
        layers: Any = self.model.get_submodule(name)
        listed = _listed(config, len(layers))
        for number, layer in enumerate(layers):
            kind = (name, _signature(layer), tuple(str(values[number]) for values in listed))
            layer.forward = self._shared(layer.forward, f"{name}.{number}", kind)

    def _shared(self, forward: Callable[..., Any], name: str, kind: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            key = (kind, _shapes(args), _shapes(tuple(sorted(kwargs.items()))))
            products = self._tracer.products
            if self._reuses and key in self._known:
                before, output, first, _ = self._known[key]
                products += [_renamed(each, first, name) for each in before]
                return output
            start = len(products)
            output = forward(*args, **kwargs)
            # Kept with its arguments, so that no other tensor takes the place of one of them.
            self._known[key] = (products[start:], output, name, (args, kwargs))
            return output

        return call


def prepared(config: Any) -> Any:
    """A copy of a config under which a model computes every product by itself: eager attention, experts one by one."""
    config = copy.deepcopy(config)
    for each in configs_of(config):
        each._attn_implementation = "eager"
        with contextlib.suppress(Exception):
            each._experts_implementation = "eager"
        for name in ("use_cache", "output_router_logits", "reference_compile"):
            if getattr(each, name, None):
                setattr(each, name, False)
        if getattr(each, "quantization_config", None) is not None:
            del each.quantization_config
    return config


def configs_of(config: Any) -> list[Any]:
    """A config and those inside of it."""
    configs = [config]
    for name in getattr(config, "sub_configs", ()):
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            configs += configs_of(inner)
    return configs


def _entering(tracer: Tracer, name: str, module: nn.Module) -> Callable[..., None]:
    weights = list(module.parameters(recurse=False))
    # What a norm trains needs gradients of what comes after it: it stands among the products, as one of no operations.
    is_norm = bool(weights) and all(each.dim() < 2 for each in weights)

    def hook(_: Any, __: Any) -> None:
        tracer.module = name
        if is_norm:
            tracer.products.append(Product(name, 0, f"{name}.weight", (), ()))

    return hook


def _leaving(tracer: Tracer, name: str) -> Callable[..., None]:
    def hook(_: Any, __: Any, ___: Any) -> None:
        tracer.module = name.rpartition(".")[0]

    return hook


def _renamed(product: Product, first: str, name: str) -> Product:
    """The product of a layer, as that of one like it."""
    weight = product.weight.replace(f"{first}.", f"{name}.", 1)
    return replace(product, module=product.module.replace(first, name, 1), weight=weight)


def _listed(config: Any, count: int) -> list[Any]:
    """Return what configs say of each layer."""
    return [
        value
        for each in configs_of(config)
        for value in vars(each).values()
        if isinstance(value, list | tuple) and len(value) == count and len(set(map(str, value))) < count
    ]


def _signature(layer: nn.Module) -> Any:
    """Return a key that differs for layers that compute something else."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(
                sorted(
                    (key, str(value))
                    for key, value in vars(module).items()
                    if key not in _NUMBERS and not key.startswith("_") and isinstance(value, _PLAIN)
                )
            ),
            tuple((key, tuple(each.shape)) for key, each in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def _shapes(values: Any) -> Any:
    """Return what products depend on: the shapes of float arguments, and the values of masks and integers."""
    return tuple(_shape(each) for each in tree_leaves(values, is_leaf=lambda each: each is None))


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_mask = value.dim() == 4 or not (value.is_floating_point() or value.is_complex())
        return tuple(value.shape), value.dtype, id(value) if is_mask else None
    return value if isinstance(value, _PLAIN) else type(value)


@contextlib.contextmanager
def _reference_kernels() -> Iterator[None]:
    """Have layers computed by transformers' own code, also where packages with kernels for GPUs are installed."""
    try:
        from transformers.integrations import hub_kernels
    except ImportError:
        yield
        return
    name = "is_torchdynamo_exporting"
    before = getattr(hub_kernels, name, None)
    if before is None:
        yield
        return
    setattr(hub_kernels, name, lambda: True)
    try:
        yield
    finally:
        setattr(hub_kernels, name, before)
