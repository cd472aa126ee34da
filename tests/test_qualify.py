"""bench_mfu.py qualify: its stages, its time limit, and a rehearsal for a GPU that is not here.

The rehearsal takes every decision that an H200 would bring about; the workers' answers are computed
on the CPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import in_process
import pytest
import torch
from test_bench import SMALL

import attention
import bench_mfu
from attention.check import matrix
from bench import config as config_
from bench import qualify, record
from bench.rounds import Run
from bench.verify import verify

TINY = [*SMALL, "--seconds=0.02", "--rounds=2", "--new_tokens=4", "--prompts=8", "--timeout=60"]


def run(*argv: str) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = bench_mfu.main(["qualify", *argv])
    return code, out.getvalue(), err.getvalue()


def read(folder: Path) -> dict[str, Any]:
    (made,) = folder.glob("*/record.json")
    return json.loads(made.read_text(encoding="utf-8"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes, a few cases of the matrix, short schedules."""
    in_process.use(monkeypatch)
    few = [c for c in matrix.in_order() if c.name in ("gqa", "64x17")]
    monkeypatch.setattr(matrix, "in_order", lambda: few)
    small = [{**p, "T": p["T"] // 32} for p in qualify.grid(False)[:3]]
    monkeypatch.setattr(qualify, "grid", lambda cuda: small)
    options = {"batch_size": 4, "steps": 10, "rival": ()}
    stage = replace(qualify.STAGES["converge"], options=options)
    monkeypatch.setitem(qualify.STAGES, "converge", stage)


# --- a real run, made small ---


@pytest.mark.slow
def test_all_stages_make_a_record_that_the_board_accepts(tmp_path, quick) -> None:
    code, out, _ = run(*TINY, "--backends=sdpa,manual", f"--records_dir={tmp_path}")
    made = read(tmp_path)
    assert code == 0 and made["complete"], out
    assert [(s["name"], s["status"]) for s in made["stages"]] == [
        (name, "done") for name in qualify.STAGES]
    (folder,) = tmp_path.iterdir()
    assert verify(made) == []
    assert {p["mode"] for p in record.sections_of(made)} == set(record.MODES)
    page = (folder / "README.md").read_text(encoding="utf-8")
    for title in ("## Proof", "## Training steps", "## Generation", "\n| sdpa ", "## Final losses"):
        assert title in page


def test_the_minutes_end_it(tmp_path, quick, monkeypatch) -> None:
    """The clock jumps past the limit while the kernels are timed."""
    real, passed = time.monotonic, [0.0]
    stage = qualify.STAGES["kernels"]

    def late(run: Run) -> Any:
        passed[0] = 600.0
        return stage.measure(run)

    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])
    monkeypatch.setitem(qualify.STAGES, "kernels", replace(stage, measure=late))
    _, out, _ = run(*TINY, "--backends=sdpa", f"--records_dir={tmp_path}", "--minutes=9")
    made = read(tmp_path)
    assert not made["complete"] and out.startswith("INCOMPLETE")
    assert [s["name"] for s in made["stages"]] == list(qualify.STAGES)
    assert [s["status"] for s in made["stages"]] == ["done", "done", "cut", *["skipped"] * 3]


def test_a_signal_ends_it_and_leaves_what_there_is(tmp_path, quick, monkeypatch) -> None:
    stage = qualify.STAGES["proof"]

    def stopped(run: Run) -> Any:
        assert run.stop.signals
        stage.measure(run)
        run.stop.signals.signal = 15
        run.stop.check()

    monkeypatch.setitem(qualify.STAGES, "proof", replace(stage, measure=stopped))
    code, out, _ = run(*TINY, "--backends=sdpa", f"--records_dir={tmp_path}", "--stages=2,4,5")
    assert code == 143 and out.startswith("INCOMPLETE")
    stages = read(tmp_path)["stages"]
    assert [s["status"] for s in stages] == ["skipped"] * 3
    assert all("SIGTERM" in s["why"] for s in stages)


# --- the rehearsal ---

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


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    in_process.use(monkeypatch, OnH200)
    for module in (bench_mfu, config_):
        monkeypatch.setattr(module, "pick_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(qualify, "busy", lambda device: ["GPU 0 was in use before we began"])


@pytest.mark.slow
def test_a_rehearsal_for_cuda(tmp_path, on_h200) -> None:
    """Everything but the answers is what an H200 gets."""
    words = [w for w in TINY if not w.startswith(("--device", "--peak_tflops", "--bandwidth"))]
    words.append("--dtype=bfloat16")
    wanted = "manual,tiled,sdpa,sdpa_flash,sdpa_efficient,sdpa_cudnn,sdpa_math,triton"
    words += [f"--backends={wanted}", f"--records_dir={tmp_path}"]  # flex would compile, on the CPU
    code, out, err = run(*words, "--minutes=25")
    (folder,) = tmp_path.iterdir()
    made = read(tmp_path)
    assert folder.name.endswith("_h200_qualify")
    statuses = {s["name"]: (s["status"], s["why"]) for s in made["stages"]}
    assert statuses == {name: ("done", "") for name in qualify.STAGES}, err
    assert code == 0 and verify(made) == []
    ok = {part["mode"]: [r for r in part["rows"] if r["status"] == "ok"]
          for part in record.sections_of(made)}
    trained = {r["backend"] for r in ok["train"]}
    assert len(trained) == 4
    assert not trained & {"manual", "tiled", "sdpa_math"}  # no minutes of compiling for these
    assert {r["backend"] for r in ok["converge"]} == {"plain", "bfloat16"}
    assert {r["point"]["new_tokens"] for r in ok["decode"]} == {4}
    assert "9.15" in out
    assert "Suspicious: GPU 0 was in use before we began." in out
