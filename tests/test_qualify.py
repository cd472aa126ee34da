"""bench_mfu.py qualify: its stages and its time limit."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import in_process
import pytest
from test_bench import LIMITED, run, small

from attention.check import matrix
from bench import qualify, report
from bench.rounds import Run
from bench.verify import verify

TINY = [*small("qualify"), "--new_tokens=4", "--prompts=8", "--timeout=60"]


def read(folder: Path) -> dict[str, Any]:
    (made,) = folder.glob("*/record.json")
    return json.loads(made.read_text(encoding="utf-8"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process.use(monkeypatch)
    shorten(monkeypatch)


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few cases of the matrix, short schedules."""
    few = [c for c in matrix.in_order() if c.name in ("gqa", "64x17")]
    monkeypatch.setattr(matrix, "in_order", lambda: few)
    small = [{**p, "T": p["T"] // 32} for p in qualify.grid(False)[:3]]
    monkeypatch.setattr(qualify, "grid", lambda cuda: small)
    options = {"batch_size": 4, "steps": 10, "rival": ()}
    stage = replace(qualify.STAGES["converge"], options=options)
    monkeypatch.setitem(qualify.STAGES, "converge", stage)


@pytest.mark.slow
def test_all_stages_make_a_record_that_the_board_accepts(tmp_path, quick) -> None:
    code, out = run([*TINY, "--backends=sdpa,manual", f"--records_dir={tmp_path}"])
    made = read(tmp_path)
    assert code == 0 and made["complete"], out
    assert [(s["name"], s["status"]) for s in made["stages"]] == [
        (name, "done") for name in qualify.STAGES]
    (folder,) = tmp_path.iterdir()
    assert verify(made) == []
    assert {p["mode"] for p in report.sections_of(made)} == set(report.MODES)
    page = (folder / "README.md").read_text(encoding="utf-8")
    for title in ("## Proof", "## Training steps", "## Generation", "\n| sdpa ", "## Final losses"):
        assert title in page


def test_a_kernel_is_refused_by_the_sizes_that_are_timed(tmp_path, quick) -> None:
    """The model's heads are of 16 channels, the grid's of 64 and 128."""
    code = LIMITED.format(name="x", most=9).replace("Caps(", "Caps(head_dim_multiple=64, ")
    (path := tmp_path / "x.py").write_text(code, encoding="utf-8")
    run([*TINY, f"--backends={path}", "--stages=3", f"--records_dir={tmp_path / 'records'}"])
    rows = read(tmp_path / "records")["stages"][0]["record"]["rows"]
    assert rows and {r["status"] for r in rows} == {"ok"}


@pytest.mark.slow
def test_the_minutes_end_it(tmp_path, quick, monkeypatch) -> None:
    """The clock jumps past the limit while the kernels are timed."""
    real, passed = time.monotonic, [0.0]
    stage = qualify.STAGES["kernels"]

    def late(run: Run) -> Any:
        passed[0] = 600.0
        return stage.measure(run)

    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])
    monkeypatch.setitem(qualify.STAGES, "kernels", replace(stage, measure=late))
    _, out = run([*TINY, "--backends=sdpa", f"--records_dir={tmp_path}", "--minutes=9"])
    made = read(tmp_path)
    assert not made["complete"] and out.startswith("INCOMPLETE")
    assert [s["name"] for s in made["stages"]] == list(qualify.STAGES)
    assert [s["status"] for s in made["stages"]] == ["done", "done", "cut", *["skipped"] * 3]


@pytest.mark.slow
def test_a_signal_ends_it_and_leaves_what_there_is(tmp_path, quick, monkeypatch) -> None:
    stage = qualify.STAGES["proof"]

    def stopped(run: Run) -> Any:
        assert run.stop.signals
        stage.measure(run)
        run.stop.signals.signal = 15
        run.stop.check()

    monkeypatch.setitem(qualify.STAGES, "proof", replace(stage, measure=stopped))
    code, out = run([*TINY, "--backends=sdpa", f"--records_dir={tmp_path}", "--stages=2,4,5"])
    assert code == 143 and out.startswith("INCOMPLETE")
    stages = read(tmp_path)["stages"]
    assert [s["status"] for s in stages] == ["skipped"] * 3
    assert all("SIGTERM" in s["why"] for s in stages)
