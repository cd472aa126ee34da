"""Plans: one for each kind of call, in a trace, in any surroundings, on all ranks, by a clock."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import kernels
import processes
import pytest
import torch
from checkout import python
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attention as fa
from attention import BACKENDS, Backend, BackendUnavailable, Caps, Plans, Policy, Spec, manual
from attention.machine import timing
from core.parallel import DistInfo
from model import GPT, GPTConfig

SELECT = sys.modules["attention.select"]  # attention.select is the function
T, H, D = 9, 4, 16
Q = torch.randn(2, T, H, D, generator=torch.Generator().manual_seed(0))
IDX = torch.arange(10)[None]
TINY = GPTConfig(32, 64, 2, 2, n_embd=16)
Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    SELECT._once.cache_clear()
    yield
    fa.use()
    torch.compiler.reset()


# --- kinds ---


def test_random_numbers_make_few_plans(tmp_path: Path) -> None:
    """A proof a kind, and once a long one if a call is long."""
    mine, draw, longer = kernels.Recorder(), torch.Generator().manual_seed(0), set[str]()
    plans = Plans(kernels.as_file(tmp_path, mine))
    for a, b, c, d, n, *on in torch.rand(400, 9, generator=draw).tolist():
        spec = Spec(H, H, D, "float32", int(1 + 400 * a) if on[0] < 0.5 else None,
                    b if on[1] < 0.5 else int(16 * b) / 16, grad=False,
                    scale=0.1 + c if on[2] < 0.5 else None, softcap=1 + 50 * d if d < 0.5 else None)
        assert plans.choose(spec, "cpu", (1, 1, int(1 + 400 * n))).backend.name == "mine"
        longer |= {spec.kind} if n > 256 / 400 else set()
    long = sum(Tk > 256 for _, _, Tk, _ in mine.shapes)
    assert len(plans.chosen) <= 64 and long == len(longer)
    assert len(mine.shapes) - long <= 20 * len(plans.chosen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", ["function", "GPT", "planned GPT"])
def test_deterministic_algorithms_make_another_plan(which: str, tmp_path: Path) -> None:
    """A nondeterministic kernel does not run."""
    mine, leaf = kernels.Recorder(), Q.clone().requires_grad_()
    file = kernels.as_file(tmp_path, mine, caps=replace(kernels.CAPS, deterministic=False))
    model = GPT(replace(TINY, attention_backend=file))
    fa.use(file)
    if which == "planned GPT":
        model.plan()
    for on in (False, True, False, True):
        torch.use_deterministic_algorithms(on)
        mine.shapes.clear()
        fa.flash_attn_func(leaf, leaf, leaf) if which == "function" else model(IDX, IDX)
        assert bool(mine.shapes) is not on


# --- in a trace ---


def test_a_trace_runs_nothing_and_says_that_it_proves_nothing(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO, "nanoattn")
    mine = kernels.Recorder()
    model = GPT(replace(TINY, attention_backend=kernels.as_file(tmp_path, mine))).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        first, second = compiled(IDX)[0], compiled(IDX)[0]
        assert mine.shapes == [] and torch.equal(first, second)
        [said] = [r.getMessage() for r in caplog.records]
        assert "mine" in said and "not proved" in said
        model.plan(compiled=True, grad=False)
        assert mine.shapes and torch.equal(compiled(IDX)[0], first)
    assert "not proved" not in caplog.records[1].getMessage()


@pytest.mark.parametrize("order, fallback", [
    ("trace, plan", True), ("trace, plan, other shape", True), ("plan, trace", True),
    ("trace, plan", False)])
def test_what_a_plan_refuses_no_trace_takes_or_goes_on_with(order, fallback, tmp_path) -> None:
    file = kernels.as_file(tmp_path, lambda q, k, v, spec, **o: manual.attend(q, k, 2 * v, spec))
    model = GPT(replace(TINY, attention_backend=file), Policy(fallback=fallback)).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    idx = IDX[:, :7] if "shape" in order else IDX
    with torch.no_grad():
        wrong = compiled(IDX)[0][:, -1:] if order.startswith("trace") else None
        with nullcontext() if fallback else pytest.raises(BackendUnavailable, match="out"):
            model.plan(compiled=wrong is not None, grad=False)
        if not fallback:
            with pytest.raises(Exception, match="out"):
                compiled(idx)
            return
        right = GPT(replace(TINY, attention_backend="manual")).eval()
        right.load_state_dict(model.state_dict())
        torch.testing.assert_close(compiled(idx)[0], right(idx)[0])
        assert wrong is None or not torch.allclose(wrong, right(IDX)[0])


COMPILED = """
import torch, attention as fa
from model import GPT, GPTConfig
q = torch.randn(1, 16, 2, 16)
for name in ("flex", "fastest", "auto"):
    model = GPT(GPTConfig(32, 64, 1, 2, 32, attention_backend=name)).eval()
    with torch.no_grad():
        torch.compile(model, backend="eager")(torch.randint(64, (1, 16)))
    fa.use(name)
    torch.compile(fa.flash_attn_func, backend="eager")(q, q, q, causal=True)
print("returned")
"""


@pytest.mark.slow
@pytest.mark.ci
def test_a_compiled_call_without_a_plan_returns() -> None:
    """flex and fastest compile, for which a thread of the choice would wait."""
    done = python("-c", COMPILED, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["returned"], done.stderr


# --- a late plan ---


def dense(q: Tensor) -> Tensor:
    out, L = fa.flash_attn_func(
        q, q[:, :, :2], q[:, :, 2:], causal=True, window_size=(2, 0), return_softmax_lse=True)
    return out * L.detach().transpose(1, 2)[..., None]


def cached(q: Tensor) -> Tensor:
    k, v = (torch.zeros(len(q), 2 * T, H, D, device=q.device, dtype=q.dtype) for _ in range(2))
    return fa.flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=3, causal=True)


def ragged(q: Tensor) -> Tensor:
    ends = torch.tensor([0, 4, T], dtype=torch.int32, device=q.device)
    one = q.flatten(0, 1)[:T]
    return fa.flash_attn_varlen_func(one, one, one, ends, ends, T, T, causal=True)


def in_checkpoint(f: Function, q: Tensor) -> Tensor:
    """Also in backward, under hooks of saved tensors."""
    if f is cached:
        return f(q)  # without gradients
    q, packed = q.clone().requires_grad_(), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        out: Tensor = checkpoint(f, q, use_reentrant=True)
    fa.use()  # which forgets all plans
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
    assert all(len(t) <= 64 for t in packed if t.dim() == 4)  # none of the probe's
    return out.detach()


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "no_grad": torch.no_grad,
    "default device": lambda: torch.device("meta"), "inference": torch.inference_mode,
    "default dtype": lambda: kernels.default_dtype(torch.float64),
    "FLOP counter": lambda: FlopCounterMode(display=False), "profiler": torch.profiler.profile,
    "checkpoint": nullcontext}


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("f", [dense, cached, ragged])
def test_a_first_call_is_the_same_in_all_surroundings(f: Function, around: str) -> None:
    call = partial(in_checkpoint, f) if around == "checkpoint" else f
    for name in ("auto", "manual" if f is cached else "tiled"):
        fa.use(name)
        want = f(Q)
        fa.use(name)  # which forgets all plans
        state = torch.get_rng_state()
        with SURROUNDINGS[around]():
            got = call(Q)
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore")  # of the tracer, which Python's numbers leave
def test_tracers_record_a_first_call() -> None:
    def total(q: Tensor) -> tuple[Tensor, Tensor]:
        out = dense(q)
        return out.sum(), out

    for trace in (lambda: torch.jit.trace(dense, Q, check_trace=False)(Q),
                  *(partial(lambda mode: make_fx(dense, tracing_mode=mode)(Q)(Q), mode)
                    for mode in ("real", "fake", "symbolic")),
                  lambda: torch.func.grad(total, has_aux=True)(Q)[1],
                  lambda: torch.compile(dense, fullgraph=True, backend="eager")(Q)):
        fa.use()
        torch.testing.assert_close(trace(), dense(Q))


def test_a_planned_model_is_copied_pickled_moved_and_exported() -> None:
    model, file = GPT(replace(TINY, attention_window=(None, 8))).eval(), io.BytesIO()
    model.plan(grad=False)
    want = model(IDX)[0]
    torch.save(model, file)
    file.seek(0)
    rows = {"idx": {0: torch.export.Dim("rows", max=8)}}
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False),
                  torch.export.export(model, (IDX.repeat(3, 1),), dynamic_shapes=rows).module(),
                  torch.compile(model, fullgraph=True, backend="eager")):
        torch.testing.assert_close(other(IDX)[0], want)
    torch.testing.assert_close(model.double()(IDX)[0].float(), want)
    assert model.to("meta")(IDX.to("meta"))[0].shape == want.shape


# --- threads, Ctrl-C ---


def test_threads_choose_once_and_get_the_same(tmp_path: Path) -> None:
    """No more kernel runs than in one thread, plus one a call."""
    counts, outs = [], list[Tensor]()
    for n in (1, 6):
        mine = kernels.Recorder()
        fa.use(kernels.as_file(tmp_path, mine))
        with ThreadPoolExecutor(n) as pool:
            outs += pool.map(lambda _: fa.flash_attn_func(Q, Q, Q), range(n))
        counts.append(len(mine.shapes) - n)
    assert counts[0] == counts[1] > 0 and len(outs) == 7
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_after_ctrl_c_in_a_choice_the_next_one_goes_on(tmp_path: Path) -> None:
    begun, end = threading.Event(), threading.Event()

    def waits(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **more: Any) -> Tensor:
        if not begun.is_set():
            begun.set()
            end.wait(60)
        return manual.attend(q, k, v, spec, **more)

    fa.use(kernels.as_file(tmp_path, waits))
    # Python's own handler: a command that another test ran in this process has set its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=lambda: (begun.wait(), os.kill(os.getpid(), signal.SIGINT))).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fa.flash_attn_func(Q, Q, Q)
    finally:
        signal.signal(signal.SIGINT, before)
    fa.use("manual")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(dense, Q).result(30)
    end.set()
    assert torch.equal(found, dense(Q))


# --- ranks ---


KERNEL = """
import os
from nanoattn import Backend, Caps, manual
{}
def attend(*args, **options):
    {}
    return manual.attend(*args, **options)
BACKEND = Backend("mine", "mine", attend, (Caps(),), fallback="tiled")
"""
FAILS = ((True, 1, True), (True, 1, False), (False, 1, True), (False, 0, True))


def on_rank(rank: int, n: int, folder: Path) -> list[tuple[str, list[str]]]:
    """What ran, and the warnings."""
    found, handler = [], BufferingHandler(1000)
    handler.setLevel(logging.WARNING)
    logging.getLogger("nanoattn").addHandler(handler)
    os.environ["RANK"] = str(rank)
    ranks = DistInfo(torch.device("cpu"), rank, n, torch.distributed.group.WORLD)
    for number, (_, _, fallback) in enumerate(FAILS):
        config = replace(TINY, attention_backend=str(folder / f"mine{number}.py"))
        handler.buffer.clear()
        try:
            ran = GPT(config, Policy(fallback=fallback)).plan(2, ranks)[0].chosen.backend.name
        except BackendUnavailable as e:
            ran = f"refused: {e}"
        found.append((ran, [record.getMessage() for record in handler.buffer]))
    return found


def test_ranks_take_the_first_kernel_that_each_accepts(tmp_path) -> None:
    """Rank 0 warns and names a file that fails on one rank, when it loads or runs."""
    for number, (loads, rank, _) in enumerate(FAILS):
        fails = f"if os.environ['RANK'] == '{rank}': raise RuntimeError('no kernel image')"
        code = KERNEL.format(*(("", fails) if loads else (fails, "")))
        (tmp_path / f"mine{number}.py").write_text(code)
    first, second = processes.run(on_rank, 2, tmp_path)
    for (_, rank, fallback), (name, said), (other, silent) in zip(FAILS, first, second):
        if fallback:
            assert name == other == "tiled" and silent == []
            assert len(said) == 1 and f"rank {rank}" in said[0] and "no kernel image" in said[0]
        else:
            assert all("refused" in ran and "no kernel image" in ran for ran in (name, other))


# --- fastest ---

SPEC, SHAPE = Spec(2, 1, 16, "float32"), (3, 96, 96)


class Clock:
    """Set by kernels; auto's is "sdpa"."""

    now, calls = 0.0, 0

    def fastest(self, spec: Spec = SPEC, shape: Any = SHAPE, ranks: Any = None,
                **ms: float | Exception) -> str:
        """The backends, if given, take so many ms, or raise at SHAPE."""
        for known in (BACKENDS, fa.names._BY_ANY_NAME) if ms else ():
            known.clear()
            for name, of in ms.items():
                known[name] = Backend(name, "", partial(self.attend, of), (Caps(),), None)
        self.calls = 0
        chosen = fa.fastest(spec, "cpu", shape, ranks=ranks)
        assert chosen.requested == "fastest" and chosen.rejected == {}
        return chosen.backend.name

    def attend(self, of: Any, q: Tensor, k: Tensor, v: Tensor, spec: Spec, **more: Any) -> Tensor:
        timed = len(q) == SHAPE[0]  # the probe has two sequences
        self.calls += timed
        if isinstance(of, Exception) and (timed or isinstance(of, ValueError)):
            raise of
        self.now += of / 1e3 if timed else 0
        return manual.attend(q, k, v, spec, **more)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setenv("NANOATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(timing, "perf_counter", lambda: clock.now)
    monkeypatch.setattr("attention.proof.profiled", lambda events: nullcontext())
    monkeypatch.setattr("attention.machine.system.bfloat16_units", lambda: "")
    monkeypatch.setitem(SELECT.PREFERENCE, "cpu", ("sdpa",))
    caplog.set_level(logging.INFO, "nanoattn")
    with patch.dict(BACKENDS), patch.dict(fa.names._BY_ANY_NAME):
        yield clock


@pytest.mark.parametrize("rival, winner", [
    (1020.0, "sdpa"), (985.0, "sdpa"), (979.0, "rival"), (100.0, "rival"),
    (MemoryError("9 GiB"), "sdpa"), (ValueError("no kernel image"), "sdpa")])
def test_two_percent_unseat_autos_choice(rival, winner, clock, caplog) -> None:
    """Failures are dropped with a reason."""
    assert clock.fastest(rival=rival, sdpa=1000.0) == winner
    [row] = [x for x in caplog.text.splitlines() if x.split()[:1] == ["rival"]]
    assert (f"{rival:.3f}" if isinstance(rival, float) else str(rival)) in row


def test_a_measured_name_is_remembered_and_proved_again(clock, tmp_path, caplog) -> None:
    """By kind, shape and machine."""
    assert clock.fastest(sdpa=RuntimeError("no")) == "sdpa" and not [*tmp_path.iterdir()]
    assert clock.fastest(sdpa=1000.0, rival=500.0) == "rival"
    assert clock.fastest(sdpa=100.0, rival=500.0) == "rival" and not clock.calls
    assert clock.fastest(shape=(3, 97, 97)) == "sdpa"
    for window in (9, 8):  # one kind
        assert clock.fastest(replace(SPEC, window=window)) == "sdpa"
        assert bool(clock.calls) == (window == 9)
    assert clock.fastest(sdpa=1000.0, rival=ValueError("no kernel image")) == "sdpa"
    assert "no kernel image" in caplog.text
    [file] = tmp_path.iterdir()
    names = json.loads(file.read_text())
    for damaged in ("cut sho", "[" * 100_000, json.dumps({key: ["x"] for key in names}), "[1]"):
        file.write_text(damaged)
        assert clock.fastest() == "sdpa" and "sdpa" in file.read_text()


def test_all_processes_take_what_rank_0_measured(clock) -> None:
    gather = lambda value: ["rival" if value == "auto" else value, value]  # noqa: E731
    ranks = SimpleNamespace(rank=1, gather=gather)
    assert clock.fastest(ranks=ranks, sdpa=100.0, rival=500.0) == "rival" and not clock.calls
