"""The commands as they run on a GPU: on a made-up one (fake_cuda.py), by their real control flow.

Every command is a process, and so are the bench's workers. What passes here can fail on a GPU by
what only the hardware knows: speed, memory, compilers, a kernel's numbers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_cuda
import in_process
import numpy as np
import pytest
import test_bench
import test_explain
import test_qualify
import torch
from test_generate import lively, ragged

import attention
import bench_mfu
import data
from attention.caps import version
from bench import config as config_
from bench import qualify, record
from bench.config import modes_of
from bench.verify import verify
from inference import engine

ROOT = Path(__file__).resolve().parent.parent
SIZES = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32"]
TINY = [*SIZES, "--vocab_size=64"]
QUICK = {"rounds": 2, "seconds": 0.02, "warm_up_steps": 1, "json": True}
PYNVML = """
from types import SimpleNamespace
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlSystemGetDriverVersion(): return "575.57.08"
def nvmlDeviceGetMemoryInfo(gpu): return SimpleNamespace(used=2_345_000_000)
def nvmlDeviceGetUtilizationRates(gpu): return SimpleNamespace(gpu=98)
"""

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or version(torch.__version__) < (2, 13) or sys.platform != "linux",
    reason="a made-up GPU needs a machine without one, Linux and PyTorch 2.13",
)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes each Python begin with the made-up GPU; NVIDIA's library, a dataset."""
    folder = tmp_path_factory.mktemp("rehearsal")
    start = "import fake_cuda\nfake_cuda.install()\n"
    (folder / "sitecustomize.py").write_text(start, encoding="utf-8")
    (folder / "pynvml.py").write_text(PYNVML, encoding="utf-8")
    lines = "".join(f"{i} quick brown foxes jump over {i * i % 97} dogs\n" for i in range(300))
    (folder / "text.txt").write_text(lines, encoding="utf-8")
    made = [sys.executable, "-m", "data", "shakespeare_char",
            f"--source={folder / 'text.txt'}", f"--out_dir={folder / 'text'}"]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    return folder


def run(there: Path, *command: Any, code: int | None = 0, **env: str) -> str:
    """What the command says, on both channels."""
    path = os.pathsep.join([str(there), str(ROOT / "tests")])
    ours = {"PYTHONPATH": path, "NANOATTN_CACHE": str(there / "cache"), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT, env={**os.environ, **ours, **env}, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    assert code is None or done.returncode == code, done.stdout[-4000:]
    return done.stdout


def bench(there: Path, *argv: Any, **env: str) -> dict[str, Any]:
    """The content of a run of the bench."""
    quick = (f"--{name}={value}" for name, value in QUICK.items() if argv[0] in modes_of(name))
    out = run(there, "bench_mfu.py", *argv, *quick, **env)
    content = json.loads(out.splitlines()[-1])
    bad = [r for r in content["rows"] if r["status"] == "failed"]
    assert not bad, (bad[0]["backend"], bad[0]["point"], bad[0]["why"])
    assert content["complete"], content
    return content


def read(folder: Path) -> dict[str, Any]:
    """The record in a folder."""
    return json.loads((folder / "record.json").read_text(encoding="utf-8"))


def row(content: dict[str, Any], backend: str, **point: Any) -> dict[str, Any]:
    return next(r for r in content["rows"] if r["backend"] == backend and r["status"] == "ok"
                and point.items() <= r["point"].items())


@pytest.mark.slow
def test_training_steps_with_a_profile_and_a_record(there, tmp_path):
    """Compiled, in micro-batches, in bfloat16; the record passes the board's check but for what
    this machine's speed is."""
    content = bench(there, "train", *TINY, "--batch_size=4", "--gradient_accumulation_steps=2",
                    "--profile",  "--backends=sdpa,sdpa_flash",
                    "--record=rehearsal", f"--records_dir={tmp_path}")
    m = content["machine"]
    assert m["name"] == "NVIDIA H200" and m["driver"] == "575.57.08" and m["kind"] == "cuda"
    assert "datasheet" in m["peak_source"] and m["dtype"] == "bfloat16"
    assert 138 * 2**30 < m["free_memory"] <= 139 * 2**30  # before the peak's matrices
    for backend, kernel, device in (
        ("sdpa", "cudnn", "cudnn_generated"), ("sdpa_flash", "flash", "flash_fwd"),
    ):
        found = row(content, backend)
        assert found["kernels"] == [kernel], found["kernels"]
        assert any(device in name for name in found["device_kernels"])
        assert abs(found["loss_difference"]) < 1e-2
        assert found["compiled"] and found["forward_ms"] > 0 and found["backward_ms"] > 0
        parts = {p["part"]: p for p in found["profile"]["parts"]}
        assert parts["attention"]["ms"] > 0 and parts["linear"]["ms"] > 0
    folder = next(tmp_path.iterdir())
    assert verify(read(folder)) == []


@pytest.mark.slow
def test_attention_alone(there):
    content = bench(there, "kernel", *TINY, "--lengths=32,64", "--batch_sizes=1",
                    "--backends=sdpa,manual,sdpa_efficient", "--windows=none,16")
    assert row(content, "sdpa", T=64, window=None)["kernels"] == ["cudnn"]
    assert row(content, "sdpa_efficient", T=64, window=16)["kernels"] == ["efficient"]


@pytest.mark.slow
def test_generation_with_every_cache(there):
    content = bench(there, "decode", *TINY, "--backends=sdpa,paged", "--compile=True",
                    "--prompts=8", "--new_tokens=6", "--batch_sizes=2")
    for cache in ("none", "dynamic", "static"):
        assert row(content, "sdpa", cache=cache)["cache_bytes"] is not None
    assert row(content, "paged", cache="paged")["kernels"] == ["paged decode (Triton)"]
    assert "measured" in content["machine"]["bandwidth_source"]


def continued(device: str, kv: str) -> list[list[int]]:
    """Texts of several lengths, to the last position and beyond it, with every option."""
    sizes = {"vocab_size": 260, "block_size": 12, "attention_window": 6, "n_kv_head": 2}
    model = lively(attention_backend="manual", **sizes).to(device)
    made = engine.generate(
        model, ragged(), 6, kv_cache=kv, temperature=0.7, top_p=0.9, vocab_size=257,
        generator=[torch.Generator().manual_seed(row) for row in range(4)],
        stop=lambda row, new: len(new) > row + 2,
    )
    return [text.tolist() for text in made]


def as_on_the_cpu(texts: dict[str, list[list[int]]], explained: Any) -> None:
    fake_cuda.install()
    patch = pytest.MonkeyPatch()
    patch.setattr(sys.modules["attention.paged"], "_triton_capability", lambda: (0, 0))
    assert {kv: continued("cuda", kv) for kv in texts} == texts
    x, y = data.Batches(np.arange(50, dtype=np.uint16), 8, 4, seed=0, device="cuda").get(0)
    assert x.is_cuda and y.is_cuda
    torch.cuda.synchronize()
    assert y.tolist() == (x + 1).tolist()
    model, config = test_explain.made("gqa-window-segments")
    found = test_explain.explained(model.to("cuda"), config)
    assert "H200" in found["about"]["device"]
    assert found["maps"]["seen"] == explained["maps"]["seen"]
    assert all(layer["agrees"] for layer in found["maps"]["layers"])


@pytest.mark.slow
@pytest.mark.usefixtures("remembered_probes")
def test_texts_and_what_is_explained_leave_no_tensor_on_the_host():
    """In a fork: a process once made to believe in the GPU does not forget it."""
    texts = {kv: continued("cpu", kv) for kv in engine.KV_CACHES}
    assert texts["none"] == texts["dynamic"] == texts["static"] == texts["paged"]
    given = texts, test_explain.document("gqa-window-segments")
    process = multiprocessing.get_context("fork").Process(target=as_on_the_cpu, args=given)
    process.start()
    process.join(300)
    assert process.exitcode == 0


@pytest.mark.slow
def test_the_same_training_with_two_backends(there):
    content = bench(there, "converge", *SIZES, "--batch_size=4", "--backends=sdpa", "--steps=10",
                    "--dataset=text", f"--data_dir={there}")
    assert row(content, "sdpa")["verdict"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_stops_goes_on_and_writes(there, tmp_path, dtype):
    """Evaluation, checkpoints, dropout's random state: six steps are three and three more."""
    how = [*SIZES, "--dataset=text", f"--data_dir={there}", "--batch_size=4",
           "--gradient_accumulation_steps=2", f"--dtype={dtype}", "--dropout=0.1",
           "--log_interval=1", "--eval_interval=3", "--eval_iters=2", "--learning_rate=1e-2",
           "--warmup_iters=1", "--lr_decay_iters=6"]
    out = run(there, "train.py", *how, "--max_iters=6", f"--out_dir={tmp_path / 'whole'}")
    assert f"cuda (NVIDIA H200), {dtype}" in out and "kernel: flash" in out  # dropout: not cuDNN
    assert ", 0.0 ms" not in out
    run(there, "train.py", *how, "--max_iters=3", f"--out_dir={tmp_path / 'parts'}")
    run(there, "train.py", "--init_from=resume", f"--out_dir={tmp_path / 'parts'}", "--max_iters=6")
    whole, parts = (
        {r["iter"]: r["loss"] for r in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
         if "loss" in r} for name in ("whole", "parts"))
    assert whole == parts and whole[6] < whole[1] - 0.3
    if dtype == "float16":
        return
    for cache in ("static", "paged"):
        text = run(there, "sample.py", f"--out_dir={tmp_path / 'whole'}", "--max_new_tokens=6",
                   "--num_samples=2", f"--kv_cache={cache}", f"--compile={cache == 'static'}",
                   "--dtype=bfloat16")
        assert f"KV cache ({cache})" in text


@pytest.mark.slow
def test_the_survey(there):
    out = run(there, "-m", "attention", "--head_dim=16", "--n_head=2", "--seq_len=64",
              "--batch_size=1")
    assert "NVIDIA H200 (cuda), compute capability 9.0" in out
    for backend, kernel in (("sdpa_cudnn", "cudnn"), ("triton", r"flash \(our Triton\)")):
        assert re.search(rf"^{backend} .* {kernel}$", out, re.M), out


@pytest.mark.slow
def test_two_processes_train_as_one_does(there, tmp_path):
    how = [*SIZES, "--dataset=text", f"--data_dir={there}", "--batch_size=2", "--eval_iters=2",
           "--gradient_accumulation_steps=4", "--log_interval=1", "--max_iters=3",
           "--learning_rate=1e-2", "--warmup_iters=1", "--dtype=float32"]
    run(there, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py",
        *how, f"--out_dir={tmp_path / 'two'}", FAKE_CUDA_DEVICES="2")
    run(there, "train.py", *how, f"--out_dir={tmp_path / 'one'}")
    two, one = (
        [r["loss"] for r in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
         if "loss" in r] for name in ("two", "one"))
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_no_kernel_is_wrong_in_the_time(there, tmp_path):
    out = run(there, "bench_mfu.py", "qualify", *TINY, "--minutes=0.2", "--stages=2",
              "--backends=manual,sdpa,sdpa_flash", f"--records_dir={tmp_path}",
              code=1)  # no stage has ended
    (stage,) = read(next(tmp_path.iterdir()))["stages"]
    assert " is wrong in " not in out and all(row["right"] for row in stage["record"]["rows"]), out


@pytest.mark.slow
def test_a_machine_is_qualified(there, tmp_path):
    """Where CUPTI is not allowed, as in many containers: a note, no failure."""
    out = run(there, "bench_mfu.py", "qualify", *TINY, "--minutes=3", "--stages=1,4,5",
              "--batch_size=4", "--backends=manual,sdpa,sdpa_flash", "--prompts=8",
              "--new_tokens=4", f"--records_dir={tmp_path}", FAKE_CUDA_CUPTI="0")
    assert "GPU 0 was in use before we began: 2,345 MB, 98%" in out
    content = read(next(tmp_path.iterdir()))
    assert {s["status"] for s in content["stages"]} <= {"done", "cut"}, out
    ok = {part["mode"]: {r["backend"] for r in part["rows"] if r["status"] == "ok"}
          for part in record.sections_of(content)}
    assert ok == {"train": {"sdpa", "sdpa_flash"}, "decode": {"sdpa", "paged"}}
    assert "CUPTI" in str(content)


# --- all of qualify, in this process ---

SHOWN = {"triton": "flash (our Triton)", "sdpa_cudnn": "cudnn", "sdpa_flash": "flash",
         "sdpa_efficient": "efficient", "sdpa_math": "math", "sdpa": "cudnn"}
ON_DEVICE = {"triton": "forward_kernel", "sdpa_cudnn": "cudnn_generated_sdpa", "flex": "flex_attn",
             "sdpa_flash": "flash_fwd_kernel", "sdpa": "cudnn_generated_sdpa",
             "sdpa_efficient": "fmha_cutlassF"}


class OnH200(in_process.InProcess):
    """Answers as a worker on an H200: computed on the CPU, by sdpa where only CUDA has a kernel."""

    def __init__(self, job: Any, timeout: float, stop: Any) -> None:
        name = self.name = job["name"]
        here, spec = attention.Machine.here("cpu"), attention.Spec(2, 2, 16, "bfloat16")
        known = name in attention.BACKENDS and not attention.BACKENDS[name].why_not(spec, here)
        mine = name if known else "sdpa"
        train = {**job["train"], "attention_backend": mine, "compile": False, "peak_tflops": 1.0}
        sent = {**job, "device": "cpu", "train": train, "bandwidth_gbs": 8.0}
        sent |= {"name": mine} if name and not job["rival"] else {}
        super().__init__(sent, timeout, stop)
        if job["job"] == "machine":
            tflops, source = attention.machine.gpus.datasheet_tflops("NVIDIA H200", "bfloat16")
            self.about |= {"kind": "cuda", "name": "NVIDIA H200", "about": "NVIDIA H200",
                           "capability": [9, 0], "driver": "580.1", "free_memory": 140e9,
                           "peak_tflops": tflops, "peak_source": source, "cudnn": 91400,
                           "products_tflops": 0.7 * tflops}

    def ask(self, request: Any) -> dict[str, Any]:
        if "what" in request:  # a case of the proof
            request = {**request, "backend": "sdpa"}
        answer = super().ask(request)
        if self.name and "kernels" in answer:
            answer["kernels"] = [SHOWN[self.name]] if self.name in SHOWN else []
            answer["device_kernels"] = [ON_DEVICE[self.name]] if self.name in ON_DEVICE else []
        return answer


@pytest.mark.slow
def test_every_stage_as_on_an_h200(tmp_path, monkeypatch):
    """Everything but the answers is what an H200 gets."""
    in_process.use(monkeypatch, OnH200)
    test_qualify.shorten(monkeypatch)
    for module in (bench_mfu, config_):
        monkeypatch.setattr(module, "pick_device", lambda wanted: torch.device("cuda"))
    words = [w for w in test_qualify.TINY
             if not w.startswith(("--device", "--peak_tflops", "--bandwidth", "--dtype"))]
    wanted = "manual,tiled,sdpa,sdpa_flash,sdpa_efficient,sdpa_cudnn,sdpa_math,triton"
    words += [f"--backends={wanted}", f"--records_dir={tmp_path}"]  # flex would compile
    code, out = test_bench.run([*words, "--dtype=bfloat16", "--minutes=25"])
    (folder,) = tmp_path.iterdir()
    made = read(folder)
    assert folder.name.endswith("_h200_qualify") and code == 0 and verify(made) == []
    assert {s["name"]: s["why"] for s in made["stages"]} == dict.fromkeys(qualify.STAGES, "")
    ok = {part["mode"]: [r for r in part["rows"] if r["status"] == "ok"]
          for part in record.sections_of(made)}
    trained = {r["backend"] for r in ok["train"]}
    assert len(trained) == 4
    assert not trained & {"manual", "tiled", "sdpa_math"}  # no minutes of compiling for these
    assert {r["backend"] for r in ok["converge"]} == {"plain", "bfloat16"}
    assert {r["point"]["new_tokens"] for r in ok["decode"]} == {4} and "9.15" in out
