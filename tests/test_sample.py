"""sample.py: the same text for the same seed, from every kind of model."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import torch
from safetensors.torch import load_file, save_file
from test_data import small_tokenizer
from test_train import TEXT, enter, make_data, nanogpt_file, run

import checkpoint
import data
import inference
import sample
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


def text_of(*words: str) -> list[str]:
    code, out, err = enter(sample.main, ["--device=cpu", *words])
    assert code == 0, err
    assert out.endswith(BAR)
    return out.split(BAR)[:-1]


def refused(*words: str) -> str:
    """The error message: one line, or a box of the argument parser."""
    code, out, err = enter(sample.main, ["--device=cpu", *words])
    assert code == 2 and "Traceback" not in out + err, (out, err)
    return err


def of(out: Path, *words: str, n: int = 40) -> tuple[str, ...]:
    return (f"--out_dir={out}", f"--max_new_tokens={n}", *words)


# --- seeds ---


def test_a_seed_gives_the_same_text_every_time(trained):
    (a,), (b,), (c,) = (text_of(*of(trained, f"--seed={seed}")) for seed in (3, 3, 4))
    assert a == b != c
    assert len(a) == 41 and a.startswith("\n")
    assert set(a) <= set(TEXT)
    assert text_of(*of(trained, "--seed=3", "--start=")) == [a]  # an empty prompt begins so, too
    how = {"temperature": 0.8, "top_k": 200, "generator": torch.Generator().manual_seed(3)}
    assert engine.generate(inference.load(trained, device="cpu")[0], "", 40, **how) == a


def test_any_integer_is_a_seed(trained):
    big = text_of(*of(trained, f"--seed={2**64 - 1}", "--num_samples=2", n=9))
    assert big == [
        *text_of(*of(trained, "--seed=-1", n=9)),
        *text_of(*of(trained, "--seed=0", n=9)),
    ]
    assert text_of(*of(trained, f"--seed={10**30 * 2**64}", n=9)) == big[1:]


def test_samples_of_a_prompt_differ_and_each_has_its_own_seed(trained):
    three = text_of(*of(trained, "--num_samples=3", "--start=The", "--seed=5"))
    assert len(set(three)) == 3 and all(t.startswith("The") for t in three)
    assert three[1:2] == text_of(*of(trained, "--start=The", "--seed=6"))


@pytest.mark.parametrize("how", [(), ("--temperature=0",), ("--top_p=0.7", "--top_k=none")])
def test_a_stream_is_the_same_text(how, trained):
    words = of(trained, "--num_samples=2", "--start=Ann", *how)
    assert text_of(*words) == text_of(*words, "--stream=True")


# --- prompts ---


def test_a_prompt_from_a_file(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("FILES: LIFE.txt")
    path.write_text("Bob keeps the\nmoon")
    (a,) = text_of(*of(trained, f"--start=FILE:{path}"))
    assert a.startswith("Bob keeps the\nmoon")
    assert [a] == text_of(*of(trained, "--start=Bob keeps the\nmoon"))
    assert str(tmp_path / "no.txt") in refused(*of(trained, f"--start=FILE:{tmp_path / 'no.txt'}"))
    assert str(tmp_path) in refused(*of(trained, f"--start=FILE:{tmp_path}"))
    path.write_bytes(b"\xef\xbb\xbfBob keeps the\r\nmoon")  # a byte order mark
    assert [a] == text_of(*of(trained, f"--start=FILE:{path}"))
    assert len(text_of(*of(trained, f"--prompts={path}", n=3))) == 2
    path.write_bytes(b"\xff\xfe")
    assert str(path) in refused(*of(trained, f"--start=FILE:{path}"))


@pytest.mark.parametrize("option", ["out_dir=", "init_from=", "prompts=", "start=FILE:", "out="])
def test_a_name_that_is_too_long_is_one_sentence(trained, option) -> None:
    said = refused(*of(trained, "--start=A", n=1), f"--{option}{'x' * 5000}")
    assert "xxx" in said and "too long" in said and said.count("\n") == 1


def test_blank_lines_are_no_prompts(trained, tmp_path, caplog) -> None:
    (tmp_path / "lines.txt").write_text("\nAnn\n \n\nBob\n")
    assert len(text_of(*of(trained, f"--prompts={tmp_path / 'lines.txt'}", n=1))) == 2
    assert "3 blank lines" in caplog.text and "lines.txt" in caplog.text


def test_a_vocabulary_without_a_newline_and_rounded_up(tmp_path):
    """A prompt is found; ids that no character has are drawn neither here nor by train.py."""
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 1090))) * 3
    r = run(make_data(tmp_path, text), tmp_path / "out", max_iters=1, sample_tokens=400)
    assert r.code == 0 and set(r.out.splitlines()[-1]) <= set(text)
    assert len(r.out.splitlines()[-1]) == 401
    (drawn,) = text_of(*of(tmp_path / "out", "--top_k=none", "--temperature=9", n=400))
    assert set(drawn) <= set(text) and len(drawn) == 401


def test_a_vocabulary_with_gaps(tmp_path):
    """Ids that no token has are drawn neither here nor by train.py: a text has all its tokens."""
    tk = pytest.importorskip("tokenizers")
    letters = {c: 7 * i + 3 for i, c in enumerate(["|", *sorted(set(TEXT))])}
    made = tk.Tokenizer(tk.models.WordLevel(letters, unk_token="|"))
    made.pre_tokenizer = tk.pre_tokenizers.Split("", "isolated")
    made.decoder = tk.decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "|"}')
    (tmp_path / "text.txt").write_text(TEXT)
    how = {"source": str(tmp_path / "text.txt"), "tokenizer": str(tmp_path), "workers": 1}
    data.prepare("text", data.PrepareConfig(out_dir=str(tmp_path / "tiny"), **how))
    r = run(tmp_path, tmp_path / "out", max_iters=1, sample_tokens=100)
    said = r.out.split("a sample of 100 tokens ---\n")[1]
    assert r.code == 0 and len(said) > 90 and set(said) <= {*letters, "\n"}
    for kv in ("none", "dynamic", "static", "paged"):
        words = of(tmp_path / "out", "--temperature=9", f"--kv_cache={kv}", "--num_samples=4")
        enter(sample.main, ["--device=cpu", *words, f"--out={tmp_path / 'o'}", "--start=A"])
        for row in rows_of((tmp_path / "o").read_text()):
            assert len(row["text"]) == row["tokens"]


# --- files, Ctrl-C ---


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_answers_do_not_replace_their_prompts(trained, tmp_path):
    (path := tmp_path / "prompts").write_text("Ann sees\n")
    (tmp_path / "link").symlink_to(path)
    for out in (path, tmp_path / "link"):
        words = ["--device=cpu", *of(trained, f"--prompts={path}", f"--out={out}", n=2)]
        code, _, err = enter(sample.main, words)
        assert code == 2 and "--prompts" in err and path.read_text() == "Ann sees\n"


@pytest.mark.parametrize("hard", [False, True])
def test_answers_are_not_written_through_a_link(hard, trained, tmp_path):
    (path := tmp_path / "precious").write_text("x" * 9999)
    out = tmp_path / "out.jsonl"
    out.hardlink_to(path) if hard else out.symlink_to(path)
    words = ["--device=cpu", *of(trained, "--start=A", f"--out={out}", n=2)]
    code, _, err = enter(sample.main, words)
    assert code == 2 and str(out) in err and path.read_text() == "x" * 9999


@pytest.mark.parametrize("kv", ["dynamic", "paged"])
def test_prompts_from_a_file(kv, trained, tmp_path):
    """In order, each prompt continued as alone."""
    wanted = ["Ann sees", " The king ", "m", "Bob keeps the moon and"]
    path, out = tmp_path / "prompts", tmp_path / "out.jsonl"
    path.write_text("\n\n".join(wanted) + "\n")
    words = of(trained, f"--prompts={path}", f"--out={out}", "--num_samples=2", n=20)
    words += (f"--kv_cache={kv}",)
    seeded = enumerate((w for w in wanted for _ in range(2)), 1337)
    alone = [text_of(*of(trained, f"--start={w}", f"--seed={n}", n=20))[0] for n, w in seeded]
    for size in (1, 3, 8):
        code, shown, err = enter(sample.main, ["--device=cpu", f"--batch_size={size}", *words])
        assert (code, shown) == (0, "")
        rows = rows_of(out.read_text())
        assert [row["prompt"] for row in rows] == [w for w in wanted for _ in range(2)]
        assert [row["seed"] for row in rows] == list(range(1337, 1345))
        for row in rows:
            assert row["tokens"] == len(row["text"]) == 20 and row["finish"] == "length"
        assert [row["prompt"] + row["text"] for row in rows] == alone
        assert "160" in err and kv in err


@pytest.mark.parametrize("how", [(), ("--stream",)])
def test_texts_are_written_in_the_order_of_their_prompts(how, trained, tmp_path):
    """Also if a later one ends first: here at a space."""
    out = Path(shutil.copytree(trained, tmp_path / "out"))
    file = checkpoint.folders(out)[-1] / "settings.json"
    settings = json.loads(file.read_text())
    tokenizer = settings["tokenizer"]
    tokenizer["eot"] = tokenizer["vocabulary"].index(" ")
    file.write_text(json.dumps(settings))
    words = of(out, "--start=Ann", "--start=The king", "--num_samples=4", *how)
    texts = text_of(*words)
    assert len({len(t) for t in texts}) > 2
    for size in (1, 2, 3):
        assert text_of(*words, "--kv_cache=paged", f"--batch_size={size}") == texts
    path = tmp_path / "out.jsonl"
    text_of(*words, "--stream", "--kv_cache=paged", f"--out={path}")
    rows = rows_of(path.read_text())
    assert [row["prompt"] + row["text"] for row in rows] == texts
    assert {row["finish"] for row in rows if row["tokens"] < 40} == {"stop"}


@pytest.mark.parametrize("how, n", [("batch", 4), ("stream", 4), ("stream", 0), ("out", 4)])
def test_ctrl_c_keeps_what_was_written(how, n, trained, tmp_path, monkeypatch):
    """In the second of three batches, after n tokens."""
    words = ["--device=cpu", *of(trained, "--num_samples=3", "--batch_size=1", n=10)]
    path = tmp_path / "out.jsonl"
    words += {"batch": [], "stream": ["--stream"], "out": [f"--out={path}"]}[how]
    _, whole, _ = enter(sample.main, words)
    whole = path.read_text() if how == "out" else whole
    hidden, calls = GPT.hidden, []

    def interrupt(self: GPT, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 11 + n:
            raise KeyboardInterrupt
        return hidden(self, *args)

    monkeypatch.setattr(GPT, "hidden", interrupt)
    code, shown, err = enter(sample.main, words)
    assert code == 130 and "Traceback" not in err and str(10 + n) in err
    if how == "out":
        rows, before = rows_of(path.read_text()), rows_of(whole)
        assert rows[0] == before[0] and len(rows) == 2
        assert (rows[1]["finish"], rows[1]["tokens"]) == ("interrupted", 4)
        assert rows[1]["text"] == before[1]["text"][:4]
    else:
        assert shown == whole.split(BAR)[0] + BAR + whole.split(BAR)[1][: 1 + n] + BAR


# --- caches, precision, speed ---


@pytest.mark.parametrize("kv", ["dynamic", "paged"])
def test_a_constrained_text_matches(kv, trained, tmp_path):
    pattern, out = "[A-Z][a-z]{2,5}( the)?", tmp_path / "out.jsonl"
    words = "--start=Ann ", "--num_samples=4", f"--regex={pattern}", f"--kv_cache={kv}"
    assert enter(sample.main, ["--device=cpu", f"--out={out}", *of(trained, *words)])[0] == 0
    for row in rows_of(out.read_text()):
        assert re.fullmatch(pattern, row["text"]) and row["finish"] == "stop", row


def test_bfloat16_weights(trained):
    config = sample.SampleConfig(out_dir=str(trained), device="cpu", dtype="bfloat16")
    model, _ = sample.load(config)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.phase().dtype == "bfloat16"
    (text,) = text_of(*of(trained, "--dtype=bfloat16", "--kv_cache=static"))
    assert len(text) == 41


# --- which model ---


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
    assert text_of(f"--init_from={out}", *words) == latest
    words = [f"--init_from={out}", *of(tmp_path / "of another run", "--seed=2")]
    assert text_of(*words, "--checkpoint=best") == best
    for folder in (old, new):  # without an evaluation the latest is the best
        (folder / "train_state.json").write_text(
            re.sub(r'"val_loss": [\d.]+', '"val_loss": null', state)
        )
    assert text_of(*words, "--checkpoint=best") == latest
    assert f"none of {out} was evaluated" in caplog.text and new.name in caplog.text
    assert new.name in refused(f"--init_from={new}", "--checkpoint=best")


@pytest.mark.parametrize("how", ["--temperature=0", "--temperature=1", "--kv_cache=paged"])
def test_a_model_of_nan_is_an_error(trained, tmp_path, how):
    out = Path(shutil.copytree(trained, tmp_path / "out"))
    path = checkpoint.latest(out) / "model.safetensors"
    save_file({k: t * math.nan for k, t in load_file(path).items()}, path)
    path.with_name("checksums.json").unlink()
    assert "NaN" in refused(*of(out), how)


@pytest.mark.parametrize("words, said", [
    ("--out_dir=nowhere", "nowhere"), ("--init_from=no/such/folder", "no/such/folder"),
    ("--temperature=-1", "temperature"), ("--top_p=0", "top_p"), ("--top_k=0", "top_k"),
    ("--num_samples=0", "num_samples"), ("--temprature=1", "--temperature"),
    ("--checkpoint=newest", "latest"), ("--regex=(", "'('"), ("--regex=[a-z]{501}", "501"),
    ("--kv_cache=ring", "paged"), ("--compile", "kv_cache=static"), ("--device=cuda:7", "cuda:7"),
    ("--attention_backend=nosuch", "error: unknown attention backend"),
])
def test_errors_name_the_option_or_the_value(words, said, trained, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert said in refused(f"--out_dir={trained}", *words.split())


@pytest.mark.parametrize("error, said", [
    (MemoryError(), "--batch_size"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate 9 bytes"), "9 bytes"),
])
def test_failures_with_a_remedy_are_one_sentence(error, said, trained, monkeypatch):
    def fail(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(GPT, "hidden", fail)
    err = refused(*of(trained))
    assert said in err and err.count("\n") == err.count("error: ") == 1


def test_errors_name_the_file(trained, tmp_path):
    path = tmp_path / "prompts.txt"
    words = of(trained, f"--prompts={path}")
    assert str(path) in refused(*words)
    path.write_text("\n \n")
    assert str(path) in refused(*words)
    path.write_text("Ann\n\nBob §\n")
    assert "§" in refused(*words)
    assert "out.jsonl" in refused(*of(trained, f"--out={tmp_path / 'no' / 'out.jsonl'}"))


# --- a model with GPT-2's vocabulary ---


@pytest.fixture
def bpe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of GPT-2's size without a download: bytes, then pairs of bytes."""
    ranks = {bytes([i]): i for i in range(256)}
    for i in range(256, 50256):
        ranks[bytes([(i - 256) // 256, (i - 256) % 256])] = i
    encoding = tiktoken.Encoding(
        "pairs", pat_str=r"(?s).+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    monkeypatch.setattr("data.tokenizer._gpt2_encoding", lambda: encoding)


def gpt2_like(path: Path, vocab_size: int = 50304) -> Path:
    """A nanoGPT ckpt.pt with random weights, which has no tokenizer."""
    torch.manual_seed(0)
    return nanogpt_file(path, GPT(GPTConfig(8, vocab_size, n_layer=1, n_head=1, n_embd=8)))


def test_a_model_without_a_tokenizer_has_gpt2s(bpe, tmp_path):
    path = gpt2_like(tmp_path / "ckpt.pt")
    words = [f"--init_from={path}", "--max_new_tokens=30", "--top_k=none", "--temperature=1.5"]
    a = text_of(*words, "--start=Grüße")
    out = tmp_path / "out.jsonl"
    enter(sample.main, ["--device=cpu", *words, "--start=Grüße", f"--out={out}"])
    (row,) = rows_of(written := out.read_text(encoding="utf-8"))
    assert a == [row["prompt"] + row["text"]] and '"Grüße"' in written  # for people, too
    assert a[0].startswith("Grüße") and len(a[0]) > 20
    # Tokens here are random bytes: many are no characters, alone or at all.
    assert "\N{REPLACEMENT CHARACTER}" in a[0]
    assert a == text_of(*words, "--start=Grüße", "--stream=True")


@pytest.mark.parametrize("kind", ["llama", "wordpiece"])
def test_the_space_after_the_prompt_stays(kind, tmp_path, monkeypatch):
    prepared = tmp_path / "prepared"
    (tmp_path / "a.txt").write_text("a rose is " * 99)
    how = {"source": str(tmp_path / "a.txt"), "out_dir": str(prepared), "workers": 1}
    tokenizer = str(small_tokenizer(tmp_path / kind, kind))
    data.prepare("text", data.PrepareConfig(tokenizer=tokenizer, **how))
    meta = data.read_meta(prepared)["tokenizer"]
    new, path = data.from_meta(meta).encode("rose a"), gpt2_like(tmp_path / "ckpt.pt")
    texts = {"a": "a rose a", "": "rose a", "a rose ": "a rose rose a"}
    if kind == "llama":
        texts["a rose "] = "a rose  rose a"  # the prompt's space is a token of its own
    tokens = itertools.cycle([[token] for token in [*new, 1]])
    monkeypatch.setattr("inference.sampling.sample_token", lambda *a: torch.tensor(next(tokens)))
    for prompt, stream in itertools.product(texts, (False, True)):
        words = [f"--init_from={path}", f"--start={prompt}", f"--dataset={prepared}"]
        assert text_of(*words, f"--stream={stream}") == [texts[prompt]]


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(bpe, tmp_path):
    said = refused(f"--init_from={gpt2_like(tmp_path / 'ckpt.pt', 100)}")
    assert " 100 " in said and "tokenizer" in said


def test_a_dataset_names_the_tokenizer_of_a_model_without_one(trained, tmp_path):
    saved = checkpoint.load(checkpoint.latest(trained))
    folder = trained.parent / "data" / "tiny"
    path = nanogpt_file(tmp_path / "ckpt.pt", saved.model())
    words = [f"--init_from={path}", "--start=Ann", "--max_new_tokens=40", "--seed=3"]
    assert "--dataset" in refused(*words)
    texts = text_of(*words, f"--dataset={folder}")
    assert texts == text_of(*of(trained, "--start=Ann", "--seed=3"))
    own = text_of(*of(trained, "--start=Ann", "--seed=3", f"--dataset={tmp_path / 'gone'}"))
    assert own == texts
    assert str(tmp_path / "gone") in refused(*words, f"--dataset={tmp_path / 'gone'}")


# --- from Python, and stop strings ---


def test_three_lines_of_python_are_the_command(trained, tmp_path):
    model, tokenizer = inference.load(str(trained), device="cpu")
    assert model.tokenizer is tokenizer and not model.training
    how = {"temperature": 0.8, "top_k": 200}
    seeds = [torch.Generator().manual_seed(seed) for seed in (1337, 1338)]
    texts = engine.generate(model, ["Ann", "The king"], 40, generator=seeds, **how)
    assert texts == text_of(*of(trained, "--start=Ann", "--start=The king"))
    step = checkpoint.folders(trained)[0]
    seed = torch.Generator().manual_seed(3)
    (text,) = text_of(f"--init_from={step}", *of(trained, "--seed=3"))
    one, _ = inference.load(step, device="cpu")
    assert engine.generate(one, "\n", 40, generator=seed, **how) == text
    checkpoint.save_hf(one, tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.to_json()))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    model, _ = inference.load(tmp_path, device="cpu", attention_backend="manual")
    assert engine.generate(model, "\n", 40, generator=seed.manual_seed(3), **how) == text


@pytest.mark.parametrize("how", [(), ("--stream",), ("--kv_cache=paged", "--batch_size=2")])
def test_a_text_ends_before_a_stop_string(how, trained, tmp_path):
    words, out = of(trained, "--num_samples=3", "--start=Ann"), tmp_path / "out.jsonl"
    free = [text.removeprefix("Ann") for text in text_of(*words)]
    stops = [free[0][9:12], free[1][5:7]]
    assert len({*stops}) == 2
    ends = [min([t.find(s) for s in stops if s in t], default=len(t)) for t in free]
    given = [f"--stop={stop}" for stop in stops]
    assert text_of(*words, *how, *given) == ["Ann" + t[:n] for t, n in zip(free, ends)]
    enter(sample.main, ["--device=cpu", *words, *how, *given, f"--out={out}"])
    for row, text, n in zip(rows_of(out.read_text()), free, ends, strict=True):
        assert row["text"] == text[:n]
        assert row["finish"] == ("stop" if n < len(text) else "length")
    assert "''" in refused(*words, "--stop=")
