"""A first call chooses its kernel: nothing around it disturbs the choice, or notices it."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import every, few
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attention as flash_attn
from attention import BACKENDS, Spec, select
from attention.machine.apart import apart
from model import GPT, GPTConfig

T, H, D = 9, 4, 16
Q = torch.randn(2, T, H, D, generator=torch.Generator().manual_seed(0))
Function = Callable[[Tensor], Tensor]


def dense(q: Tensor) -> Tensor:
    return flash_attn.flash_attn_func(q, q[:, :, :2], q[:, :, 2:], causal=True)


def windowed(q: Tensor) -> Tensor:
    return flash_attn.flash_attn_func(q, q, q, causal=True, window_size=(2, 0))


def with_lse(q: Tensor) -> Tensor:
    out, L = flash_attn.flash_attn_func(q, q, q, causal=True, return_softmax_lse=True)
    return out * L.detach().transpose(1, 2)[..., None]


def cached(q: Tensor) -> Tensor:
    k, v = (torch.zeros(len(q), 2 * T, H, D, device=q.device, dtype=q.dtype) for _ in range(2))
    return flash_attn.flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=3, causal=True)


def ragged(q: Tensor) -> Tensor:
    ends = torch.tensor([0, 4, T], dtype=torch.int32, device=q.device)
    one = q.flatten(0, 1)[:T]
    return flash_attn.flash_attn_varlen_func(one, one, one, ends, ends, T, T, causal=True)


CALLS: list[Function] = [dense, windowed, with_lse, cached, ragged]


def in_context(enter: Callable[[], Any]) -> Callable[[Function, Tensor], Tensor]:
    def call(f: Function, q: Tensor) -> Tensor:
        with enter():
            return f(q)

    return call


def in_checkpoint(f: Function, q: Tensor) -> Tensor:
    q = q.clone().requires_grad_()
    out: Tensor = checkpoint(f, q, use_reentrant=False)
    if out.requires_grad:
        out.sum().backward()  # runs f again
        assert q.grad is not None and q.grad.isfinite().all()
    return out.detach()


def in_hooks(f: Function, q: Tensor) -> Tensor:
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = f(q.clone().requires_grad_())
    assert all(len(t) <= 64 for t in packed if t.dim() == 4)  # none of the probe's
    return out.detach()


def under_grad(f: Function, q: Tensor) -> Tensor:
    _, out = torch.func.grad(lambda q: ((out := f(q)).sum(), out), has_aux=True)(q)
    return out


def under_vmap(f: Function, q: Tensor) -> Tensor:
    return torch.func.vmap(f)(q[None])[0]


def with_default_device(f: Function, q: Tensor) -> Tensor:
    with torch.device("meta"):
        return f(q)


def with_default_dtype(f: Function, q: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return f(q)
    finally:
        torch.set_default_dtype(torch.float32)


def while_profiled(f: Function, q: Tensor) -> Tensor:
    with torch.profiler.profile() as profile:
        torch.ones(3).exp()
        out = f(q)
        torch.ones(3).tan()
    assert {"aten::exp", "aten::tan"} <= {e.key for e in profile.key_averages()}
    return out


def in_a_graph(f: Function, q: Tensor) -> Tensor:
    if f is ragged:
        return f(q)  # its lengths are read on the host
    torch.compiler.reset()
    compiled: Function = torch.compile(f, fullgraph=True, backend="eager")
    return compiled(q)


SURROUNDINGS = {
    "autocast": in_context(lambda: torch.autocast("cpu", torch.bfloat16)),
    "checkpoint": in_checkpoint,
    "hooks": in_hooks,
    "no_grad": in_context(torch.no_grad),
    "inference": in_context(torch.inference_mode),
    "default device": with_default_device,
    "default dtype": with_default_dtype,
    "profiler": while_profiled,
    "FLOP counter": in_context(lambda: FlopCounterMode(display=False)),
    "func.grad": under_grad,
    "vmap": under_vmap,
    "fullgraph": in_a_graph,
}


@pytest.fixture(autouse=True)
def fresh_choice() -> Any:
    yield
    flash_attn.use()


@cache
def alone(f: Function, name: str) -> Tensor:
    flash_attn.use(name)
    return f(Q)


# The cache's function has no gradients, and the lengths of texts are data.
NO_FUNC = {(f, around) for f in (cached, ragged) for around in ("func.grad", "vmap")}


@pytest.mark.parametrize("f, around", every(2, [
    (f, around) for f in CALLS for around in SURROUNDINGS if (f, around) not in NO_FUNC]),
    ids=lambda v: getattr(v, "__name__", v))
def test_a_first_call_is_the_same_in_all_surroundings(f: Function, around: str) -> None:
    for name in ("auto", "manual", "tiled"):
        if name == "tiled" and (around == "fullgraph" or f is cached):
            continue  # a graph break, and no static cache
        want = alone(f, name)
        flash_attn.use(name)
        state = torch.get_rng_state()
        got = SURROUNDINGS[around](f, Q)
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("f", CALLS, ids=lambda f: f.__name__)
def test_tensors_without_values_give_shapes(f: Function) -> None:
    want = alone(f, "auto")
    flash_attn.use("auto")
    outs = [f(Q.to("meta"))]
    with FakeTensorMode():
        outs.append(f(torch.empty(Q.shape)))
    assert all((out.shape, out.dtype) == (want.shape, want.dtype) for out in outs)


@pytest.mark.parametrize("n_tokens", [5, 300])
@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa", "sdpa_flash"])
def test_segments_of_several_layers_need_no_values(name: str, n_tokens: int) -> None:
    """Under vmap and among fake tensors, though a real call has kept what it found in them."""
    seg = (torch.arange(n_tokens) >= torch.tensor([[[2]], [[n_tokens - 1]]])).int()
    q, spec = torch.randn(2, 1, n_tokens, H, D), Spec(H, H, D, "float32", segments=True)

    def layers(q: Tensor, seg: Tensor) -> Tensor:
        for _ in range(2):
            q = BACKENDS[name].attend(q, q, q, spec, segments=seg)
        return q

    want = torch.stack([layers(*pair) for pair in zip(q, seg)])
    torch.testing.assert_close(torch.vmap(layers)(q, seg), want)
    for mode in (FakeTensorMode(allow_non_fake_inputs=True) for _ in range(2)):
        with mode:
            assert layers(mode.from_tensor(q[0]), seg[0]).shape == want[0].shape
    torch.testing.assert_close(layers(q[0], seg[0]), want[0])


def test_gradients_of_each_text_by_torch_func() -> None:
    """Through the model's loss, of which one target is ignored."""
    model = GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=H, n_embd=D * H))
    idx, targets = torch.randint(16, (2, 3, 8))
    targets[0, 2] = -1
    names, params = zip(*model.named_parameters(), strict=True)

    def loss(params: tuple[Tensor, ...], idx: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(
            model, dict(zip(names, params, strict=True)), (idx[None], targets[None]))[1]
        return found

    detached = tuple(p.detach() for p in params)
    got = torch.vmap(torch.func.grad(loss), (None, 0, 0))(detached, idx, targets)
    for i in range(3):
        want = torch.autograd.grad(loss(params, idx[i], targets[i]), params)
        torch.testing.assert_close([g[i] for g in got], list(want), rtol=1e-4, atol=1e-6)


WAITING = """import threading
from nanoattn import Backend, Caps, flash_attn_func
import torch

def elsewhere(f, *inputs):
    found = []
    thread = threading.Thread(target=lambda: found.append(f(*inputs)))
    thread.start()
    thread.join()
    return found[0]

class Recomputed(torch.autograd.Function):
    forward = staticmethod(lambda ctx, *qkv: (ctx.save_for_backward(*qkv), flash(*qkv))[1])

    @staticmethod
    def backward(ctx, dout):  # a CUDA device has a thread of its own for it
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        return elsewhere(lambda: torch.autograd.grad(Again.apply(*leaves), leaves, dout))

class Again(Recomputed):
    @staticmethod
    def backward(ctx, dout):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, dout)

def flash(*qkv):
    return flash_attn_func(*qkv, causal=True)

def attend(q, k, v, spec, *, segments=None, cache=None):
    return Recomputed.apply(q, k, v) if spec.grad else elsewhere(flash, q, k, v)

CAPS = Caps(dtypes=("float32",), window=False, segments=False, dropout=False)
BACKEND = Backend("waiting", "it waits for another thread", attend, (CAPS,), None)
"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_kernel_that_waits_for_another_threads_choice(tmp_path, monkeypatch) -> None:
    """In its backward pass it gets one; elsewhere it is refused when the patience ends."""
    (tmp_path / "waiting.py").write_text(WAITING)
    monkeypatch.setattr("attention.machine.apart.PATIENCE", 0.2)
    for grad, want in ((True, "waiting"), (False, "sdpa")):
        flash_attn.use("auto")
        spec = Spec(2, 2, 32, "float32", grad=grad)
        assert select(str(tmp_path / "waiting.py"), spec, "cpu").backend.name == want


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_chooses_while_another_thread_does(monkeypatch) -> None:
    monkeypatch.setattr("attention.machine.apart.PATIENCE", 5.0)
    begun, ended = threading.Event(), threading.Event()
    choosing = threading.Thread(target=lambda: apart("cpu", lambda: (begun.set(), ended.wait())))
    choosing.start()
    begun.wait()
    if (child := os.fork()) == 0:
        code = 1
        try:
            code = apart("cpu", lambda: 7)
        finally:
            os._exit(code)
    ended.set()
    choosing.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_one_choice_at_a_time_in_backward_passes_too() -> None:
    """Random numbers go on as if nobody had chosen."""
    at_once, running = [], []

    class Chooses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Tensor:
            def choose() -> None:
                running.append(1)
                time.sleep(0.02)
                at_once.append(len(running))
                running.pop()

            apart("cpu", choose)
            return dout

    def learn() -> None:
        x = torch.randn(3).requires_grad_()
        Chooses.apply(x).sum().backward()

    threads = [threading.Thread(target=learn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [1] * 4


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_takes_texts_of_other_lengths_and_caches() -> None:
    """As outside, by the kernel that was named; what is not mapped keeps its values."""
    k, lengths = torch.randn(8, H, D), torch.tensor([3, 10, 5], dtype=torch.int32)
    ends = (torch.tensor(n, dtype=torch.int32) for n in ([0, 2, 6], [0, 5, 8]))
    texts = partial(flash_attn.flash_attn_varlen_func, k=k, v=k, causal=True, max_seqlen_q=4,
                    max_seqlen_k=5, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends)))
    q, K = torch.randn(6, H, D), torch.randn(3, 10, H, D)
    rows = partial(flash_attn.flash_attn_with_kvcache, k_cache=K, v_cache=K, causal=True,
                   cache_seqlens=lengths)
    for name in ("auto", "sdpa_flash", "tiled"):
        flash_attn.use(name)
        leaf = q.clone().requires_grad_()
        want = torch.autograd.grad(texts(leaf).square().sum(), leaf)[0]
        got = torch.func.grad(lambda q: texts(q).square().sum())(q)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        two = torch.stack([q, 2 * q])
        torch.testing.assert_close(torch.vmap(texts)(two), torch.stack([texts(x) for x in two]))
    flash_attn.use("auto")
    Q = torch.randn(2, 3, 1, H, D)
    torch.testing.assert_close(torch.vmap(rows)(Q), torch.stack([rows(x) for x in Q]))
    torch.testing.assert_close(torch.func.vjp(rows, Q[0])[0], rows(Q[0]))


def test_wrapper_tensors_keep_their_kind_and_gradients() -> None:
    for name, window in (("tiled", (-1, -1)), ("sdpa_flash", (2, 0)), ("auto", (-1, -1))):
        flash_attn.use(name)
        found = []
        for x in (Q.clone().requires_grad_(), TwoTensor(Q, Q).requires_grad_()):
            out = flash_attn.flash_attn_func(x, x, x, causal=True, window_size=window)
            assert type(out) is type(x)
            found.append(torch.autograd.grad(out.square().sum(), x)[0])
        torch.testing.assert_close(found[1].a, found[0])


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_a_call(mode: str) -> None:
    torch.testing.assert_close(make_fx(windowed, tracing_mode=mode)(Q)(Q), windowed(Q))


@pytest.mark.filterwarnings("ignore")  # of the tracer, which Python's numbers leave
def test_jit_trace_records_a_call() -> None:
    for q in (Q, torch.randn(1, 2000, 1, 8)):
        traced = torch.jit.trace(windowed, q, check_trace=False)
        torch.testing.assert_close(traced(q), windowed(q))


def test_threads_choose_once_and_get_the_same() -> None:
    q = torch.randn(2, 300, H, D)
    want = windowed(q)
    flash_attn.use("auto")
    outs: list[Tensor] = []
    threads = [threading.Thread(target=lambda: outs.append(windowed(q))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 6 and all(torch.equal(out, want) for out in outs)


def test_a_planned_model_is_copied_pickled_moved_and_exported() -> None:
    model = GPT(GPTConfig(32, 64, 2, 2, n_embd=16, attention_window=(None, 8))).eval()
    idx = torch.arange(10)[None]
    model.plan(grad=False)
    want = model(idx)[0]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(idx)[0], want)
    rows = {"idx": {0: torch.export.Dim("rows", max=8)}}
    exported = torch.export.export(model, (idx.repeat(3, 1),), dynamic_shapes=rows).module()
    whole = torch.compile(model, fullgraph=True, backend="eager")
    for call in (exported, whole):
        torch.testing.assert_close(call(idx)[0], want)
    torch.testing.assert_close(model.double()(idx)[0].float(), want)
    assert model.to("meta")(idx.to("meta"))[0].shape == want.shape


KERNEL = """
import os
from nanoattn import BACKENDS, Backend, Caps
{}
def attend(q, k, v, spec, *, segments=None, cache=None):
    {}
    return BACKENDS["manual"].attend(q, k, v, spec, segments=segments)
BACKEND = Backend("mine", "mine", attend, (Caps(),), fallback="tiled")
"""
FAILS = "if os.environ.get('RANK') == '1': raise RuntimeError('no kernel image')"
RUN = """
import logging, os, sys
from core.distributed import DistInfo
from model import GPT, GPTConfig
from attention import BackendUnavailable, Policy
logging.basicConfig(format="%(message)s")
ranks = DistInfo.join("cpu")
for fallback in (True, False):
    config = GPTConfig(32, 64, 1, 2, n_embd=16, attention_backend=sys.argv[1])
    try:
        plan = GPT(config, Policy(fallback=fallback)).plan(2, ranks)
        took = plan[0].chosen.backend.name
    except BackendUnavailable as e:
        took = f"refused: {e}"
    for rank, name in enumerate(ranks.gather(took)):
        ranks.say(f"rank {rank} took {name}")
ranks.gather(None)
os._exit(0)  # gloo's threads may crash a process that leaves them
"""


@pytest.mark.parametrize("broken, instead", [
    (("", FAILS), "tiled"), ((FAILS, ""), "sdpa")])
@pytest.mark.slow
def test_ranks_take_the_first_kernel_that_each_accepts(
    tmp_path: Path, broken: tuple[str, str], instead: str
) -> None:
    """A kernel file that fails on rank 1, when it is called and when it is loaded."""
    file, script = tmp_path / "mine.py", tmp_path / "run.py"
    file.write_text(KERNEL.format(*broken))
    script.write_text(RUN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), str(file)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"rank 0 took {instead}", f"rank 1 took {instead}"]
    assert all("refused" in line and "no kernel image" in line for line in lines[2:])
    assert done.stderr.count("rank 1:") == 1 and "no kernel image" in done.stderr


def test_the_kernels_of_this_machine_are_named() -> None:
    """Also while somebody else profiles."""
    spec = flash_attn.Spec(2, 2, 16, "float32")
    with torch.profiler.profile():
        inside = flash_attn.select("sdpa", spec, "cpu")
    assert inside.backend is BACKENDS["sdpa"] and inside.kernels == ("flash (CPU)",)


@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa", "sdpa_flash", "sdpa_bmm"])
def test_an_exported_kernel_takes_any_batch(name: str) -> None:
    spec = flash_attn.Spec(2, 2, 8, "bfloat16" if name == "sdpa_bmm" else "float32", window=3)

    class Attend(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return BACKENDS[name].attend(q, q, q, spec)

    nine, five = (torch.randn(B, 7, 2, 8).to(getattr(torch, spec.dtype)) for B in (9, 5))
    free = ({0: torch.export.Dim("rows", min=2, max=99)},)
    exported = torch.export.export(Attend(), (nine,), dynamic_shapes=free).module()
    torch.testing.assert_close(exported(five), Attend()(five))


def test_an_exported_call_takes_any_batch_and_total() -> None:
    class Varlen(torch.nn.Module):
        def forward(self, q: Tensor, ends: Tensor) -> Tensor:
            return flash_attn.flash_attn_varlen_func(q, q, q, ends, ends, 9, 9, causal=True)

    class Dense(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flash_attn.flash_attn_func(q, q, q, window_size=(3, 1))

    def ends(*at: int) -> tuple[Tensor]:
        return (torch.tensor(at, dtype=torch.int32),)

    for module, shape, more, other in (
        (Dense(), (7, 2, 8), ((), ()), 5), (Varlen(), (2, 8), (ends(0, 4, 9), ends(0, 2, 5)), 5)
    ):
        first, second = ((torch.randn(n, *shape), *m) for n, m in zip((9, other), more))
        free = ({0: torch.export.Dim("rows", min=2, max=99)}, *({} for _ in more[0]))
        exported = torch.export.export(module, first, dynamic_shapes=free).module()
        torch.testing.assert_close(exported(*second), module(*second))


@pytest.mark.parametrize("dynamic", few([None, True]))
def test_a_graph_takes_numbers_that_change(dynamic) -> None:
    """torch.compile makes a symbol of a float's second value, or of the first."""
    call = partial(flash_attn.flash_attn_func, causal=True)
    torch.compiler.reset()
    compiled: Function = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="eager")
    for scale, softcap in ((0.3, 0.0), (0.5, 0.0), (0.7, 2.0), (0.9, 5.0)):
        options = {"softmax_scale": scale, "softcap": softcap}
        torch.testing.assert_close(compiled(Q, Q, Q, **options), call(Q, Q, Q, **options))
