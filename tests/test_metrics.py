"""What a run leaves behind to be read, and that no logger can end it."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import struct
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from core.metrics import Metrics, read
from core.settings import UserError

ON = {"project": "p", "name": "r", "config": {"n_layer": 3}}
LOSSES = [1 / 3, math.pi * 1e-9, 123456789.123456789, 2.0000000000000004]


def test_a_row_is_a_line_of_json_with_all_digits(tmp_path):
    folder = tmp_path / "out" / "new"
    m = Metrics(folder, 0)
    for i, loss in enumerate(LOSSES):
        m.log(iter=i, loss=loss, mem_bytes=2**40 + 1)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[i]) == {"iter": i, "loss": loss, "mem_bytes": 2**40 + 1}
    m.close()
    assert [r["loss"] for r in read(folder / "metrics.jsonl")] == LOSSES


def test_a_new_run_starts_anew_and_a_resumed_one_drops_what_it_will_do_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    m = Metrics(tmp_path, 0)
    m.log(iter=0, train_loss=4.2, val_loss=4.3)  # --eval_on_start
    for i in (1, 10, 20, 30):
        m.log(iter=i, loss=1 / i)
    m.log(iter=20, train_loss=1.0, val_loss=0.1 + 0.2)
    m.close()
    m = Metrics(tmp_path, 20)
    m.log(iter=30, loss=5.0)
    m.close()
    assert [r["iter"] for r in read(path)] == [0, 1, 10, 20, 20, 30]
    assert read(path)[4] == {"iter": 20, "train_loss": 1.0, "val_loss": 0.1 + 0.2}
    assert read(path)[5] == {"iter": 30, "loss": 5.0}
    Metrics(tmp_path, 0).close()
    assert path.read_text() == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_a_last_line_that_a_kill_cut_short_is_survived(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = json.dumps({"iter": 3, "loss": 0.5}) + "\n"
    for end in range(len(row)):
        path.write_text('{"iter": 1, "loss": 2.0}\n' + row[:end])
        whole = end >= len(row) - 1  # only the line feed is missing
        assert [r["iter"] for r in read(path)] == ([1, 3] if whole else [1])
    path.write_text('{"iter": 1, "loss": 2.0}\n{"iter": 2, "lo')
    m = Metrics(tmp_path, 5)
    m.log(iter=6, loss=1.0)
    m.close()
    assert [r["iter"] for r in read(path)] == [1, 6]
    assert read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    "damage", [b"[1]\n", b"null\n", b'{"x": 1}\n', b'{"iter": "a"}\n', b'{"iter": 2, \n', b"\xff\n"]
)
def test_a_file_of_somebody_else_is_refused_and_not_changed(damage, tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = b'{"iter": 1}\n' + damage + b'{"iter": 3}\n'
    path.write_bytes(text)
    with pytest.raises(UserError, match=f"{re.escape(str(path))}, line 2"):
        Metrics(tmp_path, 5)
    assert path.read_bytes() == text
    path.unlink()
    path.mkdir()
    for step in (0, 5):
        with pytest.raises(UserError, match=re.escape(str(path))):
            Metrics(tmp_path, step)


def size(png: bytes) -> tuple[int, int]:
    """Width and height in pixels (PNG specification, 11.2.2)."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and png[12:16] == b"IHDR"
    assert png.rstrip().endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize("rows", ["both", "training", "validation", "one"])
def test_the_picture(rows, tmp_path, caplog):
    m = Metrics(tmp_path, 0)
    for i in range(1, 200) if rows != "one" else (1,):
        if rows != "validation":
            m.log(iter=i, loss=4 / i**0.2)
        if rows != "training" and i % 50 == 0:
            m.log(iter=i, train_loss=4 / i**0.2, val_loss=4.2 / i**0.2)
    m.close()
    assert caplog.text == ""
    assert size((tmp_path / "loss.png").read_bytes()) == (960, 540)


def test_a_picture_that_fails_is_one_warning(tmp_path, caplog, monkeypatch):
    m = Metrics(tmp_path, 0)
    m.log(iter=1, loss=1.0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    m.close()
    assert [r.getMessage().split(" (")[0] for r in caplog.records] == ["loss.png was not finished"]


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_folder_that_vanishes_is_made_again_with_every_row(how, tmp_path, caplog):
    m = Metrics(tmp_path / "out", 0)
    for i in range(1, 5):
        m.log(iter=i, loss=float(i))
        if i == 2:
            folder = (tmp_path / "out").rename(tmp_path / "elsewhere")
            shutil.rmtree(folder) if how == "deleted" else None
    m.close()
    assert [r["iter"] for r in read(m.path)] == [1, 2, 3, 4]
    (line,) = caplog.messages
    assert str(m.path) in line


def test_a_full_disk_does_not_end_the_run(tmp_path, caplog):
    m = Metrics(tmp_path, 0)
    m.log(iter=1, loss=1.0)
    real = m.file

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    m.file = SimpleNamespace(write=real.write, flush=full)  # type: ignore[assignment]
    for i in (2, 3):
        m.log(iter=i, loss=float(i))
        assert len(caplog.records) == 1 and "No space left on device" in caplog.text
    m.file = real
    m.log(iter=4, loss=4.0)
    m.close()
    assert [r["iter"] for r in read(m.path)] == [1, 2, 3, 4]


# --- wandb ---


class FakeWandb(types.ModuleType):
    """A wandb whose functions raise where they are told to."""

    def __init__(self, *failing: str) -> None:
        super().__init__("wandb")
        self.failing, self.calls = failing, []

    def _called(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.failing:
            raise Exception(f"wandb: {name} failed")  # its own errors are no RuntimeErrors

    def Settings(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    def init(self, **kwargs: Any) -> FakeWandb:
        self._called("init", kwargs, os.environ.get("WANDB_MODE"))
        return self

    def log(self, row: dict[str, Any], step: int) -> None:
        self._called("log", row, step)

    def finish(self) -> None:
        self._called("finish")


@pytest.fixture
def reachable(monkeypatch):
    """WANDB_MODE is not set."""
    monkeypatch.setenv("WANDB_MODE", "x")  # so that monkeypatch puts it back, whatever a test does
    monkeypatch.delenv("WANDB_MODE")


@pytest.mark.parametrize("failing", ["nothing", "import", "init", "log", "finish"])
def test_wandb_never_ends_a_run(failing, tmp_path, monkeypatch, caplog, reachable):
    fake = FakeWandb(failing)
    monkeypatch.setitem(sys.modules, "wandb", None if failing == "import" else fake)
    m = Metrics(tmp_path, 0, ON)
    for i in (1, 2, 3):
        m.log(iter=i, loss=1.0)
    m.close()
    assert [r["iter"] for r in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "loss.png").exists()
    assert len(caplog.records) == (failing != "nothing")
    assert failing in ("nothing", "import") or f"wandb: {failing} failed" in caplog.text
    if failing in ("import", "init"):
        assert caplog.messages[0].startswith("wandb is off (")
    full = ["init", "log", "log", "log", "finish"]
    calls = {"import": [], "init": full[:1], "log": full[:2]}
    assert [c[0] for c in fake.calls] == calls.get(failing, full)
    if failing == "nothing":
        kwargs, mode = fake.calls[0][1:]
        assert mode is None and kwargs["config"] == ON["config"]
        assert (kwargs["project"], kwargs["name"], kwargs["dir"]) == ("p", "r", tmp_path)
        assert fake.calls[2] == ("log", {"iter": 2, "loss": 1.0}, 2)
