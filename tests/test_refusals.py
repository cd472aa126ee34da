"""Refusals: exit code 2, one error with the value, nothing written."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import Run, argv, enter, make_data, nanogpt_file, refusal, run

import explain
import sample
import train
from checkpoint.__main__ import main as export
from data.__main__ import main as prepare
from model import GPT, GPTConfig


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a run of two steps in `run`, weights, a file, links to it and to nothing."""
    room = make_data(tmp_path_factory.mktemp("room"))
    assert run(room, room / "run", max_iters=2, eval_interval=1).code == 0
    nanogpt_file(room / "ckpt.pt", GPT(GPTConfig(16, 41, 1, 2, 16, bias=False)))
    (room / "file").write_text("hello")
    (room / "hard").hardlink_to(room / "file")
    for link, target in (("link", "nothing"), ("soft", "file")):
        (room / link).symlink_to(room / target)
    return room


LONG = "a" * 300  # no file may have this name
REFUSED: dict[str, dict[str, str]] = {  # how command lines begin and end, words of their errors
    "train --out_dir=new": {
        "--n_layers=2": "--n_layers --n_layer", "--n_embd=15": "n_embd n_head 15",
        f"--seed={2**64}": "seed", "--dropout=1.0": "dropout", "--min_lr=-1e-3": "min_lr",
        "--muon_rates=0.02": "muon_rates", "--vocab_size=5": "train.bin 5",
        "--block_size=5000": "--block_size=5000", "--dataset=nowhere": "nowhere python -m data",
        "--document_mask=True": "--document_mask", "--profile_step=9": "profile_step=9 max_iters=8",
        "--device=cuda:7": "cuda:7 cpu", "--attention_backend=sdp": "'sdp' 'sdpa'",
        "--attention_backend=sdpa_cudnn --attention_fallback=False": "sdpa_cudnn cuda",
        f"--vocab_size={2**31 - 1} --n_embd={2**20}": "--batch_size=2",
        "--init_from=ckpt.pt": "41 42"},
    "train": {"--out_dir=file": "file", "--out_dir=file/x": "file", "--out_dir=link": "=link"},
    "train --out_dir=new --init_from=run": {
        "--n_layer=3": "n_layer", "--bias=True": "bias", "--vocab_size=99": "vocab_size",
        "--block_size=33": "block_size 33 16"},
    "resume --max_iters=3": {
        "--n_head=1": "n_head=2 1", "--n_kv_head=1": "n_kv_head=2 1",
        "--bias=True": "bias=False True", "--gelu=tanh": "gelu=exact tanh",
        "--vocab_size=99": "vocab_size= 99", "--block_size=8": "block_size=16 8 step-00000002"},
    "sample": {
        "--out_dir=nowhere": "nowhere", "--init_from=no/such": "no/such",
        "--init_from=ckpt.pt": "--dataset 41", "--init_from=file": "file damaged",
        "--init_from=ckpt.pt --dataset=./gone": "gone/meta.json"},
    "sample --out_dir=run": {
        "--stop": "--stop", "--no-compile": "'--compile'", "--temperature=-1": "temperature",
        "--top_p=0": "top_p", "--top_k=0": "top_k",
        "--num_samples=0": "num_samples", "--temprature=1": "--temperature",
        "--checkpoint=newest": "latest", "--regex='('": "'('", "--regex='[a-z]{501}'": "501",
        "--stop=''": "''", "--kv_cache=ring": "paged", "--compile": "kv_cache=static",
        "--device=cuda:7": "cuda:7", "--attention_backend=nosuch": "nosuch",
        "--prompts=none.txt": "none.txt", "--out=no/out": "no/out", "--start='Bob §'": "§",
        "--start=FILE:run": "run", "--prompts=file --out=file": "--out=file",
        "--prompts=soft --out=file": "--out=file", "--out=hard": "hard", "--out=soft": "soft"},
    "explain --out_dir=run": {
        "--layer=1": "got 1", "--head=-1": "got -1", "--prompt=né": "'é'", "--prompt=": "prompt",
        "--prompt='||' --segments='|'": "prompt", "--window=0": "window", "--segments=": "segments",
        "--prompt=FILE:no/such": "no/such", "--html=no/x.html": "no/x.html",
        "--promt=a": "--prompt",
        "--attention_backend=flash_attn_3 --attention_fallback=False": "flash_attn_3"},
    "explain": {"--out_dir=no/run": "no/run", f"--out_dir={LONG}": LONG},
    "data": {
        "": "shakespeare_char", "shakspeare": "shakspeare", "mytext.txt": "--source",
        "text": "--source", "shakespeare_char --val_fraction=2": "val_fraction",
        "shakespeare_char --limit=2": "--limit", "openwebtext --source=x": "--source",
        "text --source=no-such-folder": "no-such-folder",
        f"chars --source=text.txt --out_dir={LONG}": LONG},
    "export": {
        "": "--to", "export file": "file", "import file --to=y": "--to",
        "export nowhere --to=y": "nowhere", "export run --to=run": "run",
        "export run --to=run/step-00000002/settings.json/x": "settings.json/x",
        f"export run --to=run/step-00000009/{LONG[:250]}": "step-00000009"},
}  # fmt: skip
LINES = {f"{begin} {end}": words for begin, ends in REFUSED.items() for end, words in ends.items()}


@pytest.mark.parametrize("line", LINES)
def test_a_mistake_is_one_error_that_names_it(line: str, room: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(room)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    command, *words = shlex.split(line)
    mains: dict[str, Any] = {
        "train": (train.main, argv(room, room / "new")), "export": (export, []),
        "resume": (train.main, ["--init_from=resume", "--out_dir=run"]),
        "sample": (sample.main, ["--device=cpu"]), "data": (prepare, []),
        "explain": (explain.main, ["--device=cpu"]),
    }  # fmt: skip
    main, before = mains[command]
    files = {p: p.is_file() and p.read_bytes() for p in room.rglob("*")}
    error = refusal(Run(*enter(main, [*before, *words]), []))
    assert all(word in error for word in LINES[line].split()), error
    assert {p: p.is_file() and p.read_bytes() for p in room.rglob("*")} == files
