"""A bench that is stopped, by whatever: what it keeps, and that nothing of it goes on.

And what keeps it short: the plan, and what takes too long to be run at all.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import in_process
import pytest
from rich.console import Console
from test_bench import SMALL, NoWorker, write_tokens

import bench_mfu
from bench import config as config_
from bench import modes, plan, process, rows
from bench.bench import Bench
from bench.config import BenchConfig, load_config
from bench.process import Failure, Outcome, Stop, Worker, measure
from core import flops
from core.settings import UserError
from model import GPTConfig

# A worker that answers once, and then is in one long call that lets no other thread run; and a
# child of its own.
STUCK = """
import json, os, re, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
with open(sys.argv[1], "w") as f: f.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1], sys.argv[1] + ".there")
if sys.argv[2:] == ["worker"]:
    sys.stdin.readline()
    print(json.dumps({"ok": {}}), flush=True)
    sys.stdin.readline()
re.match("(a+)+b", "a" * 99)
"""


def lives(pid: int) -> bool:
    """Does it still run? Who waits to be buried does not."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(found.stdout.strip()) and "Z" not in found.stdout


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    ["Worker(600, None, [*command, 'worker']).begin({}).ask({})", "run(command, folder)"],
    ids=["worker", "against_nanogpt"],
)
def test_nothing_outlives_a_bench_that_is_killed(tmp_path, call):
    """kill -9, while a child is in the middle of a step."""
    (tmp_path / "stuck.py").write_text(STUCK, encoding="utf-8")
    note = tmp_path / "note"
    program = (
        "import sys; from pathlib import Path; from bench.process import Worker; "
        "from bench.against_nanogpt import run; "
        f"folder = Path({str(tmp_path)!r}); "
        f"command = [sys.executable, str(folder / 'stuck.py'), {str(note)!r}]; {call}"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=config_.ROOT)
    there = Path(f"{note}.there")
    try:
        assert wait_for(there.exists), "the worker did not start"
        pids = [int(pid) for pid in there.read_text().split()]
        assert all(lives(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    left = wait_for(lambda: not any(lives(pid) for pid in pids)) or [p for p in pids if lives(p)]
    for pid in [] if left is True else left:
        os.kill(pid, signal.SIGKILL)
    assert left is True, "a child outlived its parent"


def test_the_guard_starts_nothing_where_its_group_is_somebody_elses():
    done = subprocess.run([*process.GUARD, "echo", "no"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and "a session of its own" in done.stderr


def test_a_command_that_heeds_no_signal_ends_with_its_parent_too():
    script = "trap '' TERM INT HUP; echo begun; sleep 60"
    command = process.start(["sh", "-c", script], stdout=subprocess.PIPE)
    assert command.stdin and command.stdout
    try:
        assert command.stdout.readline() == b"begun\n"
        command.stdin.close()  # as the system does for a parent that is gone
        assert command.wait(timeout=20) == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.stdout.close()


def test_the_output_of_a_guarded_command_ends_with_the_command():
    """Though the watcher, which began with the same pipes, goes on while ours is open."""
    echo = process.start(("echo", "hi"), stdout=subprocess.PIPE)
    assert echo.stdout and echo.stdin
    try:
        echo.wait(20)
        said = []
        while b"" not in said:
            assert select.select([echo.stdout], [], [], 10)[0], "it does not end"
            said.append(os.read(echo.stdout.fileno(), 100))
        assert b"".join(said) == b"hi\n" and not echo.stdin.closed
    finally:
        process.end(echo)
        echo.stdout.close()


# ----------------------------------------------------------------------------- the rounds

STUB = """
import json, sys
sys.stdin.readline(); print(json.dumps({"ok": {}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("hangs") and not asked.get("warm_up"): sys.stdin.read()
    print(json.dumps({"ok": {"ms": 1.0}}), flush=True)
"""


def rounds_of(
    tmp_path: Path, stop: Stop, watch: Any, names: str = "ab", **at: Any
) -> tuple[dict[Any, Outcome], list[str]]:
    """Two rounds with workers that measure nothing; and what was begun."""
    (tmp_path / "stub.py").write_text(STUB, encoding="utf-8")
    begun: list[str] = []

    def both(what: str) -> None:
        begun.append(what)
        watch(what)

    jobs: dict[str, dict[str, Any]] = {name: {} for name in names}
    command = (sys.executable, "-S", str(tmp_path / "stub.py"))
    outcomes, _ = measure(jobs, {"": at}, 2, timeout=60.0, stop=stop, watch=both, command=command)
    return outcomes, begun


def test_nothing_begins_after_a_signal_and_what_there_is_stays(tmp_path):
    signals: Any = SimpleNamespace(signal=None)

    def watch(what: str) -> None:
        if what.startswith("round 1 of 2: b"):
            signals.signal = signal.SIGTERM

    stop = Stop(signals=signals)
    outcomes, begun = rounds_of(tmp_path, stop, watch)
    assert begun[-1] == "round 1 of 2: b (4 of 6)" and stop.code == 143
    assert [len(outcomes[n, ""].rounds) for n in "ab"] == [1, 0]
    for name, status in (("a", "ok"), ("b", "stopped")):
        row = rows.begin("train", name, {}, outcomes[name, ""])
        assert row["status"] == status
    assert row["why"] == ["it was stopped by SIGTERM"]
    with pytest.raises(Failure, match="SIGTERM"):  # nor does a worker start
        Worker(60.0, stop).begin({})


def test_a_part_of_a_run_may_have_a_deadline_of_its_own():
    bench = on_gpu()
    bench.stop.signals = SimpleNamespace(signal=None)  # type: ignore[assignment]
    assert replace(bench, earlier=[]).stop is bench.stop
    part = replace(bench, stop=Stop(time.monotonic() - 1, bench.stop.signals))
    with pytest.raises(Failure, match="its time was over"):
        part.stop.check()
    bench.stop.check()
    assert part.stop.why and not bench.stop.why
    bench.stop.signals.signal = signal.SIGINT  # type: ignore[union-attr]
    for each in (bench, part):
        with pytest.raises(Failure, match="Ctrl-C"):
            each.stop.check()


def test_a_round_that_is_begun_before_the_deadline_ends(tmp_path):
    stop = Stop()

    def watch(what: str) -> None:
        if what.startswith("round 1 of 2: a"):
            stop.deadline = time.monotonic()

    outcomes, begun = rounds_of(tmp_path, stop, watch)
    assert begun[-1].startswith("round 1 of 2: a") and stop.code == 0
    assert [len(outcomes[n, ""].rounds) for n in "ab"] == [1, 0]
    assert stop.why == "its time was over"


def test_a_worker_that_is_stuck_is_ended_after_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.5)
    stop = Stop()

    def watch(what: str) -> None:
        if what.startswith("round 1"):  # the worker is there, and will not answer
            stop.deadline = time.monotonic()

    outcomes, begun = rounds_of(tmp_path, stop, watch, names="a", hangs=True)
    failure = outcomes["a", ""].failure
    assert failure and failure.kind == "stopped" and len(begun) == 2


def test_a_pair_that_is_skipped_says_why_and_the_rest_goes_on(tmp_path):
    (tmp_path / "stub.py").write_text(STUB, encoding="utf-8")
    known: list[Any] = []
    outcomes, _ = measure(
        {"a": {}}, {"x": {}, "y": {}}, 1,
        skip=lambda name, point: "too slow" * (point == "x"),
        known=lambda *pair: known.append(pair),
        command=(sys.executable, "-S", str(tmp_path / "stub.py")),
    )  # fmt: skip
    row = rows.begin("kernel", "a", {}, outcomes["a", "x"])
    assert (row["status"], row["why"]) == ("skipped", ["too slow"])
    assert len(outcomes["a", "y"].rounds) == 1 and known == [("a", "x"), ("a", "y")]


# ----------------------------------------------------------------------------- a whole run


def stopping(at: int, how: Callable[[Any], None]) -> type[in_process.InProcess]:
    """Workers of which the `at`-th question to a backend's does something to the bench."""
    asked = [0]

    class Stops(in_process.InProcess):
        def __init__(self, timeout: float, stop: Any = None, command: Any = ()) -> None:
            super().__init__(timeout, stop, command)
            self.stop, self.counts = stop, False

        def begin(self, job: Any) -> in_process.InProcess:
            self.counts = job["job"] in ("train", "kernel", "converge")
            return super().begin(job)

        def ask(self, request: Any) -> dict[str, Any]:
            answer = super().ask(request)
            asked[0] += self.counts and "job" not in request
            if self.counts and asked[0] == at:
                how(self.stop)
            return answer

    return Stops


def run(argv: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = bench_mfu.main(argv)
    return code, out.getvalue(), err.getvalue()


def send(number: int) -> Callable[[Any], None]:
    return lambda stop: os.kill(os.getpid(), number)


def end_time(stop: Stop) -> None:
    stop.deadline = time.monotonic() - 1


ENDS = [
    (send(signal.SIGINT), 130, "it was stopped by Ctrl-C"),
    pytest.param(send(signal.SIGTERM), 143, "it was stopped by SIGTERM", marks=pytest.mark.slow),
    pytest.param(end_time, 0, "its time was over", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("how, code, why", ENDS, ids=["Ctrl-C", "SIGTERM", "deadline"])
def test_a_run_that_is_stopped_leaves_table_and_record(tmp_path, monkeypatch, how, code, why):
    """After the warm-up of both and the first round of manual."""
    in_process.use(monkeypatch, stopping(3, how))
    both = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in both]
    argv = [*SMALL, "--backends=manual,sdpa", "--lengths=16", "--batch_sizes=1", "--record=cut",
            f"--records_dir={tmp_path}", "--json"]  # fmt: skip
    ended, out, _ = run(argv)
    content = json.loads(out.splitlines()[-1])
    assert ended == code and [signal.getsignal(number) for number in both] == before
    assert content["complete"] is False and content["incomplete"].startswith(why)
    assert content["incomplete"].endswith(
        "3 of 4 rows were not measured; 1 have fewer than 2 rounds"
    )
    of = {(r["mode"], r["backend"]): r for r in content["rows"]}
    assert len(of["train", "manual"]["rounds"]) == 1 and of["train", "manual"]["mfu"] > 0
    for which in (("train", "sdpa"), ("kernel", "manual"), ("kernel", "sdpa")):
        assert of[which]["status"] == "stopped" and of[which]["why"] == [why]
    (record,) = tmp_path.glob("*_cut")
    assert json.loads((record / "record.json").read_text(encoding="utf-8")) == content
    page = (record / "README.md").read_text(encoding="utf-8")
    assert page.startswith("# INCOMPLETE: Training steps") and f"**Incomplete**: {why}" in page
    assert "INCOMPLETE: Training steps" in out and f"incomplete: {why}" in out
    assert not list(record.glob("*.part"))


def test_a_run_that_is_killed_leaves_the_rounds_that_had_ended(tmp_path, monkeypatch):
    def die(stop: Stop) -> None:
        raise MemoryError  # no more than kill -9 does the bench do anything about it

    in_process.use(monkeypatch, stopping(6, die))
    with pytest.raises(MemoryError):
        run(["kernel", *SMALL, "--backends=manual,sdpa", "--lengths=16", "--batch_sizes=1",
             "--record=k", f"--records_dir={tmp_path}"])  # fmt: skip
    (record,) = tmp_path.glob("*_k/record.json")
    content = json.loads(record.read_text(encoding="utf-8"))
    assert content["complete"] is False and "had not ended" in content["incomplete"]
    assert [len(r["rounds"]) for r in content["rows"]] == [1, 1]


def test_a_run_that_ends_says_so_in_plain_lines(monkeypatch):
    in_process.use(monkeypatch)
    argv = ["kernel", *SMALL, "--backends=sdpa,sdpa_cudnn", "--lengths=16", "--batch_sizes=1"]
    code, out, err = run([*argv, "--json"])
    content = json.loads(out.splitlines()[-1])
    assert code == 0 and content["complete"] is True and "incomplete" not in content
    lines = [line.partition("] ")[2] for line in err.splitlines() if line.startswith("[")]
    told = next(line for line in lines if line.startswith("sdpa B=1 T=16 H=2 Hkv=2 D=16: "))
    assert told.endswith(" ms, the median of 2 rounds")
    where = "sdpa B=1 T=16 H=2 Hkv=2 D=16"
    begun = [f"warming up: {where} (1 of 3)", f"round 1 of 2: {where} (2 of 3)",
             f"round 2 of 2: {where} (3 of 3)", told]  # fmt: skip
    assert [line for line in lines if where in line] == begun and lines[0] == "the machine"
    assert "INCOMPLETE" not in out and "\x1b" not in err


def test_the_plain_lines_have_the_seconds_and_are_few(monkeypatch, capsys):
    """Every result and every new thing that is done; of one thing a line in two seconds."""
    clock = [100.0]
    monkeypatch.setattr(bench_mfu, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with bench_mfu.progress() as (watch, tell):
        for at, line in ((100.4, "the machine"), (101.0, "proof: a"), (102.9, "proof: b"),
                         (103.0, "proof: c"), (104.9, "proof: d"), (104.95, "round 1: a"),
                         (105.0, "proof: e"), (1100.0, "proof: f")):  # fmt: skip
            clock[0] = at
            watch(line)
            if line.endswith("d"):
                tell("d: done")
                tell("d: done")
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        "[   0 s] the machine", "[   1 s] proof: a", "[   3 s] proof: c", "[   5 s] d: done",
        "[   5 s] d: done", "[   5 s] round 1: a", "[   5 s] proof: e", "[1000 s] proof: f",
    ]  # fmt: skip


def test_a_terminal_has_a_line_with_a_clock_and_the_results_above_it(monkeypatch, capsys):
    screen = io.StringIO()

    def terminal(stderr: bool) -> Any:
        assert stderr
        return Console(file=screen, force_terminal=True, width=80, legacy_windows=False)

    monkeypatch.setattr(bench_mfu, "Console", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with bench_mfu.progress() as (watch, tell):
        watch("round 1 of 2: sdpa")
        tell("sdpa: 5 ms")
        tell("flex: failed: no kernel for [b, t] in [/usr/lib]")  # which is no markup
        watch("round 2 of 2: [a] sdpa")
    assert screen.getvalue().endswith("\x1b[2K")  # the line itself is gone at the end
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "sdpa: 5 ms\n" in text and "0:00:00" in text and "round 2 of 2: [a] sdpa" in text
    assert "flex: failed: no kernel for [b, t] in [/usr/lib]\n" in text
    assert capsys.readouterr() == ("", "")


def test_a_training_that_was_cut_short_is_not_judged(tmp_path, monkeypatch):
    in_process.use(monkeypatch, stopping(2 + 2 * 9, end_time))  # in the last round but one
    argv = ["converge", *SMALL, "--backends=sdpa", "--steps=10", "--dataset=tiny", "--json"]
    code, out, _ = run([*argv, f"--data_dir={write_tokens(tmp_path)}"])
    content = json.loads(out.splitlines()[-1])
    assert code == 1 and not any("verdict" in r for r in content["rows"])
    assert [(r["status"], r["why"]) for r in content["rows"]] == [
        ("stopped", ["9 of 10 parts"])
    ] * 2


def test_what_is_stopped_before_it_began_leaves_nothing(monkeypatch, capsys):
    class Refuses(in_process.InProcess):
        def __init__(self, timeout: float, stop: Any = None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.check()

    in_process.use(monkeypatch, Refuses)
    assert bench_mfu.main([*SMALL, "--backends=sdpa"]) == 143
    assert "it was stopped by SIGTERM; nothing was measured" in capsys.readouterr().err

    class Broken(in_process.InProcess):
        def __init__(self, timeout: float, stop: Any = None) -> None:
            raise Failure("died", ["it has no torch"])

    in_process.use(monkeypatch, Broken)
    with pytest.raises(UserError, match="nothing can be measured on cpu: it has no torch"):
        bench_mfu.main([*SMALL, "--backends=sdpa"])


def test_what_a_command_says_of_itself(tmp_path, monkeypatch):
    """What was asked, what is measured and by which settings; and how it ended."""
    in_process.use(monkeypatch, NoWorker)
    asked: list[Bench] = []
    rows_ = [{"mode": "decode", "backend": "sdpa", "point": {}, "status": "failed", "why": ["x"]}]

    def mode(bench: Bench) -> list[dict[str, Any]]:
        asked.append(bench)
        bench.keep(bench, rows_)
        return rows_

    for name in ("decode", "train"):
        monkeypatch.setitem(modes.MODES, name, mode)
    argv = ["decode", *SMALL, "--backends=all,sdpa", "--dataset=two words", "--json"]
    code, out, err = run([*argv, "--record=x", f"--records_dir={tmp_path}"])
    (bench,) = asked
    content = json.loads(out.splitlines()[-1])
    assert code == 1  # nothing was measured
    assert content["command"].startswith("python bench_mfu.py decode --device=cpu --n_layer=2")
    assert "'--dataset=two words' --json" in content["command"]
    assert content["mode"] == bench.mode == "decode" and content["format"] == 2
    age = datetime.now(timezone.utc) - datetime.fromisoformat(content["date"])
    assert abs(age.total_seconds()) < 600 and content["source_sha256"]
    assert [r["backend"] for r in content["rows"]] == ["sdpa", "triton"]
    left = content["rows"][1]
    assert (left["mode"], left["status"], left["point"]) == ("decode", "unavailable", {})
    assert "settings: bench/cpu.py\n" in err
    assert "vocabulary: 64 (--vocab_size)\n" in err
    (record,) = tmp_path.glob("*_cpu_x")
    assert f"record: {record}\n" in out and "bandwidth: " in out and "peak: " not in out
    assert "triton" not in bench.backends and "sdpa" in bench.backends and bench.device == "cpu"
    assert bench.stop.deadline is None and bench.vocab_size == 64
    rows_[0]["status"] = "stopped"  # what is kept on the way is no end
    run([*argv, "--minutes=2", "--batch_size=auto"])
    left_s = (asked[1].stop.deadline or 0) - time.monotonic()
    assert 0 < left_s < 121 and asked[1].config.fixed_batch is None


def test_a_row_keeps_the_proof_of_its_kernel(monkeypatch):
    proof = {"error": 1e-7, "allowed": 2e-7, "canary": True}
    from bench import kernels

    real = kernels.select
    monkeypatch.setattr(
        kernels, "select", lambda *how: SimpleNamespace(kernels=real(*how).kernels, proof=proof)
    )
    in_process.use(monkeypatch)
    argv = ["kernel", *SMALL, "--backends=sdpa", "--lengths=16", "--batch_sizes=1", "--json"]
    (row,) = json.loads(run(argv)[1].splitlines()[-1])["rows"]
    assert row["proof"] == proof


# ----------------------------------------------------------------------------- a GPU's ten minutes


def on_gpu(*argv: str, mode: str = "train", backends: str = "manual tiled sdpa sdpa_math") -> Bench:
    """A run on an H200 that is not here."""
    config = load_config(["--device=cpu", "config/train_gpt2.py", *argv]).settings
    here = {"peak_tflops": 989.4, "peak_source": "datasheet", "peak_measured": False,
            "memory_limit": 140e9}  # fmt: skip
    return Bench(mode, config, "cuda", 50304, backends.split(), None, print, here)


def test_what_takes_too_long_is_left_out_unless_it_is_named():
    bench, T = on_gpu(), {"B": 1, "T": 8192, "window": None}
    assert "beyond 256 tokens" in plan.too_long(bench, "tiled", {})
    assert "as a compiled step" in plan.too_long(bench, "sdpa_math", {})
    assert plan.too_long(bench, "manual", {}) == "" == plan.too_long(bench, "sdpa", {})
    for name in ("manual", "tiled", "sdpa_math"):
        assert "name it in --backends, and --lengths" in plan.too_long(bench, name, T)
    assert plan.too_long(bench, "sdpa", T) == ""
    named = on_gpu("--backends=tiled", "--lengths=8192")
    assert plan.too_long(named, "tiled", T) == "" == plan.too_long(named, "tiled", {})
    # naming the backend alone asks for none of the default lengths
    assert plan.too_long(on_gpu("--backends=tiled"), "tiled", T)
    # what all are held against is never left out
    assert not plan.too_long(on_gpu("--block_size=8192", mode="converge"), "manual", {})
    decode = on_gpu(mode="decode")
    assert plan.too_long(decode, "tiled", {}) == "beside the point on a GPU; name it in --backends"
    named = on_gpu("--backends=tiled", mode="decode")
    for here, name in (
        (decode, "sdpa"),
        (named, "tiled"),
        (replace(decode, device="cpu"), "tiled"),
    ):
        assert plan.too_long(here, name, {}) == ""
    # the work is that of the keys in the window
    assert plan.work({"B": 2, "H": 3, "D": 5, "T": 8, "window": None}) == 2 * 3 * 5 * 8 * 8
    assert plan.work({"B": 2, "H": 3, "D": 5, "T": 8, "window": 4}) == 2 * 3 * 5 * 8 * 4
    assert plan.work({"B": 2, "H": 3, "D": 5, "T": 8, "window": 99}) == 2 * 3 * 5 * 8 * 8
    cpu = replace(bench, device="cpu", config=BenchConfig())
    assert plan.too_long(cpu, "tiled", {}) == ""


def test_a_call_that_takes_long_leaves_out_the_next_length():
    bench = on_gpu()
    ask = {"B": 1, "T": 8192, "H": 12, "D": 64, "window": None}

    def known(T: int, seconds: float) -> dict[Any, Outcome]:
        point = {**ask, "T": T}
        return {("flex", f"B1 T{T}"): Outcome(warm={"call_s": seconds, "point": point})}

    why = plan.too_long(bench, "flex", ask, known(4096, 0.6))
    assert why.startswith("a call would take about 2.4 s, by 0.6 s at B1 T4096")
    assert plan.too_long(bench, "flex", ask, known(4096, 0.4)) == ""
    assert plan.too_long(bench, "flex", ask, known(64, 0.01)) == ""  # launches, no work
    assert plan.too_long(bench, "sdpa", ask, known(4096, 0.6)) == ""
    assert plan.too_long(bench, "flex", {**ask, "window": 512}, known(4096, 9.0)) == ""
    near = known(4096, 1.5)  # with windows of 256 and 512 it is the same kernel
    near["flex", "B1 T4096"].warm["point"]["window"] = 256
    why = plan.too_long(bench, "flex", {**ask, "window": 512}, near)
    assert why.startswith("a call would take about 6 s, by 1.5 s")
    assert plan.too_long(bench, "flex", ask, near) == ""
    assert plan.too_long(bench, "flex", {**ask, "D": 32}, known(4096, 0.6)) == ""


@pytest.mark.parametrize("mode", modes.MODES)
def test_the_default_run_on_a_gpu_is_planned_for_less_than_ten_minutes(mode):
    everyone = "manual tiled sdpa sdpa_flash sdpa_efficient sdpa_cudnn sdpa_math flex triton"
    bench = replace(on_gpu(mode=mode, backends=everyone), config=BenchConfig())
    assert 60 < sum(plan.seconds(bench, modes.points(bench)).values()) < 600


def test_the_plan_of_a_run_on_a_gpu():
    everyone = "manual tiled sdpa sdpa_flash sdpa_efficient sdpa_cudnn sdpa_math flex triton"
    bench = on_gpu(backends=everyone)
    each = plan.seconds(bench, modes.points(bench))
    assert set(each) == set(everyone.split()) - {"tiled", "sdpa_math"}
    told = plan.told(bench, modes.points(bench))
    assert "reckoned, not measured" in told and "left out: sdpa_math, tiled" in told
    tokens = bench.config.train.batch_size * bench.config.train.gradient_accumulation_steps * 1024
    step = flops.flops_per_token(GPTConfig(1024, 50304, 12, 12, 768), 1024) * tokens / 989.4e12
    longer = on_gpu("--rounds=105", backends=everyone)
    more = plan.seconds(longer, [])["sdpa"] - plan.seconds(bench, [])["sdpa"]
    assert more == pytest.approx(100 * (max(1.0, step / plan.SHARE) + step / plan.SHARE), rel=0.01)
    heads = {"B": 1, "H": 12, "D": 64, "window": None}  # at 8192 manual is left out
    for name, at in (("manual", (2048,)), ("sdpa", (2048, 8192))):
        costs = [plan.seconds(bench, [{**heads, "T": T} for T in some])[name]
                 for some in ((2048, 8192), at)]  # fmt: skip
        assert costs[0] == costs[1]
    decode = on_gpu(mode="decode", backends="sdpa")
    assert len(modes.points(decode)) == 8 and plan.seconds(decode, modes.points(decode))
    refused = replace(bench, refused={"flex": ["no"]})
    assert "flex" not in plan.seconds(refused, [])


def test_the_seconds_that_are_reckoned():
    """Of a step of half a second at two fifths of the peak; by hand, term for term."""
    sizes = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=64", "--vocab_size=64"]
    base = ["--device=cpu", *sizes, "--batch_size=4", "--compile=False", "--rounds=4",
            "--seconds=2", "--warm_up_steps=3", "--sweep=False"]  # fmt: skip
    model = GPTConfig(64, 64, 2, 2, 32, bias=False)
    tflops = flops.flops_per_token(model, 64) * 4 * 64 / 0.5 / 0.4 / 1e12

    def seconds(mode: str, *argv: str, device: str = "cpu", points: Any = ()) -> dict[str, float]:
        config = load_config([*base, *argv], mode).settings
        here = {"peak_tflops": tflops, "peak_source": "given", "peak_measured": False}
        bench = Bench(mode, config, device, 64, ["sdpa", "flex"], None, print, here)
        bench.refused = {"flex": ["no"]}
        return pytest.approx(plan.seconds(bench, points))

    train = 5 + (4 + 3) * 0.5 + 4 * (2 + 0.5)  # a process, the warm-up, the rounds
    assert seconds("train") == {"sdpa": train}
    assert seconds("train", "--profile") == {"sdpa": train + 10 * 0.5}
    assert seconds("train", "--rival=hf") == dict.fromkeys(
        ("sdpa", "hf_eager", "hf_sdpa", "hf_flash_attention_2"), train
    )
    slow = 7 + 2 * 3 + (4 + 3) * 1.5 + 4 * (2 + 1.5)  # of three micro-batches, compiled
    argv = ("--gradient_accumulation_steps=3", "--compile=True")
    assert seconds("train", *argv, device="cuda:1") == {"sdpa": slow}
    searched = 5 + (4 + 3) * 3.0 + 60 + 4 * (3.0 + 3.0)
    assert seconds("train", "--batch_size=auto", "--slowest_step=3") == {"sdpa": searched}
    assert seconds("converge", "--steps=20", "--seeds=3") == {"sdpa": 3 * (5 + 20 * 0.5)}
    paths = seconds("converge", "--steps=20", "--paths=float32,bfloat16")
    assert paths == dict.fromkeys(("plain", "float32", "bfloat16"), 5 + 20 * 0.5)
    texts = [{"new_tokens": 10}, {"new_tokens": 30}]
    assert seconds("decode", points=texts) == {"sdpa": 5 + (1 + 4) * 40 * 0.006}
    point = {"B": 2, "T": 100, "H": 2, "D": 16, "window": None}
    call = 3 * 4 * 2 * 2 * 16 * (100 * 101 / 2) / (0.4 * tflops * 1e12)
    each = 1.5 + 4 * (2 / 5 + 2 * call)
    assert seconds("kernel", points=[point, point]) == {"sdpa": 5 + 2 * each}
    assert seconds("train", points=[point]) == {"sdpa": train + 5 + each}


def test_the_plan_in_a_sentence():
    bench = on_gpu("--minutes=7", "--sweep=False", backends="manual tiled sdpa flex")
    bench.refused = {"flex": ["no"]}
    each = plan.seconds(bench, [])
    longest = max(each.values())
    (name,) = [name for name, s in each.items() if s == longest][:1]
    assert plan.told(bench, []) == (
        f"plan: about {sum(each.values()) / 60:.1f} min for 2 (reckoned, not measured), "
        f"the longest {name} with {longest:.0f} s; compiling about 36 s each; left out: tiled; "
        "it ends after --minutes=7"
    )
    none = replace(bench, backends=["flex"], config=BenchConfig(sweep=False), device="cpu")
    assert plan.told(none, []) == "plan: about 0.0 min for 0 (reckoned, not measured)"


def test_a_call_is_timed_for_the_plan():
    from test_bench import job

    from bench.kernels import Kernels

    point = {"B": 2, "T": 24, "H": 4, "Hkv": 2, "D": 8, "window": None}
    answer = Kernels(job("kernel", "sdpa")).round({**point, "warm_up": True})
    assert answer["call_s"] > 0
    assert answer["point"] == {"B": 2, "T": 24, "H": 4, "D": 8, "window": None}


def test_who_is_late_to_warm_up_leaves_the_time_to_the_rounds(monkeypatch):
    """Else a deadline in the warm-up would leave nothing at all."""
    clock = [0.0]

    class Slow:
        setup_s = 1.0
        about: ClassVar[dict[str, Any]] = {}

        def __init__(self, *how: Any) -> None: ...

        def begin(self, job: Any) -> Slow:
            clock[0] += 1
            return self

        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            clock[0] += 30 if request.get("warm_up") else 1
            return {"ms": 1.0}

        def close(self) -> None: ...

    monkeypatch.setattr(process, "Worker", Slow)
    monkeypatch.setattr(process, "time", SimpleNamespace(
        monotonic=lambda: clock[0], perf_counter=lambda: clock[0]))  # fmt: skip
    jobs: dict[str, Any] = {name: {} for name in "abcd"}
    found, _ = measure(jobs, {"": {}}, 3, stop=Stop(deadline=110))
    assert [len(found[name, ""].rounds) for name in jobs] == [3, 3, 3, 0]
    assert found["d", ""].failure.kind == "stopped"  # type: ignore[union-attr]
    found, _ = measure({"a": {}}, {"": {}}, 3, stop=Stop(deadline=clock[0] + 20))
    assert not found["a", ""].rounds  # the first one is begun in any case


def test_processes_that_are_started_ahead_are_used_or_ended(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'ok': {'ms': 1.0, 'pid': os.getpid()}}), flush=True)\n"
    )
    made = []

    class Noted(process.Worker):
        def __init__(self, *how: Any) -> None:
            super().__init__(*how)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "Worker", Noted)
        how: dict[str, Any] = {"command": (sys.executable, str(script)), "ahead": True}
        skip = lambda name, point: "no" * (name == "b")  # noqa: E731
        found, _ = measure({"a": {}, "b": {}}, {"": {}}, 1, skip=skip, **how)
    assert len(made) == 2 and len(found["a", ""].rounds) == 1
    assert all(s.process.poll() is not None for s in made)
