"""Records: real ones are accepted, also old ones; every edited field or figure is refused."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import in_process
import pytest
from checkout import files
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bench import run, small, write_tokens

from bench import board, parts, record, report
from bench.verify import RIVALS, verify
from core.gpus import datasheet_tflops

Content = dict[str, Any]
PROOF = {"error": 2e-7, "allowed": 3e-6, "grad_error": 4e-7, "grad_allowed": 6e-6, "canary": True}


def honest(mode: str, folder: Path, *more: str) -> Content:
    """Return the record of a real run, made small, and proven."""
    argv = [*small(mode), "--backends=manual,sdpa_math,sdpa", "--record=x", *more]
    argv += ["--rounds=3"] if mode != "converge" else []
    with pytest.MonkeyPatch.context() as patch:
        in_process.use(patch)
        assert run([*argv, f"--records_dir={folder}"])[0] == 0
    (made,) = folder.glob("*/record.json")
    content: Content = json.loads(made.read_text(encoding="utf-8"))
    for row in content["rows"]:
        if row["status"] == "ok":
            row["proof"] = row.get("proof") or dict(PROOF)
    return content


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Content:
    """Rows of training steps, and of attention alone."""
    made = honest("train", tmp_path_factory.mktemp("train"))
    kernel = honest("kernel", tmp_path_factory.mktemp("kernel"), "--lengths=16", "--batch_sizes=1")
    made["rows"] += kernel["rows"]
    return record.complete(made)


@pytest.fixture(scope="module")
def converged(tmp_path_factory: pytest.TempPathFactory) -> Content:
    folder = tmp_path_factory.mktemp("converge")
    words = ("--dataset=tiny", "--steps=10", "--backends=sdpa")
    return honest("converge", folder, f"--data_dir={write_tokens(folder)}", *words)


@pytest.fixture
def content(trained: Content) -> Content:
    return copy.deepcopy(trained)


def row(content: Content, backend: str, mode: str = "train") -> Content:
    return next(r for r in content["rows"] if (r["backend"], r["mode"]) == (backend, mode))


def completed(content: Content) -> Content:
    """Compute all figures again, in place, as after a run."""
    content |= record.complete(content)
    return content


def check(content: Content) -> list[str]:
    return verify(json.loads(json.dumps(content)))


def on_a_gpu(content: Content) -> Content:
    """The same rounds as if they were an H200's, of which the table of GPUs knows the peak."""
    known = datasheet_tflops("NVIDIA H200", "float32", tf32=True)
    assert known is not None
    here = {"name": "NVIDIA H200", "about": "NVIDIA H200", "kind": "cuda"}
    content["machine"] |= here | {"peak_tflops": known[0], "peak_source": known[1]}
    return completed(content)


# --- what is honest ---


def test_an_honest_record_is_accepted(trained: Content, converged: Content) -> None:
    assert len({r["mode"] for r in trained["rows"] if r["status"] == "ok"}) == 2
    assert check(trained) == check(converged) == []
    assert check(on_a_gpu(copy.deepcopy(trained))) == []


def test_a_record_that_was_cut_off_says_so_and_may_have_fewer_rounds(content: Content) -> None:
    for r in content["rows"]:
        r["rounds"] = r.get("rounds", [])[:2]
    content |= {"complete": False, "incomplete": "stopped by Ctrl-C"}
    assert check(completed(content)) == []
    del content["complete"]  # nothing said is a claim to be whole
    assert any("it has 2 of " in why for why in check(content))


# --- edits ---

Path_ = tuple[Any, ...]


def leaves(value: Any, *path: Any) -> Iterator[Path_]:
    """The places of a JSON value that hold no further ones."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for name, one in inside:
        if isinstance(one, (dict, list)):
            yield from leaves(one, *path, name)
        else:
            yield (*path, name)


def at(value: Any, path: Path_) -> Any:
    for name in path:
        value = value[name]
    return value


def other(value: Any, by: float) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    return value + "x" if isinstance(value, str) else value * by or by


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_field_of_a_new_record_can_be_edited(trained: Content, data: st.DataObject) -> None:
    """Device, kernel and dtype, which no formula uses, as every figure and every round."""
    edited = json.loads(json.dumps(trained))
    *path, name = data.draw(st.sampled_from([*leaves(edited)]))
    place = at(edited, tuple(path))
    if isinstance(name, str) and data.draw(st.booleans()):
        del place[name]
    else:
        place[name] = other(place[name], data.draw(st.sampled_from([0.5, 0.99, 1.01, 2.0])))
    assert check(edited), (path, name)


RECORDS = {path.parent.name for path in files("bench/records/*/record.json")}
KEPT = {name: whole for name, whole in board.load(board.FOLDER)[0].items()
        if {"rows", "stages"} & whole.keys() and name in RECORDS}


def computed(row: Content, part: Content) -> Iterator[Path_]:
    """The places of the figures that follow from a row's rounds."""
    found = report.MODES[row["mode"]].figures(row, part)
    if profile := row.get("profile"):
        found["profile"] = parts.computed(profile, row, part)
    for path in leaves(found):
        unknown = part["format"] == 1 and path == ("mbu",) and row["backend"] in RIVALS
        if isinstance(at(found, path), float) and "names" not in path and not unknown:
            yield path


EDITABLE = st.deferred(lambda: st.sampled_from([
    (name, n, i, path)
    for name, whole in KEPT.items()
    for n, part in enumerate(report.sections_of(whole))
    for i, r in enumerate(part["rows"]) if r["status"] == "ok"
    for path in computed(r, part) if at(r, path)
]))


@settings(max_examples=40, deadline=None)
@given(EDITABLE, st.sampled_from([0.5, 0.99, 1.01, 2.0]))
def test_an_edited_figure_of_an_older_record_is_refused_with_its_row(
    where: tuple[str, int, int, Path_], by: float
) -> None:
    """They have no digest. Of the profile rooflines, ceilings, shares, ..."""
    name, n, i, (*path, figure) = where
    whole = copy.deepcopy(KEPT[name])
    edited = report.sections_of(whole)[n]["rows"][i]
    at(edited, tuple(path))[figure] *= by
    assert any(why.startswith(f"{edited['mode']} {edited['backend']}") for why in verify(whole))


def test_every_record_here_is_accepted_and_the_board_is_up_to_date(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A private record may be there, on the board already or not."""
    assert {1, 2} <= {whole["format"] for whole in KEPT.values()}
    page = board.PAGE.read_text(encoding="utf-8")
    for path in board.FOLDER.iterdir():
        if path.name in RECORDS or f"/{path.name}/README.md" in page:
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.setattr(board, "FOLDER", tmp_path)
    assert board.main(["--check"]) == 0, capsys.readouterr().err


# --- lies with a digest of their own ---

LIES: list[tuple[Callable[[Content], Any], str]] = [  # and what a problem names
    (lambda c: row(c, "sdpa")["rounds"].pop(), "train sdpa.*2 of 3"),
    (lambda c: row(c, "sdpa", "kernel")["point"].update(D=32), "kernel .*sdpa.*D=32.*D=16"),
    (lambda c: on_a_gpu(c)["machine"].update(peak_tflops=989.4), "H200.*494.7"),
    (lambda c: c["machine"].update(peak_source=""), "peak of 0.5 .*source"),
    (lambda c: c["settings"].update(dtype="bfloat16"), "dtype=bfloat16"),
    (lambda c: c["machine"].update(dtype="float16"), "train sdpa.*dtype=float32"),
    (lambda c: c["settings"].update(batch_size=8), "train sdpa.*batch_size=4"),
    (lambda c: c["settings"].update(block_size=64), "T=64"),
    (lambda c: row(c, "sdpa_math").update(kernels=["flash (CPU)"]), r"sdpa_math.*flash \(CPU"),
    (lambda c: row(c, "sdpa").update(backend="flash_attn_9"), "'flash_attn_9'"),
    (lambda c: row(c, "manual").update(backend="triton"), "train triton.*none"),
    (lambda c: row(c, "manual").update(device_kernels=["flash_fwd"]), "train manual.*flash_fwd"),
    (lambda c: row(on_a_gpu(c), "manual", "kernel").update(
        backend="flash_attn_2", device_kernels=["pytorch_flash::x"]), "pytorch_flash::x"),
    (lambda c: row(c, "sdpa")["proof"].update(canary=False), "train sdpa.*causality"),
    (lambda c: row(c, "sdpa")["proof"].update(error=math.nan), "train sdpa.*error is nan"),
    (lambda c: row(c, "sdpa")["proof"].update(error=0.9, allowed=1.0), "sdpa.*allowed is 1"),
    (lambda c: row(c, "sdpa").update(status="x"), "train sdpa.*'x'"),
]
FIGURES: list[tuple[Callable[[Content], Any], str]] = [  # which would be computed again
    (lambda c: c["flops_per_token"].update(mfu=1.0), "flops_per_token mfu is 1.0"),
    (lambda c: c.update(answers=[]), "Fastest: train"),
    (lambda c: row(c, "sdpa").update(memory_bytes=1), "train sdpa.*memory_bytes is 1,"),
    (lambda c: row(c, "sdpa", "kernel").update(error_out=0.1), "sdpa.*error_out 1.0e-01"),
    (lambda c: c["settings"].update(n_layer="x"), "n_layer"),
    (lambda c: c.update(rows=None), "NoneType"),
]


@pytest.mark.parametrize("lie, named", [*LIES, *FIGURES], ids=[x for _, x in [*LIES, *FIGURES]])
def test_a_lie_is_refused_by_its_name(
    lie: Callable[[Content], Any], named: str, content: Content
) -> None:
    lie(content)
    content = record.sealed(content) if (lie, named) in FIGURES else completed(content)
    found = check(content)
    assert any(re.search(named, why) for why in found), found
    assert not any("digest" in why for why in found)


def test_a_failed_converge_is_refused(converged: Content) -> None:
    made = copy.deepcopy(converged)
    sdpa, base = (row(made, name, "converge") for name in ("sdpa", "manual"))
    for times, off in ((1.05, "+5.00%"), (0.95, "-5.00%")):  # too good is wrong as well
        loss = times * base["final_loss"]
        sdpa |= {"losses": [loss] * 10, "final_losses": [loss], "verdict": "ok"}
        assert any(off in why for why in check(record.complete(made)))
    made["settings"]["tolerance"] = 0.1
    assert any("10%" in why for why in check(record.complete(made)))


# --- the page ---


def test_the_page_holds_every_row_and_the_check_sees_a_change(
    tmp_path: Path, content: Content, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("FOLDER", "PAGE"):
        monkeypatch.setattr(board, name, tmp_path / name)
    content |= {"commit": None, "dirty": True, "complete": False}  # not of this checkout
    record.write(board.FOLDER / "mine", completed(content), whole=False)
    assert board.main(["--check"]) == 1 and not board.PAGE.exists()
    assert board.main([]) == 0 and board.main(["--check"]) == 0
    text, sdpa = board.PAGE.read_text(encoding="utf-8"), row(content, "sdpa")
    for cell in (f"{sdpa['tokens_per_s']:,.0f}", f"{sdpa['mfu']:.1%}", "--peak_tflops",
                 f"{sdpa['proof']['error']:.1e}"):
        assert f"| {cell} " in text
    assert "2 layers, 32 wide, 2 heads, vocabulary 64, float32" in text
    assert "- [mine][1]: incomplete, uncommitted code\n" in text
    assert text.count("][1] |") == sum(r["status"] == "ok" for r in content["rows"])
    board.PAGE.write_text(text + "x", encoding="utf-8")
    assert board.main(["--check"]) == 1
    assert board.main([f"--records_dir={board.FOLDER}"]) == 0  # the page is not read
    assert board.main([f"--records_dir={board.FOLDER / 'mine'}"]) == 1  # no record is in it
    sdpa["mfu"] = 0.6
    record.write(board.FOLDER / "mine", content, whole=False)
    for name, text in {"empty": "", "list": "[]"}.items():
        (board.FOLDER / name).mkdir()
        (board.FOLDER / name / "record.json").write_text(text, encoding="utf-8")
    capsys.readouterr()
    assert board.main([]) == 1  # and nothing is written
    said = capsys.readouterr().err.splitlines()
    assert {line.partition(":")[0] for line in said} == {"empty", "list", "mine"}
    assert any("train sdpa: mfu is 0.6" in line for line in said)


def test_machines_stand_together_only_where_they_did_the_same(content: Content) -> None:
    gpu, other = on_a_gpu(copy.deepcopy(content)), copy.deepcopy(content)
    other["settings"]["block_size"] = 64
    sections, names, _ = board.board({"a": content, "b": gpu, "c": other})
    ((_, (head, lines)),) = sections["Training steps"].items()
    work = [tuple(line[: head.index("machine")]) for line in lines]
    assert work == sorted(work) and {w[0] for w in work} == {"32", "64"}
    machines = [line[head.index("machine")] for line in lines if line[0] == "32"]
    assert machines == sorted(machines) and len(set(machines)) == 2
    peaks = {line[head.index("machine")]: line[head.index("peak")] for line in lines}
    assert peaks[names["NVIDIA H200"]] == "datasheet"
