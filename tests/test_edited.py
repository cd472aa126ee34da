"""An edited JSON file of a dataset or checkpoint: the same result, or one error that names it."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_train import make_data, refusal, run, run_line

import checkpoint
import data
from core.settings import UserError

JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(
    ["\0", "a\0b", "\udc80", 10**40, [], {}, [1], ["a"], {"a": 1}, [[]]])  # fmt: skip


def places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = content.items() if isinstance(content, dict) else []
    if isinstance(content, list):
        inside = [*enumerate(content)][:2]
    for key, value in inside:
        yield (*at, key)
        yield from places(value, (*at, key))


def edit(path: Path, good: str, draw: Any) -> None:
    content = json.loads(good)
    slow = "compile", "deterministic"  # the latter for all of the process
    found = [at for at in places(content) if at[-1] not in slow]
    *before, key = draw.draw(st.sampled_from(found))
    inner = content
    for step in before:
        inner = inner[step]
    if draw.draw(st.booleans() if isinstance(inner, dict) else st.just(True)):
        inner[key] = draw.draw(JSON)
    else:
        del inner[key]
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = make_data(tmp_path_factory.mktemp("room"))
    shutil.copytree(room / "tiny", room / "raw")
    (room / "raw" / "meta.json").unlink()
    how = data.PrepareConfig(source=str(room / "raw"), out_dir=str(room / "shards"))
    data.prepare("shards", how)
    assert run(room, room / "run", max_iters=1, eval_interval=1).code == 0
    return room


@pytest.mark.parametrize("name", ["tiny", "shards"])
@given(draw=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_dataset(name: str, room: Path, draw: Any) -> None:
    path, folder = room / name / "meta.json", room / name
    good = path.read_text()
    want = data.load(folder, "val", 8, 60_000)[:]
    edit(path, good, draw)
    try:
        meta = data.read_meta(folder)
        assert np.array_equal(data.load(folder, "val", 8, 60_000)[:], want)
        data.bits_per_byte(meta, 1.0)
        data.from_meta(meta["tokenizer"]).to_json()
    except UserError as e:
        assert not any(unicodedata.category(c) == "Cc" for c in str(e))
    finally:
        path.write_text(good)


@pytest.mark.parametrize("name", ["settings.json", "train_state.json", "checksums.json"])
@given(draw=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_checkpoint(name: str, room: Path, draw: Any) -> None:
    path = checkpoint.latest(room / "run") / name
    good = path.read_text()
    edit(path, good, draw)
    r = run_line(["--init_from=resume", f"--out_dir={room / 'run'}", "--eval_only=True"], room)
    path.write_text(good)
    assert r.code == 0 or refusal(r)
