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
from bench.verify import verify

TINY = [*small("qualify"), "--new_tokens=4", "--prompts=8", "--timeout=60"]


def read(folder: Path) -> Any:
    return json.loads(next(folder.glob("*/record.json")).read_text(encoding="utf-8"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few cases of the matrix, short texts, short schedules, no processes."""
    in_process.use(monkeypatch)
    few = [c for c in matrix.in_order() if c.name in ("gqa", "64x17")]
    monkeypatch.setattr(matrix, "in_order", lambda: few)
    points = [{**p, "T": p["T"] // 32} for p in qualify.grid(False)[:3]]
    monkeypatch.setattr(qualify, "grid", lambda cuda: points)
    stage = replace(qualify.STAGES["converge"], options={"batch_size": 4, "steps": 10})
    monkeypatch.setitem(qualify.STAGES, "converge", stage)


@pytest.mark.slow
def test_all_stages_make_a_record_that_the_board_accepts(tmp_path, quick) -> None:
    code, out = run([*TINY, "--backends=sdpa,manual", f"--records_dir={tmp_path}"])
    made = read(tmp_path)
    assert code == 0 and made["complete"], out
    assert [(s["name"], s["status"]) for s in made["stages"]] == [
        (name, "done") for name in qualify.STAGES]
    assert verify(made) == []
    assert {p["mode"] for p in report.sections_of(made)} == set(report.MODES)
    (folder,) = tmp_path.iterdir()
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert all(f"## {title}" in page for title in ("Proof", "Training steps", "Generation"))


def test_a_kernel_is_refused_by_the_sizes_that_are_timed(tmp_path, quick) -> None:
    """The model's heads are of 16 channels, the grid's of 64 and 128."""
    code = LIMITED.format(name="x", most=9).replace("Caps(", "Caps(head_dim_multiple=64, ")
    (path := tmp_path / "x.py").write_text(code, encoding="utf-8")
    run([*TINY, f"--backends={path}", "--stages=3", f"--records_dir={tmp_path / 'records'}"])
    rows = read(tmp_path / "records")["stages"][0]["record"]["rows"]
    assert rows and {r["status"] for r in rows} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["minutes", "signal"])
def test_a_limit_or_a_signal_ends_it_and_leaves_what_there_is(
    how, tmp_path, quick, monkeypatch
) -> None:
    """The clock jumps past the limit, or SIGTERM comes, while the kernels are timed."""
    real, passed, stage = time.monotonic, [0.0], qualify.STAGES["kernels"]

    def measure(bench: Any, stop: Any, progress: Any) -> Any:
        if how == "signal":
            stop.signals.signal = 15
        else:
            passed[0] = 600.0
        return stage.measure(bench, stop, progress)

    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])
    monkeypatch.setitem(qualify.STAGES, "kernels", replace(stage, measure=measure))
    code, out = run([*TINY, "--backends=sdpa", f"--records_dir={tmp_path}", "--minutes=9"])
    made = read(tmp_path)
    assert not made["complete"] and out.startswith("INCOMPLETE") and verify(made) == []
    assert code == (143 if how == "signal" else 0)
    assert [s["name"] for s in made["stages"]] == list(qualify.STAGES)
    assert [s["status"] for s in made["stages"]] == ["done", "done", "cut", *["skipped"] * 3]
    assert all(how == "minutes" or "SIGTERM" in s["why"] for s in made["stages"][2:])
