"""sample.py: the same text every time, from every kind of model, and clear words where not."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken
import torch
from test_train import TEXT, enter, make_data, nanogpt_file, run

import checkpoint
import sample
import train
from inference import engine, serve, texts
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("remembered_probes")

BAR = "\n---------------\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned a little, out of which the best and the latest checkpoint differ."""
    folder = tmp_path_factory.mktemp("trained")
    r = run(make_data(folder / "data"), folder / "out", max_iters=120, eval_interval=40, n_embd=32)
    assert r.code == 0
    return folder / "out"


def text_of(*words: str) -> list[str]:
    """The texts that sample.py prints, prompts included."""
    code, out, err = enter(sample.main, ["--device=cpu", *words])
    assert code == 0, err
    assert out.endswith(BAR)
    return out.split(BAR)[:-1]


def refused(*words: str) -> str:
    """The one sentence of a mistake of the user's."""
    code, out, err = enter(sample.main, ["--device=cpu", *words])
    assert code == 2, (out, err)
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ") and "Traceback" not in out + err
    return line


def of(out: Path, *words: str, n: int = 40) -> tuple[str, ...]:
    return (f"--out_dir={out}", f"--max_new_tokens={n}", *words)


def test_a_continuation_in_one_call(trained):
    """Where the vocabulary lacks a character of the beginning, its first token stands there."""
    model, tokenizer = sample.load(sample.SampleConfig(out_dir=str(trained), device="cpu"))
    first = tokenizer.decode([0])
    for start, begin in (("\u20ac!", first), ("to", "to")):
        text = texts.continuation(model, tokenizer, start, 9, seed=1, temperature=0)
        idx = torch.tensor([tokenizer.encode(begin)])
        (want,) = model.generate(idx, 9, temperature=0.0).tolist()
        assert text == tokenizer.decode(want) and text.startswith(begin)
    made = []
    for elsewhere, seed in ((1, 5), (2, 5), (1, 6)):  # the process's own state does not matter
        torch.manual_seed(elsewhere)
        made.append(texts.continuation(model, tokenizer, "to", 20, seed=seed))
    assert made[0] == made[1] != made[2]
    few = SimpleNamespace(encode=tokenizer.encode, decode=lambda ids: str(max(ids[2:])),
                          vocab_size=4)  # fmt: skip
    assert texts.continuation(model, few, "to", 20, seed=5) in "0123"


# --- the same every time ---


def test_a_seed_gives_the_same_text_every_time(trained):
    (a,), (b,), (c,) = (text_of(*of(trained, f"--seed={seed}")) for seed in (3, 3, 4))
    assert a == b != c
    assert len(a) == 41 and a.startswith("\n")
    assert set(a) <= set(TEXT)


def test_samples_of_a_prompt_differ_and_each_has_its_own_seed(trained):
    three = text_of(*of(trained, "--num_samples=3", "--start=The", "--seed=5"))
    assert len(set(three)) == 3 and all(t.startswith("The") for t in three)
    assert three[1:2] == text_of(*of(trained, "--start=The", "--seed=6"))


@pytest.mark.parametrize("how", [(), ("--temperature=0",), ("--top_p=0.7", "--top_k=none")])
def test_a_stream_is_the_same_text(how, trained):
    words = of(trained, "--num_samples=2", "--start=Ann", *how)
    assert text_of(*words) == text_of(*words, "--stream=True")


def test_a_stream_comes_token_by_token(trained, monkeypatch):
    """What is shown before the model's next forward pass is all that was drawn so far."""
    held: list[str] = []
    printed: list[str] = []
    seen: list[int] = []
    hidden = GPT.hidden

    def spy(self: GPT, *args: Any) -> Any:
        seen.append(len("".join(printed)))
        return hidden(self, *args)

    def show(text: str = "", end: str = "\n", flush: bool = False, **more: Any) -> None:
        held.append(text + end)
        if flush:  # else a pipe gets it later
            printed.extend(held)
            held.clear()

    monkeypatch.setattr(GPT, "hidden", spy)
    monkeypatch.setattr("builtins.print", show)
    enter(sample.main, ["--device=cpu", *of(trained, "--start=Ann", "--stream=True", n=5)])
    assert seen == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("how", [(), ("--stream",), ("--kv_cache=paged",)], ids=str)
def test_no_two_texts_have_a_seed_in_common(how, trained):
    """Sample i of prompt j is text n = i + j * num_samples, and has seed + n: none begins alike."""
    words = of(trained, "--start=Ann", "--start=Ann", "--num_samples=2", "--seed=5", *how)
    four = text_of(*words)
    assert len(set(four)) == 4
    for n, text in enumerate(four):
        assert text_of(*of(trained, "--start=Ann", f"--seed={5 + n}")) == [text]


def test_temperature_0_takes_the_likeliest_whatever_the_seed(trained):
    (a,), (b,) = (text_of(*of(trained, "--temperature=0", f"--seed={s}")) for s in (1, 2))
    assert a == b
    saved = checkpoint.load(checkpoint.latest(trained))
    model, vocabulary = saved.model().eval(), saved.settings["tokenizer"]["vocabulary"]
    ids = [vocabulary.index(c) for c in a]
    with torch.no_grad():
        for i in range(1, len(ids)):
            logits, _ = model(torch.tensor([ids[max(0, i - 16) : i]]))
            assert int(logits[0, -1].argmax()) == ids[i]
    assert [a] == text_of(*of(trained, "--top_k=1", "--temperature=0.7"))


# --- prompts ---


@pytest.mark.parametrize("form", [["--start={}"], ["--start", "{}"]], ids=["equals", "space"])
def test_every_prompt_is_answered(form, trained):
    """In both forms that an option can have."""
    prompts = ["Ann sees", "The king", "moon"]
    words = [part.format(p) for p in prompts for part in form]
    texts = text_of(*of(trained, "--num_samples=2", *words))
    assert len(texts) == 6
    for p, pair in zip(prompts, (texts[:2], texts[2:4], texts[4:])):
        assert all(t.startswith(p) for t in pair)
    alone = text_of(*of(trained, "--start=The king", "--seed=1339"))  # whatever stood before it
    assert texts[2:3] == alone


def test_prompts_in_mixed_forms(trained):
    texts = text_of(*of(trained, "--start=Ann", "--start", "Bob", "--start=moon"))
    assert [t[:3] for t in texts] == ["Ann", "Bob", "moo"]


def test_a_prompt_from_a_file(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("FILES: LIFE.txt")
    path.write_text("Bob keeps the\nmoon")
    (a,) = text_of(*of(trained, f"--start=FILE:{path}"))
    assert a.startswith("Bob keeps the\nmoon")
    assert [a] == text_of(*of(trained, "--start=Bob keeps the\nmoon"))
    assert str(tmp_path / "no.txt") in refused(*of(trained, f"--start=FILE:{tmp_path / 'no.txt'}"))
    assert str(tmp_path) in refused(*of(trained, f"--start=FILE:{tmp_path}"))
    path.write_bytes(b"\xff\xfe")
    assert f"file {path} cannot be read" in refused(*of(trained, f"--start=FILE:{path}"))


def test_prompts_that_cannot_be(trained):
    said = refused(*of(trained, "--start=Ann §"))
    assert "'§'" in said and "vocabulary" in said
    assert "empty" in refused(*of(trained, "--start="))
    code, out, _ = enter(sample.main, ["--device=cpu", *of(trained, "--start=Ann", "--start=§")])
    assert (code, out) == (2, "")  # found before the first text is made


def test_a_prompt_longer_than_the_context(trained):
    (a,) = text_of(*of(trained, "--start=" + TEXT[:100], "--temperature=0", n=5))
    (b,) = text_of(*of(trained, "--start=" + TEXT[84:100], "--temperature=0", n=5))
    assert len(a) == 105 and a[100:] == b[16:]


def test_a_prompt_that_fills_the_context_is_not_too_long(trained, caplog):
    fills = of(trained, "--start=" + TEXT[:16], "--temperature=0", n=2)
    assert text_of(*fills)[0][:16] == text_of(*fills, "--overflow=stop")[0] == TEXT[:16]
    assert not [r for r in caplog.records if "the model's context" in r.getMessage()]


def test_a_prompt_longer_than_the_context_is_told(trained, caplog):
    text_of(*of(trained, "--start=" + TEXT[:100], n=2))
    (said,) = (r.getMessage() for r in caplog.records if "tokens" in r.getMessage())
    assert said == "a prompt has 100 tokens, the model's context 16: it reads the last 16 of them"
    words = of(trained, "--start=" + TEXT[:17], "--overflow=stop")
    assert "a prompt has 17 tokens, the model's context 16; --overflow=slide" in refused(*words)


def test_overflow_stop_ends_the_text(trained):
    (a,) = text_of(*of(trained, "--start=Ann", "--overflow=stop", "--temperature=0"))
    (b,) = text_of(*of(trained, "--start=Ann", "--temperature=0"))
    assert len(a) == 16 and b.startswith(a) and len(b) == 43


# --- many prompts, and where the texts go ---


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("form", "kv"), [("lines", "dynamic"), ("json", "paged")])
def test_prompts_from_a_file(form, kv, trained, tmp_path):
    """In batches, or one by one into free places: each prompt answered as it is alone, in order."""
    wanted = ["Ann sees", " The king ", "m", "Bob keeps the moon and"]
    lines = [json.dumps({"prompt": w, "id": 1}) if form == "json" else w for w in wanted]
    path, out = tmp_path / "prompts", tmp_path / "out.jsonl"
    path.write_text("\n\n".join(lines) + "\n")
    words = of(trained, f"--prompts={path}", f"--out={out}", "--num_samples=2", n=20)
    words += (f"--kv_cache={kv}",)
    for size in (1, 3, 8):
        code, shown, err = enter(sample.main, ["--device=cpu", f"--batch_size={size}", *words])
        assert (code, shown) == (0, "")
        rows = rows_of(out.read_text())
        assert [row["prompt"] for row in rows] == [w for w in wanted for _ in range(2)]
        assert [row["seed"] for row in rows] == list(range(1337, 1345))
        for row in rows:
            assert row["tokens"] == len(row["text"]) == 20 and row["finish"] == "length"
            alone = of(trained, f"--start={row['prompt']}", f"--seed={row['seed']}", n=20)
            assert text_of(*alone) == [row["prompt"] + row["text"]]
        assert "8 texts, 160 tokens in" in err and f"KV cache ({kv}): " in err


@pytest.mark.parametrize("how", [(), ("--stream",)])
def test_texts_are_written_in_the_order_of_their_prompts(how, trained, tmp_path):
    """Also where a later one ends before an earlier one."""
    words = of(trained, "--start=Ann", "--start=The king", "--num_samples=4", "--stop= ", *how)
    texts = text_of(*words)
    assert len({len(t) for t in texts}) > 2
    for size in (1, 2, 3):
        assert text_of(*words, "--kv_cache=paged", f"--batch_size={size}") == texts
    out = tmp_path / "out.jsonl"
    text_of(*words, "--stream", "--kv_cache=paged", f"--out={out}")
    assert [row["prompt"] + row["text"] for row in rows_of(out.read_text())] == texts


def test_ctrl_c_keeps_the_paged_texts_that_have_begun(trained, tmp_path, monkeypatch):
    """Two at a time: a text that ended is kept though an earlier one has not, in its place."""
    path = tmp_path / "out.jsonl"
    words = of(trained, "--num_samples=6", "--batch_size=2", "--kv_cache=paged", "--stop=t")
    words = ("--device=cpu", *words, "--start=Ann", f"--out={path}")
    enter(sample.main, [*words])
    whole, stream = rows_of(path.read_text()), serve.stream
    assert len(whole) == 6 and {row["finish"] for row in whole} == {"stop"}

    def interrupt(*args: Any, **options: Any) -> Any:
        begun = 0
        for number, token in stream(*args, **options):
            begun += number == 3
            if begun == 2:
                raise KeyboardInterrupt
            yield number, token

    monkeypatch.setattr("inference.serve.stream", interrupt)
    code, _, err = enter(sample.main, [*words])
    rows = rows_of(path.read_text())
    assert code == 130 and "4 texts, " in err
    assert [row["finish"] for row in rows] == ["stop", "interrupted", "stop", "interrupted"]
    assert rows[0] == whole[0] and rows[2] == whole[2] and rows[3]["tokens"] == 1
    for row, before in zip(rows, whole):
        assert row["seed"] == before["seed"] and before["text"].startswith(row["text"])


def test_a_pool_of_few_pages(trained):
    """16 tokens a page, a text holds one: with two pages one text is written after another."""
    words = of(trained, "--start=Ann", "--num_samples=3", "--kv_cache=paged", "--temperature=0")
    texts = text_of(*words)
    assert text_of(*words, "--n_pages=2") == texts
    _, _, err = enter(sample.main, ["--device=cpu", *words, "--n_pages=2"])
    assert "1 of 1 pages in use at most, 0 saved by sharing" in err
    assert "n_pages must be at least 2" in refused(*words, "--n_pages=1")
    assert "with kv_cache=paged; got 9, dynamic" in refused(*of(trained, "--n_pages=9"))


def test_json_lines(trained, tmp_path):
    words, out = of(trained, "--start=Ann", "--start=Bob", n=5), tmp_path / "out.jsonl"
    plain = text_of(*words)
    code, shown, _ = enter(sample.main, ["--device=cpu", *words, f"--out={out}"])
    rows = rows_of(out.read_text())
    assert (code, shown) == (0, "")
    assert [r["prompt"] + r["text"] for r in rows] == plain
    assert rows[0].keys() == {"prompt", "text", "tokens", "seed", "finish"}


def test_files_of_prompts_that_cannot_be(trained, tmp_path):
    path = tmp_path / "prompts.txt"
    words = of(trained, f"--prompts={path}")
    assert str(path) in refused(*words)
    path.write_text("\n \n")
    assert "there is no prompt in" in refused(*words)
    path.write_text("Ann\n\nBob §\n")
    assert f"{path}:3: the character '§'" in refused(*words)
    for other in ('{"text": "Bob"}', '{"prompt": 3}', '["prompt"]', "Bob"):
        path.write_text(f'{{"prompt": "Ann"}}\n{other}\n')
        assert f'{path}:2 must be an object with a text "prompt"' in refused(*words)
    path.write_text('{"prompt": "Ann"}\n{"prompt": ""}\n')
    assert f"{path}:2: a prompt is empty" in refused(*words)
    said = refused(*of(trained, f"--out={tmp_path / 'no' / 'out.jsonl'}"))
    assert "out.jsonl cannot be written" in said


@pytest.mark.parametrize("how, n", [("batch", 4), ("stream", 4), ("stream", 0), ("out", 4)])
def test_ctrl_c_keeps_what_was_written(how, n, trained, tmp_path, monkeypatch):
    """In the second of three batches, after n tokens; of a stream the prompt is shown by then."""
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
    assert code == 130 and "Traceback" not in err and f"2 texts, {10 + n} tokens in" in err
    if how == "out":
        rows, before = rows_of(path.read_text()), rows_of(whole)
        assert rows[0] == before[0] and len(rows) == 2
        assert (rows[1]["finish"], rows[1]["tokens"]) == ("interrupted", 4)
        assert rows[1]["text"] == before[1]["text"][:4]
    else:
        assert shown == whole.split(BAR)[0] + BAR + whole.split(BAR)[1][: 1 + n] + BAR


@pytest.mark.parametrize("how", [(), ("--stream",)])
def test_a_text_ends_before_the_stop_string(how, trained):
    words = of(trained, "--start=Ann", "--temperature=0", *how)
    (whole,) = text_of(*words)
    for stop in (whole[10:12], whole[20], whole[8:15]):
        end = 3 + whole[3:].index(stop)
        assert text_of(*words, f"--stop={stop}") == [whole[:end]]
    assert text_of(*words, "--stop=§") == [whole]
    _, shown, _ = enter(sample.main, ["--device=cpu", *words, f"--stop={whole[20]}"])
    assert shown == whole[: 3 + whole[3:].index(whole[20])] + BAR


def test_the_speed_and_the_first_token_are_timed(trained, monkeypatch):
    """By a clock that is looked at three times: at the start, the first token and the end."""
    clock = SimpleNamespace(perf_counter=map(float, itertools.count(5)).__next__)
    monkeypatch.setattr(texts, "time", clock)
    _, _, err = enter(sample.main, ["--device=cpu", *of(trained, "--start=Ann", n=20)])
    assert "1 text, 20 tokens in 2.00 s: 10.0 tokens/s, first token after 1000 ms" in err


@pytest.mark.parametrize("pieces", [
    ["a", "ab", "ac", "aba", "cd"], list("aababcaba"), ["", "aababcaba"], ["c", "ca"], ["cab"],
])  # fmt: skip
@pytest.mark.parametrize("stop", [None, "abc", "a", "bab", "x", "caba", "ba", "aa"])
def test_what_is_shown_before_a_stop_string(pieces, stop) -> None:
    """However the text is cut; and nothing is held back that cannot be its beginning."""
    text = "".join(pieces)
    assert "".join(texts.before(stop, pieces)) == (text.partition(stop)[0] if stop else text)
    if stop == "x":
        assert list(texts.before(stop, pieces)) == [p for p in pieces if p]


# --- caches, precision, speed ---


@pytest.mark.parametrize("kv", ["none", "dynamic", "static", "paged"])
def test_every_cache_gives_the_same_texts(kv, trained):
    words = of(trained, "--start=Ann", "--start=The king", "--num_samples=2")
    assert text_of(*words, f"--kv_cache={kv}") == text_of(*words, "--kv_cache=none")
    _, _, err = enter(sample.main, ["--device=cpu", *words, f"--kv_cache={kv}"])
    memory = "not used" if kv == "none" else r"\d+\.\d MB"
    memory += ", 4 of 4 pages in use at most, 0 saved by sharing" * (kv == "paged")
    assert re.search(
        rf"4 texts, 160 tokens in \d+\.\d\d s: \d+\.\d tokens/s, first token after \d+ ms; "
        rf"KV cache \({kv}\): {memory}\n$",
        err,
    )


@pytest.mark.parametrize("word, pattern", [
    (r"--regex=[A-Z][a-z]{2,5}( the)?", r"[A-Z][a-z]{2,5}( the)?"),
    ("--choices=the king,the day", "the (king|day)"),
    (r'--json_schema={"type": "boolean"}', "true|false"),
])  # fmt: skip
def test_a_constrained_text_matches(word, pattern, trained):
    how = "--device=auto" if "json" in word else "--device=cpu"
    texts = text_of(*of(trained, "--start=Ann ", "--num_samples=4", word, how, n=30))
    assert len(texts) == 4
    for text in texts:
        assert re.fullmatch(pattern, text.removeprefix("Ann ")), text


def test_a_constrained_text_has_ended_by_itself(trained, tmp_path):
    words = of(trained, "--start=Ann", "--regex=[a-z]{3}", f"--out={tmp_path / 'o.jsonl'}")
    assert enter(sample.main, ["--device=cpu", *words])[0] == 0
    (told,) = rows_of((tmp_path / "o.jsonl").read_text())
    assert (told["tokens"], told["finish"]) == (3, "stop")


def test_choices_are_named_or_the_lines_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sample.constrain, "choices", lambda texts, tokenizer: list(texts))
    (tmp_path / "a.txt").write_text("yes, please\n\nno\n")
    for given in (("yes, please", "no"), (f"FILE:{tmp_path / 'a.txt'}",)):
        found: Any = sample.constraint_of(sample.SampleConfig(choices=given), None)
        assert found == ["yes, please", "no"]


def test_paged_attention_alone_may_run(trained):
    strict = ("--attention_backend=paged", "--attention_fallback=False", "--kv_cache=paged")
    words = of(trained, "--start=Ann", n=20)  # beyond the context
    assert text_of(*words, *strict) == text_of(*words)


@pytest.mark.parametrize("place, kv", [(engine, "dynamic"), (serve, "paged")])
def test_how_to_draw_reaches_the_engine(place, kv, trained, monkeypatch):
    asked: list[dict[str, Any]] = []
    stream = place.stream
    monkeypatch.setattr(place, "stream", lambda *a, **how: asked.append(how) or stream(*a, **how))
    words = ("--top_k=7", "--top_p=0.5", "--temperature=0.3", "--overflow=stop", "--batch_size=2")
    assert len(text_of(*of(trained, "--num_samples=3", f"--kv_cache={kv}", *words, n=3))) == 3
    tokens = len(set(TEXT))
    for how in asked:
        assert (how["top_k"], how["top_p"], how["temperature"]) == (7, 0.5, 0.3)
        assert (how["overflow"], how["vocab_size"]) == ("stop", tokens)
        assert how.get("slots") == (2 if kv == "paged" else None)
    assert len(asked) == (1 if kv == "paged" else 2)


def test_bfloat16_weights(trained):
    config = sample.SampleConfig(out_dir=str(trained), device="cpu", dtype="bfloat16")
    model, _ = sample.load(config)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.attention()[1].dtype == "bfloat16"
    (text,) = text_of(*of(trained, "--dtype=bfloat16", "--kv_cache=static"))
    assert len(text) == 41


def test_float32_is_tf32_on_cuda_as_in_training(trained):
    torch.backends.cuda.matmul.allow_tf32 = False
    sample.load(sample.SampleConfig(out_dir=str(trained), device="cpu"))
    assert torch.backends.cuda.matmul.allow_tf32


def test_compile_without_a_compiler_is_one_sentence(trained, monkeypatch):
    monkeypatch.setattr("core.runtime.shutil.which", lambda name: None)
    said = refused(*of(trained, "--compile", "--kv_cache=static"))
    assert "--compile cannot work here: there is no C++ compiler on this machine" in said


# --- which model ---


def test_the_latest_and_the_best_checkpoint(trained, tmp_path):
    """The best by validation loss is made to be another than the latest, and of other weights."""
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
    for folder in (old, new):  # where none was evaluated the latest is the best that is known
        (folder / "train_state.json").write_text(
            re.sub(r'"val_loss": [\d.]+', '"val_loss": null', state)
        )
    assert text_of(*words, "--checkpoint=best") == latest


def test_the_backend_that_is_asked_for_runs(trained):
    words = of(trained, "--temperature=0")
    assert text_of(*words) == text_of(*words, "--attention_backend=manual")
    assert text_of(*words) == text_of(*words, "--attn_implementation=eager")
    assert "unknown attention backend" in refused(*words, "--attention_backend=sdp")
    said = refused(*words, "--attention_backend=sdpa_cudnn", "--attention_fallback=False")
    assert "sdpa_cudnn" in said and "cuda" in said


@pytest.mark.parametrize("name", ["attention_hub_kernels", "allow_mps_sdpa"])
def test_what_is_allowed_to_a_backend_reaches_the_model(name, trained):
    config = sample.SampleConfig(out_dir=str(trained), device="cpu", **{name: True})
    for policy in (sample.load(config)[0].policy, train.TrainConfig(**{name: True}).policy):
        allowed = [n for n, on in asdict(policy).items() if on]
        assert allowed == ["fallback", re.sub("^(attention|allow)_", "", name)]


def test_a_window_that_was_trained_with_stays(tmp_path):
    r = run(make_data(tmp_path / "data"), tmp_path / "out", attention_window=2)
    assert r.code == 0
    config = sample.SampleConfig(out_dir=str(tmp_path / "out"), device="cpu")
    model, _ = sample.load(config)
    assert model.config.attention_window == 2 and not model.training


@pytest.mark.parametrize(
    "words, said",
    [
        (["--out_dir=nowhere"], "no checkpoint in nowhere"),
        (["--init_from=no/such/folder"], "no/such/folder"),
        (["--temperature=-1"], "temperature must be at least 0"),
        (["--top_p=0"], "top_p must be in (0, 1]"),
        (["--top_k=0"], "top_k must be at least 1"),
        (["--num_samples=0"], "num_samples must be at least 1"),
        (["--max_new_tokens=0"], "max_new_tokens must be at least 1"),
        (["--temprature=1"], "did you mean '--temperature'"),
        (["--checkpoint=newest"], "latest, best"),
        (["--batch_size=0"], "batch_size must be at least 1"),
        (["--regex=("], "needs balanced brackets"),
        (["--regex=a", "--choices=b,c"], "regex and choices cannot be combined"),
        (["--choices=b,c", "--stop=a"], "choices and stop cannot be combined"),
        (["--choices=FILE:gone.txt"], "gone.txt"),
        (["--json_schema={"], "JSON"),
        (["--stop="], "stop must have at least one character"),
        (["--kv_cache=ring"], "none, dynamic, static, paged"),
        (["--compile"], "compile needs kv_cache=static, got dynamic"),
        (["--device=cuda:7"], "there is no device 'cuda:7'"),
    ],
)
def test_mistakes_are_one_sentence(words, said, trained, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert said in refused(f"--out_dir={trained}", *words)


@pytest.mark.parametrize("name", ["model.safetensors", "settings.json"])
def test_a_damaged_checkpoint_is_one_sentence(name, trained, tmp_path):
    out = Path(shutil.copytree(trained, tmp_path / "out"))
    path = checkpoint.latest(out) / name
    path.write_bytes(path.read_bytes()[:-10])
    assert str(path) in refused(*of(out))


# --- a model with GPT-2's vocabulary ---


@pytest.fixture
def bpe(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as GPT-2's: the bytes, then pairs of them. No download is needed."""
    ranks = {bytes([i]): i for i in range(256)}
    for i in range(256, 50256):
        ranks[bytes([(i - 256) // 256, (i - 256) % 256])] = i
    encoding = tiktoken.Encoding(
        "pairs", pat_str=r"(?s).+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    monkeypatch.setattr("data.tokenizer._gpt2_encoding", lambda: encoding)


def gpt2_like(path: Path, vocab_size: int = 50304) -> Path:
    """A nanoGPT ckpt.pt with random weights: a model that says nothing of its tokenizer."""
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


def test_samples_share_their_prompts_pages(bpe, tmp_path):
    """A page of the prompt's 25 tokens is full: two samples of three need not store it.

    They begin a step after the first, and hold two pages when it has taken its third.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(64, 50304, n_layer=1, n_head=1, n_embd=8))
    path = nanogpt_file(tmp_path / "ckpt.pt", model)
    words = [f"--init_from={path}", "--max_new_tokens=9", f"--start={'x' * 50}", "--num_samples=3"]
    texts = text_of(*words)
    assert text_of(*words, "--kv_cache=paged") == texts and len(set(texts)) == 3
    _, _, err = enter(sample.main, ["--device=cpu", "--kv_cache=paged", *words])
    assert "5 of 9 pages in use at most, 2 saved by sharing" in err
    words_ = [*words[:2], "--start=a", words[2], "--batch_size=1"]  # the longest is the last
    assert text_of(*words_, "--kv_cache=paged") == text_of(*words_)
    said = refused(*words, "--kv_cache=paged", "--n_pages=3")
    assert "prompt 0 needs 3 pages of 16 tokens, for its 25 tokens and 9 new ones" in said


def test_the_text_ends_where_the_model_ends_it(bpe, tmp_path, monkeypatch):
    path = gpt2_like(tmp_path / "ckpt.pt")
    tokens = iter([[65], [66], [50256], [67]])
    monkeypatch.setattr("inference.sampling.sample_token", lambda *a: torch.tensor(next(tokens)))
    assert text_of(f"--init_from={path}", "--start=x") == ["xAB"]


def test_a_stop_string_whose_character_has_several_tokens(bpe, tmp_path, monkeypatch):
    path = gpt2_like(tmp_path / "ckpt.pt")
    tokens = iter([[65], *([byte] for byte in "é".encode())])  # and no token after it
    monkeypatch.setattr("inference.sampling.sample_token", lambda *a: torch.tensor(next(tokens)))
    assert text_of(f"--init_from={path}", "--start=x", "--stop=é") == ["xA"]


def test_a_stop_string_within_a_token(bpe, tmp_path, monkeypatch):
    path, out = gpt2_like(tmp_path / "ckpt.pt"), tmp_path / "o.jsonl"
    ab = 256 + 256 * ord("a") + ord("b")
    monkeypatch.setattr("inference.sampling.sample_token", lambda *a: torch.tensor([ab]))
    for stop, text, tokens in (("a", "", 1), ("b", "a", 1), ("ab", "", 1), ("ba", "a", 2)):
        words = (f"--init_from={path}", "--start=x", f"--stop={stop}", f"--out={out}")
        enter(sample.main, ["--device=cpu", *words])
        (told,) = rows_of(out.read_text())
        assert (told["text"], told["tokens"], told["finish"]) == (text, tokens, "stop")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(bpe, tmp_path):
    said = refused(f"--init_from={gpt2_like(tmp_path / 'ckpt.pt', 100)}")
    assert "vocabulary of 100 tokens" in said and "tokenizer" in said


def test_a_dataset_names_the_tokenizer_of_a_model_without_one(trained, tmp_path):
    """A nanoGPT character model brings none: the folder of what it was trained on has it."""
    saved = checkpoint.load(checkpoint.latest(trained))
    folder = trained.parent / "data" / "tiny"
    path = nanogpt_file(tmp_path / "ckpt.pt", saved.model())
    words = [f"--init_from={path}", "--start=Ann", "--max_new_tokens=40", "--seed=3"]
    assert "--dataset=data/shakespeare_char" in refused(*words)
    texts = text_of(*words, f"--dataset={folder}")
    assert texts == text_of(*of(trained, "--start=Ann", "--seed=3"))
    own = text_of(*of(trained, "--start=Ann", "--seed=3", f"--dataset={tmp_path / 'gone'}"))
    assert own == texts  # which it needs for no other
    said = refused(*words, f"--dataset={tmp_path / 'gone'}")
    assert f"there is no dataset in {tmp_path / 'gone'}" in said


def test_from_a_folder_of_transformers(bpe, tmp_path):
    torch.manual_seed(0)
    config = GPTConfig(8, 50257, n_layer=1, n_head=1, n_embd=8, gelu="tanh")
    checkpoint.save_hf(GPT(config), tmp_path / "hf")
    (text,) = text_of(f"--init_from={tmp_path / 'hf'}", "--start=x", "--max_new_tokens=5")
    assert len(text) > 1
