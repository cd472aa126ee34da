"""Graphs of decode steps, compiled or captured, and the static caches that they write to.

    compiled    torch.compile, on CUDA with CUDA graphs: the fastest step, half a minute to make
    captured    the eager step as a CUDA graph (torch.cuda.CUDAGraph): the same kernels, launched
                at once; made in a step

A captured graph has the addresses of weights, buffers and cache, and keeps numbers as constants.
So it is found by all of these (key()). Tensors that change, as the tokens and the random numbers,
are copied into buffers of the graph before each replay. These, its results, weights and caches lie
outside the pool of memory that all graphs share; the pool frees nothing until its last graph goes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache as memoize
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from inference.cache import StaticCache, StaticStep
from model import GPT

log = logging.getLogger("nanoattn")

F = TypeVar("F", bound=Callable[..., Any])
CacheKey = tuple[int, int, torch.dtype, torch.device, str | None]
MOST = 8  # captured graphs of a model
MOST_IDLE = 2  # static caches of a model for captured graphs, not in use

# A compiled CUDA graph is never freed: a new cache for each call would mean a new graph.
_idle: WeakKeyDictionary[GPT, dict[CacheKey, StaticCache]] = WeakKeyDictionary()
_captured: WeakKeyDictionary[GPT, OrderedDict[Hashable, Graph]] = WeakKeyDictionary()


# --- static caches ---


def static_cache(model: GPT, B: int, max_len: int, graph: str | None) -> StaticCache:
    """An empty static cache; for graphs of an earlier call, if there is one."""
    config, phase = model.config, model.phase()._replace(cache="static")
    device, dtype = model.transformer.wte.weight.device, getattr(torch, phase.dtype)
    key = B, max_len, dtype, device, graph
    static = _idle.setdefault(model, {}).pop(key, None) if graph else None
    if static is not None:
        static.reset()
        return static
    with torch.inference_mode(False):  # tensors of inference mode cannot be written to outside it
        static = StaticCache(
            config.n_layer, B, max_len, config.kv_heads, config.head_dim, windows=config.windows,
            in_order=config.position == "alibi", dtype=dtype, device=device,
        )  # fmt: skip
    static.key = key
    if graph == "compiled":
        plan = model.plan(B, cache="static", compiled=True)
        for t in (*static.k, *static.v, static.start, static.count):
            torch._dynamo.mark_static_address(t, guard=False)  # a CUDA graph writes there
    else:
        plan = model.plans.look_up(phase, B)
    reads_bounds = device.type == "cuda" and {call.chosen.backend.name for call in plan} == {
        "paged"
    }
    static.in_buckets = not reads_bounds
    return static


def give_back(model: GPT, static: StaticCache) -> None:
    idle = _idle.setdefault(model, {})
    idle[cast(CacheKey, static.key)] = static
    for key in [key for key in idle if key[-1] == "captured"][:-MOST_IDLE]:
        del idle[key]


# --- compiled ---


@memoize
def compiled(function: F, device: str) -> F:
    """torch.compile for fixed shapes; results are copied out of the graph's memory."""
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    mode = "reduce-overhead" if device == "cuda" else None  # CUDA graphs
    graph = torch.compile(function, fullgraph=True, dynamic=False, mode=mode)

    def run(*args: object) -> object:
        if device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        copied: object = tree_map_only(Tensor, Tensor.clone, graph(*args))
        return copied

    return cast(F, run)


# --- captured ---


def captured(model: GPT, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """function(*args), a decode step or a part of it, by a graph: the first call of its kind runs
    without one, the second is captured. Tensors of the result are those of the graph."""
    graphs: OrderedDict[Hashable, Graph] = _captured.setdefault(model, OrderedDict())
    kind = key(function, args)
    if kind not in graphs:
        graphs[kind] = Graph(args)
        while len(graphs) > MOST:
            graphs.popitem(last=False)
    graphs.move_to_end(kind)
    return graphs[kind](function, args)


def forget(model: GPT, processor: object) -> None:
    """Drop the graphs with this logits processor, which may have other numbers now."""
    graphs = _captured.get(model, {})
    for kind in [kind for kind, graph in graphs.items() if processor in graph.values]:
        del graphs[kind]


def key(function: Callable[..., Any], args: tuple[Any, ...]) -> Hashable:
    """All that a captured call depends on: shapes of tensors, addresses of modules and of the
    cache, kernels, and values of other arguments."""
    return function, *map(_of_leaf, tree_flatten(args)[0])


def _of_leaf(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device
    if isinstance(x, StaticStep):
        return x.length, *map(_place, (*x.cache.k, *x.cache.v, x.start, x.count))
    if not isinstance(x, nn.Module):
        return x
    at = [_place(t) for m in x.modules() for t in (*m._parameters.values(), *m._buffers.values())]
    if not isinstance(x, GPT):
        return id(x), *at
    phase = x.phase()._replace(cache="static")
    return id(x), phase, *(call[:2] for call in x.plans.look_up(phase, 1)), *at


def _place(t: Tensor | None) -> Hashable:
    return None if t is None else (t.data_ptr(), t.shape, t.dtype)


class Graph:
    """A captured call. It holds neither the model nor the cache."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        leaves = tree_flatten(args)[0]
        self.values = [x for x in leaves if not isinstance(x, Tensor | StaticStep | GPT)]
        self.inputs: list[Tensor] = []
        self.outputs: Any = None
        self.replay: Callable[[], None] | None = None
        self.fails = False

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        new = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
        if self.outputs is None:  # the warm-up compiles kernels and allocates workspaces
            with side_stream(new[0].device):
                found = function(*args)
            self.outputs = tree_map_only(Tensor, torch.empty_like, found)
            return found
        if self.replay is None and not self.fails:
            self.capture(function, args)
        if self.replay is None:
            return function(*args)
        torch._foreach_copy_(self.inputs, new)
        self.replay()
        return self.outputs

    def capture(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        leaves, tree = tree_flatten(args)
        self.inputs = [x.clone() for x in leaves if isinstance(x, Tensor)]
        buffers = iter(self.inputs)
        # A copy of the step: its tensors would be the graph's.
        fixed = [
            next(buffers)
            if isinstance(x, Tensor)
            else replace(x)
            if isinstance(x, StaticStep)
            else x
            for x in leaves
        ]

        def run() -> None:
            found = function(*tree_unflatten(fixed, tree))
            for buffer, t in zip(tree_flatten(self.outputs)[0], tree_flatten(found)[0]):
                if isinstance(t, Tensor):
                    buffer.copy_(t)

        try:
            self.replay = record(run, self.inputs[0].device)
        except Exception as e:
            self.fails = True
            _warn(_first(e))


def _first(e: BaseException) -> str:
    while e.__context__ is not None:  # the end of a failed capture raises another error
        e = e.__context__
    return f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"


@memoize
def _warn(reason: str) -> None:
    log.warning(f"a decode step cannot be a CUDA graph ({reason}); it runs without one: slower")


# --- the device's part ---


def possible(device: torch.device) -> bool:
    return device.type == "cuda"


def hooked(model: nn.Module) -> bool:
    """True if a module has hooks: Python, which a graph would leave out."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@memoize
def _side(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    """The stream of warm-ups and captures, and the pool of all graphs."""
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run on another stream than the current one, as a capture does."""
    if device.type != "cuda":
        yield
        return
    stream, current = _side(device)[0], torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def record(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture what run() launches; returns a function that launches it."""
    graph, (stream, pool) = torch.cuda.CUDAGraph(), _side(device)
    with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
        run()
    return graph.replay
