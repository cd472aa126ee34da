"""User kernels: a file that defines BACKEND can be used instead of a backend's name.

The backend's name is the path. The file runs once per process, if the user names it on a command
line or in a config. A path read from a checkpoint or a record is never run.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Collection
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location

from .caps import Backend, BackendUnavailable, Caps
from .machine.system import first_line

_loaded: dict[str, Backend] = {}  # by absolute path


def is_file(name: str) -> bool:
    """True if the name is a path: it ends in .py or contains a separator."""
    return name.endswith(".py") or os.sep in name or bool(os.altsep and os.altsep in name)


def load(path: str, backends: Collection[str], rules: Collection[str]) -> Backend:
    """Run the file and return its BACKEND, which may fall back to one of `backends`.

    Raises:
        BackendUnavailable: the file does not exist or raises, its BACKEND is not valid, or its
            name is already taken.
    """
    try:
        backend = _run(os.path.abspath(path))
        if taken := {backend.name, *backend.aliases} & {*backends, *rules}:
            raise ValueError(f"its name {min(taken)!r} is taken")
        if not (backend.fallback is None or backend.fallback in backends):
            raise ValueError(f"its fallback {backend.fallback!r} is not a backend")
    except ValueError as e:
        raise BackendUnavailable(f"attention kernel {path!r} cannot be used: {e}") from e
    return backend


def _run(path: str) -> Backend:
    if path in _loaded:
        return _loaded[path]
    if not os.path.isfile(path):
        raise ValueError("no such file")
    # In sys.modules, as dataclasses, Triton and torch.compile expect.
    name = f"nanoattn_kernel_{len(_loaded)}"
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, path))
    assert spec and spec.loader
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # whatever the file raises
        del sys.modules[name]
        own = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = e.lineno if isinstance(e, SyntaxError) else own[-1] if own else None
        hint = "; import nanoattn instead" * (getattr(e, "name", "") == "attention")
        raise ValueError(f"line {line}: {type(e).__name__}: {first_line(e)}{hint}") from e
    backend = getattr(module, "BACKEND", None)
    if not isinstance(backend, Backend):
        raise ValueError("it defines no BACKEND = Backend(...)")
    if not (
        isinstance(backend.caps, tuple)
        and backend.caps
        and all(isinstance(c, Caps) for c in backend.caps)
    ):
        raise ValueError("its caps must be a tuple of Caps: caps=(Caps(...),)")
    _loaded[path] = backend
    return backend
