"""hf.py and hf_mask.py: models of transformers with our kernels against their own eager attention.

The harness is docs/hf_table.py, which also writes the table of docs/HF.md. With NANOATTN_OLD_
TRANSFORMERS=FOLDER (pip install --target FOLDER) all but the slow tests run again with that one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import BackendUnavailable, Policy, Spec, hf, visible
from attention.hf_mask import Mask, Proof, prove
from docs import hf_table
from docs.hf_table import BACKENDS, CASES, MODELS, build, cell, run

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("triton", reason="package 'triton' is not installed")

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
OWN_MASK = (4, 56)  # GPT-2 made its mask itself before
# gpt_oss came with 4.55; bloom has its tests below.
HERE = [m for m in MODELS if m in transformers.CONFIG_MAPPING and m != "bloom"]
WINDOWED = [m for m, c in MODELS.items() if "sliding_window" in c and m in HERE]
IDS, LEFT = hf_table.batch("left-padded")


@pytest.fixture(autouse=True)
def registered() -> None:
    hf.register()


def is_lost(name: str, case: str) -> bool:
    """What no kernel can have: GPT-2's mask before it used masking_utils does not tell padding, and
    GPT-OSS's does not tell texts apart, nor did GPT-2's."""
    old = VERSION < OWN_MASK
    return (name, case) == ("gpt_oss", "packed") or (
        old and name == "gpt2" and case in ("right-padded", "packed")
    )


# --- every model, kernel and case ---


def test_padding_is_in_the_second_row_alone() -> None:
    """The first has all its tokens: rows of different lengths are what a batch is about."""
    padded = {"left-padded": range(5), "dynamic cache": range(5), "static cache": range(5),
              "training": range(5), "right-padded": range(15, 20)}  # fmt: skip
    for case in CASES:
        ids, seen = hf_table.batch(case)
        assert ids.shape == seen.shape == (2, 20) and bool(seen[0].all())
        assert (seen[1] == 0).nonzero()[:, 0].tolist() == [*padded.get(case, [])]


@pytest.mark.parametrize("backend", [pytest.param("manual", marks=pytest.mark.slow), "sdpa"])
@pytest.mark.parametrize("name", HERE)
def test_a_model_is_right_or_refused(name: str, backend: str) -> None:
    """And docs/HF.md says which, and why."""
    page = hf_table.PAGE.read_text(encoding="utf-8")
    row = re.search(rf"^\| {name} \| (.+) \|$", page, re.M)
    notes = dict(re.findall(r"^\[(\d+)\] refused: (.+)$", page, re.M))
    for case, told in zip(CASES, row[1].split(" | ") if row else [], strict=True):
        why = cell(name, backend, case)
        assert not why or backend != "manual" or is_lost(name, case), f"{case}: {why}"
        note = re.search(rf"(?:none|{backend}) \[(\d+)\]", told)
        assert VERSION < OWN_MASK or why == (notes[note[1]] if note else ""), case


@pytest.mark.slow
@pytest.mark.parametrize("case", ["left-padded", "static cache", "training"])
def test_our_triton_kernels_run_in_a_model(case: str) -> None:
    assert cell("mistral", "triton", case) == ""


@pytest.mark.slow
def test_the_table_in_the_docs_is_what_runs() -> None:
    text = hf_table.PAGE.read_text(encoding="utf-8")
    written = text.partition(hf_table.MARKS[0])[2].partition(hf_table.MARKS[1])[0]
    assert written == hf_table.table(), "python -m docs.hf_table writes it anew"


def test_the_table_is_written_between_its_marks(tmp_path: Path, monkeypatch) -> None:
    begin, end = hf_table.MARKS
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}old\n{end}after\n", encoding="utf-8")
    monkeypatch.setattr(hf_table, "PAGE", page)
    monkeypatch.setattr(hf_table, "table", lambda: "new\n")
    for _ in range(2):
        hf_table.main()
        assert page.read_text(encoding="utf-8") == f"before\n{begin}new\n{end}after\n"


@pytest.mark.parametrize("off, wrong", [(1.9, []), (2.1, ["logits"]), (2.9, ["logits"]),
                                        (3.1, ["logits", "weight"])])  # fmt: skip
def test_logits_may_be_twice_as_far_off_as_eagers_and_gradients_three_times(
    off, wrong, monkeypatch
) -> None:
    truth, plain = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3)
    plain[1, 2] = -1.0  # eager is off by that
    for name in ("logits", "weight"):
        eagers = {torch.float32: {name: plain}, torch.float64: {name: truth}}
        monkeypatch.setattr(hf_table, "eager", lambda *key, of=eagers: of[key[-1]])
        got = torch.zeros(2, 3)
        got[0, 1] = off
        if name in wrong:
            with pytest.raises(AssertionError, match=f"llama, full: {name} is off by {off}, allow"):
                hf_table.check("llama", "full", {name: got})
        else:
            hf_table.check("llama", "full", {name: got})


def test_a_line_of_the_table_says_which_kernels_do_not_run_and_why(monkeypatch) -> None:
    def cell(name: str, backend: str, case: str) -> str:
        alike = {"all": "", "none": "no", "each": f"no {backend}"}.get(name)
        return alike if alike is not None else "slow" if backend in ("tiled", "sdpa") else ""

    names = ("all", "none", "each", "some")
    monkeypatch.setattr(hf_table, "cell", cell)
    monkeypatch.setattr(hf_table, "MODELS", {name: {} for name in names})
    monkeypatch.setattr(hf_table, "CASES", ("full", "packed"))
    each = "all but manual [2], tiled [3], sdpa [4], triton [5]"
    cells = ("all", "none [1]", each, "all but tiled [6], sdpa [6]")
    assert hf_table.table().splitlines() == [
        "| model | full | packed |", "|---|---|---|",
        *(f"| {name} | {text} | {text} |" for name, text in zip(names, cells)), "",
        "[1] refused: no", *(f"[{n}] refused: no {b}" for n, b in enumerate(BACKENDS, 2)),
        "[6] refused: slow",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_oldest_transformers() -> None:
    folder = os.environ.get("NANOATTN_OLD_TRANSFORMERS")
    if not folder:
        pytest.skip("NANOATTN_OLD_TRANSFORMERS names no folder with an older transformers")
    code = "import transformers as t; print(t.__version__, t.__file__)"
    env = os.environ | {"PYTHONPATH": folder}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert folder in found.stdout and found.stdout[0] == "4", found.stdout
    asked = [sys.executable, "-m", "pytest", __file__, "-m", "not slow", "-p", "no:xdist"]
    ran = subprocess.run(asked, env=env, capture_output=True, text=True)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-3000:]


LOST = [
    *((m, "window", "full") for m in WINDOWED),
    *((m, "window", "dynamic cache") for m in ("mistral", "gemma2")),
    *((m, "scale", "full") for m in ("granite", "gemma2", "gemma3_text")),
    ("gemma2", "softcap", "full"),
    *(("gpt_oss", "sinks", case) for case in ("full", "training")),
    *((m, "segments", "left-padded") for m in HERE),
    *((m, "segments", "packed") for m in HERE if not is_lost(m, "packed")),
    ("llama", "segments", "static cache"),
]


@pytest.mark.parametrize(("name", "what", "case"), [x for x in LOST if x[0] in HERE])
def test_whatever_is_lost_is_noticed(
    name: str, what: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request matters in these models: a kernel that drops it does not pass."""
    select = hf.select

    def losing(*args: Any, **kwargs: Any) -> Any:
        chosen = select(*args, **kwargs)

        def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **more: Any) -> Tensor:
            lost = {"segments": False, "sinks": False}.get(what)
            more = {n: x for n, x in more.items() if n != what}
            return chosen.backend.attend(q, k, v, replace(spec, **{what: lost}), **more)

        return replace(chosen, backend=replace(chosen.backend, attend=attend))

    monkeypatch.setattr(hf, "select", losing)
    with pytest.raises(AssertionError, match=r"is off by|other tokens|sinks"):
        cell(name, "manual", case)


@pytest.mark.parametrize("name", HERE)
def test_a_later_token_moves_no_earlier_output(name: str) -> None:
    model, other = build(name, "nanoattn:SDPA"), IDS.clone()
    other[:, -1] = (other[:, -1] + 1) % 61
    with torch.no_grad():
        before, after = (model(i, attention_mask=LEFT).logits for i in (IDS, other))
    assert torch.equal(before[:, :-1][LEFT[:, :-1].bool()], after[:, :-1][LEFT[:, :-1].bool()])
    assert not torch.equal(before[:, -1], after[:, -1])


# --- masks ---


def made(seen: Tensor, kind: str) -> Tensor:
    """A mask of this kind from bool (B, Tq, Tk)."""
    least = {"bool": 0.0, "least": torch.finfo(torch.bfloat16).min, "-inf": -torch.inf}[kind]
    mask = seen[:, None]
    return mask if kind == "bool" else torch.where(mask, 0.0, least).bfloat16()


@pytest.mark.parametrize("kind", ["bool", "least", "-inf"])
@pytest.mark.parametrize("free", [0, 4])  # places of a static cache yet to be filled
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("Tq", [1, 5, 12])
@pytest.mark.parametrize("segments", [[0] * 12, [0] * 3 + [1] * 5 + [2] * 4, [*range(12)]])
def test_a_mask_is_proved_and_rebuilt(
    segments: list[int], Tq: int, window: int | None, free: int, kind: str
) -> None:
    seg = torch.tensor([segments, [0] * 12])
    i, j = torch.arange(Tq)[:, None], torch.arange(12)
    at = seg[:, 12 - Tq :]
    seen = visible(i, j, 12 - Tq, window, at[:, :, None], seg[:, None, :])
    padded = torch.cat([seen, torch.zeros(2, Tq, free, dtype=torch.bool)], dim=2)
    for said in {None, window}:
        proof = prove(made(padded, kind), said)
        ids = proof.segments
        seg_i = None if ids is None else ids[:, 12 - Tq :, None]
        seg_j = None if ids is None else ids[:, None, :]
        again = visible(i, j, 12 - Tq, proof.window, seg_i, seg_j).expand(2, -1, -1)
        assert proof.end == 12 and torch.equal(again, seen)
    # One entry that is not as it should be, wherever it is, is seen.
    for b, i_, j_ in torch.randint(0, 10**6, (20, 3)).tolist():
        other = padded.clone()
        at_ = b % 2, i_ % Tq, j_ % (12 + free)
        other[at_] = ~other[at_]
        if Tq > 1 and other.any(-1).all():  # a single row may well be something else
            try:
                proof = prove(made(other, kind), window)
            except ValueError:
                continue
            end, ids = proof.end, proof.segments
            i2, j2, off = torch.arange(Tq)[:, None], torch.arange(end), end - Tq
            again = visible(i2, j2, off, proof.window) if ids is None else visible(
                i2, j2, off, proof.window, ids[:, off:, None], ids[:, None, :])  # fmt: skip
            assert torch.equal(again.expand(2, -1, -1), other[:, :, :end])


def causal(T: int = 6) -> Tensor:
    return torch.ones(1, T, T, dtype=torch.bool).tril()


AT = torch.arange(6)
PREFIX = causal()
PREFIX[:, :3, :3] = True
HOLE = causal().repeat(2, 1, 1)
HOLE[1, 3:, 2] = False
AHEAD = causal().repeat(2, 1, 1)
AHEAD[1, 2, 4] = True
REFUSED: dict[str, tuple[Tensor, str]] = {
    "bidirectional": (torch.ones(1, 1, 6, 6, dtype=torch.bool), "not causal"),
    "prefix": (PREFIX[:, None], "not causal"),
    "strictly causal": (causal().tril(-1)[:, None], "more than causal"),
    "a query sees ahead": (AHEAD[:, None], "not causal: query 2 of 6 sees key 4 of 6"),
    "a key is hidden": (
        HOLE[:, None],
        "more than causal and segments: query 3 of row 1 sees key 0",
    ),
    "a mask for each head": (causal()[:, None].expand(1, 2, 6, 6), "shape"),
    "2-D": (torch.ones(1, 6), "shape"),
    "a bias": (torch.where(causal(), -0.5, -torch.inf)[:, None], "a bias"),
    "a bias that grows with the distance": (
        torch.where(causal(), 5.0 * (AT - AT[:, None]), -torch.inf)[:, None],
        "a bias",
    ),
    "integers": (causal()[:, None].long(), "neither bool nor"),
    "anticausal": (causal().mT[:, None], "not causal"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_any_other_mask_is_refused(case: str) -> None:
    mask, why = REFUSED[case]
    with pytest.raises(ValueError, match=why):
        prove(mask)


def test_a_token_that_sees_nothing_is_told() -> None:
    blind = causal()
    blind[:, 3] = False
    with pytest.raises(ValueError, match=r"more than causal .*: query 3 of row 0 misses key 3"):
        prove(blind[:, None], real=torch.ones(1, 6).bool())


def test_a_window_that_hides_nothing_is_no_request() -> None:
    proof = Proof(queries=10, end=10)
    assert proof.effective(10) is None and proof.effective(9) == 9


def test_padding_between_tokens_is_refused() -> None:
    model, holes = build("llama", "nanoattn:manual"), torch.ones_like(IDS)
    holes[:, 7] = 0
    with pytest.raises(BackendUnavailable, match="refuses the mask"), torch.no_grad():
        model(IDS, attention_mask=holes)
    with pytest.raises(ValueError, match="one run"):
        prove(torch.tensor([[[[True, True, False, True]]]]), real=torch.ones(1, 1).bool())


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_4_d_mask_of_the_caller_is_the_layers_or_is_refused(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs: list[Proof] = []

    def proving(*args: Any) -> Proof:
        proofs.append(prove(*args))
        return proofs[-1]

    monkeypatch.setattr(hf, "prove", proving)
    i, j = torch.arange(20)[:, None], torch.arange(20)
    mask = visible(i, j, 0, window)[None, None].expand(2, 1, -1, -1)
    own, model = build(name, "eager"), build(name, "nanoattn:manual")
    with torch.no_grad():
        if name == "mistral" and window is None:
            with pytest.raises(BackendUnavailable, match="window 7"):
                model(IDS, attention_mask=mask)
            return
        for kind in ("bool", "least"):
            proofs.clear()
            given = mask if kind == "bool" else torch.where(mask, 0.0, torch.finfo().min)
            given = given.clone()
            got = model(IDS, attention_mask=given).logits
            # Eager adds its mask: it takes none of bool.
            least = torch.where(mask, 0.0, torch.finfo().min)
            torch.testing.assert_close(got, own(IDS, attention_mask=least).logits)
            assert len(proofs) == 1  # for both layers
            given[:, :, 9:, :4] = False if kind == "bool" else torch.finfo().min
            with pytest.raises(BackendUnavailable, match="query"):  # it was written to: a new one
                model(IDS, attention_mask=given)


def test_a_mask_is_proved_once_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(hf, "prove", lambda *args: calls.append(args) or prove(*args))
    model = build("gemma2", "nanoattn:manual", num_hidden_layers=6,
                  layer_types=["sliding_attention", "full_attention"] * 3)  # fmt: skip
    with torch.no_grad():
        model(IDS, attention_mask=LEFT)
        assert len(calls) == 2  # one a kind of layer
        calls.clear()
        build("llama", "nanoattn:manual")(IDS)
        assert calls == []  # plain causal, as transformers knows itself


def test_only_our_attention_can_read_a_mask() -> None:
    proof = Proof(4, 4, segments=torch.ones(2, 4, dtype=torch.int32))
    mask, scores = Mask.of(proof, "nanoattn:manual", (2, 1, 4, 4)), torch.randn(2, 3, 4, 4)
    uses: list[Callable[[], Any]] = [
        lambda: scores + mask,
        lambda: scores.masked_fill(mask, 0.0),
        lambda: torch.where(mask, scores, 0.0),
        lambda: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, mask),
        lambda: torch.nn.functional.scaled_dot_product_attention(*[scores] * 3, attn_mask=mask),
        lambda: torch.where(condition=mask, input=scores, other=scores),
        lambda: scores.masked_fill(~mask[:, :, :, :4], 0.0),
    ]
    for use in uses:  # what is made of a mask is ours all the same
        name = "nanoattn" if use is uses[-1] else "nanoattn:manual"
        with pytest.raises(BackendUnavailable, match=f"to '{name}': it computes with the mask"):
            use()

    def fill(row: Any, seen: bool) -> None:
        row[:, :, 0] = seen

    writes: list[Callable[[Mask], Any]] = [
        lambda m: m.fill_(True), lambda m: fill(m, True), lambda m: m.logical_not_(),
        lambda m: m.__ior__(True)]  # fmt: skip
    for write in writes:  # what is written would not be in the proof
        for changed in (mask, mask.clone(), mask.contiguous()):
            with pytest.raises(BackendUnavailable, match="to 'nanoattn:manual': it computes with"):
                write(changed)
    for copy in (mask.clone(), mask.to("cpu"), mask.contiguous(), mask.detach()):
        assert copy.proof == replace(proof, segments=copy.proof.segments)
    with pytest.raises(ValueError, match="changed the mask"):
        hf._proof(mask[:, :, 1:], None, None, 3, 4)


def test_packing_is_looked_at_again_when_positions_or_mask_change() -> None:
    positions, proof = torch.arange(6)[None], Proof(6, 6)
    for _ in range(9):
        hf._check_packing(positions, Proof(6, 6))  # of earlier steps, which are gone
        hf._check_packing(positions, proof)
    assert len(positions._nanoattn) <= 2  # type: ignore[attr-defined]
    positions[:, 3:] -= 3
    for _ in range(2):
        with pytest.raises(ValueError, match="begin anew"):
            hf._check_packing(positions, proof)
    with pytest.raises(ValueError, match="begin anew"):  # a text of one token, and another
        hf._check_packing(torch.tensor([[0, 0]]), Proof(2, 2))
    with torch.inference_mode():
        hf._check_packing(torch.arange(6)[None], proof)
    # Of two texts that the mask tells apart the second one is two.
    apart = Proof(6, 6, segments=torch.tensor([[1, 1, 2, 2, 2, 2]]))
    two, three = torch.tensor([[0, 1, 0, 1, 2, 3]]), torch.tensor([[0, 1, 0, 1, 0, 1]])
    hf._check_packing(two, apart)
    for positions, proof in ((two, Proof(6, 6)), (three, apart)):
        with pytest.raises(ValueError, match="begin anew"):
            hf._check_packing(positions, proof)


# --- refusals, and models that never call ---

CROSS = torch.nn.Linear(1, 1)
CROSS.is_causal = False  # type: ignore[assignment]
CAUSAL = torch.nn.Linear(1, 1)
CAUSAL.is_causal = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q"),
        ({"output_attentions": True}, "output_attentions"),
        ({"module": CROSS}, "not causal"),
        ({"scaling": torch.tensor(0.5)}, "scaling"),
        ({"s_aux": torch.zeros(3)}, "s_aux"),
        ({"value": torch.zeros(1, 2, 4, 16)}, "head_dim"),
        ({"key": torch.zeros(1, 2, 4, 8).double()}, "float64"),
        ({"sliding_window": 2}, "window of 2"),
        ({"attention_mask": None}, "no mask"),
        ({"attention_mask": Mask.of(Proof(4, 9), "nanoattn:manual", (1, 1, 4, 9))}, "other than 4"),
        (
            {"key": torch.zeros(1, 2, 6, 8), "value": torch.zeros(1, 2, 6, 8)},
            "4 queries and 6 keys",
        ),
        ({"module": CAUSAL, "attention_mask": None, "is_causal": False}, "not causal"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_what_is_not_known_is_refused(asked: dict[str, Any], why: str) -> None:
    q, kv = torch.zeros(1, 4, 4, 8), torch.zeros(1, 2, 4, 8)
    mask = Mask.of(Proof(4, 4), "nanoattn:manual", (1, 1, 4, 4))
    call = {"module": torch.nn.Linear(1, 1), "query": q, "key": kv, "value": kv,
            "attention_mask": mask, "position_ids": torch.arange(4), "new": None}  # fmt: skip
    assert hf._attend("manual", Policy(), **call)[0].shape == (1, 4, 4, 8)
    hf._attend("manual", Policy(), **call, s_aux=torch.zeros(4, requires_grad=True))
    assert [spec.grad for spec in hf._ran[call["module"]]] == [False, True]  # of sinks alone too
    with pytest.raises(BackendUnavailable, match=why):
        hf._attend("manual", Policy(), **call | asked)


def test_a_model_that_never_calls_is_refused_when_it_is_built() -> None:
    with pytest.raises(BackendUnavailable, match="BloomAttention computes its attention itself"):
        build("bloom", "nanoattn:manual")
    build("bloom", "eager")  # nobody else is asked anything
    assert "computes its attention itself" in cell("bloom", "triton", "full")


def test_a_file_that_only_imports_an_attention_class_is_no_model_of_its_own(monkeypatch) -> None:
    """As where somebody derives a class from one of transformers."""
    config = build("llama", "eager").config
    config._attn_implementation = "nanoattn:manual"
    file = ModuleType("somebodys")
    monkeypatch.setitem(sys.modules, "somebodys", file)
    names = {"__module__": "somebodys"}
    vars(file)["LlamaAttention"] = transformers.models.llama.modeling_llama.LlamaAttention
    derived = type("Derived", (transformers.LlamaForCausalLM,), names)
    derived(config)
    vars(file)["MyAttention"] = type("MyAttention", (torch.nn.Module,), names)
    with pytest.raises(BackendUnavailable, match=r"Derived cannot run .*: MyAttention computes"):
        derived(config)


def test_a_model_that_never_calls_is_found_out_later_too() -> None:
    model = build("bloom", "eager")
    model.config._attn_implementation = "nanoattn:manual"
    with pytest.raises((BackendUnavailable, RuntimeError), match=r"computes with|never calls"):
        model(IDS)  # transformers 5: it adds the mask; before, it made its own
        hf.report(model)


def test_a_bidirectional_model_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=61, num_hidden_layers=2, **sizes)
    # In older releases BERT computed its attention itself.
    with pytest.raises(BackendUnavailable, match=r"not causal|computes its attention itself"):
        transformers.AutoModel.from_config(config, attn_implementation="nanoattn:manual")(IDS)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    text = "from attention import Backend, get\nBACKEND = Backend('two', '', get('manual').attend,"
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text(text + " get('manual').caps, None)", encoding="utf-8")
    hf.register(extra=[str(files[0]), str(files[0]), "eager"])
    with pytest.raises(ValueError, match="another backend's"):
        hf.register(extra=map(str, files))


def test_names() -> None:
    names = hf.names()
    assert {names[n] for n in ("manual", "tiled", "triton", "auto", "fastest")} == {
        "nanoattn:manual", "nanoattn:tiled", "nanoattn:triton", "nanoattn:auto", "nanoattn:fastest"
    }  # fmt: skip
    assert names["sdpa"] == "nanoattn:SDPA" and names["flash_attn_2"] == "nanoattn:FLASH_ATTN_2"
    assert hf.implementation("flash_attention_2") == names["flash_attn_2"]
    with pytest.raises(ValueError, match="did you mean"):
        hf.implementation("tritn")
    with pytest.raises(ValueError, match=r"nanoattn:SDPA|not supported"):
        build("llama", "nanoattn:sdpa")


@pytest.mark.parametrize("name", [  # flex compiles for seconds
    pytest.param(n, marks=[pytest.mark.slow] * (n == "flex"))
    for n in hf.names() if n != "fastest"])  # fmt: skip
def test_every_name_is_accepted_and_runs_or_falls_back(name: str) -> None:
    """Also by models that have no SDPA of transformers, and with names that hold "flash"."""
    model = build("gemma2", hf.implementation(name))
    got = run(model, "left-padded")
    hf_table.check("gemma2", "left-padded", got)
    (_, chosen, calls), *_ = hf.report(model)[0].ran
    assert calls == 1
    assert chosen.backend.name == name or chosen.rejected or name == "auto"


def test_gpt2s_scale_of_each_layer_is_honoured_or_refused() -> None:
    asked = {"scale_attn_by_inverse_layer_idx": True}
    with torch.no_grad():
        want = build("gpt2", "eager", **asked)(IDS).logits
        model = build("gpt2", "nanoattn:manual", **asked)
        try:
            torch.testing.assert_close(model(IDS).logits, want)
        except BackendUnavailable as e:
            assert VERSION < (5, 0) and "does not pass its scale" in str(e)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_prompt_in_three_parts(name: str, cache: str) -> None:
    """Several queries after a cache, neither prefill nor decoding: the same as all at once."""
    ids, tokens = hf_table.batch("left-padded")
    for implementation in ("nanoattn:tiled", "nanoattn:manual"):
        model = build(name, implementation)
        old = {"max_batch_size": 2} if VERSION < (5, 0) else {}
        sizes = {"config": model.config, "max_cache_len": 32} | old
        dynamic = cache == "dynamic"
        kept = transformers.DynamicCache() if dynamic else transformers.StaticCache(**sizes)
        seen, logits = 0, []
        for part in ids.split([9, 7, 4], dim=1):
            at = torch.arange(seen, seen + part.shape[1])
            seen += part.shape[1]
            more: dict[str, Any] = {"cache_position": at} if old else {}
            with torch.no_grad():
                out = model(part, attention_mask=tokens[:, :seen], past_key_values=kept,
                            position_ids=at.expand(2, -1), **more)  # fmt: skip
            logits.append(out.logits)
        joined = torch.cat(logits, dim=1)[tokens.bool()]
        hf_table.check(name, "left-padded", {"logits": joined})


def test_a_token_after_a_static_cache_without_any_mask_of_the_callers(monkeypatch) -> None:
    """The places yet to be filled are hidden from it, and those that are filled are not."""
    select, shapes = hf.select, []
    monkeypatch.setattr(hf, "select", lambda *a, shape: shapes.append(shape) or select(*a))
    hf._kernels.clear()
    model = build("llama", "nanoattn:manual")
    old = {"max_batch_size": 2} if VERSION < (5, 0) else {}
    kept = transformers.StaticCache(config=model.config, max_cache_len=32, **old)
    with torch.no_grad():
        want, logits, seen = model(IDS[:, :10]).logits, [], 0
        for part in IDS[:, :10].split([8, 1, 1], dim=1):
            at = torch.arange(seen, seen + part.shape[1])
            seen += part.shape[1]
            more: dict[str, Any] = {"cache_position": at} if old else {}
            logits.append(model(part, past_key_values=kept, **more).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), want)
    assert shapes == [(2, 10), (2, 9)]  # sequences and keys, of the prompt and of a token


# --- choosing, reports, and how models are used ---


def test_falling_back_is_loud_and_may_be_forbidden(caplog: pytest.LogCaptureFixture) -> None:
    from attention.select import _once

    _once.cache_clear()
    hf._kernels.clear()
    with caplog.at_level("INFO", logger="nanoattn"):
        model = build("llama", "nanoattn:FLASH_ATTN_2")
        run(model, "full")
    text = caplog.text
    assert "flash_attn_2 requested but" in text and "Falling back to 'sdpa'" in text
    assert "kernel: flash (CPU)) without gradients" in text
    assert "flash_attn_2 refused" in str(hf.report(model))
    hf.register(policy=Policy(fallback=False))
    with pytest.raises(BackendUnavailable, match="flash_attn_2"):
        run(build("llama", "nanoattn:FLASH_ATTN_2"), "full")


def test_report_says_for_each_layer_what_ran() -> None:
    model = build("mistral", "nanoattn:SDPA")
    with pytest.raises(RuntimeError, match="call the model first"):
        hf.report(model)
    run(model, "dynamic cache")
    layers = hf.report(model)
    assert [layer.name for layer in layers] == [f"model.layers.{n}.self_attn" for n in (0, 1)]
    (first, chosen, calls), *more = layers[0].ran
    assert (first.window, first.segments, first.cache, calls) == (7, True, "none", 1)
    assert chosen.backend.name == "sdpa" and chosen.kernels == ("flash (CPU)",)
    assert sum(n for *_, n in more) == hf_table.NEW - 1
    lines = [line for line in str(layers).splitlines() if line.startswith("model.layers.1.")]
    said = "model.layers.1.self_attn: sdpa (kernel: flash (CPU)), {} calls, float32, inference, {}"
    one, later = said.format(1, "segments, window 7"), said.format(3, "with a cache")
    assert lines in ([one, later], [one, f"{later}, window 7"])  # as transformers 4 asks
    nobody = hf.Layer("encoder", ())
    assert str(hf.Report([nobody, layers[1]])) == "\n".join(["encoder: NOT CALLED", *lines])


def test_a_report_has_a_layer_of_any_name_that_ran() -> None:
    x = torch.zeros(1, 2, 4, 8)
    layer = torch.nn.Linear(1, 1)
    mask = Mask.of(Proof(4, 4), "nanoattn:manual", (1, 1, 4, 4))
    hf._attend("manual", Policy(), layer, x, x, x, mask, dropout=0.5, scaling=0.25, softcap=3.0)
    (only,) = hf.report(torch.nn.Sequential(torch.nn.ReLU(), layer))
    assert str(only) == ("1: manual (kernel: plain operators), 1 calls, float32, inference, scale "
                         "0.25, softcap 3, dropout 0.5")  # fmt: skip
    ((spec, *what),) = only.ran
    with_sinks = replace(only, ran=((replace(spec, sinks=True, softcap=None), *what),))
    assert str(with_sinks).endswith("inference, scale 0.25, dropout 0.5, sinks")


def test_fastest_measures_what_a_model_may_ask_of_it(monkeypatch) -> None:
    """Not training with fewer queries than keys, for which it has no call."""
    monkeypatch.setattr(hf, "announce", lambda *_: None)
    for name in ("fastest", "select"):
        monkeypatch.setattr(hf, name, lambda *_, name=name, **__: name)
    spec = Spec(2, 2, 16, "float32")
    for grad, Tq, taken in ((True, 9, "fastest"), (True, 3, "select"), (False, 3, "fastest")):
        hf._kernels.clear()
        asked = replace(spec, grad=grad)
        chosen: Any = hf._choose("fastest", asked, torch.device("cpu"), Policy(), (1, Tq, 9))
        assert chosen == taken
        chosen = hf._choose("sdpa", asked, torch.device("cpu"), Policy(), (1, Tq, 9))
        assert chosen == "select"
    hf._kernels.clear()


@pytest.mark.slow
def test_fastest_measures_and_runs() -> None:
    model = build("llama", "nanoattn:fastest")
    hf_table.check("llama", "full", run(model, "full"))
    assert hf.report(model)[0].ran[0][1].requested == "fastest"


def test_dropout_is_of_the_probabilities_and_in_training_only() -> None:
    model = build("llama", "nanoattn:manual", attention_dropout=0.5)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, model(IDS).logits)
        model.train()
        torch.manual_seed(0)
        first = model(IDS).logits
        assert not torch.equal(first, model(IDS).logits)
        torch.manual_seed(0)
        assert torch.equal(first, model(IDS).logits)
    assert {spec.dropout for spec, *_ in hf.report(model)[0].ran} == {0.0, 0.5}


def test_under_autocast_the_kernel_gets_its_dtype() -> None:
    own, model = build("gemma2", "eager"), build("gemma2", "nanoattn:manual")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, usual = model(IDS).logits.float(), own(IDS).logits.float()
        double = torch.zeros(1, 4, 4, 8).double()  # which autocast leaves alone, as in SDPA
        assert hf._attend("manual", Policy(), CAUSAL, *[double] * 3, None)[0].dtype == double.dtype
    assert [spec.dtype for spec, *_ in hf.report(model)[0].ran] == ["bfloat16"]
    with torch.no_grad():
        truth = own(IDS).logits
    assert (got - truth).abs().max() <= 2 * (usual - truth).abs().max()


@pytest.mark.slow
def test_a_compiled_model() -> None:
    model = build("mistral", "nanoattn:manual")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for asked in ({}, {"attention_mask": LEFT}):
            torch.testing.assert_close(compiled(IDS, **asked).logits, model(IDS, **asked).logits)


def test_activation_checkpointing() -> None:
    model = build("mistral", "nanoattn:tiled")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    hf_table.check("mistral", "training", run(model, "training"))
    assert hf.report(model)[0].ran[0][2] == 2  # forward, and again in the backward


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers>=4.53'"):
        hf.register()


def test_the_backends_of_the_table_are_backends() -> None:
    assert {hf.implementation(b) for b in BACKENDS} <= set(hf.names().values())


def test_one_query_is_never_taken_for_causal_without_a_mask() -> None:
    """It would mean every key, also those that a static cache has yet to fill."""
    asked = []

    def sdpa_mask(*, allow_is_causal_skip: bool, **more: Any) -> Tensor:
        asked.append(allow_is_causal_skip)
        assert "allow_is_bidirectional_skip" not in more  # None would be taken for causal
        return visible(torch.arange(Tq)[:, None], torch.arange(6), 6 - Tq)[None, None]

    for Tq in (1, 2):
        asks = {"batch_size": 1, "kv_length": 6, "q_length": Tq}
        hf._mask("nanoattn:sdpa", sdpa_mask, **asks, allow_is_bidirectional_skip=True)
    assert asked == [False, True]


def test_a_kernel_gets_segments_for_each_row_of_a_mask_of_one(monkeypatch) -> None:
    """Of the caller's own mask, (1, 1, T, T) for all rows: a kernel reads (B, Tk)."""
    i, shapes = torch.arange(6), []
    seen = visible(i[:, None], i, 0, None, i[:, None] // 3, i // 3)[None, None]

    def attend(q: Tensor, *_: Any, segments: Tensor) -> Tensor:
        shapes.append(tuple(segments.shape))
        return q

    chosen = SimpleNamespace(backend=SimpleNamespace(attend=attend))
    monkeypatch.setattr(hf, "_choose", lambda *_: chosen)
    x = torch.zeros(2, 4, 6, 8)
    hf._attend("manual", Policy(), torch.nn.Linear(1, 1), x, x, x, seen)
    assert shapes == [(2, 6)]


def test_which_queries_are_tokens_where_the_keys_begin_later() -> None:
    """A sliding cache: its keys are 4 to 7, of which the caller's mask knows those up to 5."""
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
    found = hf._tokens(3, attention_mask=mask, q_offset=5, kv_offset=4, kv_length=4)
    assert found is not None and found.tolist() == [[True, False, False]]
    found = hf._tokens(3, attention_mask=mask)  # nothing was dropped, and nothing is before them
    assert found is not None and found.tolist() == [[False, True, True]]


def test_the_window_is_that_of_the_tokens() -> None:
    """Queries that are padding may see anything: transformers lets them see every key."""
    i = torch.arange(9)
    seen = visible(i[:, None], i, 0, 3) & (i >= 2)
    seen[:2] = True
    real = (i >= 2)[None]
    assert prove(seen[None, None], real=real).window == 3
