"""fastest: decided by a clock that the tests hold, on backends that are made up."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attention import (
    Backend,
    BackendUnavailable,
    Caps,
    Machine,
    Policy,
    Spec,
    autotune,
    manual,
    packages,
)
from attention import resolve as _resolve
from attention.autotune import Timing, decide, fastest
from model import GPT, GPTConfig

resolve_module = sys.modules["attention.select"]  # attention.select is the function
assert callable(_resolve)

SPEC = Spec(2, 1, 16, "float32")
SHAPE = (3, 96, 96)  # longer than what the probe runs
HERE = Machine.here("cpu", packages())


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
    monkeypatch.setattr(sys.modules["attention.probing"], "profiled", lambda events: nullcontext())
    clock = Clock()
    monkeypatch.setattr(autotune, "perf_counter", clock)
    return clock


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "nanoattn")
    return caplog


def takes(clock: Clock, ms: float, calls: list[tuple[int, ...]] | None = None) -> Attend:
    """A right attend() that lets so much time pass, and notes the shape of q."""

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        clock.now += ms / 1e3
        if calls is not None and q.shape[1] not in (64, 21):  # the probe's
            calls.append(tuple(q.shape))
        return manual.attend(q, k, v, spec, **kw)

    return attend


def only(monkeypatch: pytest.MonkeyPatch, **attends: Attend) -> None:
    """Let these be all backends there are; "sdpa" is what auto takes on the CPU."""
    made = {
        name: Backend(name, "made up", attend, (Caps(),), fallback=None)
        for name, attend in attends.items()
    }
    monkeypatch.setattr(autotune, "BACKENDS", made)
    monkeypatch.setattr(resolve_module, "BACKENDS", made)
    monkeypatch.setattr(resolve_module, "_BY_ANY_NAME", made)


def said(log: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in log.records)


def line(log: pytest.LogCaptureFixture, name: str) -> str:
    """What the table says about a backend."""
    return next(x for x in said(log).splitlines() if x.split()[:1] == [name])


# --- who wins ---


@pytest.mark.parametrize("rival_ms, winner", [
    (10.2, "sdpa"), (10.0, "sdpa"), (9.85, "sdpa"), (9.79, "rival"), (9.7, "rival"), (1.0, "rival"),
])  # fmt: skip
def test_two_percent_unseat_the_rules_choice(rival_ms, winner, clock, monkeypatch, log) -> None:
    only(monkeypatch, rival=takes(clock, rival_ms), sdpa=takes(clock, 10.0))
    chosen = fastest(SPEC, "cpu", SHAPE)
    assert chosen.backend.name == winner and chosen.requested == "fastest"
    assert chosen.rejected == {}
    assert line(log, "rival").split()[1:3] == [f"{rival_ms:.3f}", f"{rival_ms / 10:.3f}"]
    assert line(log, "sdpa").split()[1:3] == ["10.000", "1.000"]
    why = (f"{1 - rival_ms / 10:.1%} less time than auto's sdpa" if winner == "rival" else
           "auto's choice, which no other beats by 2%")  # fmt: skip
    assert f"chosen: {winner} ({why})" in said(log)


def test_the_decision_alone() -> None:
    a, b, gone = Timing("a", 10.0), Timing("b", 9.0), Timing("c", why="it has no window")
    assert decide([a, b, gone], "a") == "b"
    assert decide([a, b, Timing("d", 8.9)], "b") == "b"
    assert decide([b, Timing("a", why="no memory")], "a") == "b"
    assert decide([gone], "c") == "c"


def test_rivals_among_themselves_need_no_margin(clock, monkeypatch) -> None:
    only(monkeypatch, sdpa=takes(clock, 10.0), one=takes(clock, 9.0), two=takes(clock, 8.99))
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "two"


def test_training_counts_the_backward_and_inference_does_not(clock, monkeypatch) -> None:
    def late(ms: float, backward_ms: float) -> Attend:
        attend = takes(clock, ms)

        def passed(grad: Tensor) -> None:
            clock.now += backward_ms / 1e3

        def both(*args: Any, **more: Any) -> Tensor:
            out = attend(*args, **more)
            if out.requires_grad:
                out.register_hook(passed)
            return out

        return both

    only(monkeypatch, sdpa=late(10.0, 10.0), rival=late(5.0, 16.0))
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"
    quick = dataclasses.replace(SPEC, grad=False)
    assert fastest(quick, "cpu", SHAPE).backend.name == "rival"


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
    assert "its numbers are wrong (out is off by " in line(log, "wrong")


@pytest.mark.parametrize("error", [
    RuntimeError("CUDA error: misaligned address\ntrace"), torch.OutOfMemoryError("CUDA out of "
    "memory. Tried to allocate 9 GiB\ntrace"), NotImplementedError()])  # fmt: skip
def test_what_fails_at_the_real_shape_is_dropped_in_its_own_words(error, clock, monkeypatch, log):
    def fails(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        if q.shape[1] == SHAPE[1]:
            raise error
        return manual.attend(q, k, v, spec, **kw)

    only(monkeypatch, sdpa=takes(clock, 10.0), frail=fails)
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"
    words = str(error).splitlines()[0] if str(error) else "NotImplementedError"
    assert line(log, "frail").strip() == f"frail  at this shape: {words}"


def test_where_the_rules_choice_fails_the_best_of_the_others_runs(clock, monkeypatch, log) -> None:
    def fails(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        if q.shape[1] == SHAPE[1]:
            raise torch.OutOfMemoryError("out of memory")
        return manual.attend(q, k, v, spec, **kw)

    only(monkeypatch, sdpa=fails, a=takes(clock, 9.0), b=takes(clock, 7.0))
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "b"
    assert "chosen: b (auto's sdpa could not be measured)" in said(log)


def test_where_nothing_can_be_measured_the_rule_decides_and_nothing_is_remembered(
    clock, monkeypatch, log, cache_folder
):
    def fails(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        if q.shape[1] == SHAPE[1]:
            raise RuntimeError("no")
        return manual.attend(q, k, v, spec, **kw)

    only(monkeypatch, sdpa=fails)
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"
    assert "nothing could be measured; auto's choice" in said(log)
    assert list(cache_folder.iterdir()) == []


def test_what_declares_that_it_cannot_is_not_run(clock, monkeypatch, log) -> None:
    calls: list[tuple[int, ...]] = []
    only(monkeypatch, sdpa=takes(clock, 10.0), idle=takes(clock, 1.0, calls))
    made = autotune.BACKENDS["idle"]
    autotune.BACKENDS["idle"] = dataclasses.replace(made, caps=(Caps(dropout=False),))
    assert fastest(dataclasses.replace(SPEC, dropout=0.25), "cpu", SHAPE).backend.name == "sdpa"
    assert calls == []
    assert line(log, "idle") == "      idle  it has no dropout, and 0.25 is asked (--dropout=0)"


def test_apples_guard_holds() -> None:
    mac, sdpa = Machine("mps", "Apple M3", torch="2.13.0"), resolve_module.BACKENDS["sdpa"]
    assert autotune.refusals(sdpa, SPEC, mac) == (resolve_module.MPS_GUARD,)
    strict = Policy(fallback=False)
    assert autotune.refusals(sdpa, SPEC, mac, strict) == (resolve_module.MPS_GUARD,)
    assert autotune.refusals(sdpa, SPEC, mac, Policy(mps_sdpa=True)) == ()
    paged = dataclasses.replace(SPEC, grad=False, cache="paged", page_size=8)
    assert autotune.refusals(manual.BACKEND, paged, mac) == ("it has no 'paged' cache",)


def test_an_interpreter_is_no_rival(clock, monkeypatch, log) -> None:
    calls: list[tuple[int, ...]] = []
    only(monkeypatch, sdpa=takes(clock, 10.0), slow=takes(clock, 1.0, calls))
    rows = (Caps(("cuda",)), Caps(("cpu",), interpreted=True))
    autotune.BACKENDS["slow"] = dataclasses.replace(autotune.BACKENDS["slow"], caps=rows)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa" and calls == []
    assert line(log, "slow").split(maxsplit=1)[1] == (
        "Triton's interpreter is for tests, not for speed"
    )


def test_what_is_far_too_slow_is_let_go_early(clock, monkeypatch, log) -> None:
    far: list[tuple[int, ...]] = []
    near: list[tuple[int, ...]] = []
    only(monkeypatch, sdpa=takes(clock, 10.0), far=takes(clock, 60.0, far),
         near=takes(clock, 40.0, near))  # fmt: skip
    fastest(SPEC, "cpu", SHAPE)
    assert far == [(3, 96, 2, 16)] * 4
    assert line(log, "far") == "      far   60 ms, 6.0 times the best so far"
    assert len(near) == 4 + 25  # samples, until a second is spent
    assert line(log, "near").split()[1] == "40.000"


def test_a_call_longer_than_the_budget_is_not_repeated_for_nothing(clock, monkeypatch) -> None:
    calls: list[tuple[int, ...]] = []
    only(monkeypatch, sdpa=takes(clock, 4000.0), slow=takes(clock, 8000.0, calls))
    began = clock.now
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"
    assert len(calls) == 2 and clock.now - began < 100  # of which 72 are three calls in each probe


# --- what is measured ---


def test_the_inputs_have_the_strides_that_the_model_gives(monkeypatch) -> None:
    seen: list[list[tuple[int, ...]]] = []

    def notes(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        seen.append([t.stride() for t in (q, k, v)] + [tuple(q.shape), tuple(k.shape)])
        return manual.attend(q, k, v, spec, **kw)

    only(monkeypatch, sdpa=manual.attend, noting=notes)
    config = GPTConfig(n_layer=1, n_head=4, n_kv_head=2, n_embd=32, block_size=48, vocab_size=65,
                       attention_backend="noting")  # fmt: skip
    model = GPT(config)
    model.attention()
    seen.clear()
    model(torch.zeros(3, 48, dtype=torch.int64))
    from_model = seen[-1]
    spec = config.spec("float32")
    inputs = autotune.draw(spec, torch.device("cpu"), (3, 48, 48))
    autotune.work(autotune.BACKENDS["noting"], spec, inputs)()
    assert seen[-1] == from_model


class Noted(torch.autograd.Function):
    """The identity, which counts its backward passes."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Noted.backwards += 1
        return grad


@pytest.mark.parametrize("grad", [True, False])
def test_training_is_timed_with_the_backward_to_the_projection_inference_without(grad) -> None:
    spec = dataclasses.replace(SPEC, grad=grad)
    leaves: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        leaves.append([t.grad_fn and t.grad_fn.name() for t in (q, k, v)])
        assert torch.is_grad_enabled() == grad
        return manual.attend(q, k, Noted.apply(v), spec, **kw)

    inputs = autotune.draw(spec, torch.device("cpu"), SHAPE)
    assert inputs.qkv.requires_grad == grad and inputs.qkv.shape == (3, 96, 4 * 16)
    Noted.backwards = 0
    backend = Backend("b", "", attend, (Caps(),), None)
    with torch.no_grad():  # where the model is asked for evaluation
        autotune.work(backend, spec, inputs)()
    assert Noted.backwards == grad
    assert all((name is not None) == grad for name in leaves[0])  # the views' own nodes
    assert inputs.qkv.grad is None  # asked for by autograd.grad, added up nowhere


def test_the_table_is_of_the_quickest_first_and_of_the_dropped_last() -> None:
    timings = [Timing("a", why="too slow"), Timing("b", 3.0, 1e-7), Timing("c", 2.0, 2e-7),
               Timing("d", 4.0), Timing("e", why="wrong")]  # fmt: skip
    text = autotune.table(timings, "d", "c", SPEC, (2, 64, 64), "here")
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines[2:-1]] == ["c", "b", "d", "a", "e"]
    assert lines[2] == ["c", "2.000", "0.500", "2.0e-07"] and lines[4][1:3] == ["4.000", "1.000"]
    assert lines[-1][:6] == ["chosen:", "c", "(50.0%", "less", "time", "than"]


def test_decoding_is_one_query_against_all_keys(clock, monkeypatch, log) -> None:
    seen: list[Any] = []

    def notes(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        seen.append(tuple(tuple(t.shape) for t in (q, k, v, kw["segments"])))
        clock.now += 1e-3
        return manual.attend(q, k, v, spec, **kw)

    select, shapes = autotune.select, []
    monkeypatch.setattr(autotune, "select", lambda *a, shape: shapes.append(shape) or select(*a))
    only(monkeypatch, sdpa=notes)
    fastest(dataclasses.replace(SPEC, grad=False, segments=True), "cpu", (5, 1, 300))
    assert set(shapes) == {(5, 300)}  # sequences, and tokens of each
    assert ((5, 1, 2, 16), (5, 300, 1, 16), (5, 300, 1, 16), (5, 300)) in seen
    assert "fastest: forward of one attention call, batch 5, 1 queries and 300 keys" in said(log)


@pytest.mark.parametrize("grad", [True, False])
def test_sinks_are_a_parameter_of_the_call(grad) -> None:
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, sinks: Tensor, **kw: Any) -> Tensor:
        seen.append(sinks)
        return manual.attend(q, k, v, spec, sinks=Noted.apply(sinks), **kw)

    spec = dataclasses.replace(SPEC, sinks=True, scale=0.3, softcap=5.0, grad=grad)
    inputs = autotune.draw(spec, torch.device("cpu"), SHAPE)
    Noted.backwards = 0
    autotune.work(Backend("b", "", attend, (Caps(),), None), spec, inputs)()
    assert seen[0].shape == (spec.n_head,) and seen[0].requires_grad == grad
    assert Noted.backwards == grad  # its gradient is timed too
    assert autotune.draw(SPEC, torch.device("cpu"), SHAPE).sinks is None


@pytest.mark.parametrize("cache, Tq", [("none", 9), ("dynamic", 1), ("static", 1), ("paged", 1)])
def test_all_that_is_drawn_has_the_dtype_that_is_asked(cache, Tq) -> None:
    spec = Spec(2, 1, 16, "float16", grad=cache == "none", cache=cache, sinks=True,
                page_size=4 if cache == "paged" else None)  # fmt: skip
    inputs = autotune.draw(spec, torch.device("cpu"), (3, Tq, 9))
    past = inputs.past or ()
    assert len(past) == 2 * (cache != "none") and inputs.sinks is not None
    assert {t.dtype for t in (inputs.qkv, *past, inputs.sinks, inputs.dout)} == {torch.float16}


def test_a_call_is_sampled_for_a_second_in_samples_of_five_milliseconds(monkeypatch) -> None:
    """3 to 100 samples, of 1 to 20 calls each, as many as the first look promised."""
    asked: dict[str, list[int]] = {}

    def seconds(call: Callable[[], Any], device: torch.device, n: int = 1) -> float:
        name, took = call()
        asked.setdefault(name, []).append(n)
        return took

    monkeypatch.setattr(autotune, "seconds", seconds)
    once = {"instant": 1e-5, "quick": 1.6e-3, "slower": 1e-3, "slow": 0.03, "long": 0.4}
    took = once | {"slower": 0.011}
    calls: Any = {name: lambda at=(name, s): at for name, s in took.items()}
    assert autotune.race(calls, once, torch.device("cpu")) == pytest.approx(took)
    assert {name: (len(n), {*n}) for name, n in asked.items()} == {
        "instant": (100, {20}), "quick": (100, {3}), "slower": (19, {5}), "slow": (34, {1}),
        "long": (3, {1})}  # fmt: skip


@pytest.mark.parametrize("times, least", [
    ((9, 0.4, 0.3, 0.5), 0.3), ((9, 0.6, 0.5), 0.5), ((9, 2.0), 2.0)])  # fmt: skip
def test_the_first_look_leaves_out_the_first_call_and_ends_after_a_second(
    times, least, monkeypatch
) -> None:
    left = list(times)
    monkeypatch.setattr(autotune, "seconds", lambda call, device: left.pop(0))
    assert autotune.warmed_up(lambda: None, torch.device("cpu")) == least and left == []


def test_segments_are_two_documents() -> None:
    spec = dataclasses.replace(SPEC, segments=True)
    segments = autotune.draw(spec, torch.device("cpu"), (2, 6, 6)).segments
    assert segments is not None and segments.dtype == torch.int32
    assert segments.tolist() == [[0, 0, 0, 1, 1, 1]] * 2


def test_a_run_that_compiles_is_timed_compiled_each_backend_alone(clock, monkeypatch, log) -> None:
    codes: list[Any] = []
    ran: list[str] = []

    def compile_(f: Any, **options: Any) -> Any:
        assert options == {"dynamic": False}
        codes.append(f.__code__)

        def compiled(*args: Any) -> Any:
            ran.append(f.__code__.co_name)
            return f(*args)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_)
    only(monkeypatch, sdpa=takes(clock, 10.0), other=takes(clock, 5.0))
    assert fastest(dataclasses.replace(SPEC, compiled=True), "cpu", SHAPE).backend.name == "other"
    assert {c.co_name for c in codes} == {"forward_sdpa", "forward_other"} == set(ran)
    assert len({id(c) for c in codes}) == 2  # else one limit on recompilations for all of them
    assert ", compiled, on cpu" in said(log)
    codes.clear()
    fastest(SPEC, "cpu", SHAPE)
    assert codes == []


def test_the_random_state_is_left_alone(clock, monkeypatch) -> None:
    only(monkeypatch, sdpa=takes(clock, 10.0))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fastest(dataclasses.replace(SPEC, dropout=0.5), "cpu", SHAPE)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("cache", ["dynamic", "static", "paged"])
def test_a_cache_is_measured_while_it_holds_all_that_came_before(cache, monkeypatch) -> None:
    """What the call sees and gives is that of plain attention over the same keys."""
    page_size = 8 if cache == "paged" else None
    spec = Spec(4, 2, 16, "float32", grad=False, cache=cache, page_size=page_size)
    name = "paged" if cache == "paged" else "manual"
    got: list[Any] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, cache: Any, **kw: Any) -> Tensor:
        out = real.attend(q, k, v, spec, cache=cache, **kw)
        if page_size:
            pages = cache.page_table.long()
            k, v = (t[pages].flatten(1, 2)[:, :37] for t in (k, v))
        if cache is not None:
            assert (cache.start == 36).all() and (cache.count == 1).all()
        assert k.shape == (3, 37, 2, 16) and k.abs().sum(dim=(0, 2, 3)).min() > 0
        plain = dataclasses.replace(spec, cache="none", page_size=None)
        got.append((q.shape, out, manual.attend(q, k, v, plain)))
        return out

    real = resolve_module.BACKENDS[name]
    inputs = autotune.draw(spec, torch.device("cpu"), (3, 1, 37))
    call = autotune.work(dataclasses.replace(real, attend=noted), spec, inputs)
    call()
    call()  # again, in the same place
    for shape, out, want in got:
        assert shape == (3, 1, 4, 16)
        torch.testing.assert_close(out, want)
    assert len(got) == 2


# --- what is remembered ---


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was measured")


def test_an_answer_is_remembered_and_probed_again(clock, monkeypatch, log, cache_folder) -> None:
    only(monkeypatch, sdpa=takes(clock, 10.0), rival=takes(clock, 5.0))
    first = fastest(SPEC, "cpu", SHAPE)
    (answer,) = (cache_folder / "fastest").iterdir()
    assert answer.read_text() == "rival"
    log.clear()

    measure = autotune.measure
    monkeypatch.setattr(autotune, "measure", never)
    calls: list[tuple[int, ...]] = []
    only(monkeypatch, sdpa=takes(clock, 10.0), rival=takes(clock, 5.0, calls))
    assert fastest(SPEC, "cpu", SHAPE).backend.name == first.backend.name == "rival"
    assert calls == []
    assert said(log) == f"fastest: rival, remembered; delete {answer} to measure again"
    with pytest.raises(AssertionError, match="it was measured"):
        fastest(SPEC, "cpu", (3, 97, 97))

    def broken_now(q: Tensor, *_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(autotune, "measure", measure)
    only(monkeypatch, sdpa=takes(clock, 10.0), rival=broken_now)
    log.clear()
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"
    assert f"{answer} is of no use now (attention backend 'rival' cannot run here" in said(log)
    only(monkeypatch, sdpa=takes(clock, 10.0))
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"  # remembered in its place
    assert list((cache_folder / "fastest").iterdir()) == [answer]


def test_a_name_that_is_gone_is_measured_anew(clock, monkeypatch, log) -> None:
    only(monkeypatch, sdpa=takes(clock, 10.0), rival=takes(clock, 5.0))
    fastest(SPEC, "cpu", SHAPE)
    only(monkeypatch, sdpa=takes(clock, 10.0))
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa"
    assert "is of no use now (unknown attention backend 'rival'" in said(log)


def test_a_remembered_answer_runs_no_file(clock, monkeypatch, log, cache_folder, tmp_path) -> None:
    only(monkeypatch, sdpa=takes(clock, 10.0))
    fastest(SPEC, "cpu", SHAPE)
    (answer,) = (cache_folder / "fastest").iterdir()
    planted, ran = tmp_path / "kernel.py", tmp_path / "ran"
    planted.write_text(f"open({str(ran)!r}, 'w')", encoding="utf-8")
    answer.write_text(str(planted), encoding="utf-8")
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "sdpa" and not ran.exists()
    assert "is of no use now (it names the file" in said(log)
    assert answer.read_text(encoding="utf-8") == "sdpa"  # measured anew


OTHER_SPECS = {
    "n_head": 4, "n_kv_head": 2, "head_dim": 32, "dtype": "float16", "window": 7, "dropout": 0.5,
    "segments": True, "grad": False, "cache": "static", "compiled": True,
    "page_size": 16, "hub_kernels": True, "scale": 0.3, "softcap": 9.0, "sinks": True,
    "lse": True}  # fmt: skip
OTHER_MACHINES = {
    "device": "cuda", "name": "another", "capability": (9, 0), "torch": "9.9", "cuda": "99.9",
    "packages": {"triton": "99"}, "interpreted": not HERE.interpreted,
    "deterministic": True, "matrix_units": not HERE.matrix_units}  # fmt: skip


def key(spec: Spec = SPEC, device: str = "cpu", shape: Any = SHAPE, machine: Machine = HERE,
        policy: Policy = Policy()) -> Path:  # fmt: skip
    """The file of the answer under these conditions."""
    return autotune.answer_file(spec, device, shape, machine, policy)


def test_every_field_of_spec_and_machine_is_part_of_the_key() -> None:
    assert set(OTHER_SPECS) == {f.name for f in dataclasses.fields(Spec)}
    assert set(OTHER_MACHINES) == {f.name for f in dataclasses.fields(Machine)}
    plain = key()
    assert plain == key()
    keys = [plain]
    for name, value in OTHER_SPECS.items():
        changes: dict[str, Any] = {name: value}
        if name == "n_kv_head":
            changes["n_head"] = 4
        if name == "page_size":
            changes["cache"] = "paged"
        keys.append(key(dataclasses.replace(SPEC, **changes)))
    for name, value in OTHER_MACHINES.items():
        there = dataclasses.replace(HERE, **{name: value})
        keys.append(key(machine=there))
    for n in range(3):
        shape = tuple(s + (i == n) for i, s in enumerate(SHAPE))
        keys.append(key(shape=shape))
    assert len(set(keys)) == len(keys)


def test_the_rest_of_the_key(monkeypatch) -> None:
    plain = key()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert key() != plain
    assert key(policy=Policy(mps_sdpa=True)) != plain
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert key() != plain
    monkeypatch.undo()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert key() != plain
    monkeypatch.undo()
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4",
                        raising=False)  # fmt: skip
    assert key() != plain
    monkeypatch.undo()
    before, tf32 = key(device="cuda"), torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not tf32
    try:
        assert key(device="cuda") != before
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def test_an_edited_kernel_is_measured_anew(monkeypatch, tmp_path) -> None:
    (tmp_path / "autotune.py").write_text("")
    (tmp_path / "kernel.py").write_text("a")
    monkeypatch.setattr(autotune, "__file__", str(tmp_path / "autotune.py"))
    seen = {key()}
    (tmp_path / "kernel.py").write_text("b")
    seen.add(key())
    (tmp_path / "more.py").write_text("")
    seen.add(key())
    assert len(seen) == 3


@pytest.mark.parametrize("text", ["", "{", "3", "[1]", '{"a": 1}', "\x00"])
def test_a_broken_file_is_a_warning_and_is_mended(
    text, clock, monkeypatch, log, cache_folder
) -> None:
    only(monkeypatch, sdpa=takes(clock, 10.0), rival=takes(clock, 5.0))
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "rival"
    (path,) = (cache_folder / "fastest").iterdir()
    path.write_text(text)
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "rival"
    warned = [r.getMessage() for r in log.records if r.levelname == "WARNING"]
    assert warned and warned[0].startswith(f"fastest: {path} is of no use now (")
    assert path.read_text() == "rival"


def test_a_file_that_cannot_be_written_is_a_warning(clock, monkeypatch, log, cache_folder) -> None:
    (cache_folder / "file").write_text("")
    monkeypatch.setenv("NANOATTN_CACHE", str(cache_folder / "file"))  # a file, not a folder
    only(monkeypatch, sdpa=takes(clock, 10.0), rival=takes(clock, 5.0))
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "rival"
    assert "cannot be written, so nothing is remembered" in said(log)


def test_where_the_answers_lie(monkeypatch) -> None:
    for name in ("NANOATTN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))
    where = key().parent
    assert where == Path("/home/ann/.cache/nanoattn/fastest")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert key().parent == Path("/fast/nanoattn/fastest")
    monkeypatch.setenv("NANOATTN_CACHE", "/own")
    assert key().parent == Path("/own/fastest")


# --- many processes ---


def pretend_rank(monkeypatch: pytest.MonkeyPatch, rank: int, store: Any) -> None:
    """One of two processes."""
    # PyTorch's own calls, as in the profiler, ask the real torch.distributed.
    fake = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        get_rank=lambda: rank,
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
    )
    monkeypatch.setattr(autotune, "dist", fake)


def test_all_processes_take_what_rank_0_measured(clock, monkeypatch, log) -> None:
    only(monkeypatch, sdpa=takes(clock, 10.0), rival=takes(clock, 5.0))
    store = dist.HashStore()
    pretend_rank(monkeypatch, 0, store)
    assert fastest(SPEC, "cpu", SHAPE).backend.name == "rival"  # and waits for nobody
    assert said(log).count("fastest:") == 1
    log.clear()
    monkeypatch.setattr(autotune, "measure", never)
    monkeypatch.setattr(autotune, "answer_file", never)
    only(monkeypatch, sdpa=takes(clock, 1.0), rival=takes(clock, 5.0))  # faster, for rank 1
    pretend_rank(monkeypatch, 1, store)
    other = fastest(SPEC, "cpu", SHAPE)
    assert (other.backend.name, other.requested, said(log)) == ("rival", "fastest", "")
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError):  # another question has another answer
        fastest(SPEC, "cpu", (3, 97, 97))


def test_nobody_waits_for_a_rank_0_that_failed(clock, monkeypatch) -> None:
    def broken(q: Tensor, *_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel image is available")

    only(monkeypatch, sdpa=broken)
    store = dist.HashStore()
    for rank in (0, 1):
        pretend_rank(monkeypatch, rank, store)
        with pytest.raises(BackendUnavailable):
            fastest(SPEC, "cpu", SHAPE)


def test_the_store_is_where_pytorch_keeps_it() -> None:
    """_get_default_store is not public; here is where a release that moves it is noticed."""
    assert callable(dist.distributed_c10d._get_default_store)


# --- the real ones ---


def test_with_the_real_backends_it_chooses_one_that_runs_here(log, monkeypatch) -> None:
    monkeypatch.setattr(autotune, "BUDGET_S", 0.0)  # three samples each
    chosen = fastest(SPEC, "cpu", (1, 32, 32))
    assert chosen.backend.name in resolve_module.BACKENDS
    rows = {x.split()[0] for x in said(log).splitlines()[2:-1]}
    assert rows == set(resolve_module.BACKENDS)


def keep_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Of the real backends only these."""
    kept = {name: resolve_module.BACKENDS[name] for name in names}
    monkeypatch.setattr(autotune, "BACKENDS", kept)


def test_of_the_real_backends_only_some_can_be_timed(log, monkeypatch) -> None:
    monkeypatch.setattr(autotune, "BUDGET_S", 0.0)
    keep_only(monkeypatch, "manual", "sdpa")
    assert fastest(SPEC, "cpu", (1, 32, 32)).backend.name in ("manual", "sdpa")
    assert {x.split()[0] for x in said(log).splitlines()[2:-1]} == {"manual", "sdpa"}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_cuda(compiled, log) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    spec = Spec(12, 12, 64, "bfloat16", compiled=compiled)
    before = torch.cuda.get_rng_state()
    chosen = fastest(spec, "cuda", (4, 1024, 1024))
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert float(line(log, chosen.backend.name).split()[1]) > 0
    assert torch.cuda.max_memory_allocated() < 2**28  # what the measurement took is given back
    decode = dataclasses.replace(spec, grad=False)
    assert fastest(decode, "cuda", (4, 1, 1024)).requested == "fastest"


@pytest.mark.gpu
def test_on_cuda_what_does_not_fit_is_dropped(log, monkeypatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    keep_only(monkeypatch, "manual", "sdpa")  # tiled would take minutes
    T = 2**17  # manual's scores alone: 16 heads of 2^34 numbers, 512 GiB in half precision
    fastest(Spec(16, 16, 64, "bfloat16", grad=False), "cuda", (1, T, T))
    assert "out of memory" in line(log, "manual")


def test_a_clock_waits_for_the_device_that_works(monkeypatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    for device in ("cpu", "cuda:1", "mps"):
        autotune.synchronize(torch.device(device))
    assert waited == [torch.device("cuda:1"), "mps"]


def test_on_cuda_the_time_is_between_two_events_around_the_calls(monkeypatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.calls = done.count("call")
            done.append("event")

        def elapsed_time(self, end: Event) -> float:
            assert done[-1] == "wait", "the device has not come to the events"
            return 2500.0 * (end.calls - self.calls)  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(autotune, "synchronize", lambda device: done.append("wait"))
    took = autotune.seconds(lambda: done.append("call"), torch.device("cuda"), 3)
    assert took == 2.5 and done == ["wait", "event", *["call"] * 3, "event", "wait"]
