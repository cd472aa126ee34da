"""The system that a process runs on: processor, packages, profiler. Nothing about attention.

torch is imported inside the functions, so that attention/spec.py does not need it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any


def cpu_name() -> str | None:
    """The processor's name as Linux reports it, None on other systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            found = re.search(r"^model name\s*:\s*(.+)$", f.read(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found else None


def matrix_units() -> bool:
    """Whether this processor has units for bfloat16 matrix products (AMX)."""
    import torch

    has: Any = getattr(torch.cpu, "get_capabilities", dict)()  # not in older releases
    return bool(has.get("amx_bf16"))


def import_version(package: str) -> str | None:
    """A package's version, "" if it imports but has none; the text of the error that its import
    raised; None if it is not installed."""
    try:
        found = importlib.util.find_spec(package)
        if found is None or (found.origin is None and found.submodule_search_locations is not None):
            return None  # at most a namespace: flash-attn-4 alone has an empty flash_attn
        module = importlib.import_module(package)
    except Exception as e:  # a broken binary can raise anything
        if isinstance(e, ModuleNotFoundError) and f"{package}.".startswith(f"{e.name}."):
            return None  # "a.b", and there is no a
        return f"{type(e).__name__}: {e}"
    said = str(getattr(module, "__version__", ""))
    if re.match(r"[\d.]*[1-9]", said):
        return said
    # No version, or the 0.0.0 of a package that looks itself up under its former name.
    return _distribution_version(package) or ""


def _distribution_version(package: str) -> str | None:
    """The version of the distribution that installed the package; None if there is none."""
    path = package.replace(".", "/")
    for name in metadata.packages_distributions().get(package.partition(".")[0], ()):
        files = {str(file) for file in metadata.files(name) or ()}
        if files & {f"{path}.py", f"{path}/__init__.py"}:
            return metadata.version(name)
    return None


def cache_folder() -> Path:
    """Where measurements are cached: $NANOATTN_CACHE, else nanoattn in the user's cache folder.

    Raises:
        OSError: the user has no home folder.
    """
    if own := os.environ.get("NANOATTN_CACHE"):
        return Path(own)
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as e:  # a container's user may be a bare number
        raise OSError(f"{e}; set NANOATTN_CACHE to a folder that can be written") from None
    return caches / "nanoattn"


def write_at_once(path: Path, text: str) -> None:
    """Write a file atomically: whole or not at all, even if killed or if others write it too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=path.name, suffix=".partial", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def first_line(e: BaseException) -> str:
    """The first line of an exception's message; its type where that is empty."""
    return (str(e).strip() or type(e).__name__).splitlines()[0]


def own_code(f: Callable[..., Any], name: str) -> Any:
    """A copy of f with its own code object, under that name.

    torch.compile counts recompilations by code object, and gives up after 8: functions that share
    one share the limit.
    """
    assert isinstance(f, FunctionType)
    code = f.__code__.replace(co_name=name)
    return FunctionType(code, f.__globals__, name, f.__defaults__, f.__closure__)


def synchronize(device: Any) -> None:
    """Wait until the torch.device has finished all queued work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextlib.contextmanager
def profiled(names: list[str]) -> Iterator[None]:
    """Append to `names` the operators and device kernels that ran inside."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with no_stderr():
        profiler = torch.profiler.profile(activities=activities)
        profiler.__enter__()
    try:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        with no_stderr():
            profiler.__exit__(None, None, None)
    names += [e.key for e in profiler.key_averages()]


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """Mute file descriptor 2: PyTorch 2.13's profiler writes 'USDT: ... profiler_start' there."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
