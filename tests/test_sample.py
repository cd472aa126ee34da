"""sample.py: the same text for the same seed, from every kind of model."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import torch
from test_train import TEXT, enter, make_data, nanogpt_file, run

import checkpoint
import data
import inference
import sample
from core.settings import UserError
from inference import engine
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("remembered_probes")

BAR = "\n---------------\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    r = run(make_data(folder / "data"), folder / "out", max_iters=120, eval_interval=40, n_embd=32)
    assert r.code == 0
    return folder / "out"


def called(*words: str, code: int = 0) -> tuple[str, str]:
    got, out, err = enter(sample.main, ["--device=cpu", *words])
    assert got == code and "Traceback" not in out + err, (out, err)
    return out, err


def text_of(*words: str) -> list[str]:
    *texts, end = called(*words)[0].split(BAR)
    assert not end
    return texts


def rows_of(out: Path, *words: str) -> list[dict[str, Any]]:
    assert called(*words, f"--out={out}")[0] == ""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def refused(*words: str) -> str:
    return called(*words, code=2)[1]


def of(out: Path, *words: str, n: int = 40) -> tuple[str, ...]:
    return (f"--out_dir={out}", f"--max_new_tokens={n}", *words)


def by_engine(source: Path, prompts: list[str], n: int = 40, seed: int = 1337, **how: Any) -> Any:
    """Each text of a prompt has the next seed."""
    model, tokenizer = inference.load(source, device="cpu")
    assert model.tokenizer is tokenizer and not model.training
    if "regex" in how:
        how["constraint"] = inference.constrain.regex(how.pop("regex"), tokenizer)
    seeds = [torch.Generator().manual_seed((seed + i) % 2**64) for i in range(len(prompts))]
    return engine.generate(model, prompts, n, generator=seeds,
                           **{"temperature": 0.8, "top_k": 200} | how)


REGEX = "[A-Z][a-z]{2,5}( the)?"


@pytest.mark.parametrize("words, how", [
    ([], {}), (["--temperature=0"], {"temperature": 0}),
    (["--top_p=0.7", "--top_k=none"], {"top_p": 0.7, "top_k": None}),
    (["--stop= t", "--stop=\n"], {"stop": [" t", "\n"]}), ([f"--regex={REGEX}"], {"regex": REGEX}),
], ids=str)
def test_the_texts_are_the_engines_in_the_order_of_their_prompts(words, how, trained, tmp_path):
    prompts = [p for p in ("Ann", "The king ", "m") for _ in range(2)]
    want = by_engine(trained, prompts, **how)
    assert len({*want}) > 2 and ("stop" not in how or len({*map(len, want)}) > 3)
    (tmp_path / "prompts").write_text("Ann\n\nThe king \nm\n")
    argv = of(trained, f"--prompts={tmp_path / 'prompts'}", "--num_samples=2", *words)
    for out in ([], ["--stream=True"], ["--kv_cache=paged", "--batch_size=3"], ["--batch_size=1"]):
        assert text_of(*argv, *out) == want
    for kv in ("dynamic", "paged"):
        rows = rows_of(tmp_path / "o", *argv, f"--kv_cache={kv}")
        assert [row["prompt"] + row["text"] for row in rows] == want
        assert [(row["prompt"], row["seed"]) for row in rows] == [*zip(prompts, range(1337, 1343))]
        for row in rows:
            short = "regex" in how or len(row["text"]) < 40
            assert row["finish"] == ("stop" if short else "length")
            assert row["tokens"] >= len(row["text"])
            assert "regex" not in how or re.fullmatch(REGEX, row["text"])


def test_seeds_repeat_and_wrap(trained):
    last = [text_of(*of(trained, f"--seed={s}", n=15))[0] for s in (2**64 - 1, -1, 0, 2**64, 3)]
    assert last[0] == last[1] != last[2] == last[3] != last[4]
    assert last[1::3] == [by_engine(trained, [""], 15, seed)[0] for seed in (-1, 3)]
    assert len(last[4]) == 16 and last[4].startswith("\n") and set(last[4]) <= set(TEXT)
    assert text_of(*of(trained, f"--seed={2**64 - 1}", "--num_samples=2", n=15)) == last[:3:2]


def test_a_prompt_from_a_file(trained, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    path = Path("FILES: LIFE.txt")
    want = text_of(*of(trained, "--start=Bob keeps the\nmoon"))
    for content in (b"Bob keeps the\nmoon", b"\xef\xbb\xbfBob keeps the\r\nmoon"):
        path.write_bytes(content)
        assert text_of(*of(trained, f"--start=FILE:{path}")) == want
    path.write_text("\nAnn\n \n\nBob\n")
    assert len(text_of(*of(trained, f"--prompts={path}", n=1))) == 2
    assert "3 blank lines" in caplog.text and path.name in caplog.text
    for content, named in ((b"\xff\xfe", str(path)), (b"\n \n", str(path)), ("§".encode(), "§")):
        path.write_bytes(content)
        assert named in refused(*of(trained, f"--prompts={path}"))


def test_a_vocabulary_with_gaps_and_without_a_newline(tmp_path):
    """Ids without a token are never drawn."""
    tk, text = pytest.importorskip("tokenizers"), TEXT.replace("\n", " ")
    letters = {c: 7 * i + 3 for i, c in enumerate(["|", *sorted(set(text))])}
    made = tk.Tokenizer(tk.models.WordLevel(letters, unk_token="|"))
    made.pre_tokenizer = tk.pre_tokenizers.Split("", "isolated")
    made.decoder = tk.decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "|"}')
    (tmp_path / "text.txt").write_text(text)
    how = {"source": str(tmp_path / "text.txt"), "tokenizer": str(tmp_path), "workers": 1}
    data.prepare(data.PrepareConfig("text", out_dir=str(tmp_path / "tiny"), **how))
    r = run(tmp_path, tmp_path / "out", max_iters=1, sample_tokens=100)
    said = r.out.split("a sample of 100 tokens ---\n")[1]
    assert r.code == 0 and len(said) > 90 and set(said) <= {*letters, "\n"}
    for kv in ("none", "dynamic", "static", "paged"):
        words = of(tmp_path / "out", "--temperature=9", f"--kv_cache={kv}", "--num_samples=4")
        for row in rows_of(tmp_path / "o", *words):
            assert len(row["text"]) == row["tokens"]


WAYS = [("--stream=no", 4), ("--out=o", 4), ("--stream", 4), ("--stream", 0)]


@pytest.mark.parametrize("how, n", WAYS)
def test_ctrl_c_keeps_what_was_written(how, n, trained, tmp_path, monkeypatch):
    """Texts begin when there is room."""
    monkeypatch.chdir(tmp_path)
    words = of(trained, "--batch_size=1", how, n=10)
    whole, _ = called(*words, "--num_samples=2")
    rows = Path("o").read_text().splitlines() if how == "--out=o" else []
    hidden, calls = GPT.hidden, []

    def interrupt(self: GPT, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 11 + n:
            raise KeyboardInterrupt
        return hidden(self, *args)

    monkeypatch.setattr(GPT, "hidden", interrupt)
    tracemalloc.start()
    shown, err = called(*words, "--num_samples=100000", code=130)
    assert tracemalloc.get_traced_memory()[1] < 50e6 and str(10 + n) in err
    tracemalloc.stop()
    before = whole.split(BAR)
    assert shown == (before[0] + BAR + before[1][: 1 + n] + BAR if whole else "")
    if rows:
        first, cut = Path("o").read_text().splitlines()
        new = json.loads(rows[1])["text"][:4]
        changes = {"finish": "interrupted", "tokens": 4, "text": new}
        assert first == rows[0] and json.loads(cut) == json.loads(rows[1]) | changes


def test_the_latest_and_the_best_checkpoint(trained, tmp_path, caplog):
    out = Path(shutil.copytree(trained, tmp_path / "out"))
    old, new = checkpoint.folders(out)[-2:]
    state = (new / "train_state.json").read_text()
    (new / "train_state.json").write_text(re.sub(r'"val_loss": [\d.]+', '"val_loss": 9.0', state))
    words = of(out, "--seed=2")
    latest, best = text_of(*words, "--checkpoint=latest"), text_of(*words, "--checkpoint=best")
    assert latest != best
    assert latest == text_of(*words) == text_of(f"--init_from={new}", *words)
    assert best == text_of(f"--init_from={old}", *words)
    words = [f"--init_from={out}", *of(tmp_path / "of another run", "--seed=2")]
    assert text_of(*words) == latest and text_of(*words, "--checkpoint=best") == best
    for folder in (old, new):  # without an evaluation the latest is the best
        text = re.sub(r'"val_loss": [\d.]+', '"val_loss": null', state)
        (folder / "train_state.json").write_text(text)
    assert text_of(*words, "--checkpoint=best") == latest and new.name in caplog.text
    assert new.name in refused(f"--init_from={new}", "--checkpoint=best")
    for option, value in (("which", "newest"), ("weights", "int4")):  # from Python
        with pytest.raises(UserError, match=value):
            inference.load(new, **{option: value})


def test_a_model_without_a_tokenizer_has_gpt2s(tmp_path, monkeypatch):
    """A stand-in: bytes, then pairs of bytes."""
    ranks = {bytes([i]): i for i in range(256)}
    for i in range(256, 50256):
        ranks[bytes([(i - 256) // 256, (i - 256) % 256])] = i
    encoding = tiktoken.Encoding("pairs", pat_str=r"(?s).+", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 50256})
    monkeypatch.setattr(data.GPT2Tokenizer, "bpe", encoding)
    torch.manual_seed(0)
    path = nanogpt_file(tmp_path / "ckpt.pt", GPT(GPTConfig(8, 50304, 1, 1, 8)))
    words = [f"--init_from={path}", "--max_new_tokens=30", "--top_k=none", "--temperature=1.5",
             "--start=Grüße"]
    a = text_of(*words)
    (row,) = rows_of(tmp_path / "o", *words)
    assert a == [row["prompt"] + row["text"]] == text_of(*words, "--stream=True")
    assert '"Grüße"' in (tmp_path / "o").read_text(encoding="utf-8")  # for people, too
    assert a[0].startswith("Grüße") and len(a[0]) > 20
    # Tokens here are random bytes: many are no characters, alone or at all.
    assert "\N{REPLACEMENT CHARACTER}" in a[0]


def test_every_kind_of_source_gives_the_same_text(trained, tmp_path):
    """A step, an export, nanoGPT's file with a dataset's tokenizer; the run has its own."""
    step = checkpoint.latest(trained)
    half = sample.SampleConfig(out_dir=str(trained), device="cpu", dtype="bfloat16")
    assert {p.dtype for p in sample.load(half)[0].parameters()} == {torch.bfloat16}
    model, tokenizer = inference.load(step, device="cpu")
    path = nanogpt_file(tmp_path / "ckpt.pt", model)
    checkpoint.save_hf(model, hf := tmp_path / "hf")
    (hf / "tokenizer.json").write_text(json.dumps(tokenizer.to_json()))
    (hf / "tokenizer_config.json").write_text("{}")
    want = by_engine(trained, ["Ann"], 15)
    dataset = f"--dataset={trained.parent / 'data' / 'tiny'}"
    for source in ([f"--init_from={step}"], [f"--init_from={hf}"], ["--dataset=gone"],
                   [f"--init_from={path}", dataset]):
        assert text_of(*of(trained, "--start=Ann", *source, n=15)) == want
