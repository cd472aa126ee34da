"""What is remembered of a machine's rates; every rate here is made up."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import system
from core import metrics, peaks
from core.flops import Speed
from core.metrics import Metrics
from core.peaks import Peak, best_peak
from model import GPTConfig

CPU = torch.device("cpu")
HOW = "the best of several large matrix products"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(peaks, "load", lambda: 0.25)
    return tmp_path / "peaks"


def look(monkeypatch: pytest.MonkeyPatch, tflops: float, dtype: str = "float32") -> Peak:
    """What best_peak says where this is measured now."""
    monkeypatch.setattr(peaks, "measured_tflops", lambda device, dtype: (tflops, HOW))
    return best_peak("cpu", dtype)


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_better_of_now_and_remembered_counts_and_stays(folder, monkeypatch) -> None:
    first = look(monkeypatch, 0.5)
    assert first.measured and first.tflops == 0.5
    today = r"measured \d{4}-\d\d-\d\d at load 0.25: "
    assert re.fullmatch(today + HOW, first.source)
    (path,) = folder.iterdir()
    edited(path, date="2026-01-02T03:04:05+00:00", load=1.5)
    before = f"measured 2026-01-02 at load 1.5: {HOW}"
    assert look(monkeypatch, 0.4) == Peak(0.5, f"{before}; now 0.4 TFLOP/s", True)
    better = look(monkeypatch, 0.6)
    assert better.tflops == 0.6 and re.fullmatch(today + HOW, better.source)
    assert look(monkeypatch, 0.5).tflops == 0.6
    known = json.loads(path.read_text())
    assert (known["rate"], known["load"], known["threads"]) == (0.6, 0.25, torch.get_num_threads())
    assert known["torch"] == torch.__version__ and known["dtype"] == "float32"


def test_a_figure_that_is_absurdly_better_than_now_is_a_doubt(monkeypatch) -> None:
    look(monkeypatch, 0.5)
    assert "doubt" not in look(monkeypatch, 0.25).source
    doubtful = look(monkeypatch, 0.24)
    assert doubtful.tflops == 0.5 and doubtful.measured
    for words in ("; now 0.24 TFLOP/s at load 0.25, a doubt: ", "busy or throttled", "another one"):
        assert words in str(doubtful)


def test_what_could_change_a_rate_has_a_memory_of_its_own(folder, monkeypatch) -> None:
    def told(rate: float) -> float:
        return look(monkeypatch, rate).tflops

    assert told(8.0) == 8.0
    assert look(monkeypatch, 7.0, "bfloat16").tflops == 7.0
    with monkeypatch.context() as patch:
        patch.setattr(peaks, "cpu_name", lambda: "another CPU")
        assert told(6.0) == 6.0
        patch.setattr(peaks, "cpu_name", lambda: None)  # macOS
        assert told(5.0) == 5.0
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert told(4.0) == 4.0
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        assert told(3.0) == 3.0
    assert told(1.0) == 8.0
    assert len([*folder.iterdir()]) == 6
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X1")
    for rate, tf32 in ((40.0, True), (20.0, False)):
        monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace(allow_tf32=tf32))
        monkeypatch.setattr(peaks, "measured_tflops", lambda device, dtype, r=rate: (r, HOW))
        assert best_peak(gpu, "float32").tflops == rate
    assert peaks.better(1.0, "GB/s", "copies", CPU)[0] == 1.0


@pytest.mark.parametrize("tf32", [True, False])
def test_a_gpu_that_is_known_has_the_peak_of_its_datasheet(tf32, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace(allow_tf32=tf32))
    assert peaks.peak("cuda:1", "float32").tflops == pytest.approx(
        494.5 if tf32 else 66.9, rel=0.01
    )
    assert peaks.peak("cuda:1", "bfloat16").tflops == pytest.approx(989, rel=0.01)
    assert peaks.peak("cuda:1", "bfloat16", 3.0) == peaks.Peak(3.0, "--peak_tflops")


NO_MEMORY = [
    *("", "{", "[]", "null", "\xff", '{"rate": 9.0}', '{"rate": true, "date": "2026-01-02"}'),
    *(f'{{"rate": {rate}, "date": "2026-01-02", "load": 1.0}}'
      for rate in ("NaN", "Infinity", "-9.0", '"9.0"')),
    *(f'{{"rate": 9.0, "date": {date}, "load": 1.0}}' for date in ("7", '"yesterday"')),
    '{"rate": 9.0, "date": "2026-01-02", "load": "low"}',
]  # fmt: skip


@pytest.mark.parametrize("text", NO_MEMORY)
def test_a_file_that_is_no_memory_is_replaced(text, folder, monkeypatch, caplog) -> None:
    look(monkeypatch, 0.5)
    (path,) = folder.iterdir()
    path.write_bytes(text.encode("latin-1"))
    found = look(monkeypatch, 0.25)
    assert found.tflops == 0.25 and "now" not in found.source
    assert f"{path} is of no use" in caplog.text
    assert look(monkeypatch, 0.125).tflops == 0.25


def test_where_nothing_can_be_remembered_what_is_measured_counts(
    tmp_path, monkeypatch, caplog
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOATTN_CACHE", str(tmp_path / "file"))
    assert look(monkeypatch, 0.5).tflops == 0.5 and "cannot be remembered" in caplog.text

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    caplog.clear()
    for name in ("NANOATTN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert look(monkeypatch, 0.5).tflops == 0.5
    assert "Could not determine home directory.; set NANOATTN_CACHE" in caplog.text


def write_often(path: Path, letter: str) -> None:
    for _ in range(300):
        system.write_at_once(path, letter * 50_000)


@pytest.mark.slow
def test_two_processes_that_write_at_once_leave_a_whole_file(tmp_path) -> None:
    path = tmp_path / "new" / "file"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_often, args=(path, letter)) for letter in "ab"]
    for process in writers:
        process.start()
    seen = set()
    while any(process.is_alive() for process in writers):
        if path.exists():
            seen.add(path.read_text())
    for process in writers:
        process.join()
        assert process.exitcode == 0
    assert seen | {path.read_text()} <= {"a" * 50_000, "b" * 50_000}
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("text, name", [
    ("model\t\t: 207\nmodel name\t: A CPU @ 2 GHz \nmodel name\t: B\n", "A CPU @ 2 GHz"),
    ("processor\t: 0\nCPU part\t: 0xd0c\n", None), (None, None)])  # fmt: skip
def test_the_processors_name_is_what_linux_calls_the_model(text, name, monkeypatch) -> None:
    def opened(path: str, **_: Any) -> io.StringIO:
        if text is None:  # not Linux
            raise FileNotFoundError(path)
        assert path == "/proc/cpuinfo"
        return io.StringIO(text)

    monkeypatch.setattr(system, "open", opened, raising=False)
    assert system.cpu_name() == name


def test_a_write_that_is_stopped_leaves_the_file_as_it_was(tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def stopped(written: str, target: Path) -> None:
        assert Path(written).parent == path.parent  # else it might be on another disk
        assert (Path(written).read_text(), target) == ("after", path)
        raise KeyboardInterrupt

    monkeypatch.setattr(system.os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        system.write_at_once(path, "after")
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "before"


# --- in a run ---

SIZES = GPTConfig(16, 64, 1, 2, 16, bias=False)


@dataclass(frozen=True)
class Settings:
    wandb_log: bool = False
    max_iters: int = 1000


class Everyone:
    """One of two processes; the other's share of a sum, and what the first one has gathered."""

    def __init__(self, rank: int, other: float, first: Peak | None = None) -> None:
        self.main, self.device, self.other, self.first = rank == 0, CPU, other, first
        self.said: list[str] = []

    def sum(self, values: list[float]) -> list[float]:
        return [values[0] + self.other]

    def gather(self, value: Any) -> list[Any]:
        return [self.first or value, value]

    def say(self, text: str) -> None:
        self.said.append(text)


def a_run(everyone: Everyone, peak: Peak, **more: Any) -> Any:
    setup = types.SimpleNamespace(dtype=torch.float32)
    return types.SimpleNamespace(**{"distributed": everyone, "peak": peak, "peak_from": 0,
        "config": Settings(), "setup": setup, "step": 10, "metrics": None, **more})  # fmt: skip


def speed(share: float, peak: Peak) -> Speed:
    """A run that does so much of the peak."""
    one = Speed(SIZES, 16, 1.0, peak)
    return Speed(SIZES, 16, share / one.mfu, peak)


def test_when_a_peak_is_measured_again(monkeypatch) -> None:
    looks: list[str] = []
    low = Peak(1.0, "measured: x", True)
    monkeypatch.setattr(peaks, "best_peak", lambda device, dtype: looks.append(dtype) or low)

    def looked(share: float, run: Any, peak: Peak = low) -> bool:
        before = len(looks)
        metrics.believable(run, speed(share, peak))
        return len(looks) > before

    run = a_run(Everyone(0, 0.0), low)
    assert not looked(0.89, run) and looked(0.91, run) and looks == ["float32"]
    steps = {}
    for run.step in range(11, 1001):
        steps[run.step] = looked(1.49, run)
    assert [step for step, did in steps.items() if did] == [40, 160, 640, 1000]  # the last one too
    for known in (Peak(1.0, "--peak_tflops"), Peak(1.0, "datasheet: x")):
        assert not looked(1.49, a_run(Everyone(0, 0.0), known), known)


def test_the_processes_of_a_run_go_on_with_the_same_peak(monkeypatch) -> None:
    """The first one decides and measures; the others only take what it found."""
    low, high = Peak(1.0, "measured: x", True), Peak(3.0, "measured: y", True)
    looks: list[str] = []
    monkeypatch.setattr(peaks, "best_peak", lambda device, dtype: looks.append(dtype) or high)
    second = a_run(Everyone(1, 1.0, high), low)
    assert metrics.believable(second, speed(0.1, low)).peak == high == second.peak
    assert second.peak_from == 40 and not looks
    second = a_run(Everyone(1, 0.0), low)
    assert metrics.believable(second, speed(1.49, low)).peak == low == second.peak and not looks
    first = a_run(Everyone(0, 0.0), low)
    assert metrics.believable(first, speed(0.95, low)).peak == high == first.peak
    assert len(looks) == 1 and first.peak_from == 40


@pytest.mark.parametrize(
    "found", [Peak(0.5, "measured: lower", True), RuntimeError("out of memory\nx")]
)
def test_a_look_that_finds_no_better_peak_changes_nothing(found, monkeypatch, caplog) -> None:
    def best_peak(device: torch.device, dtype: str) -> Peak:
        if isinstance(found, Peak):
            return found
        raise found

    monkeypatch.setattr(peaks, "best_peak", best_peak)
    low = Peak(1.0, "measured: x", True)
    run = a_run(Everyone(0, 0.0), low)
    assert metrics.believable(run, speed(1.2, low)) == speed(1.2, low) and run.peak == low
    assert run.distributed.said[0].endswith("1 TFLOP/s (measured: x), as before")
    failed = "could not be measured again (out of memory)" in caplog.text
    assert failed == isinstance(found, RuntimeError)


def test_the_rows_of_this_run_are_reckoned_anew(tmp_path, monkeypatch) -> None:
    """Those of the run that it resumes were against a peak that is not known here."""
    low, high = Peak(1.0, "measured: x", True), Peak(3.0, "measured: y", True)
    monkeypatch.setattr(peaks, "best_peak", lambda device, dtype: high)
    earlier = {"iter": 5, "loss": 3.0, **speed(0.6, low).row()}
    m = Metrics(tmp_path, 0, Settings())
    m.log(**earlier)
    m.close()
    m = Metrics(tmp_path, 5, Settings())
    m.log(iter=6, loss=2.0)  # of a warm-up, without a speed
    m.log(iter=8, loss=2.0, ms=1.0, **speed(1.5, low).row())
    m.log(iter=8, train_loss=2.0, val_loss=2.0)
    m.wandb = types.SimpleNamespace(log=lambda row, step: None, finish=lambda: None)
    run = a_run(Everyone(0, 0.0), low, metrics=m)
    now = metrics.believable(run, speed(1.2, low))
    m.log(iter=10, loss=1.0, **now.row())
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert rows[0] == earlier and rows[1] == {"iter": 6, "loss": 2.0}
    assert [row["iter"] for row in rows] == [5, 6, 8, 8, 10]
    assert rows[2]["mfu"] == pytest.approx(0.5) and "mfu_why" not in rows[2]
    assert rows[2]["ms"] == 1.0 and rows[4]["mfu"] == pytest.approx(0.4)
    (said,) = run.distributed.said
    assert said.endswith("metrics.jsonl says so now, wandb does not")
    m.close()


def test_rows_that_cannot_be_written_anew_do_not_end_a_run(tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level(logging.WARNING, "nanoattn")
    m = Metrics(tmp_path, 0, Settings())
    m.log(iter=1, **speed(0.5, Peak(1.0, "measured: x", True)).row())

    def full(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert m.reckon_anew(speed(0.5, Peak(2.0, "measured: y", True))) == 0
    assert "keeps the mfu of earlier steps" in caplog.text
    m.file.write('{"iter": 2, "loss": 1.0}\n')  # that a full disk has left in memory until now
    assert m.reckon_anew(speed(0.5, Peak(2.0, "measured: y", True))) == 1
    m.close()
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert [row["iter"] for row in rows] == [1, 2] and rows[0]["mfu"] == pytest.approx(0.25)
