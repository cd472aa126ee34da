"""One thread a process: the tests are many tiny tensors.

Without a CUDA device Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

if os.name == "posix":  # under nohup, and in a shell's background, they are ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for subprocesses

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported


def hurry_the_interpreter() -> None:
    """Patch triton.language once a function, not at every call, and check no sums for overflow:
    more than half of its time. With other releases than 3.9 it is only slow."""
    try:
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        patch, function = interpreter._patch_lang, interpreter.InterpretedFunction
        builder.options = replace(builder.options, sanitize_overflow=False)
    except (ImportError, AttributeError, TypeError):
        return
    patched = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in patched:
            patched.add(self.fn)
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    function.__call__ = call


def few(values: Sequence[Any], fast: int = 1) -> list[Any]:
    """`make test` runs the first `fast`, `make test-all` all."""
    rest = [v if isinstance(v, tuple) else (v,) for v in values[fast:]]
    return [*values[:fast], *(pytest.param(*v, marks=pytest.mark.slow) for v in rest)]


def every(n: int, values: Sequence[Any]) -> list[Any]:
    return [v for at in range(0, len(values), n) for v in few(values[at : at + n])]


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a file's slow tests .ci/run takes those marked `ci`, else the first."""
    chosen = {item.path for item in items if item.get_closest_marker("ci")}
    for item in items:
        if item.get_closest_marker("slow") and item.path not in chosen:
            chosen.add(item.path)
            item.add_marker(pytest.mark.ci)


gc.disable()  # while modules are imported
if os.environ.get("TRITON_INTERPRET") == "1":
    hurry_the_interpreter()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()
    gc.unfreeze = lambda: None  # else each run looks for garbage among all modules


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements are not kept as this machine's; subprocesses inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOATTN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class TorchRandom:
    """hypothesis seeds torch's generator: examples repeat."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


hypothesis.register_random(TorchRandom)
hypothesis.settings.register_profile("no deadline", deadline=None)  # machines are busy
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def switches_as_they_were() -> Iterator[None]:
    """Runs of train.py set switches of the process, which tests share."""
    torch.manual_seed(0)  # whatever ran before
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    if torch.are_deterministic_algorithms_enabled():  # to throw the switch imports inductor
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def probe_once() -> Any:
    return cache(importlib.import_module("attention.select").probe)  # not the function select


@pytest.fixture
def remembered_probes(monkeypatch: pytest.MonkeyPatch, probe_once: Any) -> None:
    """A backend is probed once for each Spec."""
    monkeypatch.setattr(sys.modules["attention.select"], "probe", probe_once)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real browser, driven by playwright."""
    names = "chromium-headless-shell chromium google-chrome chromium-browser chrome"
    path = next(filter(None, map(shutil.which, names.split())), None)
    if path is None:
        pytest.skip(f"no browser: none of {names} is installed")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
