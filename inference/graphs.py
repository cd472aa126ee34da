"""Decode steps as CUDA graphs, and the static caches that they write to.

A graph holds numbers and the addresses of weights and cache: its key has them all. Other tensors
are copied into its buffers, outside the graphs' shared pool, which is freed with its last graph.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache as memoize
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from attention.plan import Plan
from core.cpu import int8
from inference.cache import Cache, StaticCache, Step
from inference.pages import PAGE_SIZE
from model import GPT

KV_CACHES = ("none", "dynamic", "static", "paged")
MOST = 8  # graphs of a model
MOST_IDLE = 2  # caches of a model

warn = memoize(logging.getLogger("nanoattn").warning)


def choose(model: GPT, kv_cache: str, compile: bool, rows: int = 1) -> tuple[str, str | None]:
    """The cache, and its steps' graph: "captured", "compiled" (on CUDA then captured) or None."""
    device = model.transformer.wte.weight.device
    if device.type == "cuda" and rows > 1 and int8.parameters(model):
        warn("int8 weights with several texts at a time on CUDA save memory, but are slow")
    if kv_cache not in ("auto", *KV_CACHES):
        raise ValueError(f"kv_cache must be one of auto, {', '.join(KV_CACHES)}, got {kv_cache!r}")
    if compile and kv_cache != "static":
        raise ValueError(f"compile needs kv_cache=static, got {kv_cache}")
    if kv_cache != "auto":
        return kv_cache, "compiled" if compile else None
    # Hooks are Python: a graph would leave them out.
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    captured = possible(device) and not hooked
    return decode_phase("auto", captured)["cache"], "captured" if captured else None


def decode_phase(kv_cache: str, captured: bool = False) -> dict[str, Any]:
    """Fields of model.phase(); captured: "auto" is static."""
    kind = kv_cache.replace("auto", "static" if captured else "dynamic")
    return {"grad": False, "cache": kind, "page_size": PAGE_SIZE if kind == "paged" else None}


def plan(model: GPT, kv_cache: str, compile: bool = False) -> Plan:
    """The kernels of a decode step."""
    return model.plan(**decode_phase(choose(model, kv_cache, compile)[0]))


class Captured(NamedTuple):
    """Keeps neither the model nor the cache alive."""

    values: list[Any]  # their addresses are in the key
    inputs: list[Tensor]
    outputs: Any
    replay: Callable[[], None] | None  # None: it cannot be captured


_captured: WeakKeyDictionary[GPT, OrderedDict[Hashable, Captured]] = WeakKeyDictionary()


def run(model: GPT, kind: str | None, function: Callable[..., Any], args: tuple[Any, ...],
        of_call: object = None) -> Any:  # fmt: skip
    """Call function(*args) by a graph, with `of_call` one that no other call uses."""
    if kind == "compiled":
        function = compiled(function)
    if kind is None or not possible(model.transformer.wte.weight.device):
        return function(*args)
    graphs, leaves = _captured.setdefault(model, OrderedDict()), tree_flatten(args)[0]
    at = function, of_call, *map(_key, leaves)
    if at not in graphs:
        graphs[at], result = capture(function, args)
        if len(graphs) > MOST:
            graphs.popitem(last=False)
        return result
    graphs.move_to_end(at)
    graph = graphs[at]
    if graph.replay is None:
        return function(*args)
    torch._foreach_copy_(graph.inputs, [x for x in leaves if isinstance(x, Tensor)])
    graph.replay()
    return graph.outputs


@memoize
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    return torch.compile(function, fullgraph=True, dynamic=False)


# A graph holds addresses: a new cache would mean a new graph.
_idle: WeakKeyDictionary[GPT, OrderedDict[Hashable, StaticCache]] = WeakKeyDictionary()


def static_cache(model: GPT, B: int, max_len: int, graph: str | None) -> StaticCache:
    """An empty static cache; graphs get that of an earlier call."""
    config = model.config
    phase = model.phase()._replace(cache="static", compiled=graph == "compiled")
    device, dtype = model.transformer.wte.weight.device, getattr(torch, phase.dtype)
    plan = model.plans.known.get(phase) or model.plans.plan(phase, B)
    bounded = device.type == "cuda" and {call.chosen.backend.name for call in plan} == {"paged"}
    key = graph, bounded, B, max_len, dtype, device
    if static := _idle.get(model, OrderedDict()).pop(key, None):
        static.reset()
        return static
    with torch.inference_mode(False):  # else its tensors are read-only
        static = StaticCache(
            config.windows, B, max_len, config.kv_heads, config.head_dim, dtype=dtype,
            device=device, in_order=config.position == "alibi", in_buckets=not bounded,
        )  # fmt: skip
    static.key = key if graph and possible(device) else None
    return static


def give_back(model: GPT, cache: Cache) -> None:
    if isinstance(cache, StaticCache) and cache.key:
        idle = _idle.setdefault(model, OrderedDict())
        idle[cache.key] = cache
        if len(idle) > MOST_IDLE:
            idle.popitem(last=False)


def _key(x: Any) -> Hashable:
    """Of a leaf of a call's arguments."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device
    if isinstance(x, Step):
        return x.length, *map(_place, (*x.cache.k, *x.cache.v, x.start, x.count))
    if not isinstance(x, nn.Module):
        return x
    at = [_place(t) for m in x.modules() for t in (*m._parameters.values(), *m._buffers.values())]
    if not isinstance(x, GPT):
        return id(x), *at
    phase = x.phase()._replace(cache="static")
    phases = phase, phase._replace(compiled=True)
    calls = [call[:2] for p in phases for call in x.plans.known.get(p, ())]
    return id(x), phase, *calls, *at


def _place(t: Tensor | None) -> Hashable:
    return None if t is None else (t.data_ptr(), t.shape, t.dtype)


def capture(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Captured, Any]:
    leaves, tree = tree_flatten(args)
    with torch.inference_mode(False):  # later calls may be outside it
        fixed = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
    inputs = [x for x in fixed if isinstance(x, Tensor)]
    device = inputs[0].device
    result = warm_up(lambda: function(*tree_unflatten(fixed, tree)), device)
    with torch.inference_mode(False):
        outputs = tree_map_only(Tensor, torch.empty_like, result)

    def step() -> None:
        # A copy: the step notes tensors, which would be the graph's.
        new = [replace(x) if isinstance(x, Step) else x for x in fixed]
        made = function(*tree_unflatten(new, tree))
        tree_map(lambda to, t: to.copy_(t) if isinstance(t, Tensor) else None, outputs, made)

    replay = None
    try:
        replay = record(step, device)
    except Exception as e:
        why: BaseException = e
        while why.__context__ is not None:
            why = why.__context__
        reason = f"{type(why).__name__}: {str(why).strip()}".partition("\n")[0]
        warn(f"the decode step cannot be captured as a CUDA graph, and is slower: {reason}")
    values = [x for x in leaves if not isinstance(x, Tensor | Step | GPT)]
    return Captured(values, inputs, outputs, replay), result


def possible(device: torch.device) -> bool:
    return device.type == "cuda"


@memoize
def _side(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


def warm_up(step: Callable[[], Any], device: torch.device) -> Any:
    """Call step() on the capture's stream, so that it compiles before."""
    if device.type != "cuda":
        return step()
    stream, current = _side(device)[0], torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = step()
    current.wait_stream(stream)
    return result


def record(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture step(); return a function that launches it."""
    graph, (stream, pool) = torch.cuda.CUDAGraph(), _side(device)
    with torch.cuda.device(device), torch.cuda.graph(graph, pool, stream, "thread_local"):
        step()
    return graph.replay
