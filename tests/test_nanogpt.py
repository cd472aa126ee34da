"""A ckpt.pt and data folders of nanoGPT: read in place, by train.py and sample.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_checkpoint import Bomb
from test_train import TEXT, TINY, enter, nanogpt_file, run, run_line

import checkpoint
import data
import sample
from core.settings import UserError
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("remembered_probes")


def prepare_chars(folder: Path) -> Path:
    """The files of nanoGPT's data/shakespeare_char/prepare.py."""
    folder.mkdir(parents=True)
    chars = sorted(set(TEXT))
    stoi, cut = {c: i for i, c in enumerate(chars)}, int(len(TEXT) * 0.9)
    for name, part in (("train", TEXT[:cut]), ("val", TEXT[cut:])):
        np.array([stoi[c] for c in part], dtype=np.uint16).tofile(folder / f"{name}.bin")
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def checkpoint_of(path: Path, dataset: str) -> Path:
    torch.manual_seed(0)
    nanogpt_file(path, GPT(GPTConfig(24, len(set(TEXT)), 1, 2, 16, bias=False)))
    torch.save({**torch.load(path), "config": {"dataset": dataset}}, path)
    return path


def test_a_run_goes_on_in_a_folder_of_characters(tmp_path, monkeypatch, caplog):
    folder = prepare_chars(tmp_path / "data" / "chars")
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    path = checkpoint_of(tmp_path / "ckpt.pt", "chars")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "data"))
    for name in ("chars", "data/chars/", "./data/chars", str(folder), "~/chars"):
        assert data.find(name, "data").samefile(folder) and data.find(name).samefile(folder)
    knobs = {**TINY, "dataset": "data/chars", "out_dir": "out", "init_from": path, "max_iters": 1}
    r = run_line([f"--{k}={v}" for k, v in knobs.items() if k != "block_size"], tmp_path / "out")
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
        data.prepare("shakespeare_char", data.PrepareConfig(out_dir=str(folder), force=True))
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


def test_a_checkpoint_of_another_dataset_is_a_warning(tmp_path, caplog):
    prepare_chars(tmp_path / "chars")
    path = checkpoint_of(tmp_path / "ckpt.pt", "others")
    r = run(tmp_path, tmp_path / "out", init_from=path, dataset="chars", max_iters=1)
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
@settings(max_examples=50, deadline=None, suppress_health_check=HERE)
def test_no_other_pickle_is_read_nor_run(tmp_path, content, protocol):
    folder, blown = tmp_path / "chars", tmp_path / "blown"
    if not folder.exists():
        prepare_chars(folder)
    bomb = {"vocab_size": 2, "itos": {0: "a", 1: Bomb(blown)}, "stoi": {"a": 0}}
    for bad in (content, pickle.dumps(bomb, protocol)):
        (folder / "meta.pkl").write_bytes(bad)
        with pytest.raises(UserError, match=r"meta\.pkl"):
            data.read_meta(folder)
    assert not blown.exists()
