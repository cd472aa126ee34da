"""bench_mfu.py qualify: its stages and its time limit."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path

import pytest
from benches import kernel, measured, small
from test_records import sealed

from bench.verify import verify

TINY = [*small("qualify"), "--new_tokens=4", "--prompts=8", "--timeout=60", "--slowest_step=0.2"]
STAGES = ["machine", "proof", "kernels", "training", "decode", "converge"]


@pytest.mark.slow
def test_all_stages_make_a_record_that_the_board_accepts(tmp_path: Path) -> None:
    argv = [*TINY, "--backends=sdpa,manual", f"--records_dir={tmp_path}", "--minutes=1"]
    made = measured(*argv)
    stages = {s["name"]: s for s in made["stages"]}
    assert [*stages] == STAGES and {s["status"] for s in made["stages"]} <= {"done", "cut"}
    assert made["complete"] == all(s["status"] == "done" for s in made["stages"])
    for r in stages["proof"]["record"]["rows"]:
        assert r["right"] > 9 and r["canary"] and not r["wrong"]
    for name in ("kernels", "training", "decode"):
        assert any(r["status"] == "ok" for r in stages[name]["record"]["rows"]), name
    (page,) = tmp_path.glob("*/README.md")
    text = page.read_text(encoding="utf-8")
    assert all(f"## {title}" in text for title in ("Proof", "Training steps", "Generation"))
    assert verify(made) == []
    for lie in ([], [*made["answers"], "Proof: all is well."]):
        assert verify(sealed(made | {"answers": lie}))
    edited = copy.deepcopy(made)
    edited["stages"][3]["record"]["rows"][0]["mfu"] = 0.9
    assert any("mfu is 0.9" in why for why in verify(sealed(edited)))


def test_a_kernel_is_refused_by_the_sizes_that_are_timed(tmp_path: Path) -> None:
    """The model's heads are of 16 channels, the grid's of 64 and 128; SIGTERM ends it there."""
    log = f"Path({str(tmp_path / 'x')!r})"
    does = f"if T > 999 and not {log}.exists(): {log}.touch(); os.kill({os.getpid()}, 15)"
    own = kernel(tmp_path, "own", does, caps=", head_dim_multiple=64")
    made = measured(*TINY, f"--backends={own}", "--stages=3,4", f"--records_dir={tmp_path / 'r'}",
                    code=128 + signal.SIGTERM)
    timed, later = made["stages"]
    first, *others = timed["record"]["rows"]
    assert first["status"] in ("ok", "stopped") and {r["status"] for r in others} == {"stopped"}
    assert (timed["status"], later["status"]) == ("cut", "skipped") and not made["complete"]
    assert "SIGTERM" in timed["why"] and "SIGTERM" in later["why"] and verify(made) == []


@pytest.mark.slow
def test_a_kernel_that_is_wrong_or_breaks_its_process_fails_the_proof(tmp_path: Path) -> None:
    """With grouped heads it ends its process; a new one goes on."""
    own = kernel(tmp_path, "own", "if spec.n_kv_head < spec.n_head: os._exit(3)")
    argv = [*TINY, f"--backends={own}", "--stages=2", f"--records_dir={tmp_path / 'r'}"]
    made = measured(*argv, "--minutes=0.5", code=1)
    (r,) = made["stages"][0]["record"]["rows"]
    assert r["right"] > 5 and r["wrong"] == len(r["failures"]) > 0
    assert all("exit code 3" in f["why"] for f in r["failures"])
    assert any("own.py is wrong in" in text for text in made["answers"])
