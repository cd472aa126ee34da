"""fastest: decided by a clock that the tests hold, on backends that are made up."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import Backend, Caps, Spec, choose, fastest, manual
from attention import resolve as _resolve
from attention.machine import timing

resolve_module = sys.modules["attention.select"]  # attention.select is the function
assert callable(_resolve)

SPEC = Spec(2, 1, 16, "float32")
SHAPE = (3, 96, 96)  # longer than what the probe runs


class Clock:
    """Seconds that pass only where a test lets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Attend = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOATTN_CACHE", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


@pytest.fixture()
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Which kernels ran is not asked here: starting the profiler takes most of a test's time."""
    monkeypatch.setattr(sys.modules["attention.proof"], "profiled", lambda events: nullcontext())
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    return clock


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "nanoattn")
    return caplog


def takes(clock: Clock, ms: float, calls: list[tuple[int, ...]] | None = None) -> Attend:
    """A right attend() that lets so much time pass, and notes the shape of q."""

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        clock.now += ms / 1e3
        if calls is not None and q.shape[0] == SHAPE[0]:  # the probe has two sequences
            calls.append(tuple(q.shape))
        return manual.attend(q, k, v, spec, **kw)

    return attend


def only(monkeypatch: pytest.MonkeyPatch, **attends: Attend) -> None:
    """Let these be all backends there are; "sdpa" is what auto takes on the CPU."""
    made = {
        name: Backend(name, "made up", attend, (Caps(),), fallback=None)
        for name, attend in attends.items()
    }
    monkeypatch.setattr(choose, "BACKENDS", made)
    monkeypatch.setattr(resolve_module, "BACKENDS", made)
    monkeypatch.setattr(resolve_module, "_BY_ANY_NAME", made)
    order = tuple(name for name in resolve_module.PREFERENCE["cpu"] if name in made)
    monkeypatch.setattr(resolve_module, "PREFERENCE", {"cpu": order})
    monkeypatch.setattr("attention.machine.system.bfloat16_units", lambda: False)


def said(log: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in log.records)


def line(log: pytest.LogCaptureFixture, name: str) -> str:
    """What the table says about a backend."""
    return next(x for x in said(log).splitlines() if x.split()[:1] == [name])


# --- who wins ---


@pytest.mark.parametrize(
    "rival_ms, winner",
    [
        (10.2, "sdpa"),
        (10.0, "sdpa"),
        (9.85, "sdpa"),
        (9.79, "rival"),
        (9.7, "rival"),
        (1.0, "rival"),
    ],
)
def test_two_percent_unseat_the_rules_choice(rival_ms, winner, clock, monkeypatch, log) -> None:
    only(monkeypatch, rival=takes(clock, rival_ms), sdpa=takes(clock, 10.0))
    chosen = fastest(SPEC, "cpu", SHAPE)
    assert chosen.backend.name == winner and chosen.requested == "fastest"
    assert chosen.rejected == {}
    assert line(log, "rival").split()[1] == f"{rival_ms:.3f}"
    assert line(log, "sdpa").split()[1] == "10.000"


def test_a_noisy_neighbour_does_not_decide(clock, monkeypatch) -> None:
    """One call in three takes ten times as long: the median does not see it."""
    n = 0

    def noisy(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        nonlocal n
        n += 1
        clock.now += 80e-3 if n % 3 == 0 else 8e-3
        return manual.attend(q, k, v, spec, **kw)

    only(monkeypatch, sdpa=takes(clock, 10.0), noisy=noisy)
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "noisy"


# --- who is dropped, and why ---


def test_wrong_numbers_are_dropped_however_fast(clock, monkeypatch, log) -> None:
    def forgets_the_window(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        return manual.attend(q, k, v, dataclasses.replace(spec, window=None), **kw)

    only(monkeypatch, sdpa=takes(clock, 10.0), wrong=forgets_the_window)
    spec = dataclasses.replace(SPEC, window=9)
    assert fastest(spec, "cpu", SHAPE).backend.name == "sdpa"
    assert "off by" in line(log, "wrong")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: invalid configuration argument\ntrace"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\ntrace"),
        NotImplementedError(),
    ],
)
def test_what_fails_at_the_real_shape_is_dropped_in_its_own_words(error, clock, monkeypatch, log):
    def fails(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        if q.shape[0] == SHAPE[0]:
            raise error
        return manual.attend(q, k, v, spec, **kw)

    only(monkeypatch, sdpa=takes(clock, 10.0), frail=fails)
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"
    words = str(error).splitlines()[0] if str(error) else "NotImplementedError"
    assert words in line(log, "frail")


def test_where_nothing_can_be_measured_the_rule_decides_and_nothing_is_remembered(
    clock, monkeypatch, log, cache_folder
):
    def fails(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        if q.shape[0] == SHAPE[0]:
            raise RuntimeError("no")
        return manual.attend(q, k, v, spec, **kw)

    only(monkeypatch, sdpa=fails)
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"
    assert list(cache_folder.iterdir()) == []


# --- what is remembered ---


def test_an_answer_is_remembered_and_probed_again(clock, monkeypatch, log, cache_folder) -> None:
    only(monkeypatch, sdpa=takes(clock, 10.0), rival=takes(clock, 5.0))
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "rival"
    (answer,) = cache_folder.iterdir()
    calls: list[tuple[int, ...]] = []
    only(monkeypatch, sdpa=takes(clock, 1.0, calls), rival=takes(clock, 5.0, calls))
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "rival" and calls == []
    assert f"delete {answer}" in said(log)
    assert fastest(SPEC, "cpu", (3, 97, 97)).backend.name == "sdpa"  # another question

    def broken_now(q: Tensor, *_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel image is available")

    only(monkeypatch, sdpa=takes(clock, 10.0), rival=broken_now)
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"
    assert "no kernel image is available" in said(log)
    (question,) = (key for key, name in json.loads(answer.read_text()).items() if name == "sdpa"
                   and str(SHAPE) in key)
    for damaged in ("cut sho", "[" * 100_000, json.dumps({question: ["x"]}), "[1]"):
        answer.write_text(damaged)
        assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"
        assert "sdpa" in answer.read_text()


# --- many processes ---


class SecondOfTwo:
    """Rank 1, next to a rank 0 that measured "rival" and otherwise agrees."""

    rank = 1

    def gather(self, value: Any) -> list[Any]:
        return ["rival" if value == "auto" else value, value]


def test_all_processes_take_what_rank_0_measured(clock, monkeypatch, log) -> None:
    only(monkeypatch, sdpa=takes(clock, 1.0), rival=takes(clock, 5.0))  # sdpa is faster here
    chosen = fastest(SPEC, "cpu", SHAPE, ranks=SecondOfTwo())
    assert (chosen.backend.name, chosen.requested, said(log)) == ("rival", "fastest", "")


# --- the real ones ---


def test_with_the_real_backends_it_chooses_one_that_runs_here(log, monkeypatch) -> None:
    monkeypatch.setattr(timing, "BUDGET_S", 0.0)  # three samples each
    chosen = fastest(SPEC, "cpu", (1, 32, 32))
    assert chosen.backend.name in resolve_module.BACKENDS
    rows = {x.split()[0] for x in said(log).splitlines() if x.split()}
    assert set(resolve_module.BACKENDS) <= rows
