"""The model: against GPT-2 as transformers has it, against itself in float64, token by token."""

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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
from attention import BACKENDS, BackendUnavailable, Machine, Phase, Policy
from core import loss as loss_module
from core.loss import IGNORE, linear_cross_entropy
from core.settings import UserError
from inference.cache import DynamicCache
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("remembered_probes")

TINY = GPTConfig(block_size=16, vocab_size=37, n_layer=2, n_head=4, n_embd=32)
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def tokens(B: int = 2, T: int = 16, vocab_size: int = 37, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


HOW = ("gradient_checkpointing", "residual_autocast")  # set on the model, no part of its sizes


def build(config: GPTConfig = TINY, scale: float = 5.0, **changes: Any) -> GPT:
    """A model whose weights do not sit at their initial values, where much is zero or one."""
    torch.manual_seed(1)
    how = {name: changes.pop(name) for name in HOW if name in changes}
    policy = Policy(fallback=changes.pop("attention_fallback", True))
    model = GPT(replace(config, **changes), policy)
    for name, value in how.items():
        setattr(model, name, value)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * scale * torch.randn(p.shape)
    return model


def gradients(model: GPT, idx: Tensor, targets: Tensor, segments: Tensor | None = None,
              seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradient of every parameter."""
    model.zero_grad()
    torch.manual_seed(seed)
    _, loss = model(idx, targets, segments)
    assert loss is not None
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_within(got: Tensor, plain: Tensor, truth: Tensor, dtype: torch.dtype, m: int) -> None:
    """The policy of oracle.check: m times what plain PyTorch is off by, and one rounding."""
    got, plain, truth = (t.detach().double() for t in (got, plain, truth))
    assert got.isfinite().all() and plain.isfinite().all()
    error = float((got - truth).abs().max())
    allowed = m * float((plain - truth).abs().max())
    allowed += torch.finfo(dtype).eps * float(truth.abs().max())
    assert error <= allowed, f"off by {error:.3g}, allowed is {allowed:.3g}"


# --- sizes ---


def test_gpt2_124m_has_as_many_parameters_as_it_should() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50304, bias=False))
    assert model.get_num_params(non_embedding=False) == 124_373_760
    assert model.get_num_params() == 123_587_328


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
    assert float(loss.detach()) == pytest.approx(math.log(37), abs=0.15)  # it knows nothing yet


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
    """A GPT2LMHeadModel with random weights, biases and norms included, saved to `folder`."""
    sizes = {"vocab_size": 37, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4,
             "bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(**{**sizes, **changes}, attn_implementation="eager")
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("gelu", ["gelu_new", "gelu"])
def test_logits_and_gradients_of_gpt2lmheadmodel(gelu, transformers, tmp_path) -> None:
    them = theirs(transformers, tmp_path, activation_function=gelu)
    us = GPT.from_pretrained(str(tmp_path))
    assert us.config == replace(TINY, gelu={"gelu_new": "tanh", "gelu": "exact"}[gelu])
    idx = tokens()
    out = them(idx, labels=idx)
    logits, none = us(idx)
    assert none is None
    torch.testing.assert_close(logits, out.logits, rtol=0, atol=1e-4)

    out.loss.backward()
    targets = torch.cat([idx[:, 1:], torch.full((2, 1), IGNORE)], dim=1)  # they shift, we do not
    loss, grads = gradients(us, idx, targets)
    torch.testing.assert_close(loss, out.loss, rtol=0, atol=1e-5)
    wanted = {n: p.grad for n, p in them.named_parameters()}
    assert wanted.keys() == grads.keys()
    for name, grad in grads.items():
        want = wanted[name].t() if checkpoint.families.is_conv1d(name) else wanted[name]
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5, msg=name)


def test_block_size_can_be_cropped_and_not_stretched(transformers, tmp_path) -> None:
    them = theirs(transformers, tmp_path)
    us = GPT.from_pretrained(str(tmp_path), block_size=5, dropout=0.1)
    assert (us.config.block_size, us.config.dropout) == (5, 0.1)
    assert us.transformer.wpe.weight.shape == (5, 32)
    assert us.transformer.wpe.weight.requires_grad
    got, want = us.eval()(tokens(T=5))[0], them(tokens(T=5)).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="6 tokens do not fit into block_size 5"):
        us(tokens(T=6))
    with pytest.raises(UserError, match="17"):
        GPT.from_pretrained(str(tmp_path), block_size=17)
    assert GPT.from_pretrained(str(tmp_path), block_size=16).config.block_size == 16
    for bad in (0, 6):
        with pytest.raises(ValueError, match=f"can only be cropped, from 5; got {bad}"):
            us.crop_block_size(bad)


# --- the loss ---


def rows_of(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(loss_module, "chunk_rows", lambda N, V, *about: rows)


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What it must equal: all logits at once."""
    return F.cross_entropy(F.linear(x, weight), targets, ignore_index=IGNORE)


def loss_and_gradients(loss: Callable[..., Tensor], x: Tensor, weight: Tensor, targets: Tensor,
                       factor: float) -> list[Tensor]:
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    value = loss(x, weight, targets)
    return [value.detach(), *torch.autograd.grad(value * factor, (x, weight))]


@pytest.mark.parametrize("rows", [1, 7, 32, 50, 64])
@pytest.mark.parametrize("factor", [1.0, 3.0, 65536.0])
@pytest.mark.parametrize("ignored", ["none", "some", "all but one", "a whole chunk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "pure bfloat16"])
def test_linear_cross_entropy(rows, factor, ignored, dtype, monkeypatch) -> None:
    """N = 50 rows: no multiple of 7 or 32. The half precision cases run under autocast, where the
    inputs are float32, except "pure bfloat16"; 65536 is where GradScaler starts."""
    rows_of(monkeypatch, rows)
    draw = torch.Generator().manual_seed(rows)
    low = getattr(torch, dtype.removeprefix("pure "))
    x, w = (torch.randn(n, 24, generator=draw).to(low).float() for n in (50, 91))
    targets = torch.randint(91, (50,), generator=draw)
    keep = {"none": slice(0, 50), "some": slice(0, 50, 3), "all but one": slice(3, 4),
            "a whole chunk": slice(7, 32)}[ignored]
    targets = torch.full_like(targets, IGNORE).index_put((torch.arange(50)[keep],), targets[keep])

    truth = loss_and_gradients(cross_entropy, x.double(), w.double(), targets, factor)
    if dtype == "pure bfloat16":
        x, w = x.bfloat16(), w.bfloat16()
    with torch.autocast("cpu", dtype=low, enabled=dtype in AUTOCAST):
        plain = loss_and_gradients(cross_entropy, x, w, targets, factor)
        got = loss_and_gradients(linear_cross_entropy, x, w, targets, factor)
    assert got[0].dtype == torch.float32 and got[0].shape == ()
    if factor == 65536 and ignored == "all but one" and dtype == "float16":
        # Divided by one row only, this is more than float16 has: plain PyTorch gives inf, which
        # makes GradScaler take a smaller factor. Here the large one does no harm.
        assert not all(p.isfinite().all() for p in plain)
        plain = truth
    for name, m, g, p, t in zip(("loss", "dx", "dw"), (2, 3, 3), got, plain, truth, strict=True):
        assert g.dtype == p.dtype or name == "loss" or plain is truth
        assert_within(g, p, t, low, m)


@pytest.mark.parametrize("short", ["x", "w"])
def test_each_gradient_has_digits_of_its_own_beside_one_with_fewer(short) -> None:
    """x in bfloat16, as with --residual_dtype=autocast, and a weight in float32; or reversed."""
    draw = torch.Generator().manual_seed(0)
    made = {"x": torch.randn(50, 24, generator=draw), "w": torch.randn(91, 24, generator=draw)}
    made[short] = made[short].bfloat16()
    x, w = (t.requires_grad_() for t in made.values())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, w, torch.randint(91, (50,), generator=draw))
    dx, dw = torch.autograd.grad(loss / 3, (x, w))  # a factor that bfloat16 does not hold
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)
    long = dw if short == "x" else dx
    assert long.dtype == torch.float32 and (long.bfloat16().float() != long).any()


def test_the_weight_gradients_of_many_chunks_add_up_in_float32(monkeypatch) -> None:
    """As if there were one: bfloat16 holds 8 bits of the sum, and would lose most chunks."""
    rows_of(monkeypatch, 2)
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 24, generator=draw).bfloat16() + 1 for n in (600, 5))
    targets = torch.zeros(600, dtype=torch.int64)
    dw = loss_and_gradients(linear_cross_entropy, x, w, targets, 1.0)[2]
    truth = loss_and_gradients(cross_entropy, x.double(), w.double(), targets, 1.0)[2]
    assert (dw.double() - truth).norm() < 0.005 * truth.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_losses_of_half_precision_logits_add_up_in_float32(dtype) -> None:
    """Their sum has more digits than bfloat16 or float16 hold."""
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 24, generator=draw).to(dtype) for n in (1000, 91))
    targets = torch.randint(91, (1000,), generator=draw)
    want = F.cross_entropy((x @ w.t()).float(), targets)
    torch.testing.assert_close(linear_cross_entropy(x, w, targets), want, rtol=1e-5, atol=0)


def test_the_loss_has_no_second_derivative() -> None:
    """An error, also where another path, here x * x, would hide the missing one."""
    function = lambda x, w: linear_cross_entropy(x * x, w * w, torch.arange(6))  # noqa: E731
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    for leaf in (x, w):
        grad, = torch.autograd.grad(function(x, w), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(grad.sum(), (x, w))


def test_a_half_precision_sum_over_many_rows_does_not_overflow() -> None:
    """Every row adds -0.5 * 30 to the same gradient: 150,000 in all, and float16 ends at 65504."""
    x, w = torch.full((10_000, 2), 30.0, requires_grad=True), torch.zeros(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(x, w, torch.zeros(10_000, dtype=torch.int64))
    loss.backward()
    assert w.grad is not None
    want = torch.tensor([[-15.0, -15.0], [15.0, 15.0]])
    torch.testing.assert_close(w.grad, want, rtol=1e-3, atol=0)


def test_float16_gradients_do_not_underflow_in_a_large_vocabulary() -> None:
    """At the start of a training every p is 1 / V: over V = 50304 and N = 256 rows 8e-8, which is
    the very least that float16 has."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=draw).half().float()
    w = (0.02 * torch.randn(50304, 16, generator=draw)).half().float()
    targets = torch.randint(50304, (256,), generator=draw)
    truth = loss_and_gradients(cross_entropy, x.double(), w.double(), targets, 1.0)
    with torch.autocast("cpu", dtype=torch.float16):
        got = loss_and_gradients(linear_cross_entropy, x, w, targets, 1.0)
    for g, t in zip(got, truth, strict=True):
        assert float((g - t).norm() / t.norm()) < 2e-3
    never = torch.ones(50304, dtype=torch.bool).index_fill(0, targets, False)
    assert float((got[2] - truth[2])[never].norm() / truth[2][never].norm()) < 2e-3


@pytest.mark.parametrize("N", [0, 3])
def test_nothing_to_predict_is_nan_with_zero_gradients_as_torch_gives(N) -> None:
    for loss in (cross_entropy, linear_cross_entropy):
        x, w = torch.randn(N, 4), torch.randn(5, 4)
        value, dx, dw = loss_and_gradients(loss, x, w, torch.full((N,), IGNORE), 1.0)
        assert value.isnan() and not dx.any() and not dw.any()


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    """The first one scales the stored gradients in place, to save their memory."""
    x = torch.randn(3, 4, requires_grad=True)
    loss = linear_cross_entropy(x, torch.randn(5, 4), torch.tensor([0, 1, 2]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Recorder(TorchDispatchMode):
    """Notes the size of every tensor that an operation gives, and counts the products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.products += "mm" in func.overloadpacket.__name__
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_logits_of_the_whole_batch_never_exist(dtype, monkeypatch) -> None:
    rows, V = 5, 1000
    rows_of(monkeypatch, rows)
    config = GPTConfig(16, V, 1, 1, 4, attention_backend="sdpa")
    model, idx = GPT(config), tokens(4, 16, V)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        model(idx, idx)  # the backend is probed
        with Recorder() as seen:
            model(idx, idx)[1].backward()
    assert seen.largest == rows * V  # and V * C = 4000 is less; all logits would be 64,000
    with Recorder() as seen:
        model(idx)
    assert seen.largest == 64 * V


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
}


def segments() -> Tensor:
    return torch.tensor([[0] * 5 + [1] * 11, [7] * 12 + [2] * 4], dtype=torch.int32)


def runs_here(name: str, model: GPT, with_segments: bool = False) -> bool:
    dtype = str(model.transformer.wte.weight.dtype).removeprefix("torch.")
    spec = model.config.specs(Phase("cpu", dtype, segments=with_segments))[0]
    return not BACKENDS[name].why_not(spec, HERE)


def _trained() -> Iterator[Any]:
    """(backend, shape, segments): of Triton's, a second each, most are left to the slow tests."""
    for name, shape, segmented in itertools.product(BACKENDS, SHAPES, (False, True)):
        long = name == "triton" and not (shape == "mqa-window" and segmented)
        id_ = f"{name}-{shape}" + "-segments" * segmented
        yield pytest.param(name, shape, segmented, marks=[pytest.mark.slow] * long, id=id_)


BATCHES = [(tokens(), tokens(seed=1), seg) for seg in (None, segments())]  # [segmented]


@cache
def manual(shape: str, segmented: bool, dtype: torch.dtype) -> list[Any]:
    """Loss and gradients of manual, in this dtype and in float64."""
    plain = build(attention_backend="manual", **SHAPES[shape]).to(dtype)
    return [gradients(m, *BATCHES[segmented]) for m in (plain, copy.deepcopy(plain).double())]


@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name, shape, segmented", list(_trained()))
def test_every_backend_gives_the_same_loss_and_gradients(name, shape, segmented, dtype) -> None:
    """Against the same weights in float64; the yardstick is manual in the same dtype."""
    model = build(attention_backend=name, attention_fallback=False, **SHAPES[shape]).to(dtype)
    if not runs_here(name, model, segmented):
        with pytest.raises(BackendUnavailable, match=f"'{name}' cannot run here"):
            model(*BATCHES[segmented])
        return
    got, (yardstick, exact) = gradients(model, *BATCHES[segmented]), manual(shape, segmented, dtype)
    assert model.plan(segments=segmented)[0].chosen.backend.name == name
    assert exact[0].dtype == torch.float64
    assert_within(got[0], yardstick[0], exact[0], dtype, 2)
    for n, grad in got[1].items():
        assert_within(grad, yardstick[1][n], exact[1][n], dtype, 3)


def names_here(**asked: Any) -> list[Any]:
    spec = TINY.specs(Phase("cpu", "float32", **asked))[0]
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "triton"))  # seconds
        for name, b in BACKENDS.items() if not b.why_not(spec, HERE)
    ]


@pytest.mark.parametrize("name", names_here())
@pytest.mark.parametrize("window, training", few(list(itertools.product([4, None], [True, False]))))
def test_canary_a_later_token_moves_nothing_before_it(name, window, training) -> None:
    model = build(attention_backend=name, attention_window=window).train(training)
    idx = tokens()
    with torch.set_grad_enabled(training):
        before = model(idx)[0]
        for t in (1, 7, 15):
            changed = idx.clone()
            changed[:, t] = (changed[:, t] + 1) % 37
            after = model(changed)[0]
            assert torch.equal(before[:, :t], after[:, :t])
            assert not torch.equal(before[:, t], after[:, t])


@pytest.mark.parametrize("name", names_here(segments=True))
def test_canary_another_segment_moves_nothing(name) -> None:
    model, idx, seg = build(attention_backend=name).eval(), tokens(), segments()
    before = model(idx, segments=seg)[0]
    for row in range(2):
        for one in seg[row].unique():
            inside = seg[row] == one
            changed = idx.clone()
            changed[row, inside] = (changed[row, inside] + 1) % 37
            after = model(changed, segments=seg)[0]
            assert torch.equal(before[row, ~inside], after[row, ~inside])
            assert not torch.equal(before[row, inside], after[row, inside])
    assert not torch.equal(before, model(idx)[0])  # without segments they do see each other


def test_one_batch_overfits() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    idx, targets = tokens(4), tokens(4, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(150):
        loss = model(idx, targets)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.05


# --- dropout, recomputation ---


@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa"])
def test_dropout_is_for_training_and_repeats_with_the_seed(name) -> None:
    model, idx = build(dropout=0.3, attention_backend=name), tokens()
    quiet = build(attention_backend=name).eval()
    torch.manual_seed(5)
    first, second = model(idx)[0], model(idx)[0]
    torch.manual_seed(5)
    assert torch.equal(first, model(idx)[0]) and not torch.equal(first, second)
    assert torch.equal(model.eval()(idx)[0], quiet(idx)[0])
    assert not torch.equal(first, quiet(idx)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa"])
def test_gradient_checkpointing_changes_no_bit(name, dropout) -> None:
    data = tokens(), tokens(seed=1), segments()
    results, calls = [], []
    for on in (False, True):
        model = build(dropout=dropout, attention_backend=name, gradient_checkpointing=on)
        model.transformer.h[0].register_forward_pre_hook(lambda *a: calls.append(1))
        results.append(gradients(model, *data))
        results[-1][1]["random state"] = torch.get_rng_state()
    assert len(calls) == 1 + 2  # it did compute the block again
    assert torch.equal(results[0][0], results[1][0])
    for name_, grad in results[0][1].items():
        assert torch.equal(grad, results[1][1][name_]), name_


# --- which backend, and when that is decided ---


def test_the_residual_stream_in_bfloat16_is_as_exact_as_bfloat16_is() -> None:
    """Loss and gradients against float64; the yardstick is the whole model in bfloat16."""
    idx, targets = tokens(), tokens(seed=1)
    truth, true_grads = gradients(build().double(), idx, targets)
    plain, plain_grads = gradients(build().bfloat16(), idx, targets)
    with torch.autocast("cpu", torch.bfloat16):
        got, grads = gradients(build(residual_autocast=True), idx, targets)
    assert_within(got, plain, truth, torch.bfloat16, 2)
    for name, grad in grads.items():
        assert_within(grad, plain_grads[name], true_grads[name], torch.bfloat16, 3)


# --- torch.compile ---


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name, compiler, autocast, segmented", few([
    ("manual", "eager", True, True), ("sdpa", "aot_eager", True, False),
    ("manual", "aot_eager", False, False), ("sdpa", "eager", False, True)]))
def test_compile_takes_the_whole_graph(name, compiler, autocast, segmented, fresh_compiler) -> None:
    """fullgraph=True: a graph break is an error. Forward, the chunked loss and the backward."""
    model = build(attention_backend=name)
    data = tokens(), tokens(seed=1), segments() if segmented else None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        want = gradients(model, *data)
        compiled = torch.compile(model, fullgraph=True, backend=compiler)
        model.zero_grad()
        _, loss = compiled(*data)
        loss.backward()
    torch.testing.assert_close(loss.detach(), want[0], rtol=1e-6, atol=1e-6)
    tolerance = 2e-2 if autocast else 1e-5
    for n, p in model.named_parameters():
        assert p.grad is not None
        scale = float(want[1][n].abs().max())
        torch.testing.assert_close(p.grad, want[1][n], rtol=0, atol=tolerance * scale, msg=n)


# --- generate() ---


def test_without_temperature_each_token_is_the_likeliest_after_all_before_it() -> None:
    model, idx = build().eval(), tokens(T=13)
    text = model.generate(idx, 7, temperature=0)  # beyond block_size
    assert torch.equal(model.generate(idx, 7, 1e-300), text)
    assert text.shape == (2, 20) and torch.equal(text[:, :13], idx)
    for t in range(13, 20):
        logits = model(text[:, max(0, t - 16) : t])[0]
        assert torch.equal(text[:, t], logits[:, -1].argmax(dim=-1))


def test_checkpointing_drops_no_cache() -> None:
    """In training mode too a cached step stores its keys and sees what is stored."""
    model, idx = build(), tokens(T=9)
    want = model(idx)[0]
    model.gradient_checkpointing = True
    cache = DynamicCache(TINY.n_layer, max_len=16)
    with torch.no_grad():
        got = []
        for part in (idx[:, :5], idx[:, 5:]):
            step = cache.reserve(part.shape[1])
            got.append(model(part, cache=step)[0])
            step.advance()
    torch.testing.assert_close(torch.cat(got, dim=1), want, rtol=1e-4, atol=1e-5)


# --- a window for each layer ---


@pytest.mark.parametrize("given, n_layer, want", [
    (None, 2, (None, None)), (4, 2, (4, 4)), (16, 2, (None, None)),
    ((4, 5, None), 5, (4, 5, None, 4, None)), ([4, 8], 2, (4, 8)),
])
def test_windows_are_repeated_and_the_last_layer_takes_the_last(given, n_layer, want) -> None:
    assert replace(TINY, attention_window=given, n_layer=n_layer).windows == want


def test_a_token_sees_as_far_as_the_windows_of_all_layers_reach() -> None:
    """Windows of 3, 1 and 4 reach back 2 + 0 + 3 tokens, by the gradients."""
    model = build(replace(TINY, n_layer=3), attention_window=(3, 1, 4)).eval()
    seen = []
    model.transformer.wte.register_forward_hook(
        lambda module, args, out: seen.append(out.detach().requires_grad_()) or seen[-1]
    )
    model.head(model.hidden(tokens(1))[0, 12]).square().sum().backward()
    reached = seen[0].grad[0].abs().amax(dim=-1).nonzero().flatten().tolist()
    assert reached == list(range(12 - 5, 13))
    with pytest.raises(ValueError, match="0"):
        replace(TINY, attention_window=(4, 0))
    with pytest.raises(ValueError, match=r"attention_window.* n_layer=2, got 3"):
        replace(TINY, attention_window=(4, 5, 6), n_layer=2)


@pytest.mark.parametrize("scaling", [
    (0.0, 1.0, 4.0, 64), (-8.0, 1.0, 4.0, 64), (8.0, 4.0, 4.0, 64), (8.0, 4.0, 1.0, 64),
    (8.0, -1.0, 4.0, 64), (8.0, 1.0, 4.0, 0), (math.nan, 1.0, 4.0, 64), (8.0, math.nan, 4.0, 64)])
def test_a_scaling_of_rope_without_finite_rates_is_refused(scaling) -> None:
    with pytest.raises(ValueError, match="rope_scaling"):
        replace(TINY, position="rope", rope_scaling=scaling)


def test_the_kernel_is_that_of_the_embeddings_dtype() -> None:
    """As where FSDP shards the embedding alone: its weight stays in float32."""
    model = build().bfloat16()
    model.transformer.wte.float()
    model.transformer.wte.register_forward_hook(lambda module, args, out: out.bfloat16())
    model.transformer.wpe.register_forward_hook(lambda module, args, out: out.bfloat16())
    x = model.hidden(tokens(2, 4))
    assert x.dtype == torch.bfloat16 and x.isfinite().all()
    assert {plan[0].spec.dtype for plan in model.plans.known.values()} == {"bfloat16"}


def test_wrong_arguments_are_named() -> None:
    model, idx = build().eval(), tokens(2, 4)
    for wrong in ((idx[0], 3), (idx[:, :0], 3), (idx, -1), (idx, 3, 1.0, 0), (idx, 3, -1.0),
                  (idx, 3, math.nan), (idx, 3, -math.inf)):
        with pytest.raises(ValueError, match=r"idx.*max_new_tokens=.*top_k="):
            model.generate(*wrong)
    with pytest.raises(ValueError, match=r"targets: .*2, 4.*2, 3"):
        model(idx, idx[:, :3])
