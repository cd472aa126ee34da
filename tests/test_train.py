"""The training loop. `run` and `make_data` serve other tests too; refusals: test_refusals.py."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from core.metrics import read as read_rows
from core.optimizer import learning_rate
from core.settings import UserError, exit_on_user_error
from data.prepare import PrepareConfig, prepare
from model import GPT, GPTConfig
from train import TrainConfig

TEXT = "".join(
    f"{who} {does} the {what},\nand so {n} days went by.\n\n"
    for n, (who, does, what) in enumerate(itertools.product(
        ("Ann", "Bob", "The king", "My fool", "A wise old queen"),
        ("sees", "hath lost", "keeps", "would mend"),
        ("crown", "quick brown fox", "jug of wine", "moon")))
)
TINY: dict[str, Any] = {
    "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "batch_size": 4, "max_iters": 8,
    "eval_interval": 100, "eval_iters": 2, "log_interval": 1, "warmup_iters": 2,
    "learning_rate": 1e-2, "device": "cpu", "peak_tflops": 1.0, "onednn": False,
}


def make_data(folder: Path, text: str = TEXT) -> Path:
    """With the dataset "tiny"."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "text.txt"
    source.write_text(text, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        prepare(PrepareConfig("shakespeare_char", str(source), out_dir=str(folder / "tiny")))
    return folder


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str
    rows: list[dict[str, Any]]  # of metrics.jsonl
    out_dir: Path = Path()

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
    """Run an entry point like `python <file>.py`: exit code, stdout, stderr."""
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
    finally:
        torch.set_num_threads(threads)
        for s, handler in handlers.items():
            signal.signal(s, handler)
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


def argv(data_dir: Path, out: Path, **changes: Any) -> list[str]:
    knobs = {**TINY, "data_dir": data_dir, "dataset": "tiny", "out_dir": out, **changes}
    return [f"--{name}={value}" for name, value in knobs.items()]


def run_line(line: list[str], out: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:  # test_metrics.py draws the picture
        patch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).touch())
        return Run(*enter(train.main, line), read_rows(out / "metrics.jsonl"), out)


def run(data_dir: Path, out: Path, **changes: Any) -> Run:
    return run_line(argv(data_dir, out, **changes), out)


def refusal(r: Run) -> str:
    """One line; the exit code must be 2."""
    assert r.code == 2 and "Traceback" not in r.out + r.err, (r.code, r.out, r.err)
    return " ".join(r.err.replace("│", " ").split())


# --- a run, its evaluations, its sample ---


@pytest.mark.parametrize("how, shown, close", few([
    ({"dtype": "bfloat16"}, "bfloat16", 0.05), ({"dtype": "float16"}, "float16", 0.05),
    ({"compile": True}, "compile: on", 1e-4)]))
def test_half_precision_and_a_compiled_run_learn_the_same(how, shown, close, data_dir, tmp_path):
    want = run(data_dir, tmp_path / "a", max_iters=30).losses()
    r = run(data_dir, tmp_path / "b", max_iters=30, **how)
    losses = r.losses()
    torch.compiler.reset()
    assert r.code == 0 and shown in r.out and losses != want  # it was rounded
    assert losses[30] < losses[1] - 0.3
    assert losses[1] == pytest.approx(want[1], rel=close / 5)
    assert losses[30] == pytest.approx(want[30], rel=close)


def test_the_seed_is_of_weights_batches_dropout_and_the_sample(data_dir, tmp_path):
    """Two steps have no ms and no MFU."""
    a, b, c = (run(data_dir, tmp_path / str(i), max_iters=2, dropout=0.2, seed=seed,
                   sample_tokens=20) for i, seed in enumerate((7, 7, 8)))
    one, two, other = (r.out.partition("sample of 20 tokens")[2] for r in (a, b, c))
    assert a.losses() == b.losses() and {*a.losses().values()}.isdisjoint(c.losses().values())
    assert one == two != other and one and other and a.code == c.code == 0
    assert " ms" not in a.out and not any("ms" in row for row in a.rows)


def mean_loss(model: Any, data_dir: Path, split: str = "val", sequences: int = 8, block: int = 16,
              vocab_size: int = 64) -> float:
    tokens = data.load(data_dir / "tiny", split, block, vocab_size)
    x, y = next(data.eval_batches(tokens, block, 1, sequences))
    with torch.no_grad():
        logits = model(x)[0]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()))


def test_an_evaluation_is_the_mean_over_its_windows(data_dir, tmp_path):
    """Without dropout; --eval_only gives it again."""
    out = tmp_path / "out"
    found = run(data_dir, out, eval_iters=3, eval_interval=4, dropout=0.3).evaluations()[8]
    model = checkpoint.load(checkpoint.latest(out)).model().eval()
    V = model.config.vocab_size
    want = [mean_loss(model, data_dir, split, 3 * 4, vocab_size=V) for split in ("train", "val")]
    assert found == pytest.approx(want, rel=1e-6)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    r = run(data_dir, out, init_from="resume", eval_only=True, eval_iters=3)
    assert r.code == 0 and all(f"{loss:.4f}" in r.out for loss in found) and "iter " not in r.out
    fresh = run(data_dir, tmp_path / "fresh", eval_only=True)
    assert fresh.code == 0 and "step 0:" in fresh.out and not [*(tmp_path / "fresh").glob("*")]
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


# --- where a run begins ---


def first_loss(data_dir: Path, out: Path, **changes: Any) -> float:
    r = run(data_dir, out, eval_on_start=True, max_iters=1, **changes)
    assert r.code == 0, r.err
    return r.evaluations()[0][1]


def test_from_a_checkpoint_folder(data_dir, tmp_path):
    """Its window stays unless another is given, also when resumed."""
    one = run(data_dir, tmp_path / "one", n_layer=2, attention_window=3)
    last, out = checkpoint.latest(tmp_path / "one"), tmp_path / "1"
    assert checkpoint.load(last).model().config.attention_window == 3
    for i, source in enumerate((tmp_path / "one", last)):
        loss = first_loss(data_dir, tmp_path / str(i), init_from=source, n_layer=2)
        assert loss == one.evaluations()[8][1]
    r = run_line(["--init_from=resume", f"--out_dir={out}", "--max_iters=2"], out)
    assert r.code == 0 and checkpoint.load(checkpoint.latest(out)).config().attention_window == 3


def nanogpt_file(path: Path, model: GPT) -> Path:
    """As nanoGPT saves a compiled model."""
    weights = {f"_orig_mod.{k}": v for k, v in model.state_dict().items()}
    weights["_orig_mod.lm_head.weight"] = weights["_orig_mod.transformer.wte.weight"]
    mask = torch.ones(1, 1, model.config.block_size, model.config.block_size).tril()
    weights["_orig_mod.transformer.h.0.attn.bias"] = mask
    sizes = asdict(model.config)
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    args = {name: sizes[name] for name in names}
    torch.save({"model": weights, "model_args": args, "iter_num": 7, "config": {"a": 1}}, path)
    return path


def test_from_other_programs_files_with_the_context_cropped(data_dir, tmp_path):
    torch.manual_seed(5)
    model = GPT(GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=2, n_embd=16)).eval()
    checkpoint.save_hf(model, tmp_path / "transformers")
    for source in (nanogpt_file(tmp_path / "ckpt.pt", model), tmp_path / "transformers"):
        for T in (16, 32):
            out = tmp_path / f"{source.name}-{T}"
            loss = first_loss(data_dir, out, init_from=source, n_layer=2, bias=True, block_size=T)
            assert loss == pytest.approx(mean_loss(model, data_dir, block=T), rel=1e-6)
            found = asdict(checkpoint.load(checkpoint.latest(out)).config())
            sizes = {"block_size": T, "vocab_size": 64, "bias": True, "n_layer": 2}
            assert sizes.items() <= found.items()


@pytest.mark.parametrize("log_interval", few([4, 1]))
@pytest.mark.parametrize("how, dtype", few([
    ("both", "float16"), ("both", "float32"), ("loss", "float32"), ("gradient", "float32"),
    ("loss", "float16")]))
def test_a_loss_that_is_not_finite_stops_the_run(
    how, dtype, log_interval, data_dir, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    forward, calls, before = GPT.forward, [], {}

    def spoiled(model: GPT, x: Tensor, y: Tensor | None = None, *rest: Any) -> Any:
        logits, loss = forward(model, x, y, *rest)
        calls.extend([model] * (loss is not None and model.training))
        if len(calls) == 6 and not before:
            before.update({k: v.clone() for k, v in model.state_dict().items()})
            if how == "gradient":
                loss.register_hook(lambda g: g * torch.nan)
            else:  # inf: its gradient is finite
                loss = loss + torch.inf if how == "loss" else loss * torch.nan
        return logits, loss

    monkeypatch.setattr(GPT, "forward", spoiled)
    r = run(data_dir, out, max_iters=20, eval_interval=3, log_interval=log_interval, dtype=dtype,
            attention_backend="sdpa")
    assert r.code == 1 and "Traceback" not in r.err
    (line,) = [x for x in r.err.splitlines() if x.startswith("error: ")]
    lr = learning_rate(5, TrainConfig(**{**TINY, "max_iters": 20}))
    for words in ("step 6", f"{lr:.2e}", "sdpa", "--init_from=resume", f"{out}/step-00000003"):
        assert words in line
    for name, weight in calls[0].state_dict().items():
        assert torch.equal(weight, before[name]), name
    assert [folder.name for folder in checkpoint.folders(out)] == ["step-00000003"]
    assert all(math.isfinite(x) for x in r.losses().values()) and max(r.losses()) < 6
    monkeypatch.undo()
    assert run(data_dir, out, max_iters=20, init_from="resume").code == 0  # as the line says


def test_out_of_memory_is_one_sentence(data_dir, tmp_path, monkeypatch):
    def forward(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")

    monkeypatch.setattr(GPT, "forward", forward)
    for before, after in (((4, 1), (2, 2)), ((1, 3), (1, 6))):
        names = ("batch_size", "gradient_accumulation_steps")
        said = refusal(run(data_dir, tmp_path / "out", **dict(zip(names, before))))
        assert "2.00 GiB" in said and "--gradient_checkpointing=True" in said
        assert all(f"--{name}={value}" in said for name, value in zip(names, after))


def test_what_auto_means_is_decided_once(data_dir, tmp_path):
    """Resumed runs keep the checkpoint's; an old one may have "auto"."""
    run(data_dir, tmp_path, max_iters=1, dtype="bfloat16", residual_dtype="auto")
    settings = tmp_path / "step-00000001/settings.json"
    found = json.loads(settings.read_text(encoding="utf-8"))
    assert (found["train"]["residual_dtype"], found["train"]["dtype"]) == ("float32", "bfloat16")
    go_on = ["--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=2"]
    r = run_line(go_on, tmp_path)
    assert r.code == 0 and ", bfloat16, 1 process" in r.out
    found["train"]["dtype"] = "auto"
    settings.write_text(json.dumps(found), encoding="utf-8")
    for path in checkpoint.folders(tmp_path)[1:]:
        path.rename(tmp_path / "away")
        assert ", float32, 1 process" in run_line(go_on, tmp_path).out


@pytest.mark.parametrize("mode, device, micro_steps, refused", [
    ("reduce-overhead", "cuda", 2, True), ("max-autotune", "cuda", 40, True),
    ("reduce-overhead", "cuda", 1, False), ("max-autotune-no-cudagraphs", "cuda", 40, False)])
def test_cuda_graphs_are_refused_under_gradient_accumulation(mode, device, micro_steps, refused):
    setup = runtime.Setup(torch.device("cpu"), train.TrainConfig(compile_mode=mode))
    module = torch.nn.Linear(1, 1)
    assert setup.compiled(module, micro_steps) is module
    setup.device, setup.compile = torch.device(device), True
    with pytest.raises(UserError, match=mode) if refused else contextlib.nullcontext():
        setup.compiled(module, micro_steps)


def test_a_large_vocabulary_is_rounded_up_and_a_small_one_is_not():
    assert [*map(data.padded, (1023, 1025, 50257))] == [1023, 1088, 50304]


@pytest.mark.parametrize("busy, peak, shown", [
    (True, "measure", False), (False, "measure", True), (True, 1.0, True)])
def test_a_busy_machine_leaves_mfu_out_of_the_lines_and_says_why_once(
    busy, peak, shown, data_dir, tmp_path, monkeypatch
):
    """If the peak was measured."""
    monkeypatch.setattr(flops, "measured_tflops", lambda *device: 1e6)
    looks = itertools.count(0.0, 1e6)  # in which the thread waited for a core, if busy
    for module in (flops, metrics):
        monkeypatch.setattr(module, "clock", lambda: ((now := next(looks)), now * busy))
    r = run(data_dir, tmp_path, peak_tflops=peak)
    lines = [line for line in r.out.splitlines() if re.search(r"^iter \d+: .* tok/s", line)]
    assert r.code == 0 and len(lines) == 6 and all(("mfu" in line) == shown for line in lines)
    assert r.out.count("mfu is left out") == (not shown)
    timed = [row for row in r.rows if "mfu" in row]
    assert len(timed) == 6 and all((row["mfu"] is not None) == shown for row in timed)


def test_a_step_is_profiled_as_it_runs(data_dir, tmp_path):
    plain, seen = (run(data_dir, tmp_path / str(n), profile_step=n) for n in (None, 4))
    assert seen.code == 0 and seen.losses() == plain.losses()
    lines = seen.out.splitlines()
    classes = {line.split()[0] for line in lines[lines.index("step 4:") :] if line[:1].isalpha()}
    assert {"products", "attention", "elementwise", "loss", "optimizer", "gaps"} <= classes
    trace = json.loads((tmp_path / "4" / "profile.json").read_text(encoding="utf-8"))
    calls = Counter(event["name"] for event in trace["traceEvents"])
    assert calls["aten::gelu"] == 1 and calls["aten::_fused_adamw_"] == 2  # matrices, and vectors
