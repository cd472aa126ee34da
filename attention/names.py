"""Backends by name: BACKENDS, registered ones, and other people's code (docs/KERNEL.md), which runs
only if the user names it: files, modules, and

    hub:org/repo@commit   FlashAttention's functions of a repository of the hub (package `kernels`)
    flex:FILE.py          flex with mask_mod and perhaps score_mod of a file"""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache, partial
from importlib import metadata
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import NoReturn

import torch
import torch.nn.functional as F

from . import flash, flex, manual, paged, sdpa, sdpa_bmm, tiled, triton_flash
from .caps import Backend, BackendUnavailable, Caps
from .function import not_compiled
from .machine.system import KERNEL_ERRORS, first_line
from .masks import Mods
from .spec import Machine, Spec
from .triton_flash import TILED, TMA

BACKENDS: dict[str, Backend] = {b.name: b for b in (  # new kernels are listed here
    manual.BACKEND, tiled.BACKEND, sdpa.BACKEND, sdpa.FLASH, sdpa.EFFICIENT, sdpa.CUDNN, sdpa.MATH,
    sdpa_bmm.BACKEND, flex.BACKEND, flex.FLASH, triton_flash.BACKEND, flash.V2, flash.V3, flash.V4,
    paged.BACKEND)}
RULES = ("auto", "fastest")  # select.PREFERENCE; timing (plan.py)
ENTRY_POINTS = "nanoattn.backends"
HUB, FLEX = "hub:", "flex:"  # prefixes
_BY_ANY_NAME = {n: b for b in (*BACKENDS.values(), *TILED, TMA) for n in (b.name, *b.aliases)}
_BUILT_IN = frozenset(_BY_ANY_NAME)


def is_path(name: str) -> bool:
    return name.endswith(".py") or os.sep in name or bool(os.altsep and os.altsep in name)


def is_code(name: str) -> bool:
    """True if get(name) runs other people's code. Runs nothing."""
    if name in RULES or name in _BY_ANY_NAME:
        return False
    return is_path(name) or ":" in name or name in entry_points()


def is_backend(name: str) -> bool:
    """True if get() knows the name. Runs nothing."""
    return name in _BY_ANY_NAME or is_code(name)


def entry_points() -> dict[str, str]:
    """Values "package.module:BACKEND" by name, of installed packages."""
    found = metadata.entry_points(group=ENTRY_POINTS)
    return {e.name: e.value for e in found if e.name not in _BY_ANY_NAME}


def get(name: str) -> Backend:
    """Return or load a backend. Raises ValueError: unknown; BackendUnavailable: invalid code."""
    if name in _BY_ANY_NAME:
        return _BY_ANY_NAME[name]
    if name.startswith(HUB):
        return of_hub(name)
    offered = entry_points()
    if is_path(name):
        prefix = FLEX if name.startswith(FLEX) else ""
        return load(prefix + os.path.abspath(name.removeprefix(prefix)))
    if ":" in name or name in offered:
        return load(offered.get(name, name))
    known = ", ".join(map(repr, (*RULES, *_BY_ANY_NAME, *offered)))
    raise ValueError(f"unknown attention backend {name!r}; known are {known}")


def timed(spec: Spec, machine: Machine) -> list[str]:
    others = (b for b in TILED if spec.grad and not b.why_not(spec, machine))
    return [*BACKENDS, *(b.name for b in others)]


def check_name(name: str) -> None:
    """Raise ValueError: unknown. Runs nothing."""
    if not isinstance(name, str):
        raise ValueError(f"a backend has a name or a path, got {name!r}")
    if name.startswith(HUB) or not (name in RULES or is_code(name)):
        get(name)


def register(backend: Backend) -> Backend:
    """Add a backend. Raises ValueError: a bad or taken name."""
    names = backend.name, *backend.aliases
    if backend.mods or any(is_path(name) or ":" in name for name in names):
        raise ValueError(f"{names} must not be a path or a module, nor have their own mask")
    valid(backend, _BUILT_IN)
    _BY_ANY_NAME.update(dict.fromkeys(names, backend))
    BACKENDS[backend.name] = backend
    return backend


def valid(backend: object, taken: Iterable[str]) -> Backend:
    if not isinstance(backend, Backend):
        raise TypeError(f"expected BACKEND = Backend(...), got {backend!r}")
    if names := {backend.name, *backend.aliases} & {*taken, *RULES}:
        raise ValueError(f"its name {min(names)!r} is taken")
    if backend.fallback not in (None, *_BY_ANY_NAME):
        raise ValueError(f"its fallback {backend.fallback!r} is not a backend")
    return backend


@cache
def load(name: str) -> Backend:
    """Run a path, flex: with one, or package.module:BACKEND. Raises BackendUnavailable."""
    path = name.removeprefix(FLEX)
    try:
        if is_path(path):
            backend = run(path, "BACKEND" if path == name else "mask_mod")
        elif re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
            backend = metadata.EntryPoint("", name, ENTRY_POINTS).load()
        else:
            raise ValueError("expected package.module:BACKEND")
        return valid(backend, [n for n, b in _BY_ANY_NAME.items() if b is not backend])
    except KERNEL_ERRORS as e:
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = e.lineno if isinstance(e, SyntaxError) else lines[-1] if lines else None
        at = f"line {line}: " if line else ""
        hint = "; import nanoattn instead" if getattr(e, "name", "") == "attention" else ""
        why = f"{at}{type(e).__name__}: {first_line(e)}{hint}"
        raise BackendUnavailable(f"attention kernel {name!r} cannot be used: {why}") from e


def run(path: str, wanted: str) -> object:
    if not os.path.isfile(path):
        raise FileNotFoundError("no such file")
    # Dataclasses, Triton and torch.compile look in sys.modules.
    title = f"nanoattn_kernel_{load.cache_info().misses}"
    spec = spec_from_file_location(title, path, loader=SourceFileLoader(title, path))
    assert spec and spec.loader
    module = sys.modules[title] = module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, wanted):
        raise ValueError(f"it defines no {wanted}")
    return module.BACKEND if wanted == "BACKEND" else with_mask(module, path)


def packages(*names: str) -> tuple[str, ...]:
    backends = [*BACKENDS.values(), *(get(name) for name in names if is_code(name))]
    backends = [b for own in backends for b in (own, own.prebuilt) if b]
    return tuple(dict.fromkeys(package for b in backends for package in b.packages))


# --- hub:org/repo@commit ---

HUB_SINKS = ("s_aux", "learnable_sink")  # in FlashAttention-3's forks, in FlashAttention-4
HUB_CAPS = Caps(dtypes=("float16", "bfloat16", "float32"), right=True, dropout=False, scale=True,
            softcap=True, sinks=True, packages=("kernels>=0.17",))  # 0.17: trust_remote_code=[...]


def not_loaded(*args: object, **options: object) -> NoReturn:
    raise BackendUnavailable("a kernel of the hub is loaded by select(), Policy(hub_kernels=True)")


@cache
def of_hub(name: str) -> Backend:
    """The backend before its code is loaded."""
    if not (found := re.fullmatch(r"hub:([\w.-]+/[\w.-]+)@([0-9a-f]{40})", name)):
        raise ValueError(f"expected hub:org/repo@ and the 40 hex digits of a commit, got {name!r}")
    title = f"{found[1]} of the hub at {found[2][:8]}"
    return Backend(name, title, not_loaded, (HUB_CAPS,), "sdpa", install="pip install kernels",
                   fullgraph=False)


@cache
def loaded(name: str) -> Backend:
    """Declare an option if flash_attn_func, and flash_attn_varlen_func for segments, have its
    parameter; the probe finds the rest, but not the rate of dropout, which is refused."""
    repository, _, commit = name.removeprefix(HUB).partition("@")
    package = flash.Package(name, None, hub=(repository, commit))
    module = flash.load(package)
    varlen = getattr(module, "flash_attn_varlen_func", None)
    functions = [module.flash_attn_func, *([varlen] if varlen else [])]
    parameters = [inspect.signature(f).parameters for f in functions]
    accepts = frozenset.intersection(*map(frozenset, parameters))
    sinks = next((s for s in HUB_SINKS if s in accepts), "")
    unbounded = None  # for an unlimited side
    if "window_size" in accepts:
        default = parameters[0]["window_size"].default
        unbounded = default[0] if isinstance(default, (tuple, list)) else -1
    caps = replace(
        HUB_CAPS, window="window_size" in accepts, segments=varlen is not None, sinks=bool(sinks),
        scale="softmax_scale" in accepts, softcap="softcap" in accepts,
        deterministic="deterministic" in accepts)
    package = replace(package, unbounded=unbounded, accepts=accepts, sinks=sinks)
    called = not_compiled(partial(flash.attend, package=package))
    return replace(of_hub(name), attend=called, caps=(caps,))


# --- flex:FILE.py ---


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # its tensors cannot be used in training
def block_mask(mods: Mods, B: int, H: int, Tq: int, Tk: int,
               device: torch.device) -> tuple[flex.BlockMask, flex.Mod | None]:
    """mask_mod as a BlockMask, and score_mod, for the last Tq of Tk positions: O(B * H * Tq * Tk)
    work, O(B * H * 128 * Tk) memory."""
    if Tq > Tk:
        raise ValueError(f"a mask of one's own needs at least as many keys as queries: {Tq} > {Tk}")
    some, every = [], []
    rest = -Tk % flex.TILE  # missing keys of the last tile
    for i in torch.arange(Tk - Tq, Tk, device=device).split(flex.TILE):
        seen = mods.seen(B, H, i, Tk)
        some.append(F.pad(seen.any(2), (0, rest)).unflatten(2, (-1, flex.TILE)).any(3))
        every.append(F.pad(seen.all(2), (0, rest), value=True).unflatten(2, (-1, flex.TILE)).all(3))
    mods.scored(torch.zeros(1, H, 1, Tk, device=device), H, i[:1])  # raises here, not in the truth
    # A number would be a constant of the compiled kernel.
    shift = torch.full((), Tk - Tq, device=device)
    mask_of, score_of = mods.mask_mod, mods.score_mod
    mask = flex.listed(torch.stack(some, dim=2), torch.stack(every, dim=2), (Tq, Tk), flex.TILE,
                       lambda b, h, i, j: mask_of(b, h, i + shift, j))
    return mask, score_of and (lambda s, b, h, i, j: score_of(s, b, h, i + shift, j))


def with_mask(module: ModuleType, path: str) -> Backend:
    mods = Mods(module.mask_mod, getattr(module, "score_mod", None))
    attend = partial(flex.attend, own_mask=partial(block_mask, mods))
    rows = dict.fromkeys(
        replace(row, window=False, segments=False, softcap=False, sinks=False, alibi=False)
        for row in flex.BACKEND.caps)
    title = f"PyTorch flex_attention, mask of {path}"
    return Backend(FLEX + os.path.basename(path), title, not_compiled(attend), tuple(rows),
                   fallback=None, fullgraph=False, mods=mods)
