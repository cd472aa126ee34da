"""bench_mfu.py converge: the verdict, and the training paths next to the plain one."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import in_process
import pytest
from test_bench import SMALL, last_line, run, write_tokens

from bench import candidates, rows


def argv(tmp_path: Path, *more: str) -> list[str]:
    return ["converge", *SMALL, "--dataset=tiny", f"--data_dir={write_tokens(tmp_path)}", "--json",
            "--learning_rate=0.01", *more]


def test_the_training_paths_beside_a_plain_one(tmp_path, monkeypatch):
    in_process.use(monkeypatch)
    steps = 20
    more = [f"--steps={steps}", "--seeds=2", "--record=p", f"--records_dir={tmp_path}"]
    code, out = run(argv(tmp_path, "--paths=float32,bfloat16,bfloat16-residual", *more))
    content = last_line(out)
    table = {r["backend"]: r for r in content["rows"]}
    assert list(table) == ["plain", "float32", "bfloat16", "bfloat16-residual"]
    assert all(r["status"] == "ok" and len(r["losses"]) == steps for r in table.values())
    base, exact, half = (table[n]["losses"] for n in ("plain", "float32", "bfloat16-residual"))
    # float32 differs by the order of sums alone, bfloat16 by its rounding: both really ran
    assert exact == pytest.approx(base, abs=2e-4) and base[-1] < base[0] - 0.1
    assert half == pytest.approx(base, abs=0.1) and half != pytest.approx(base, abs=2e-4)
    assert table["bfloat16"]["losses"] != half
    for row in table.values():
        assert len(row["rounds"]) == 20 and len(row["final_losses"]) == 2
        assert row["final_losses"][0] == pytest.approx(sum(row["losses"][-2:]) / 2)
        assert row["final_loss"] == pytest.approx(sum(row["final_losses"]) / 2)
    first, second = table["plain"]["final_losses"]
    noise = abs(first - second) / 2**0.5  # the standard deviation of two
    assert table["float32"]["seed_noise"] == pytest.approx(noise)
    assert table["plain"]["verdict"] == "baseline" and table["float32"]["verdict"] == "ok"
    failed = any(r["verdict"] == "FAIL" for r in table.values())
    assert code == int(failed)
    (folder,) = tmp_path.glob("*_cpu_p")
    assert json.loads((folder / "record.json").read_text(encoding="utf-8")) == content
    assert "as far as the seeds scatter" in out


def judged(base: list[float], other: list[float], **how: Any) -> tuple[str, bool]:
    """The verdict on runs that end at these losses, a seed each."""

    def row(name: str, finals: list[float]) -> dict[str, Any]:
        losses = [x for final in finals for x in [5.0] * 18 + [final] * 2]
        rounds = [{"ms": 2.0, "losses": losses[i : i + 4]} for i in range(0, len(losses), 4)]
        return {"backend": name, "status": "ok", "ms": 2.0, "rounds": rounds}

    table = [row("plain", base), row("fast", other)]
    passed = rows.of_convergence(table, "plain", seeds=len(base), **how)
    if len(base) > 1:  # the noise that all are held against
        assert [r["seed_noise"] for r in table] == pytest.approx([statistics.stdev(base)] * 2)
    return table[1]["verdict"], passed


def test_the_verdict_of_several_seeds_is_their_scatter():
    base = [2.00, 2.02, 2.04]  # their standard deviation is 0.02
    assert judged(base, [2.01, 2.01, 2.05], tolerance=1e-9) == ("ok", True)
    assert judged(base, [2.01, 2.03, 2.079], tolerance=1e-9) == ("ok", True)  # by 0.0197
    assert judged(base, [2.01, 2.03, 2.081], tolerance=1) == ("FAIL", False)  # by 0.0203
    # a lower curve does not pass either
    assert judged(base, [1.97, 1.99, 2.01], tolerance=1) == ("FAIL", False)


def test_the_verdict_of_one_seed_is_the_tolerance_both_ways():
    assert judged([2.0], [2.019], tolerance=0.01) == ("ok", True)
    assert judged([2.0], [2.021], tolerance=0.01) == ("FAIL", False)
    assert judged([2.0], [1.979], tolerance=0.01) == ("FAIL", False)


def test_a_path_that_fails_the_verdict_is_exit_code_1(tmp_path, monkeypatch):
    in_process.use(monkeypatch)

    step = candidates.Ours.step
    monkeypatch.setattr(candidates.Ours, "step", lambda self, *args: 1.5 * step(self, *args))
    code, out = run(argv(tmp_path, "--paths=float32", "--steps=10"))
    assert code == 1 and "FAIL: float32 ended further than 1.00% from plain." in out
