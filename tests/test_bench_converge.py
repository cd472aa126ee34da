"""bench_mfu.py converge: the verdict, and the training paths next to the plain one."""

from __future__ import annotations

import statistics
from pathlib import Path

import in_process
import pytest
from test_bench import by_backend, last_line, run, small, write_tokens

from bench import candidates
from bench.verify import verify


def argv(tmp_path: Path, *more: str) -> list[str]:
    return [*small("converge"), "--dataset=tiny", f"--data_dir={write_tokens(tmp_path)}", "--json",
            "--learning_rate=0.01", *more]


@pytest.mark.slow
def test_the_training_paths_beside_a_plain_one(tmp_path, monkeypatch):
    in_process.use(monkeypatch)
    steps = 20
    more = [f"--steps={steps}", "--seeds=2", "--gradient_accumulation_steps=2"]
    code, out = run(argv(tmp_path, "--paths=float32,bfloat16,bfloat16-residual", *more))
    content = last_line(out)
    table = by_backend(content)
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
    noise, plain = statistics.stdev(table["plain"]["final_losses"]), table.pop("plain")
    assert table["float32"]["seed_noise"] == pytest.approx(noise)
    assert plain["verdict"] == "baseline" and table["float32"]["verdict"] == "ok"
    for row in table.values():  # not --tolerance
        far = abs(row["final_loss"] - plain["final_loss"]) > noise
        assert row["verdict"] == ("FAIL" if far else "ok")
    assert code == any(r["verdict"] == "FAIL" for r in table.values())
    assert all("did not converge" in why for why in verify(content))


def test_a_path_that_fails_the_verdict_is_exit_code_1(tmp_path, monkeypatch):
    in_process.use(monkeypatch)
    step = candidates.Ours.step
    monkeypatch.setattr(candidates.Ours, "step", lambda self, *args: 1.5 * step(self, *args))
    code, out = run(argv(tmp_path, "--paths=float32", "--steps=10"))
    content = last_line(out)
    plain, exact = content["rows"]
    assert code == 1 and (plain["verdict"], exact["verdict"]) == ("baseline", "FAIL")
    assert exact["time_saved"] == pytest.approx(1 - exact["ms"] / plain["ms"])
    assert any("float32" in answer and "1.00%" in answer for answer in content["answers"])
