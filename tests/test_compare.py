"""python -m bench.compare: finished runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_train import enter, make_data, read_rows, run

from bench.compare import main, reached


@pytest.mark.slow
def test_runs_by_their_settings(tmp_path: Path) -> None:
    data, ends = make_data(tmp_path / "data"), []
    for name, how in {"a": {}, "b": {"seed": 1}, "c": {"optimizer": "muon"}}.items():
        r = run(data, tmp_path / name, eval_interval=2, **how)
        ends.append(r.evaluations()[8][1])
    names = [str(tmp_path / name) for name in "abc"]
    code, out, _ = enter(main, names)
    *_, adamw, muon = (" ".join(line.split()) for line in out.splitlines())
    assert adamw.split(" | ")[5] != "never"  # its own loss, which one seed alone may not reach
    assert code == 0 and "optimizer=adamw | 2 | 8" in adamw and "optimizer=muon | 1 | 8" in muon
    both = ends[:2]
    assert f"{sum(both) / 2:.4f} ({min(both):.4f} to {max(both):.4f})" in adamw
    assert f"{ends[2]:.4f} ({ends[2]:.4f} to {ends[2]:.4f})" in muon
    assert enter(main, [])[0] == enter(main, [""])[0] == 2
    assert enter(main, [*names, names[0]])[1] == out  # once
    rows = read_rows(log := tmp_path / "b" / "metrics.jsonl")
    log.write_text("".join(json.dumps(row) + "\n" for row in rows if row["iter"] < 8), "utf-8")
    code, _, err = enter(main, names)  # a run that was stopped
    assert code == 2 and "step 6 of 8" in err and names[1] in err


def test_when_a_loss_is_reached() -> None:
    curve = np.array([[10, 1.0, 4.0], [20, 3.0, 2.0], [30, 5.0, 3.0], [40, 7.0, 2.0]]).T
    for loss, want in ((2.5, [17.5, 2.5]), (2.0, [20, 3.0]), (5.0, [10, 1.0]), (1.9, [np.nan] * 2)):
        assert reached(curve, loss) == pytest.approx(want, nan_ok=True)
