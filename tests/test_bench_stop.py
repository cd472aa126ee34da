"""Failures and ends of a bench: the results that it keeps, and no process that survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benches import by_backend, kernel, measured, run, shown, small, write_tokens
from checkout import ROOT
from conftest import few

from bench.candidates import Bench
from bench.record import verify
from core.settings import UserError

KERNELS = [*small("kernel"), "--lengths=8", "--batch_sizes=3"]
REAL = "if B > 2: "  # not in its proof


def calls(folder: Path) -> list[list[str]]:
    """Kernels and processes of the calls, without repeats."""
    found = [line.split() for line in (folder / "log.txt").read_text("utf-8").splitlines()]
    return [call for before, call in zip([[], *found], found) if before != call]


def signalled(folder: Path, number: int, calls: int = 1) -> str:
    """Code that sends the bench a signal in one call."""
    log = f"Path({str(folder / 'log.txt')!r}).read_text().count('stops')"
    return REAL + f"{log} == {calls} and os.kill({os.getpid()}, {number:d})"


def test_a_failure_is_a_row_and_ends_nothing_else(tmp_path: Path) -> None:
    """With 16 tokens a new process goes on. Rounds are interleaved."""
    does = {
        "exits": ("os.write(2, b'bad address\\n'); os._exit(3)", "3): bad address"),
        "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        "raises": ("raise RuntimeError('no')", "RuntimeError: no"),
        "full": ("raise torch.OutOfMemoryError('made up')", "out of memory"),
        "nan": ("out = out * float('nan')", "FloatingPointError"),
    }
    files = [kernel(tmp_path, name, f"if B > 2 and T == 8: {what}")
             for name, (what, _) in {"a": ("pass", ""), **does, "b": ("pass", "")}.items()]
    files += [kernel(tmp_path, "wrong", "out = out + 1"),
              kernel(tmp_path, "refuses", caps=", head_dim_multiple=64")]
    content = measured(*KERNELS, f"--backends={','.join(files)}", "--lengths=8,16")
    rows = by_backend(content, "T")
    assert len(rows) == len(content["rows"]) == 2 * len(files)
    failed = {(name, 8): ("failed", named) for name, (_, named) in does.items()}
    failed |= {(name, T): ("unavailable", named) for T in (8, 16)
               for name, named in (("wrong", "wrong"), ("refuses", "64"))}
    for at, row in rows.items():
        status, named = failed.get(at, ("ok", ""))
        assert row["status"] == status and named in row.get("why", [""])[0]
        assert status != "ok" or len(row["rounds"]) > 1
    names = [name for name, _ in calls(tmp_path) if name in "ab"]
    assert "".join(names).endswith("abab")


@pytest.mark.slow
@pytest.mark.parametrize("limit, cuda", [("--timeout=15", False), ("--minutes=1.5", True)])
def test_a_process_that_hangs_is_a_row(limit, cuda, tmp_path, monkeypatch) -> None:
    """On CUDA, where three warm up together, it has a third of the time; others have the rest."""
    monkeypatch.setattr(Bench, "cuda", cuda)
    does = {"a": "pass", "hangs": REAL + "time.sleep(1000)", "b": "pass", "c": "pass"}
    files = ",".join(kernel(tmp_path, name, what) for name, what in does.items())
    rows = by_backend(measured(*small("train"), f"--backends={files}", "--compile=False", limit))
    assert "--timeout" in rows.pop("hangs")["why"][0]
    assert [(row["status"], len(row["rounds"])) for row in rows.values()] == [("ok", 2)] * 3


@pytest.mark.slow
def test_processes_that_do_not_fit_together_are_new_in_each_round(tmp_path, monkeypatch) -> None:
    """Or have all rounds at once, as on CUDA, where they are compiled."""
    (full := tmp_path / "meminfo").write_text("MemAvailable: 9 kB\n", encoding="utf-8")
    fills = f"import bench.machine; bench.machine.MEMINFO = Path({str(full)!r})"
    for does, cuda, processes in (("pass", False, 4), (fills, False, 8), (fills, True, 4)):
        monkeypatch.setattr(Bench, "cuda", cuda)
        files = ",".join(kernel(tmp_path, name, does) for name in "abcd")
        content = measured(*small("train"), f"--backends={files}", "--memory_gb=1")
        assert all(len(r["rounds"]) == 2 for r in content["rows"])
        assert content["fresh_rounds"] == (processes == 8)
        assert len({pid for _, pid in calls(tmp_path)}) == processes
        (tmp_path / "log.txt").unlink()


@pytest.mark.slow
def test_what_does_not_fit_beside_others_is_measured_alone(tmp_path, monkeypatch) -> None:
    """As if on CUDA, where three warm up together: c has no memory while another lives, from its
    first or 16th call on, in its last round. With --compile one process has all its rounds."""
    monkeypatch.setattr(Bench, "cuda", True)
    log = f"Path({str(tmp_path / 'log.txt')!r}).read_text().splitlines()"
    others = f"Path('/proc', line[2:]).exists() for line in {log} if line[0] != 'c'"
    for first, compiled in ((1, False), (1, None), (16, False)):
        late = f"sum(line[0] == 'c' for line in {log}) >= {first}"
        full = f"if B > 2 and {late} and any({others}): raise torch.OutOfMemoryError('made up')"
        files = [kernel(tmp_path, name, full if name == "c" else "pass") for name in "abcd"]
        argv = [f"--backends={','.join(files)}", *["--compile=False"] * (compiled is False)]
        rows = measured(*small("train"), *argv)["rows"]
        assert [(r["status"], len(r["rounds"])) for r in rows] == [("ok", 2)] * 4
        assert len({pid for name, pid in calls(tmp_path) if name == "c"}) > 1  # it had none once
        (tmp_path / "log.txt").unlink()


def test_a_folder_that_cannot_be_is_an_error_before_the_first_round(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    argv = [*KERNELS, f"--backends={kernel(tmp_path, 'a')}", "--record=x"]
    for name in ("file", "nowhere"):
        with pytest.raises(UserError, match=name):
            run([*argv, f"--records_dir={tmp_path / name}"])
    assert not (tmp_path / "log.txt").exists()


def test_what_has_no_time_left_is_named_with_the_time_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps to the end while the first kernel is measured."""
    real, over = time.monotonic, tmp_path / "over"
    monkeypatch.setattr(time, "monotonic", lambda: real() + 599.9 * over.exists())
    first = kernel(tmp_path, "first", REAL + f"Path({str(over)!r}).touch()")
    content = measured(*KERNELS, f"--backends={first},sdpa", "--minutes=10", "--rounds=3")
    rows = by_backend(content)
    assert rows["first"]["status"] == "ok" and 1 <= len(rows["first"]["rounds"]) < 3
    assert rows["sdpa"]["status"] == "stopped" and rows["sdpa"]["why"][0]
    assert not content["complete"] and "1 of 2 rows" in content["incomplete"]


@pytest.mark.parametrize("number, why, code", few([(2, "Ctrl-C", 130), (15, "SIGTERM", 143)]))
def test_a_run_that_is_stopped_leaves_table_and_record(
    tmp_path: Path, number: int, why: str, code: int
) -> None:
    before = signal.getsignal(number)
    stops = kernel(tmp_path, "stops", signalled(tmp_path, number))
    ended, text, content = shown(*small("train"), f"--backends=manual,{stops},sdpa",
                                 "--record=cut", f"--records_dir={tmp_path}", "--rounds=3")
    assert ended == code and signal.getsignal(number) == before
    rows = by_backend(content)
    assert content["complete"] is False and why in content["incomplete"] and verify(content) == []
    assert len(rows["manual"]["rounds"]) == 1 and rows["manual"]["mfu"] > 0
    assert rows["sdpa"]["status"] == "stopped" and why in rows["sdpa"]["why"][0]
    (record,) = tmp_path.glob("*_cut")
    assert {path.name for path in record.iterdir()} == {"README.md", "record.json"}
    assert json.loads((record / "record.json").read_text(encoding="utf-8")) == content
    page = (record / "README.md").read_text(encoding="utf-8")
    assert all("INCOMPLETE" in at and why in at for at in (page, text))


def test_a_training_that_was_cut_short_is_not_judged(tmp_path: Path) -> None:
    stops = kernel(tmp_path, "stops", signalled(tmp_path, signal.SIGINT, calls=2 * 8))
    argv = [*small("converge"), f"--backends={stops}", "--steps=10", "--dataset=tiny"]
    content = measured(*argv, f"--data_dir={write_tokens(tmp_path)}", code=130)
    assert not any("verdict" in r for r in content["rows"])
    assert not any("1.00%" in answer for answer in content["answers"])
    assert all(r["status"] == "stopped" and "of 10 parts" in r["why"][0] for r in content["rows"])


def lives(pid: int) -> bool:
    """False for a zombie."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(found.stdout.strip()) and "Z" not in found.stdout


def wait_for(what: Callable[[], Any]) -> Any:
    until = time.monotonic() + 120
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_child_survives_its_bench_and_its_rounds_are_kept(tmp_path, how) -> None:
    """Nothing is forked here. A background program ignores SIGINT; stdout is closed."""
    note, pids = tmp_path / "pids", []
    hangs = f"""if B > 2 and list(Path({str(tmp_path)!r}).glob("*_k/record.json")):
        import subprocess
        child = subprocess.Popen(["sleep", "1000"])
        Path({str(note) + "_"!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
        os.rename({str(note) + "_"!r}, {str(note)!r})
        time.sleep(1000)"""
    argv = [*KERNELS, f"--backends={kernel(tmp_path, 'a', hangs)}", "--record=k"]
    parent = subprocess.Popen(
        [sys.executable, "bench_mfu.py", *argv, f"--records_dir={tmp_path}"], cwd=ROOT, text=True,
        start_new_session=True, stderr=subprocess.PIPE,
        preexec_fn=lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), os.close(1)))
    try:
        assert wait_for(note.exists)
        pids = [int(pid) for pid in note.read_text(encoding="utf-8").split()]
        assert all(lives(pid) for pid in pids)
        os.killpg(parent.pid, how)
        assert "Traceback" not in parent.communicate(timeout=30)[1]
        assert parent.returncode in (-how, 128 + how)
        assert wait_for(lambda: not any(lives(pid) for pid in pids))
    finally:
        parent.kill()
        for pid in filter(lives, pids):
            os.kill(pid, signal.SIGKILL)
    (record,) = tmp_path.glob("*_k/record.json")
    content = json.loads(record.read_text(encoding="utf-8"))
    assert content["complete"] is False and len(content["rows"][0]["rounds"]) == 1
