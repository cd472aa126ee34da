"""bench/gpu_day.sh and gpu_levers.sh, tiny, on a CPU: every command of theirs still exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from checkout import ROOT

from bench.record import verify

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("timeout"), reason="no GNU coreutils"),
]


def script(name: str, folder: Path, **env: str) -> str:
    own = {"PY": sys.executable, "TINY": "1", "OUT": str(folder), "W": str(folder / "work")}
    done = subprocess.run(
        ["bash", str(ROOT / "bench" / name)], cwd=folder, env={**os.environ, **own, **env},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_the_stages_of_a_day(tmp_path: Path) -> None:
    stages = "smoke train step"
    out = script("gpu_day.sh", tmp_path, STAGES=stages, SCALE="5", LIMIT="800")
    assert out == (tmp_path / "summary.txt").read_text(encoding="utf-8")
    assert sorted(re.findall("== (.+): exit code 0", out)) == sorted(stages.split())
    assert "s, 6 OK" in out  # of smoke: three backends, two cases
    assert not re.search("WRONG|LOST|RUN exit code [^0]|other text", out)
    assert out.count("RUN exit code 0") == 6 and out.count("as dynamic") == 4
    with tarfile.open(tmp_path / "records.tgz") as packed:
        (name,) = (n for n in packed.getnames() if n.endswith("_train-b4/record.json"))
        opened = packed.extractfile(name)
        assert opened is not None
        record = json.load(opened)
    assert record["complete"] and [r["status"] for r in record["rows"][:2]] == ["ok", "ok"]
    assert verify(record) == []


def test_the_levers(tmp_path: Path) -> None:
    (tmp_path / "ce.py").write_text(
        "import torch.nn.functional as F\n"
        "def loss(x, weight, targets, *_):\n"
        "    return 2 * F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=-1)\n"
    )
    names = ["base", "residual", "full logits", "one chunk", "ce"]
    out = script("gpu_levers.sh", tmp_path, VARIANTS=",".join(names[1:]), LIMIT="400",
                 CE=str(tmp_path / "ce.py"))
    assert out.count("TFLOP/s cublas") == 10 and "kernels of a step of base" in out
    lines = re.findall(r"^(\S.*?)  +[\d.]+ ms .*loss (\S+), .* rounds(?: [\d.]+){4}$", out, re.M)
    found = dict(lines)
    assert [*found] == names
    assert all(abs(float(found[name])) < 1e-3 for name in names[:-1])
    assert float(found["ce"]) > 1  # it was called
