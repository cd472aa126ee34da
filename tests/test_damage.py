"""A damaged or edited file of a checkpoint or dataset: the same result, or one error that names it,
on all processes; nothing is executed."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_checkpoint import CPU, Bomb, restored, save
from test_train import argv, make_data, refusal, run_line
from torch import Tensor

import checkpoint
import data
from checkpoint.__main__ import main as export
from core.optimizer import build_optimizer
from core.options import TrainConfig
from core.parallel import DistInfo
from core.settings import UserError

# Sizes that two processes do not divide, and a head of its own.
SIZES: dict[str, Any] = {
    "n_layer": 1, "n_head": 1, "n_embd": 6, "block_size": 7, "position": "rope", "norm": "rms",
    "mlp": "swiglu", "tied": False, "max_iters": 3, "attention_backend": "manual",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "one": {}, "muon": {"optimizer": "muon"}, "fsdp": {"parallel": "fsdp"}}  # fmt: skip
NAME = "model.transformer.wte.weight"
MOMENT = "optimizer.transformer.wte.weight.exp_avg"


def fails_on_one(rank: int, n: int, line: list[str], out: Path) -> tuple[str, str]:
    """Train; then the errors if process 1 reads another file, or writes into another folder."""
    processes.trained(rank, n, [line])
    group = DistInfo(CPU, rank, n, dist.group.WORLD)
    folder = checkpoint.latest(out)
    if rank == 1:
        folder = Path(shutil.copytree(folder, out.parent / "other" / folder.name))
        (folder / "optimizer.pt").write_bytes(b"PK")
    saved = checkpoint.load(folder)
    model = saved.model()
    optimizer = build_optimizer(model, saved.read("train", TrainConfig), CPU)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(UserError) as read:
        checkpoint.run.restore(saved, model, optimizer, scaler, 0, group)
    with pytest.raises(UserError) as write:
        save(out.parent / f"alone-{rank}", 1, group=group)
    assert not [*out.parent.glob(f"alone-{rank}/.step*")]
    return str(read.value), str(write.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The out_dir of a run of each kind and what it restores; the errors of fails_on_one(); where
    the datasets are."""
    data_dir, folder = (tmp_path_factory.mktemp(name) for name in ("data", "runs"))
    shutil.copytree(make_data(data_dir) / "tiny", data_dir / "raw")
    (data_dir / "raw" / "meta.json").unlink()
    raw, shards = str(data_dir / "raw"), str(data_dir / "shards")
    data.prepare(data.PrepareConfig("shards", raw, out_dir=shards))
    lines = {kind: argv(data_dir, folder / kind, **SIZES, **how) for kind, how in KINDS.items()}
    assert not any(run_line(lines[kind], folder).code for kind in ("one", "muon"))
    errors = processes.run(fails_on_one, 2, lines["fsdp"], folder / "fsdp")
    whole = {kind: (folder / kind, restored(checkpoint.latest(folder / kind))) for kind in KINDS}
    return {"errors": errors, "data": data_dir, **whole}


def test_if_one_process_cannot_read_or_write_all_fail(saved):
    (read, write), other = saved["errors"]
    assert other[0] == read and re.search(r"^process 1: .*optimizer\.pt", read), read
    assert "alone-0" in write and "alone-1" in other[1]


@pytest.fixture
def out(kind: str, saved: dict[str, Any], tmp_path: Path) -> Path:
    """A run's folder, to damage; its name is odd."""
    return Path(shutil.copytree(saved[kind][0], tmp_path / 'it\'s "out"\n\x1b[31m $x'))


def same(out: Path, saved: dict[str, Any], kind: str) -> bool:
    """Restored, and loaded."""
    want, found = saved[kind][1], restored(checkpoint.latest(out))
    return found.keys() == want.keys() and all(torch.equal(found[k], t) for k, t in want.items())


def versions(path: Path, how: str, blown: Path) -> list[bytes | None]:
    """The damaged content; None: no file."""
    content = path.read_bytes()
    n = len(content)
    if how == "flipped":
        places = {*range(n // 18, n, n // 9), n - 1}
        return [content[:i] + bytes([content[i] ^ 0x40]) + content[i + 1 :] for i in places]
    if how == "cut":
        return [b"", content[: n // 2], content[:-1].rstrip()[:-1], None]
    torch.save(Bomb(blown), path)
    objects = [[], {}, 3, None, {"step": "3"}, {"train": {}, "model": {}}, {NAME: 3}]
    other = [json.dumps(content).encode() for content in objects]
    return [path.read_bytes(), pickle.dumps(Bomb(blown)), b"\x80\xffx", *other]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["flipped", "cut", "another"])
@pytest.mark.parametrize("kind", ["one", "fsdp"])
def test_a_damaged_file_is_one_sentence_that_names_it(kind, how, out, saved, tmp_path, caplog):
    """JSON that still fits is a warning."""
    folder, blown = checkpoint.latest(out), tmp_path / "blown"
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        good = path.read_bytes()
        for content in versions(path, how, blown):
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
            elif path.name == "checksums.json":  # as in older versions
                continue
            caplog.clear()
            error = ""
            try:
                assert same(out, saved, kind)
                assert path.suffix == ".json"
            except UserError as e:
                error = str(e)
                assert error.isprintable()
            assert path.name in error + caplog.text or path.name == "checksums.json"
            assert "weights_only" not in error and error + caplog.text
        path.write_bytes(good)
    assert same(out, saved, kind) and not blown.exists()
    pickle.loads(pickle.dumps(Bomb(blown)))
    assert blown.exists()


def moments(change: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    """Change the momenta of matrices."""

    def edit(content: Any) -> None:
        for state in content["optimizer"]["state"].values():
            name = "exp_avg" if "exp_avg" in state else "momentum_buffer"
            state[name] = change(state[name]) if state[name].dim() == 2 else state[name]

    return edit


def part(i: int, **values: Any) -> Callable[[Any], None]:
    return lambda entry: entry["parts"][i].update(values)


def move(i: int, rows: int) -> Callable[[Any], None]:
    return lambda entry: entry["parts"][i].update(at=[entry["parts"][i]["at"][0] + rows, 0])


STATES: list[Callable[[Any], Any]] = [  # of optimizer.pt
    lambda o: o["optimizer"]["state"].clear(), lambda o: o["optimizer"]["state"].pop(1),
    lambda o: o["optimizer"]["state"][0].update(foo=torch.zeros(1)),
    lambda o: o.pop("rng"), lambda o: o.update(optimizer=[]), moments(lambda t: t.flatten()[:1]),
    moments(lambda t: t.mT), moments(lambda t: t.long()), moments(lambda t: 0.5),
]  # fmt: skip
ENTRIES: list[Callable[[Any], Any]] = [  # of a tensor in shards/index.json
    lambda entry: entry["parts"].pop(), lambda entry: entry["parts"].append(entry["parts"][0]),
    lambda entry: entry.pop("shape"), lambda entry: entry.update(dtype="load"),
    lambda entry: entry.update(dtype="float16"), lambda entry: entry.update(dtype="int32"),
    lambda entry: [p.update(shape=p["shape"][::-1], at=[0, 0]) for p in entry["parts"]],
    part(0, file="../../x"), part(0, file="/etc/hostname"), part(0, offset=10**7),
    move(0, 1), move(1, -1), move(1, 10**6), move(0, -4),
]  # fmt: skip
INDEXES: list[Callable[[Any], Any]] = [
    lambda index: index.pop(NAME), lambda index: index.update({"\x1b[2J\n": index[NAME]}),
    *(lambda index, f=f, name=name: f(index[name]) for f in ENTRIES for name in (NAME, MOMENT)),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_contents_that_do_not_fit_are_refused(kind, out, saved):
    """As of older versions: without checksums, with the pickle of torch."""
    folder, sharded = checkpoint.latest(out), kind == "fsdp"
    path = folder / ("shards/index.json" if sharded else "optimizer.pt")
    (folder / "checksums.json").unlink()
    if sharded:  # "../../x" has what it should
        shutil.copy(folder / "shards" / "__0_0.distcp", out / "x")
        (folder / "shards" / ".metadata").write_bytes(pickle.dumps(Bomb(out / "blown")))
        path.write_text(re.sub(r',\s*"crc32": \d+', "", path.read_text()))
    good = path.read_bytes()
    assert same(out, saved, kind) and b"crc32" not in good
    for edit in INDEXES if sharded else STATES:
        content = json.loads(good) if sharded else torch.load(io.BytesIO(good))
        edit(content)
        path.write_text(json.dumps(content)) if sharded else torch.save(content, path)
        with pytest.raises(UserError, match=folder.name) as e:
            restored(folder)
        assert str(e.value).isprintable()
    assert not (out / "blown").exists()


def test_the_advice_reads_each_checkpoint_once(tmp_path):
    """Else 40 damaged ones would be 2**40 reads."""
    save(tmp_path, 1)
    for step in range(2, 41):
        folder = shutil.copytree(tmp_path / "step-00000001", tmp_path / f"step-{step:08d}")
        (folder / ("settings.json" if step % 2 else "model.safetensors")).write_bytes(b"{}")
    with pytest.raises(UserError, match=r"step-00000040.*step-00000001"):
        checkpoint.load(checkpoint.latest(tmp_path)).weights()


def test_an_export_gives_the_same_logits(saved, tmp_path, capsys):
    """Also in a place where another export was killed."""
    out, _ = saved["fsdp"]
    x = torch.randint(19, (2, 7))
    want = checkpoint.load(checkpoint.latest(out)).model().eval()(x)[0]
    for source, form in ((out, "safetensors"), (checkpoint.latest(out), "transformers")):
        to = tmp_path / "new" / form
        (killed := to.with_name(f".{form}.partial")).mkdir(parents=True)
        (killed / "config.json").write_text("{")
        assert export(["export", str(source), f"--to={to}", f"--format={form}"]) == 0
        got = checkpoint.init_model(str(to), attention_backend="manual").eval()(x)[0]
        assert torch.equal(got, want) and str(to) in capsys.readouterr().out
        assert not [*to.parent.glob(".*")]
        assert (to / "config.json").exists() == (form == "transformers")


# --- edited JSON ---

GONE = object()
VALUES = [None, True, -1, 1.5, "600", "a\0b", "\udc80", 10**40, [], {}, ["a"]]
SLOW = ("compile", "deterministic")  # the latter for all of the process


def edits(content: Any) -> Iterator[Any]:
    """With another value in one place, or none."""
    yield from VALUES
    inside = content.items() if isinstance(content, dict) else ()
    for key, value in [*enumerate(content)][:1] if isinstance(content, list) else inside:
        for new in (GONE, *edits(value)) if key not in SLOW else ():
            edited = copy(content)
            edited[key] = new
            if new is GONE:
                del edited[key]
            yield edited


@pytest.mark.parametrize("name", ["tiny", "shards"])
def test_an_edited_dataset(name: str, saved: Any) -> None:
    folder = saved["data"] / name
    path, want = folder / "meta.json", data.load(folder, "val", 8, 60_000)[:]
    good = path.read_text()
    for content in edits(json.loads(good)):
        path.write_text(json.dumps(content))
        try:
            meta = data.read_meta(folder)
            assert np.array_equal(data.load(folder, "val", 8, 60_000)[:], want)
            data.bits_per_byte(meta, 1.0)
            data.from_meta(meta["tokenizer"]).to_json()
        except UserError as e:
            assert not re.search(r"[\0-\x1f]", str(e))
    path.write_text(good)


@pytest.mark.parametrize("kind", ["one"])
@pytest.mark.parametrize("name", ["settings.json", "train_state.json", "checksums.json"])
@given(drawn=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[*HealthCheck])
def test_an_edited_checkpoint(name: str, kind: str, out: Path, drawn: Any) -> None:
    path = checkpoint.latest(out) / name
    good = path.read_text()
    path.write_text(json.dumps(drawn.draw(st.sampled_from([*edits(json.loads(good))]))))
    r = run_line(["--init_from=resume", f"--out_dir={out}", "--eval_only=True"], out)
    path.write_text(good)
    assert r.code == 0 or refusal(r)
