"""bench/gpu_day.sh, tiny, on a CPU: every command of it still exists."""

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
    stages = "smoke tests train step levers"
    out = script("gpu_day.sh", tmp_path, STAGES=stages, SCALE="5", LIMIT="800")
    assert out == (tmp_path / "summary.txt").read_text(encoding="utf-8")
    assert sorted(re.findall("== (.+): exit code 0", out)) == sorted(stages.split())
    assert int(re.findall(r"== smoke: .*, (\d+) OK", out)[0]) > 20  # of three backends
    assert not re.search("WRONG|LOST|RUN exit code [^0]|other text", out)
    assert out.count("RUN exit code 0") == 7 and out.count("as dynamic") == 4
    with tarfile.open(tmp_path / "records.tgz") as packed:
        (name,) = (n for n in packed.getnames() if n.endswith("_train-b4/record.json"))
        opened = packed.extractfile(name)
        assert opened is not None
        record = json.load(opened)
    assert record["complete"] and [r["status"] for r in record["rows"][:2]] == ["ok", "ok"]
    assert verify(record) == []
