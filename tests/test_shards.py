"""Other programs' files: .bin shards; nanoGPT's data folders and ckpt.pt."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_checkpoint import Bomb
from test_train import TEXT, Run, enter, nanogpt_file, refusal, run, run_line
from test_train import TINY as TINY_RUN

import checkpoint
import data
import sample
from core.settings import UserError
from data.__main__ import main
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("remembered_probes")


def write(path: Path, tokens: Any, header: bool = True) -> None:
    """As llm.c, or nanoGPT."""
    head = np.array([20240520, 1, len(tokens), *[0] * 253] * header, "<i4")
    path.write_bytes(head.tobytes() + np.asarray(tokens, "<u2").tobytes())


def prepare(source: Path, out: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    return enter(main, ["shards", f"--source={source}", f"--out_dir={out}"])


def refused(source: Path, out: Path) -> str:
    return refusal(Run(*prepare(source, out), []))


@pytest.mark.parametrize("header", [True, False])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 8))
@settings(max_examples=15, deadline=None)
def test_files_are_read_as_one(tmp_path_factory: Any, header: bool, sizes: Any, T: int) -> None:
    """Also over their borders."""
    folder = tmp_path_factory.mktemp("shards")
    tokens = np.arange(sum(sizes) + T + 1, dtype=np.uint16)
    parts = np.split(tokens, np.cumsum(sizes))
    for i, part in enumerate(parts):
        write(folder / f"x_{i:03}.bin", part, header)
    write(folder / "x_val.bin", tokens[: T + 1], header)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}
    assert prepare(folder / "x_*.bin", folder / "out")[0] == 0
    found = data.load(folder / "out", "train", T, 50257)
    assert len(found) == len(tokens)
    for start in range(len(tokens)):
        for stop in (start + 1, start + T + 1, len(tokens)):
            assert np.array_equal(found[start:stop], tokens[start:stop])
    assert [p.name for p in (folder / "out").iterdir()] == ["meta.json"]
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before}


@pytest.fixture
def fw(tmp_path: Path) -> Path:
    """The dataset "fw" of three shards."""
    draw = np.random.default_rng(0)
    for name in ("fw_val_000", "fw_train_001", "fw_train_002"):
        write(tmp_path / f"{name}.bin", draw.integers(50257, size=600))
    assert prepare(tmp_path / "fw_*.bin", tmp_path / "fw")[0] == 0
    return tmp_path


@pytest.mark.parametrize("change", ["longer", "as long", "gone"])
@pytest.mark.parametrize("name", ["fw_train_002.bin", "fw_val_000.bin"])
def test_a_file_that_changed_since_is_named(fw: Path, change: str, name: str) -> None:
    batches = data.Batches(data.load(fw / "fw", "train", 16, 50257), 16, 40, 0)
    path, content = fw / name, (fw / name).read_bytes()
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(content + b"ab" if change == "longer" else content[:-2] + b"ab")
        os.utime(path, ns=(0, 0))
    assert name in refusal(run(fw, fw / "out", dataset="fw", vocab_size=50257))
    if "train" in name:
        with pytest.raises(UserError, match=name):
            [*batches.prefetch(0, 3)]
    made_again = prepare(fw / "fw_*.bin", fw / "fw")[0] == 0
    assert made_again == (change == "as long" or (change, name[3]) == ("gone", "t"))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "another version": lambda x: x[:4] + b"\2" + x[5:], "another magic": lambda x: b"abcd" + x[4:],
    "another number of tokens": lambda x: x[:8] + b"\1" + x[9:], "no tokens": lambda x: x[:1024],
    "half a header": lambda x: x[:800], "a token less": lambda x: x[:-2],
    "half a token": lambda x: x[:-1], "nothing": lambda x: b"",
    "half a token without a header": lambda x: x[1024:-1],
}


def test_a_damaged_or_missing_file_is_named(fw: Path) -> None:
    good = {path: path.read_bytes() for path in sorted(fw.glob("fw_*.bin"))}
    first = next(iter(good))
    for name, damage in DAMAGES.items():
        for path, content in good.items():
            path.write_bytes(damage(content))
            assert path.name in refused(fw / "fw_*.bin", fw / "other"), name
            path.write_bytes(content)
    for path, content in good.items():
        path.write_bytes(content[1024 * (path == first) :])  # one without a header
    assert first.name in refused(fw / "fw_*.bin", fw / "other")
    first.write_bytes(good[first])
    for target in ("nothing", "fw_train_009.bin"):  # the latter is itself
        (link := fw / "fw_train_009.bin").symlink_to(fw / target)
        assert link.name in refused(fw / "fw_*.bin", fw / "other")
        link.unlink()
    for source, named in (("no_*.bin", "no_"), ("fw_val*.bin", "train"), ("fw_train*.bin", "val")):
        assert named in refused(fw / source, fw / "other")
    assert not (fw / "other").exists()


def test_new_files_are_taken_in_and_their_tokens_checked(fw: Path) -> None:
    write(fw / "fw_train_003.bin", [*range(99), 60000])
    assert prepare(fw / "fw_*.bin", fw / "fw")[0] == 0
    assert data.read_meta(fw / "fw")["tokens"]["train"] == 1300
    with pytest.raises(UserError, match="60000"):
        data.load(fw / "fw", "train", 16, 50304)


def test_a_token_outside_the_vocabulary_is_found_when_it_is_read(tmp_path: Path) -> None:
    """Large splits are not checked whole before."""
    i = 2**17
    for name in ("train.bin", "val.bin"):
        tokens = np.memmap(tmp_path / name, "<u2", "w+", shape=2**26)
        tokens[:512] = 1  # not the zeros of a header
        tokens[i] = 60000
    assert prepare(tmp_path / "*.bin", tmp_path / "made")[0] == 0
    for folder in (tmp_path, tmp_path / "made"):  # nanoGPT's, and shards
        found = data.load(folder, "train", 16, 50304)
        with pytest.raises(UserError, match=f"token {i:,} is 60000"):
            found[9 : i + 9]


# --- nanoGPT's ---


@pytest.fixture
def chars(tmp_path: Path) -> Path:
    """The files of nanoGPT's data/shakespeare_char/prepare.py."""
    (folder := tmp_path / "data" / "chars").mkdir(parents=True)
    itos = dict(enumerate(sorted(set(TEXT))))
    stoi, cut = {c: i for i, c in itos.items()}, int(len(TEXT) * 0.9)
    for name, part in (("train", TEXT[:cut]), ("val", TEXT[cut:])):
        np.array([stoi[c] for c in part], dtype=np.uint16).tofile(folder / f"{name}.bin")
    meta = {"vocab_size": len(itos), "itos": itos, "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def checkpoint_of(path: Path, dataset: str) -> Path:
    torch.manual_seed(0)
    nanogpt_file(path, GPT(GPTConfig(24, len(set(TEXT)), 1, 2, 16, bias=False)))
    torch.save({**torch.load(path), "config": {"dataset": dataset}}, path)
    return path


def test_a_run_goes_on_in_a_folder_of_characters(chars, tmp_path, monkeypatch, caplog):
    before = {f.name: f.read_bytes() for f in chars.iterdir()}
    path = checkpoint_of(tmp_path / "ckpt.pt", "chars")
    monkeypatch.chdir(tmp_path)
    knobs = {**TINY_RUN, "dataset": "data/chars", "out_dir": "out", "init_from": path}
    line = [f"--{k}={v}" for k, v in knobs.items() if k != "block_size"]
    r = run_line([*line, "--max_iters=1"], tmp_path / "out")
    assert r.code == 0 and "no tokenizer" not in caplog.text, r.err
    (model,) = [line for line in r.out.splitlines() if line.startswith("model: ")]
    assert "data/chars" in model and "tokenizer char" in model and str(len(set(TEXT))) in model
    saved = checkpoint.load(checkpoint.latest("out"))
    assert saved.config().block_size == saved.settings["train"]["block_size"] == 24
    texts = set()
    for more in (["--dataset=data/chars/"], []):  # the file names its dataset
        words = [f"--init_from={path}", "--start=Ann", "--max_new_tokens=9", *more]
        code, out, err = enter(sample.main, words)
        assert code == 0 and set(out) <= set(TEXT) | {"-"}, err
        texts.add(out)
    assert len(texts) == 1
    with pytest.raises(UserError, match="chars"):
        data.prepare(data.PrepareConfig("shakespeare_char", out_dir=str(chars), force=True))
    assert {f.name: f.read_bytes() for f in chars.iterdir()} == before
    path = checkpoint_of(tmp_path / "ckpt.pt", "others")  # a warning
    r = run(tmp_path / "data", tmp_path / "out", init_from=path, dataset="chars", max_iters=1)
    assert r.code == 0 and str(path) in caplog.text


def test_without_meta_pkl_the_tokens_are_gpt2s(tmp_path):
    for name, n in (("train", 90), ("val", 10)):
        np.arange(n, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    meta = data.read_meta(tmp_path)
    assert (meta["tokenizer"], meta["vocab_size"]) == ({"name": "gpt2"}, 50257)
    assert data.load(tmp_path, "val", 9, 50304)[:].tolist() == list(range(10))
    np.array([50_300] * 20, dtype=np.uint16).tofile(tmp_path / "val.bin")  # of the padded ids
    with pytest.raises(UserError, match="50300"):
        data.load(tmp_path, "val", 9, 50304)
    (tmp_path / "val.bin").unlink()
    with pytest.raises(UserError, match=r"val\.bin"):
        data.load(tmp_path, "val", 9, 50304)


HERE = [HealthCheck.function_scoped_fixture]
plain = st.recursive(
    st.none() | st.integers() | st.text() | st.binary() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=6,
)
wrong = st.fixed_dictionaries({"vocab_size": plain, "itos": plain, "stoi": plain}) | plain


@given(wrong.map(pickle.dumps) | st.binary(), st.integers(0, 5))
@settings(max_examples=30, deadline=None, suppress_health_check=HERE)
def test_no_other_pickle_is_read_nor_run(chars, tmp_path, content, protocol):
    blown = tmp_path / "blown"
    bomb = {"vocab_size": 2, "itos": {0: "a", 1: Bomb(blown)}, "stoi": {"a": 0}}
    other = {"vocab_size": 2, "itos": {0: "a", 1: "b"}, "stoi": {"a": 1, "b": 0}}
    for bad in (content, pickle.dumps(bomb, protocol), pickle.dumps(other)):
        (chars / "meta.pkl").write_bytes(bad)
        with pytest.raises(UserError, match=r"meta\.pkl"):
            data.read_meta(chars)
    assert not blown.exists()
