"""User kernels: the path of a file that defines BACKEND can replace a backend's name.

The file runs once per process, if the user names it on a command line or in a config. A path read
from a checkpoint or a record is never run.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from .caps import Backend, BackendUnavailable
from .machine.system import first_line, settings_stay


@cache
def load(path: str) -> Backend:
    """Run the file at an absolute path and return its BACKEND.

    Raises:
        BackendUnavailable: the file is missing or raises, or its BACKEND is not valid.
    """
    module = execute(path)
    backend = getattr(module, "BACKEND", None)
    if not isinstance(backend, Backend):
        raise invalid(path, "it defines no BACKEND = Backend(...)")
    return backend


@cache
def execute(path: str, what: str = "attention kernel") -> ModuleType:
    """Run the file at an absolute path, once a process. Raises BackendUnavailable, on one line."""
    if not os.path.isfile(path):
        raise invalid(path, "a folder" if os.path.isdir(path) else "no such file", what)
    # In sys.modules, as dataclasses, Triton and torch.compile expect.
    name = f"nanoattn_kernel_{execute.cache_info().misses}"
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, path))
    assert spec and spec.loader
    module = sys.modules[name] = module_from_spec(spec)
    with explained(path, what), settings_stay():
        spec.loader.exec_module(module)
    return module


@contextmanager
def explained(path: str, what: str = "attention kernel") -> Iterator[None]:
    """Within this context an error of the file is a BackendUnavailable with its line."""
    try:
        yield
    except (Exception, SystemExit) as e:  # whatever the file raises
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = e.lineno if isinstance(e, SyntaxError) else lines[-1] if lines else None
        hint = "; import nanoattn instead" if getattr(e, "name", "") == "attention" else ""
        text = f"{f'line {line}: ' if line else ''}{type(e).__name__}: {first_line(e)}{hint}"
        raise invalid(path, text, what) from e


def invalid(path: str, why: str, what: str = "attention kernel") -> BackendUnavailable:
    return BackendUnavailable(f"{what} {path!r} cannot be used: {why}")
