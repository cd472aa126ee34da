"""data/: tokenizers, sources and the preparation of datasets."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import checkpoint
import data
from core.settings import UserError
from data import sources
from data.__main__ import main
from data.documents import text_parts
from data.prepare import baselines

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
needs_tiny = pytest.mark.skipif(not TINY.exists(), reason=f"{TINY} is not there")


def run(dataset: str, out_dir: Path, **options: Any) -> dict[str, Any]:
    data.prepare(dataset, data.PrepareConfig(out_dir=str(out_dir), workers=1, **options))
    return data.read_meta(out_dir)


def ids_of(folder: Path, split: str) -> list[int]:
    return np.fromfile(folder / f"{split}.bin", dtype="<u2").tolist()


def documents_of(folder: Path, meta: dict[str, Any], split: str) -> list[str]:
    tokenizer = data.from_meta(meta["tokenizer"])
    found: list[list[int]] = [[]]
    for i in ids_of(folder, split):
        if i == tokenizer.eot:
            found.append([])
        else:
            found[-1].append(i)
    assert found.pop() == []
    return [tokenizer.decode(ids) for ids in found]


@pytest.fixture(scope="module")
def gpt2() -> data.GPT2Tokenizer:
    try:
        return data.GPT2Tokenizer()
    except UserError as e:
        pytest.skip(f"GPT-2's vocabulary is not available: {e}")


# --- tokenizers ---


def test_char_tokenizer() -> None:
    t = data.CharTokenizer(sorted(set("hello\n")))
    assert t.encode("hole\n") == [2, 4, 3, 1, 0] and t.decode([2, 4, 3, 1, 0]) == "hole\n"
    with pytest.raises(UserError, match="'z'"):
        t.encode("hz")


def test_gpt2_tokenizer(gpt2: data.GPT2Tokenizer) -> None:
    assert gpt2.encode("hello world") == [31373, 995]  # OpenAI's example
    assert gpt2.vocab_size == 50257 and gpt2.eot not in gpt2.encode("<|endoftext|>")


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
@settings(deadline=None)
def test_streaming_gives_the_text_and_whole_characters(gpt2: Any, text: str) -> None:
    ids = gpt2.encode(text)
    pieces = list(gpt2.stream_decode(iter(ids)))
    assert "".join(pieces) == text == gpt2.decode(ids)


def test_a_tokenizer_is_rebuilt_from_its_meta(gpt2: data.GPT2Tokenizer) -> None:
    for t in (gpt2, data.CharTokenizer(["a", "b"]), data.CharTokenizer(["", "a"], eot=0)):
        again = data.from_meta(json.loads(json.dumps(t.to_meta())))
        assert (again.name, again.vocab_size, again.eot) == (t.name, t.vocab_size, t.eot)
        assert again.encode("aa") == t.encode("aa")
    with pytest.raises(UserError, match="klingon"):
        data.from_meta({"name": "klingon"})


# --- sources ---


@pytest.fixture(scope="module")
def plays() -> str:
    try:
        return sources.plays()
    except UserError as e:
        pytest.skip(f"the plays are not available: {e}")


def test_the_plays_are_plain_text(plays: str) -> None:
    assert plays.isascii() and not re.search(r"[*_#\\\[\]<>`|\t\r]| $|^ |  ", plays, re.M)
    speeches = plays.strip().split("\n\n")
    named = [s for s in speeches if re.match(r"[A-Z][\w' &.-]*:\n", s)]
    assert len(speeches) > 30_000 and len(named) > 0.999 * len(speeches)
    assert "HAMLET:\nTo be, or not to be: that is the question:\n" in plays
    for direction in ("Enter HAMLET", "Exeunt", "Aside", "SCENE I", "ACT I"):
        assert not re.search(rf"^\W*{direction}\W*$", plays, re.M), direction


WHEEL = "some", "1.0", hashlib.sha256(b"good").hexdigest()


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a `python -m pip` that runs the returned file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "fake" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # the file changes within a second
    yield package / "__main__.py"


def deliver(content: bytes) -> str:
    return (
        "import sys, pathlib\n"
        "folder = sys.argv[sys.argv.index('--dest') + 1]\n"
        f"pathlib.Path(folder, 'some-1.0-py3-none-any.whl').write_bytes({content!r})\n"
    )


def test_a_wheel_is_downloaded_once_and_its_hash_checked(fake_pip: Path) -> None:
    fake_pip.write_text(deliver(b"evil"))
    with pytest.raises(UserError, match=hashlib.sha256(b"evil").hexdigest()):
        sources.fetch_wheel(*WHEEL)
    fake_pip.write_text(deliver(b"good"))
    cached = sources.fetch_wheel(*WHEEL)
    assert cached.read_bytes() == b"good"
    fake_pip.write_text("raise SystemExit('ERROR: no network')")
    assert sources.fetch_wheel(*WHEEL) == cached
    cached.write_bytes(b"damaged")
    with pytest.raises(UserError, match="no network"):
        sources.fetch_wheel(*WHEEL)


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("data.sources.urlopen", offline)
    with pytest.raises(UserError, match=r"no route.*--source"):
        run("shakespeare_char", tmp_path / "out", source="tinyshakespeare")
    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", offline)
    with pytest.raises(UserError, match=r"no route.*--source"):
        run("fineweb", tmp_path / "out")


# --- shakespeare ---


@needs_tiny
@pytest.mark.parametrize(
    "dataset, counts",  # of nanoGPT's prepare.py
    [("shakespeare_char", (1_003_854, 111_540)), ("shakespeare", (301_966, 36_059))],
)
def test_tinyshakespeare_is_split_as_in_nanogpt(tmp_path: Path, gpt2: Any, dataset: str,
                                               counts: tuple[int, int]) -> None:
    meta = run(dataset, tmp_path, source=str(TINY))
    assert (meta["tokens"]["train"], meta["tokens"]["val"]) == counts
    both = ids_of(tmp_path, "train") + ids_of(tmp_path, "val")
    assert data.from_meta(meta["tokenizer"]).decode(both) == TINY.read_text(encoding="ascii")


def test_baselines_are_cross_entropies_of_smoothed_counts() -> None:
    train, val, V = np.array([0, 1, 0, 1, 1, 2], dtype=np.uint16), np.array([1, 0, 1, 2, 2]), 4
    seen, pairs = train.tolist(), list(itertools.pairwise(train.tolist()))
    unigram = [-np.log((seen.count(t) + 1) / (len(seen) + V)) for t in val]
    bigram = [
        -np.log((pairs.count((a, b)) + 1) / (sum(first == a for first, _ in pairs) + V))
        for a, b in itertools.pairwise(val.tolist())
    ]
    found = baselines(train, val.astype(np.uint16), V)
    assert found["unigram"] == pytest.approx(np.mean(unigram))
    assert found["bigram"] == pytest.approx(np.mean(bigram))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a rose is a rose is a rose\n" * 40)  # 1,080 characters
    return path


def test_the_second_run_does_nothing_unless_the_source_changed(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    meta = run("shakespeare_char", out, source=str(text), val_fraction=0.25)
    assert meta["tokens"] == {"train": 810, "val": 270}
    assert {f.name for f in out.iterdir()} == {"train.bin", "val.bin", "meta.json"}
    before = [(f.name, f.stat().st_ino) for f in sorted(out.iterdir())]
    run("shakespeare_char", out, source=str(text), val_fraction=0.25)
    assert [(f.name, f.stat().st_ino) for f in sorted(out.iterdir())] == before
    text.write_text(text.read_text() * 2)
    assert run("shakespeare_char", out, source=str(text), val_fraction=0.25)["tokens"]["val"] == 540


def test_another_dataset_is_replaced_only_by_force(tmp_path: Path, text: Path) -> None:
    run("shakespeare_char", tmp_path / "out", source=str(text))
    with pytest.raises(UserError, match="--force"):
        run("shakespeare_char", tmp_path / "out", source=str(text), val_fraction=0.5)
    meta = run("shakespeare_char", tmp_path / "out", source=str(text), val_fraction=0.5, force=True)
    assert meta["tokens"] == {"train": 540, "val": 540}


def test_a_damaged_dataset_is_prepared_again(tmp_path: Path, text: Path) -> None:
    run("shakespeare_char", tmp_path / "out", source=str(text))
    (tmp_path / "out" / "train.bin").write_bytes(b"12")
    run("shakespeare_char", tmp_path / "out", source=str(text))
    assert len(ids_of(tmp_path / "out", "train")) == 972


@pytest.mark.parametrize("files", [
    {"val.bin": "12", "meta.json": "{}"}, {"val.bin": "12", "meta.pkl": "x"},
    {"train.bin": "12", "val.bin": "12", "meta.json": '{"vocab": 50}'}, {"meta.json": "[]"},
])
def test_files_of_another_program_are_not_replaced(tmp_path: Path, text: Path, files: Any) -> None:
    (out := tmp_path / "out" / ".partial").mkdir(parents=True)
    for name, content in files.items():
        (out.parent / name).write_text(content)
    for force in (False, True):
        with pytest.raises(UserError, match="another program"):
            run("shakespeare_char", out.parent, source=str(text), force=force)
    assert {f.name: f.read_text() for f in out.parent.iterdir() if f != out} == files


@pytest.mark.parametrize("name", [
    ".partial", *(f".partial/{x}" for x in ("train.bin", "val.bin", "meta.json")),
    "meta.json.partial",
])
def test_no_file_of_a_dataset_is_written_through_a_link(tmp_path: Path, text: Path, name: str
                                                        ) -> None:  # fmt: skip
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (target := elsewhere / "file").write_text("precious")
    (link := tmp_path / "out" / name).parent.mkdir(parents=True)
    link.symlink_to(elsewhere if name == ".partial" else target)
    (tmp_path / "train.bin").write_bytes(bytes(20))
    (tmp_path / "val.bin").write_bytes(bytes(20))
    for dataset, source in (("shakespeare_char", text), ("shards", tmp_path)):
        try:
            run(dataset, tmp_path / "out", source=str(source), force=True)
        except UserError as e:
            assert str(link) in str(e)
    assert [p.name for p in elsewhere.iterdir()] == ["file"] and target.read_text() == "precious"


def test_another_tokenizer_is_another_dataset(tmp_path: Path, text: Path, monkeypatch: Any) -> None:
    how: Any = {"out_dir": tmp_path / "out", "source": str(text), "tokenizer": "t"}
    for name in "ab":
        (tmp_path / name).mkdir()
        small_tokenizer(tmp_path / name / "t", "bytelevel")
    monkeypatch.chdir(tmp_path / "a")
    assert run("text", **how)["vocab_size"] == 258
    small_tokenizer(tmp_path / "t", "wordlevel").rename("t/new")
    os.replace("t/new/tokenizer.json", "t/tokenizer.json")
    assert run("text", **how)["vocab_size"] < 258
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(UserError, match="another dataset"):
        run("text", **how)


@pytest.mark.parametrize("victim", ["worker", "main"])
def test_no_process_outlives_another(tmp_path: Path, victim: str) -> None:
    os.mkfifo(source := tmp_path / "a.txt")
    argv = [f"--source={source}", f"--tokenizer={small_tokenizer(tmp_path / 't', 'bytelevel')}",
            "--workers=1", f"--out_dir={tmp_path / 'out'}"]
    main = subprocess.Popen([sys.executable, "-m", "data", "text", *argv], cwd=ROOT, text=True,
                            stderr=subprocess.PIPE)
    with source.open("w") as f:
        f.write("a rose " * 3 * 2**17)  # a task and more; then it waits for the rest
        f.flush()
        children = Path(f"/proc/{main.pid}/task/{main.pid}/children")
        while not children.read_text() and main.poll() is None:
            time.sleep(0.05)
        pid = children.read_text() if victim == "worker" else main.pid
        os.kill(int(pid), signal.SIGKILL)
    said = main.communicate(timeout=60)[1].splitlines()  # until the last process closes it
    assert victim == "main" or said[-1].startswith("error: --workers=1: ")
    assert main.returncode == (2 if victim == "worker" else -signal.SIGKILL)


# --- documents ---

DOCUMENTS = [f"Page {i}, with words.\nAnd more.\n" for i in range(40)]


def write(path: Path, documents: list[str]) -> Path:
    lines = "".join(json.dumps({"text": d}) + "\n" for d in documents)
    path.write_text(lines, encoding="utf-8")
    return path


def test_every_tenth_document_validates(tmp_path: Path, gpt2: Any) -> None:
    lines = [d.replace("\n", "\r\n") for d in DOCUMENTS]  # read as in a .txt file
    source = write(tmp_path / "pages.jsonl", lines)
    meta = run("text", tmp_path / "out", source=str(source), limit=30)
    assert documents_of(tmp_path / "out", meta, "val") == DOCUMENTS[9:30:10]
    train = [d for i, d in enumerate(DOCUMENTS[:30]) if i % 10 != 9]
    assert documents_of(tmp_path / "out", meta, "train") == train
    source = write(tmp_path / "more.jsonl", [f"Page {i}" for i in range(4100)])
    meta = run("text", tmp_path / "more", source=str(source), val_fraction=0.0005)
    assert documents_of(tmp_path / "more", meta, "val") == ["Page 1999", "Page 3999"]


def test_a_folder_of_texts_and_one_long_text(tmp_path: Path, gpt2: Any, text: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"text {i}")
    meta = run("text", tmp_path / "a", source=str(folder))
    assert documents_of(tmp_path / "a", meta, "val") == ["text 9"]
    meta = run("text", tmp_path / "b", source=str(text))  # its tail validates
    n = len(gpt2.encode(text.read_text())) + 1
    assert meta["tokens"] == {"train": n - -(-n // 10), "val": -(-n // 10)}


@given(st.text(alphabet="ab1' \n\t", max_size=60))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_have_the_tokens_of_the_whole_text(gpt2: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.documents.PIECE", 8)
        parts = list(text_parts(path))
        patch.setattr("data.documents.MOST", 16)
        short = list(text_parts(path))
    assert [i for part in parts for i in gpt2.encode(part)] == gpt2.encode(text)
    assert "".join(short) == text and max(map(len, short)) < 16 + 8


def small_tokenizer(folder: Path, kind: str) -> Path:
    """A folder with a tokenizer.json; wordpiece and wordlevel lose spaces and unknown words."""
    tk = pytest.importorskip("tokenizers")
    words = ["<bos>", "<eos>", "[UNK]", *"abcdefghijklmnopqrstuvwxyz", "##a", "rose", "is"]
    vocab = {word: i for i, word in enumerate(words)}
    split = tk.pre_tokenizers.Whitespace()
    if kind == "bytelevel":
        signs = ["<bos>", "<eos>", *sorted(tk.pre_tokenizers.ByteLevel.alphabet())]
        vocab = {c: i for i, c in enumerate(signs)}
        model, split = tk.models.BPE(vocab, []), tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "llama":
        words = ["<bos>", "<eos>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcrose."]
        words += ["ro", "\u2581ro", "\u2581\u2581"]
        vocab = {word: i for i, word in enumerate(words)}
        merges = [("r", "o"), ("\u2581", "ro"), ("\u2581", "\u2581")]
        model = tk.models.BPE(vocab, merges, byte_fallback=True)
    else:
        model = {"wordpiece": tk.models.WordPiece, "wordlevel": tk.models.WordLevel}[kind](
            vocab, unk_token="[UNK]"
        )
    made = tk.Tokenizer(model)
    made.pre_tokenizer = split
    made.decoder = tk.decoders.ByteLevel() if kind == "bytelevel" else tk.decoders.WordPiece()
    if kind == "llama":
        spaces = [tk.normalizers.Prepend("\u2581"), tk.normalizers.Replace(" ", "\u2581")]
        made = tk.Tokenizer(model)
        made.normalizer = tk.normalizers.Sequence(spaces)
        bytes_too = [tk.decoders.Replace("\u2581", " "), tk.decoders.ByteFallback()]
        end = [tk.decoders.Fuse(), tk.decoders.Strip(" ", 1, 0)]
        made.decoder = tk.decoders.Sequence(bytes_too + end)
    made.add_special_tokens(["<bos>", "<eos>"])
    added = {"single": "<bos> $A", "special_tokens": [("<bos>", 0)]}
    made.post_processor = tk.processors.TemplateProcessing(**added)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


KINDS = ["bytelevel", "wordpiece", "wordlevel", "llama"]


@pytest.mark.parametrize("kind", KINDS)
@given(data_=st.data())
@settings(max_examples=60, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_after_its_prompt_is_the_text_of_all_tokens(tmp_path: Path, kind: str,
                                                           data_: Any) -> None:
    """Whatever the tokens are: invalid bytes and special tokens too."""
    ours = data.FileTokenizer.read(small_tokenizer(tmp_path, kind))
    prompt = ours.encode(data_.draw(st.sampled_from(["", "a rose", "rose is ", " a", "\nrose"])))
    new = data_.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    pieces = [*ours.stream_decode(iter(new), prompt)]
    assert ours.made.decode(prompt) + "".join(pieces) == ours.made.decode(prompt + new)
    assert "" not in pieces


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_tokens_of_the_whole(tmp_path: Path, kind: str) -> None:
    tokenizer = small_tokenizer(tmp_path / "t", kind)
    text = "a rose is\n\n  a rose.\n" * 110_000  # of three parts
    (tmp_path / "a.txt").write_text(text)
    meta = run("text", tmp_path / "out", source=str(tmp_path / "a.txt"), tokenizer=str(tokenizer))
    whole = data.from_meta(meta["tokenizer"])
    assert isinstance(whole, data.FileTokenizer)
    found = ids_of(tmp_path / "out", "train") + ids_of(tmp_path / "out", "val")
    assert found == [*whole.made.encode(text, add_special_tokens=False).ids, 1]
    assert sum(meta["bytes"].values()) == len(text)


def test_links_are_followed_once(tmp_path: Path, gpt2: Any, capsys: Any) -> None:
    for name in ("src/a/one.txt", "disk/two.txt", "disk/deep/three.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(f"{name} of texts\n"))
    for name, target in {"b": "../disk", "c": "../disk", "d.txt": "a/one.txt"}.items():
        (tmp_path / "src" / name).symlink_to(target)
    meta = run("text", tmp_path / "out", source=str(tmp_path / "src"))
    assert meta["documents"] == 3 and " 3 files" in capsys.readouterr().out
    for target in ("..", "../../src", "nothing", "e"):  # loops, and links to nothing
        (link := tmp_path / "src" / "a" / "e").symlink_to(target)
        with pytest.raises(UserError, match=f"src/a/{'' if target == 'nothing' else 'e'}"):
            run("text", tmp_path / "out", source=str(tmp_path / "src"), force=True)
        link.unlink()


def test_two_preparations_do_not_share_a_folder(tmp_path: Path, text: Path, gpt2: Any) -> None:
    os.mkfifo(source := tmp_path / "a.txt")
    argv = [f"--source={source}", "--workers=1", f"--out_dir={tmp_path / 'out'}"]
    first = subprocess.Popen([sys.executable, "-m", "data", "text", *argv], cwd=ROOT)
    with source.open("w") as f:  # it reads now
        for dataset in ("chars", "text"):
            with pytest.raises(UserError, match=str(tmp_path / "out")):
                run(dataset, tmp_path / "out", source=str(text), force=True)
        f.write("of the first " * 100)
    assert first.wait(60) == 0
    found = documents_of(tmp_path / "out", data.read_meta(tmp_path / "out"), "val")
    assert found[0][-6:] == "first "
    run("chars", tmp_path / "out", source=str(text), force=True)


def test_characters_of_any_text(tmp_path: Path, text: Path) -> None:
    text.rename(source := tmp_path / "rose.md")
    meta = run("chars", tmp_path / "out", source=str(source))
    assert meta["tokenizer"]["vocabulary"] == sorted(set("a rose is\n")) and meta["files"] == 1
    assert meta["tokens"] == {"train": 972, "val": 108}
    write(tmp_path / "docs.jsonl", ["ab", "cd"] * 9)
    meta = run("chars", tmp_path / "docs", source=str(tmp_path / "docs.jsonl"))
    last = data.from_meta(meta["tokenizer"]).decode(ids_of(tmp_path / "docs", "val"))
    assert last == "\nab\ncd"


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_bytes_are_those_of_the_source(tmp_path: Path, kind: str) -> None:
    """Of documents with halves of surrogate pairs, nothing, or one word where validation is."""
    documents: list[str | None] = ["a rose is a rose \ud83d café " * 9 for _ in range(9)]
    documents[3:3] = [None, "", None]
    source, out = tmp_path / "a.JSONL", tmp_path / "out"
    how = {"source": str(source), "tokenizer": str(small_tokenizer(tmp_path / kind, kind))}
    for last in ("", "is", "a rose is a rose " * 30):
        lines = [json.dumps({"text": d}) + "\n" for d in (*documents, last)]
        source.write_text("".join(lines), encoding="utf-8")
        meta = run("text", out, **how, force=True)
        size = len("".join(d or "" for d in documents).replace("\ud83d", "\ufffd").encode())
        assert sum(meta["bytes"].values()) == size + len(last)
        share = meta["tokens"]["val"] / sum(meta["tokens"].values())
        want = len(last) if len(last) > 2 else share * size  # a document, or the last tokens
        assert meta["bytes"]["val"] == pytest.approx(want, rel=0 if len(last) > 2 else 0.05)
        assert share > 0.09
        both = ids_of(tmp_path / "out", "train") + ids_of(tmp_path / "out", "val")
        assert both.count(0) == both.count(1) == meta["documents"]
        assert meta["tokenizer"]["begin"] == [0]


def test_before_a_single_text_nothing_is_added(tmp_path: Path, text: Path) -> None:
    """Neither in training nor in prompts, here and in transformers."""
    tokenizer = str(small_tokenizer(tmp_path / "tokenizer", "bytelevel"))
    row, rest = json.dumps({"text": text.read_text()}), '{"text": ""}\n{"text": null}\n'
    (tmp_path / "a.jsonl").write_text(f"{rest}{row}\n{rest}")
    kinds = [("text", text), ("shakespeare", text), ("text", tmp_path / "a.jsonl")]
    for n, (dataset, source) in enumerate(kinds):
        meta = run(dataset, tmp_path / f"{n}", source=str(source), tokenizer=tokenizer)
        found = data.from_meta(meta["tokenizer"])
        assert [*found.begin] == [] and 0 not in ids_of(tmp_path / f"{n}", "train")
        exported = data.FileTokenizer(json.dumps(found.to_json()))
        assert exported.made.encode("rose").ids == found.encode("rose")
        assert meta["bytes"] == {"train": 972, "val": 108}


END = {"content": "<eos>", "lstrip": False}


@pytest.mark.parametrize(
    "files, ends",
    [
        ({"tokenizer_config.json": {"eos_token": "<eos>"}}, [1]),
        ({"tokenizer_config.json": {"eos_token": END}, "config.json": {"eos_token_id": 9}}, [1, 9]),
        ({"special_tokens_map.json": {"eos_token": END}}, [1]),
        ({"config.json": {"eos_token_id": [7, 1]}}, [7, 1]),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": [5, 7]}},
         [7, 5]),
        ({"config.json": {"eos_token_id": 50256}}, [1]),  # transformers' default, of GPT-2
        ({}, [1]),  # the only special token that is called so
    ],
)
def test_end_tokens_are_found_where_they_are_put(tmp_path: Path, files: Any, ends: Any) -> None:
    folder = small_tokenizer(tmp_path, "bytelevel")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    found = data.FileTokenizer.read(folder)
    assert (found.ends, found.eot) == (ends, ends[0])
    assert data.from_meta(found.to_meta()).ends == ends


def test_vocab_json_and_merges_txt_are_used_or_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers.pre_tokenizers import ByteLevel

    signs = [*sorted(ByteLevel.alphabet()), "ro", "se", "rose", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(signs)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nr o\ns e\nro se\n")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = checkpoint.tokenizer_meta(str(tmp_path))
    ours = data.from_meta(found)
    for part in ("a rose is", "roses, é\n\n  don't"):
        assert ours.encode(part) == theirs.encode(part)
        assert ours.decode(ours.encode(part)) == part
    assert ours.eot == len(signs) - 1
    config.write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(UserError, match=r"merges\.txt"):
        checkpoint.tokenizer_meta(str(tmp_path))


# --- mistakes ---


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', ["line 2", "--text_key"]),
        ("a.jsonl", b'{"text": "a"}\nnot json\n', ["line 2"]),
        ("a.txt", b"tea\ncaf\xe9", ["utf-8", "line 2"]),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}\n', ["utf-8", "line 3"]),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 200_000, ["line 2"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": 1}\n', ["line 2"]),
        ("a.txt", "a rose is".encode("utf-16-le"), ["UTF-16"]),
        ("a.jsonl", b'{"text": null}\n{"text": ""}\n', ["no text"]),
        ("a.md", b"text", [".jsonl"]),
        ("a.txt", b"", ["no text"]),
    ],
)
def test_bad_sources_are_named(tmp_path: Path, gpt2: Any, name: str, content: bytes,
                               words: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        run("text", tmp_path / "out", source=str(tmp_path / name))
    assert all(word in str(error.value) for word in (*words, name))
    assert not (tmp_path / "out" / "meta.json").exists()


@pytest.mark.parametrize(
    "argv, word",
    [
        ([], "shakespeare_char"),
        (["shakspeare"], "shakspeare"),
        (["mytext.txt"], "--source"),
        (["shakespeare_char", "--val_fraction=2"], "val_fraction"),
        (["shakespeare_char", "--limit=2"], "--limit"),
        (["openwebtext", "--source=x"], "--source"),
        (["text", "--source=no-such-folder"], "no-such-folder"),
        (["text"], "--source"),
    ],
)
def test_mistakes_on_the_command_line(argv: list[str], word: str) -> None:
    with pytest.raises(UserError, match=re.escape(word)):
        main(argv)
