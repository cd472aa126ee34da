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
    (room / "file").write_text("no folder")
    (room / "hard").hardlink_to(room / "file")
    for link, target in (("link", "nothing"), ("soft", "file")):
        (room / link).symlink_to(room / target)
    return room


NEW, WEIGHTS = "train --out_dir=new ", "train --out_dir=new --init_from=run "
RESUME, SAMPLE = "resume --max_iters=3 ", "sample --out_dir=run "
EXPLAIN, LONG = "explain --out_dir=run ", "a" * 300  # no file may have this name
REFUSED: dict[str, tuple[str, ...]] = {  # a command line, and what the error names
    NEW + "--n_layers=2": ("--n_layers", "--n_layer"),
    NEW + "--n_embd=15": ("n_embd", "n_head", "15"),
    NEW + f"--seed={2**64}": ("seed",), NEW + "--dropout=1.0": ("dropout",),
    NEW + "--min_lr=-1e-3": ("min_lr",), NEW + "--muon_rates=0.02": ("muon_rates",),
    NEW + "--vocab_size=5": ("train.bin", "5"), NEW + "--block_size=5000": ("--block_size=5000",),
    NEW + "--dataset=nowhere": ("nowhere", "python -m data"),
    NEW + "--document_mask=True": ("--document_mask",),
    NEW + "--profile_step=9": ("profile_step=9", "max_iters=8"),
    NEW + "--device=cuda:7": ("cuda:7", "cpu"),
    NEW + "--attention_backend=sdp": ("'sdp'", "'sdpa'"),
    NEW + "--attention_backend=sdpa_cudnn --attention_fallback=False": ("sdpa_cudnn", "cuda"),
    NEW + f"--vocab_size={2**31 - 1} --n_embd={2**20}": ("--batch_size=2",),  # no memory
    "train --out_dir=file": ("file",), "train --out_dir=file/x": ("file",),
    "train --out_dir=link": ("--out_dir=link",),
    WEIGHTS + "--n_layer=3": ("n_layer",), WEIGHTS + "--n_embd=32": ("n_embd",),
    WEIGHTS + "--bias=True": ("bias",), WEIGHTS + "--vocab_size=99": ("vocab_size",),
    WEIGHTS + "--block_size=33": ("block_size", "33", "16"),
    NEW + "--init_from=ckpt.pt": ("41", "42"),
    RESUME + "--n_layer=3": ("n_layer=1", "3"), RESUME + "--n_head=1": ("n_head=2", "1"),
    RESUME + "--n_kv_head=1": ("n_kv_head=2", "1"), RESUME + "--n_embd=24": ("n_embd=16", "24"),
    RESUME + "--bias=True": ("bias=False", "True"), RESUME + "--gelu=tanh": ("gelu=exact", "tanh"),
    RESUME + "--vocab_size=99": ("vocab_size=", "99"),
    RESUME + "--block_size=8": ("block_size=16", "8", "step-00000002"),
    "sample --out_dir=nowhere": ("nowhere",), "sample --init_from=no/such": ("no/such",),
    "sample --init_from=ckpt.pt": ("--dataset", " 41 "),
    "sample --init_from=ckpt.pt --dataset=./gone": ("gone/meta.json",),
    SAMPLE + "--temperature=-1": ("temperature",), SAMPLE + "--top_p=0": ("top_p",),
    SAMPLE + "--top_k=0": ("top_k",), SAMPLE + "--num_samples=0": ("num_samples",),
    SAMPLE + "--temprature=1": ("--temperature",), SAMPLE + "--checkpoint=newest": ("latest",),
    SAMPLE + "--regex='('": ("'('",), SAMPLE + "--regex='[a-z]{501}'": ("501",),
    SAMPLE + "--stop=''": ("''",), SAMPLE + "--kv_cache=ring": ("paged",),
    SAMPLE + "--compile": ("kv_cache=static",), SAMPLE + "--device=cuda:7": ("cuda:7",),
    SAMPLE + "--attention_backend=nosuch": ("nosuch",),
    SAMPLE + "--prompts=none.txt": ("none.txt",), SAMPLE + "--out=no/out": ("no/out",),
    SAMPLE + "--start='Bob §'": ("§",), SAMPLE + "--start=FILE:run": ("run",),
    SAMPLE + "--prompts=file --out=file": ("--out=file",),
    SAMPLE + "--prompts=file --out=hard": ("hard",),
    SAMPLE + "--out=hard": ("hard",), SAMPLE + "--out=soft": ("soft",),
    EXPLAIN + "--layer=2": ("got 2",), EXPLAIN + "--head=-1": ("got -1",),
    EXPLAIN + "--prompt=né": ("'é'",), EXPLAIN + "--prompt=": ("prompt",),
    EXPLAIN + "--prompt='||' --segments='|'": ("prompt",), EXPLAIN + "--window=0": ("window",),
    EXPLAIN + "--segments=": ("segments",), EXPLAIN + "--prompt=FILE:no/such": ("no/such",),
    EXPLAIN + "--html=no/x.html": ("no/x.html",), EXPLAIN + "--promt=a": ("--prompt",),
    EXPLAIN + "--attention_backend=flash_attn_3 --attention_fallback=False": ("flash_attn_3",),
    "explain --out_dir=no/run": ("no/run",), "explain --out_dir=" + LONG: (LONG,),
    "data": ("shakespeare_char",), "data shakspeare": ("shakspeare",),
    "data mytext.txt": ("--source",), "data text": ("--source",),
    "data shakespeare_char --val_fraction=2": ("val_fraction",),
    "data shakespeare_char --limit=2": ("--limit",), "data openwebtext --source=x": ("--source",),
    "data text --source=no-such-folder": ("no-such-folder",),
    "data chars --source=text.txt --out_dir=" + LONG: (LONG,),
    "export": ("--to",), "export export file": ("file",), "export import file --to=y": ("--to",),
    "export export nowhere --to=y": ("nowhere",), "export export run --to=run": ("run",),
    "export export run --to=run/step-00000002/settings.json/x": ("settings.json/x",),
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
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
    assert all(word in error for word in REFUSED[line]), error
    assert {p: p.is_file() and p.read_bytes() for p in room.rglob("*")} == files
