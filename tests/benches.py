"""bench_mfu.py in tests: the real command, its processes forked from a server that has imported
torch."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from typing import Any

import pytest

import bench_mfu
from data.prepare import PrepareConfig, prepare
from model import GPTConfig

HOW = {
    "train": ["--rounds=2", "--seconds=0.01", "--warm_up_steps=1"],
    "kernel": ["--rounds=2", "--seconds=0.01"],
    "decode": ["--rounds=2", "--bandwidth_gbs=8"],
    "qualify": ["--rounds=2", "--warm_up_steps=1", "--bandwidth_gbs=8"],
}
MODEL = GPTConfig(32, 64, 2, 2, 32, bias=False)  # of small()


def small(mode: str, own: bool = True) -> list[str]:
    """A mode, and options of a small model; own: ours, not --hf's."""
    sizes = ["--device=cpu", "--dtype=float32", *["--n_embd=32", "--n_head=2"] * own]
    sizes += ["--peak_tflops=0.5"] * (mode != "decode")
    sizes += ["--block_size=32"] * (mode != "kernel")
    sizes += ["--n_layer=2", "--vocab_size=64"] * (own and mode != "kernel")
    sizes += ["--batch_size=4"] * (mode not in ("kernel", "decode"))
    return [mode, *sizes, *HOW.get(mode, [])]


def run(argv: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    multiprocessing.set_forkserver_preload(["bench_mfu", "torch._dynamo"])
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(SpawnProcess, "_Popen", staticmethod(ForkServerProcess._Popen))
        with contextlib.redirect_stderr(io.StringIO()):
            code = bench_mfu.main(argv)
    return code, out.getvalue()


def shown(*argv: str) -> tuple[int, str, dict[str, Any]]:
    """The exit code, the text, and the JSON below it."""
    code, out = run([*argv, "--json"])
    text, _, last = out.rstrip().rpartition("\n")
    return code, text, json.loads(last)


def measured(*argv: str, code: int = 0) -> dict[str, Any]:
    ended, text, content = shown(*argv)
    assert ended == code, text
    return content


def by_backend(content: dict[str, Any], size: str = "") -> dict[Any, dict[str, Any]]:
    """Rows by backend, of files by the stem; size: and by this one of their points."""
    names = ((Path(r["backend"]).stem, r) for r in content["rows"])
    return {(name, r["point"][size]) if size else name: r for name, r in names}


KERNEL = """
import os, signal, time
from pathlib import Path
import torch
from attention import Backend, Caps, manual

def attend(q, k, v, spec, **_):
    B, T = q.shape[:2]
    if B > 2:  # not in its proof
        with open({log!r}, "a") as log:
            print({name!r}, os.getpid(), file=log)
    out = manual.attend(q, k, v, spec)
    {does}
    return out

caps = Caps(dropout=False, segments=False, window=False, caches=("none",){caps})
BACKEND = Backend({name!r}, "a test's", attend, (caps,), fallback=None)
"""


def kernel(folder: Path, name: str, does: str = "pass", caps: str = "") -> str:
    """Write NAME.py, which logs its name and process at each call of more than two sequences."""
    text = KERNEL.format(name=name, does=does, caps=caps, log=str(folder / "log.txt"))
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return str(folder / f"{name}.py")


def write_tokens(folder: Path) -> Path:
    text = "".join(chr(60 + (i * i + i // 7) % 61) for i in range(6000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    source, out = str(folder / "text.txt"), str(folder / "tiny")
    prepare(PrepareConfig("shakespeare_char", source, out_dir=out))
    return folder


RIVAL = '''
"""A stand-in with nanoGPT's interface."""
from types import SimpleNamespace as GPTConfig
import torch
import torch.nn.functional as F
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = torch.nn.Embedding(config.block_size, config.n_embd)
    def forward(self, idx, targets=None):
        logits = self.wte(idx) @ self.wte.weight.T
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    def configure_optimizers(self, weight_decay, lr, betas, device_type):
        print("a line on stdout, which belongs to nobody")
        return torch.optim.AdamW(self.parameters(), lr, betas, weight_decay=weight_decay)
    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            probs = F.softmax(self(idx)[0][:, -1], dim=-1)
            idx = torch.cat((idx, torch.multinomial(probs, 1)), dim=1)
        return idx
'''


def rival(folder: Path) -> str:
    (folder / "model.py").write_text(RIVAL, encoding="utf-8")
    return f"--rival=nanogpt={folder}"
