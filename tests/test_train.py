"""The training loop: what a step does, what a run says, and every way to start or refuse one.

`run` and `make_data` serve the other tests of whole runs too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import few
from matplotlib.figure import Figure
from torch import Tensor

import checkpoint
import data
import train
from core import flops, metrics, runtime
from core.cpu import matmul as cpu_matmul
from core.metrics import read as read_rows
from core.optimizer import build_optimizer, learning_rate, schedule_warnings, update
from core.settings import UserError, exit_on_user_error
from data.prepare import PrepareConfig, prepare
from model import GPT, GPTConfig
from train import TrainConfig

TEXT = "".join(
    f"{who} {does} the {what},\nand so {n} days went by.\n\n"
    for n, (who, does, what) in enumerate(
        (who, does, what)
        for who in ("Ann", "Bob", "The king", "My fool", "A wise old queen")
        for does in ("sees", "hath lost", "keeps", "would mend")
        for what in ("crown", "quick brown fox", "jug of wine", "moon")
    )
)
TINY: dict[str, Any] = {
    "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "batch_size": 4, "max_iters": 8,
    "eval_interval": 100, "eval_iters": 2, "log_interval": 1, "warmup_iters": 2,
    "learning_rate": 1e-2, "device": "cpu", "peak_tflops": 1.0, "onednn": False,
}


def make_data(folder: Path, text: str = TEXT) -> Path:
    """A data_dir with the dataset "tiny"."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "text.txt"
    source.write_text(text, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        config = PrepareConfig(source=str(source), out_dir=str(folder / "tiny"))
        prepare("shakespeare_char", config)
    return folder


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@dataclass(frozen=True)
class Run:
    """What an entry point gave back."""

    code: int
    out: str
    err: str
    rows: list[dict[str, Any]]  # of metrics.jsonl

    def losses(self) -> dict[int, float]:
        found = [(r["iter"], r["loss"]) for r in self.rows if "loss" in r]
        assert len(found) == len(dict(found)), f"a step is logged twice: {found}"
        return dict(found)

    def evaluations(self) -> dict[int, tuple[float, float]]:
        rows = [r for r in self.rows if "val_loss" in r]
        found = [(r["iter"], (r["train_loss"], r["val_loss"])) for r in rows]
        assert len(found) == len(dict(found)), f"an evaluation is logged twice: {found}"
        return dict(found)


def enter(main: Callable[[list[str]], int], argv: list[str]) -> tuple[int, str, str]:
    """Run an entry point's main in this process as `python <file>.py` would.

    Returns:
        exit code, stdout, stderr.
    """
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    threads = torch.get_num_threads()
    out, err = io.StringIO(), io.StringIO()
    try:
        torch.set_num_threads(1)
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as left,
        ):
            exit_on_user_error(lambda: main(argv))
    except KeyboardInterrupt:  # would end all of pytest
        pytest.fail("the signal was not handled")
    finally:
        torch.set_num_threads(threads)
        for s, handler in handlers.items():
            signal.signal(s, handler)
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


def argv(data_dir: Path, out: Path, **changes: Any) -> list[str]:
    """The command line of a tiny run."""
    knobs = {**TINY, "data_dir": data_dir, "dataset": "tiny", "out_dir": out, **changes}
    return [f"--{name}={value}" for name, value in knobs.items()]


def run_line(line: list[str], out: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:  # test_metrics.py draws the picture
        patch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).touch())
        return Run(*enter(train.main, line), read_rows(out / "metrics.jsonl"))


def run(data_dir: Path, out: Path, **changes: Any) -> Run:
    return run_line(argv(data_dir, out, **changes), out)


def refusal(r: Run) -> str:
    """The error message, on one line; the exit code must be 2."""
    assert r.code == 2 and "Traceback" not in r.out + r.err, (r.code, r.out, r.err)
    return " ".join(r.err.replace("│", " ").split())


# --- the learning rate ---


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{**TINY, **changes})


def rates(steps: int = 30, **changes: Any) -> list[float]:
    knobs = {"learning_rate": 1.0, "min_lr": 0.1, "warmup_iters": 5, "max_iters": 20}
    c = config(**{**knobs, **changes})
    return [learning_rate(step, c) for step in range(steps)]


def test_the_rate_rises_in_a_line_then_falls_as_a_cosine_then_stays():
    lr = rates()
    assert lr[:5] == pytest.approx([i / 6 for i in range(1, 6)])  # no step is lost to a rate of 0
    assert lr[5] == 1.0
    assert all(a < b for a, b in itertools.pairwise(lr[:6]))
    assert all(a > b for a, b in itertools.pairwise(lr[5:21]))
    assert lr[20:] == [0.1] * 10
    cosine = [0.55 + 0.45 * math.cos(math.pi * i / 15) for i in range(16)]
    assert lr[5:21] == pytest.approx(cosine)


def test_the_edges_of_the_rate():
    assert rates(1, warmup_iters=0)[0] == 1.0
    assert rates(3, warmup_iters=0, max_iters=1) == [1.0, 0.1, 0.1]
    assert rates(2, warmup_iters=1, max_iters=1) == [0.5, 0.1]
    assert rates(8, warmup_iters=5, lr_decay_iters=5)[4:7] == pytest.approx([5 / 6, 0.1, 0.1])
    assert rates(8, warmup_iters=5, lr_decay_iters=2)[4:7] == pytest.approx([5 / 6, 0.1, 0.1])
    assert rates(9, lr_decay_iters=8)[8] == 0.1 < rates(9, lr_decay_iters=None)[8]
    assert set(rates(decay_lr=False)) == {1.0}  # from the first step, as in nanoGPT
    assert rates(22, min_lr=None)[20:] == [0.1] * 2  # a tenth of the highest
    assert rates(22, min_lr=0.0)[20:] == [0.0] * 2


@pytest.mark.parametrize("warmup, missed", [(6, False), (7, True)])
def test_a_linear_decay_cuts_a_long_warm_up_off_with_a_warning(warmup, missed):
    how: Any = {"decay_lr": "linear", "warmup_iters": warmup, "max_iters": 20}
    assert (max(rates(20, **how)) < 1) == bool(schedule_warnings(config(**how))) == missed


@pytest.mark.parametrize("wrong", [{"min_lr": -1e-3}, {"muon_rates": "0.02"}])
def test_a_rate_below_zero_or_of_another_optimizer_is_refused(data_dir, tmp_path, wrong):
    assert next(iter(wrong)) in refusal(run(data_dir, tmp_path / "out", **wrong))


# --- one update ---


def tensors(seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g) for s in ((5, 7), (7,), (3, 2))]


def state_of(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[Tensor]:
    """Copies of the weights and of all that the optimizer keeps."""
    kept = [t for p in params for _, t in sorted(optimizer.state[p].items())]
    return [t.detach().clone() for t in [*params, *kept]]


NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


def adamw(params: list[Tensor], **how: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, **how)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [0.0, 0.3, 1e6])
def test_an_update_is_clip_grad_norm_and_then_adamw(fused, clip):
    ours, theirs = ([p.requires_grad_() for p in tensors(0)] for _ in range(2))
    a, b = adamw(ours, fused=fused), adamw(theirs, foreach=False)
    bad = torch.zeros(())
    for i in range(4):
        for p, q, g in zip(ours, theirs, tensors(i + 1)):
            p.grad, q.grad = g * 10**i, g * 10**i  # norms that differ: Adam itself ignores a scale
        update(a, NO_SCALER, torch.tensor(1.0), clip, bad)
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        b.step()
        torch.testing.assert_close(state_of(a, ours), state_of(b, theirs), rtol=1e-5, atol=1e-7)
    assert not bad


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_what_is_not_finite_never_reaches_the_weights(fused, clip, value, where):
    params = [p.requires_grad_() for p in tensors(0)]
    optimizer, bad = adamw(params, fused=fused), torch.zeros(())

    def step(seed: int, loss: float = 1.0, spoil: float | None = None) -> None:
        for p, g in zip(params, tensors(seed)):
            p.grad = g
        if spoil is not None:
            assert params[1].grad is not None
            params[1].grad[3] = spoil
        update(optimizer, NO_SCALER, torch.tensor(loss), clip, bad)

    step(1)
    assert not bad
    before = state_of(optimizer, params)
    step(2, spoil=value) if where == "gradient" else step(2, loss=value)
    assert bad
    step(3)  # all is well again, but the loop has yet to see what happened
    assert bad
    for a, b in zip(before, state_of(optimizer, params), strict=True):
        assert torch.equal(a, b)


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=8, bias=True))
    optimizer = build_optimizer(model, config(weight_decay=0.3), torch.device("cpu"))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in plain["params"]} == {1}
    grouped = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())  # each of them, once


# --- the same step in other ways ---


def close(a: Mapping[int, float], b: Mapping[int, float], rtol: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(math.isclose(a[i], b[i], rel_tol=rtol) for i in a)


def test_gradient_accumulation_does_not_change_the_losses(data_dir, tmp_path):
    results = []
    for micro, n in ((8, 1), (4, 2), (2, 4)):
        r = run(data_dir, tmp_path / str(micro), batch_size=micro, gradient_accumulation_steps=n)
        assert r.code == 0
        results.append(r.losses())
    assert len(results[0]) == 8
    assert results[0][8] < results[0][1]
    assert close(results[0], results[1]) and close(results[0], results[2])


@pytest.mark.parametrize("dtype", few(["bfloat16", "float16"]))
def test_half_precision_learns_what_float32_learns(dtype, data_dir, tmp_path):
    want = run(data_dir, tmp_path / "a", max_iters=60).losses()
    r = run(data_dir, tmp_path / "b", max_iters=60, dtype=dtype)
    assert r.code == 0 and dtype in r.out
    losses = r.losses()
    assert abs(losses[1] - want[1]) > 0  # it was rounded
    assert losses[60] < losses[1] - 0.5
    assert losses[1] == pytest.approx(want[1], rel=1e-2)
    assert losses[60] == pytest.approx(want[60], rel=0.05)


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler"
)
def test_a_compiled_run_gives_the_same_losses(data_dir, tmp_path):
    plain = run(data_dir, tmp_path / "a", max_iters=7, log_interval=7)
    try:
        r = run(data_dir, tmp_path / "b", max_iters=7, log_interval=7, compile=True)
    finally:
        torch.compiler.reset()
    assert r.code == 0 and "compile: on" in r.out
    assert close(plain.losses(), r.losses(), rtol=1e-4)
    assert close(*({k: v[1] for k, v in x.evaluations().items()} for x in (plain, r)), rtol=1e-4)


# --- evaluation ---


def test_an_evaluation_uses_the_same_windows_and_no_dropout(data_dir, tmp_path):
    """Weights that stay: each evaluation gives the same bits, while the training loss moves."""
    r = run(data_dir, tmp_path / "out", learning_rate=1e-30, dropout=0.3, eval_interval=2,
            eval_on_start=True)
    found = r.evaluations()
    assert list(found) == [0, 2, 4, 6, 8]
    assert len(set(found.values())) == 1
    assert len(set(r.losses().values())) == 8


def test_an_evaluation_is_the_mean_over_its_windows(data_dir, tmp_path):
    out = tmp_path / "out"
    r = run(data_dir, out, eval_iters=3, eval_interval=8)
    model = checkpoint.load(checkpoint.latest(out)).model().eval()
    for split, told in zip(("train", "val"), r.evaluations()[8], strict=True):
        tokens = data.load(data_dir / "tiny", split, 16, model.config.vocab_size)
        x, y = next(data.eval_batches(tokens, 16, 1, 3 * 4))
        with torch.no_grad():
            assert told == pytest.approx(float(model(x, y)[1]), rel=1e-6)


def test_eval_only_evaluates_and_touches_nothing(data_dir, tmp_path):
    out = tmp_path / "out"
    done = run(data_dir, out, eval_interval=4)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    train_loss, val_loss = done.evaluations()[8]
    said = f"step 8: train loss {train_loss:.4f}, val loss {val_loss:.4f}"
    for _ in range(2):
        r = run(data_dir, out, init_from="resume", eval_only=True)
        assert r.code == 0 and said in r.out and "iter " not in r.out
    new = run(data_dir, tmp_path / "fresh", eval_only=True)
    assert not new.code and re.search(r"step 0: train loss \d\.\d{4}, val loss \d\.\d{4}", new.out)
    assert not (tmp_path / "fresh").exists() or not any((tmp_path / "fresh").iterdir())
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


# --- what a run says and leaves behind ---

def test_a_sample_at_the_end(data_dir, tmp_path):
    """The same each time; also of a text without line breaks."""
    flat = make_data(tmp_path / "data", TEXT.replace("\n", " "))
    texts = enumerate((data_dir, data_dir, flat))
    runs = [run(text, tmp_path / str(i), sample_tokens=20) for i, text in texts]
    one, two, other = (r.out.partition("sample of 20 tokens ---")[2] for r in runs)
    assert one == two != other and one and other and not any(r.code for r in runs)


# --- where a run begins ---


def mean_loss(model: GPT, data_dir: Path, block: int = 16) -> float:
    """The validation loss of 2 batches of 4."""
    tokens = data.load(data_dir / "tiny", "val", block, model.config.vocab_size)
    x, y = next(data.eval_batches(tokens, block, 1, 8))
    with torch.no_grad():
        return float(model.eval()(x, y)[1])


def first_loss(data_dir: Path, out: Path, **changes: Any) -> float:
    r = run(data_dir, out, eval_on_start=True, max_iters=1, **changes)
    assert r.code == 0, r.err
    return r.evaluations()[0][1]


def test_from_a_checkpoint_folder(data_dir, tmp_path):
    """The window of the weights is kept where none is asked for, also in a run that goes on."""
    one = run(data_dir, tmp_path / "one", n_layer=2, attention_window=3)
    last, out = checkpoint.latest(tmp_path / "one"), tmp_path / "1"
    assert checkpoint.load(last).model().config.attention_window == 3
    for i, source in enumerate((tmp_path / "one", last)):
        loss = first_loss(data_dir, tmp_path / str(i), init_from=source, n_layer=2)
        assert loss == one.evaluations()[8][1]
    r = run_line(["--init_from=resume", f"--out_dir={out}", "--max_iters=2"], out)
    assert r.code == 0 and checkpoint.load(checkpoint.latest(out)).config().attention_window == 3


def nanogpt_file(path: Path, model: GPT) -> Path:
    """What nanoGPT's train.py saves of a compiled model."""
    weights = {f"_orig_mod.{k}": v for k, v in model.state_dict().items()}
    weights["_orig_mod.lm_head.weight"] = weights["_orig_mod.transformer.wte.weight"]
    mask = torch.ones(1, 1, model.config.block_size, model.config.block_size).tril()
    weights["_orig_mod.transformer.h.0.attn.bias"] = mask
    sizes = asdict(model.config)
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    args = {name: sizes[name] for name in names}
    torch.save({"model": weights, "model_args": args, "iter_num": 7, "config": {"a": 1}}, path)
    return path


def test_from_nanogpts_file_with_the_context_cropped(data_dir, tmp_path):
    torch.manual_seed(5)
    size = GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=2, n_embd=16, bias=True)
    model = GPT(size)
    path = nanogpt_file(tmp_path / "ckpt.pt", model)
    knobs = {"init_from": path, "n_layer": 2, "bias": True}
    loss = first_loss(data_dir, tmp_path / "out", **knobs, block_size=16)
    assert loss == pytest.approx(mean_loss(model, data_dir), rel=1e-6)
    saved = checkpoint.load(checkpoint.latest(tmp_path / "out")).config()
    assert (saved.block_size, saved.vocab_size, saved.bias, saved.n_layer) == (16, 64, True, 2)
    loss = first_loss(data_dir, tmp_path / "out2", **knobs, block_size=32)
    assert loss == pytest.approx(mean_loss(model, data_dir, 32), rel=1e-6)
    r = run(data_dir, tmp_path / "out3", **knobs, block_size=33)
    assert "block_size" in refusal(r) and "33" in refusal(r) and "32" in refusal(r)


def test_from_a_folder_of_transformers(data_dir, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(6)
    size = transformers.GPT2Config(
        vocab_size=len(set(TEXT)) + 3, n_positions=24, n_embd=16, n_layer=2, n_head=2
    )
    theirs = transformers.GPT2LMHeadModel(size).eval()
    theirs.save_pretrained(tmp_path / "hf")
    tokens = data.load(data_dir / "tiny", "val", 16, size.vocab_size)
    x, y = next(data.eval_batches(tokens, 16, 1, 8))
    with torch.no_grad():
        logits = theirs(x).logits
    want = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()))
    loss = first_loss(data_dir, tmp_path / "out", init_from=tmp_path / "hf", n_layer=2, bias=True,
                      gelu="tanh")
    assert loss == pytest.approx(want, rel=1e-5)

    size.vocab_size = len(set(TEXT)) - 1
    transformers.GPT2LMHeadModel(size).save_pretrained(tmp_path / "small")
    said = refusal(run(data_dir, tmp_path / "out2", init_from=tmp_path / "small"))
    assert str(size.vocab_size) in said and "tokenizer" in said


def test_a_size_that_the_weights_do_not_have_is_refused(data_dir, tmp_path):
    """Given on the command line, it must not be dropped in silence."""
    run(data_dir, tmp_path / "one", max_iters=1)
    for name, size in ("n_layer", 3), ("n_embd", 32), ("bias", True), ("vocab_size", 99):
        r = run(data_dir, tmp_path / name, init_from=tmp_path / "one", **{name: size})
        assert re.search(rf"\b{name}\b", refusal(r).replace(str(tmp_path), "")), name


@pytest.mark.slow
def test_the_seed_is_of_weights_batches_and_dropout(data_dir, tmp_path):
    a, b, c = (
        run(data_dir, tmp_path / str(i), dropout=0.2, seed=seed).losses()
        for i, seed in enumerate((7, 7, 8))
    )
    assert a == b
    assert set(a.values()).isdisjoint(c.values())


# --- a loss that is not finite ---


class Spoiled:
    """Patches GPT.forward: in training step `step` something is not finite."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int, how: str) -> None:
        self.calls, self.before = 0, {}  # type: ignore[var-annotated]
        forward = GPT.forward

        def spoiled(model: GPT, x: Tensor, y: Tensor | None = None, *rest: Any) -> Any:
            logits, loss = forward(model, x, y, *rest)
            if loss is None or not model.training:
                return logits, loss
            self.model = model
            self.calls += 1
            if self.calls == step:
                self.before = {k: v.clone() for k, v in model.state_dict().items()}
                if how == "loss":  # its gradient is finite
                    loss = loss + torch.inf
                elif how == "gradient":
                    loss.register_hook(lambda g: g * torch.nan)
                else:
                    loss = loss * torch.nan
            return logits, loss

        monkeypatch.setattr(GPT, "forward", spoiled)


def finite(out: Path) -> None:
    """Fails where a checkpoint has anything in it that is not finite."""
    for folder in checkpoint.folders(out):
        saved = checkpoint.load(folder)
        assert all(bool(w.isfinite().all()) for w in saved.weights().values()), folder
        moments = saved.rest()["optimizer"]["state"].values()
        assert all(bool(t.isfinite().all()) for s in moments for t in s.values()), folder
        for name in ("val_loss", "best_val_loss"):
            value = saved.state[name]
            assert value is None or math.isfinite(value), (folder, name, value)


@pytest.mark.parametrize("log_interval", few([4, 1]))
@pytest.mark.parametrize("how, dtype", few([
    ("both", "float16"), ("both", "float32"), ("loss", "float32"), ("gradient", "float32"),
    ("loss", "float16")]))
def test_a_loss_that_is_not_finite_stops_the_run(
    how, dtype, log_interval, data_dir, tmp_path, monkeypatch
):
    """With float16 a gradient that overflows is daily bread: its step is left out, no more."""
    out = tmp_path / "out"
    spoiled = Spoiled(monkeypatch, 6, how)
    r = run(data_dir, out, max_iters=20, eval_interval=3, log_interval=log_interval, dtype=dtype,
            attention_backend="sdpa")
    assert r.code == 1
    (line,) = [x for x in r.err.splitlines() if x.startswith("error: ")]
    lr = learning_rate(5, config(max_iters=20))
    for words in ("step 6", f"lr {lr:.2e}", "sdpa", "--init_from=resume",
                  f"{out / 'step-00000003'} "):
        assert words in line
    value = r"\d\.\d+" if how == "gradient" else "nan"
    assert re.search(rf"\(loss {value}, lr ", line), line
    assert "Traceback" not in r.err
    for name, weight in spoiled.model.state_dict().items():
        assert torch.equal(weight, spoiled.before[name]), name
    assert [p.name for p in checkpoint.folders(out)] == ["step-00000003"]
    finite(out)
    assert all(math.isfinite(x) for x in r.losses().values()) and max(r.losses()) < 6
    monkeypatch.undo()
    assert run(data_dir, out, max_iters=20, init_from="resume").code == 0  # as the line says


# --- what is refused ---

BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"n_layers": 2}, ("--n_layers", "--n_layer")),
    ({"n_embd": 15}, ("n_embd", "n_head", "15")),
    ({"seed": 2**64}, ("seed",)),
    ({"dropout": 1.0}, ("dropout",)),
    ({"vocab_size": 5}, ("train.bin", "5")),
    ({"block_size": 5000}, ("--block_size=5000",)),
    ({"dataset": "nowhere"}, ("no dataset", "nowhere", "python -m data")),
    ({"device": "cuda:7"}, ("cuda:7", "cpu")),
    ({"attention_backend": "sdp"}, ("'sdp'", "'sdpa'")),
    ({"attention_backend": "sdpa_cudnn", "attention_fallback": False}, ("sdpa_cudnn", "cuda")),
]


@pytest.mark.parametrize("knobs, words", BAD, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_a_bad_value_is_one_sentence(knobs, words, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = refusal(run(data_dir, tmp_path / "out", **knobs))
    for word in words:
        assert word in said
    assert not (tmp_path / "out").exists(), "a refused run must leave nothing behind"


def test_a_folder_that_cannot_be_written_is_one_sentence(data_dir, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert "file" in refusal(run(data_dir, tmp_path / "file"))
    assert "file" in refusal(run(data_dir, tmp_path / "file" / "out"))


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_the_old_checkpoint_stays(data_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    straight = run(data_dir, tmp_path / "straight")
    save_file = checkpoint.store.save_file

    def full(weights: Any, path: Path, **how: Any) -> None:
        if "step-00000006" in str(path):
            Path(path).write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(weights, path, **how)

    monkeypatch.setattr(checkpoint.store, "save_file", full)
    r = run(data_dir, out, eval_interval=3)
    said = refusal(r)
    for words in ("step-00000006", "No space left", "step-00000003 is still good"):
        assert words in said
    assert [p.name for p in out.iterdir() if "step" in p.name] == ["step-00000003"]
    monkeypatch.undo()
    again = run(data_dir, out, init_from="resume", max_iters=8)
    assert again.code == 0
    assert again.losses() == straight.losses()


def test_out_of_memory_is_one_sentence(data_dir, tmp_path, monkeypatch):
    def forward(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")

    monkeypatch.setattr(GPT, "forward", forward)
    for before, after in (((4, 1), (2, 2)), ((1, 3), (1, 6))):
        sizes = dict(zip(("batch_size", "gradient_accumulation_steps"), before))
        said = refusal(run(data_dir, tmp_path / "out", **sizes))
        assert "Tried to allocate 2.00 GiB" in said and "--gradient_checkpointing=True" in said
        assert "--batch_size={} with --gradient_accumulation_steps={},".format(*after) in said


@pytest.mark.parametrize(
    "cuda, mps, wanted, device",
    [(True, False, "auto", "cuda"), (False, True, "auto", "mps"), (False, False, "auto", "cpu"),
     (True, True, "cpu", "cpu"), (True, False, "cuda:1", "cuda:1")],
)
def test_the_device_that_is_picked(cuda, mps, wanted, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert str(runtime.pick_device(wanted)) == device
    # Triton launches its kernels on the current one, wherever their tensors are.
    assert current == [torch.device(device)] * (device == "cuda:1")


@pytest.mark.slow
def test_a_run_goes_on_in_the_dtype_it_began_with(data_dir, tmp_path, monkeypatch):
    """Also on a processor without the units; and one of an earlier version, "auto", in float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    monkeypatch.setattr(cpu_matmul, "LEAST_WIDTH", {"AMX": 1})
    r = run(data_dir, tmp_path, max_iters=1)
    assert r.code == 0 and "dtype: bfloat16 (this processor" in r.out
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {}, raising=False)
    r = run(data_dir, tmp_path, max_iters=2, init_from="resume")
    assert r.code == 0 and ", bfloat16, 1 process" in r.out and "dtype: " not in r.out
    settings = Path(checkpoint.latest(tmp_path)) / "settings.json"
    told = json.loads(settings.read_text(encoding="utf-8"))
    assert told["train"]["dtype"] == "bfloat16"
    told["train"]["dtype"] = "auto"
    settings.write_text(json.dumps(told), encoding="utf-8")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    r = run(data_dir, tmp_path, max_iters=3, init_from="resume")
    assert r.code == 0 and ", float32, 1 process" in r.out


@pytest.mark.parametrize("mode, device, micro_steps, refused", [
    ("reduce-overhead", "cuda", 2, True), ("max-autotune", "cuda", 40, True),
    ("reduce-overhead", "cuda", 1, False), ("max-autotune-no-cudagraphs", "cuda", 40, False),
    ("default", "cuda", 40, False), ("reduce-overhead", "cpu", 40, False)])
def test_cuda_graphs_are_refused_under_gradient_accumulation(
    mode, device, micro_steps, refused
) -> None:
    on, off = runtime.Decision(True), runtime.Decision(False)
    setup = runtime.Setup(torch.device(device), torch.float32, on, mode, off)
    module = torch.nn.Linear(1, 1)
    assert replace(setup, compile=off).compiled(module, micro_steps) is module
    if not refused:
        setup.compiled(module, micro_steps)
        setup.compiled(module)  # of one batch, as in the bench
        return
    with pytest.raises(UserError, match=f"{micro_steps} micro-batches") as e:
        setup.compiled(module, micro_steps)
    assert mode in str(e.value) and "max-autotune-no-cudagraphs" in str(e.value)


def test_a_loss_of_float16_that_was_not_finite_is_noted_for_good() -> None:
    """On a GPU the loop looks only where a line is due, steps later."""
    weight, found_inf = torch.nn.Parameter(torch.ones(2, 2)), torch.zeros(())
    optimizer, scaler = torch.optim.AdamW([weight], fused=True), torch.amp.GradScaler("cpu")
    for value in (math.inf, 1.0):
        scaler.scale(weight.sum()).backward()
        update(optimizer, scaler, torch.tensor(value), 1.0, found_inf)
        optimizer.zero_grad()
        assert found_inf == 1


@pytest.mark.parametrize("clip, length", [(1.0, 1.0), (9.0, 5.0), (0.0, 5.0)])
def test_scaled_gradients_are_clipped_by_their_own_norm(clip, length) -> None:
    """Whatever the scale of the loss is: here 65,536."""
    weight, scaler = torch.nn.Parameter(torch.zeros(2)), torch.amp.GradScaler("cpu")
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    optimizer: Any = torch.optim.SGD([weight], lr=1.0)  # it moves by the gradient itself
    update(optimizer, scaler, torch.tensor(1.0), clip, torch.zeros(()))
    torch.testing.assert_close(weight.data, -torch.tensor([0.6, 0.8]) * length)


@pytest.mark.parametrize("V, rows", [(1024, 1024), (1025, 1088), (50257, 50304)])
def test_a_large_vocabulary_is_rounded_up_and_a_small_one_is_not(V, rows) -> None:
    assert data.padded(V) == rows


def test_no_time_is_printed_that_was_not_measured(data_dir, tmp_path) -> None:
    """The first steps allocate: the lines of a run of two steps have no ms and no MFU."""
    r = run(data_dir, tmp_path, max_iters=2)
    assert r.code == 0 and " ms" not in r.out and not any("ms" in row for row in r.rows)
    again = run(data_dir, tmp_path, max_iters=1, init_from="resume")
    assert again.code == 0 and "at the peak rate 0 s" in again.out  # and not a negative time


@pytest.mark.slow
def test_more_steps_than_the_schedule_has_are_warned_of(data_dir, tmp_path, caplog) -> None:
    assert run(data_dir, tmp_path, max_iters=2).code == 0
    r = run(data_dir, tmp_path, max_iters=4, init_from="resume")
    rates = [row["lr"] for row in r.rows if "lr" in row]
    assert "--lr_decay_iters=2" in caplog.text and rates[-1] == pytest.approx(1e-3)


@pytest.mark.parametrize("busy, peak, shown", [
    (True, "measure", False), (False, "measure", True), (True, 1.0, True),
])
def test_a_busy_machine_leaves_mfu_out_of_the_lines_and_says_why_once(
    busy, peak, shown, data_dir, tmp_path, monkeypatch
) -> None:
    """Of a peak that was measured; a given one is the user's."""
    waits = itertools.count(0.0, 1e6 * busy)  # seconds without a core, at each look
    monkeypatch.setattr(metrics, "waited", lambda: next(waits))
    monkeypatch.setattr(flops, "measured_tflops", lambda *device: 1e6)
    r = run(data_dir, tmp_path, peak_tflops=peak)
    lines = [line for line in r.out.splitlines() if re.search(r"^iter \d+: .* tok/s", line)]
    assert r.code == 0 and len(lines) == 6 and all(("mfu" in line) == shown for line in lines)
    assert r.out.count("mfu is left out") == (not shown)
    timed = [row for row in r.rows if "mfu" in row]
    assert len(timed) == 6 and all((row["mfu"] is not None) == shown for row in timed)


def test_a_step_is_profiled_as_it_runs(data_dir: Path, tmp_path: Path) -> None:
    """A table by classes and a trace; the losses stay the same."""
    plain, seen = (run(data_dir, tmp_path / str(n), profile_step=n) for n in (None, 4))
    assert seen.code == 0 and seen.losses() == plain.losses()
    lines = seen.out.splitlines()
    classes = {line.split()[0] for line in lines[lines.index("step 4:") :] if line[:1].isalpha()}
    assert {"products", "attention", "elementwise", "loss", "optimizer", "gaps"} <= classes
    assert "step 4:" not in plain.out.splitlines()
    trace = json.loads((tmp_path / "4" / "profile.json").read_text(encoding="utf-8"))
    assert any(e["name"] == "aten::_fused_adamw_" for e in trace["traceEvents"])


def test_a_step_to_profile_that_never_comes_is_an_error(data_dir: Path, tmp_path: Path) -> None:
    found = refusal(run(data_dir, tmp_path, profile_step=9))
    assert "profile_step=9" in found and "max_iters=8" in found


@pytest.mark.parametrize("wanted, saved", [("auto", "float32"), ("autocast", "autocast")])
def test_the_residual_stream_s_dtype_is_decided_once(data_dir, tmp_path, wanted, saved) -> None:
    """auto is float32 on a CPU. The checkpoint has the decision, which a resumed run keeps."""
    run(data_dir, tmp_path, dtype="bfloat16", residual_dtype=wanted)
    settings = json.loads((tmp_path / "step-00000008/settings.json").read_text(encoding="utf-8"))
    assert settings["train"]["residual_dtype"] == saved
