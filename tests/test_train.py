"""The training loop: what a step does, what a run says, and every way to start or refuse one.

`run` and `make_data` serve the other tests of whole runs too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import logging
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import checkpoint
import data
import train
from checkpoint import build_model
from core import cpu_matmul, flops, metrics, peaks, runtime
from core.distributed import DistInfo
from core.metrics import duration
from core.metrics import read as read_rows
from core.optimizer import build_optimizer, learning_rate, update
from core.settings import Loaded, UserError, exit_on_user_error, read
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
}  # fmt: skip


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
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
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
    return Run(*enter(train.main, line), read_rows(out / "metrics.jsonl"))


def run(data_dir: Path, out: Path, **changes: Any) -> Run:
    return run_line(argv(data_dir, out, **changes), out)


def refusal(r: Run) -> str:
    """What a run says that a mistake of the user's ended; fails on any other end."""
    lines = r.err.strip().splitlines()
    assert r.code == 2, (r.code, r.out, r.err)
    assert len(lines) == 1 and lines[0].startswith("error: "), r.err
    assert "Traceback" not in r.out + r.err
    return lines[0]


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
    assert rates(decay_lr=False)[4:] == [5 / 6] + [1.0] * 25
    assert rates(22, min_lr=None)[20:] == [0.1] * 2  # a tenth of the highest
    assert rates(22, min_lr=0.0)[20:] == [0.0] * 2


def test_a_rate_below_zero_is_refused(data_dir, tmp_path):
    assert "min_lr" in refusal(run(data_dir, tmp_path / "out", min_lr=-1e-3))


def test_the_rate_is_what_the_optimizer_gets(data_dir, tmp_path, monkeypatch):
    seen = []
    step = torch.optim.AdamW.step

    def spy(self: Any, *args: Any) -> Any:
        seen.append({g["lr"] for g in self.param_groups})
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    r = run(data_dir, tmp_path / "out", max_iters=4)
    wanted = [learning_rate(i, config(max_iters=4)) for i in range(4)]
    assert seen == [{lr} for lr in wanted]
    assert [row["lr"] for row in r.rows if "lr" in row] == wanted


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


def test_gradients_in_parts_are_clipped_by_the_norm_of_all_of_them(monkeypatch):
    params, bad = [p.requires_grad_() for p in tensors(0)], torch.zeros(())
    for p, g in zip(params, tensors(1)):
        p.grad = g
    norm = math.sqrt(sum(float((g * g).sum()) for g in tensors(1)))
    monkeypatch.setattr("core.optimizer.whole", lambda t: 4 * t)  # as if others had the rest
    update(optimizer := adamw(params, fused=True), NO_SCALER, torch.tensor(1.0), 0.3, bad)
    assert float(optimizer.grad_scale) == pytest.approx(4 * norm / 0.3)


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


def test_adamw_is_fused_where_pytorch_can():
    model = torch.nn.Linear(2, 2)
    fused = {
        kind: build_optimizer(model, config(), torch.device(kind)).defaults["fused"]
        for kind in ("cpu", "cuda", "mps")
    }
    assert fused == {"cpu": True, "cuda": True, "mps": False}


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=8, bias=True))
    optimizer = build_optimizer(model, config(weight_decay=0.3), torch.device("cpu"))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in plain["params"]} == {1}
    grouped = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())  # each of them, once
    assert optimizer.defaults["fused"] is True
    assert optimizer.defaults["betas"] == (0.9, 0.95)


# --- the same step in other ways ---


def close(a: Mapping[int, float], b: Mapping[int, float], rtol: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(math.isclose(a[i], b[i], rel_tol=rtol) for i in a)


def test_gradient_accumulation_does_not_change_the_losses(data_dir, tmp_path):
    results = []
    for micro, steps in ((8, 1), (4, 2), (2, 4)):
        out = tmp_path / str(micro)
        r = run(data_dir, out, batch_size=micro, gradient_accumulation_steps=steps)
        assert r.code == 0
        results.append(r.losses())
    assert len(results[0]) == 8
    assert results[0][8] < results[0][1]
    assert close(results[0], results[1]) and close(results[0], results[2])


def test_gradient_checkpointing_gives_the_same_bits(data_dir, tmp_path):
    plain, again = (
        run(data_dir, tmp_path / str(on), n_layer=2, dropout=0.2, gradient_checkpointing=on)
        for on in (False, True)
    )
    assert plain.losses() == again.losses() and len(plain.losses()) == 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_learns_what_float32_learns(dtype, data_dir, tmp_path, monkeypatch):
    seen = []
    forward = GPT.hidden

    def spy(self: GPT, *args: Any, **kwargs: Any) -> Tensor:
        x = forward(self, *args, **kwargs)
        seen.append(self.head(x[:, :1]).dtype)
        return x

    monkeypatch.setattr(GPT, "hidden", spy)
    want = run(data_dir, tmp_path / "a", max_iters=60).losses()
    assert set(seen) == {torch.float32}
    seen.clear()
    r = run(data_dir, tmp_path / "b", max_iters=60, dtype=dtype)
    assert r.code == 0 and dtype in r.out
    assert set(seen) == {getattr(torch, dtype)}
    losses = r.losses()
    assert losses[60] < losses[1] - 0.5
    assert losses[1] == pytest.approx(want[1], rel=1e-2)
    assert losses[60] == pytest.approx(want[60], rel=0.05)


def test_without_a_compiler_compile_is_off_and_says_why(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, *a, **k: None)
    r = run(data_dir, tmp_path / "out", max_iters=1, compile=True)
    assert r.code == 0
    assert "compile: off (there is no C++ compiler on this machine)" in r.out
    monkeypatch.setattr(shutil, "which", lambda name, *a, **k: f"/usr/bin/{name}")
    r = run(data_dir, tmp_path / "out", max_iters=1, compile=False)
    assert "compile: off (--compile=False)" in r.out
    r = run(data_dir, tmp_path / "out", max_iters=1)
    assert "compile: off" in r.out and "--compile=True turns it on" in r.out


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
    assert close(
        {k: v[1] for k, v in plain.evaluations().items()},
        {k: v[1] for k, v in r.evaluations().items()},
        rtol=1e-4,
    )


# --- evaluation ---


def test_an_evaluation_uses_the_same_windows_and_no_dropout(data_dir, tmp_path):
    """Weights that stay: each evaluation gives the same bits, while the training loss moves."""
    r = run(data_dir, tmp_path / "out", learning_rate=1e-30, dropout=0.3, eval_interval=2,
            eval_on_start=True)  # fmt: skip
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
        x, y, _ = next(data.eval_batches(tokens, 16, 1, 3 * 4))
        with torch.no_grad():
            assert told == pytest.approx(float(model(x, y)[1]), rel=1e-6)


def test_processes_that_share_an_evaluation_come_to_the_loss_of_one(data_dir, monkeypatch):
    """Seven sequences, three processes, batches of two: one counts two, and then one; the others
    two, and then none. One after the other, and the sums at the end."""
    told: list[list[float]] = []
    cpu = torch.device("cpu")
    config = TrainConfig(**{**TINY, "batch_size": 2, "eval_iters": 4})
    torch.manual_seed(3)
    model = GPT(config.model(64)).eval()
    splits = {s: data.load(data_dir / "tiny", s, 16, 64)[: 7 * 16 + 1] for s in ("train", "val")}
    # As in a ring: half of each sequence, which has this weight in the mean.
    monkeypatch.setattr(train.parallel, "mine", lambda model, x, y: (x[:, :8], y[:, :8]))
    freed: list[Any] = []  # of what FSDP keeps gathered
    monkeypatch.setattr(train.parallel, "reshard", freed.append)
    for rank in range(3):
        monkeypatch.setattr(DistInfo, "sum", lambda self, values: told.append(values) or values)
        run: Any = types.SimpleNamespace(
            config=config, distributed=DistInfo(cpu, rank, 3), setup=runtime.Setup.of(cpu),
            model=model, module=model, splits=splits, weight=0.5, step=0, metrics=None,
        )  # fmt: skip
        train.evaluate(run)
    for tokens, parts in zip(splits.values(), (told[::2], told[1::2]), strict=True):
        x, y, _ = next(data.eval_batches(tokens, 16, 1, 7))
        with torch.no_grad():
            want = float(model(x[:, :8], y[:, :8])[1]) / 2
        losses, sequences = (sum(column) for column in zip(*parts, strict=True))
        assert sequences == len(x) == 7 and losses / 7 == pytest.approx(want, rel=1e-6)
    assert freed == [model] * 3


def test_each_process_has_its_share_of_a_step_weighed_by_it_and_dropout_of_its_own(
    data_dir, tmp_path, monkeypatch
):
    """Eight sequences, three processes, one after the other. All begin with the same weights, and
    ask for the kernel of the largest micro-batch, to train and to evaluate."""
    shares, weights, seeds, begun, asked = [], [], [], [], []

    def step(module: Any, *args: Any) -> Tensor:
        x, weight = args[3], args[-1]
        shares.append(x)
        weights.append(weight)
        seeds.append(torch.initial_seed())
        begun.append(module.transformer.wte.weight.detach().clone())
        return torch.tensor(5.0)

    attention = GPT.attention

    def ask(self: GPT, *args: Any, **how: Any) -> Any:
        asked.append((self.training, how["shape"]))
        return attention(self, *args, **how)

    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(train, "evaluate", lambda run: 1.0)
    monkeypatch.setattr(train.runtime, "StopSignal", lambda: types.SimpleNamespace(signal=None))
    monkeypatch.setattr(metrics, "draw", lambda path, picture: None)
    monkeypatch.setattr(GPT, "attention", ask)
    monkeypatch.setattr(train.checkpoint, "save_run", lambda run, loss: None)
    monkeypatch.setattr(train.parallel, "replicate", lambda module, distributed: module)
    monkeypatch.setattr(DistInfo, "sum", lambda self, values: [3 * v for v in values])
    monkeypatch.setattr(DistInfo, "gather", lambda self, value: [value] * 3)
    ring = types.SimpleNamespace(shard=lambda t, fill: t[:, 4:], weight=lambda T: T / 32)
    monkeypatch.setattr(train.parallel, "ring", lambda distributed, T: ring)
    config = {**TINY, "batch_size": 4, "gradient_accumulation_steps": 2, "max_iters": 1}
    loaded = read(TrainConfig, argv(data_dir, tmp_path / "out", **config))
    for rank in range(3):
        watch: Any = types.SimpleNamespace(mark=lambda step, phase: None)
        train.train(loaded, DistInfo(torch.device("cpu"), rank, 3), watch)
    counts = [len(x) for x in shares]
    assert sorted(counts) == [2, 3, 3]
    assert weights == pytest.approx([0.5 * 3 * n / 8 for n in counts])
    assert all(x.shape[1] == 12 for x in shares)  # the ring's share of each sequence
    (row,) = read_rows(tmp_path / "out" / "metrics.jsonl")
    assert row["loss"] == 5  # the mean of the three
    assert len({tuple(row) for row in torch.cat(shares).tolist()}) == 8  # all of the step's
    seed = loaded.settings.seed
    assert seeds == [seed, seed + 1, seed + 2]
    assert all(torch.equal(w, begun[0]) for w in begun)
    assert asked == [(True, (4, 16)), (False, (4, 16))] * 3


def test_what_is_compiled_is_what_is_trained_and_evaluated(data_dir, tmp_path, monkeypatch):
    calls: list[bool] = []

    class Compiled(torch.nn.Module):
        def __init__(self, model: GPT, mode: str) -> None:
            super().__init__()
            assert model.compiled and mode == "max-autotune-no-cudagraphs"
            self.inner = model

        def forward(self, *args: Tensor) -> Any:
            calls.append(self.inner.training)
            return self.inner(*args)

    monkeypatch.setattr(torch, "compile", Compiled)
    monkeypatch.setattr(shutil, "which", lambda name: name)  # a C++ compiler
    r = run(data_dir, tmp_path / "out", max_iters=2, eval_interval=1, compile=True,
            compile_mode="max-autotune-no-cudagraphs", gradient_accumulation_steps=3)  # fmt: skip
    assert r.code == 0 and "compile: on (mode max-autotune-no-cudagraphs)" in r.out, r.err
    assert calls == ([True] * 3 + [False] * 4) * 2


def test_the_sample_at_the_end_is_drawn_as_it_is_said(data_dir, tmp_path, monkeypatch):
    def continuation(model: GPT, tokenizer: Any, prompt: str, n: int, **how: Any) -> str:
        assert not model.training and tokenizer.decode(tokenizer.encode("to be")) == "to be"
        assert (prompt, n) == ("\n", 7)
        assert how == {"seed": 5, "temperature": 0.8, "top_k": 200}
        assert not torch.are_deterministic_algorithms_enabled()
        return "\nTo be,\nor not  "

    monkeypatch.setattr(train, "continuation", continuation)
    r = run(data_dir, tmp_path / "out", max_iters=1, sample_tokens=7, seed=5, dropout=0.1,
            deterministic=True)  # fmt: skip
    assert r.code == 0 and r.out.endswith(
        "--- 7 tokens of what it has learned ---\nTo be,\nor not\n"
    )
    stopped = run(data_dir, tmp_path / "out", max_iters=1, init_from="resume", sample_tokens=7)
    assert "what it has learned" not in stopped.out  # there was nothing to do


def test_what_is_logged_is_shown_and_other_libraries_warnings(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("nanoattn"), "level", logging.NOTSET)
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    runtime.show_log()
    for name in ("nanoattn", "theirs"):
        logging.getLogger(name).info("of %s", name)
        logging.getLogger(name).warning("by %s", name)
    lines = ["INFO: of nanoattn", "WARNING: by nanoattn", "WARNING: by theirs"]
    assert capsys.readouterr().err.splitlines() == lines


def test_eval_only_evaluates_and_touches_nothing(data_dir, tmp_path):
    out = tmp_path / "out"
    done = run(data_dir, out, eval_interval=4)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    train_loss, val_loss = done.evaluations()[8]
    said = f"step 8: train loss {train_loss:.4f}, val loss {val_loss:.4f}"
    for _ in range(2):
        r = run(data_dir, out, init_from="resume", eval_only=True)
        assert r.code == 0 and said in r.out and "iter " not in r.out
    fresh = run(data_dir, tmp_path / "fresh", eval_only=True)
    said_at_0 = re.search(r"step 0: train loss \d\.\d{4}, val loss \d\.\d{4}", fresh.out)
    assert fresh.code == 0 and said_at_0
    assert not (tmp_path / "fresh").exists() or not any((tmp_path / "fresh").iterdir())
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


# --- what a run says and leaves behind ---

LINE = re.compile(
    r"iter (?P<iter>\d+): loss \d+\.\d{4}, lr \d\.\de[+-]\d\d, "
    r"[\d,]+\.\d ms, (warming up|[\d,]+ tok/s, mfu \d+\.\d% \(causal \d+\.\d%\)"
    r"(?P<of> of measured peak)?)"
    r", mem \d+\.\d GB(, (?P<left>[\d.,]+ (s|min|h|days|years)) left)?"
)
TIMED = {"iter", "loss", "lr", "ms", "tokens_per_s", "mfu", "mfu_causal", "mem_bytes"}


def test_the_line_of_the_documentation_fits_the_pattern():
    line = (
        "iter 120: loss 2.3145, lr 9.8e-04, 45.1 ms, 17,032 tok/s, mfu 41.2% (causal 38.5%), "
        "mem 1.2 GB"
    )
    assert LINE.fullmatch(line)
    assert LINE.fullmatch(line.replace("),", ") of measured peak,"))


@pytest.mark.parametrize("measured", [False, True])
def test_lines_rows_and_the_picture(measured, data_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    peak = flops.Peak(0.05, "measured: by a test", True)
    monkeypatch.setattr(peaks, "best_peak", lambda *a: peak)
    r = run(data_dir, out, max_iters=9, log_interval=3, eval_interval=6,
            peak_tflops="none" if measured else 2.0)  # fmt: skip
    lines = [line for line in r.out.splitlines() if line.startswith("iter ")]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), lines
    assert [int(m["iter"]) for m in found if m] == [1, 3, 6, 9]
    assert "warming up" in lines[0] and "warming up" not in lines[-1]
    assert [bool(m["of"]) for m in found[-2:] if m] == [measured] * 2

    steps = [row for row in r.rows if "loss" in row]
    assert [row["iter"] for row in steps] == [1, 3, 6, 9]
    assert steps[0].keys() == {"iter", "loss", "lr", "mem_bytes"}
    assert all(row.keys() == TIMED for row in steps[-2:])
    evaluations = [row for row in r.rows if "val_loss" in row]
    assert all(row.keys() == {"iter", "train_loss", "val_loss"} for row in evaluations)
    assert [row["iter"] for row in evaluations] == [6, 9]
    for row, line in zip(steps[-2:], lines[-2:]):  # the line and the row say the same
        assert f"loss {row['loss']:.4f}, lr {row['lr']:.1e}, {row['ms']:,.1f} ms" in line
        assert row["tokens_per_s"] == pytest.approx(64e3 / row["ms"])
        size = GPTConfig(16, len(set(TEXT)), 1, 2, 16, bias=False)
        used = peak if measured else flops.Peak(2.0, "given")
        want = flops.mfu(size, 16, row["tokens_per_s"], used)
        assert (row["mfu"], row["mfu_causal"]) == pytest.approx(want)
        assert 0 < row["mfu_causal"] < row["mfu"] < 1
        assert 2**20 < row["mem_bytes"] < 2**40
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"step 9: train loss {evaluations[-1]['train_loss']:.4f}" in r.out
    assert re.search(r"unigram model \d\.\d\d, bigram model \d\.\d\d", r.out)
    for words in ("max_iters", "(command line)", "float32, 1 process\n", "64 tokens a step"):
        assert words in r.out


def test_the_defaults_are_nanogpts_and_what_has_a_price_or_a_risk_is_off():
    of_nanogpt = {
        "eval_interval": 2000, "eval_iters": 200, "eval_only": False, "init_from": "scratch",
        "wandb_log": False, "batch_size": 12, "block_size": 1024, "n_layer": 12, "n_head": 12,
        "n_embd": 768, "dropout": 0.0, "bias": False, "learning_rate": 6e-4, "max_iters": 600_000,
        "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "decay_lr": True,
        "warmup_iters": 2000, "seed": 1337, "tf32": True,
    }  # fmt: skip
    off = {
        "eval_on_start": False, "sample_tokens": 0, "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False, "residual_dtype": "float32", "gelu": "exact",
        "attention_hub_kernels": False, "allow_mps_sdpa": False, "sdpa_flash_impl": "FA2",
        "parallel": "ddp", "context_parallel": 1, "async_checkpoint": False,
        "compile_mode": "default", "deterministic": False,
    }  # fmt: skip
    decided = {  # by what is there: the data, the machine, other settings
        **dict.fromkeys(("n_kv_head", "vocab_size", "attention_window", "min_lr")),
        **dict.fromkeys(("lr_decay_iters", "shard_size", "compile", "onednn", "peak_tflops")),
        **dict.fromkeys(("attention_backend", "device", "dtype"), "auto"),
    }
    ours = {
        "out_dir": "out/gpt", "dataset": "shakespeare_char", "data_dir": "data", "log_interval": 10,
        "wandb_project": "nanoattn", "wandb_run_name": "gpt", "keep_checkpoints": 2,
        "attention_fallback": True, "hang_timeout": 45.0,
    }  # fmt: skip
    assert asdict(train.TrainConfig()) == {**of_nanogpt, **off, **decided, **ours}


def test_first_steps_are_not_in_the_time_of_a_step(data_dir, tmp_path, monkeypatch):
    """A clock that only the model moves: 100 s in each of the first two steps, then 1 ms; and 7 s
    in each batch of an evaluation, which is no step."""
    now = [0.0]
    steps = [0]
    forward = GPT.forward

    def slow(self: GPT, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            steps[0] += 1
            now[0] += 100.0 if steps[0] <= 2 else 1e-3
        else:
            now[0] += 7.0
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", slow)
    for module in (train, runtime):
        clock = types.SimpleNamespace(perf_counter=lambda: now[0])
        monkeypatch.setattr(module, "time", clock)
    r = run(data_dir, tmp_path / "out", max_iters=20, log_interval=5)
    timed = {row["iter"]: row["ms"] for row in r.rows if "ms" in row}
    assert timed.keys() >= {10, 15, 20}
    assert all(ms == pytest.approx(1.0) for ms in timed.values()), timed
    # 19 steps of 100 s seemed to be left after the first.
    assert "\n64,000 tok/s, mfu" in r.out
    left = [m["left"] for line in r.out.splitlines() if (m := LINE.fullmatch(line))]
    assert left == ["32 min", "0 s", "0 s", "0 s", None]
    steps[0] = 2  # no slow ones; micro-batches take 1 ms each, and all of them are counted
    many = {"gradient_accumulation_steps": 2, "max_iters": 10, "log_interval": 5}
    assert "\n64,000 tok/s, mfu" in run(data_dir, tmp_path / "many", **many).out
    steps[0] = 0
    r = run(data_dir, tmp_path / "out", max_iters=40, log_interval=5, init_from="resume")
    timed = {row["iter"]: row["ms"] for row in r.rows if "ms" in row and row["iter"] > 20}
    assert timed.keys() >= {30, 35, 40}
    assert all(ms == pytest.approx(1.0) for ms in timed.values()), timed


def test_the_last_line_has_the_median_of_the_intervals(data_dir, tmp_path, monkeypatch):
    """Steps of 1 ms, of 2 ms from the 9th on, and of 16 ms from the 17th: intervals of 4 steps."""
    now, steps, forward = [0.0], [0], GPT.forward

    def moves(self: GPT, *args: Any, **kwargs: Any) -> Any:
        steps[0] += self.training
        now[0] += self.training * 1e-3 * (1 if steps[0] <= 8 else 2 if steps[0] <= 16 else 16)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", moves)
    for module in (train, runtime):
        clock = types.SimpleNamespace(perf_counter=lambda: now[0])
        monkeypatch.setattr(module, "time", clock)
    r = run(data_dir, tmp_path / "out", max_iters=20, log_interval=4, eval_interval=20)
    assert "\n32,000 tok/s, mfu" in r.out  # of 64,000 twice, 32,000 twice and 4,000: the third


@pytest.mark.parametrize(
    "truth, shares",
    [
        (2.0, [25.0, 50.0, 50.0, 50.0]),  # what a quiet machine gives, times what the run does
        (0.8, [62.5, None, None, None]),
    ],
)  # no look finds one that it does not pass
def test_a_run_that_comes_near_its_peak_measures_it_again(truth, shares, data_dir, tmp_path,
                                                          monkeypatch):  # fmt: skip
    """The peak of a busy machine, a third of the truth: the run made 149 % of it."""
    now, steps, forward = [0.0], [0], GPT.forward

    def moves(self: GPT, *args: Any, **kwargs: Any) -> Any:
        steps[0] += self.training
        now[0] += self.training * 1e-3 * (2 if steps[0] <= 8 else 1)
        return forward(self, *args, **kwargs)

    work = flops.flops_per_token(GPTConfig(16, len(set(TEXT)), 1, 2, 16, bias=False), 16) * 64e3
    found: list[flops.Peak] = []

    def best_peak(*args: Any) -> flops.Peak:
        now[0] += 1000.0  # a measurement takes its time, and it is nobody's
        share = truth if found else 0.67
        found.append(flops.Peak(share * work / 1e12, f"measured: look {len(found)}", True))
        return found[-1]

    monkeypatch.setattr(GPT, "forward", moves)
    for module in (train, runtime):
        clock = types.SimpleNamespace(perf_counter=lambda: now[0])
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(peaks, "best_peak", best_peak)
    r = run(data_dir, tmp_path / "out", max_iters=20, log_interval=4, eval_interval=20,
            peak_tflops="none")  # fmt: skip
    rows = [row for row in r.rows if "tokens_per_s" in row and row["iter"] > 4]
    assert [round(row["tokens_per_s"]) for row in rows] == [32000, 64000, 64000, 64000]
    known = [row["mfu"] if row["mfu"] is None else round(100 * row["mfu"], 1) for row in rows]
    percents = [float(x) for x in re.findall(r"mfu (\d+\.\d)%", r.out)]
    assert not [x for x in percents if x > 100], r.out
    assert known == shares, "what was printed before, too"
    again = f"near it: {found[1]}; the mfu of 2 earlier lines is less, and metrics.jsonl"
    assert r.out.count(again) == 1
    if truth > 1:
        assert len(found) == 2, "one look was enough"
        assert f"\n64,000 tok/s, mfu 50.0% (causal {50 * flops_ratio():.1f}%) of measured" in r.out
        assert r.out.rstrip().splitlines()[-2].endswith(f"peak: {found[1]}")
    else:
        assert len(found) == 1 + 2, "at step 12, and at 20, the last"
        why = f"the run does more than the peak of {found[1]}"
        assert rows[1]["mfu_why"] == why and f"\n64,000 tok/s, mfu not known: {why}" in r.out
        assert "look 1), as before" in r.out
    assert "32 min" not in r.out and "17 min" not in r.out  # no second of it is in the time left


def flops_ratio() -> float:
    """Of the causal count to the other."""
    size = GPTConfig(16, len(set(TEXT)), 1, 2, 16, bias=False)
    return flops.flops_per_token(size, 16, causal=True) / flops.flops_per_token(size, 16)


def test_a_long_silence_is_broken(data_dir, tmp_path, monkeypatch):
    """Steps of 7 s, and a line asked for every 1,000 steps: one comes when 30 s have passed."""
    now, forward = [0.0], GPT.forward

    def slow(self: GPT, *args: Any, **kwargs: Any) -> Any:
        now[0] += 7.0 * self.training
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", slow)
    for module in (train, runtime):
        clock = types.SimpleNamespace(perf_counter=lambda: now[0])
        monkeypatch.setattr(module, "time", clock)
    r = run(data_dir, tmp_path / "out", max_iters=14, log_interval=1000, eval_interval=1000)
    found = [LINE.fullmatch(line) for line in r.out.splitlines() if line.startswith("iter ")]
    assert [int(m["iter"]) for m in found if m] == [1, 7, 12, 14]  # 2 steps are warm-up


@pytest.mark.parametrize("seconds, said", [
    (0, "0 s"), (89, "89 s"), (90, "2 min"), (600, "10 min"), (5399, "90 min"), (5400, "1.5 h"),
    (86400, "24.0 h"), (172800, "2.0 days"), (63072000, "2.0 years"), (3.2e10, "1,014.0 years"),
])  # fmt: skip
def test_a_duration_as_people_say_it(seconds, said):
    assert duration(seconds) == said


def test_what_lies_ahead_is_said_before_the_first_step(data_dir, tmp_path):
    """6 N + 12 L H Q T FLOPs a token, 64 tokens a step, at a peak of 1 GFLOP/s."""
    knobs = {"max_iters": 3, "peak_tflops": 1e-3, "n_layer": 2, "n_embd": 128, "batch_size": 64}
    r = run(data_dir, tmp_path / "out", **knobs)
    V, C = checkpoint.load(checkpoint.latest(tmp_path / "out")).config().vocab_size, 128
    N = 2 * 12 * C**2 + C * (2 * 2 + 1)  # two blocks' products, and five norms
    assert f"model: {N + (V + 16) * C:,} parameters, {N + V * C:,} without positions\n" in r.out
    seconds = (6 * (N + V * C) + 12 * 2 * 128 * 16) * 64 * 16 * 3 / 1e9
    assert f"3 steps: at the peak rate {seconds:.0f} s, in practice more\n" in r.out
    assert "\npeak: 0.001 TFLOP/s (--peak_tflops)\n" in r.out
    r = run(data_dir, tmp_path / "days", **knobs | {"max_iters": 1, "peak_tflops": 1e-9})
    assert "days, in practice more; config/train_shakespeare_cpu.py takes minutes\n" in r.out


def test_every_sequence_of_an_evaluation_weighs_the_same(data_dir, tmp_path):
    """Val has 5 batches of 3 and one of 1: the loss is the mean over all 16 windows."""
    short = {**TINY, "block_size": 4, "batch_size": 3, "eval_iters": 6}
    tokens = data.load(data_dir / "tiny", "val", 4, 100)[: 4 * 16 + 1]
    shapes = [len(x) for x, *_ in data.eval_batches(tokens, 4, 6, 3)]
    assert shapes[-1] < 3 and len(set(shapes[:-1])) == 1, shapes
    config = TrainConfig(**{**short, "data_dir": str(data_dir), "dataset": "tiny"})
    loaded = Loaded(config, {})
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        ready = train.set_up(loaded, DistInfo(torch.device("cpu")))
        ready.splits = {"train": tokens, "val": tokens}
        got = train.evaluate(ready)
    x = torch.cat([x for x, *_ in data.eval_batches(tokens, 4, 6, 3)])
    y = torch.cat([y for _, y, _ in data.eval_batches(tokens, 4, 6, 3)])
    with torch.no_grad():
        logits = ready.model.eval()(x)[0]
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    assert got == pytest.approx(float(want), rel=1e-5)


def test_a_sample_at_the_end(data_dir, tmp_path):
    r = run(data_dir, tmp_path / "out", sample_tokens=20)
    assert "20 tokens of what it has learned" in r.out
    again = run(data_dir, tmp_path / "out2", sample_tokens=20)
    assert r.out.split("learned ---")[1] == again.out.split("learned ---")[1]


def test_a_sample_of_a_text_without_line_breaks(tmp_path):
    text = make_data(tmp_path / "data", TEXT.replace("\n", " "))
    r = run(text, tmp_path / "out", sample_tokens=5)
    assert r.code == 0, r.err


# --- where a run begins ---


def mean_loss(model: GPT, data_dir: Path, block: int = 16) -> float:
    """The validation loss of 2 batches of 4."""
    tokens = data.load(data_dir / "tiny", "val", block, model.config.vocab_size)
    x, y, _ = next(data.eval_batches(tokens, block, 1, 8))
    with torch.no_grad():
        return float(model.eval()(x, y)[1])


def first_loss(data_dir: Path, out: Path, **changes: Any) -> float:
    r = run(data_dir, out, eval_on_start=True, max_iters=1, **changes)
    assert r.code == 0, r.err
    return r.evaluations()[0][1]


def test_from_a_checkpoint_folder(data_dir, tmp_path):
    one = run(data_dir, tmp_path / "one", n_layer=2)
    for i, source in enumerate((tmp_path / "one", checkpoint.latest(tmp_path / "one"))):
        loss = first_loss(data_dir, tmp_path / str(i), init_from=source, n_layer=2)
        assert loss == one.evaluations()[8][1]


def test_from_a_checkpoint_folder_the_window_stays(data_dir, tmp_path):
    """What the weights were trained with is kept where nothing else is asked for."""
    one = run(data_dir, tmp_path / "one", attention_window=3)
    assert checkpoint.load(checkpoint.latest(tmp_path / "one")).model().config.attention_window == 3
    two = first_loss(data_dir, tmp_path / "two", init_from=tmp_path / "one")
    assert two == one.evaluations()[8][1]
    out = tmp_path / "two"  # whose own settings name none
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


def test_what_begins_with_other_weights_is_saved_with_their_sizes(data_dir, tmp_path):
    """Nothing says them: the run's own settings hold the defaults."""
    first, second = tmp_path / "first", tmp_path / "second"
    sizes = {"n_layer": 2, "n_kv_head": 1, "attention_window": 5, "gelu": "tanh", "bias": True}
    assert run(data_dir, first, max_iters=1, **sizes).code == 0
    line = argv(data_dir, second, max_iters=1, init_from=first, dropout=0.25, block_size=8)
    line = [
        word for word in line if word.split("=")[0] not in ("--n_layer", "--n_head", "--n_embd")
    ]
    r = run_line(line, second)
    assert r.code == 0, r.err
    before, after = (checkpoint.load(checkpoint.latest(out)) for out in (first, second))
    assert after.config() == replace(before.config(), dropout=0.25, block_size=8)
    assert after.config().attention_window == 5 and after.config().kv_heads == 1
    r = run_line([f"--out_dir={second}", "--init_from=resume", "--max_iters=2"], second)
    assert r.code == 0 and list(r.losses()) == [1, 2], r.err
    assert checkpoint.load(checkpoint.latest(second)).config() == after.config()


def test_from_a_folder_of_transformers(data_dir, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(6)
    size = transformers.GPT2Config(
        vocab_size=len(set(TEXT)) + 3, n_positions=24, n_embd=16, n_layer=2, n_head=2
    )
    theirs = transformers.GPT2LMHeadModel(size).eval()
    theirs.save_pretrained(tmp_path / "hf")
    tokens = data.load(data_dir / "tiny", "val", 16, size.vocab_size)
    x, y, _ = next(data.eval_batches(tokens, 16, 1, 8))
    with torch.no_grad():
        logits = theirs(x).logits
    want = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()))
    loss = first_loss(data_dir, tmp_path / "out", init_from=tmp_path / "hf", n_layer=2, bias=True,
                      gelu="tanh")  # fmt: skip
    assert loss == pytest.approx(want, rel=1e-5)

    size.vocab_size = len(set(TEXT)) - 1
    transformers.GPT2LMHeadModel(size).save_pretrained(tmp_path / "small")
    said = refusal(run(data_dir, tmp_path / "out2", init_from=tmp_path / "small"))
    assert f"{size.vocab_size} tokens" in said and "tokenizer" in said


@pytest.mark.parametrize(
    "knob", [{"n_layer": 3}, {"n_embd": 32}, {"bias": True}, {"vocab_size": 99}]
)
def test_a_size_that_the_weights_do_not_have_is_refused(knob, data_dir, tmp_path):
    """Given on the command line, it must not be dropped in silence."""
    run(data_dir, tmp_path / "one", max_iters=1)
    (name,) = knob
    r = run(data_dir, tmp_path / "two", init_from=tmp_path / "one", **knob)
    assert name in refusal(r)


def test_a_name_that_is_nowhere_is_refused(data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with contextlib.suppress(ImportError):
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = refusal(run(data_dir, tmp_path / "out", init_from="gpt2-huge"))
    assert "'gpt2-huge' is no local folder or file" in said
    assert not (tmp_path / "out").exists()


def test_a_large_vocabulary_is_rounded_up_and_a_small_one_is_not():
    sizes = {"n_layer": 1, "n_embd": 2, "n_head": 1, "block_size": 4}

    def size(V: int, **more: int) -> int:
        loaded = Loaded(TrainConfig(**sizes, **more), {})
        return build_model(loaded, {"vocab_size": V}).config.vocab_size

    assert size(65) == 65
    assert size(1025) == size(1088) == 1088
    assert size(65, vocab_size=70) == 70


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


@pytest.mark.parametrize("log_interval", [1, 4])
@pytest.mark.parametrize(
    "how, dtype",
    [("both", "float32"), ("loss", "float32"), ("gradient", "float32"), ("both", "float16"),
     ("loss", "float16")],
)  # fmt: skip
def test_a_loss_that_is_not_finite_stops_the_run(
    how, dtype, log_interval, data_dir, tmp_path, monkeypatch
):
    """With float16 a gradient that overflows is daily bread: its step is left out, no more."""
    out = tmp_path / "out"
    spoiled = Spoiled(monkeypatch, 6, how)
    r = run(data_dir, out, max_iters=20, eval_interval=3, log_interval=log_interval, dtype=dtype,
            attention_backend="sdpa")  # fmt: skip
    assert r.code == 1
    (line,) = [x for x in r.err.splitlines() if x.startswith("error: ")]
    lr = learning_rate(5, config(max_iters=20))
    for words in ("step 6", f"lr {lr:.2e}", "backend sdpa", "--attention_backend=manual",
                  "--init_from=resume"):  # fmt: skip
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


@pytest.mark.parametrize("eval_interval", [1, 50])
def test_a_rate_that_explodes_leaves_no_bad_checkpoint(eval_interval, data_dir, tmp_path):
    out = tmp_path / "out"
    r = run(data_dir, out, learning_rate=1e30, warmup_iters=0, eval_interval=eval_interval)
    assert r.code == 1 and "not finite" in r.err
    if eval_interval == 1:
        assert re.search(r"\(loss \d\.\d+, val loss (nan|inf), lr ", r.err), r.err
    finite(out)
    assert "NaN" not in (out / "metrics.jsonl").read_text()
    assert "Infinity" not in (out / "metrics.jsonl").read_text()


# --- what is refused ---

BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"n_layers": 2}, ("'--n_layers'", "did you mean '--n_layer'")),
    ({"n_layer": "two"}, ("--n_layer must be an integer", "'two'")),
    ({"bias": "maybe"}, ("--bias must be True or False",)),
    ({"dtype": "int8"}, ("--dtype must be one of", "bfloat16")),
    ({"learning_rate": "nan"}, ("--learning_rate must be a finite number",)),
    ({"n_embd": 15}, ("n_embd", "n_head", "15", "multiple")),
    ({"block_size": 0}, ("block_size must be at least 1, got 0",)),
    ({"batch_size": 0}, ("batch_size must be at least 1",)),
    ({"max_iters": 0}, ("max_iters must be at least 1",)),
    ({"vocab_size": 0}, ("vocab_size must be at least 1",)),
    ({"lr_decay_iters": -1}, ("lr_decay_iters",)),
    ({"seed": 2**64}, ("seed",)),
    ({"dropout": 1.0}, ("dropout",)),
    ({"vocab_size": 5}, ("train.bin", "the model's vocabulary ends at 4")),
    ({"block_size": 5000}, ("--block_size=5000", "lower --block_size")),
    ({"dataset": "nowhere"}, ("no dataset", "nowhere", "python -m data")),
    ({"device": "cuda:7"}, ("no device 'cuda:7'", "cpu")),
    ({"device": "cuda"}, ("no device 'cuda'", "cpu")),
    ({"device": "gpu"}, ("no device 'gpu'", "cpu")),
    ({"attention_backend": "sdp"}, ("unknown attention backend 'sdp'", "did you mean 'sdpa'")),
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


def test_a_bad_config_file_is_one_sentence(data_dir, tmp_path):
    path = tmp_path / "my.py"
    for line, words in {
        "lerning_rate = 1": ("my.py:2", "'lerning_rate'", "did you mean 'learning_rate'"),
        "n_layer = '2'": ("my.py:2: n_layer must be an integer",),
        "import os": ("my.py:2", "refused"),
    }.items():
        path.write_text(f"seed = 1\n{line}\n")
        said = refusal(run_line([str(path), *argv(data_dir, tmp_path / "out")], tmp_path / "out"))
        assert all(w in said for w in words), said


def test_a_damaged_dataset_is_one_sentence(data_dir, tmp_path):
    folder = tmp_path / "data" / "tiny"

    def fresh() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(data_dir / "tiny", folder)
        return folder

    def said() -> str:
        return refusal(run(tmp_path / "data", tmp_path / "out"))

    whole = (data_dir / "tiny" / "train.bin").read_bytes()
    for cut in (1, 100):
        (fresh() / "train.bin").write_bytes(whole[:-cut])
        assert "train.bin" in said() and "python -m data" in said()
    (fresh() / "train.bin").write_bytes(b"\xff\xff" + whole[2:])
    assert "has the token 65535" in said()
    (fresh() / "val.bin").unlink()
    assert "val.bin is missing" in said()
    (fresh() / "meta.json").write_text("{")
    assert "meta.json" in said()
    (fresh() / "meta.json").unlink()
    assert "no meta.json" in said()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "settings.json",
                                  "train_state.json"])  # fmt: skip
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_one_sentence(name, damage, data_dir, tmp_path):
    out = tmp_path / "out"
    run(data_dir, out, max_iters=2, eval_interval=1)
    path = checkpoint.latest(out) / name
    path.write_bytes(path.read_bytes()[:-20])
    if damage == "gone":
        path.unlink()
    rows = (out / "metrics.jsonl").read_text()
    said = refusal(run(data_dir, out, init_from="resume", max_iters=4))
    assert str(path) in said and "step-00000001" in said
    assert (out / "metrics.jsonl").read_text() == rows


def test_a_folder_that_cannot_be_written_is_one_sentence(data_dir, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert "file" in refusal(run(data_dir, tmp_path / "file"))
    assert "file" in refusal(run(data_dir, tmp_path / "file" / "out"))


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
)  # fmt: skip
def test_the_device_that_is_picked(cuda, mps, wanted, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert str(runtime.pick_device(wanted)) == device
    # Triton launches its kernels on the current one, wherever their tensors are.
    assert current == [torch.device(device)] * (device == "cuda:1")


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_the_dtype_that_is_picked(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capability)
    assert runtime.pick_dtype("auto", torch.device("cuda")) is dtype
    assert runtime.pick_dtype("float32", torch.device("cuda")) is torch.float32
    assert runtime.pick_dtype("auto", torch.device("cpu")) is torch.float32


@pytest.mark.parametrize("amx, n_embd, taken, why", [
    (True, 128, "bfloat16", "has bfloat16 matrix units"), (True, 64, "float32", "n_embd=128 on"),
    (False, 768, "float32", "no bfloat16 matrix units"), (True, None, "float32", ""),
])  # fmt: skip
def test_a_training_on_the_cpu_begins_in_bfloat16_where_it_is_faster(amx, n_embd, taken, why,
                                                                     monkeypatch):  # fmt: skip
    has = {"amx_bf16": amx, "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    setup = runtime.Setup.of(torch.device("cpu"), "auto", n_embd=n_embd)
    assert runtime.dtype_name(setup.dtype) == taken and why in setup.why_dtype
    line = next((n for n in setup.report(1) if n.startswith("dtype: ")), "")
    assert line == (f"dtype: {taken} ({setup.why_dtype})" if why else "")
    named = runtime.Setup.of(torch.device("cpu"), "float32", n_embd=n_embd)
    assert named.dtype is torch.float32 and not named.why_dtype


def test_a_run_goes_on_in_the_dtype_it_began_with(data_dir, tmp_path, monkeypatch):
    """Also on a processor without the units; and one of an earlier version, "auto", in float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    monkeypatch.setattr(cpu_matmul, "LEAST_WIDTH", 1)
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


def test_what_a_gpu_is_asked(monkeypatch):
    """By stand-ins: its memory, its name, to be waited for, whose flash kernel it is to take."""
    gpu, asked = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: {gpu: 7}[device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: {gpu: "NVIDIA X"}[device])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: asked.append("mps"))
    monkeypatch.setattr(runtime, "use_flash_impl", asked.append)
    assert runtime.peak_memory(gpu) == 7
    for device, waits in ((gpu, [gpu]), (torch.device("mps"), ["mps"]), (torch.device("cpu"), [])):
        assert runtime.now(device) > 0 and asked == waits
        asked.clear()
    monkeypatch.setattr(runtime, "find_spec", lambda name: None if name == "triton" else name)
    assert runtime.Setup.of(gpu, compile=None, n_embd=768).report(8) == [
        "device: cuda:1 (NVIDIA X), bfloat16, 8 processes",
        "compile: off (package 'triton' is not installed (pip install triton))",
    ]
    monkeypatch.setattr(runtime, "find_spec", lambda name: name)
    compiled = runtime.Setup.of(gpu, "float16", compile=None, compile_mode="max-autotune")
    assert compiled.report(1)[1:] == ["compile: on (mode max-autotune)"]
    for impl in ("FA2", "FA3"):
        plain = runtime.Setup.of(torch.device("cpu"), compile=False, sdpa_flash_impl=impl)
        assert plain.report(1)[-1] == "compile: off (--compile=False)"
    assert asked == ["FA2", "FA2", "FA3"]  # a CPU's only to say that it has none


def test_of_two_signals_from_torchrun_the_first_is_the_exit_code(monkeypatch, capfd) -> None:
    """Without torchrun the second one would end the process."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = runtime.StopSignal("the sentence")
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM and "\nthe sentence; once" in capfd.readouterr().err
        assert {signal.getsignal(s) for s in handlers} == {signal.SIG_DFL}
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        stop = runtime.StopSignal()
        for signum in handlers:
            signal.raise_signal(signum)
        assert stop.signal == signal.SIGINT
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="by /proc")
def test_the_most_memory_in_use_is_what_the_system_says() -> None:
    """The system counts the process that started this one, too: so more is taken than that had."""
    program = """
import re, torch
from core import runtime
cpu = torch.device("cpu")
torch.ones(runtime.peak_memory(cpu) // 4 + 2**25)
most = re.search("VmHWM:(.*)kB", open("/proc/self/status").read())[1]
print(runtime.peak_memory(cpu) / (int(most) * 1024))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          cwd=Path(train.__file__).parent)  # fmt: skip
    assert float(done.stdout) == pytest.approx(1, abs=0.01), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    """Pages that are touched for the first time, while 20 tensors of 64 MB come and go."""

    def faults(keep: bool) -> int:
        program = f"""
import resource, torch
from core import runtime
assert not {keep} or runtime.keep_freed_memory()
torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                              cwd=Path(train.__file__).parent)  # fmt: skip
        return int(done.stdout)

    assert faults(keep=True) < faults(keep=False) / 4


def test_a_run_on_the_cpu_keeps_freed_memory(data_dir, tmp_path, monkeypatch) -> None:
    called = []
    with monkeypatch.context() as patch:
        patch.setattr(runtime.sys, "platform", "darwin")
        assert runtime.keep_freed_memory() is False  # its malloc has no such numbers
        libc = types.SimpleNamespace(mallopt=lambda *given: called.append(given) or 1)
        patch.setattr(runtime.sys, "platform", "linux")
        patch.setattr(runtime.platform, "libc_ver", lambda: ("glibc", "2.36"))
        patch.setattr(runtime.ctypes, "CDLL", lambda name: libc)
        assert runtime.keep_freed_memory() is True
    assert dict(called) == {-4: 0, -1: -1}  # malloc.h: M_MMAP_MAX, M_TRIM_THRESHOLD
    called.clear()
    monkeypatch.setattr(runtime, "keep_freed_memory", lambda: called.append(True))
    assert run(data_dir, tmp_path, max_iters=1).code == 0 and called == [True]


@pytest.mark.parametrize("mode, device, micro_steps, refused", [
    ("reduce-overhead", "cuda", 2, True), ("max-autotune", "cuda", 40, True),
    ("reduce-overhead", "cuda", 1, False), ("max-autotune-no-cudagraphs", "cuda", 40, False),
    ("default", "cuda", 40, False), ("reduce-overhead", "cpu", 40, False)])  # fmt: skip
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


def test_onednn_is_for_float32_on_the_cpu() -> None:
    for kind, dtype in (("cuda", torch.float32), ("cpu", torch.bfloat16)):
        decided = runtime.decide_onednn(None, torch.device(kind), dtype)
        here = f"{str(dtype).removeprefix('torch.')} on {kind}"
        assert str(decided) == f"off (it is for float32 on the CPU, this is {here})"


def test_a_compiled_step_says_that_it_does_not_take_onednn() -> None:
    cpu = torch.device("cpu")
    decided = runtime.decide_onednn(True, cpu, torch.float32, compiled=True)
    assert str(decided) == "off (a compiled training step does not take it)" and not decided
    assert runtime.decide_onednn(True, cpu, torch.float32)


def test_a_compiled_run_checks_its_mode_and_takes_no_onednn(
    data_dir, tmp_path, monkeypatch
) -> None:
    asked = []
    compiled = runtime.Setup.compiled

    def note(setup: Any, model: Any, micro_steps: int) -> Any:
        asked.append((setup.compile_mode, micro_steps))
        return compiled(setup, model, micro_steps)

    monkeypatch.setattr(runtime.Setup, "compiled", note)
    monkeypatch.setattr(runtime, "decide_compile", lambda *given: runtime.Decision(True))
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)
    r = run(data_dir, tmp_path, max_iters=7, onednn=True, gradient_accumulation_steps=2)
    assert r.code == 0 and asked == [("default", 2)]
    assert [row["iter"] for row in r.rows if "ms" in row] == [6, 7]  # in five it is compiled
    assert "oneDNN for float32 products: off (a compiled training step" in r.out


@pytest.mark.parametrize("dtype, scaled, autocast", [
    ("float32", False, False), ("bfloat16", False, True), ("float16", True, True)])  # fmt: skip
def test_only_float16_scales_its_loss(dtype, scaled, autocast) -> None:
    setup = runtime.Setup.of(torch.device("cpu"), dtype)
    assert setup.scaler().is_enabled() == scaled
    with setup.autocast:
        assert torch.is_autocast_enabled("cpu") == autocast


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


def test_the_switches_of_the_process(monkeypatch) -> None:
    """Deterministic algorithms and TF32 are for the whole process, and only where asked for; of
    cuBLAS's workspace the user's own size stays."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    runtime.Setup.of(torch.device("cpu"), tf32=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32
    runtime.Setup.of(torch.device("cpu"), deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cuda.matmul.allow_tf32
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    runtime.Setup.of(torch.device("cpu"), deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("setting, field", [
    ("attention_fallback", "fallback"), ("attention_hub_kernels", "hub_kernels"),
    ("allow_mps_sdpa", "mps_sdpa"),
])  # fmt: skip
def test_each_setting_of_the_choice_reaches_the_policy(setting, field) -> None:
    off = dict.fromkeys(("attention_fallback", "attention_hub_kernels", "allow_mps_sdpa"), False)
    policy = asdict(TrainConfig(**{**off, setting: True}).policy)
    assert [name for name, on in policy.items() if on] == [field]
