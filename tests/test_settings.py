"""core/settings.py: config files, the command line, errors, --help."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, PositiveInt

from core.settings import Texts, UserError, check_fields, exit_on_user_error, from_dict, read

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Config:
    """A command."""

    # --- sizes ---
    n_layer: PositiveInt = 12  # transformer blocks
    rate: Annotated[float, Field(ge=0, lt=1)] = 0.1  # a fraction
    window: PositiveInt | None = None  # keys that a query sees
    # --- the rest ---
    dtype: Literal["auto", "float32"] = "auto"  # of matrix products
    compile: bool | None = None  # torch.compile
    stream: bool = False  # print tokens as they come
    name: str = "gpt"  # of the run
    lengths: tuple[PositiveInt | None, ...] = ()  # tokens
    start: Texts = ()  # prompts

    def __post_init__(self) -> None:
        check_fields(self)


def config_file(tmp_path: Path, text: str, name: str = "c.py") -> str:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return str(tmp_path / name)


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--n_layer=3"], {"n_layer": 3}),
        (["--n_layer", "3"], {"n_layer": 3}),
        (["--n-layer=3"], {"n_layer": 3}),
        (["--blocks=3"], {"n_layer": 3}),
        (["--rate=0"], {"rate": 0.0}),
        (["--rate=1e-3"], {"rate": 1e-3}),
        (["--window=none"], {"window": None}),
        (["--window=7"], {"window": 7}),
        (["--compile=False"], {"compile": False}),
        (["--compile"], {"compile": True}),
        (["--compile=None"], {"compile": None}),
        (["--stream", "--n_layer=2"], {"stream": True, "n_layer": 2}),
        (["--stream", "false"], {"stream": False}),
        (["--name=a=b, c"], {"name": "a=b, c"}),
        (["--lengths=1,none,3"], {"lengths": (1, None, 3)}),
        (["--lengths=1", "--lengths=2,3"], {"lengths": (1, 2, 3)}),
        (["--start=Well, well", "--start=-x"], {"start": ("Well, well", "-x")}),
    ],
)
def test_command_line(argv: list[str], expected: dict[str, Any]) -> None:
    loaded = read(Config, argv, aliases={"blocks": "n_layer"})
    assert loaded.settings == Config(**expected)
    assert set(loaded.origins) == set(expected)


def test_files_come_before_the_command_line(tmp_path: Path) -> None:
    first = config_file(tmp_path, '"""Doc."""\nn_layer = 2 * 3\nrate = 1 / 4\nname = "a"\n', "a.py")
    second = config_file(tmp_path, "name = 'b'\nlengths = [1, 2]\n", "b.py")
    loaded = read(Config, [first, f"--config={second}", "--rate=0.5"])
    assert loaded.settings == Config(n_layer=6, rate=0.5, name="b", lengths=(1, 2))
    assert loaded.origins["n_layer"] == f"{first}:2"
    assert loaded.origins["rate"] == "command line"
    report = "\n".join(loaded.report())
    assert f"{second}:1" in report and "command line" in report and "window" not in report


@pytest.mark.parametrize("words, compiled, stream", [
    ("--compile 1", True, False), ("--compile off --stream ON", False, True),
    ("--stream y --compile None", None, True), ("--stream 0 --compile c.py", True, False)])
def test_a_word_after_a_switch_is_its_value(tmp_path: Path, words, compiled, stream) -> None:
    file = config_file(tmp_path, "n_layer = 3\n")
    config = read(Config, [file, *words.replace("c.py", file).split()]).settings
    assert (config.n_layer, config.compile, config.stream) == (3, compiled, stream)


@pytest.mark.parametrize("value", ["1,,3", ",1", "1,", ",", "1,024", "256, 064", "+01", "12,-007"])
def test_a_list_with_an_empty_place_or_a_leading_zero_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(value))):
        read(Config, [f"--lengths={value}"])
    assert read(Config, ["--lengths=10,100,none"]).settings.lengths == (10, 100, None)


def test_a_file_with_texts_between_and_variables_of_its_own(tmp_path: Path) -> None:
    """As exec() reads it in nanoGPT; a variable without effect leaves a note."""
    text = '"""head"""\n"""\nn_layer = 99\n"""\ngpus = 2\nn_layer = 3 * gpus\nauthor = "me"\n'
    first, names = config_file(tmp_path, text, "a.py"), {}
    exec(text, names)
    loaded = read(Config, [first, config_file(tmp_path, "window = 16 * gpus\n", "b.py")])
    assert loaded.settings == Config(n_layer=names["n_layer"], window=16 * names["gpus"])
    assert set(loaded.origins) == {"n_layer", "window"}
    (note,) = loaded.notes
    assert "author" in note and f"{first}:7" in note
    with pytest.raises(UserError, match="gpus"):
        read(Config, ["--gpus=2"])


def test_bare_words_of_a_command() -> None:
    assert read(Config, ["x y"], positional="name").settings.name == "x y"
    assert read(Config, ["a", "b"], positional="start").settings.start == ("a", "b")
    with pytest.raises(UserError, match="name"):
        read(Config, ["a", "b"], positional="name")


@pytest.mark.parametrize(
    "text, named",
    [
        ("n_layers = 3\n", "'n_layer'"),  # the nearest name
        ("n_layer = 0\n", "c.py:1: n_layer"),
        ("n_layer = True\n", "n_layer"),
        ("\nn_layer = 'three'\n", "c.py:2"),
        ("n_layer = open('x')\n", "open"),
        ("from os import *\n", "from os import"),
        ("n_layer = __import__('os').getpid()\n", "__import__"),
        ("n_layer = 2 * heads\n", "heads"),
        ("n_layer = 2 * window\n", "c.py:1"),  # of the default, none
        ("name = 'a' * 10**12\n", "c.py:1"),
        ("n_layer = 9 ** 9 ** 9\n", "c.py:1"),
        ("n_layer = \n", "c.py:1"),
        ("n_layer = 1 / 0\n", "c.py:1"),
        ("rate = 1e999\n", "rate"),
        ("name = ''\n", "c.py:1: name"),
    ],
)
def test_errors_in_a_file_name_their_place(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=named.replace("(", r"\(")):
        read(Config, [config_file(tmp_path, text)])


@settings(deadline=None)  # it reads a file
@given(st.integers(1, 99), st.integers(1, 99), st.text("ab'\"{\n\\", max_size=9))
def test_expressions_are_what_python_makes_of_them(a: int, b: int, text: str) -> None:
    lines = [f"n_layer = {a}", f"window: int = {b} * n_layer + round(rate) - min({a}, -{b}, 0)",
             f"lengths = [n_layer, {b} // 2 + 1, int(1e3)]", "rate = 1 / (1 + float(window))",
             f"name = {text!r} + str(n_layer) + f'-{{window}}'"]
    expected: dict[str, Any] = {"rate": Config.rate}
    exec("\n".join(lines), expected)
    with tempfile.TemporaryDirectory() as folder:
        loaded = read(Config, [config_file(Path(folder), "import time\n" + "\n".join(lines))])
    expected["lengths"] = tuple(expected["lengths"])
    assert {name: getattr(loaded.settings, name) for name in loaded.origins} == {
        name: expected[name] for name in ("n_layer", "window", "lengths", "rate", "name")
    }


@pytest.mark.parametrize("first, line", [
    ("x = 'ab'", "x = x + x"), ("x = 'ab'", "x = f'{x}{x}'"), ("x = 3", "x = x * x"),
    ("x = 1", "x = [x, x]"),
])
def test_a_value_that_doubles_in_each_line_is_refused(tmp_path: Path, first, line) -> None:
    path = config_file(tmp_path, "\n".join([first, *[line] * 60, "name = str(x)"]))
    with pytest.raises(UserError, match="x = "):
        read(Config, [path])


def test_ignored_names_leave_a_note_and_no_origin(tmp_path: Path) -> None:
    path = config_file(tmp_path, "n_layer = 5\nsaving = False\n")
    loaded = read(Config, [path, "--other=x"], ignored={"saving": "why", "other": "because"})
    assert set(loaded.origins) == {"n_layer"}
    report = "\n".join(loaded.report())
    assert f"{path}:2" in report and "why" in report and "because" in report


def test_a_missing_config_file_suggests_a_near_one(tmp_path: Path, monkeypatch: Any) -> None:
    config_file(tmp_path, "", "my_tiny_run.py")
    with pytest.raises(UserError, match=str(tmp_path / "my_tiny_run.py")):
        read(Config, [str(tmp_path / "my_tiny_rum.py")])
    monkeypatch.chdir(ROOT)
    for word in ("train_gpt2.py", "train_gpt2", "elsewhere/train_gpt2.py", "train_gtp2.py"):
        with pytest.raises(UserError, match=r"'config/train_gpt2.py'"):
            read(Config, [word])


@pytest.mark.parametrize(
    "argv, named",
    [
        (["--n_layr=3"], ["--n_layr", "--n_layer"]),
        (["--n_layer=abc"], ["--n_layer", "abc"]),
        (["--dtype=int8"], ["--dtype", "int8", "float32"]),
        (["--lengths=1,abc"], ["--lengths", "abc"]),
        (["--name="], ["--name", "''"]),
        (["--n_layer=0"], ["--n_layer"]), (["--rate=1"], ["--rate"]),
        (["--rate=nan"], ["--rate"]), (["--n_layer"], ["--n_layer"]),
    ],
)
def test_mistakes_exit_with_2(argv: list[str], named: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        exit_on_user_error(lambda: read(Config, argv) and None)
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert all(word in shown.out + shown.err for word in named)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="writes to /dev/full")
@pytest.mark.parametrize("to, code, said", [
    ("| head -c 1", 1, ""), ("> /dev/full", 2, "cannot write"), ("> /dev/null 2>&-", 0, "")])
def test_a_closed_pipe_is_quiet_and_a_full_disk_one_line(to: str, code: int, said: str) -> None:
    program = "from core.settings import exit_on_user_error as run; run(lambda: print('x' * 99999))"
    line = f'set -o pipefail; "{sys.executable}" -c "{program}" {to}'
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and done.stderr.count("\n") == (code == 2)
    assert said in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="writes to /dev/full")
@pytest.mark.parametrize("to, out, err", [
    ("2> err | true", 0, 1), ("> /dev/full 2> err", 0, 1), ("2> /dev/full > out", 1, 0),
    ("> /dev/full 2>&1", 0, 0), ("<&- >&- 2> /dev/full", 0, 0), ("2>&- | true", 0, 0),
    ("<&- >&- 2>&-", 0, 0)])
def test_a_lasting_command_ends_well_without_its_streams(to, out, err, tmp_path: Path) -> None:
    """One warning on the other stream, and none in the files that it writes."""
    program = """import sys, time; from core.settings import exit_on_user_error as run
def main():
    with open(sys.argv[1] + "/result", "w") as f:
        time.sleep(0.3)
        for i in range(3):
            print(i, flush=True), print(i, file=sys.stderr, flush=True)
        f.write("complete")
run(main, lasting=True)"""
    line = f"set -o pipefail; '{sys.executable}' -c '{program}' {tmp_path} "
    to = to.replace(" err", f" {tmp_path}/err").replace(" out", f" {tmp_path}/out")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(["bash", "-c", line + to], env=env).returncode == 0
    texts = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert texts.pop("result") == "complete"
    assert [texts.get(name, "").count("WARNING") for name in ("out", "err")] == [out, err]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("early", [True, False])
def test_signals_are_one_line_and_their_exit_code(signum: int, early: bool) -> None:
    program = f"""
import os, time
from dataclasses import dataclass
from core.settings import exit_on_user_error, read_early
@dataclass
class Config:
    n_layer: int = 12
def main():
    try:
        os.kill(os.getpid(), {signum})
        time.sleep(9)
    finally:
        print("cleaned up")
read_early(Config, [])
if {early}:
    main()
exit_on_user_error(main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    said = [line for line in done.stderr.splitlines() if line and not line.startswith("threads:")]
    assert done.returncode == 128 + signum and len(said) == 1
    assert done.stdout == ("" if early else "cleaned up\n")


KILL = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\n"
MEASURING = """import runpy, sys; from attention.machine import timing
timing.measure = lambda *args, **options: __import__("os").kill(__import__("os").getpid(), 2)
sys.argv = ["attention"]; runpy.run_module("attention", run_name="__main__")"""


@pytest.mark.parametrize("argv", [
    *(["train.py"], ["sample.py"], ["explain.py"], ["bench_mfu.py"], ["-m", "bench.compare", "x"]),
    *(["-m", "checkpoint", "export", "x"], ["-m", "bench.evaluate"], ["-c", MEASURING]),
])
def test_an_interrupt_is_not_lost(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(KILL)
    env = os.environ | ({} if argv[0] == "-c" else {"PYTHONPATH": str(tmp_path)})
    argv = [sys.executable, *argv]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env)
    assert (done.returncode, done.stderr.split()) == (130, ["interrupted"])


def test_other_ranks_print_nothing(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        exit_on_user_error(lambda: read(Config, ["--n_layr=3"]) and None)
    assert capsys.readouterr() == ("", "")


def test_help_shows_comments_and_the_values_of_a_file(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        read(Config, [config_file(tmp_path, "n_layer = 77\n"), "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--n_layer" in shown and "transformer blocks" in shown and "77" in shown


@pytest.mark.parametrize("program", ["train.py", "sample.py", "explain.py"])
def test_help_needs_no_torch(program: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{program!r}, '--help']\n"
        "try:\n"
        f"    runpy.run_path({program!r}, run_name='__main__')\n"
        "except SystemExit as e:\n"
        "    assert not e.code and 'torch' not in sys.modules\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0
    assert "--init_from" in shown.stdout


values = st.fixed_dictionaries(
    {},
    optional={
        "n_layer": st.integers(1, 10**6),
        "rate": st.floats(0, 1, exclude_max=True),
        "window": st.none() | st.integers(1, 99),
        "compile": st.none() | st.booleans(),
        "name": st.text(),
        "lengths": st.lists(st.none() | st.integers(1, 99)).map(tuple),
        "start": st.lists(st.text()).map(tuple),
    },
)


@given(values)
def test_settings_survive_json(given_values: dict[str, Any]) -> None:
    config = Config(**given_values)
    assert from_dict(Config, json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize("mapping", [{"unknown": 1}, {"n_layer": "3"}, {"n_layer": -1}, [1]])
def test_saved_settings_are_checked(mapping: Any) -> None:
    with pytest.raises(UserError, match=r"settings\.json"):
        from_dict(Config, mapping)
