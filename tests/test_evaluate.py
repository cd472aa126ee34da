"""Bits per byte, the tasks of bench/evaluate.py, and log-likelihoods with our kernels."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import hf_table
import pytest
import torch
from test_train import TEXT, run
from torch import Tensor

import data
from attention import Policy, hf
from bench.evaluate import TasksConfig, main
from checkpoint.__main__ import main as export
from core.settings import UserError
from data.prepare import PrepareConfig, prepare

# --- bits per byte ---


def test_the_bytes_of_a_split_are_those_of_its_text(tmp_path: Path) -> None:
    texts = [f"Größe {i}: naïve 数 café\n" for i in range(20)]
    (tmp_path / "chars.txt").write_text("".join(texts), encoding="utf-8")
    rows = "".join(json.dumps({"text": t}) + "\n" for t in texts)
    (tmp_path / "documents.jsonl").write_text(rows, encoding="utf-8")
    validation = {"shakespeare_char": "".join(texts)[-45:], "text": texts[9] + texts[19]}
    for dataset, source in (("shakespeare_char", "chars.txt"), ("text", "documents.jsonl")):
        out = tmp_path / dataset
        given = PrepareConfig(source=str(tmp_path / source), out_dir=str(out), workers=1)
        try:
            prepare(dataset, given)
        except UserError as e:
            pytest.skip(f"GPT-2's vocabulary is not available: {e}")
        meta, expected = data.read_meta(out), len(validation[dataset].encode())
        assert meta["bytes"]["val"] == expected
        assert sum(meta["bytes"].values()) == len("".join(texts).encode())
        bits = meta["tokens"]["val"] * math.log2(math.e) / expected  # of a nat a token
        assert data.bits_per_byte(meta, 2.0) == pytest.approx(2 * bits)
        del meta["bytes"]  # an older dataset
        assert data.bits_per_byte(meta, 2.0) is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny run on text of one and two bytes a character, and its export."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT.replace("e", "é"), encoding="utf-8")
    given = PrepareConfig(source=str(folder / "text.txt"), out_dir=str(folder / "tiny"))
    prepare("shakespeare_char", given)
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


# --- the tasks ---


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


def test_impossible_tasks_are_refused() -> None:
    for options in ({"pairs": 27}, {"distances": (4,)}, {"keys": "abcdda"}):
        with pytest.raises(ValueError, match=r"pairs|keys"):
            TasksConfig(**options)  # type: ignore[arg-type]


# --- log-likelihoods ---

TEXTS = [torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist()
         for n in (5, 9, 12, 20, 33)]


@torch.no_grad()
def loglikelihoods(model: Any, batch: int, side: str, mask: bool = True) -> Tensor:
    """The log-likelihood of the last four tokens of each text, in padded batches."""
    found = []
    for texts in (TEXTS[i : i + batch] for i in range(0, len(TEXTS), batch)):
        rows, longest = [torch.tensor(t) for t in texts], max(map(len, texts))
        ids = torch.nn.utils.rnn.pad_sequence(rows, True, 0, side)
        logits = model(ids, attention_mask=(ids > 0).long() if mask else None).logits
        for row, logp, own in zip(rows, logits.log_softmax(-1), ids, strict=True):
            end = longest if side == "left" else len(row)
            found.append(logp[end - 5 : end - 1].gather(1, own[end - 4 : end, None]).sum())
    return torch.stack(found)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("backend", ["manual", "tiled", "sdpa", "auto"])
def test_padding_and_batch_size_do_not_change_a_loglikelihood(name: str, backend: str) -> None:
    pytest.importorskip("transformers")
    hf.register(policy=Policy(fallback=False))
    expected = loglikelihoods(hf_table.build(name, "eager"), 1, "right")
    model = hf_table.build(name, hf.implementation(backend))
    for batch in (1, 2, 5):
        for side, mask in (("right", True), ("right", False), ("left", True)):
            found = loglikelihoods(model, batch, side, mask)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_harness_runs_with_our_kernels(trained: Any, tmp_path: Path, capsys: Any,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval.models.huggingface")
    letters = "--keys=abdfghjk", "--values=lmnoprst", "--distances=8"
    assert main(["tasks", str(tmp_path), "--separator=", "--questions=9", *letters]) == 0
    monkeypatch.setattr("sys.argv", [])
    model = f"pretrained={trained[0] / 'hf'},prefix_token_id=0,attention=manual"
    common = ["--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "4"]
    assert main(["--model_args", model, "--tasks", "nanoattn_recall_8", *common]) == 0
    said = capsys.readouterr().out
    assert re.search(r"nanoattn_recall_8.*acc", said) and "manual" in said
