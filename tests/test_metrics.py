"""A run's logs; no logger ends it."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
import struct
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from core.metrics import Metrics, read
from core.settings import UserError

ON = {"project": "p", "name": "r", "config": {"n_layer": 3}}


def log(m: Metrics, *steps: int) -> Metrics:
    for i in steps:
        m.log(iter=i, loss=float(i))
    return m


def steps(folder: Path) -> list[int]:
    return [row["iter"] for row in read(folder / "metrics.jsonl")]


def test_rows_have_all_digits_and_a_resumed_run_drops_what_it_will_do_again(tmp_path):
    path, loss = tmp_path / "out" / "metrics.jsonl", 2.0000000000000004
    m = Metrics(tmp_path / "out", 0)
    m.log(iter=0, train_loss=4.2, val_loss=math.pi * 1e-9)  # --eval_on_start
    log(m, 1, 10)
    m.log(iter=20, loss=loss, mem_bytes=2**40 + 1)
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == loss  # at once
    m.log(iter=20, train_loss=1.0, val_loss=0.1 + 0.2)
    log(m, 21, 30).close()
    m = Metrics(tmp_path / "out", 20)
    m.log(iter=21, loss=5.0)
    m.close()
    assert steps(tmp_path / "out") == [0, 1, 10, 20, 20, 21]
    assert read(path)[0]["val_loss"] == math.pi * 1e-9
    assert read(path)[3:] == [{"iter": 20, "loss": loss, "mem_bytes": 2**40 + 1},
                              {"iter": 20, "train_loss": 1.0, "val_loss": 0.1 + 0.2},
                              {"iter": 21, "loss": 5.0}]
    Metrics(tmp_path / "out", 0).close()
    assert path.read_text() == "" and read(tmp_path / "none.jsonl") == []


def test_a_last_line_that_a_kill_cut_short_is_survived(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = json.dumps({"iter": 3, "loss": 0.5}) + "\n"
    for end in range(len(row)):
        path.write_text('{"iter": 1, "loss": 2.0}\n' + row[:end])
        whole = end >= len(row) - 1  # only the line feed is missing
        assert steps(tmp_path) == ([1, 3] if whole else [1])
    path.write_text('{"iter": 1, "loss": 2.0}\n{"iter": 2, "lo')
    log(Metrics(tmp_path, 5), 6).close()
    assert steps(tmp_path) == [1, 6]


def test_a_file_of_somebody_else_is_refused_and_not_changed(tmp_path):
    path, named = tmp_path / "metrics.jsonl", re.escape(str(tmp_path / "metrics.jsonl"))
    for damage in (b"[1]", b"null", b'{"x": 1}', b'{"iter": "a"}', b'{"iter": 2, ', b"\xff"):
        path.write_bytes(text := b'{"iter": 1}\n' + damage + b'\n{"iter": 3}\n')
        with pytest.raises(UserError, match=f"{named}, line 2"):
            Metrics(tmp_path, 5)
        assert path.read_bytes() == text
    path.unlink()
    path.mkdir()
    for step in (0, 5):
        with pytest.raises(UserError, match=named):
            Metrics(tmp_path, step)


@pytest.mark.parametrize("rows", [{"loss"}, {"val_loss"}, {"loss", "val_loss"}, {}])
def test_the_picture(rows, tmp_path, caplog, monkeypatch):
    """PNG specification, 11.2.2. A failing one is a warning."""
    m = Metrics(tmp_path / "$5 and $x^", 0)  # no formula
    for i in range(1, 99, 7):
        m.log(iter=i, **{key: 4 / i**0.2 for key in rows})
    m.close()
    png = m.path.with_name("loss.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and png[12:16] == b"IHDR"
    assert png.rstrip().endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", png[16:24]) == (960, 540) and not caplog.records
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    log(Metrics(tmp_path, 1), 2).close()
    assert len(caplog.records) == 1 and "loss.png" in caplog.text


@pytest.mark.parametrize("how", ["deleted", "moved", "full disk"])
def test_a_folder_that_vanishes_and_a_full_disk_lose_no_row(how, tmp_path, caplog):
    out, (soft, hard) = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    m = log(Metrics(out, 0), 1, 2)
    if how == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (m.path.stat().st_size + 5, hard))
    else:
        folder = out.rename(tmp_path / "elsewhere")
        shutil.rmtree(folder) if how == "deleted" else None
    try:
        log(m, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log(m, 4).close()
    assert steps(out) == [1, 2, 3, 4]
    (line,) = caplog.messages
    assert ("File too large" if how == "full disk" else str(m.path)) in line


def fake_wandb(failing: str = "nothing") -> Mock:
    fake = Mock(id=None)
    fake.init.return_value = fake
    getattr(fake, failing).side_effect = Exception(f"wandb: {failing} failed")
    return fake


@pytest.mark.parametrize("failing", ["nothing", "import", "init", "log", "finish"])
def test_wandb_never_ends_a_run(failing, tmp_path, monkeypatch, caplog):
    fake = fake_wandb(failing)
    monkeypatch.setitem(sys.modules, "wandb", None if failing == "import" else fake)
    log(Metrics(tmp_path, 0, ON), 1, 2, 3).close()
    assert steps(tmp_path) == [1, 2, 3] and (tmp_path / "loss.png").exists()
    assert len(caplog.records) == (failing != "nothing")
    assert failing in ("nothing", "import") or f"wandb: {failing} failed" in caplog.text
    want = {"import": [0, 0, 0], "init": [1, 0, 0], "log": [1, 1, 0]}.get(failing, [1, 3, 1])
    assert [m.call_count for m in (fake.init, fake.log, fake.finish)] == want
    if failing == "nothing":
        assert (ON | {"dir": tmp_path}).items() <= fake.init.call_args.kwargs.items()
        assert fake.log.call_args_list[1] == call({"iter": 2, "loss": 2.0}, step=2)
