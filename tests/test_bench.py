"""bench_mfu.py: every mode on the CPU with small sizes, and the rules that its figures rest on.

No time is asserted anywhere: what is looked at is what was measured, in which order, and what is
said when something could not be.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import math
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import in_process
import pytest
import torch

import attention
import bench_mfu
import data
from attention.spec import Backend, Caps
from bench import candidates, decoding, fitting, machine, modes, process, rows, training
from bench import config as config_
from bench.bench import Bench
from bench.config import BenchConfig, Flat, load_config
from bench.decoding import mbu
from bench.job import Job
from bench.kernels import Kernels, flops_of
from bench.process import Failure, Outcome, measure
from bench.stats import Summary, differ, exceeds_noise
from core import flops
from core.settings import UserError
from model import GPTConfig
from train import TrainConfig

SMALL = ["--device=cpu", "--n_layer=2", "--n_embd=32", "--n_head=2", "--block_size=32",
         "--vocab_size=64", "--batch_size=4", "--peak_tflops=0.5", "--rounds=2", "--seconds=0.01",
         "--warm_up_steps=1", "--dtype=float32", "--bandwidth_gbs=8"]  # fmt: skip

RIVAL = '''
"""A stand-in with nanoGPT's interface."""
from dataclasses import dataclass
import torch
import torch.nn.functional as F

@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 8
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 8
    dropout: float = 0.0
    bias: bool = True

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = torch.nn.Embedding(config.block_size, config.n_embd)
        self.calls = []
    def forward(self, idx, targets=None):
        self.calls.append(tuple(idx.shape))
        logits = self.wte(idx) @ self.wte.weight.T
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
    def configure_optimizers(self, weight_decay, lr, betas, device_type):
        print("a line on stdout, which belongs to nobody")
        self.asked = weight_decay, lr, betas, device_type
        return torch.optim.AdamW(self.parameters(), lr, betas, weight_decay=weight_decay)
    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            probs = F.softmax(self(idx)[0][:, -1] / temperature, dim=-1)
            idx = torch.cat((idx, torch.multinomial(probs, 1)), dim=1)
        return idx
'''


def run(argv: list[str]) -> tuple[int, str]:
    """The exit code, and what was printed on stdout."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = bench_mfu.main(argv)
    return code, out.getvalue()


def last_line(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes: a process takes seconds to import torch."""
    in_process.use(monkeypatch)


def by_backend(content: dict[str, Any], mode: str) -> dict[str, dict[str, Any]]:
    return {r["backend"]: r for r in content["rows"] if r["mode"] == mode}


# ----------------------------------------------------------------------------- the modes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """One run of the mode train, with a record, a baseline and a refused backend."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "nanoGPT").mkdir()
    (folder / "nanoGPT" / "model.py").write_text(RIVAL, encoding="utf-8")
    argv = [*SMALL, "--backends=eager,sdpa,sdpa_cudnn", "--rival", f"nanogpt={folder / 'nanoGPT'}",
            "--lengths=16,32", "--batch_sizes=1,2", "--record=tiny", f"--records_dir={folder}",
            "--json"]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        in_process.use(patch)
        return *run(argv), folder


def test_train_gives_a_row_for_every_backend_and_baseline(trained):
    code, out, _ = trained
    content = last_line(out)
    table = by_backend(content, "train")
    assert code == 0
    assert list(table) == ["manual", "sdpa", "sdpa_cudnn", "nanogpt"]
    config = GPTConfig(32, 64, 2, 2, 32, bias=False)
    for name in ("manual", "sdpa", "nanogpt"):
        row = table[name]
        assert row["status"] == "ok" and row["batch_size"] == 4 and len(row["rounds"]) == 2
        middle = sum(r["ms"] for r in row["rounds"]) / 2
        assert row["ms"] == pytest.approx(middle)
        assert row["q1_ms"] <= row["ms"] <= row["q3_ms"]
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["ms"] * 1e3)
        share = row["tokens_per_s"] / 0.5e12
        assert row["mfu"] == pytest.approx(flops.flops_per_token(config, 32) * share)
        assert row["mfu_causal"] == pytest.approx(flops.flops_per_token(config, 32, True) * share)
        assert row["noisy"] == (row["spread"] > 0.05)
        for r in row["rounds"]:
            parts = r["forward_ms"] + r["backward_ms"] + r["optimizer_ms"]
            assert 0 < parts <= r["ms"] * 1.001
            assert all(v > 0 for v in r.values() if isinstance(v, (int, float)))
        assert row["memory_bytes"] > 2**26 < row["base_bytes"]
        assert row["warm_up_s"] > row["first_step_s"] > 0 and row["setup_s"] > 0
    assert table["sdpa"]["kernels"] == ["flash (CPU)"] and table["manual"]["kernels"] == []
    assert any("flash_attention_for_cpu" in e for e in table["sdpa"]["events"])
    assert abs(table["manual"]["loss_difference"]) < 1e-5 > abs(table["sdpa"]["loss_difference"])
    assert abs(table["sdpa"]["gradient_norm_difference"]) < 1e-4
    assert "loss_difference" not in table["nanogpt"]  # other weights


def test_a_refused_backend_is_a_row_and_nothing_else_runs_for_it(trained):
    for mode in ("train", "kernel"):
        row = by_backend(last_line(trained[1]), mode)["sdpa_cudnn"]
        assert row["status"] == "unavailable" and "rounds" not in row
        assert row["why"] == ["it runs on cuda, not on cpu"]
    assert "| sdpa_cudnn | unavailable | it runs on cuda, not on cpu |" in trained[1]


def test_the_flops_are_those_that_torch_counts(trained):
    """but for biases and norm gains, which the formula counts and torch's counter does not."""
    content = last_line(trained[1])
    found = content["reference"]
    assert found["elementwise_parameters"] == (2 * 2 + 1) * 32
    assert content["flops_per_token"]["mfu"] == pytest.approx(
        found["flops_per_token"] + 6 * found["elementwise_parameters"], rel=1e-12
    )
    assert f"{found['flops_per_token'] / 1e6:,.2f}" in trained[1]


def test_the_sweep_times_attention_at_every_point(trained):
    table = [r for r in last_line(trained[1])["rows"] if r["mode"] == "kernel"]
    points = {(r["point"]["B"], r["point"]["T"]) for r in table}
    assert points == {(1, 16), (1, 32), (2, 16), (2, 32)}
    for row in table:
        if row["backend"] == "sdpa_cudnn":
            continue
        assert row["status"] == "ok" and 0 < row["error_out"] < 1e-5 > row["error_grad"] > 0
        seconds, p = row["ms"] / 1e3, row["point"]
        pairs = p["T"] * (p["T"] + 1) / 2
        flop = 12 * p["B"] * 2 * 16 * pairs
        assert row["tflops_causal"] == pytest.approx(flop / seconds / 1e12)
        assert row["tflops_full"] / row["tflops_causal"] == pytest.approx(p["T"] ** 2 / pairs)
        assert row["share"] == pytest.approx(row["tflops_causal"] / 0.5)


def test_the_answers_are_under_the_table(trained):
    content = last_line(trained[1])
    assert [a.partition(":")[0] for a in content["answers"]] == [
        "Fastest", "Fastest", "Fastest", "MFU", "Agreement",
    ]  # fmt: skip
    assert all(a in " ".join(trained[1].split()) for a in map(" ".join, map(str.split, content["answers"])))  # noqa: E501  # fmt: skip


def test_a_record_is_complete(trained):
    _, out, folder = trained
    (record,) = folder.glob("*_cpu_tiny")
    content = json.loads((record / "record.json").read_text(encoding="utf-8"))
    assert content == last_line(out)
    assert content["commit"] and isinstance(content["dirty"], bool)
    assert content["command"].startswith("python bench_mfu.py train --device=cpu")
    have = content["machine"]
    assert (
        have["name"] and have["threads"] == torch.get_num_threads() and have["dtype"] == "float32"
    )
    assert have["packages"]["torch"] == torch.__version__ and have["peak_source"] == "--peak_tflops"
    names = set(Flat.__dataclass_fields__)
    assert set(content["settings"]) == names  # all of them, not only the given ones
    assert content["settings"]["n_embd"] == 32 and content["fresh_rounds"] is False
    assert {p.name for p in record.iterdir()} == {
        "record.json", "README.md", "speed.png", "length.png",
    }  # fmt: skip
    page = (record / "README.md").read_text(encoding="utf-8")
    sdpa = by_backend(content, "train")["sdpa"]
    assert f"{sdpa['tokens_per_s']:,.0f}" in page and "unavailable" in page
    assert f"record: {record}" in out


def test_the_whole_command_with_real_processes():
    """What the other tests leave out: processes, pipes, and what libraries print."""
    code, out = run([*SMALL, "--backends=sdpa", "--sweep=False", "--json"])
    (row,) = last_line(out)["rows"]
    assert code == 0 and row["status"] == "ok" and len(row["rounds"]) == 2
    assert row["warm_up_s"] > row["first_step_s"] > 0 and row["setup_s"] > 0
    assert row["memory_bytes"] >= row["base_bytes"] > 2**26


@pytest.mark.slow
def test_kernel_goes_on_after_a_point_for_which_memory_does_not_do():
    """manual's scores of 9000 tokens take 0.65 GB a tensor; sdpa holds none."""
    argv = ["kernel", *SMALL, "--backends=manual,sdpa", "--lengths=64,9000", "--batch_sizes=1"]
    argv += ["--rounds=1", "--memory_gb=1.5", "--n_kv_head=1", "--json"]
    code, out = run(argv)
    found = {(r["backend"], r["point"]["T"]): r for r in last_line(out)["rows"]}
    assert code == 0 and len(found) == 4
    assert found["manual", 64]["status"] == "ok" == found["sdpa", 9000]["status"]
    assert found["manual", 9000]["status"] == "failed"
    assert found["manual", 9000]["why"][0].startswith("out of memory: ")
    assert "error_out" not in found["sdpa", 9000]  # longer than float64 is asked about
    assert found["manual", 64]["point"]["Hkv"] == 1
    assert found["manual", 64]["spread"] is None  # of one round
    assert "manual" in out and "(kernel B=1 T=9000" in out


def test_decode_runs_over_batches_prompts_and_caches(quick):
    argv = ["decode", *SMALL, "--backends=sdpa", "--batch_sizes=1,2", "--prompts=5",
            "--kv_caches=none,dynamic", "--new_tokens=4", "--json"]  # fmt: skip
    code, out = run(argv)
    content = last_line(out)
    assert code == 0 and len(content["rows"]) == 2 * 2
    N, per_token = flops.n_params(GPTConfig(32, 64, 2, 2, 32, bias=False)), 2 * 2 * 32 * 4
    for row in content["rows"]:
        p = row["point"]
        assert row["status"] == "ok" and p["P"] == 5 and len(row["rounds"]) == 2
        assert row["tokens_per_s"] == pytest.approx(p["B"] / row["ms"] * 1e3)
        assert row["first_ms"] > 0 and row["memory_bytes"] > 2**26
        assert (row["cache_bytes"] > 0) == (p["cache"] == "dynamic")
        size = 4 * N + p["B"] * (5 + 4 / 2) * per_token
        assert row["mbu"] == pytest.approx(size / (row["ms"] / 1e3) / 8e9)  # --bandwidth_gbs
    with pytest.raises(UserError, match="do not fit into --block_size=32"):
        run(["decode", *SMALL, "--prompts=30", "--new_tokens=4"])


@pytest.mark.slow
def test_decode_has_rows_for_the_baselines_where_they_have_such_a_cache(tmp_path, quick):
    (tmp_path / "model.py").write_text(RIVAL, encoding="utf-8")
    caches, new = ("none", "dynamic", "static"), 3
    argv = ["decode", *SMALL, "--backends=sdpa", "--batch_sizes=2", "--prompts=5", "--json",
            f"--kv_caches={','.join(caches)}", f"--new_tokens={new}", "--rival", "hf",
            "--rival", f"nanogpt={tmp_path}"]  # fmt: skip
    code, out = run(argv)
    content = last_line(out)
    at = {(r["backend"], r["point"]["cache"]): r for r in content["rows"]}
    hf = [("hf_sdpa", c) for c in caches[1:]]
    ours = [("sdpa", c) for c in caches]
    assert code == 0 and len(content["rows"]) == len(at)
    ok = {k for k, r in at.items() if r["status"] == "ok"}
    assert ok >= {*ours, ("nanogpt", "none")} and len(at) == 3 * len(caches)
    assert "no cache" in at["nanogpt", "static"]["why"][0]
    assert "not with none" in at["hf_sdpa", "none"]["why"][0]
    assert {r["backend"] for r in content["rows"] if r["baseline"]} == {"hf_sdpa", "nanogpt"}
    assert not any(at[k]["baseline"] for k in ours)
    row = at["nanogpt", "none"]
    assert row["status"] == "ok" and len(row["rounds"]) == 2 and row["cache_bytes"] == 0
    assert row["first_ms"] > 0 and row["tokens_per_s"] == pytest.approx(2 / row["ms"] * 1e3)
    # its weights without the positions, and keys and values as ours would be
    size = 4 * 64 * 32 + 2 * (5 + new / 2) * 2 * 2 * 32 * 4
    assert row["mbu"] == pytest.approx(size / (row["ms"] / 1e3) / 8e9)
    assert "Fastest: decode B=2 P=5:" in out
    for key in hf:
        if importlib.util.find_spec("transformers") is None:
            assert at[key]["status"] == "unavailable" and "not installed" in at[key]["why"][0]
            continue
        # the last token is drawn, but never read: keys and values of one less
        assert at[key]["status"] == "ok" and at[key]["title"].startswith("transformers ")
        assert at[key]["cache_bytes"] == 2 * (5 + new - 1) * 2 * 2 * 32 * 4


def test_a_baseline_with_nothing_to_measure_says_so(tmp_path, quick):
    (tmp_path / "model.py").write_text(RIVAL, encoding="utf-8")
    code, out = run(["decode", *SMALL, "--backends=sdpa", "--batch_sizes=1", "--prompts=5",
                     "--kv_caches=dynamic", "--new_tokens=2", "--rounds=1",
                     f"--rival=nanogpt={tmp_path}", "--json"])  # fmt: skip
    found = {r["backend"]: r for r in last_line(out)["rows"]}
    assert code == 0 and found["sdpa"]["status"] == "ok"
    assert found["nanogpt"]["status"] == "unavailable"
    assert "no cache" in found["nanogpt"]["why"][0]


def write_tokens(folder: Path) -> Path:
    """A dataset of bytes, where each follows from the one before."""
    tokens = [(i * i + i // 7) % 61 for i in range(6000)]
    (folder / "tiny").mkdir()
    for split in ("train", "val"):
        data = torch.tensor(tokens, dtype=torch.uint16).numpy().tobytes()
        (folder / "tiny" / f"{split}.bin").write_bytes(data)
    meta = {"tokenizer": {"kind": "char"}, "vocab_size": 61,
            "tokens": {"train": len(tokens), "val": len(tokens)}}  # fmt: skip
    (folder / "tiny" / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def test_converge_compares_with_manual(tmp_path, quick):
    data_dir = write_tokens(tmp_path)
    argv = ["converge", *SMALL, "--backends=sdpa", "--steps=20", "--dataset=tiny", "--json"]
    argv += [f"--data_dir={data_dir}", "--record=c", f"--records_dir={tmp_path}"]
    code, out = run(argv)
    content = last_line(out)
    table = by_backend(content, "converge")
    assert code == 0 and list(table) == ["manual", "sdpa"]  # the baseline comes unasked
    for row in table.values():
        assert len(row["losses"]) == 20 and row["losses"][-1] < row["losses"][0]
        assert row["final_loss"] == pytest.approx(sum(row["losses"][-2:]) / 2)
    assert table["manual"]["verdict"] == "baseline" and table["sdpa"]["verdict"] == "ok"
    assert abs(table["sdpa"]["difference"]) < 1e-3
    assert table["sdpa"]["time_saved"] == pytest.approx(
        1 - table["sdpa"]["ms"] / table["manual"]["ms"]
    )
    assert list(tmp_path.glob("*_cpu_c/loss.png"))
    with pytest.raises(UserError, match="no dataset"):
        run(["converge", *SMALL, "--steps=10", "--dataset=none_such"])


def made_up(name: str, losses: list[float], **more: Any) -> dict[str, Any]:
    rounds = [{"ms": 2.0, "losses": losses[:5]}, {"ms": 2.0, "losses": losses[5:]}]
    row = {"mode": "converge", "backend": name, "status": "ok", "rounds": rounds, "ms": 2.0,
           "point": {}, "q1_ms": 2.0, "q3_ms": 2.0, "spread": 0.0, "noisy": False}  # fmt: skip
    return {**row, **more}


class NoWorker:
    """A worker that measures nothing."""

    about: dict[str, Any] = {  # noqa: RUF012
        "peak_tflops": 1.0, "peak_source": "given", "peak_measured": False, "kind": "cpu",
        "about": "made up",
        "dtype": "float32", "packages": {}, "driver": None, "cuda": None, "python": "3",
        "system": "none", "bandwidth": 1.0, "free_memory": 1,
    }  # fmt: skip

    def __init__(self, timeout: float, stop: Any = None) -> None:
        self.about = dict(self.about)

    def begin(self, job: dict[str, Any]) -> NoWorker:
        return self

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"refused": {}}

    def close(self) -> None:
        pass


def test_a_final_loss_beyond_the_tolerance_is_a_fail_and_exit_code_1(monkeypatch):
    base = [5.0] * 9 + [2.0]

    def table() -> list[dict[str, Any]]:
        return [made_up("manual", base), made_up("sdpa", [*base[:9], 2.019]),
                made_up("tiled", [*base[:9], 2.021])]  # fmt: skip

    judged = table()
    assert not rows.of_convergence(judged, "manual", 0.01)
    assert [r["verdict"] for r in judged] == ["baseline", "ok", "FAIL"]
    judged = table()
    assert rows.of_convergence(judged, "manual", 0.02)
    broken = [made_up("manual", base), {"backend": "sdpa", "status": "failed", "why": ["x"]}]
    assert not rows.of_convergence(broken, "manual", 0.02) and broken[1]["verdict"] == "FAIL"

    def fake(bench: Bench) -> list[dict[str, Any]]:
        found = table()
        rows.of_convergence(found, "manual", bench.config.tolerance)
        return found

    monkeypatch.setitem(modes.MODES, "converge", fake)
    in_process.use(monkeypatch, NoWorker)
    code, out = run(["converge", *SMALL])
    assert code == 1 and "FAIL: tiled ended further than 1.00% from manual." in out
    code, out = run(["converge", *SMALL, "--tolerance=0.02"])
    assert code == 0 and "Every final loss is within 2.00% of manual's." in out


# ----------------------------------------------------------------------------- settings


def test_the_models_knobs_are_those_of_train():
    argv = ["--device=cpu", "--n_layer=3", "--n_embd=96", "--batch_size=auto", "--lengths=7"]
    mine = load_config([*argv, "config/train_gpt2.py"]).settings
    assert mine.batch_size == "auto" and mine.fixed_batch is None and mine.lengths == (7,)
    train = mine.training(5, grad_clip=0.5)
    assert type(train) is TrainConfig and (train.batch_size, train.grad_clip) == (5, 0.5)
    assert (train.n_layer, train.n_embd, train.dataset) == (3, 96, "openwebtext")
    for name, field in TrainConfig.__dataclass_fields__.items():  # bench_mfu.py knows each of them
        assert Flat.__dataclass_fields__[name].default == field.default
    assert mine.flat()["n_layer"] == 3 and mine.flat()["batch_size"] == "auto"
    small = load_config(["--device=cpu", "--batch_size=9"]).settings  # of bench/cpu.py
    assert small.training(4).batch_size == 4 and small.train.learning_rate == 1e-3


def test_the_commands_of_the_records_ask_today_for_what_they_asked_for(monkeypatch):
    """Else new records are not comparable with them: defaults, config files, bench/cpu.py."""
    monkeypatch.setattr(config_, "pick_device", lambda wanted: torch.device("cpu"))
    monkeypatch.chdir(config_.ROOT)
    checked = set[str]()
    for path in Path("bench/records").glob("2026-11-22_*/record.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        python, file, mode, *argv = content["command"].split()
        assert (python, file, mode) == ("python", "bench_mfu.py", content["mode"])
        now, then = load_config(argv, mode).settings.flat(), content["settings"]
        if mode == "qualify":  # it chose them itself
            del then["rounds"]
        both = now.keys() & then.keys()
        checked |= both
        same = json.loads(json.dumps({name: now[name] for name in both}))
        assert same == {name: then[name] for name in both}, path
    later = {"async_checkpoint": False, "context_parallel": 1, "context_parallels": (), "gpu": None,
             "gpus": (8,), "gpus_per_node": 8, "hang_timeout": 45.0, "network_gbs": None,
             "nvlink_gbs": None, "parallel": "ddp", "roofline_times": 1.0,
             "shard_size": None}  # fmt: skip
    for name, field in Flat.__dataclass_fields__.items():
        assert name in checked or field.default == later[name]


def test_a_batch_that_does_not_hold_after_all_gets_smaller(monkeypatch) -> None:
    """A run needs a little more than the search's two steps: 7/8, until it holds, or 1 does not."""
    argv = ["--device=cpu", "--batch_size=auto", "--sweep=False", "--gradient_accumulation_steps=4"]
    config = load_config(argv).settings
    here = {"peak_tflops": 1.0, "peak_source": "--peak_tflops", "peak_measured": False}
    bench = Bench("train", config, "cpu", 77, ["sdpa"], None, print, {**here, "memory_limit": 1e9})
    found = {"batch_size": 16, "limit": "memory", "tried": {}}
    monkeypatch.setattr(fitting, "search", lambda *a: dict(found))
    tried: list[int] = []

    def fails(words: str) -> Callable[..., Any]:
        def run(self: Any, found: Any, jobs: Any, points: Any, row: Any, **more: Any) -> Any:
            (job,) = jobs.values()
            assert found["sdpa", ""] == Outcome()  # nothing is left of the larger batch
            tried.append(job["train"]["batch_size"])
            assert job["train"]["gradient_accumulation_steps"] == 1  # the batch is the whole step's
            found["sdpa", ""] = Outcome(failure=Failure("failed", [words]))
            return [row("sdpa", "", found["sdpa", ""])]

        return run

    monkeypatch.setattr(Bench, "measure", fails("out of memory: 3 GB"))
    (row,) = modes.train(bench)
    assert tried == [16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1]
    assert bench.reference == {"why": "with --batch_size=auto each has a batch of its own"}
    assert (row["status"], row["batch_size"], row["fits"]["batch_size"]) == ("failed", 1, 1)
    tried.clear()
    monkeypatch.setattr(Bench, "measure", fails("RuntimeError: boom"))
    (row,) = modes.train(bench)
    assert tried == [16] and row["batch_size"] == 16
    killed = Failure("died", ["its process died (killed by SIGKILL, as Linux does when memory runs "
                              "out)"])  # fmt: skip
    assert Outcome(failure=killed).out_of_memory and not Outcome().out_of_memory


def test_what_fails_before_the_rounds_is_kept_and_ends_nothing(monkeypatch) -> None:
    here = {"peak_tflops": 1.0, "peak_source": "--peak_tflops", "peak_measured": False}

    def fails(*how: Any) -> Any:
        raise Failure("failed", ["no", "never"])

    def measure(self: Any, found: Any, *how: Any) -> Any:
        return [found["sdpa", ""].failure]

    monkeypatch.setattr(fitting, "search", fails)
    monkeypatch.setattr(Bench, "ask_once", fails)
    monkeypatch.setattr(Bench, "measure", measure)
    for batch in ("auto", "2"):
        config = load_config(["--device=cpu", f"--batch_size={batch}", "--sweep=False"]).settings
        bench = Bench("train", config, "cpu", 77, ["sdpa"], None, print, here)
        (failure,) = modes.train(bench)
        if batch == "auto":
            assert failure.why == ("no", "never")
        else:
            assert failure is None and bench.reference == {"why": "no; never"}
    points = [{"B": 1, "T": 8}]
    assert modes.grid(replace(bench, points=points)) is points


def test_a_worker_is_told_to_be_strict_whatever_the_user_says():
    config = BenchConfig(train=TrainConfig(attention_fallback=True, n_layer=3, compile=False))
    bench = Bench("train", config, "cpu", 77, ["sdpa"], 5, print, {})
    told = bench.job("train", "sdpa", 9, grad_clip=0.5)
    assert told["train"]["attention_fallback"] is False
    assert told["train"]["attention_backend"] == "sdpa" == told["name"]
    assert (told["train"]["batch_size"], told["train"]["grad_clip"]) == (9, 0.5)
    assert (told["vocab_size"], told["memory_limit"], told["train"]["n_layer"]) == (77, 5, 3)
    other = bench.job("train", "nanogpt", 9, "nanogpt=x")
    assert other["baseline"] == "nanogpt=x" and other["train"]["attention_backend"] == "auto"


def test_a_config_file_is_read_by_name_or_as_config(monkeypatch):
    path = f"{config_.ROOT}/config/train_gpt2.py"
    for word in ([f"--config={path}"], ["--config", path], [path]):
        loaded = load_config([*word, "--n_layer=2", "--device=cpu"])
        config, origins = loaded.settings, loaded.origins
        assert config.train.dataset == "openwebtext" and config.train.n_layer == 2
        assert origins["n_layer"] == "command line" and "train_gpt2.py" in origins["dataset"]
    asked = load_config(["--device=cpu", "--windows=none,64"], "kernel").settings
    assert asked.windows == (None, 64)
    loaded = load_config(["--device=cpu", "--n_embd=64"])
    config, origins = loaded.settings, loaded.origins
    assert (
        config.train.n_embd == 64 and config.train.n_layer == 4 and "cpu.py" in origins["n_layer"]
    )
    monkeypatch.setattr(config_, "pick_device", lambda wanted: torch.device("cuda"))
    assert load_config([]).settings.train.n_layer == 12  # on a GPU train.py's default, GPT-2 124M


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--backends=sdpaa"], "did you mean 'sdpa'"),
        (["--backends=auto"], "a rule that chooses a backend"),
        (["--batch_size=0"], "batch_size must be at least 1"),
        (["--batch_size=big"], "--batch_size must be an integer or one of auto"),
        (["--rounds=0"], "rounds must be at least 1"),
        (["--seconds=0"], "seconds must be more than 0"),
        (["--windows=0"], "at least 1"),
        (["--init_from=gpt2"], "init_from must be 'scratch'"),
        (["--rival=llama"], "--rival is nanogpt=PATH or hf"),
        (["--rival=nanogpt=/none/such"], "is no checkout of nanoGPT"),
        (["--record=a/b"], "--record must be letters"),
        (["kernel", "--rival=hf"], "--rival is for the modes train, decode, qualify"),
        (["converge", "--rival=hf"], "--rival is for the modes train, decode, qualify"),
        (["converge", "--steps=15"], "--steps must be a multiple of 10"),
        (["--n_embd=33"], "n_embd must be a multiple of n_head"),
        (["--backend_s=sdpa"], "did you mean '--backends'"),
        (["compare", "a"], "compare takes two records"),
        (["compare", "/none/a", "/none/b"], "is no record that can be read"),
        (["nomode"], "unknown mode 'nomode'; the modes are train, kernel, decode"),
        (["--seeds=2"], "--paths and --seeds are for the mode converge"),
        (["converge", "--seeds=0"], "seeds must be at least 1"),
        (["converge", "--paths=fp8"], "each one of float32, bfloat16, bfloat16-residual"),
        (["converge", "--paths=float32", "--backends=sdpa"], "give one of them"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(argv, says, monkeypatch):
    in_process.use(monkeypatch, NoWorker)
    with pytest.raises(UserError) as told:
        run([argv[0], *SMALL, *argv[1:]] if argv[0] in ("kernel", "converge") else
            argv if argv[0] in (*bench_mfu.MODES, "nomode") else [*SMALL, *argv])  # fmt: skip
    assert says in str(told.value) and "\n" not in str(told.value)


def test_a_config_file_may_come_first(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(bench_mfu, "run", lambda *how: seen.append(how) or 0)
    for argv, mode in (([], "train"), (["config/train_gpt2.py", "--rounds=1"], "train"),
                       (["kernel", "x.py"], "kernel"), (["--profile"], "train")):  # fmt: skip
        assert bench_mfu.main(argv) == 0
        assert seen.pop() == (mode, [a for a in argv if a != "kernel"])
    with pytest.raises(UserError, match="unknown mode 'trian'; the modes are train, kernel, decod"):
        bench_mfu.main(["trian"])
    monkeypatch.setattr(bench_mfu, "run", Mock(side_effect=KeyboardInterrupt))
    assert bench_mfu.main([]) == 130


@pytest.mark.parametrize("name", ["kv_caches", "backends"])
def test_a_list_that_must_not_be_empty(name):
    with pytest.raises(ValueError, match=f"^{name} must name at least one$"):
        BenchConfig(**{name: ()})


def test_a_worker_begins_nothing_once_the_bench_is_to_end(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(process.time, "perf_counter", lambda: float(next(clock)))
    script = "input(); print('{\"ok\": {}}', flush=True); input()"
    worker = process.Worker(60.0, None, (sys.executable, "-IS", "-c", script))
    assert worker.begin({}).setup_s == 1.0 and worker.about == {}
    worker.close()
    over = process.Stop(deadline=time.monotonic() - 1)
    worker = process.Worker(60.0, over, (sys.executable, "-IS", "-c", script))
    asked: list[Any] = []
    monkeypatch.setattr(worker, "ask", asked.append)
    with pytest.raises(Failure, match="its time was over"):
        worker.begin({})
    assert not asked and worker.process.returncode is not None


@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_that_has_ended_by_itself_died(code):
    command = (sys.executable, "-IS", "-c", f"raise SystemExit({code})")
    worker = process.Worker(60.0, None, command)
    assert worker.process.wait(60) == code
    gone: Any = types.SimpleNamespace(write=Mock(side_effect=BrokenPipeError), close=lambda: None)
    for pipe in (gone, worker.process.stdin):  # into which a first request may still fit
        worker.process.stdin = pipe
        with pytest.raises(Failure, match=rf"^its process died \(exit code {code}\)$") as e:
            worker.ask({})
        assert e.value.kind == "died"
    worker.close()


def test_a_worker_ends_however_its_set_up_ends(monkeypatch):
    for error in (KeyboardInterrupt, MemoryError, Failure("died", ["x"])):
        worker = process.Worker(60.0, None, (sys.executable, "-IS", "-c", "input(); input()"))

        def ask(job: Any, error: Any = error) -> Any:
            raise error

        monkeypatch.setattr(worker, "ask", ask)
        with pytest.raises(type(error) if isinstance(error, Failure) else error):
            worker.begin({})
        assert worker.process.returncode is not None and worker.errors.closed


def test_a_baseline_may_be_given_more_than_once(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(RIVAL, encoding="utf-8")
    config = load_config(["--device=cpu", "--rival", f"nanogpt={tmp_path}", "--rival=hf"]).settings
    assert list(candidates.parse(config.baseline)) == [
        "nanogpt", "hf_eager", "hf_sdpa", "hf_flash_attention_2",
    ]  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    assert candidates.parse(("nanogpt=~",)) == {"nanogpt": f"nanogpt={tmp_path / 'model.py'}"}


def test_all_leaves_out_what_only_the_interpreter_runs(monkeypatch):
    slow = Backend("slow", "t", print, (Caps(devices=("cuda",)), Caps(("cpu",), interpreted=True)),
                   "manual")  # fmt: skip
    monkeypatch.setitem(attention.BACKENDS, "slow", slow)
    config = BenchConfig()
    chosen, left_out = config_.names(config, "cpu")
    assert "slow" not in chosen and "interpreter" in left_out["slow"]
    assert set(chosen) | set(left_out) == set(attention.BACKENDS)
    assert "slow" in config_.names(config, "cuda")[0]
    chosen, left_out = config_.names(replace(config, backends=("triton", "all")), "cpu")
    assert chosen[0] == "triton" and set(left_out) == {"slow"}  # it was named
    one, _ = config_.names(replace(config, train=TrainConfig(attention_backend="sdpa")), "cpu")
    assert one == ["sdpa"]


def test_the_vocabulary_is_the_datasets_where_there_is_one(tmp_path):
    folder = str(write_tokens(tmp_path))

    def tokens_of(**given: Any) -> BenchConfig:
        return BenchConfig(train=TrainConfig(**given, data_dir=folder))

    assert config_.vocabulary(tokens_of(dataset="tiny"))[0] == 61
    V, why = config_.vocabulary(tokens_of(dataset="none"))
    assert V == 50304 and "not prepared" in why
    assert config_.vocabulary(tokens_of(vocab_size=7, dataset="tiny"))[0] == 7


def test_a_large_vocabulary_is_filled_up_to_a_multiple_of_64(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "meta.json").touch()
    config = BenchConfig(train=TrainConfig(data_dir=str(tmp_path), dataset="text"))
    for given, wanted in ((1000, 1000), (1025, 1088), (50257, 50304), (50304, 50304)):
        monkeypatch.setattr(data, "read_meta", lambda folder, V=given: {"vocab_size": V})
        assert config_.vocabulary(config)[0] == wanted


# ----------------------------------------------------------------------------- the rounds

STUB = """
import json, os, sys
job = json.loads(sys.stdin.readline())
def say(**answer): print(json.dumps(answer), flush=True)
def note(what):
    with open(job["log"], "a") as f: f.write(f"{job['name']} {what} {os.getpid()}\\n")
if job["name"] == job.get("refuses"):
    note("refused"); say(unavailable=["it may not"]); sys.exit()
note("start"); say(ok={"title": job["name"]})
for line in sys.stdin:
    request = json.loads(line)
    key = [job["name"], request.get("at")]
    note(("warm" if request.get("warm_up") else "round") + request.get("at", ""))
    if key == job.get("dies"):
        print("first\\nthe last words\\n ", file=sys.stderr, flush=True); os.kill(os.getpid(), 9)
    elif key == job.get("fails"): say(failed="RuntimeError: no", broken=job.get("broken", False))
    elif key == job.get("hangs"): sys.stdin.read()
    else: say(ok={"ms": 1.0, "held_bytes": 100, "peak_bytes": 150 if job["name"] == "a" else 50})
"""


@pytest.fixture
def stub(tmp_path) -> Callable[..., tuple[dict[Any, Outcome], bool, list[str]]]:
    """measure() with workers that only take notes; also gives the notes."""
    script, log = tmp_path / "stub.py", tmp_path / "log"
    script.write_text(STUB, encoding="utf-8")

    def run_stub(names: str = "abc", at: tuple[str, ...] = ("",), rounds: int = 2, **options: Any):
        more = {
            k: options.pop(k)
            for k in ("dies", "fails", "hangs", "refuses", "broken")
            if k in options
        }
        jobs = {n: {"name": n, "log": str(log), **more} for n in names}
        points = {p: {"at": p} for p in at}
        command = (sys.executable, "-S", str(script))
        options = {"timeout": 60.0, **options}
        outcomes, fresh = measure(jobs, points, rounds, command=command, **options)
        return outcomes, fresh, log.read_text().splitlines()

    return run_stub


def test_rounds_are_interleaved_and_each_job_has_one_process(stub):
    kept: list[int] = []
    outcomes, fresh, notes = stub(after_round=lambda: kept.append(1))
    assert len(kept) == 3  # after the warm-up, too
    did = [" ".join(n.split()[:2]) for n in notes]
    assert did == [
        "a start", "a warm", "b start", "b warm", "c start", "c warm",
        "a round", "b round", "c round", "a round", "b round", "c round",
    ]  # fmt: skip
    assert len({n.split()[2] for n in notes}) == 3 and not fresh
    assert all(len(o.rounds) == 2 and o.failure is None for o in outcomes.values())


def test_fresh_rounds_have_new_processes(stub, monkeypatch):
    took, begin = itertools.count(1), process.Worker.begin

    def timed(self: process.Worker, job: Any) -> process.Worker:
        begin(self, job).setup_s = float(next(took))
        return self

    monkeypatch.setattr(process.Worker, "begin", timed)
    outcomes, fresh, notes = stub(names="ab", fresh=True)
    assert [o.setup_s for o in outcomes.values()] == [1, 2]  # of the first, which found no cache
    assert fresh and len({n.split()[2] for n in notes}) == 2 * 3
    did = [" ".join(n.split()[:2]) for n in notes]
    assert did[-3:] == ["b start", "b warm", "b round"]
    assert all(len(o.rounds) == 2 for o in outcomes.values())


def test_workers_that_do_not_fit_side_by_side_are_started_anew(stub):
    assert not stub(names="ab", budget=2 * 100 + 150)[1]
    assert stub(names="ab", budget=2 * 100 + 149)[1]
    assert not stub(names="ab", budget=2 * 100 + 149, fresh=False)[1]


def test_a_worker_that_dies_is_one_failure_with_its_last_words(stub):
    outcomes, _, notes = stub(at=("x", "y"), dies=["b", "x"])
    failure = outcomes["b", "x"].failure
    assert failure and failure.kind == "died"
    assert "(killed by SIGKILL, as Linux does when memory runs out)" in failure.why[0]
    assert failure.why[0].endswith("the last words")
    assert len(outcomes["b", "y"].rounds) == 2  # in a new process
    assert len(outcomes["a", "x"].rounds) == 2 == len(outcomes["c", "x"].rounds)
    assert sum(n.startswith("b warmx") for n in notes) == 1  # it is not tried again


def test_who_is_not_warm_in_time_leaves_it_to_those_that_are(stub, monkeypatch):
    monkeypatch.setattr(process, "WARM_UP", -1.0)  # it was over before the first began
    outcomes, _, _ = stub(names="ab", stop=process.Stop(deadline=time.monotonic() + 600))
    assert len(outcomes["a", ""].rounds) == 2
    assert "would have left no time" in str(outcomes["b", ""].failure)


def test_why_a_bench_ends_is_told_once():
    stop = process.Stop(deadline=time.monotonic() - 1, why="its stage was over")
    with pytest.raises(Failure, match="its stage was over"):
        stop.check()


def test_a_step_is_profiled_once_and_not_in_every_fresh_process(monkeypatch):
    monkeypatch.setattr(training.Training, "profile", lambda self, steps: {"steps": steps})
    worker = training.Training(job("train", "sdpa", batch_size=1))
    for again in (False, True):
        answer = worker.round({"warm_up": True, "profile": 3, "again": again})
        assert answer.get("profile") == (None if again else {"steps": 3})


def test_a_failure_that_a_worker_survives_costs_no_process(stub):
    outcomes, _, notes = stub(names="ab", at=("x", "y"), fails=["b", "x"])
    assert str(outcomes["b", "x"].failure) == "RuntimeError: no"
    assert len(outcomes["b", "y"].rounds) == 2
    assert sum(n.startswith("b start") for n in notes) == 1


def test_a_process_that_is_of_no_more_use_is_replaced(stub):
    outcomes, _, notes = stub(names="ab", at=("x", "y"), fails=["b", "x"], broken=True)
    assert str(outcomes["b", "x"].failure) == "RuntimeError: no"
    assert len(outcomes["b", "y"].rounds) == 2
    assert sum(n.startswith("b start") for n in notes) == 2


@pytest.mark.slow
def test_a_refusal_holds_for_all_points_and_an_answer_may_not_take_for_ever(stub):
    outcomes, _, notes = stub(names="ab", at=("x", "y"), refuses="a")
    assert sum(n.startswith("a refused") for n in notes) == 1
    for at in ("x", "y"):
        assert outcomes["a", at].failure.kind == "unavailable"  # type: ignore[union-attr]
        row = rows.begin("train", "a", {}, outcomes["a", at])
        assert row["status"] == "unavailable" and row["why"] == ["it may not"]
    outcomes, _, _ = stub(names="ab", hangs=["a", ""], timeout=3.0)
    assert "no answer within 3 s" in str(outcomes["a", ""].failure)
    assert len(outcomes["b", ""].rounds) == 2


def test_no_worker_outlives_its_bench(stub, monkeypatch):
    def stop(what: str) -> None:
        if what.startswith("round 1 of 2: b"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stub(watch=stop)
    log = Path(stub.__closure__[0].cell_contents)  # type: ignore[attr-defined]
    for line in log.read_text().splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[2]), signal.SIG_DFL)


# ----------------------------------------------------------------------------- batch_size=auto


@pytest.mark.parametrize("most", [1, 2, 3, 5, 16, 23, 64, 100, 1000])
@pytest.mark.parametrize("curved", [0.0, 0.2])
def test_the_largest_batch_is_found_to_an_eighth(most, curved):
    """By what two sizes foretell; also where memory grows a little faster than it foretells."""
    asked = []

    def step(batch: int) -> tuple[float, float]:
        asked.append(batch)
        if batch > most:
            raise Failure("failed", ["out of memory"])
        return 0.1, 1e9 + batch * 1e8 * (1 + curved * batch / most)

    memory = step(most)[1] / fitting.SHARE
    asked.clear()
    batch, limit, tried = fitting.largest(step, 10.0, memory)
    assert limit == "memory" and batch <= most <= batch + max(1, batch // 8)
    assert tried[batch] == "0.1 s" and len(asked) == len(set(asked)) <= 10


def test_the_search_ends_at_a_slow_step_and_passes_a_refusal_on():
    batch, limit, tried = fitting.largest(lambda b: (0.5 + b * 1.0, 1e6), 10.0, 1e9)
    assert (batch, limit, list(tried)) == (9, "time", [1, 2, 9])
    assert fitting.largest(lambda b: (11.0 * b, 1e6), 10.0, 1e9)[:2] == (1, "time")
    # what two sizes foretold was wrong: 16 takes 12.8 s, so it goes back
    slower = fitting.largest(lambda b: (b * b * 0.05, 1e6), 10.0, 1e9)
    assert slower[:2] == (14, "time") and list(slower[2]) == [1, 2, 16, 9, 12, 14]

    def refuse(batch: int) -> tuple[float, float]:
        raise Failure("unavailable", ["it may not"])

    with pytest.raises(Failure, match="it may not"):
        fitting.largest(refuse, 10.0, 1e9)

    def ended(batch: int) -> tuple[float, float]:
        if batch > 1:
            raise Failure("stopped", ["Ctrl-C"])
        return 0.1, 1e6

    with pytest.raises(Failure, match="Ctrl-C"):  # it says nothing of the size
        fitting.largest(ended, 10.0, 1e9)

    def too_large(batch: int) -> tuple[float, float]:
        raise Failure("failed", ["out of memory"])

    with pytest.raises(Failure, match="out of memory"):  # not even one sequence fits
        fitting.largest(too_large, 10.0, 1e9)


def test_a_small_model_may_take_thousands_of_sequences():
    batch, limit, _ = fitting.largest(lambda b: (b * 1e-3, b * 1.0), 100.0, 50_000.0)
    assert 47_500 * 7 / 8 <= batch <= 47_500 and limit == "memory"


def test_what_is_foretold_fills_most_of_the_memory_and_none_of_the_time_is_kept_back():
    good = [(1, (0.1, 100.0)), (2, (0.2, 200.0))]
    assert fitting.following(good, 9.0, 1000.0) == (9, "memory")  # 950 bytes, 100 a sequence
    assert fitting.following(good, 0.75, 1e9) == (7, "time")
    assert fitting.following(good, 9.0, 1e9)[0] == 16  # eight times the last
    assert fitting.following(good[:1], 9.0, 1e9) == (2, "memory")


def test_the_search_takes_its_minute_and_one_process(monkeypatch):
    clock = itertools.count(step=25.0)
    batch, limit, tried = fitting.largest(lambda b: (0.1, b * 1.0), 10.0, 1e9, lambda: next(clock))
    assert limit == "search" and list(tried) == [1, 2, 16] and batch == 16
    begun: list[str] = []

    class Counts:
        def __init__(self, timeout: float, stop: Any = None) -> None:
            assert timeout == bench.config.timeout and stop is bench.stop

        def begin(self, job: Any) -> Counts:
            begun.append(job["name"])
            assert job["train"]["compile"] is False and job["train"]["batch_size"] == 1
            assert job["train"]["gradient_accumulation_steps"] == 1
            return self

        def ask(self, request: Any) -> dict[str, Any]:
            if request["fits"] > 40:
                raise Failure("died" if request["fits"] > 100 else "failed", ["out of memory"])
            return {"seconds": 0.1, "peak_bytes": 1000 + request["fits"]}

        def close(self) -> None:
            begun.append("closed")

    monkeypatch.setattr(fitting, "Worker", Counts)
    config = BenchConfig(slowest_step=10.0)
    doing, told = list[str](), list[str]()
    bench = Bench("train", config, "cpu", 64, ["sdpa"], None, doing.append, {"memory_limit": 1e9},
                  tell=told.append)  # fmt: skip
    found = fitting.search(bench, "sdpa", "")
    assert told == [f"sdpa: batch {found['batch_size']}, limited by memory; tried "
                    f"{', '.join(found['tried'])}, not compiled"]  # fmt: skip
    assert doing == [f"does a batch fit? sdpa, {n} sequences" for n in found["tried"]]
    assert 36 <= found["batch_size"] <= 40 and found["limit"] == "memory"
    assert "128" in found["tried"]
    assert begun == ["sdpa", "closed", "sdpa", "closed"]  # 128 killed one


def job(kind: str, name: str, **changes: Any) -> dict[str, Any]:
    config = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 16, "batch_size": 4,
              "device": "cpu", "attention_backend": name or "auto", "attention_fallback": False,
              "onednn": False}  # fmt: skip
    train = asdict(TrainConfig(**{**config, **changes}))
    return {"job": kind, "name": name, "baseline": "", "train": train, "device": "cpu",
            "vocab_size": 64, "memory_limit": None, "profile": False,
            "weights": "dtype"}  # fmt: skip


def test_whether_a_batch_fits_is_tried_in_a_real_step():
    worker = training.Training(job("train", "sdpa", batch_size=1))
    answer = worker.round({"fits": 3})
    assert answer["seconds"] > 0 and answer["peak_bytes"] > 0
    state = worker.who.optimizer.state  # type: ignore[union-attr]
    assert all(s["step"] == 2 for s in state.values())  # AdamW's state was there


# ----------------------------------------------------------------------------- the figures


def test_a_step_of_the_bench_is_a_step_of_train(tmp_path):
    """The same weights, bit for bit, as train.py's own functions called one by one."""
    from core import optimizer as optim

    worker = training.Training(job("train", "manual", gradient_accumulation_steps=2, grad_clip=0.1))
    x, y = worker.batch
    assert x.shape == (8, 16)
    torch.manual_seed(1337)
    config = worker.config
    model = Job(job("train", "manual")).model()
    optimizer = optim.build_optimizer(model, config, torch.device("cpu"))
    for p, q in zip(model.parameters(), worker.who.model.parameters(), strict=True):  # type: ignore[union-attr]
        assert torch.equal(p, q) or p.shape != q.shape
    for _ in range(3):  # the first alone would not show the clipping: Adam ignores a scale
        loss = torch.zeros(())
        for i in range(2):
            part = model(x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4])[1] / 2
            part.backward()
            loss += part.detach()
        optim.update(
            optimizer, torch.amp.GradScaler("cpu", enabled=False), loss, 0.1, torch.zeros(())
        )
        optimizer.zero_grad()
        assert worker.step(x, y) == loss
    for (name, p), q in zip(model.named_parameters(), worker.who.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_converge_takes_the_batches_and_the_learning_rates_of_train(tmp_path):
    import data
    from core import optimizer as optim

    schedule = {"max_iters": 20, "lr_decay_iters": 20, "warmup_iters": 2}
    worker = training.Training(
        job("converge", "manual", dataset="tiny", data_dir=str(write_tokens(tmp_path)), **schedule)
    )
    tokens = data.load(tmp_path / "tiny", "train", 16, 64)
    batches = data.Batches(tokens, 16, 4, 1337)
    seen: list[float] = []
    step = worker.step

    def spy(x: torch.Tensor, y: torch.Tensor, mark: Any) -> torch.Tensor:
        assert all(map(torch.equal, (x, y), batches.get(len(seen))))
        seen.append(worker.who.optimizer.param_groups[0]["lr"])
        return step(x, y, mark)

    worker.step = spy  # type: ignore[method-assign,assignment]
    worker.warm_up({})
    assert not seen  # every step counts
    losses = [*worker.round({"steps": 3})["losses"], *worker.round({"steps": 3})["losses"]]
    assert len(losses) == 6
    assert seen == [optim.learning_rate(n, worker.config) for n in range(6)]


def test_a_loss_that_is_not_finite_is_no_figure():
    training.finite(torch.tensor(1e30))
    for loss in (math.inf, -math.inf, math.nan):
        with pytest.raises(FloatingPointError, match=f"the loss became {loss}"):
            training.finite(torch.tensor(loss))
    worker = training.Training(job("train", "manual"))
    worker.warm_up({"warm_up_steps": 1})
    with torch.no_grad():
        worker.who.model.transformer.wte.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="the loss became nan"):
        worker.round({"seconds": 0.001})


def test_a_wrong_kernel_shows_in_the_error_and_in_the_loss(monkeypatch):
    """One key too few: the mask moved by a place."""
    right = attention.get("manual").attend

    def wrong(q: Any, k: Any, v: Any, spec: Any, **more: Any) -> Any:
        return right(q, k, v, replace(spec, window=(spec.window or k.shape[1]) - 1), **more)

    point = {"B": 2, "T": 24, "H": 4, "Hkv": 2, "D": 8, "window": None}
    kernels = Kernels(job("kernel", "manual"))
    good = kernels.round({**point, "warm_up": True})
    assert good["error_out"] < 1e-6 > good["error_grad"]
    monkeypatch.setattr(attention, "get", lambda name: types.SimpleNamespace(attend=wrong))
    bad = kernels.round({**point, "warm_up": True})
    assert bad["error_out"] > 1e-2 < bad["error_grad"]


def test_the_flops_of_a_call():
    point = {"B": 3, "T": 10, "H": 4, "D": 8, "window": None}
    assert flops_of(point, causal=False) == 4 * 3 * 4 * 8 * 100
    assert flops_of(point, causal=True) == 4 * 3 * 4 * 8 * 55
    assert flops_of({**point, "window": 2}, causal=True) == 4 * 3 * 4 * 8 * 19


def test_mbu_counts_the_weights_once_and_every_sequences_keys():
    about = {"weight_bytes": 1000, "token_bytes": 10}
    assert mbu(about, 1, 10, 20, 1.0, 1e6) == pytest.approx((1000 + 200) * 1000 / 1e6)
    assert mbu(about, 4, 10, 20, 1.0, 1e6) == pytest.approx((1000 + 800) * 1000 / 1e6)


def test_the_peak_of_memory_is_seen_and_forgotten():
    device = torch.device("cpu")
    if not machine.reset_peak(device):
        pytest.skip("the peak of memory cannot be reset here (no /proc/self/clear_refs)")
    before = machine.memory(device)
    held = torch.ones(2**25)
    del held
    assert machine.memory(device) >= before + 2**26
    machine.reset_peak(device)
    assert machine.memory(device) < before + 2**26


def test_hf_baselines_are_what_they_say():
    transformers = pytest.importorskip("transformers", reason="package 'transformers' is missing")
    worker_job = job("train", "auto")
    for implementation in ("eager", "sdpa"):
        worker = training.Training({**worker_job, "baseline": f"hf={implementation}"})
        assert isinstance(worker.who.model, transformers.GPT2LMHeadModel)
        config = worker.who.model.config
        assert config._attn_implementation == implementation
        assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.0, 0.0, 0.0)
        assert (config.n_positions, config.activation_function) == (16, "gelu")
        loss = worker.step(*worker.batch)
        assert math.isfinite(loss) and abs(float(loss) - math.log(64)) < 0.5
    with pytest.raises(UserError, match="flash_attention_2 runs on cuda"):
        training.Training({**worker_job, "baseline": "hf=flash_attention_2"})
    with pytest.raises(UserError, match="it has no attention_window"):
        windowed = job("train", "auto", attention_window=4)
        training.Training({**windowed, "baseline": "hf=sdpa"})


def test_nanogpt_has_the_sizes_and_the_optimizer_that_were_asked_for(tmp_path):
    (tmp_path / "model.py").write_text(RIVAL, encoding="utf-8")
    sizes: dict[str, Any] = {"block_size": 12, "n_layer": 3, "n_head": 4, "n_embd": 24,
                             "dropout": 0.25, "bias": True}  # fmt: skip
    told = Job(job("train", "", **sizes, weight_decay=0.2, learning_rate=0.3, beta1=0.4, beta2=0.5))
    theirs = candidates.build(f"nanogpt={tmp_path / 'model.py'}", told)
    assert asdict(theirs.model.config) == {**sizes, "vocab_size": 64}
    theirs.for_training(theirs.setup.scaler())
    assert theirs.model.asked == (0.2, 0.3, (0.4, 0.5), "cpu") and theirs.model.training


def test_nanogpt_writes_without_a_cache_from_the_same_prompt(tmp_path):
    (tmp_path / "model.py").write_text(RIVAL, encoding="utf-8")
    other = {**job("decode", ""), "baseline": f"nanogpt={tmp_path / 'model.py'}"}
    worker = decoding.Decoding(other)
    ask = {"B": 3, "P": 5, "cache": "none", "new_tokens": 4}
    first = worker.round({**ask, "warm_up": True})
    assert first["kernels"] == [] and first["peak_bytes"] > 0
    calls = worker.who.model.calls
    calls.clear()
    answer = worker.round(ask)
    assert calls == [(3, 5), (3, 6), (3, 7), (3, 8)] and not worker.who.model.training
    assert answer["first_ms"] > 0 < answer["ms"] and answer["cache_bytes"] == 0
    assert worker.about["weight_bytes"] == 4 * 64 * 32


def test_the_first_token_of_nanogpt_is_there_when_the_model_is_called_again(tmp_path):
    (tmp_path / "model.py").write_text(RIVAL, encoding="utf-8")
    other = {**job("decode", ""), "baseline": f"nanogpt={tmp_path / 'model.py'}"}
    worker = decoding.Decoding(other)
    began: list[float] = []
    worker.who.model.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
    ended: list[float] = []
    worker.who.model.register_forward_hook(lambda *_: ended.append(time.perf_counter()))
    first, last, _ = worker.who.write(torch.zeros(1, 3, dtype=torch.long), 3, "none")
    assert ended[0] < began[1] <= first < ended[1] < ended[2] < last


def test_the_first_token_of_transformers_is_there_after_the_prompt_was_read():
    pytest.importorskip("transformers", reason="package 'transformers' is missing")
    worker = decoding.Decoding({**job("decode", ""), "baseline": "hf=sdpa"})
    began: list[float] = []
    worker.who.model.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
    ended: list[float] = []
    worker.who.model.register_forward_hook(lambda *_: ended.append(time.perf_counter()))
    prompt = torch.zeros(1, 3, dtype=torch.long)
    first, last, _ = worker.who.write(prompt, 3, "dynamic")
    assert ended[0] < first < began[1] and ended[2] < last


def test_hf_writes_with_its_caches(monkeypatch):
    transformers = pytest.importorskip("transformers", reason="package 'transformers' is missing")
    worker = decoding.Decoding({**job("decode", ""), "baseline": "hf=sdpa"})
    model = worker.who.model
    assert isinstance(model, transformers.GPT2LMHeadModel) and not model.training
    weights = sum(p.numel() for p in model.parameters()) - 16 * 32
    assert worker.about["weight_bytes"] == 4 * weights
    ours = decoding.Decoding(job("decode", "sdpa", bias=True))
    assert worker.about["weight_bytes"] == ours.about["weight_bytes"]
    assert worker.about["token_bytes"] == ours.about["token_bytes"]
    written: dict[str, list[list[int]]] = {}
    generate = model.generate

    def listen(prompt: torch.Tensor, **options: Any) -> Any:
        found = generate(prompt, **options)
        written[type(found.past_key_values).__name__] = found.sequences.tolist()
        return found

    monkeypatch.setattr(model, "generate", listen)
    for cache in ("dynamic", "static"):
        ask = {"B": 2, "P": 5, "cache": cache, "new_tokens": 9}
        assert worker.round(ask)["cache_bytes"] == 2 * (5 + 9 - 1) * 2 * 32 * 4
    assert set(written) == {"DynamicCache", "StaticCache"}
    assert written["DynamicCache"] == written["StaticCache"]
    assert [len(t) for t in written["DynamicCache"]] == [14, 14]
    draw = torch.Generator().manual_seed(5)  # the same prompts for all
    prompt = torch.randint(64, (2, 5), generator=draw).tolist()
    assert [t[:5] for t in written["DynamicCache"]] == prompt
    with pytest.raises(UserError, match="it has no n_kv_head"):
        grouped = job("decode", "", n_kv_head=1)
        decoding.Decoding({**grouped, "baseline": "hf=sdpa"})


# ----------------------------------------------------------------------------- statistics


def test_median_quartiles_and_noise():
    s = Summary.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (s.median, s.q1, s.q3) == (3.0, 2.0, 4.0)
    assert s.spread == pytest.approx(2 / 3) and s.noisy()
    assert Summary.of([97, 98, 100, 103.01, 104]).noisy()
    assert not Summary.of([97, 98, 100, 102.99, 104]).noisy()
    one = Summary.of([7.0])
    assert one.spread is None and not one.noisy()
    outcome = Outcome(rounds=[{"ms": 100.0 + x} for x in (0, 1, 2, 3, 40)])
    assert rows.begin("train", "a", {}, outcome)["noisy"] is False  # 2 of 102
    outcome = Outcome(rounds=[{"ms": 100.0 + x} for x in (0, 1, 2, 30, 40)])
    assert rows.begin("train", "a", {}, outcome)["noisy"] is True


def test_a_difference_must_exceed_both_spreads():
    a, b = Summary.of([97, 98, 100, 102, 103]), Summary.of([107, 108, 110, 112, 113])
    assert exceeds_noise(a, b) and exceeds_noise(b, a)
    assert not exceeds_noise(a, Summary.of([103, 104, 107, 111, 112]))
    assert exceeds_noise(a, Summary.of([110.0])) is None


def test_a_clock_that_drifts_hides_no_difference_within_a_run():
    clock = [1.0, 1.5, 0.7, 2.0, 1.2]
    a, b = [10 * c for c in clock], [11 * c for c in clock]
    assert differ(a, b) and not exceeds_noise(Summary.of(a), Summary.of(b))
    assert differ(a, [x * y for x, y in zip(a, [1.1, 0.9, 1.05, 0.95, 1.0])]) is False
    assert differ([1.0], [2.0]) is None


def test_the_help_lists_every_knob(capsys):
    with pytest.raises(SystemExit) as ended:
        bench_mfu.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in Flat.__dataclass_fields__:
        assert f"--{name}=" in text
    assert "Measure attention backends" in text and "--baseline" in text and "--rival" in text
    assert "of each backend, in turn [an integer]" in text  # a type with a range is said, too
    assert process.COMMAND[1].endswith("worker.py")
