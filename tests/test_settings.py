"""Settings: precedence, where each came from, and one sentence for every mistake."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from core.help import help_text
from core.settings import (
    Loaded,
    Texts,
    UserError,
    check_fields,
    exit_on_user_error,
    from_dict,
    parse_config,
    read,
    read_early,
)

ALIASES = {"attn_implementation": "attention_backend", "torch_compile": "compile"}


@dataclass(frozen=True)
class Knobs:
    """Train a GPT.

    This part is for readers of the source.
    """

    # --- run ---
    out_dir: str = "out"  # where checkpoints go
    eval_interval: int = 2000  # iterations between evaluations
    eval_only: bool = False  # stop after the first evaluation
    init_from: str = "scratch"  # 'scratch' or 'resume' # or a name
    # --- data ---
    dataset: str = "openwebtext"  # a folder of data/
    gradient_accumulation_steps: int = 5 * 8  # micro-steps an iteration, over all the processes
    batch_size: int = 12  # sequences a micro-step
    start: str = "\n"  # the prompt

    # --- model ---
    n_layer: int = 12  # transformer blocks
    n_embd: int = 768  # width, a multiple of 4
    n_kv_head: int | None = None  # key and value heads (None: as many as heads)
    dropout: float = 0.0  # probability
    attention_backend: str = "auto"  # the attention kernel
    windows: tuple[int, ...] = ()  # tokens
    # --- AdamW ---
    learning_rate: float = 6e-4  # at the peak
    min_lr: float | None = None  # at the end
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of the activations
    compile: bool = True  # use torch.compile
    # --- logging ---
    # A remark about the group, which is nobody's meaning.

    wandb_run_name: str = "gpt2"
    wandb_group: str | None = None
    project: ClassVar[str] = "no setting"  # nor in the help

    def __post_init__(self) -> None:
        if self.n_embd % 4:
            raise ValueError(f"n_embd must be a multiple of 4, got {self.n_embd}")


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    monkeypatch.delenv("RANK", raising=False)


def load(*argv: str, **files: str) -> Loaded[Knobs]:
    for name, text in files.items():
        Path(f"{name}.py").write_text(text, encoding="utf-8")
    return read(Knobs, [*(f"{name}.py" for name in files), *argv], aliases=ALIASES)


def sentence(*argv: str, **files: str) -> str:
    with pytest.raises(UserError) as caught:
        load(*argv, **files)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- what is read ---


def test_defaults_and_empty_report() -> None:
    loaded = load()
    assert loaded.settings == Knobs() and loaded.origins == {}
    assert loaded.report() == ["settings: all at their defaults"]


def test_a_config_file_in_the_style_of_nanogpt() -> None:
    text = '''"""train a miniature model"""
# launch: python train.py config/x.py
dataset = 'shakespeare'
wandb_run_name = 'ft-shakespeare'
gradient_accumulation_steps = 5 * 8
batch_size = 12  # examples
n_embd = 2**9
learning_rate = 1e-3 / 10
min_lr = 1e-3 / 10 / 10
dropout = 0
compile = False
windows = [64, -1]
out_dir = "out-shakespeare/512"
n_kv_head = None
'''
    assert load(x=text).settings == Knobs(
        dataset="shakespeare",
        wandb_run_name="ft-shakespeare",
        n_embd=512,
        learning_rate=1e-3 / 10,
        min_lr=1e-3 / 10 / 10,
        compile=False,
        windows=(64, -1),
        out_dir="out-shakespeare/512",
    )


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--n_layer=4"], "n_layer", 4),
        (["--n_layer", "4"], "n_layer", 4),
        (["--n-layer=4"], "n_layer", 4),
        (["--windows", "-1"], "windows", (-1,)),
        (["--windows=64,128"], "windows", (64, 128)),
        (["--windows="], "windows", ()),
        (["--out_dir="], "out_dir", ""),
        (["--out_dir=a=b c"], "out_dir", "a=b c"),
        (["--out_dir=--x"], "out_dir", "--x"),
        (["--out_dir=None"], "out_dir", "None"),
        (["--out_dir=1"], "out_dir", "1"),
        (["--n_kv_head=3"], "n_kv_head", 3),
        (["--min_lr=none"], "min_lr", None),
        (["--wandb_group=x", "--wandb_group=None"], "wandb_group", None),
        (["--wandb_group=nobody"], "wandb_group", "nobody"),
        (["--min_lr=1e-5"], "min_lr", 1e-5),
        (["--dropout=1"], "dropout", 1.0),
        (["--dtype=float16"], "dtype", "float16"),
        (["--compile=false"], "compile", False),
        (["--compile=0"], "compile", False),
        (["--eval_only=True"], "eval_only", True),
        (["--eval_only", "1"], "eval_only", True),
        (["--attn_implementation=sdpa"], "attention_backend", "sdpa"),
    ],
)
def test_command_line_values(argv: list[str], field: str, value: Any) -> None:
    got = getattr(load(*argv).settings, field)
    assert got == value and type(got) is type(value)
    assert load(*argv).settings == replace(Knobs(), **{field: value})


def test_later_wins_and_origins_are_told() -> None:
    loaded = load(
        "--batch_size=3",
        "--batch_size=4",
        "--attn_implementation=sdpa",
        "--eval_interval=2000",
        a="\nn_layer = 1\nbatch_size = 1\nn_embd = 4",
        b="n_layer = 2\nattn_implementation = 'manual'",
    )
    want = Knobs(n_layer=2, batch_size=4, n_embd=4, attention_backend="sdpa")
    assert loaded.settings == want
    assert loaded.origins == {
        "n_layer": "b.py:1",
        "batch_size": "command line",
        "n_embd": "a.py:4",
        "attention_backend": "command line",
        "eval_interval": "command line",
    }
    assert loaded.report() == [
        "settings that are not the default:",
        "  batch_size        = 4       (command line)",
        "  n_layer           = 2       (b.py:1)",
        "  n_embd            = 4       (a.py:4)",
        "  attention_backend = 'sdpa'  (command line)",
    ]


def test_a_long_value_pushes_no_origin_away_and_what_nobody_typed_is_derived() -> None:
    text = f"--dataset={'d' * 31}"  # 33 columns with its quotes
    loaded = load(text, "--n_layer=2", "--batch_size=0", "--compile=False")
    settings = replace(loaded.settings, n_embd=4)  # as a command that completes its settings
    assert replace(loaded, settings=settings).report() == [
        "settings that are not the default:",
        f"  dataset    = '{'d' * 31}'  (command line)",
        "  batch_size = 0      (command line)",
        "  n_layer    = 2      (command line)",
        "  n_embd     = 4      (derived)",
        "  compile    = False  (command line)",
    ]


def test_the_command_line_wins_wherever_the_file_stands() -> None:
    Path("a.py").write_text("n_layer = 1")
    assert read(Knobs, ["--n_layer=7", "a.py"]).settings.n_layer == 7


# --- mistakes ---

SEE = "(python train.py --help lists them all)"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--n_layers=4"], f"unknown setting '--n_layers'; did you mean '--n_layer'? {SEE}"),
        (["--Batch_Size=4"], f"unknown setting '--Batch_Size'; did you mean '--batch_size'? {SEE}"),
        (["--N_EMBD=4"], f"unknown setting '--N_EMBD'; did you mean '--n_embd'? {SEE}"),
        (
            ["--attention=sdpa"],
            f"unknown setting '--attention'; did you mean '--attention_backend'? {SEE}",
        ),
        (["--zzz=4"], f"unknown setting '--zzz' {SEE}"),
        (["-n_layer=4"], f"unknown argument '-n_layer=4'; did you mean '--n_layer=4'? {SEE}"),
        (["n_layer=4"], f"unknown argument 'n_layer=4'; did you mean '--n_layer=4'? {SEE}"),
        (["--n_layer=four"], "--n_layer must be an integer, got 'four'"),
        (["--n_layer=1e3"], "--n_layer must be an integer, got '1e3'"),
        (["--n_layer=4.5"], "--n_layer must be an integer, got '4.5'"),
        (["--n_layer="], "--n_layer must be an integer, got ''"),
        (["--n_kv_head=x"], "--n_kv_head must be an integer or None, got 'x'"),
        (["--learning_rate=nan"], "--learning_rate must be a finite number, got 'nan'"),
        (["--windows=1,b"], "--windows must be a list (each an integer), got '1,b'"),
        (["--compile=maybe"], "--compile must be True or False, got 'maybe'"),
        (["--dtype=fp8"], "--dtype must be one of float32, bfloat16, float16, got 'fp8'"),
        (["--n_layer"], "--n_layer needs a value: write --n_layer=..., an integer"),
        (
            ["--n_layer", "--compile=True"],
            "--n_layer needs a value: write --n_layer=..., an integer",
        ),
        (["--n_embd=6"], "n_embd must be a multiple of 4, got 6"),
    ],
)
def test_command_line_mistakes(argv: list[str], text: str) -> None:
    assert sentence(*argv) == text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("n_layers = 4", f"x.py:2: unknown setting 'n_layers'; did you mean 'n_layer'? {SEE}"),
        ("n_layer = 'four'", "x.py:2: n_layer must be an integer, got 'four'"),
        ("n_layer = 4.5", "x.py:2: n_layer must be an integer, got 4.5"),
        ("n_layer = 1e3", "x.py:2: n_layer must be an integer, got 1000.0"),
        ("n_layer = True", "x.py:2: n_layer must be an integer, got True"),
        ("n_layer = None", "x.py:2: n_layer must be an integer, got None"),
        ("compile = 1", "x.py:2: compile must be True or False, got 1"),
        ("compile = 'True'", "x.py:2: compile must be True or False, got 'True'"),
        ("dropout = '0.1'", "x.py:2: dropout must be a finite number, got '0.1'"),
        ("dropout = False", "x.py:2: dropout must be a finite number, got False"),
        ("dropout = 1e999", "x.py:2: dropout must be a finite number, got inf"),
        ("n_kv_head = 'None'", "x.py:2: n_kv_head must be an integer or None, got 'None'"),
        ("windows = 0", "x.py:2: windows must be a list (each an integer), got 0"),
        ("windows = [1, 'a']", "x.py:2: windows must be a list (each an integer), got (1, 'a')"),
        (
            "windows = [[1], [2]]",
            "x.py:2: windows must be a list (each an integer), got ((1,), (2,))",
        ),
        ("out_dir = 3", "x.py:2: out_dir must be a string, got 3"),
        ("attn_implementation = 3", "x.py:2: attn_implementation must be a string, got 3"),
        ("dtype = 16", "x.py:2: dtype must be one of float32, bfloat16, float16, got 16"),
        ("n_layer = 1 / 0", "x.py:2: division by zero"),
        ("n_embd = 6", "n_embd must be a multiple of 4, got 6"),
    ],
)
def test_config_file_mistakes(line: str, text: str) -> None:
    assert sentence(x=f"# header\n{line}\n") == text


def test_a_long_wrong_value_is_cut() -> None:
    assert sentence(f"--n_layer={'x' * 999}") == (
        f"--n_layer must be an integer, got '{'x' * 56}..."  # 60 in all
    )


NOT_PLAIN = [
    "import time",
    "from os import path",
    "wandb_run_name = str(time.time())",
    "out_dir = __import__('os').getcwd()",
    "n_layer = n_layer.real",
    "n_layer = n_embd",
    "out_dir = 'out-' + 'x'",
    "out_dir = f'out-{n_embd}'",
    "for i in [1]:\n    n_layer = i",
    "if True: n_layer = 2",
    "n_layer += 1",
    "n_layer = n_embd = 4",
    "n_layer: int = 4",
    "n_layer, n_embd = 1, 4",
    "n_layer = 4 if True else 5",
    "n_layer = [4][0]",
    "n_layer = (lambda: 4)",
    "n_layer = [i for i in (1, 2)]",
    "n_layer = True + 1",
    "n_layer = -True",
    "n_layer = not 1",
    "n_layer = 1 < 2",
    "n_layer = 1 << 2",
    "n_layer = 2j",
    "n_layer = (-1) ** 0.5",
    "out_dir = b'x'",
    "out_dir = 'x' * 3",
    "out_dir = '%999d' % 3",
    "out_dir = f'{1:999}'",
    "out_dir = {'a': 1}",
    "exec('n_layer = 4')",
    "def n_layer(): pass",
    "'a string that is no docstring'",
]


@pytest.mark.parametrize("line", NOT_PLAIN)
def test_anything_else_in_a_config_file_is_refused(line: str) -> None:
    text = sentence(x=f"n_layer = 1\nn_embd = 4\n{line}\n")
    assert text.startswith("x.py:3: '") and "a config file holds only lines 'name = value'" in text


@pytest.mark.parametrize(
    "text",
    [
        "n_layer = 9 ** 9 ** 9",
        "n_layer = 9 ** 64",
        "n_layer = 2.0 ** 64 ** 64",
        "n_layer = 1e300 ** 2",
        "n_layer = 2 ** 63" + " * 2 ** 63" * 60,
        "n_layer = " + "1 + " * 2_000 + "1",
        "n_layer = " + "1 + " * 50_000 + "1",
        "n_layer = " + "-" * 50_000 + "1",
        "n_layer = " + "(" * 5_000 + "1" + ")" * 5_000,
        "n_layer = " + "9" * 50_000,
    ],
)
def test_expressions_that_would_explode_end_in_a_sentence(text: str) -> None:
    assert "x.py" in sentence(x=text)


def test_an_integer_has_64_bits() -> None:
    most = "2 ** 63 + (2 ** 63 - 1)"
    assert load(x=f"n_layer = {most}").settings.n_layer == 2**64 - 1
    assert "within 64 bits" in sentence(x=f"n_layer = 1 + ({most})")


def test_unreadable_config_files() -> None:
    Path("train_gpt2.py").write_text("")
    assert sentence("train_gtp2.py") == (
        "config file 'train_gtp2.py' does not exist; did you mean 'train_gpt2.py'?"
    )
    Path("config").mkdir()
    Path("config/small.py").write_text("")
    assert sentence("config/smal.py").endswith("did you mean 'config/small.py'?")
    assert sentence("config/none.py") == "config file 'config/none.py' does not exist"
    deep = Path("settings/of/this/month")
    deep.mkdir(parents=True)
    (deep / "a.py").write_text("")
    assert sentence(f"{deep}/b.py").endswith(f"did you mean '{deep}/a.py'?")
    Path("folder").mkdir()
    assert sentence("folder").startswith("config file 'folder' cannot be read (")
    Path("latin.py").write_bytes(b"out_dir = '\xe9'")
    assert sentence("latin.py").startswith("config file 'latin.py' cannot be read ('utf-8")
    assert sentence(x="n_layer = 1\nn_embd = = 4") == "x.py:2: invalid syntax"
    Path("null.py").write_bytes(b"n_layer = 1\0")
    assert "null" in sentence("null.py")


def test_a_byte_order_mark_is_no_mistake() -> None:
    Path("bom.py").write_bytes(b"\xef\xbb\xbfn_layer = 3")
    assert load("bom.py").settings.n_layer == 3


# --- the evaluator ---

NUMBERS = st.one_of(st.integers(0, 2**40), st.floats(0, 1e12, allow_nan=False)).map(repr)


def _joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.builds(
        "({} {} {})".format, parts, st.sampled_from(["+", "-", "*", "/", "//", "%"]), parts
    )
    return binary | parts.map("-{}".format) | parts.map("({} ** 2)".format)


@how(deadline=None, database=None)
@given(st.recursive(NUMBERS, _joined, max_leaves=8))
def test_arithmetic_agrees_with_python(expression: str) -> None:
    path = Path("x.py")
    path.write_text(f"value = {expression}\n")
    try:
        want = eval(expression)  # built above from digits and operators only
    except ArithmeticError:
        want = None
    if want is None or (isinstance(want, int) and abs(want) >= 2**64):
        with pytest.raises(UserError, match=r"^x\.py:1: "):
            parse_config("x.py")
        return
    try:
        ((line, name, got),) = parse_config("x.py")
    except UserError as error:  # an integer on the way was past 64 bits
        assert "64 bits" in str(error)
        return
    assert (line, name) == (1, "value")
    assert type(got) is type(want) and repr(got) == repr(want)


@how(deadline=None, database=None)
@given(st.text(alphabet="abx_=+-*()[]{}'\"#:,.\n\\ 019f\0é", max_size=60))
def test_any_text_gives_values_or_one_sentence(text: str) -> None:
    Path("x.py").write_bytes(text.encode())
    try:
        found = parse_config("x.py")
    except UserError as error:
        assert "\n" not in str(error)
    else:
        for _, _, value in found:
            assert value is None or isinstance(value, bool | int | float | str | tuple)


def test_nothing_in_a_config_file_is_executed(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    for call in (
        f"open({str(flag)!r}, 'w')",
        f"[*map(open, [{str(flag)!r}], ['w'])]",
        f'f"{{open({str(flag)!r}, chr(119))}}"',
        f"(x := open({str(flag)!r}, 'w'))",
    ):
        ast.parse(call)  # it is Python, and would run
        sentence(x=f"out_dir = {call}")
        sentence(x=call)
    assert not flag.exists()


# --- JSON and back ---


def test_round_trip_through_json() -> None:
    settings = Knobs(n_kv_head=3, windows=(1, 2), min_lr=None, dropout=0.25, compile=False)
    again = from_dict(Knobs, json.loads(json.dumps(asdict(settings))))
    assert again == settings and isinstance(again.windows, tuple)


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"n_layer": "4"}, "s.json: n_layer must be an integer, got '4'"),
        ({"n_layer": True}, "s.json: n_layer must be an integer, got True"),
        ({"dropout": 10**400}, "s.json: dropout must be a finite number, got 1000000"),
        ({"n_embd": 6}, "s.json: n_embd must be a multiple of 4, got 6"),
        ({"old": 1, "n_layer": 2, "gone": 1}, "s.json has unknown settings: 'old', 'gone'; "),
        ([1], "s.json must hold an object of settings, got [1]"),
    ],
)
def test_from_dict_mistakes(mapping: Any, text: str) -> None:
    with pytest.raises(UserError) as caught:
        from_dict(Knobs, mapping, "s.json")
    assert str(caught.value).startswith(text)


# --- help ---


@pytest.mark.parametrize("width", [80, 120])
def test_help_lists_every_knob_and_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    values = {**asdict(Knobs()), "wandb_run_name": "w" * 200}
    text = help_text(Knobs, values, aliases=ALIASES)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines)
    assert "remark" not in text
    assert all(
        sum(line.startswith(f"  --{name}=") for line in lines) == 1 for name in asdict(Knobs())
    )
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        "run:",
        "data:",
        "model:",
        "AdamW:",
        "logging:",
    ]
    joined = " ".join(text.split())
    for part in (
        "usage: python train.py [config/file.py ...] [--name=value ...] Train a GPT. The values",
        "--out_dir=out where checkpoints go --eval",
        "--eval_only=False stop after the first evaluation --init",
        "--init_from=scratch 'scratch' or 'resume' # or a name data:",
        r"--start='\n' the prompt model:",
        "model: --n_layer=12 transformer blocks --n_embd",
        "--n_kv_head=None key and value heads (None: as many as heads) [an integer or None]",
        "--attention_backend=auto the attention kernel [also --attn_implementation]",
        "--dtype=bfloat16 of the activations [one of float32, bfloat16, float16]",
    ):
        assert part in joined


def test_help_shows_what_the_file_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--bogus", "--help", x="n_layer = 77")
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--n_layer=77 " in out and "what x.py set" in out


@dataclass(frozen=True)
class Few:
    """What a page of help says of a command, and if it needs more
    than a line it goes on; all of it.

    Not this.
    """

    # --- sizes ---
    windows: tuple[int, ...] = (64, -1)  # keys
    n: int = 12  # blocks, one upon the other, each of which reads what the one before has written
    fourteen_chars: str = "fifteen_letters"  # a flag of 34 columns stands beside this
    fifteen_letters: str = "fifteen_letters"  # one of 35 above
    silent: bool = False


HELP_60 = """\
usage: python train.py [config/file.py ...] [--name=value ...]

What a page of help says of a command, and if it needs more
than a line it goes on; all of it.

The values shown are what a.py, b.py set; the command line
wins.

sizes:
  --windows=64,-1                   keys [a list (each an
                                    integer); also --w]
  --n=7                             blocks, one upon the
                                    other, each of which
                                    reads what the one
                                    before has written
  --fourteen_chars=fifteen_letters  a flag of 34 columns
                                    stands beside this
  --fifteen_letters=fifteen_letters
                                    one of 35 above
  --silent=False"""


def test_the_whole_page(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (10, 60):  # as narrow as it becomes
        monkeypatch.setenv("COLUMNS", str(columns))
        text = help_text(Few, {"n": 7}, ["a.py", "b.py"], {"w": "windows"})
        assert text == HELP_60
    monkeypatch.setenv("COLUMNS", "500")
    wide = help_text(Few, {})
    assert 110 < max(map(len, wide.splitlines())) <= 120 and "are the defaults;" in wide


# --- the way out ---


def _raiser(error: Exception) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(("rank", "printed"), [(None, True), ("0", True), ("3", False)])
def test_a_user_error_is_one_line_and_code_2(
    rank: str | None,
    printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as caught:
        exit_on_user_error(_raiser(UserError("no such device")))
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == ("error: no such device\n" if printed else "") and not captured.out


def test_other_errors_pass_and_codes_are_kept() -> None:
    with pytest.raises(ValueError, match="a bug"):
        exit_on_user_error(_raiser(ValueError("a bug")))
    for code in (None, 0, 5):
        with pytest.raises(SystemExit) as caught:
            exit_on_user_error(partial(int, code) if code is not None else lambda: None)
        assert caught.value.code == code


def test_as_a_program(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "from __future__ import annotations\n"
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from dataclasses import dataclass\n"
        "from core.settings import exit_on_user_error, read\n"
        "@dataclass(frozen=True)\n"
        "class Knobs:\n"
        "    n_layer: int | None = 12  # blocks\n"
        "def main():\n"
        "    print(read(Knobs, sys.argv[1:]).settings.n_layer)\n"
        "exit_on_user_error(main)\n"
    )

    def run(*argv: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, str(program), *argv], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    assert run("--n_layer=3") == (0, "3\n", "")
    code, out, err = run("--n_layr=3")
    assert (code, out) == (2, "")
    assert err == f"error: unknown setting '--n_layr'; did you mean '--n_layer'? {SEE}\n"
    code, out, err = run("--help")
    assert (code, err) == (0, "") and "--n_layer=12" in out and "blocks" in out


@pytest.mark.parametrize("name", ["compile", "torch_compile"])
@pytest.mark.parametrize("next_word", [[], ["--n_layer=4"], ["again.py"]])
def test_a_bare_switch_is_true_by_its_other_name_too(name: str, next_word: list[str]) -> None:
    settings = load(f"--{name}", *next_word, x="compile = False", again="n_layer = 4").settings
    assert settings.compile is True and settings.n_layer == 4


# --- bare words, repeated options, ranges ---


@dataclass(frozen=True)
class Words:
    """Compare kernels."""

    backend: str | None = None  # the one
    records: Texts = ()  # folders
    start: Texts = ("a",)  # prompts
    lengths: tuple[PositiveInt | None, ...] = ()  # tokens
    steps: PositiveInt = 3  # of them
    decay: NonNegativeFloat | None = None  # per step
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    batch: int | Literal["auto"] = 1
    stream: bool = False
    maybe: bool | None = None
    flags: tuple[bool, ...] = ()
    lr: PositiveFloat = 1.0
    seed: Annotated[int, Field(le=9)] = 1

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("argv", "positional", "want"),
    [
        (["sdpa", "--steps=4"], "backend", {"backend": "sdpa", "steps": 4}),
        (["--stream", "sdpa"], "backend", {"backend": "sdpa", "stream": True}),
        (["--stream", "False", "sdpa"], "backend", {"backend": "sdpa"}),
        (["--steps", "4", "sdpa"], "backend", {"backend": "sdpa", "steps": 4}),
        (["a,b", "--steps=4", "c.py"], "records", {"records": ("a,b", "c.py"), "steps": 4}),
        (["--start=Well, well", "--start", "None"], None, {"start": ("Well, well", "None")}),
        (["--start="], None, {"start": ("",)}),
        (["--lengths=1,2", "--lengths=none"], None, {"lengths": (1, 2, None)}),
        (["--steps=4", "--steps=5"], None, {"steps": 5}),
        (["--flags", "True,False"], None, {"flags": (True, False)}),
        (["--maybe", "a"], "backend", {"maybe": True, "backend": "a"}),
        (["--maybe", "none", "a"], "backend", {"backend": "a"}),
        (["--batch=auto"], None, {"batch": "auto"}),
        (["--batch=7"], None, {"batch": 7}),
        (["--decay=0"], None, {"decay": 0.0}),
    ],
)
def test_bare_words_and_repeated_options(
    argv: list[str], positional: str | None, want: dict[str, Any]
) -> None:
    assert read(Words, argv, positional=positional).settings == replace(Words(), **want)


def test_an_option_of_a_list_replaces_what_the_file_says() -> None:
    Path("x.py").write_text("lengths = [1, 2]\nstart = ['b', 'c']")
    settings = read(Words, ["x.py", "--lengths=3", "--lengths=4"]).settings
    assert settings.lengths == (3, 4) and settings.start == ("b", "c")


def test_config_names_a_file() -> None:
    Path("x.py").write_text("steps = 9")
    for argv in (["--config=x.py"], ["--config", "x.py", "sdpa"]):
        loaded = read(Words, argv, positional="backend")
        assert loaded.settings.steps == 9 and loaded.origins["steps"] == "x.py:1"
    Path("y.py").write_text("steps = 8")
    for argv, steps in ((["x.py", "--config=y.py"], 8), (["--config=y.py", "x.py"], 9)):
        assert read(Words, argv).settings.steps == steps, "files in the order given"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["sdpa", "flex"], "give one backend, got sdpa flex"),
        (["--backend=sdpa", "flex"], "give one backend, got sdpa flex"),
        (["--steps=0"], "--steps must be at least 1, got 0"),
        (["--steps=x"], "--steps must be an integer, got 'x'"),
        (["--decay=-1"], "--decay must be at least 0, got -1"),
        (["--decay=x"], "--decay must be a finite number or None, got 'x'"),
        (["--beta=1"], "--beta must be below 1, got 1"),
        (["--lr=0"], "--lr must be more than 0, got 0"),
        (["--seed=10"], "--seed must be at most 9, got 10"),
        (["--lengths=1,0"], "--lengths must be at least 1, got 1,0"),
        (["--lengths=1,x"], "--lengths must be a list (each an integer or None), got '1,x'"),
        (["--batch=big"], "--batch must be an integer or one of auto, got 'big'"),
        (["--config"], f"unknown setting '--config' {SEE}"),
    ],
)
def test_mistakes_in_words_and_ranges(argv: list[str], text: str) -> None:
    with pytest.raises(UserError) as caught:
        read(Words, argv, positional="backend")
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": True}, "steps must be an integer, got True"),
        ({"beta": 1}, "beta must be below 1, got 1"),
        ({"lengths": (1, -1)}, "lengths must be at least 1, got (1, -1)"),
        ({"decay": float("nan")}, "decay must be a finite number or None, got nan"),
    ],
)
def test_an_instance_that_no_command_line_made_is_checked_too(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Words(**changes)
    assert str(caught.value) == text


def test_help_names_the_bare_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(Words, ["--help"], positional="backend")
    out = capsys.readouterr().out
    assert out.startswith("usage: python train.py [backend] [--name=value ...]\n")
    assert "[an integer or one of auto]" in out


def test_only_one_process_prints_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as caught:
        read(Words, ["--help"])
    assert caught.value.code == 0 and capsys.readouterr() == ("", "")


def test_help_shows_paths_as_they_lie_from_here() -> None:
    values = asdict(Words()) | {"backend": f"{Path.cwd()}/out/x"}
    assert "--backend=out/x " in help_text(Words, values)


def test_what_a_base_class_has_stands_at_the_end_of_the_help() -> None:
    @dataclass(frozen=True)
    class More(Words):
        steps: PositiveInt = 5  # of all
        extra: int = 1  # its own

    text = help_text(More, asdict(More()))
    assert text.index("--steps=5") < text.index("--extra=1") < text.index("--backend=")
    assert text.count("--steps=") == 1 and "of all" in text


def test_an_early_answer_leaves_only_the_dataclasses_own_checks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    read_early(Knobs, ["--n_embd=6"])  # which __post_init__ refuses, later
    assert capsys.readouterr() == ("", "")
    with pytest.raises(SystemExit) as caught:
        read_early(Knobs, ["--n_embd=six"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: --n_embd must be an integer, got 'six'\n"
    with pytest.raises(SystemExit) as caught:
        read_early(Knobs, ["--help"], aliases=ALIASES)
    assert caught.value.code == 0 and "--attn_implementation]" in capsys.readouterr().out


def test_of_a_statement_of_many_lines_the_first_is_quoted(tmp_path) -> None:
    path = tmp_path / "loop.py"
    path.write_text("a = 1\nfor i in [1, 2]:\n    b = 2\n")
    with pytest.raises(UserError, match=r":2: 'for i in \[1, 2\]:' is refused"):
        parse_config(str(path))
