"""bench_mfu.py qualify: its stages and its time limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benches import kernel, measured, small
from test_records import sealed

from bench.record import verify

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
    assert verify(sealed(made | {"answers": [*made["answers"], "Proof: all is well."]}))


def test_a_signal_ends_it_and_leaves_what_there_is(tmp_path: Path) -> None:
    log = f"Path({str(tmp_path / 'x')!r})"
    does = f"if T > 999 and not {log}.exists(): {log}.touch(); os.kill({os.getpid()}, 15)"
    own, folder = kernel(tmp_path, "own", does), f"--records_dir={tmp_path / 'r'}"
    made = measured(*TINY, f"--backends={own}", "--stages=1,3,4", folder, code=143)
    assert [s["status"] for s in made["stages"]] == ["done", "cut", "skipped"]
    assert all("SIGTERM" in s["why"] for s in made["stages"][1:]) and not made["complete"]
    rows = made["stages"][1]["record"]["rows"]
    assert {r["point"]["T"] for r in rows} >= {512, 16384} and verify(made) == []
    assert {r["status"] for r in rows[1:]} == {"stopped"}


@pytest.mark.slow
def test_a_kernel_that_is_wrong_or_breaks_its_process_fails_the_proof(tmp_path: Path) -> None:
    """With grouped heads it ends its process; a new one goes on, with the run's switches."""
    own = kernel(tmp_path, "own", "if spec.n_kv_head < spec.n_head: os._exit(3)\n"
                                  "    assert torch.are_deterministic_algorithms_enabled()")
    argv = [*TINY, "--deterministic", "--stages=2", f"--backends={own}"]
    argv += [f"--records_dir={tmp_path / 'r'}"]
    made = measured(*argv, "--minutes=0.5", code=1)
    (r,) = made["stages"][0]["record"]["rows"]
    assert r["right"] > 5 and r["wrong"] == len(r["failures"]) > 0
    assert all("exit code 3" in f["why"] for f in r["failures"])
    assert any("own.py is wrong in" in text for text in made["answers"])
