"""core/settings.py, core/process.py: config files, command line, errors, --help, streams."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from checkout import ROOT, python
from conftest import few
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, PositiveInt

from bench.settings import MODES
from core.options import TrainConfig
from core.process import wait_passively
from core.settings import Texts, UserError, Words, check_fields, exit_on_user_error, from_dict, read
from data.prepare import PrepareConfig
from explain import ExplainConfig
from sample import SampleConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """A command."""

    n_layer: PositiveInt = 12  # transformer blocks
    rate: Annotated[float, Field(ge=0, lt=1)] = 0.1  # a fraction
    window: PositiveInt | None = None  # keys that a query sees
    dtype: Literal["auto", "float32"] = "auto"  # of matrix products
    compile: bool | None = None  # torch.compile
    stream: bool = False  # print tokens as they come
    name: str = "gpt"  # of the run
    regex: Words = "a"  # no path
    lengths: tuple[PositiveInt | None, ...] = ()  # tokens
    start: Texts = ()  # prompts
    attention_backend: str = "auto"  # a name

    def __post_init__(self) -> None:
        check_fields(self)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
VALID: dict[str, Any] = {
    "n_layer": st.integers(1, 10**6),
    "rate": st.floats(0, 1, exclude_max=True),
    "window": st.none() | st.integers(1, 99),
    "dtype": st.sampled_from(["auto", "float32"]),
    "compile": st.none() | st.booleans(),
    "stream": st.booleans(),
    "name": NAMES.filter(lambda text: not text.startswith("~") and "\0" not in text),
    "lengths": st.lists(st.none() | st.integers(1, 99), min_size=1).map(tuple),
    "start": st.lists(NAMES, min_size=1).map(tuple),
}
WRONG: dict[str, Any] = {
    "n_layer": st.integers(max_value=0) | st.floats(1.1, 1.9) | st.sampled_from(["abc", "none"]),
    "rate": st.floats(1, 9) | st.floats(max_value=-1e-9) | st.just(float("nan")),
    "window": st.integers(max_value=0) | st.just("all"),
    "dtype": st.sampled_from(["int8", "Float32", "none"]),
    "compile": st.sampled_from(["maybe", "2"]),
    "stream": st.sampled_from(["none", "maybe"]),
    "name": st.just(""),
    "lengths": st.sampled_from(["1,,3", ",1", "1,", ",", "1,024", "256, 064", "+01", "1,abc", "0"]),
}
given_values = st.fixed_dictionaries({}, optional=VALID)


def as_words(name: str, value: Any, spelling: str) -> list[str]:
    if name == "start":
        return [word for text in value for word in as_words("", text, spelling.replace("{}", name))]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    option = spelling.format(name)
    return [f"{option}={text}"] if option.startswith("--") else [f"--{option.strip()}", text]


def config_file(folder: Path, text: str, name: str = "c.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@given(given_values, given_values, st.sampled_from(["--{}", "{}"]))
def test_a_file_the_command_line_and_json_are_what_was_written(in_file, on_line, spelling) -> None:
    """The command line wins."""
    config = Config(**in_file | on_line)
    assert from_dict(Config, json.loads(json.dumps(dataclasses.asdict(config)))) == config
    lines = [f"{name} = {value!r}" for name, value in in_file.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = config_file(Path(folder), "\n".join(['"""Doc."""', "import time", *lines]))
        words = [w for name, value in on_line.items() for w in as_words(name, value, spelling)]
        loaded = read(Config, [*words, path])
    assert loaded.settings == config and loaded.notes == ()
    places = {name: f"{path}:{3 + n}" for n, name in enumerate(in_file)}
    assert loaded.origins == places | dict.fromkeys(on_line, "command line")
    report = "\n".join(loaded.report())
    for name, value in (in_file | on_line).items():
        changed = value != getattr(Config, name)
        assert bool(re.search(rf"^  {name} ", report, re.M)) == changed


@pytest.mark.parametrize("name", WRONG)
@given(st.data())
def test_a_wrong_value_is_named(name: str, data: st.DataObject) -> None:
    value = data.draw(WRONG[name])
    with pytest.raises(UserError) as told:
        read(Config, [f"--{name}={value}"])
    said = str(told.value)
    assert f"--{name}" in said
    assert repr(value) in said or str(value).rpartition(",")[2][:9] in said
    with tempfile.TemporaryDirectory() as folder:
        path = config_file(Path(folder), f"\n{name} = {value!r}\n")
        if value == value and "," not in str(value):
            with pytest.raises(UserError, match=re.escape(f"{path}:2")):
                read(Config, [path])


COMMANDS = [TrainConfig, SampleConfig, ExplainConfig, PrepareConfig, *MODES.values()]


@pytest.mark.parametrize("cls", COMMANDS)
def test_every_default_of_every_command_may_be_given(cls: type, tmp_path: Path) -> None:
    """On the command line, in a file, in JSON."""
    values = dataclasses.asdict(cls())
    lines = [f"{name} = {value!r}\n" for name, value in values.items()]
    given_values = [(name, value) for name, value in values.items() if value != ()]
    words = [word for name, value in given_values for word in as_words(name, value, "--{}")]
    assert read(cls, words).settings == cls() == from_dict(cls, json.loads(json.dumps(values)))
    assert read(cls, [config_file(tmp_path, "".join(lines))]).settings == cls()


@pytest.mark.parametrize("words, expected", [
    ("--n-layer=3", {"n_layer": 3}), ("--attn_implementation=x", {"attention_backend": "x"}),
    ("--compile 1", {"compile": True}), ("--stream y --compile None", {"stream": True}),
    ("--compile off --stream ON", {"compile": False, "stream": True}),
    ("--stream --compile c.py", {"stream": True, "compile": True, "n_layer": 7}),
    ("--lengths=1 --lengths=2,none", {"lengths": (1, 2, None)}),
    ("--config=c.py --window=none", {"n_layer": 7}),
])  # fmt: skip
def test_other_spellings(tmp_path: Path, words: str, expected: dict[str, Any]) -> None:
    file = config_file(tmp_path, "n_layer = 7\n")
    assert read(Config, words.replace("c.py", file).split()).settings == Config(**expected)
    assert read(Config, ["--regex=~/a"]).settings.regex == "~/a"
    assert read(Config, ["x y"], positional="name").settings.name == "x y"
    assert read(Config, ["a", "b"], positional="start").settings.start == ("a", "b")
    with pytest.raises(UserError, match="name"):
        read(Config, ["a", "b"], positional="name")


def test_names_that_no_setting_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note, as exec() reads the file in nanoGPT; or an error with the nearest name."""
    text = '"""\nn_layer = 99\n"""\ngpus = 2\nn_layer = 3 * gpus\nsaving = False\n'
    first = config_file(tmp_path, text, "a.py")
    argv = [first, config_file(tmp_path, "window = 16 * gpus\n", "b.py"), "--other=x"]
    loaded = read(Config, argv, ignored={"saving": "why", "other": "because"})
    assert loaded.settings == Config(n_layer=6, window=32)
    assert set(loaded.origins) == {"n_layer", "window"}
    saving, other = loaded.notes
    assert f"{first}:6" in saving and "why" in saving and "because" in other
    typo = config_file(tmp_path, "n_layers = 3\n", "c.py")
    unused = config_file(tmp_path, "gpus = 2", "d.py")
    monkeypatch.chdir(ROOT)
    for word, named in (("--gpus=2", "--gpus"), ("--n_layr=3", "n_layr.*--n_layer"),
                        (typo, "n_layers.*'n_l"), (unused, "gpus"), ("/dev/zero", "/dev/zero"),
                        ("train_gtp2.py", r"config/train_gpt2\.py")):
        with pytest.raises(UserError, match=named):
            read(Config, [word])
    wrong: Any
    for wrong in ({"unknown": 1}, {"n_layer": "3"}, {"n_layer": -1}, [1]):
        with pytest.raises(UserError, match=r"settings\.json"):
            from_dict(Config, wrong)


@given(st.integers(1, 99), st.integers(1, 99), st.text("ab'\"{\n\\", max_size=9))
def test_expressions_are_what_python_makes_of_them(a: int, b: int, text: str) -> None:
    lines = [f"n_layer = {a}", f"window: int = {b} * n_layer + int(rate) - min({a}, -{b}, 0)",
             f"lengths = [n_layer] + [{b} // 2 + 1, int(1e3)]", "rate = 1 / (1 + float(window))",
             f"name = {text!r} + str(n_layer) + f'-{{window}}'"]
    expected: dict[str, Any] = {"rate": Config.rate}
    exec("\n".join(lines), expected)
    with tempfile.TemporaryDirectory() as folder:
        loaded = read(Config, [config_file(Path(folder), "\n".join(lines))])
    names = ("n_layer", "window", "lengths", "rate", "name")
    assert loaded.settings == Config(**{name: expected[name] for name in names})


BAD = [  # lines of a file: calls, other names, what takes for ever, what is no plain value
    "n_layer = open('x')", "from os import *", "n_layer = __import__('os').getpid()",
    "n_layer = 2 * heads", "n_layer = 2 * window", "n_layer = ", "n_layer = 1 / 0", "rate = 1e999",
    "name = str(2 ** -2000)",
    "name = 'a' * 10**12", "n_layer = 9 ** 9 ** 9", "n_layer = 1 << 10**12",
    "n_layer = round(1, -10**9)", "name = f'{n_layer:9999999999}'", "lengths = [1] * 10**12",
    "lengths = {1, 2}", "lengths = [x for x in (1, 2)]", "name = b'x'", "name = '\0'",
    "name = '\\0'",
    "n_layer = lengths[0]", "n_layer += 1", "del n_layer",
    "n_layer = " + "-" * 9999 + "1", "n_layer = " + "(" * 300 + "1" + ")" * 300,
    "n_layer = 1" + " + 1" * 9999, "name = str(" * 3000 + "1" + ")" * 3000,
    "name = f'" + "{name}" * 3000 + "'", "# " + "x" * 10**6,
    "x = f'{name}{name}{name}{name}'\nname = f'" + "{x}" * 9999 + "'",
    *("\n".join([f"x = {first}", *[line] * 40, "name = str(x)"]) for first, line in (  # it grows
        ("'ab'", "x = x + x"), ("'ab'", "x = f'{x}{x}'"), ("3", "x = x ** 60"), ("1", "x = [x, x]"),
        ("[1]", "x = x + x"), ("[0]", "x = x + x"), ("[1]", "x = str(x) + str(x)"),
        ("1", "x = int(str(x) + str(x))"))),
]  # fmt: skip


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:30])
def test_what_a_file_cannot_have_is_one_error(tmp_path: Path, line: str) -> None:
    path = config_file(tmp_path, f"\nname = 'abc' + {'b' * 9999!r}\n{line}\n")
    tracemalloc.start()
    with pytest.raises(UserError, match=re.escape(path)) as error:
        read(Config, [path])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(error.value)) < 500 + len(path) and peak < 2**27


@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_mistake_is_one_line_with_its_rank_and_code_2(rank, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # torchrun ends ranks in this time
    with pytest.raises(SystemExit) as ended:
        exit_on_user_error(lambda: read(Config, ["--n_layer=\x1b[2J"]) and None)
    shown = capsys.readouterr()
    assert ended.value.code == 2 and shown.out == "" and shown.err.count("\n") == 1
    assert "\x1b" not in shown.err and ("rank 3" in shown.err) == (rank == "3")


@pytest.mark.slow
@pytest.mark.parametrize("ranks, shown", [("1", "error (rank 1): "), ("01", "error: ")])
def test_torchrun_shows_a_mistake_once(ranks: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"""import os, time
from core.settings import exit_on_user_error as run
run(lambda: open("/no/file") if os.environ["RANK"] in "{ranks}" else time.sleep(60))""")
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                  f"{tmp_path}/program.py")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert done.returncode == 1 and line.startswith(shown) and "/no/file" in line


def test_help_shows_comments_and_the_values_of_a_file_without_torch(tmp_path: Path) -> None:
    file = config_file(tmp_path, "n_layer = 77\n")
    code = """import runpy, sys
sys.modules["torch"] = None
for program in ("train.py", "sample.py", "explain.py"):
    sys.argv = [program, *sys.argv[1:] * (program == "train.py"), "--help"]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as e:
        print(program, e.code)"""
    shown = python("-c", code, file).stdout
    assert all(f"{program}.py 0" in shown for program in ("train", "sample", "explain")), shown
    assert "--n_layer" in shown and "77" in shown and shown.count("--init_from") >= 3
    assert "probability; 0 for" in shown


RUN = "from core.settings import exit_on_user_error as run\n"
PRINTS = RUN + "run(lambda: print('x' * 99999))"
LASTS = f"""{RUN}import sys, time
def main():
    with open(sys.argv[1] + "/result", "w") as f:
        time.sleep(0.3)
        for i in range(3):
            print(i, flush=True), print(i, file=sys.stderr, flush=True)
        f.write("complete")
run(main, lasting=True)"""
FREED = f"""{RUN}import resource
def main():
    for limit in (0, -1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
        print("limit:", limit, flush=True)
run(main, lasting=True)"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="writes to /dev/full")
@pytest.mark.parametrize("program, to, code, out, err", [
    (PRINTS, "2> err | head -c 1", 1, 0, 0), (PRINTS, "2> err > /dev/full", 2, 0, 1),
    (PRINTS, "> /dev/null 2>&-", 0, 0, 0), (LASTS, "2> err | true", 0, 0, 1),
    (LASTS, "2> /dev/full > out", 0, 1, 0), (LASTS, "> /dev/full 2>&1", 0, 0, 0),
    (LASTS, "<&- >&- 2>&-", 0, 0, 0), (FREED, "2> /dev/null > out", 0, 1, 0)])  # fmt: skip
def test_closed_pipes_and_full_disks(program, to, code, out, err, tmp_path: Path) -> None:
    """One line on the stream that is left. A lasting command goes on to its end."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PY": sys.executable, "PROGRAM": program}
    line = f"set -o pipefail; \"$PY\" -c \"$PROGRAM\" {tmp_path} {to}"
    line = line.replace(" err", f" {tmp_path}/err").replace(" out", f" {tmp_path}/out")
    assert subprocess.run(["bash", "-c", line], env=env).returncode == code
    texts = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert texts.pop("result", "complete") == "complete"
    said = [[x for x in texts.get(name, "").splitlines() if ":" in x] for name in ("out", "err")]
    assert [*map(len, said)] == [out, err]


@pytest.mark.parametrize("lasting", [True, False])
def test_texts_steer_no_terminal_and_pipes_have_them_as_they_are(lasting: bool) -> None:
    text = "a\x1b[31m\x9b2J\r\x07\x7f\t\u00e9\u4e00\n"
    line = [sys.executable, "-c", f"{RUN}run(lambda: print({text!r}, end=''), lasting={lasting})"]
    how: Any = {"cwd": ROOT, "env": os.environ | {"PYTHONIOENCODING": "utf-8"}}
    assert subprocess.run(line, stdout=subprocess.PIPE, **how).stdout == text.encode()
    ours, theirs = pty.openpty()
    subprocess.run(line, stdout=theirs, **how)
    os.close(theirs)
    shown = os.read(ours, 999).decode()
    os.close(ours)
    assert shown == "a\\x1b[31m\\x9b2J\\r\\x07\\x7f\t\u00e9\u4e00\r\n"  # it adds \r


@pytest.mark.parametrize("signum", few([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], 2))
def test_signals_are_one_line_and_a_shells_exit_code(signum: int) -> None:
    done = python("-c", f"""{RUN}import os, time
def main():
    try:
        os.kill(os.getpid(), {signum})
        time.sleep(9)
    finally:
        print("cleaned up")
run(main)""")
    assert done.returncode == 128 + signum and done.stdout == "cleaned up\n"
    assert len(done.stderr.split()) == 1


KILL = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\n"


@pytest.mark.parametrize("line", few([
    "train.py", "-m checkpoint export x", "sample.py", "explain.py", "bench_mfu.py",
    "-m bench.compare x", "-m bench.evaluate", "-m data"]))
def test_an_interrupt_is_not_lost(line: str, tmp_path: Path) -> None:
    """Even if an import would catch it."""
    for name in ("numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(KILL)
    done = python(*line.split(), PYTHONPATH=str(tmp_path))
    assert done.returncode in (130, -signal.SIGINT) and "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc/stat")
def test_on_a_busy_machine_idle_threads_sleep_unless_the_user_says_so(monkeypatch, capsys) -> None:
    """While every core spins."""
    spin = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as others:
        for _ in range(2 * (os.cpu_count() or 1)):
            others.callback(others.enter_context(subprocess.Popen(spin)).kill)
        for env, policy in (({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active"),
                            ({"GOMP_SPINCOUNT": "9"}, None), ({"OMP_NUM_THREADS": "1"}, None)):
            monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "2"} | env)
            wait_passively()
            assert os.environ.get("OMP_WAIT_POLICY") == policy
            assert bool(capsys.readouterr().err) == (not env)  # what it does it says
