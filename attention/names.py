"""Backends by name: BACKENDS, registered ones, and other people's code (docs/KERNEL.md), which runs
only if the user names it."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location

from . import flash, flex, hub, manual, mods, paged, sdpa, sdpa_bmm, tiled, triton_flash
from .caps import Backend, BackendUnavailable
from .machine.system import KERNEL_ERRORS, first_line
from .spec import Machine, Spec
from .triton_flash import TILED, TMA

BACKENDS: dict[str, Backend] = {b.name: b for b in (  # new kernels are listed here
    manual.BACKEND, tiled.BACKEND, sdpa.BACKEND, sdpa.FLASH, sdpa.EFFICIENT, sdpa.CUDNN, sdpa.MATH,
    sdpa_bmm.BACKEND, flex.BACKEND, flex.FLASH, triton_flash.BACKEND, flash.V2, flash.V3, flash.V4,
    paged.BACKEND)}
RULES = ("auto", "fastest")  # select.PREFERENCE; timing (plan.py)
ENTRY_POINTS = "nanoattn.backends"
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
    if name.startswith(hub.PREFIX):
        return hub.unloaded(name)
    offered = entry_points()
    if is_path(name):
        prefix = mods.PREFIX if name.startswith(mods.PREFIX) else ""
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
    if name.startswith(hub.PREFIX) or not (name in RULES or is_code(name)):
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
    path = name.removeprefix(mods.PREFIX)
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
    return module.BACKEND if wanted == "BACKEND" else mods.backend_of(module, path)


def packages(*names: str) -> tuple[str, ...]:
    backends = [*BACKENDS.values(), *(get(name) for name in names if is_code(name))]
    backends = [b for own in backends for b in (own, own.prebuilt) if b]
    return tuple(dict.fromkeys(package for b in backends for package in b.packages))
