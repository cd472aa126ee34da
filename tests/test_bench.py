"""bench_mfu.py: every mode on the CPU with small sizes, and the rules that its figures rest on.

No time is asserted anywhere: what is looked at is what was measured, in which order, and what is
said when something could not be.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import types
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import in_process
import pytest
import torch

import attention
import bench_mfu
from bench import config as config_
from bench import rows, training
from bench.config import BenchConfig, Flat, load_config
from bench.job import Job
from bench.kernels import Kernels
from bench.process import Outcome
from bench.stats import Summary
from core import flops
from core.settings import UserError
from model import GPTConfig
from train import TrainConfig

SMALL = ["--device=cpu", "--n_layer=2", "--n_embd=32", "--n_head=2", "--block_size=32",
         "--vocab_size=64", "--batch_size=4", "--peak_tflops=0.5", "--rounds=2", "--seconds=0.01",
         "--warm_up_steps=1", "--dtype=float32", "--bandwidth_gbs=8"]

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
            "--record=tiny", f"--records_dir={folder}",
            "--json"]
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
    assert abs(table["manual"]["loss_difference"]) < 1e-5 > abs(table["sdpa"]["loss_difference"])
    assert abs(table["sdpa"]["gradient_norm_difference"]) < 1e-4
    assert "loss_difference" not in table["nanogpt"]  # other weights


def test_a_refused_backend_is_a_row_and_nothing_else_runs_for_it(trained):
    row = by_backend(last_line(trained[1]), "train")["sdpa_cudnn"]
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


def test_attention_alone_is_timed_at_every_point(quick):
    code, out = run(["kernel", *SMALL, "--backends=manual,sdpa", "--lengths=16,32",
                     "--batch_sizes=1,2", "--json"])
    table = last_line(out)["rows"]
    assert code == 0 and {r["backend"] for r in table} == {"manual", "sdpa"}
    points = {(r["point"]["B"], r["point"]["T"]) for r in table}
    assert points == {(1, 16), (1, 32), (2, 16), (2, 32)}
    for row in table:
        assert row["status"] == "ok" and 0 < row["error_out"] < 1e-5 > row["error_grad"] > 0
        seconds, p = row["ms"] / 1e3, row["point"]
        pairs = p["T"] * (p["T"] + 1) / 2
        flop = 12 * p["B"] * 2 * 16 * pairs
        assert row["tflops_causal"] == pytest.approx(flop / seconds / 1e12)
        assert row["tflops_full"] / row["tflops_causal"] == pytest.approx(p["T"] ** 2 / pairs)
        assert row["share"] == pytest.approx(row["tflops_causal"] / 0.5)


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
    assert {p.name for p in record.iterdir()} == {"record.json", "README.md"}
    page = (record / "README.md").read_text(encoding="utf-8")
    sdpa = by_backend(content, "train")["sdpa"]
    assert f"{sdpa['tokens_per_s']:,.0f}" in page and "unavailable" in page
    assert f"record: {record}" in out


def test_the_whole_command_with_real_processes():
    """What the other tests leave out: processes, pipes, and what libraries print."""
    code, out = run(["kernel", *SMALL, "--backends=sdpa", "--lengths=16", "--batch_sizes=1",
                     "--json"])
    (row,) = last_line(out)["rows"]
    assert code == 0 and row["status"] == "ok" and len(row["rounds"]) == 2
    assert row["kernels"] == ["flash (CPU)"] and row["setup_s"] > 0 < row["warm_up_s"]


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
    assert "error_out" not in found["sdpa", 9000]  # too long for float64
    assert found["manual", 64]["point"]["Hkv"] == 1
    assert found["manual", 64]["spread"] is None  # of one round
    assert "manual" in out and "(kernel B=1 T=9000" in out


def test_decode_runs_over_batches_prompts_and_caches(quick):
    argv = ["decode", *SMALL, "--backends=sdpa", "--batch_sizes=1,2", "--prompts=5",
            "--kv_caches=none,dynamic", "--new_tokens=4", "--json",
            "--constraint=none,tensor,python,regex"]
    code, out = run(argv)
    content = last_line(out)
    assert code == 0 and len(content["rows"]) == 2 * 2 * 4
    N, per_token = flops.n_params(GPTConfig(32, 64, 2, 2, 32, bias=False)), 2 * 2 * 32 * 4
    for row in content["rows"]:
        p = row["point"]
        assert row["status"] == "ok" and p["P"] == 5 and len(row["rounds"]) == 2
        assert row["tokens_per_s"] == pytest.approx(p["B"] / row["ms"] * 1e3)
        assert row["first_ms"] > 0 and row["memory_bytes"] > 2**26
        assert (row["cache_bytes"] > 0) == (p["cache"] == "dynamic")
        size = 4 * N + p["B"] * (5 + 4 / 2) * per_token
        assert row["mbu"] == pytest.approx(size / (row["ms"] / 1e3) / 8e9)  # --bandwidth_gbs
    with pytest.raises(UserError, match="--block_size=32"):
        run(["decode", *SMALL, "--prompts=30", "--new_tokens=4"])


@pytest.mark.slow
def test_decode_has_rows_for_the_baselines_where_they_have_such_a_cache(tmp_path, quick):
    (tmp_path / "model.py").write_text(RIVAL, encoding="utf-8")
    caches, new = ("none", "dynamic", "static"), 3
    argv = ["decode", *SMALL, "--backends=sdpa", "--batch_sizes=2", "--prompts=5", "--json",
            f"--kv_caches={','.join(caches)}", f"--new_tokens={new}", "--rival", "hf",
            "--rival", f"nanogpt={tmp_path}"]
    code, out = run(argv)
    content = last_line(out)
    at = {(r["backend"], r["point"]["cache"]): r for r in content["rows"]}
    hf = [("hf_sdpa", c) for c in caches[1:]]
    ours = [("sdpa", c) for c in caches]
    assert code == 0 and len(content["rows"]) == len(at)
    ok = {k for k, r in at.items() if r["status"] == "ok"}
    assert ok >= {*ours, ("nanogpt", "none")} and len(at) == 3 * len(caches)
    assert "no cache" in at["nanogpt", "static"]["why"][0]
    assert "none" in at["hf_sdpa", "none"]["why"][0]
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


def write_tokens(folder: Path) -> Path:
    """A dataset of bytes, where each follows from the one before."""
    tokens = [(i * i + i // 7) % 61 for i in range(6000)]
    (folder / "tiny").mkdir()
    for split in ("train", "val"):
        data = torch.tensor(tokens, dtype=torch.uint16).numpy().tobytes()
        (folder / "tiny" / f"{split}.bin").write_bytes(data)
    meta = {"tokenizer": {"kind": "char"}, "vocab_size": 61,
            "tokens": {"train": len(tokens), "val": len(tokens)}}
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
    assert list(tmp_path.glob("*_cpu_c/README.md"))
    with pytest.raises(UserError, match="no dataset"):
        run(["converge", *SMALL, "--steps=10", "--dataset=none_such"])


class NoWorker:
    """A worker that measures nothing."""

    about: dict[str, Any] = {  # noqa: RUF012
        "peak_tflops": 1.0, "peak_source": "given", "peak_measured": False, "kind": "cpu",
        "about": "made up",
        "dtype": "float32", "packages": {}, "driver": None, "cuda": None, "python": "3",
        "system": "none", "bandwidth": 1.0, "free_memory": 1,
    }

    def __init__(self, timeout: float, stop: Any = None) -> None:
        self.about = dict(self.about)

    def begin(self, job: dict[str, Any]) -> NoWorker:
        return self

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"refused": {}}

    def close(self) -> None:
        pass


# ----------------------------------------------------------------------------- settings


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
    "argv, value",
    [
        (["--backends=sdpaa"], "sdpaa"),
        (["--backends=auto"], "auto"),
        (["--batch_size=0"], "batch_size"),
        (["--seconds=0"], "seconds"),
        (["--init_from=gpt2"], "gpt2"),
        (["--rival=llama"], "llama"),
        (["--rival=nanogpt=/none/such"], "/none/such"),
        (["--record=a/b"], "a/b"),
        (["kernel", "--rival=hf"], "--rival"),
        (["converge", "--steps=15"], "15"),
        (["--n_embd=33"], "n_embd"),
        (["nomode"], "nomode"),
        (["--seeds=2"], "--seeds"),
        (["converge", "--paths=float32", "--backends=sdpa"], "--paths"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(argv, value, monkeypatch):
    in_process.use(monkeypatch, NoWorker)
    with pytest.raises(UserError) as told:
        run([argv[0], *SMALL, *argv[1:]] if argv[0] in ("kernel", "converge") else
            argv if argv[0] in (*bench_mfu.MODES, "nomode") else [*SMALL, *argv])
    assert value in str(told.value) and "\n" not in str(told.value)


def test_the_vocabulary_is_the_datasets_where_there_is_one(tmp_path):
    folder = str(write_tokens(tmp_path))

    def tokens_of(**given: Any) -> BenchConfig:
        return BenchConfig(train=TrainConfig(**given, data_dir=folder))

    assert config_.vocabulary(tokens_of(dataset="tiny"))[0] == 61
    V, why = config_.vocabulary(tokens_of(dataset="none"))
    assert V == 50304 and "not prepared" in why
    assert config_.vocabulary(tokens_of(vocab_size=7, dataset="tiny"))[0] == 7


def job(kind: str, name: str, **changes: Any) -> dict[str, Any]:
    config = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 16, "batch_size": 4,
              "device": "cpu", "attention_backend": name or "auto", "attention_fallback": False,
              "onednn": False}
    train = asdict(TrainConfig(**{**config, **changes}))
    return {"job": kind, "name": name, "baseline": "", "train": train, "device": "cpu",
            "vocab_size": 64, "memory_limit": None, "profile": False,
            "weights": "dtype"}


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


def test_a_wrong_kernel_shows_in_the_error_and_in_the_loss(monkeypatch):
    """One key too few: the mask moved by a place."""
    right = attention.get("manual").attend

    def wrong(q: Any, k: Any, v: Any, spec: Any, **more: Any) -> Any:
        return right(q, k, v, replace(spec, window=(spec.window or k.shape[1]) - 1), **more)

    point = {"B": 2, "T": 24, "H": 4, "Hkv": 2, "D": 8, "window": None}
    kernels = Kernels(job("kernel", "manual"))
    good = kernels.round({**point, "warm_up": True})
    assert good["error_out"] < 1e-6 > good["error_grad"]
    monkeypatch.setattr(kernels, "backend", types.SimpleNamespace(attend=wrong))
    bad = kernels.round({**point, "warm_up": True})
    assert bad["error_out"] > 1e-2 < bad["error_grad"]


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
