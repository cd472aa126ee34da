"""The model against transformers' GPT-2, itself in float64, token by token."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import few
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Largest
from torch import Tensor

import checkpoint
from attention import BACKENDS, BackendUnavailable, Machine, Policy
from core import loss as loss_module
from core.cpu import matmul as cpu_matmul
from core.loss import IGNORE, linear_cross_entropy
from core.settings import UserError
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("remembered_probes")

TINY = GPTConfig(block_size=16, vocab_size=37, n_layer=2, n_head=4, n_embd=32)


def tokens(B: int = 2, T: int = 16, vocab_size: int = 37, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def build(scale: float = 5.0, attention_fallback: bool = True, **changes: Any) -> GPT:
    """TINY with changes, its weights away from 0 and 1."""
    torch.manual_seed(1)
    model = GPT(replace(TINY, **changes), Policy(fallback=attention_fallback))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * scale * torch.randn(p.shape)
    return model


def gradients(model: GPT, idx: Tensor, targets: Tensor, segments: Tensor | None = None
              ) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(0)
    _, loss = model(idx, targets, segments)
    assert loss is not None
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_within(got: Tensor, plain: Tensor, truth: Tensor, dtype: torch.dtype, m: int,
                  roundings: int = 1) -> None:
    """m times plain PyTorch's error, and some roundings."""
    assert got.shape == truth.shape
    if not truth.numel():
        return
    got, plain, truth = (t.detach().double() for t in (got, plain, truth))
    assert got.isfinite().all() and plain.isfinite().all()
    error = float((got - truth).abs().max())
    allowed = m * float((plain - truth).abs().max())
    allowed += roundings * torch.finfo(dtype).eps * float(truth.abs().max())
    assert error <= allowed, f"off by {error:.3g}, allowed is {allowed:.3g}"


def test_the_initial_weights() -> None:
    torch.manual_seed(0)
    model = GPT(replace(TINY, n_layer=8, n_embd=128))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif p.dim() == 1:
            assert (p == 1).all(), name
        else:
            want = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert float(p.detach().std()) == pytest.approx(want, rel=0.06), name
    _, loss = model(tokens(), tokens(seed=1))
    assert float(loss.detach()) == pytest.approx(math.log(37), abs=0.15)


# --- GPT-2 as transformers has it ---


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        module = pytest.importorskip("transformers")
        module.logging.set_verbosity_error()
        module.logging.disable_progress_bar()
        yield module


def theirs(transformers: Any, folder: Path, **changes: Any) -> Any:
    """A saved GPT2LMHeadModel, biases and norms random too."""
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=None,
        eos_token_id=None, attn_implementation="eager", **changes)
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("gelu, ours", [("gelu_new", "tanh"), ("gelu", "exact")])
def test_logits_and_gradients_of_gpt2lmheadmodel(gelu, ours, transformers, tmp_path) -> None:
    them = theirs(transformers, tmp_path, activation_function=gelu)
    us = GPT.from_pretrained(str(tmp_path))
    assert us.config == replace(TINY, gelu=ours)
    idx = tokens()
    out = them(idx, labels=idx)
    logits, none = us(idx)
    assert none is None
    torch.testing.assert_close(logits, out.logits, rtol=0, atol=1e-4)
    out.loss.backward()
    targets = torch.cat([idx[:, 1:], torch.full((2, 1), IGNORE)], dim=1)  # they shift, we do not
    loss, grads = gradients(us, idx, targets)
    torch.testing.assert_close(loss, out.loss, rtol=0, atol=1e-5)
    wanted = {n: p.grad.t() if checkpoint.families.is_conv1d(n) else p.grad
              for n, p in them.named_parameters()}
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)

    short = GPT.from_pretrained(str(tmp_path), block_size=5, dropout=0.1).eval()
    assert (short.config.block_size, short.config.dropout) == (5, 0.1)
    wpe = short.transformer.wpe.weight
    assert wpe.requires_grad and len(wpe) == 5
    torch.testing.assert_close(short(idx[:, :5])[0], logits[:, :5], rtol=0, atol=1e-4)
    short.crop_block_size(4)
    torch.testing.assert_close(short(idx[:, :4])[0], logits[:, :4], rtol=0, atol=1e-4)
    for bad in (0, 5):
        with pytest.raises(ValueError, match=f"got {bad}"):
            short.crop_block_size(bad)
    with pytest.raises(ValueError, match=r"5 .*4"):
        short(idx[:, :5])
    with pytest.raises(UserError, match="17"):
        GPT.from_pretrained(str(tmp_path), block_size=17)


# --- the loss ---


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets, ignore_index=IGNORE)


def loss_and_gradients(loss: Callable[..., Tensor], x: Tensor, weight: Tensor, targets: Tensor,
                       factor: float = 1.0) -> list[Tensor]:
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    value = loss(x, weight, targets)
    return [value.detach(), *torch.autograd.grad(value * factor, (x, weight))]


@settings(max_examples=150, deadline=None)
@given(rows=st.integers(1, 64), N=st.integers(0, 60), V=st.integers(9, 91),
       factor=st.sampled_from([1.0, 3.0, 65536.0]), first=st.sampled_from([0, 0, 60]),
       keep=st.sampled_from([1, 3, 100]),
       dtype=st.sampled_from(["float32", "bfloat16", "float16", "pure bfloat16", "bfloat16 x"]))
def test_linear_cross_entropy(rows, N, V, factor, first, keep, dtype) -> None:
    """Chunks of any number of rows. Half precision is autocast's, except "pure"; 65536 is
    GradScaler's start; all targets may be ignored: NaN, with zero gradients, as in PyTorch."""
    low = getattr(torch, dtype.removeprefix("pure ").removesuffix(" x"))
    x, w = (torch.randn(n, 24).to(low).float() for n in (N, V))
    targets = torch.full((N,), IGNORE)
    targets[first::keep] = torch.randint(V, targets[first::keep].shape)
    truth = loss_and_gradients(cross_entropy, x.double(), w.double(), targets, factor)
    x = x.bfloat16() if " " in dtype else x
    w = w.bfloat16() if dtype == "pure bfloat16" else w
    with pytest.MonkeyPatch.context() as patch:  # the caches of a CPU hold so many
        patch.setattr(loss_module, "chunk_rows", lambda N, V, *about: rows)
        with torch.autocast("cpu", dtype=low, enabled=dtype not in ("float32", "pure bfloat16")):
            plain = loss_and_gradients(cross_entropy, x, w, targets, factor)
            got = loss_and_gradients(linear_cross_entropy, x, w, targets, factor)
    assert got[0].dtype == torch.float32 and got[0].shape == ()
    for name, m, g, p, t in zip(("loss", "dx", "dw"), (2, 3, 3), got, plain, truth, strict=True):
        assert g.dtype == p.dtype or name == "loss"
        if t.isnan().any():
            torch.testing.assert_close(g.double(), t, equal_nan=True)
        elif p.isfinite().all():
            assert_within(g, p, t, low, m, 4)
        else:  # more than float16 has; GradScaler would take a smaller factor, ours does no harm
            assert dtype == "float16" and factor == 65536
            torch.testing.assert_close(g.double(), t, rtol=2e-2, atol=1e-3 * float(t.abs().max()))


HARD: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]] = {
    # bfloat16 holds 8 bits of a sum.
    "many terms": lambda: (torch.randn(600, 24) + 1, torch.randn(5, 24) + 1, torch.zeros(600)),
    # 150,000; float16 ends at 65504.
    "large sum": lambda: (torch.full((10_000, 2), 30.0), torch.zeros(2, 2), torch.zeros(10_000)),
    # Every p / N is 2e-7, near the least of float16, 6e-8.
    "small terms": lambda: (
        torch.randn(96, 8), 0.02 * torch.randn(50304, 8), torch.randint(50304, (96,)))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", HARD)
def test_sums_keep_the_digits_and_range_of_float32(kind, dtype, monkeypatch) -> None:
    """Inputs that half precision holds, and a sum or product that it does not."""
    pure, (x, w, targets) = kind == "many terms", HARD[kind]()
    x, w, targets = x.to(dtype), w.to(dtype), targets.long()
    if pure:
        monkeypatch.setattr(loss_module, "chunk_rows", lambda N, V, *about: 2)
    truth = loss_and_gradients(cross_entropy, x.double(), w.double(), targets)
    x, w = (x, w) if pure else (x.float(), w.float())
    with torch.autocast("cpu", dtype=dtype, enabled=not pure):
        got = loss_and_gradients(linear_cross_entropy, x, w, targets)
    never = torch.ones(len(w), dtype=torch.bool).index_fill(0, targets, False)
    for g, t in (*zip(got, truth, strict=True), (got[2][never], truth[2][never])):
        room = 1e-3 if t.dim() == 0 else 1e-2 if dtype == torch.bfloat16 else 2e-3
        assert (g.double() - t).norm() <= room * t.norm()


@pytest.mark.parametrize("f", [
    lambda x, w: linear_cross_entropy(x, w, torch.arange(6)),
    lambda x, w: cpu_matmul.linear(x, w, w[:, 0]).pow(2).sum()])
def test_a_second_derivative_is_refused_rather_than_wrong(f) -> None:
    """Also where another path (x * x) hides it."""
    leaves = [torch.randn(n, 7, requires_grad=True) for n in (6, 9)]
    for leaf in leaves:
        grad, = torch.autograd.grad(f(*(t * t for t in leaves)), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(grad.sum(), leaves)


def test_the_loss_refuses_a_second_backward_and_too_many_targets() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    loss = linear_cross_entropy(x, torch.eye(9, 4), torch.arange(6))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    with pytest.raises(RuntimeError, match="input of size 7"):
        linear_cross_entropy(x, torch.eye(9, 4), torch.arange(7))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_logits_of_the_whole_batch_never_exist(dtype, monkeypatch) -> None:
    rows, V = 5, 1000
    monkeypatch.setattr(loss_module, "chunk_rows", lambda N, V, *about: rows)
    model, idx = GPT(GPTConfig(16, V, 1, 1, 4, attention_backend="sdpa")), tokens(4, 16, V)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        model(idx, idx)
        with Largest() as seen:
            model(idx, idx)[1].backward()
    assert seen.numbers == rows * V  # and V * C = 4000 is less; all logits would be 64,000


# --- every backend ---

HERE = Machine.here("cpu")
LLAMA: dict[str, Any] = {"position": "rope", "norm": "rms", "mlp": "swiglu", "qk_norm": True,
                         "tied": False, "bias": "qkv", "n_kv_head": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa": {"n_kv_head": 2},
    "mqa-window": {"n_kv_head": 1, "attention_window": 5},
    "window-no-bias": {"attention_window": (3, 6), "bias": False, "gelu": "tanh"},
    "llama-window": {**LLAMA, "attention_window": (3, 6)},
    "alibi": {"position": "alibi", "n_kv_head": 2, "attention_window": (5, None)},
}


def segments() -> Tensor:
    return torch.tensor([[0] * 5 + [1] * 11, [7] * 12 + [2] * 4], dtype=torch.int32)


BATCHES = [(tokens(), tokens(seed=1), seg) for seg in (None, segments())]  # [segmented]


@cache
def manual(shape: str, segmented: bool, dtype: torch.dtype) -> list[Any]:
    """In this dtype, then in float64."""
    plain = build(attention_backend="manual", **SHAPES[shape]).to(dtype)
    return [gradients(m, *BATCHES[segmented]) for m in (plain, copy.deepcopy(plain).double())]


@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name, shape", [  # most of Triton's are slow tests
    pytest.param(*x, marks=[pytest.mark.slow] * (x[0] == "triton" and x[1] != "mqa-window"))
    for x in itertools.product(BACKENDS, SHAPES)])
def test_every_backend_gives_the_same_loss_and_gradients(name, shape, dtype) -> None:
    """Against float64, within manual's error."""
    for segmented in (False, True):
        model = build(attention_backend=name, attention_fallback=False, **SHAPES[shape]).to(dtype)
        phase = model.phase(segments=segmented)
        if BACKENDS[name].why_not(model.config.specs(phase)[0], HERE):
            with pytest.raises(BackendUnavailable, match=name):
                model(*BATCHES[segmented])
            continue
        got = gradients(model, *BATCHES[segmented])
        yardstick, exact = manual(shape, segmented, dtype)
        assert model.plan(segments=segmented)[0].chosen.backend.name == name
        assert_within(got[0], yardstick[0], exact[0], dtype, 2)
        for n, grad in got[1].items():
            assert_within(grad, yardstick[1][n], exact[1][n], dtype, 3)


# --- recomputation, precision ---


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa"])
def test_gradient_checkpointing_changes_no_bit(name, dropout) -> None:
    results, calls = [], []
    for on in (False, True):
        model = build(dropout=dropout, attention_backend=name)
        model.gradient_checkpointing = on
        model.transformer.h[0].register_forward_pre_hook(lambda *a: calls.append(1))
        loss, grads = gradients(model, *BATCHES[True])
        results.append({**grads, "loss": loss, "random state": torch.get_rng_state()})
    assert len(calls) == 1 + 2
    assert all(torch.equal(t, results[1][n]) for n, t in results[0].items())


def test_the_residual_stream_in_bfloat16_is_as_exact_as_bfloat16_is() -> None:
    """Within the error of the whole model in bfloat16."""
    (plain_loss, plain), (loss, truth) = manual("plain", False, torch.bfloat16)
    model = build(attention_backend="manual")
    model.residual_autocast = True
    with torch.autocast("cpu", torch.bfloat16):
        got_loss, got = gradients(model, *BATCHES[False])
    assert_within(got_loss, plain_loss, loss, torch.bfloat16, 2)
    for name, grad in got.items():
        assert_within(grad, plain[name], truth[name], torch.bfloat16, 3)


# --- generate() ---


def test_without_temperature_each_token_is_the_likeliest_after_all_before_it() -> None:
    model, idx = build(scale=20.0).eval(), tokens(T=13)
    text = model.generate(idx, 7, temperature=0)  # beyond block_size
    for how in ({"temperature": 1e-300}, {"top_k": 1}):
        assert torch.equal(model.generate(idx, 7, **how), text)
    best = model(idx)[0][:1, -1].topk(3).indices
    drawn = model.generate(idx[:1].expand(300, -1), 1, top_k=3)[:, -1]
    assert {*drawn.tolist()} == {*best[0].tolist()}
    assert text.shape == (2, 20) and torch.equal(text[:, :13], idx)
    for t in range(13, 20):
        logits = model(text[:, max(0, t - 16) : t])[0]
        assert torch.equal(text[:, t], logits[:, -1].argmax(dim=-1))


# --- sizes and arguments ---


def test_windows_are_repeated_and_what_means_nothing_is_named() -> None:
    for window, want in ((16, (None,) * 5), ((4, 5, None), (4, 5, None, 4, None))):
        assert replace(TINY, attention_window=window, n_layer=5).windows == want
    nan, good = math.nan, (8.0, 1.0, 4.0, 64)
    for at, bad in ((0, 0.0), (0, -8.0), (1, 4.0), (2, 1.0), (1, -1.0), (3, 0), (0, nan), (1, nan)):
        scaling = tuple(bad if i == at else x for i, x in enumerate(good))
        with pytest.raises(ValueError, match="rope_scaling"):
            replace(TINY, position="rope", rope_scaling=scaling)
    for window in ((4, 0), (4, 5, 6)):
        with pytest.raises(ValueError, match="window"):
            replace(TINY, attention_window=window)
    model, idx = build().eval(), tokens(2, 4)
    for wrong in ((idx[0], 3), (idx[:, :0], 3), (idx, -1), (idx, 3, 1.0, 0), (idx, 3, -1.0),
                  (idx, 3, nan), (idx, 3, -math.inf)):
        with pytest.raises(ValueError, match=r"idx.*max_new_tokens=.*top_k="):
            model.generate(*wrong)
    with pytest.raises(ValueError, match=r"targets: .*2, 4.*2, 3"):
        model(idx, idx[:, :3])
