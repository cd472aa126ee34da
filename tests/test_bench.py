"""bench_mfu.py: every mode on the CPU with small sizes, and its options.

No time is asserted: only what was measured, in which order, and what is made of it.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import in_process
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bench_mfu
from bench import machine, tables
from bench.job import names
from bench.settings import MODES, load_config, shown
from bench.verify import verify
from core import flops
from core.settings import UserError
from data.prepare import PrepareConfig, prepare
from model import GPTConfig

HOW = {"rounds": 2, "seconds": 0.01, "warm_up_steps": 1, "bandwidth_gbs": 8}


def small(mode: str) -> list[str]:
    """A mode, and options of a model that is quickly measured."""
    sizes = ["--device=cpu", "--n_layer=2", "--n_embd=32", "--n_head=2", "--block_size=32",
             "--vocab_size=64", "--batch_size=4", "--peak_tflops=0.5", "--dtype=float32"]
    how = (f"--{name}={value}" for name, value in HOW.items() if name in shown(MODES[mode]))
    return [mode, *sizes, *how]


SMALL = small("train")[1:]
MODEL = GPTConfig(32, 64, 2, 2, 32, bias=False)  # of SMALL

RIVAL = '''
"""A stand-in with nanoGPT's interface."""
from types import SimpleNamespace as GPTConfig
import torch
import torch.nn.functional as F

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = torch.nn.Embedding(config.block_size, config.n_embd)
    def forward(self, idx, targets=None):
        logits = self.wte(idx) @ self.wte.weight.T
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
    def configure_optimizers(self, weight_decay, lr, betas, device_type):
        print("a line on stdout, which belongs to nobody")
        return torch.optim.AdamW(self.parameters(), lr, betas, weight_decay=weight_decay)
    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            probs = F.softmax(self(idx)[0][:, -1] / temperature, dim=-1)
            idx = torch.cat((idx, torch.multinomial(probs, 1)), dim=1)
        return idx
'''


def run(argv: list[str]) -> tuple[int, str]:
    """Return the exit code and stdout."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = bench_mfu.main(argv)
    return code, out.getvalue()


def last_line(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])


def measured(*argv: str) -> dict[str, Any]:
    """Return the content of a run that succeeds."""
    code, out = run([*argv, "--json"])
    assert code == 0, out
    return last_line(out)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes: a process takes seconds to import torch."""
    in_process.use(monkeypatch)


def by_backend(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {r["backend"]: r for r in content["rows"]}


# --- the modes ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """A run of the mode train, with a record, a rival and a refused backend."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "nanoGPT").mkdir()
    (folder / "nanoGPT" / "model.py").write_text(RIVAL, encoding="utf-8")
    argv = [*SMALL, "--backends=eager,sdpa,sdpa_cudnn", "--rival", f"nanogpt={folder / 'nanoGPT'}",
            "--peak_tflops=0.2", "--record=tiny", f"--records_dir={folder}", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        in_process.use(patch)
        code, out = run(argv)
    assert code == 0
    return last_line(out), out, folder


def test_train_gives_a_row_for_every_backend_and_rival(trained):
    content, out, _ = trained
    table = by_backend(content)
    assert list(table) == ["manual", "nanogpt", "sdpa", "sdpa_cudnn"]
    for name in ("manual", "sdpa", "nanogpt"):
        row = table[name]
        assert row["status"] == "ok" and row["batch_size"] == 4 and len(row["rounds"]) == 2
        assert row["ms"] == pytest.approx(sum(r["ms"] for r in row["rounds"]) / 2)
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["ms"] * 1e3)
        share = row["tokens_per_s"] / 0.2e12
        assert row["mfu"] == pytest.approx(flops.flops_per_token(MODEL, 32) * share)
        assert row["mfu_causal"] == pytest.approx(flops.flops_per_token(MODEL, 32, True) * share)
        for r in row["rounds"]:
            assert 0 < r["forward_ms"] + r["backward_ms"] + r["optimizer_ms"] <= r["ms"] * 1.001
        assert row["memory_bytes"] > 2**26
        assert row["warm_up_s"] > row["first_step_s"] > 0 and row["setup_s"] > 0
    assert table["sdpa"]["kernels"] == ["flash (CPU)"] and table["manual"]["kernels"] == []
    assert abs(table["manual"]["loss_difference"]) < 1e-5 > abs(table["sdpa"]["loss_difference"])
    assert abs(table["sdpa"]["gradient_norm_difference"]) < 1e-4
    assert "loss_difference" not in table["nanogpt"]  # other weights
    refused = table["sdpa_cudnn"]
    assert refused["status"] == "unavailable" and "rounds" not in refused
    assert f"| sdpa_cudnn | unavailable | {refused['why'][0]} |" in out
    # torch counts the same FLOPs, but for biases and norm gains, which it leaves out
    counted, gains = content["reference"]["flops_per_token"], (2 * 2 + 1) * 32
    assert content["flops_per_token"]["mfu"] == pytest.approx(counted + 6 * gains, rel=1e-12)


def test_a_record_is_complete_and_a_second_leaves_it(trained, quick):
    content, out, folder = trained
    (made,) = folder.glob("*_cpu_tiny")
    written = (made / "record.json").read_text(encoding="utf-8")
    assert json.loads(written) == content and f"record: {made}" in out
    assert content["commit"] and isinstance(content["dirty"], bool)
    assert content["command"].startswith("python bench_mfu.py train --device=cpu")
    page = (made / "README.md").read_text(encoding="utf-8")
    table = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    cells = {head.split()[0]: cell.strip() for head, cell in zip(table[0], table[4], strict=True)}
    row = by_backend(content)["sdpa"]
    assert table[4][0].split() == ["|", "sdpa"] and "unavailable" in page
    assert (cells["mfu"], cells["causal"]) == (f"{row['mfu']:.1%}", f"{row['mfu_causal']:.1%}")
    assert (cells["rounds"], cells["tok/s"]) == ("2", f"{row['tokens_per_s']:,.0f}")
    argv = ["--backends=sdpa", f"--records_dir={folder}"]
    for n in (2, 3):
        run([*SMALL, *argv, "--record=tiny"])
        assert (folder / f"{made.name}-{n}" / "record.json").exists()
    assert (made / "record.json").read_text(encoding="utf-8") == written


def test_kernel_times_attention_alone_at_every_point(quick):
    table = measured(*small("kernel"), "--backends=manual,sdpa", "--lengths=16,32",
                     "--batch_sizes=1,2")["rows"]
    points = {(r["backend"], r["point"]["B"], r["point"]["T"]) for r in table}
    assert points == {(name, B, T) for name in ("manual", "sdpa") for B in (1, 2) for T in (16, 32)}
    for row in table:
        assert row["status"] == "ok" and 0 < row["error_out"] < 1e-5 > row["error_grad"] > 0
        B, T = row["point"]["B"], row["point"]["T"]
        flop = 12 * B * 2 * 16 * T * (T + 1) / 2
        assert row["tflops_causal"] == pytest.approx(flop / (row["ms"] / 1e3) / 1e12)
        assert row["tflops_full"] / row["tflops_causal"] == pytest.approx(2 * T / (T + 1))
        assert row["share"] == pytest.approx(row["tflops_causal"] / 0.5)


@pytest.mark.slow
def test_real_processes_and_a_point_for_which_memory_does_not_do(tmp_path, monkeypatch):
    """From a folder with modules of the same names. manual's scores of 9000 tokens take 0.65 GB a
    tensor; sdpa holds none."""
    (tmp_path / "bench").mkdir()
    for name in ("train.py", "model.py", "bench/__init__.py", "bench/workers.py"):
        (tmp_path / name).write_text("raise SystemExit('another module')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    rows = measured(*small("kernel"), "--backends=manual,sdpa", "--lengths=64,9000", "--rounds=1",
                    "--batch_sizes=1", "--memory_gb=1.5", "--n_kv_head=1")["rows"]
    found = {(r["backend"], r["point"]["T"]): r for r in rows}
    ok = [at for at, r in found.items() if r["status"] == "ok"]
    assert ok == [("manual", 64), ("sdpa", 64), ("sdpa", 9000)]
    assert found["manual", 9000]["why"][0].startswith("out of memory: ")
    long = found["sdpa", 9000]
    assert long["kernels"] == ["flash (CPU)"] and long["setup_s"] > 0 < long["warm_up_s"]
    assert "error_out" not in long  # too long for float64


@pytest.mark.parametrize("more, size, of_products", [
    (["--constraint=none,tensor,python,regex"], 4, 4), (["--dtype=bfloat16"], 2, 2),
    (["--weights=int8"], 4, 1),
])
def test_decode_runs_over_batches_prompts_and_caches(more, size, of_products, quick):
    """A key head to two query heads; the matrices and the head, but no embedding, are int8."""
    argv = [*small("decode"), "--backends=sdpa", "--new_tokens=4", "--n_kv_head=1"]
    content = measured(*argv, *more, "--batch_sizes=1,2", "--prompts=5", "--kv_caches=none,dynamic")
    assert len(content["rows"]) == 2 * 2 * (4 if "regex" in more[0] else 1)
    C, L, V = 32, 2, 64
    products = V * C + L * ((C + C) * C + C * C + 8 * C * C)
    gains = C + L * 2 * C
    for row in content["rows"]:
        p = row["point"]
        assert row["status"] == "ok" and p["P"] == 5 and len(row["rounds"]) == 2
        assert row["tokens_per_s"] == pytest.approx(p["B"] / row["ms"] * 1e3)
        assert row["first_ms"] > 0 and row["memory_bytes"] > 2**26
        assert (row["cache_bytes"] > 0) == (p["cache"] == "dynamic")
        read = products * of_products + gains * size
        read += p["B"] * (5 + 4 / 2) * 2 * L * (C // 2) * size  # keys and values of a mean text
        assert row["mbu"] == pytest.approx(read / (row["ms"] / 1e3) / 8e9)  # --bandwidth_gbs
    few = ("--bandwidth_gbs=1e-9", "--batch_sizes=1", "--prompts=5", "--kv_caches=none")
    (row,) = measured(*argv, *few)["rows"]
    assert row["mbu"] is None and row["mbu_why"]  # more than the memory can send


@pytest.mark.slow
def test_decode_has_rows_for_the_rivals_where_they_have_such_a_cache(tmp_path, quick):
    (tmp_path / "model.py").write_text(RIVAL, encoding="utf-8")
    pytest.importorskip("transformers")
    content = measured(*small("decode"), "--backends=sdpa", "--batch_sizes=2", "--prompts=5",
                       "--kv_caches=none,static", "--new_tokens=3", "--rival", "hf", "--rival",
                       f"nanogpt={tmp_path}")
    at = {(r["backend"], r["point"]["cache"]): r for r in content["rows"]}
    lacking = {key for key, r in at.items() if r["status"] == "unavailable"}
    assert len(at) == 6 and lacking == {("nanogpt", "static"), ("hf_sdpa", "none")}
    row = at["nanogpt", "none"]
    assert len(row["rounds"]) == 2 and row["first_ms"] > 0 and row["cache_bytes"] == 0
    # its weights without the positions, and keys and values as ours would be
    size = 4 * 64 * 32 + 2 * (5 + 3 / 2) * 2 * 2 * 32 * 4
    assert row["mbu"] == pytest.approx(size / (row["ms"] / 1e3) / 8e9)
    # the last token is drawn, but never read: keys and values of one less
    assert at["hf_sdpa", "static"]["cache_bytes"] == 2 * (5 + 3 - 1) * 2 * 2 * 32 * 4


def write_tokens(folder: Path) -> Path:
    """A dataset of characters, each of which follows from its place."""
    text = "".join(chr(60 + (i * i + i // 7) % 61) for i in range(6000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    given = PrepareConfig(source=str(folder / "text.txt"), out_dir=str(folder / "tiny"))
    prepare("shakespeare_char", given)
    return folder


# --- --batch_size=auto ---

LIMITED = """
import torch
from attention import Backend, Caps, manual

def attend(q, k, v, spec, **_):
    if len(q) > {most}:
        raise torch.OutOfMemoryError("made up")
    return manual.attend(q, k, v, spec)

caps = Caps(dropout=False, segments=False, window=False, caches=("none",))
BACKEND = Backend("{name}", "at most {most} sequences", attend, (caps,), fallback=None)
"""


def test_a_kernel_that_is_wrong_beyond_its_probe_is_a_row(tmp_path, quick):
    for factor in ("float('nan')", "1.01"):
        path, long = tmp_path / f"{len(factor)}.py", f"(1.0 if q.shape[1] < 600 else {factor})"
        code = LIMITED.format(name=path.stem, most=99)
        path.write_text(code.replace("return manual", f"return {long} * manual"), encoding="utf-8")
        words = [f"--backends={path}", "--lengths=700", "--batch_sizes=1", "--json"]
        code, out = run([*small("kernel"), *words])
        (row,) = last_line(out)["rows"]
        if row["status"] == "failed":
            assert code == 1 and row["why"][0].startswith("FloatingPointError: ")
        else:  # relative to the largest value
            assert row["error_out"] == pytest.approx(0.01, rel=1e-3) == row["error_grad"]
            assert any("error_out 1.0e-02" in answer for answer in last_line(out)["answers"])


@pytest.mark.parametrize("mode", ["train", "decode"])
def test_each_backend_has_the_largest_batch_that_fits(mode, tmp_path, quick):
    files = []
    for name, most in (("five", 5), ("eleven", 11)):
        files.append(f"{tmp_path / name}.py")
        Path(files[-1]).write_text(LIMITED.format(name=name, most=most), encoding="utf-8")
    few = ["--prompts=4", "--new_tokens=3", "--kv_caches=none"] if mode == "decode" else []
    content = measured(*small(mode), "--batch_size=auto", f"--backends={','.join(files)}", *few)
    assert mode == "decode" or "batch" in content["reference"]["why"]
    for row, size in zip(content["rows"], (5, 11), strict=True):
        assert row["status"] == "ok" and row["batch_size"] == size and len(row["rounds"]) == 2
        assert {r["shape"]["B"] for r in row["rounds"]} == {size}
        tokens = size * (32 if mode == "train" else 1)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["ms"] * 1e3)
    assert not [why for why in verify(content) if "causality" not in why and "error" not in why]


# --- options ---


def test_interpreted_backends_are_measured_only_by_name():
    left_out = names(load_config(["--device=cpu"]).settings, "cpu")[1]
    assert "interpreter" in left_out["triton"]
    assert not names(load_config(["--device=cpu", "--backends=all,triton"]).settings, "cpu")[1]


def test_a_mode_accepts_the_options_of_its_help_only(capsys):
    helps = {}
    for mode in bench_mfu.MODES:
        with pytest.raises(SystemExit):
            bench_mfu.main([mode, "--help"])
        helps[mode] = capsys.readouterr().out
    known = set.union(*map(shown, MODES.values()), {"document_mask", "max_iters"})
    for mode, text in helps.items():
        for name in (name for name in known if f"--{name}" not in text):
            with pytest.raises(UserError, match=f"^--{name}: .*{mode}"):
                load_config(["--device=cpu", f"--{name}=1"], mode)
    for words in ("kernel --lengths=8", "decode --constraint=none", "qualify --stages=1",
                  "converge --steps=20", "runs --sizes=a", "train --rival=hf", "plan --gpu=x"):
        mode, option = words.split()
        load_config(["--device=cpu", option], mode)


def test_a_config_file_of_a_run_may_have_more(tmp_path):
    (path := tmp_path / "c.py").write_text("max_iters = 9\nlearning_rate = 1.0\n", "utf-8")
    load_config([str(path), "--device=cpu"], "train")
    path.write_text("document_mask = True\n", "utf-8")  # it would change what is measured
    with pytest.raises(UserError, match=r"--document_mask: .*c\.py:1"):
        load_config([str(path), "--device=cpu"], "converge")


@pytest.mark.parametrize("argv, value", [
    (["--backends=sdpaa"], "sdpaa"),
    (["--backends=auto"], "auto"),
    (["--init_from=gpt2"], "init_from"),
    (["--rival=llama"], "llama"),
    (["--rival=nanogpt=/none/such"], "/none/such"),
    (["--record=a/b"], "a/b"),
    (["converge", "--steps=15"], "15"),
    (["converge", "--dataset=none_such"], "none_such"),
    (["decode", "--prompts=30"], "--block_size=32"),
    (["nomode"], "nomode"),
    (["converge", "--paths=float32", "--backends=sdpa"], "--paths"),
    (["runs"], "--rival"),
])
def test_a_mistake_is_one_line_that_names_it(argv, value, quick):
    mode = "train" if argv[0].startswith("-") else argv[0]
    base = [mode] if mode in ("runs", "nomode") else small(mode)
    with pytest.raises(UserError) as error:
        run([*base, *argv[argv[0] == mode :]])
    assert value in str(error.value) and "\n" not in str(error.value)


# --- statistics ---


@given(st.lists(st.floats(0.1, 100.0), min_size=2))
def test_quartiles_are_numpys(times):
    found = tables.medians({"rounds": [{"ms": t} for t in times]})
    q1, median, q3 = np.quantile(times, [0.25, 0.5, 0.75])
    assert [found[name] for name in ("q1_ms", "ms", "q3_ms")] == pytest.approx([q1, median, q3])
    assert found["spread"] == pytest.approx((q3 - q1) / median)


def test_the_free_memory_of_a_container_is_what_its_limit_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   5000000 kB\n")
    (tmp_path / "memory.current").write_text("1200000000\n")
    for limit, free in ((None, 5_120_000_000), ("max", 5_120_000_000),
                        ("3000000000", 1_800_000_000), ("30000000000", 5_120_000_000)):
        if limit:
            (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert machine.free_memory(torch.device("cpu")) == free
