"""Bits per byte, and the tasks of bench/evaluate.py with our kernels."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from test_train import TEXT, make_data, run

import data
from bench.evaluate import main
from checkpoint.__main__ import main as export
from core.settings import UserError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny run, and its export."""
    folder = make_data(tmp_path_factory.mktemp("run"), TEXT.replace("e", "é"))
    llama = {"position": "rope", "norm": "rms", "mlp": "swiglu"}
    done = run(folder, folder / "out", eval_interval=8, **llama)
    assert export(["export", str(folder / "out"), f"--to={folder / 'hf'}"]) == 0
    return folder, done


def test_bits_per_byte_are_printed_and_logged(trained: Any) -> None:
    folder, done = trained
    (row,) = [row for row in done.rows if "val_loss" in row]
    meta = data.read_meta(folder / "tiny")
    size = len("".join(TEXT.replace("e", "é"))[-meta["tokens"]["val"] :].encode())
    assert size > meta["tokens"]["val"]
    bits = row["val_loss"] / math.log(2) * meta["tokens"]["val"] / size
    assert row["val_bits_per_byte"] == pytest.approx(bits)
    assert f"val loss {row['val_loss']:.4f} ({bits:.4f} bits per byte)\n" in done.out
    del meta["bytes"]  # an older dataset
    assert data.bits_per_byte(meta, row["val_loss"]) is None


@pytest.mark.parametrize("gap", ["", " "])
def test_the_questions_have_the_answers_that_they_ask_for(tmp_path: Path, gap: str) -> None:
    options = f"--separator={gap}", "--questions=50", "--lines=2000"
    assert main(["tasks", str(tmp_path), *options]) == 0
    text = (tmp_path / "text.txt").read_text(encoding="utf-8").splitlines()
    sums = {line.partition("=")[0].strip() for line in text}
    for path in tmp_path.glob("*.yaml"):
        task = json.loads(path.read_text(encoding="utf-8"))
        file = Path(task["dataset_kwargs"]["data_files"]["test"])
        rows = [json.loads(row) for row in file.read_text(encoding="utf-8").splitlines()]
        assert len(rows) == 50 and task["task"] == f"nanoattn_{path.stem}"
        for row in rows:
            assert row["context"][0] == "\n" and row["answer"].startswith(gap)
            asked = row["context"][1:].split(gap) if gap else [*row["context"][1:]]
            answer = row["answer"].replace(" ", "")
            if path.stem == "copy":
                assert "".join(asked) == answer + "="
            elif path.stem == "add":
                a, b = map(int, re.findall(r"\d+", "".join(asked)))
                assert a + b == int(answer) and gap.join(asked[:-1]) not in sums
            else:
                place = asked.index(asked[-1]) + 1  # of the value; the answer comes next
                assert asked[place] == answer and place < 8
                assert len(asked) - place == int(path.stem.partition("_")[2])


def test_the_harness_runs_with_our_kernels(trained: Any, tmp_path: Path, capsys: Any,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("--pairs=27", "--distances=4", "--distances=9", "--keys=abcdda"):
        with pytest.raises(UserError, match=r"pairs|keys"):
            main(["tasks", str(tmp_path), wrong])
    pytest.importorskip("lm_eval.models.huggingface")
    letters = "--keys=abdfghjk", "--values=lmnoprst", "--distances=8"
    assert main(["tasks", str(tmp_path), "--separator=", "--questions=9", *letters]) == 0
    monkeypatch.setattr("sys.argv", [])
    model = f"pretrained={trained[0] / 'hf'},prefix_token_id=0,attention=manual"
    common = ["--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "4"]
    assert main(["--model_args", model, "--tasks", "nanoattn_recall_8", *common]) == 0
    said = capsys.readouterr().out
    assert re.search(r"nanoattn_recall_8.*acc", said) and "manual" in said
