"""A person's own kernel: a file that defines BACKEND is a backend wherever a name is.

Its name is its path. Who types that on a command line, or in a config of their own, asks for the
file to be run, and select.get() runs it, once a process. Nothing else does: a name that was read
from a checkpoint or a record is no request (model.GPTConfig, checkpoint/store.py).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Collection
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location

from .spec import Backend, BackendUnavailable, Caps
from .system import first_line

_RUN: dict[str, Backend] = {}  # absolute path -> what the file defines, once it was run


def is_file(name: str) -> bool:
    """Whether the name is a path: it ends in .py, or has a separator in it."""
    return name.endswith(".py") or os.sep in name or bool(os.altsep and os.altsep in name)


def load(path: str, backends: Collection[str], rules: Collection[str]) -> Backend:
    """The BACKEND that the file defines; the file is run when it is first asked for. It may fall
    back to `backends`, and have none of their names and those of `rules`.

    Raises:
        BackendUnavailable: there is no such file, it raises, or its BACKEND cannot be used.
    """

    def fail(why: str) -> BackendUnavailable:
        return BackendUnavailable(f"attention kernel {path!r} cannot be used: {why}")

    if not os.path.isfile(path):
        raise fail("there is no such file")
    backend = _run(os.path.abspath(path), fail)
    if taken := {backend.name, *backend.aliases} & {*backends, *rules}:
        raise fail(f"its name {min(taken)!r} is taken; give it another one")
    if not (backend.fallback is None or backend.fallback in backends):
        raise fail(f"it would fall back to {backend.fallback!r}, and there is no such backend")
    return backend


def _run(path: str, fail: Callable[[str], BackendUnavailable]) -> Backend:
    if path in _RUN:
        return _RUN[path]
    # In sys.modules, as dataclasses, Triton and torch.compile expect of a module.
    name = f"nanoattn_kernel_{len(_RUN)}"
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, path))
    assert spec and spec.loader
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # whatever the file does, it is told in a sentence
        del sys.modules[name]
        own = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = e.lineno if isinstance(e, SyntaxError) else own[-1] if own else None
        hint = "; import it as nanoattn" * (getattr(e, "name", "") == "attention")  # the wheel
        raise fail(f"line {line}: {type(e).__name__}: {first_line(e)}{hint}") from e
    if not hasattr(module, "BACKEND"):
        raise fail("it defines no BACKEND = Backend(...)")
    if not isinstance(module.BACKEND, Backend):
        raise fail(f"its BACKEND is a {type(module.BACKEND).__name__}, not a Backend")
    caps = module.BACKEND.caps
    if not (isinstance(caps, tuple) and caps and all(isinstance(row, Caps) for row in caps)):
        raise fail("its caps are no tuple of Caps: write caps=(Caps(...),), with the last comma")
    _RUN[path] = module.BACKEND
    return module.BACKEND
