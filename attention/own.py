"""User kernels: the path of a file that defines BACKEND can replace a backend's name.

The file runs once per process, if the user names it on a command line or in a config. A path read
from a checkpoint or a record is never run.
"""

from __future__ import annotations

import os
import sys
import traceback
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location

from .caps import Backend, BackendUnavailable, Caps
from .machine.system import first_line


@cache
def load(path: str) -> Backend:
    """Run the file at an absolute path and return its BACKEND.

    Raises:
        BackendUnavailable: the file is missing or raises, or its BACKEND is not valid.
    """
    if not os.path.isfile(path):
        raise invalid(path, "no such file")
    # In sys.modules, as dataclasses, Triton and torch.compile expect.
    name = f"nanoattn_kernel_{load.cache_info().misses}"
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, path))
    assert spec and spec.loader
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # whatever the file raises
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = e.lineno if isinstance(e, SyntaxError) else lines[-1] if lines else None
        hint = "; import nanoattn instead" if getattr(e, "name", "") == "attention" else ""
        text = f"line {line}: {type(e).__name__}: {first_line(e)}{hint}"
        raise invalid(path, text) from e
    backend = getattr(module, "BACKEND", None)
    if not isinstance(backend, Backend):
        raise invalid(path, "it defines no BACKEND = Backend(...)")
    rows = backend.caps
    if not (rows and isinstance(rows, tuple) and all(isinstance(c, Caps) for c in rows)):
        raise invalid(path, "its caps must be a tuple of Caps: caps=(Caps(...),)")
    return backend


def invalid(path: str, why: str) -> BackendUnavailable:
    return BackendUnavailable(f"attention kernel {path!r} cannot be used: {why}")
