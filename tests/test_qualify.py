"""bench_mfu.py qualify: its plan, its stages, its page; and a rehearsal for a GPU that is not here.

The rehearsal takes every decision that an H200 would bring about, from the mode's first line to the
board's check of its record; only the answers of the workers are computed on the CPU.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import in_process
import pytest
import torch
from test_bench import SMALL, NoWorker

import attention
import bench_mfu
import data
from attention import matrix
from attention.gpus import describe
from attention.spec import Backend, Caps
from bench import config as config_
from bench import machine, plan, proof, qualify, records, rows
from bench import process as process_
from bench.bench import Bench
from bench.config import BenchConfig
from bench.process import Failure, Stop
from bench.verify import verify
from core.settings import UserError
from train import TrainConfig

TINY = [*SMALL, "--seconds=0.02", "--rounds=2", "--new_tokens=4", "--prompts=8", "--timeout=60"]


def run(*argv: str) -> tuple[int, str, str]:
    """The exit code, what was printed, what was told meanwhile."""
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        code = bench_mfu.main(["qualify", *argv])
    return code, out.getvalue(), told.getvalue()


def read(folder: Path) -> dict[str, Any]:
    (made,) = folder.glob("*/record.json")
    return json.loads(made.read_text(encoding="utf-8"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes, a few cases of the matrix, short schedules."""
    in_process.use(monkeypatch)
    few = [c for c in matrix.in_order() if c.name in ("gqa", "64x17")]
    monkeypatch.setattr(matrix, "in_order", lambda: few)
    monkeypatch.setattr(plan, "START_S", {"cpu": 0.1, "cuda": 0.1})
    monkeypatch.setattr(plan, "POINT_S", 0.1)
    monkeypatch.setattr(plan, "COMPILE_S", 0.1)
    small = [{**p, "T": p["T"] // 32} for p in qualify.grid(False)[:3]]
    monkeypatch.setattr(qualify, "grid", lambda cuda: small)
    knobs = {"batch_size": 4, "steps": 10}
    stage = qualify.STAGE["converge"]._replace(knobs=knobs)
    monkeypatch.setitem(qualify.STAGE, "converge", stage)


# --- a real run, made small ---


@pytest.mark.slow
def test_all_stages_make_a_record_that_the_board_accepts(tmp_path, quick) -> None:
    code, out, told = run(*TINY, "--backends=sdpa,manual", f"--records_dir={tmp_path}")
    made = read(tmp_path)
    assert code == 0 and made["complete"], out
    assert [(s["name"], s["status"]) for s in made["stages"]] == [
        (name, "done") for name in qualify.STAGES]  # fmt: skip
    (folder,) = tmp_path.iterdir()
    assert verify(made, folder) == []
    assert {p["mode"] for p in records.parts(made)} == {"kernel", "train", "decode", "converge"}
    for word in ("every number right and nothing leaked: sdpa", "Fastest: kernel D=64", "MFU: the",
                 "the largest gap", "Fastest: decode B=1", "Agreement"):  # fmt: skip
        assert word in out, out
    page = (folder / "README.md").read_text(encoding="utf-8")
    for title in ("## Proof", "## Training steps", "## Generation", "\n| sdpa ", "## Final losses"):
        assert title in page
    assert "plan: machine" in told and "stage 6, converge" in told


def test_the_first_look_at_the_machine_counts_for_its_stage(tmp_path, quick, monkeypatch) -> None:
    made = {"name": "machine", "status": "done", "why": "", "record": {}, "seconds": 100.0}
    monkeypatch.setattr(qualify, "attempt", lambda name, *how: {**made, "name": name, "record": {}})
    run(*TINY, f"--records_dir={tmp_path}")
    whole = read(tmp_path)
    stage, *others = whole["stages"]
    assert 100.0 < stage["seconds"] < 400 and isinstance(stage["record"]["busy"], list)
    assert [s["seconds"] for s in others] == [100.0] * 5
    assert whole["complete"] and "incomplete" not in whole  # as it was after each stage but this


def test_a_stage_may_take_what_the_ones_before_it_left(tmp_path, quick, monkeypatch) -> None:
    """Each takes 10 s of nine minutes: the last one has all that is left, and none more."""
    clock, told = [1000.0], {}
    monkeypatch.setattr(
        qualify, "time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: clock[0])
    )

    def attempt(name: str, bench: Any, box: float, probe: Any) -> dict[str, Any]:
        told[name] = box
        clock[0] += 10
        return {"name": name, "status": "done", "why": "", "record": {}, "seconds": 10.0}

    monkeypatch.setattr(qualify, "attempt", attempt)
    run(*TINY, f"--records_dir={tmp_path}", "--minutes=9")
    assert list(told) == list(qualify.STAGES)
    assert told["converge"] == pytest.approx(540 - 50) and told["machine"] < 270


class Planned:
    """qualify with stages that do nothing: what each was given, and what was written after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **status: str) -> None:
        self.given: dict[str, Any] = {}
        self.boxes: dict[str, float] = {}
        self.written: list[Any] = []
        self.folder, self.status, self.closed = folder, status, 0
        self.signal = ""  # the stage during which it comes

        class Looks(NoWorker):
            def close(looks) -> None:
                self.closed += 1

        in_process.use(monkeypatch, Looks)
        monkeypatch.setattr(qualify, "attempt", self.attempt)
        monkeypatch.setattr(qualify, "busy", lambda device: [f"{device} is busy"])
        write = records.write

        def noted(folder: Path, content: Any, whole: bool = True) -> None:
            self.written.append((folder, json.loads(json.dumps(content)), whole))
            write(folder, content, whole)

        monkeypatch.setattr(records, "write", noted)

    def attempt(self, name: str, bench: Bench, box: float, probe: Any) -> dict[str, Any]:
        self.given[name], self.boxes[name] = bench, box
        assert self.closed == 0  # who may run is asked before each stage
        if name == self.signal:
            bench.stop.signals.signal = 15  # type: ignore[union-attr]
            bench.stop.why = "it was stopped by SIGTERM"
        row = {"backend": "manual", "status": "ok", "ms": 1.0, "point": {"T": 1024, "D": 64}}
        record: Any = {"rows": [row]} if name == "kernels" else {"answers": [f"{name} says."]}
        if name == "proof":
            record["rows"] = []
        return {"name": name, "status": self.status.get(name, "done"), "why": "so", "seconds": 1.0,
                "record": record}  # fmt: skip

    def run(self, *words: str) -> tuple[int, str, str]:
        self.given.clear()
        self.written.clear()
        self.closed = 0
        asked = (*SMALL, "--backends=sdpa,manual", f"--records_dir={self.folder}", *words)
        found = run(*asked)
        assert self.closed == 1
        return found


def test_what_each_stage_is_given(tmp_path, monkeypatch) -> None:
    planned = Planned(monkeypatch, tmp_path)
    words = [w for w in SMALL if not w.startswith("--rounds")]
    monkeypatch.setitem(globals(), "SMALL", words)
    _, _, told = planned.run("--minutes=10", "--rival=hf", "--steps=70")
    of = {name: bench.config for name, bench in planned.given.items()}
    assert {name: bench.mode for name, bench in planned.given.items()} == {
        "machine": "kernel", "proof": "kernel", "kernels": "kernel", "training": "train",
        "decode": "decode", "converge": "converge"}  # fmt: skip
    plain = of["machine"]
    assert (plain.rounds, plain.seconds, plain.batch_size) == (3, 0.01, 4)
    assert plain.baseline == ("hf",) and plain.sweep and not plain.profile
    knobs: dict[str, Any] = {
        "machine": {}, "proof": {}, "kernels": {"seconds": 0.5, "baseline": ()},
        "training": {"sweep": False, "profile": True, "seconds": 0.5},
        "decode": {"kv_caches": ("dynamic", "static", "paged")},
        "converge": {"batch_size": 32, "steps": 100, "baseline": ()},
    }  # fmt: skip
    assert of == {name: replace(plain, **more) for name, more in knobs.items()}
    # manual was the quickest in the kernels' stage, so it is the first of those after it
    assert [bench.backends for bench in planned.given.values()] == [["sdpa", "manual"]] * 3 + [
        ["manual", "sdpa"]
    ] * 3
    stops = [bench.stop for bench in planned.given.values()]
    assert len({id(stop) for stop in stops}) == 6 and len({id(s.signals) for s in stops}) == 1
    now = time.monotonic()
    for i, (name, box) in enumerate(planned.boxes.items(), 1):
        assert 0 < stops[i - 1].deadline - box - now + 60 < 120  # type: ignore[operator]
        assert f"stage {i}, {name}: {box:.0f} s at most\n" in told
    # of ten minutes: what is left by the share of all that is left
    assert planned.boxes["machine"] == pytest.approx(36, abs=3)
    assert planned.boxes["kernels"] == pytest.approx(600 * 22 / 77, abs=4)
    assert planned.boxes["decode"] == pytest.approx(600 * 13 / 23, abs=7)
    assert "plan: machine 36 s, proof 102 s, kernels 132 s, training 192 s, decode 78 s" in told
    assert "Training: 2 layers, 32 wide, batch 4, 32 tokens\n" in told
    planned.run("--rounds=7", "--stages=4,1")
    assert list(planned.given) == ["machine", "training"]
    assert planned.given["training"].config.rounds == 7
    assert planned.boxes["machine"] == pytest.approx(540 * 6 / 38, abs=6)  # nine minutes


def test_on_a_gpu_the_fast_path_is_trained_beside_the_plain_one(tmp_path, monkeypatch) -> None:
    planned = Planned(monkeypatch, tmp_path)
    monkeypatch.setattr(bench_mfu, "pick_device", lambda wanted: torch.device("cuda", 1))
    planned.run("--stages=3,6")
    assert planned.given["converge"].config.paths == ("bfloat16",)
    assert planned.given["converge"].config.backends == ("all",)
    assert planned.given["kernels"].config.paths == ()
    assert planned.given["kernels"].config.backends == ("sdpa", "manual")


@pytest.mark.parametrize("free, sizes", [
    (2 * 10**9, "4 layers, 256 wide, batch 4, 512 tokens"),
    (39 * 10**9, "12 layers, 768 wide, batch 32, 1024 tokens")])  # fmt: skip
def test_the_model_that_fits_is_what_the_record_is_of(free, sizes, tmp_path, monkeypatch) -> None:
    planned = Planned(monkeypatch, tmp_path)
    monkeypatch.setitem(NoWorker.about, "free_memory", free)
    for module in (bench_mfu, config_):
        monkeypatch.setattr(module, "pick_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setitem(globals(), "SMALL", [f"--data_dir={tmp_path}"])
    _, out, told = planned.run("--stages=1")
    small = free < 10**10
    made = planned.written[-1][1]
    assert f"Training: {sizes}\n" in told and f"record: {planned.written[0][0]}\n" in out
    assert made["vocab_size"] == (1024 if small else 50304)
    assert made["settings"]["n_layer"] == (4 if small else 12)
    assert planned.given["machine"].vocab_size == made["vocab_size"]


def test_the_record_is_written_after_every_stage(tmp_path, monkeypatch) -> None:
    planned = Planned(monkeypatch, tmp_path, proof="cut", decode="failed")
    code, out, _ = planned.run("--stages=1,2,5", "--record=x")
    assert code == 0 and len(planned.written) == 4  # and the page, at the end
    for i, (folder, made, whole) in enumerate(planned.written[:3]):
        assert folder.name.endswith("_cpu_x") and not whole and not made["complete"]
        assert made["incomplete"] == "not done: proof, kernels, training, decode, converge"
        assert [s["name"] for s in made["stages"]] == ["machine", "proof", "decode"][: i + 1]
        assert made["mode"] == "qualify" and made["vocab_size"] == 64
        assert made["settings"]["rounds"] == 2 and made["machine"]["kind"] == "cpu"
    assert planned.written[0][1]["answers"] == ["machine says.", "Suspicious: cpu is busy."]
    assert planned.written[2][1]["answers"] == [
        "machine says.", "proof says.", "decode says.", "Suspicious: cpu is busy.",
        "Missing: proof: cut: so.", "Missing: decode: failed: so."]  # fmt: skip
    assert planned.written[0][1]["stages"][0]["record"]["busy"] == ["cpu is busy"]
    assert out.startswith("INCOMPLETE: What this machine can do")

    # what is missing is done, nothing else, and it stands in the order of the stages
    planned.status.clear()
    planned.run("--stages=1,2,3,4", "--record=x", "--resume")
    assert list(planned.given) == ["proof", "kernels", "training"]
    final = planned.written[-1][1]
    names = [s["name"] for s in final["stages"]]
    assert names == ["machine", "proof", "kernels", "training", "decode"]
    assert final["incomplete"] == "not done: decode, converge"
    assert {folder for folder, *_ in planned.written} == {*tmp_path.glob("*_cpu_x")}
    planned.run("--record=x", "--resume")
    final = planned.written[-1][1]
    assert list(planned.given) == ["decode", "converge"] and final["complete"]
    assert "incomplete" not in final and not any("Missing" in a for a in final["answers"])


def test_a_signal_ends_the_run_and_a_stages_own_end_does_not(tmp_path, monkeypatch) -> None:
    planned = Planned(monkeypatch, tmp_path)
    own = planned.attempt

    def over(name: str, bench: Bench, *how: Any) -> Any:
        bench.stop.why = "its time was over"
        return own(name, bench, *how)

    monkeypatch.setattr(qualify, "attempt", over)
    assert planned.run("--stages=3,4")[0] == 0
    planned.signal = "training"
    assert planned.run("--stages=3,4")[0] == 143


@pytest.mark.parametrize("found, status, why", [
    ({"rows": []}, "done", ""),
    ({"incomplete": "1 of 2 rows"}, "cut", "1 of 2 rows"),
    (Stop(why="its time was over"), "cut", "its time was over"),
    (Failure("skipped", ["too", "short"]), "skipped", "too; short"),
    (Failure("stopped", ["by Ctrl-C"]), "skipped", "by Ctrl-C"),
    (Failure("died", ["gone"]), "failed", "gone"),
    (Failure("unavailable", ["no"]), "failed", "no"),
    (UserError("what?"), "failed", "what?"),
])  # fmt: skip
def test_what_becomes_of_a_stage(found, status, why, monkeypatch) -> None:
    clock = iter((100.0, 107.5))
    monkeypatch.setattr(qualify, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    bench = replace(bench_of(device="cpu"), mode="decode")
    bench.config = BenchConfig(kv_caches=("none", "static"))
    asked: list[Any] = []
    inside: list[Any] = []

    @contextlib.contextmanager
    def watching() -> Any:
        inside.append("begun")
        yield {"celsius": 5}
        inside.append("ended")

    monkeypatch.setattr(qualify, "watched", watching)

    def stage(bench: Bench, box: float) -> Any:
        inside.append((bench.refused, box))
        if isinstance(found, Exception):
            raise found
        if isinstance(found, Stop):
            bench.stop.why = found.why
            return {"rows": []}
        return found

    monkeypatch.setitem(qualify.STAGE, "decode", qualify.STAGE["decode"]._replace(run=stage))
    refuses = {"refused": {"triton": ["no"]}}
    probe: Any = SimpleNamespace(ask=lambda told: asked.append(told) or refuses)
    entry = qualify.attempt("decode", bench, 5.5, probe)
    raised = isinstance(found, Exception)
    assert entry == {
        "name": "decode", "box_s": 5.5, "status": status, "why": why, "seconds": 7.5,
        "watched": {"celsius": 5},
        "record": {} if raised else {"rows": []} if isinstance(found, Stop) else found,
    }  # fmt: skip
    spec = {"n_head": 12, "n_kv_head": 12, "head_dim": 64, "window": None, "grad": False}
    specs = [{**spec, "cache": "none"}, {**spec, "cache": "static"}]
    assert asked == [{"names": ["sdpa", "triton"], "specs": specs}]
    assert inside == ["begun", ({"triton": ["no"]}, 5.5)] + ["ended"] * (not raised)


def test_a_stage_does_not_begin_after_the_end() -> None:
    bench = replace(bench_of(), stop=Stop(deadline=time.monotonic() - 1))
    probe: Any = SimpleNamespace(ask=lambda told: pytest.fail("it began"))
    entry = qualify.attempt("decode", bench, 1.0, probe)
    assert (entry["status"], entry["why"], entry["record"]) == ("skipped", "its time was over", {})


@pytest.mark.parametrize("device, box, backends, ran, compiles", [
    ("cpu", 500, "manual sdpa flex", ["sdpa"], None),
    ("cuda", 119, "flash_attn_2 sdpa triton", ["flash_attn_2", "sdpa"], None),
    ("cuda:0", 120, "triton sdpa_flash flash_attn_3", ["flash_attn_3"], True),
    ("cuda", 121, "manual tiled sdpa_flash triton", ["sdpa_flash"], True),
])  # fmt: skip
def test_who_generates(device, box, backends, ran, compiles, monkeypatch) -> None:
    """Who is made for it, else the quickest; pages for all; graphs where there is time for them."""
    asked: list[Bench] = []
    monkeypatch.setattr(qualify.modes, "decode", lambda bench: asked.append(bench) or [])
    bench = replace(bench_of(device=device, backends=backends), mode="decode")
    made = qualify.decoding(bench, box)
    assert asked == [bench] and bench.backends == [*ran, "paged"]
    assert bench.config.train.compile is compiles and made["rows"] == []


def test_who_is_trained_and_which_kernels_are_timed(monkeypatch) -> None:
    asked: list[list[str]] = []
    said: list[str] = []
    for mode in ("train", "kernel"):
        monkeypatch.setattr(qualify.modes, mode, lambda bench: asked.append(bench.backends) or [])
    few = replace(bench_of(backends="manual tiled sdpa triton"), mode="train", tell=said.append)
    assert qualify.training(few, 0)["rows"] == [] and said == ["training: sdpa"]
    qualify.training(replace(few, backends=few.backends), 0)
    every = replace(bench_of(backends="tiled triton sdpa_math manual sdpa"), tell=said.append)
    made = qualify.kernels(every, 60)
    assert asked == [["sdpa"], ["sdpa"], ["triton", "manual", "sdpa"]]
    taken, dropped = qualify.that_fit(every, 60)
    assert every.points == taken and made["left_out"] == dropped != []
    assert said[-1] == f"kernels: {len(taken)} of {len(taken) + len(dropped)} points"


def test_the_text_that_converge_learns_is_our_own(monkeypatch) -> None:
    def read(bench: Bench) -> Any:
        train = bench.config.train
        folder = Path(train.data_dir) / train.dataset
        tokens = data.load(folder, "train", train.block_size, bench.vocab_size)
        assert len(tokens) > 50_000 and bench.vocab_size == train.vocab_size < 400
        text = data.from_meta(data.read_meta(folder)["tokenizer"]).decode(tokens[:400_000].tolist())
        assert "nothing is ever silently something else" in text
        seen.append(train)
        return []

    seen: list[Any] = []
    monkeypatch.setattr(qualify.modes, "converge", read)
    bench = bench_of(device="cpu", backends="manual flex sdpa")
    large = replace(bench.config.train, n_kv_head=4, gradient_accumulation_steps=5, dropout=0.1,
                    compile=True, learning_rate=0.125, batch_size=7)  # fmt: skip
    bench.config = replace(bench.config, train=large)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        made = qualify.convergence(bench, 5.0)
    assert bench.backends == ["flex"] and made["rows"] == [] and printed.getvalue() == ""
    (train,) = seen
    assert train == replace(
        large, n_layer=4, n_head=4, n_embd=128, block_size=64, n_kv_head=None, dropout=0.0,
        gradient_accumulation_steps=1, compile=False, dataset="text", data_dir=train.data_dir,
        vocab_size=bench.vocab_size)  # fmt: skip
    assert not Path(train.data_dir).exists()


def test_a_canary_that_was_refused_everywhere_is_not_known() -> None:
    asked = {"what": "canary, training", "feature": "canary", "dtype": "float32", "why": ""}
    refused, right = ({**asked, "verdict": verdict} for verdict in ("refused", "right"))
    assert proof.row("x", [refused], 3, 1.0)["canary"] is None
    found = proof.row("x", [refused, right], 3, 1.0)
    assert found["canary"] is True and found["not_reached"] == 1
    assert (found["right"], found["refused"], found["wrong"]) == (1, 1, 0)


def test_what_cannot_be_resumed(tmp_path) -> None:
    folder = tmp_path / "2026-01-02_cpu_qualify"
    with pytest.raises(UserError, match=r"--resume: there is no record \*_cpu_qualify in"):
        qualify.earlier(folder, {})
    (tmp_path / "2026-01-01_cpu_qualify").mkdir()
    old = tmp_path / "2026-01-01_cpu_qualify" / "record.json"
    said = {"mode": "is no record of qualify", "source_sha256": "measured with another source",
            "vocab_size": "measured with another vocabulary"}  # fmt: skip
    for name, why in said.items():
        made = {"format": records.FORMAT, "mode": "qualify", "stages": [], name: "another"}
        old.write_text(json.dumps(made))
        with pytest.raises(UserError, match=f"--resume: .*{why}"):
            qualify.earlier(folder, {})


@pytest.mark.slow
def test_resume_does_what_is_missing_and_nothing_twice(tmp_path, quick) -> None:
    words = (*TINY, "--backends=sdpa", f"--records_dir={tmp_path}")
    with pytest.raises(UserError, match=r"--resume: there is no record \*_cpu_qualify in"):
        run(*words, "--resume")
    code, out, _ = run(*words, "--stages=1,2")
    first = read(tmp_path)
    assert code == 0 and not first["complete"] and out.startswith("INCOMPLETE")
    assert first["incomplete"] == "not done: kernels, training, decode, converge"
    run(*words, "--stages=2,5", "--resume")
    second = read(tmp_path)
    assert [s["name"] for s in second["stages"]] == ["machine", "proof", "decode"]
    assert second["stages"][:2] == first["stages"]
    first["source_sha256"] = "another"
    (folder,) = tmp_path.iterdir()
    records.write(folder, first, whole=False)
    with pytest.raises(UserError, match="measured with another source"):
        run(*words, "--resume")


@pytest.mark.slow
def test_a_stage_that_fails_is_told_and_the_others_go_on(tmp_path, quick, monkeypatch) -> None:
    def fails(bench: Bench, box: float) -> Any:
        raise Failure("died", ["the GPU fell off the bus"])

    monkeypatch.setitem(qualify.STAGE, "training", qualify.STAGE["training"]._replace(run=fails))
    words = (*TINY, "--backends=sdpa", f"--records_dir={tmp_path}", "--stages=4,5")
    code, out, _ = run(*words)
    assert code == 0 and "Missing: training: failed: the GPU fell off the bus." in out
    assert [s["status"] for s in read(tmp_path)["stages"]] == ["failed", "done"]


def test_a_signal_ends_it_and_leaves_what_there_is(tmp_path, quick, monkeypatch) -> None:
    inside = qualify.STAGE["proof"].run

    def stopped(bench: Bench, box: float) -> Any:
        assert bench.stop.signals
        found = inside(bench, box)
        bench.stop.signals.signal = 15
        bench.stop.check()
        return found

    monkeypatch.setitem(qualify.STAGE, "proof", qualify.STAGE["proof"]._replace(run=stopped))
    code, out, _ = run(*TINY, "--backends=sdpa", f"--records_dir={tmp_path}", "--stages=2,4,5")
    assert code == 143 and out.startswith("INCOMPLETE")
    stages = read(tmp_path)["stages"]
    assert [s["status"] for s in stages] == ["skipped"] * 3
    assert all("SIGTERM" in s["why"] for s in stages)


def test_knobs_of_qualify_are_no_other_modes() -> None:
    for word in ("--stages=1", "--resume"):
        with pytest.raises(UserError, match="are for the mode qualify, not for train"):
            bench_mfu.main(["train", word])
    with pytest.raises(UserError, match="stages"):
        bench_mfu.main(["qualify", "--stages=7"])


# --- the rehearsal ---

H200 = describe("NVIDIA H200", torch=torch.__version__, packages=["triton"])
SHOWN = {"triton": "flash (our Triton)", "sdpa_cudnn": "cudnn", "sdpa_flash": "flash",
         "sdpa_efficient": "efficient", "sdpa_math": "math", "sdpa": "cudnn"}  # fmt: skip
ON_DEVICE = {"triton": "forward_kernel", "sdpa_cudnn": "cudnn_generated_sdpa", "flex": "flex_attn",
             "sdpa_flash": "flash_fwd_kernel", "sdpa": "cudnn_generated_sdpa",
             "sdpa_efficient": "fmha_cutlassF"}  # fmt: skip


class OnH200(in_process.InProcess):
    """Answers as a worker on an H200: computed on the CPU, by sdpa where only CUDA has a kernel."""

    def begin(self, job: Any) -> in_process.InProcess:
        self.job = job
        here = attention.Machine.here("cpu", attention.packages())
        name = job["name"]
        spec = attention.Spec(2, 2, 16, "bfloat16")
        known = name in attention.BACKENDS and not attention.BACKENDS[name].why_not(spec, here)
        mine = name if known else "sdpa"
        train = {**job["train"], "attention_backend": mine, "compile": False, "peak_tflops": 1.0}
        told = {**job, "device": "cpu", "train": train, "bandwidth_gbs": 8.0}
        super().begin(told if job["baseline"] or not name else {**told, "name": mine})
        if job["job"] == "machine":
            tflops, source = attention.gpus.datasheet_tflops("NVIDIA H200", "bfloat16")
            self.about |= {"kind": "cuda", "name": "NVIDIA H200", "about": "NVIDIA H200",
                           "capability": [9, 0], "driver": "580.1", "free_memory": 140e9,
                           "peak_tflops": tflops, "peak_source": source,
                           "products_tflops": 0.7 * tflops}  # fmt: skip
        return self

    def ask(self, request: Any) -> dict[str, Any]:
        if "specs" in request:
            specs = [attention.Spec(**{"dtype": "bfloat16", **s}) for s in request["specs"]]
            told = {n: [attention.BACKENDS[n].why_not(s, H200) for s in specs]
                    for n in request["names"]}  # fmt: skip
            return {"refused": {n: why[0] for n, why in told.items() if all(why)}}
        if "backend" in request:
            request = {**request, "backend": "sdpa"}
        answer = super().ask(request)
        name = self.job["name"]
        if name and "kernels" in answer:
            answer["kernels"] = [SHOWN[name]] if name in SHOWN else []
            answer["device_kernels"] = [ON_DEVICE[name]] if name in ON_DEVICE else []
            answer["events"] = []
        if "machine" in answer:
            answer["machine"] = f"NVIDIA H200, run {self.job['run']}"
        return answer


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    in_process.use(monkeypatch, OnH200)
    for module in (bench_mfu, config_):
        monkeypatch.setattr(module, "pick_device", lambda wanted: torch.device("cuda"))
    looks = itertools.repeat([["0x0000000000000004", "71", "690.5"]])
    monkeypatch.setattr(qualify, "watched", lambda: machine.watched(lambda query: next(looks)))
    monkeypatch.setattr(qualify, "busy", lambda device: ["GPU 0 was in use before we began"])


@pytest.mark.slow
def test_a_rehearsal_for_cuda(tmp_path, on_h200) -> None:
    """Everything but the answers is what an H200 gets."""
    words = [w for w in TINY if not w.startswith(("--device", "--peak_tflops", "--bandwidth"))]
    words.append("--dtype=bfloat16")
    asked = "manual,tiled,sdpa,sdpa_flash,sdpa_efficient,sdpa_cudnn,sdpa_math,triton"
    words += [f"--backends={asked}", f"--records_dir={tmp_path}"]  # flex would compile, on the CPU
    code, out, told = run(*words, "--minutes=25")
    (folder,) = tmp_path.iterdir()
    made = read(tmp_path)
    assert folder.name.endswith("_h200_qualify")
    statuses = {s["name"]: (s["status"], s["why"]) for s in made["stages"]}
    assert statuses == {name: ("done", "") for name in qualify.STAGES}, told
    assert code == 0 and verify(made, folder) == []
    trained = {r["backend"] for r in qualify.ok_rows(made, "training")}
    assert {"sdpa", "sdpa_flash", "sdpa_cudnn", "triton"} <= trained
    assert not trained & {"manual", "tiled", "sdpa_math"}  # no minutes of compiling for these
    paths = {r["backend"] for r in qualify.ok_rows(made, "converge")}
    assert paths == {"plain", "bfloat16"}
    assert {r["point"]["new_tokens"] for r in qualify.ok_rows(made, "decode")} == {4}
    assert "Suspicious: GPU 0 was in use before we began." in out
    assert "Suspicious: in the stage training the GPU's clock was held down by its power cap" in out


# --- what fits ---


def bench_of(minutes: float = 9, device: str = "cuda", backends: str = "sdpa triton") -> Bench:
    here = {"peak_tflops": 989.4, "peak_source": "datasheet: x", "memory_limit": 10**11,
            "peak_measured": False, "bandwidth": 4e12}  # fmt: skip
    return Bench("kernel", BenchConfig(minutes=minutes), device, 50304, backends.split(), None,
                 print, here)  # fmt: skip


def test_the_boxes_are_the_whole_time_and_what_is_left_over_is_shared() -> None:
    assert sum(qualify.boxes(540, qualify.STAGES).values()) == pytest.approx(540)
    assert qualify.boxes(100, ("decode",)) == {"decode": 100}
    assert qualify.boxes(100, ("training", "decode"))["training"] == pytest.approx(100 * 32 / 45)


def test_the_grid_is_the_papers_and_its_best_comes_first() -> None:
    points = qualify.grid(cuda=True)
    assert {p["T"] for p in points} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {p["D"] for p in points} == {64, 128}
    assert all(p["B"] * p["T"] == 16384 and p["H"] * p["D"] == 2048 for p in points)
    assert any(p["window"] for p in points) and any(p["Hkv"] < p["H"] for p in points)
    names = [rows.where(p) for p in points]
    assert [(p["T"], p["D"]) for p in points[:2]] == [(1024, 64), (1024, 128)]
    assert len(set(names)) == len(names) == 15
    plain = {(p["T"], p["D"]) for p in points if p["window"] is None and p["Hkv"] == p["H"]}
    assert plain == {(2**n, D) for n in range(9, 15) for D in (64, 128)}
    assert {"B=4 T=4096 H=16 Hkv=4 D=128", "B=4 T=4096 H=32 Hkv=32 D=64 window=1024"} < set(names)
    small = qualify.grid(cuda=False)
    assert [(p["T"], p["D"], p["window"]) for p in small] == [
        (p["T"], p["D"], p["window"]) for p in points
    ]
    assert all(p["B"] == 1 and p["H"] * p["D"] == 256 for p in small)
    assert {(p["H"], p["Hkv"]) for p in small} == {(4, 4), (2, 2), (2, 1)}


def test_more_time_takes_more_points_and_none_is_said_so() -> None:
    counts = [len(qualify.that_fit(bench_of(), box)[0]) for box in (60, 80, 400)]
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1] == len(qualify.grid(True))
    taken, dropped = qualify.that_fit(bench_of(), 60)
    assert len(taken) + len(dropped) == len(qualify.grid(True))
    with pytest.raises(Failure, match="5 s are too short for one point"):
        qualify.that_fit(bench_of(), 5)


@pytest.mark.parametrize("device, first, dtypes", [
    ("cpu", "float32", ["float32"]), ("cpu", "bfloat16", ["bfloat16", "float32"]),
    ("cuda:0", "float32", ["float32", "bfloat16", "float16"]),
    ("cuda", "float16", ["float16", "bfloat16", "float32"])])  # fmt: skip
def test_the_dtypes_of_the_proof(device, first, dtypes, monkeypatch) -> None:
    """The run's own before the others."""
    counts = {"right": 1, "wrong": 0, "refused": 2, "not_reached": 3}
    found = [{"backend": "sdpa", **counts}]
    monkeypatch.setattr(proof, "prove", lambda bench, asked: asked == dtypes and found)
    bench, said = bench_of(device=device), list[str]()
    bench.machine["dtype"], bench.tell = first, said.append
    assert qualify.numbers(bench, 1.0) == {"dtypes": dtypes, "rows": found}
    assert said == ["sdpa: 1 right, 0 wrong, 2 refused, 3 not reached"]


def test_the_newest_record_is_gone_on_with(tmp_path) -> None:
    shared = {"source_sha256": "a", "vocab_size": 64, "machine": {"kind": "cpu", "about": "x"}}
    for day in ("2026-01-01", "2026-03-01", "2026-02-01"):
        stages = [{"name": day, "status": "done", "record": {}}]
        made = {**shared, "format": records.FORMAT, "mode": "qualify", "stages": stages}
        records.write(tmp_path / f"{day}_cpu_x", made, whole=False)
    folder, stages = qualify.earlier(tmp_path / "2026-04-01_cpu_x", shared)
    assert folder.name == "2026-03-01_cpu_x" and stages[0]["name"] == "2026-03-01"
    for edit, says in (({"vocab_size": 65}, "with another vocabulary"),
                       ({"machine": {"kind": "cuda"}}, "is of x")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            qualify.earlier(tmp_path / "2026-04-01_cpu_x", shared | edit)


def test_a_run_fails_where_a_kernel_is_wrong_or_nothing_was_done() -> None:
    def failed(wrong: int, *statuses: str) -> bool:
        stages = [{"name": str(i), "status": s, "record": {}} for i, s in enumerate(statuses)]
        proof = {"name": "proof", "status": "cut", "record": {"rows": [{"wrong": wrong}]}}
        return qualify.failed({"stages": [*stages, proof]})

    assert not failed(0, "done", "failed", "skipped") and not failed(0, "done")
    assert failed(1, "done") and failed(0, "cut", "skipped")


def test_the_quickest_backends_come_first() -> None:
    def row(name: str, ms: float, T: int = 1024, D: int = 64, status: str = "ok") -> Any:
        return {"backend": name, "ms": ms, "point": {"T": T, "D": D}, "status": status}

    rows = [row("a", 3.0), row("b", 2.0), row("c", 1.0, T=4096), row("d", 1.0, D=128),
            row("e", 0.1, status="failed")]  # fmt: skip
    record = {"stages": [{"name": "kernels", "record": {"rows": rows}}]}
    assert qualify.ranked(record, [*"edcba"]) == [*"baedc"]
    assert qualify.ranked({"stages": []}, [*"edcba"]) == [*"edcba"]


def test_the_time_says_how_many_are_compiled() -> None:
    bench = replace(bench_of(backends="manual tiled sdpa sdpa_flash triton"), mode="train")
    assert qualify.contenders(bench, 0) == ["sdpa"]
    assert qualify.contenders(bench, math.inf) == ["sdpa", "sdpa_flash", "triton"]
    each = plan.seconds(replace(bench, backends=["sdpa", "sdpa_flash", "triton"]), [])
    two = each["sdpa"] + each["sdpa_flash"]
    assert max(each.values()) < 0.9 * two  # each alone would fit
    assert qualify.contenders(bench, 1.001 * two) == ["sdpa", "sdpa_flash"]
    assert qualify.contenders(bench, 0.999 * two) == ["sdpa"]
    assert qualify.contenders(replace(bench, backends=["manual"]), 0) == ["manual"]
    assert qualify.contenders(replace(bench, refused={"sdpa": ["no"]}), 0) == ["sdpa_flash"]


def test_the_model_is_one_that_fits() -> None:
    config = BenchConfig(train=TrainConfig(gradient_accumulation_steps=40))
    large = qualify.settled(config, (), True, 140e9)
    assert (large.batch_size, large.train.n_embd, large.train.block_size) == (64, 768, 1024)
    assert large.train.gradient_accumulation_steps == 1
    half = {80e9: 64, 70e9: 64, 69e9: 32, 38e9: 32, 37e9: 16, 22e9: 16, 21e9: 8, 14e9: 8, 13e9: 4,
            7e9: 4}  # fmt: skip
    assert {free: qualify.settled(config, (), True, free).batch_size for free in half} == half
    tiny = qualify.settled(config, (), True, 2e9)
    assert tiny.train.n_embd == 256 and tiny.train.vocab_size == 1024
    assert qualify.settled(config, ("batch_size",), True, 140e9) is config
    assert qualify.settled(config, (), False, 140e9) is config


# --- the proof ---


class Judge:
    """A worker that says of each backend what is planned, in so many seconds."""

    made: ClassVar[list[Any]] = []
    clock = 0.0

    def __init__(self, timeout: float, stop: Stop) -> None:
        self.closed = False
        Judge.made.append(self)

    def begin(self, job: Any) -> Judge:
        return self

    def ask(self, request: dict[str, str]) -> dict[str, Any]:
        name = request["backend"]
        Judge.clock += 100 if name == "slow" else 1
        if name == "breaks" and request["feature"] != "canary":
            raise Failure("died", ["an illegal memory access"])
        wrong = name == "leaks" and request["feature"] == "canary"
        return {"verdict": "wrong" if wrong else "right", "why": "it leaks" if wrong else ""}

    def close(self) -> None:
        self.closed = True


def test_a_slow_backend_takes_no_time_from_the_others(monkeypatch) -> None:
    monkeypatch.setattr(proof, "time", SimpleNamespace(monotonic=lambda: Judge.clock))
    monkeypatch.setattr(process_, "time", SimpleNamespace(monotonic=lambda: Judge.clock))
    monkeypatch.setattr(Judge, "clock", 0.0)
    monkeypatch.setattr(Judge, "made", [])
    monkeypatch.setattr(proof, "Worker", Judge)
    asked = len(proof.items(["float32"]))
    stop = Stop(deadline=5 * asked)
    names = ["slow", "good", "leaks", "breaks"]
    bench = Bench("kernel", BenchConfig(), "cpu", 64, names, None, print, stop=stop)
    rows = {r["backend"]: r for r in proof.prove(bench, ["float32"])}
    assert rows["good"]["right"] == asked and rows["good"]["canary"] is True
    assert 0 < rows["slow"]["right"] < 4 and rows["slow"]["not_reached"] > asked - 4
    canaries = sum(item["feature"] == "canary" for item in proof.items(["float32"]))
    assert rows["leaks"]["wrong"] == canaries and rows["leaks"]["canary"] is False
    broken = rows["breaks"]
    assert broken["wrong"] and "illegal memory access" in broken["failures"][0]["why"]
    assert len(Judge.made) == broken["wrong"] + 1 and all(w.closed for w in Judge.made)


def test_equally_slow_backends_take_turns(monkeypatch) -> None:
    monkeypatch.setattr(proof, "time", SimpleNamespace(monotonic=lambda: Judge.clock))
    monkeypatch.setattr(proof, "Worker", Judge)
    items = [{"what": str(i), "feature": "x", "dtype": "float32"} for i in range(3)]
    monkeypatch.setattr(proof, "items", lambda dtypes: items)
    asked: list[str] = []
    bench = replace(bench_of(backends="a b"), watch=lambda what: asked.append(what.split()[1]))
    made = proof.prove(bench, ["float32"])
    assert asked == ["a,", "b,"] * 3
    assert [(row["right"], row["seconds"]) for row in made] == [(3, 3.0)] * 2


def test_a_backend_whose_test_is_stopped_is_not_wrong(monkeypatch) -> None:
    class Stopped(Judge):
        def ask(self, request: dict[str, str]) -> dict[str, Any]:
            if request["what"] == "1":
                raise Failure("stopped", ["its time was over"])
            return super().ask(request)

    monkeypatch.setattr(proof, "Worker", Stopped)
    items = [{"what": str(i), "feature": "x", "dtype": "float32"} for i in range(3)]
    monkeypatch.setattr(proof, "items", lambda dtypes: items)
    (row,) = proof.prove(bench_of(backends="a"), ["float32"])
    assert (row["right"], row["wrong"], row["not_reached"]) == (1, 0, 2)
    assert Judge.made[-1].closed


def test_a_worker_that_does_not_begin_is_no_proof_of_anything(monkeypatch) -> None:
    class Broken(Judge):
        def begin(self, job: Any) -> Judge:
            raise Failure("died", ["it has no torch"])

    monkeypatch.setattr(proof, "Worker", Broken)
    with pytest.raises(Failure, match="it has no torch"):
        proof.prove(bench_of(backends="a b"), ["float32"])


def test_the_answers_of_the_grid_are_of_all_lengths_together(monkeypatch) -> None:
    """Though a call has fewer sequences where they are longer."""

    def row(name: str, B: int, T: int, ms: float) -> dict[str, Any]:
        point = {"B": B, "T": T, "H": 32, "Hkv": 32, "D": 64, "window": None}
        return {"mode": "kernel", "backend": name, "point": point, "status": "ok", "ms": ms,
                "rounds": [{"ms": ms}, {"ms": ms}]}  # fmt: skip

    table = [row("sdpa", 16, 1024, 1.0), row("triton", 16, 1024, 2.0), row("sdpa", 4, 4096, 9.0),
             row("triton", 4, 4096, 5.0)]  # fmt: skip
    monkeypatch.setattr(qualify.modes, "kernel", lambda bench: table)
    made = qualify.kernels(bench_of(), 1e6)
    assert made["answers"] == [
        "Fastest: kernel D=64: sdpa from 1,024 tokens on, then triton from 4,096 tokens on"
    ]
    assert made["rows"] == table and made["left_out"] == []


def test_the_job_judges_by_the_matrix(monkeypatch) -> None:
    def leaks(q, k, v, spec, *, segments=None, cache=None):
        out = attention.BACKENDS["manual"].attend(q, k, v, spec, segments=segments)
        return out + 1e-3 * v.mean(dim=1, keepdim=True).repeat_interleave(
            spec.n_head // spec.n_kv_head, dim=2)  # fmt: skip

    bad = Backend(name="bad", title="it leaks", attend=leaks, fallback="manual",
                  caps=(Caps(segments=False),))  # fmt: skip
    monkeypatch.setattr(attention, "get", {**attention.BACKENDS, "bad": bad}.__getitem__)
    job = replace(bench_of(device="cpu")).job("proof", "")
    judge = proof.Proof(job)

    def ask(name: str, what: str) -> str:
        return judge.round({"backend": name, "dtype": "float32", "what": what})["verdict"]

    assert ask("manual", "gqa") == ask("manual", "canary, decode") == "right"
    assert ask("bad", "gqa") == ask("bad", "canary, training") == "wrong"
    assert ask("bad", "packed") == "refused"
    judged: list[Any] = []
    answer = SimpleNamespace(verdict="wrong", why=("dq is off", "dk, too"))
    monkeypatch.setattr(proof.check, "judge", lambda *how: judged.append(how) or answer)
    found = judge.round({"backend": "manual", "dtype": "bfloat16", "what": "gqa"})
    assert found == {"verdict": "wrong", "why": "dq is off; dk, too"}
    ((backend, item, here, device),) = judged
    assert backend is attention.BACKENDS["manual"] and (item.name, item.dtype) == (
        "gqa", "bfloat16")  # fmt: skip
    assert here.device == device == "cpu"


# --- the page, the machine ---


def test_the_page_says_what_is_wrong_here() -> None:
    row = {"status": "ok", "noisy": True, "mfu": 0.5, "mfu_causal": 0.45, "tokens_per_s": 10.0,
           "backend": "sdpa", "ms": 1.0, "point": {}, "mode": "train"}  # fmt: skip
    no = {**row, "status": "unavailable", "why": ["no"]}  # which has no round to be noisy
    bad = {"backend": "flash_attn_4", "right": 3, "wrong": 1, "refused": 0, "not_reached": 7,
           "failures": [{"case": "large", "dtype": "bfloat16", "why": "dq is off"}]}  # fmt: skip
    nothing = {"backend": "paged", "right": 0, "wrong": 0, "refused": 9, "not_reached": 0,
               "failures": []}  # fmt: skip
    stages: list[dict[str, Any]] = [
        {"name": "machine", "status": "done", "record": {"busy": ["GPU 0 was in use"]}},
        {"name": "proof", "status": "cut", "why": "its time was over",
         "record": {"rows": [bad, nothing]}},
        {"name": "training", "status": "done", "watched":
         {"held_down_by": ["heat (hardware)", "its power cap"]},
         "record": {"rows": [row, no, no], "answers": ["MFU: x."]}},
    ]  # fmt: skip
    here = {"peak_tflops": 989.4, "products_tflops": 300.0}
    said = "\n".join(qualify.conclusions({"machine": here, "stages": stages}))
    for words in (
        "flash_attn_4 is wrong in large, bfloat16: dq is off",
        "cases not reached in the time: flash_attn_4 7",
        "right and nothing leaked: none",
        "large matmuls reach 300 TFLOP/s, 30% of the datasheet's 989.4",
        "in the stage training the GPU's clock was held down by heat (hardware) and its power cap",
        "1 of 1 rows of training are noisy",
        "GPU 0 was in use",
        "Missing: proof: cut: its time was over.",
        "MFU: x.",
    ):
        assert words in said, said
    proved = [bad, nothing, {**nothing, "backend": "sdpa", "right": 5}, {**nothing, "right": 2}]
    said = "\n".join(qualify.conclusions({"machine": here, "stages": [
        {"name": "proof", "status": "done", "record": {"rows": proved}}]}))  # fmt: skip
    assert "nothing leaked: sdpa (5 cases), paged (2 cases)." in said
    shown = records.sections({"mode": "qualify", "stages": [{"name": "proof", "record": {
        "rows": [{**row, "canary": None} for row in proved]}}]})  # fmt: skip
    assert [(title, len(lines)) for title, (_, lines) in shown] == [("Proof", 4)]


def test_what_nvidia_smi_says_is_understood() -> None:
    answers = {"memory.used,utilization.gpu": [["5000", "97"], ["[N/A]", "0"], ["[Lost]"], ["8"]]}
    found = machine.busy("cuda", lambda query: answers[query])
    assert found[0] == "GPU 0 was in use before we began: 5,000 MB, 97%"
    assert not any("GPU" in text for text in found[1:])
    bounds = [["1000", "10"], ["1001", "0"], ["3", "11"]]  # MB, %
    some = [text[:5] for text in machine.busy("cuda", lambda query: bounds) if "GPU" in text]
    assert some == ["GPU 1", "GPU 2"]
    with machine.watched(lambda query: [["0x0000000000000044", "88", "700.1"]]) as seen:
        time.sleep(0.05)
    assert seen == {"held_down_by": ["heat (hardware)", "its power cap"], "celsius": 88.0,
                    "watts": 700.1}  # fmt: skip
    with machine.watched(lambda query: [["0x0", "40", "[N/A]"]]) as seen:
        pass
    assert seen == {"held_down_by": [], "celsius": 40.0, "watts": 0.0}
    with machine.watched(lambda query: []) as seen:
        pass
    assert seen == {}


def test_a_look_that_has_begun_is_waited_for() -> None:
    begun = threading.Event()

    def ask(query: str) -> list[list[str]]:
        begun.set()
        time.sleep(0.3)
        return [["0x8", "50", "100"]]

    with machine.watched(ask) as seen:
        assert begun.wait(20)
    assert seen["celsius"] == 50


def test_what_several_looks_at_several_gpus_show(monkeypatch) -> None:
    """The highest of all, every reason that was seen once, and nothing of a GPU that is mute."""
    each = {0x4: "its power cap", 0x8: "a hardware slowdown", 0x20: "heat (software)",
            0x40: "heat (hardware)", 0x80: "the power brake"}  # fmt: skip
    for bit, why in each.items():  # 0x1: it is idle, 0x2: somebody set its clocks
        with machine.watched(lambda query, bit=bit: [[hex(bit | 0x3), "50", "99.5"]]) as seen:
            pass
        assert seen == {"held_down_by": [why], "celsius": 50.0, "watts": 99.5}
    looks = iter([[["0x1", "40", "700"], ["0x8", "90", "300"]], [["[N/A]", "99", "999"]],
                  [["0x20", "60", "100"]]])  # fmt: skip
    waited: list[float] = []
    enough = threading.Event()

    class Over:
        def set(self) -> None: ...

        def wait(self, seconds: float) -> bool:
            waited.append(seconds)
            if len(waited) == 3:
                enough.set()
            return len(waited) == 3

    fake = SimpleNamespace(Event=Over, Thread=threading.Thread)
    monkeypatch.setattr(machine, "threading", fake)
    asked: list[str] = []
    with machine.watched(lambda query: asked.append(query) or next(looks)) as seen:
        assert enough.wait(20) and seen == {}
    assert seen == {"held_down_by": ["a hardware slowdown", "heat (software)"], "celsius": 90.0,
                    "watts": 700.0}  # fmt: skip
    assert waited == [2] * 3
    assert set(asked) == {"clocks_event_reasons.active,temperature.gpu,power.draw"}


def test_a_better_peak_that_a_later_stage_finds_leaves_earlier_rows_as_they_were_reckoned() -> None:
    bench = bench_of()
    made = bench.content([])
    bench.machine["peak_tflops"] = 2000.0
    assert made["machine"]["peak_tflops"] == 989.4


def test_a_later_look_need_not_measure_the_bandwidth() -> None:
    bench = bench_of()
    bench.machine |= {"peak_source": "measured now", "peak_measured": True}
    again = {"peak_tflops": 1e4, "peak_source": "measured then", "bandwidth": None}
    bench.ask_once = lambda kind, n=1: again  # type: ignore[method-assign]
    bench.look_again()
    assert (bench.machine["peak_tflops"], bench.machine["bandwidth"]) == (1e4, 4e12)
