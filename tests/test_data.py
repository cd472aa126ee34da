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
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from checkout import ROOT
from conftest import few
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import checkpoint
import data
from core.files import locked
from core.settings import UserError
from data import sources
from data.prepare import baselines

HERE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def run(dataset: str, out_dir: Path, **options: Any) -> dict[str, Any]:
    data.prepare(data.PrepareConfig(dataset, out_dir=str(out_dir), workers=2, **options))
    return data.read_meta(out_dir)


def ids_of(folder: Path, split: str) -> list[int]:
    return np.fromfile(folder / f"{split}.bin", dtype="<u2").tolist()


@pytest.fixture(scope="module")
def gpt2() -> data.GPT2Tokenizer:
    tokenizer = data.GPT2Tokenizer()
    try:
        tokenizer.encode("")
    except UserError as e:
        pytest.skip(f"GPT-2's vocabulary is not available: {e}")
    return tokenizer


# --- tokenizers ---

KINDS = ["bytelevel", "wordpiece", "wordlevel", "llama"]


def small_tokenizer(folder: Path, kind: str, pattern: str | None = None) -> Path:
    """A tokenizer.json; wordpiece and wordlevel lose spaces and unknown words."""
    tk = pytest.importorskip("tokenizers")
    letters = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz", "##a", "rose", "is"]
    names = {"bytelevel": sorted(tk.pre_tokenizers.ByteLevel.alphabet()),
             "llama": [*(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcrose.", "ro",
                       "\u2581ro", "\u2581\u2581"]}.get(kind, letters)
    vocab = {name: i for i, name in enumerate(["<bos>", "<eos>", *names])}
    if kind == "llama":
        merges = [("r", "o"), ("\u2581", "ro"), ("\u2581", "\u2581")]
        made = tk.Tokenizer(tk.models.BPE(vocab, merges, byte_fallback=True))
        spaces = [tk.normalizers.Prepend("\u2581"), tk.normalizers.Replace(" ", "\u2581")]
        made.normalizer = tk.normalizers.Sequence(spaces)
        made.decoder = tk.decoders.Sequence([
            tk.decoders.Replace("\u2581", " "), tk.decoders.ByteFallback(), tk.decoders.Fuse(),
            tk.decoders.Strip(" ", 1, 0)])
    elif kind == "bytelevel":
        made = tk.Tokenizer(tk.models.BPE(vocab, []))
        made.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tk.decoders.ByteLevel()
    else:
        model = tk.models.WordPiece if kind == "wordpiece" else tk.models.WordLevel
        made = tk.Tokenizer(model(vocab, unk_token="[UNK]"))
        made.pre_tokenizer = tk.pre_tokenizers.Whitespace()
        made.decoder = tk.decoders.WordPiece()
    made.add_special_tokens(["<bos>", "<eos>"])
    added = {"single": "<bos> $A", "special_tokens": [("<bos>", 0)]}
    made.post_processor = tk.processors.TemplateProcessing(**added)
    content = json.loads(made.to_str())
    if pattern is not None:  # which the library would try here
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        content["pre_tokenizer"] = {**split, "invert": False}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_tokenizer_is_rebuilt_from_its_meta(gpt2: data.GPT2Tokenizer, monkeypatch: Any) -> None:
    letters = data.CharTokenizer(sorted({*"hello\n"}))
    assert letters.encode("hole\n") == [2, 4, 3, 1, 0]
    assert gpt2.encode("hello world") == [31373, 995]
    assert gpt2.vocab_size == 50257 and gpt2.eot not in gpt2.encode("<|endoftext|>")
    for t in (gpt2, letters, data.CharTokenizer(["", "h"], eot=0)):
        again = data.from_meta(json.loads(json.dumps(t.to_meta())))
        assert (again.name, again.vocab_size, again.eot) == (t.name, t.vocab_size, t.eot)
        assert again.encode("hh") == t.encode("hh") and again.decode(t.encode("hh")) == "hh"
    for wrong in (lambda: letters.encode("hz"), lambda: data.from_meta({"name": "z"})):
        with pytest.raises(UserError, match="'z'"):
            wrong()
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UserError, match="pip install tiktoken"):
        data.GPT2Tokenizer().encode("a")


@pytest.mark.parametrize("kind", ["gpt2", *KINDS])
@given(data_=st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=HERE)
def test_a_text_after_its_prompt_is_the_text_of_all_tokens(tmp_path: Path, kind: str, gpt2: Any,
                                                           data_: Any) -> None:
    """Also invalid bytes and special tokens."""
    made: Any = gpt2
    if kind != "gpt2":
        folder = tmp_path if (tmp_path / "tokenizer.json").exists() else None
        made = data.FileTokenizer.read(folder or small_tokenizer(tmp_path, kind))
    prompt = made.encode(data_.draw(st.sampled_from(["", "a rose", "rose is ", " a", "\nrose"])))
    new = data_.draw(st.lists(st.integers(0, made.vocab_size - 1), max_size=12))
    pieces = [*made.stream_decode(iter(new), prompt)]
    assert made.decode(prompt) + "".join(pieces) == made.decode(prompt + new)
    assert "" not in pieces


@pytest.mark.parametrize("pattern", few(["(", "(a+)+$", "(a?){9999}a{9999}"], 2))
def test_a_pattern_that_explodes_is_one_sentence(tmp_path: Path, pattern: str, monkeypatch: Any
                                                 ) -> None:  # fmt: skip
    monkeypatch.setattr("data.tokenizer.TRY_S", 4)
    content = (small_tokenizer(tmp_path, "bytelevel", pattern) / "tokenizer.json").read_text()
    meta = {"name": "tokenizer.json", "content": content, "eot": 1}
    for read in (lambda: data.FileTokenizer.read(tmp_path), lambda: data.from_meta(meta)):
        with pytest.raises(UserError, match="tokenizer") as e:
            read()
        assert "\n" not in str(e.value)


@pytest.mark.slow
def test_a_large_pattern_is_taken_and_a_signal_ends_one_without_end(tmp_path: Path) -> None:
    folder = small_tokenizer(tmp_path / "t", "bytelevel", "(a{1000}){1000}")
    assert data.FileTokenizer.read(folder).encode("a" * 2000)
    small_tokenizer(folder, "bytelevel", "(?=ab)((a|b)?){9999}(ab){9999}")
    (tmp_path / "a.txt").write_text("ab" * 3000)
    line = [sys.executable, "-m", "data", "text", f"--source={tmp_path}/a.txt",
            f"--tokenizer={folder}", f"--out_dir={tmp_path}/out"]
    process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE)
    while not (tmp_path / "out" / ".partial").exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 143 and b"Traceback" not in said


END, CONFIG = {"content": "<eos>", "lstrip": False}, "config.json"


def test_end_tokens_are_found_where_they_are_put(tmp_path: Path) -> None:
    for i, (ends, files) in enumerate([
        ([1], {"tokenizer_config.json": {"eos_token": "<eos>"}}),
        ([1, 9], {"tokenizer_config.json": {"eos_token": END}, CONFIG: {"eos_token_id": 9}}),
        ([1], {"special_tokens_map.json": {"eos_token": END}}),
        ([7, 1], {CONFIG: {"eos_token_id": [7, 1]}}),
        ([7, 5], {CONFIG: {"eos_token_id": 7},
                  "generation_config.json": {"eos_token_id": [5, 7]}}),
        ([1], {CONFIG: {"eos_token_id": 50256}}),  # transformers' default, of GPT-2
        ([1], {}),  # the only special token that is called so
    ]):  # fmt: skip
        folder = small_tokenizer(tmp_path / str(i), "bytelevel")
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
    ours = data.from_meta(checkpoint.tokenizer_meta(str(tmp_path)))
    for part in ("a rose is", "roses, é\n\n  don't"):
        assert ours.encode(part) == theirs.encode(part)
        assert ours.decode(ours.encode(part)) == part
    assert ours.eot == len(signs) - 1
    config.write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(UserError, match=r"merges\.txt"):
        checkpoint.tokenizer_meta(str(tmp_path))


# --- sources ---


def test_the_plays_are_plain_text() -> None:
    """Their hash is checked, too."""
    try:
        plays = sources.plays()
    except UserError as e:
        pytest.skip(f"the plays are not available: {e}")
    assert "\n\nHAMLET:\nTo be, or" in plays and not re.search(r"[*_#\\\[\]<>`|\t\r]", plays)
    assert not re.search(r"^\W*(Enter HAMLET|Exeunt|Aside|SCENE I|ACT I)\W*$", plays, re.M)


def test_a_source_is_fetched_once_and_its_hash_checked(tmp_path: Path) -> None:
    good, evil = (hashlib.sha256(content).hexdigest() for content in (b"good", b"evil"))
    path, fetch = tmp_path / "cache" / "some.whl", Mock(side_effect=[b"good", b"evil"])
    for _ in range(2):
        assert sources.cached(path, good, fetch).read_bytes() == b"good"
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=evil):
        sources.cached(path, good, fetch)


@pytest.mark.parametrize("dataset, door, how", [
    ("shakespeare_char", "data.sources.urlopen", {"source": "tinyshakespeare"}),
    ("fineweb", "huggingface_hub.HfApi.dataset_info", {})])
def test_no_network(tmp_path: Path, dataset: str, door: str, how: Any, monkeypatch: Any) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(door, Mock(side_effect=OSError("no route")))
    with pytest.raises(UserError, match=r"no route.*--source"):
        run(dataset, tmp_path / "out", **how)


# --- preparation ---


def test_baselines_are_cross_entropies_of_smoothed_counts() -> None:
    train, val, V = [0, 1, 0, 1, 1, 2], [1, 0, 1, 2, 2], 4
    pairs = [*itertools.pairwise(train)]
    unigram = [-np.log((train.count(t) + 1) / (len(train) + V)) for t in val]
    bigram = [-np.log((pairs.count((a, b)) + 1) / (train[:-1].count(a) + V))
              for a, b in itertools.pairwise(val)]
    found = baselines(np.array(train, np.uint16), np.array(val, np.uint16), V)
    assert found["unigram"] == pytest.approx(np.mean(unigram))
    assert found["bigram"] == pytest.approx(np.mean(bigram))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a rose is a rose is a rose\n" * 40)  # 1,080 characters
    return path


signs = [*"ab 1'\n\t\r", "\r\n", "\u2028", "\ufeff", "é", "日", "🙂", "\0"]
odd = st.lists(st.sampled_from(signs), max_size=9).map("".join)
long = ["ab" + "\n" * 90 + " b", "a rose is " * 30]
texts = odd | odd.map(lambda d: d * 20) | st.sampled_from(["\ud83d", "<eos>", *long])


@pytest.mark.parametrize("kind", ["gpt2", *KINDS])
@given(st.lists(st.none() | texts), st.booleans(), st.sampled_from([0.1, 0.3, 0.5]))
@example(["a" * 20, "a"], False, 0.1)
@settings(max_examples=20, deadline=None, suppress_health_check=HERE)
def test_every_document_is_kept_whole(
    tmp_path_factory: Any, gpt2: Any, kind: str, documents: Any, files: bool, fraction: float
) -> None:
    """From JSON lines and files: tokens, borders, bytes, validation."""
    folder = tmp_path_factory.mktemp("odd")
    (source := folder / "source").mkdir()
    tokenizer, made, begin, eot = None, gpt2, [], gpt2.eot
    if kind != "gpt2":
        tokenizer = str(small_tokenizer(folder / "t", kind))
        made, begin, eot = data.FileTokenizer.read(folder / "t"), [0], 1
    if files:
        found = [(d or "").replace("\ud83d", "?").replace("\0", "") for d in documents]
        for i, d in enumerate(found):
            (source / f"{i:03}.txt").write_bytes(b"\xef\xbb\xbf" * (i % 2) + d.encode())
        found = [d if i % 2 else d.removeprefix("\ufeff") for i, d in enumerate(found)]
        found = [d.replace("\r\n", "\n").replace("\r", "\n") for d in found if d]
    else:
        lines = "".join(json.dumps({"text": d}) + "\n\n" for d in documents)
        (source / "a.JSONL").write_text(lines, encoding="utf-8")
        found = [d.replace("\ud83d", "\ufffd").replace("\r\n", "\n") for d in documents if d]
    begin = begin if len(found) > 1 else []  # before a single text it would hardly be seen
    splits: dict[str, list[int]] = {"train": [], "val": []}
    for i, d in enumerate(found):
        split = "val" if int((i + 1) * fraction) > int(i * fraction) else "train"
        splits[split] += [*begin, *made.encode(d), eot]
    total = sum(map(len, splits.values()))
    with patch.multiple("data.sources", PIECE=64, OVERLAP=32):  # several pieces a document
        try:
            meta = run("text", folder / "out", source=str(source), tokenizer=tokenizer,
                       val_fraction=fraction)  # fmt: skip
        except UserError as e:
            assert total < 20 or total == len(found) * (len(begin) + 1), e
            return
    train, val = (ids_of(folder / "out", split) for split in ("train", "val"))
    n = len(splits["val"])
    moved = val[n:]  # the last tokens of the others
    assert (train + moved, val[:n]) == (splits["train"], splits["val"])
    assert len(val) == -int(-total * fraction // 1) if moved else n >= fraction * total / 2
    assert meta["tokens"] == {"train": len(train), "val": len(val)}
    assert meta["documents"] == len(found) and meta["tokenizer"].get("begin", []) == begin
    assert sum(meta["bytes"].values()) == len("".join(found).encode())
    if not moved:
        inside = [d for i, d in enumerate(found) if int((i + 1) * fraction) > int(i * fraction)]
        assert meta["bytes"]["val"] == len("".join(inside).encode())


def test_a_single_text_and_several(tmp_path: Path, text: Path) -> None:
    """Nothing surrounds one, here and in transformers; its end validates."""
    tokenizer = str(small_tokenizer(tmp_path / "tokenizer", "bytelevel"))
    for dataset in ("text", "shakespeare"):
        meta = run(dataset, tmp_path / dataset, source=str(text), tokenizer=tokenizer)
        found = data.from_meta(meta["tokenizer"])
        assert [*found.begin] == [] and 0 not in ids_of(tmp_path / dataset, "train")
        exported = data.FileTokenizer(json.dumps(found.to_json()))
        assert exported.made.encode("rose").ids == found.encode("rose")
        assert meta["bytes"] == {"train": 972, "val": 108}
    text.rename(source := tmp_path / "rose.md")
    meta = run("chars", tmp_path / "out", source=str(source))
    assert meta["tokenizer"]["vocabulary"] == sorted(set("a rose is\n")) and meta["files"] == 1
    assert meta["tokens"] == {"train": 972, "val": 108}
    ids = ids_of(tmp_path / "out", "train") + ids_of(tmp_path / "out", "val")
    assert data.from_meta(meta["tokenizer"]).decode(ids) == source.read_text()
    (tmp_path / "docs.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n' * 9)
    meta = run("chars", tmp_path / "docs", source=str(tmp_path / "docs.jsonl"))
    last = data.from_meta(meta["tokenizer"]).decode(ids_of(tmp_path / "docs", "val"))
    assert last == "\nab\ncd"


def test_what_is_prepared_already(tmp_path: Path, text: Path) -> None:
    """The same: nothing; changed or damaged: prepared again; another: by force."""
    out, tokenizer = tmp_path / "out", small_tokenizer(tmp_path / "t", "bytelevel")
    how: Any = {"source": str(text), "val_fraction": 0.25, "tokenizer": str(tokenizer)}
    assert run("text", out, **how)["vocab_size"] == 258
    assert {f.name for f in out.iterdir()} == {"train.bin", "val.bin", "meta.json"}

    def changed(**how: Any) -> bool:
        before = {f.name: f.stat().st_ino for f in out.iterdir()}
        run("text", out, **how)
        return {f.name: f.stat().st_ino for f in out.iterdir()} != before

    with locked(out):  # nor is anything written: the folder may be read-only
        assert not changed(**how)
        with pytest.raises(UserError, match=f"{out}.*{os.getpid()}"):
            changed(**how, force=True)
    n = len(ids_of(out, "train"))
    (out / "train.bin").write_bytes(b"12")
    assert changed(**how) and len(ids_of(out, "train")) == n
    text.write_text(text.read_text() * 2)
    assert changed(**how) and not changed(**how) and len(ids_of(out, "train")) > n
    small_tokenizer(tokenizer, "wordlevel")
    assert changed(**how) and data.read_meta(out)["vocab_size"] < 258
    other = small_tokenizer(tmp_path / "other", "wordlevel")
    for change in ({"val_fraction": None}, {"tokenizer": str(other)}):
        with pytest.raises(UserError, match="--force"):
            run("text", out, **how | change)
    assert changed(**how | {"val_fraction": None}, force=True)
    assert not (tmp_path / "out" / ".partial").exists()


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


@pytest.mark.parametrize("name", [".lock", ".partial", ".partial/train.bin"])
def test_no_file_of_a_dataset_is_written_through_a_link(tmp_path: Path, text: Path, name: str
                                                        ) -> None:  # fmt: skip
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (target := elsewhere / "file").write_text("precious")
    (link := tmp_path / "out" / name).parent.mkdir(parents=True)
    link.symlink_to(elsewhere if name == ".partial" else target)
    try:
        run("shakespeare_char", tmp_path / "out", source=str(text), force=True)
    except UserError as e:
        assert str(link) in str(e)
    assert [p.name for p in elsewhere.iterdir()] == ["file"] and target.read_text() == "precious"


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


BAD = [  # a source, and what the error names
    ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', ["line 2", "--text_key"]),
    ("a.jsonl", b'{"text": "a"}\nnot json\n', ["line 2"]),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}\n', ["utf-8", "line 3"]),
    ("a.jsonl", b'{"text": "a"}\n' + b"[" * 200_000, ["line 2"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": 1}\n', ["line 2"]),
    ("a.jsonl", b'{"text": null}\n{"text": ""}\n', ["no text"]),
    ("a.txt", b"tea\ncaf\xe9", ["utf-8", "line 2"]), ("a.txt", b"", ["no text"]),
    ("a.txt", "a rose is".encode("utf-16-le"), ["UTF-16"]),
    ("a.md", b"text", [".jsonl"]), ("a\nb.txt", b"tea", ["short"]),
]  # fmt: skip


def test_bad_sources_are_named(tmp_path: Path, gpt2: Any) -> None:
    for name, content, words in BAD:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as error:
            run("text", tmp_path / "out", source=str(tmp_path / name))
        assert all(word in str(error.value) for word in (*words, repr(name)[1:-1]))
        assert not (tmp_path / "out" / "meta.json").exists()
