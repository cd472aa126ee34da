"""hub:org/repo@commit: FlashAttention's functions of a repository of the hub (package `kernels`).

An option is declared if flash_attn_func, and flash_attn_varlen_func for segments, have its
parameter; the probe finds the rest, but not the rate of dropout, which is refused."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from functools import cache, partial
from typing import NoReturn

from .caps import Backend, BackendUnavailable, Caps, Refusal
from .flash import Package, attend, load
from .function import not_compiled
from .machine.system import KERNEL_ERRORS, first_line
from .spec import Machine, Policy, Spec

PREFIX = "hub:"
NAME = re.compile(r"hub:([\w.-]+/[\w.-]+)@([0-9a-f]{40})")
SINKS = ("s_aux", "learnable_sink")  # in FlashAttention-3's forks, in FlashAttention-4
CAPS = Caps(dtypes=("float16", "bfloat16", "float32"), right=True, dropout=False, scale=True,
            softcap=True, sinks=True, packages=("kernels>=0.17",))  # 0.17: trust_remote_code=[...]


def not_loaded(*args: object, **options: object) -> NoReturn:
    raise BackendUnavailable("a kernel of the hub is loaded by select(), Policy(hub_kernels=True)")


@cache
def unloaded(name: str) -> Backend:
    if not (found := NAME.fullmatch(name)):
        raise ValueError(f"expected hub:org/repo@ and the 40 hex digits of a commit, got {name!r}")
    title = f"{found[1]} of the hub at {found[2][:8]}"
    return Backend(name, title, not_loaded, (CAPS,), "sdpa", install="pip install kernels",
                   fullgraph=False)


@cache
def loaded(name: str) -> Backend:
    repository, _, commit = name.removeprefix(PREFIX).partition("@")
    package = Package(name, None, hub=(repository, commit))
    module = load(package)
    varlen = getattr(module, "flash_attn_varlen_func", None)
    functions = [module.flash_attn_func, *([varlen] if varlen else [])]
    parameters = [inspect.signature(f).parameters for f in functions]
    accepts = frozenset.intersection(*map(frozenset, parameters))
    sinks = next((s for s in SINKS if s in accepts), "")
    unbounded = None  # for an unlimited side
    if "window_size" in accepts:
        default = parameters[0]["window_size"].default
        unbounded = default[0] if isinstance(default, (tuple, list)) else -1
    caps = replace(
        CAPS, window="window_size" in accepts, segments=varlen is not None, sinks=bool(sinks),
        scale="softmax_scale" in accepts, softcap="softcap" in accepts,
        deterministic="deterministic" in accepts)
    package = replace(package, unbounded=unbounded, accepts=accepts, sinks=sinks)
    called = not_compiled(partial(attend, package=package))
    return replace(unloaded(name), attend=called, caps=(caps,))


def admit(name: str, spec: Spec, machine: Machine, policy: Policy) -> tuple[Backend, list[Refusal]]:
    backend = unloaded(name)
    if not policy.hub_kernels:
        text = "it is downloaded code, which runs with --attention_hub_kernels=True only"
        return backend, [Refusal(text, "hub")]
    why = backend.why_not(spec, machine)
    if why or machine.packages is not None:
        return backend, why
    try:
        backend = loaded(name)
    except KERNEL_ERRORS as e:
        return backend, [Refusal(f"it cannot be loaded ({type(e).__name__}: {first_line(e)})")]
    return backend, backend.why_not(spec, machine)
