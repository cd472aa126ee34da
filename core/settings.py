"""Defaults, config files, command line -> one checked, frozen dataclass.

n_layer: PositiveInt = 12  # blocks: the comment is the --help
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import errno
import functools
import inspect
import operator
import os
import re
import signal
import sys
import textwrap
import time
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from core import process

T = TypeVar("T")
Texts = Annotated[tuple[str, ...], "whole"]  # --start="Well, well" is not split at its comma
Words = Annotated[str, Field(min_length=1)]  # not a path: ~ is no home folder
Size = Annotated[int, Field(gt=0, lt=2**31)]
LINE = "command line"
ALIASES = {"attn_implementation": "attention_backend", "attention_deterministic": "deterministic"}
TEXT = (str, str | None)
SWITCH_WORDS = ["true", "false", "1", "0", "on", "off", "yes", "no", "t", "f", "y", "n", "none"]
ALONE_S = 5.0  # torchrun would end this rank sooner, had rank 0 failed too
_adapter = functools.cache(lambda hint: TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)))


class UserError(ValueError):
    """A mistake of the user."""


@contextmanager
def user_errors(where: str = "") -> Iterator[None]:
    """Raise ValueError and OSError as UserError after `where`."""
    try:
        yield
    except (ValueError, OSError) as error:
        why = where and getattr(error, "strerror", None)
        raise UserError(f"{where}{why or error}") from error


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    settings: T
    origins: dict[str, str]  # field -> "config/x.py:7" or LINE
    notes: tuple[str, ...] = ()  # on ignored names

    def report(self) -> list[str]:
        fields = dataclasses.fields(self.settings)  # type: ignore[arg-type]
        rows = {f.name: v for f in fields if (v := getattr(self.settings, f.name)) != f.default}
        wide = max(map(len, rows), default=0)
        lines = [f"  {name:<{wide}} = {value!r:<10}  ({self.origins.get(name, 'derived')})"
                 for name, value in rows.items()]  # fmt: skip
        title = "settings that are not the default:" if rows else "settings: all at their defaults"
        return [title, *lines, *self.notes]


def read(cls: type[T], argv: Sequence[str], **options: Any) -> Loaded[T]:
    """Checked settings from sys.argv[1:]; options of gather()."""
    given = gather(cls, argv, **options)
    with user_errors():
        return Loaded(cls(**given.settings), given.origins, given.notes)


def read_early(cls: type, argv: Sequence[str], **options: Any) -> None:
    """Handle --help, mistakes and Ctrl-C, before slow imports."""
    process.end_at_once()
    process.prepare()
    try:
        gather(cls, argv, **options)
    except UserError as error:
        _fail(str(error))
    process.wait_passively()


def gather(cls: type, argv: Sequence[str], *, ignored: Mapping[str, str] = {},
           positional: str | None = None,
           shown: Collection[str] | None = None) -> Loaded[dict[str, Any]]:  # fmt: skip
    """Given values by field. ignored: name -> why; positional: field of bare words, or None for
    config files; shown: fields in --help."""
    hints = _hints(cls)
    hints |= {alias: hints[field] for alias, field in ALIASES.items() if field in hints}
    options = [*_split(argv, {**hints, "config": str}, positional or "config")]
    known = {field.name: field.default for field in dataclasses.fields(cls)}
    used: set[str] = set()
    files = [path for name, path in options if name == "config"]
    rows = [row for path in files for row in parse_config(path, known, used)]
    help_wanted = {"-h", "--help"} & {*argv}
    if not help_wanted:
        rows += [(LINE, name, text) for name, text in options if name != "config"]
    settings: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notes: dict[str, str] = {}
    for origin, name, given in rows:
        on_line = origin == LINE
        where = f"--{name}" if on_line else f"{origin}: {name}"
        if name not in hints:
            if name in ignored:
                notes[name] = f"{name} is ignored ({origin}): {ignored[name]}"
            elif on_line or name not in used:
                near = did_you_mean(name, hints, "--" * on_line)
                raise UserError(f"{where}: unknown setting{near}")
            continue
        hint = hints[name]
        field = ALIASES.get(name, name)
        value = _parse(hint, given, where) if on_line else check(hint, given, where)
        if value == "" and hint in TEXT:  # Path("") would be the current folder
            raise UserError(f"{where}: expected a text, got ''")
        if value == () != getattr(cls, field, ()):
            raise UserError(f"{where}: expected at least one value, got none")
        if on_line and origins.get(field) == LINE:
            if _is_tuple(hint):
                value = settings[field] + value  # a repeated list grows
            elif field == positional:
                raise UserError(f"expected one {field}, got {settings[field]} and {value}")
        settings[field] = value
        origins[field] = origin
    if help_wanted:
        _print_help(cls, settings, hints if shown is None else shown)
    return Loaded(settings, origins, tuple(notes.values()))


def from_dict(cls: type[T], mapping: Mapping[str, object], origin: str = "settings.json") -> T:
    if not isinstance(mapping, Mapping):
        raise UserError(f"{origin}: expected an object, got {str(mapping)[:60]}")
    hints = _hints(cls)
    if unknown := ", ".join(repr(name) for name in mapping if name not in hints):
        raise UserError(f"{origin}: unknown settings {unknown} (of another version?)")
    with user_errors(f"{origin}: "):
        return cls(**{name: check(hints[name], value, name) for name, value in mapping.items()})


def exit_on_user_error(main: Callable[[], int | None], lasting: bool = False) -> NoReturn:
    """Exit with main's code, 2 (UserError), or 130, 143, 129 (signals). lasting: main outlives its
    stdout."""
    process.prepare(lasting)
    try:
        process.raise_on_signals()
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except UserError as error:
        _fail(str(error))
    except OSError as error:  # a file; a closed pipe (... | head); a full disk
        if error.filename is not None:
            _fail(f"cannot use {str(error.filename)!r:.99} ({error.strerror})")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and (lasting or error.errno != errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more
        sys.exit(_fail(f"cannot write ({error})") if full else 1)
    except KeyboardInterrupt as error:
        code = error.args[0] if error.args else 130
        if os.environ.get("RANK", "0") == "0":
            print("\ninterrupted" if code == 130 else "\nterminated", file=sys.stderr)
        sys.exit(code)


def _fail(text: str) -> NoReturn:
    """Print an error once: torchrun ends the others after the first."""
    where = ""
    if (rank := os.environ.get("RANK", "0")) != "0":
        for number in process.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        local = os.environ.get("LOCAL_RANK", "0")
        time.sleep(ALONE_S + (int(local) if local.isdecimal() else 0))
        where = f" (rank {rank})"
    print(f"error{where}: {process.escaped(text)}", file=sys.stderr)
    sys.exit(2)


# --- types and ranges ---


def check(hint: object, value: object, name: str, strict: bool = True) -> Any:
    """The checked value; strict=False converts text."""
    value = tuple(value) if isinstance(value, list) else value  # JSON has only lists
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{name}: expected a text without NUL bytes, got {value!r:.60}")
    if isinstance(value, str) and hint in TEXT:
        value = os.path.expanduser(value)  # --out_dir=~/runs
    if _is_tuple(hint) and not isinstance(value, tuple):
        value = (value,)
    try:
        return _adapter(hint).validate_python(value, strict=strict)
    except ValidationError as error:
        errors = error.errors()
        why = " or ".join(dict.fromkeys(e["msg"] for e in errors)) + " or none" * _may_be_none(hint)
        raise UserError(f"{name}: {why}, got {errors[0]['input']!r:.60}") from None


def check_fields(settings: object) -> None:
    """Check in __post_init__; lists become tuples."""
    for name, hint in _hints(type(settings)).items():
        object.__setattr__(settings, name, check(hint, getattr(settings, name), name))


def _hints(cls: type) -> dict[str, object]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _is_tuple(hint: object) -> bool:
    return typing.get_origin(hint) is tuple or hint == Texts


def _may_be_none(hint: object) -> bool:
    return types.NoneType in typing.get_args(typing.get_args(hint)[0] if _is_tuple(hint) else hint)


# --- the command line ---


def _split(argv: Sequence[str], hints: Mapping[str, object], bare: str
           ) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield (name, text) of options; bare: the name of a word without one."""
    rest = [word for word in argv if word not in ("-h", "--help")]
    while rest:
        word = rest.pop(0)
        name, equals, text = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("-"):
            name, text = bare, word
        elif not equals:
            switch = hints.get(name) in (bool, bool | None)
            if switch and (rest[:1] or [""])[0].lower() not in SWITCH_WORDS:
                text = "True"
            elif rest:
                text = rest.pop(0)
            elif name in hints:
                raise UserError(f"--{name}: expected a value, write --{name}=...")
        yield name, text


def _parse(hint: object, text: str, name: str) -> Any:
    if hint == Texts:
        return (text,)
    several = _is_tuple(hint)
    words = text.split(",") if several and text else [text] * (not several)
    if several and any(re.match(r"\s*([-+]?0\d|$)", word) for word in words):
        why = "expected values between commas, without leading zeros"
        raise UserError(f"{name}: {why}, got {text!r}")
    values = [None if _may_be_none(hint) and w.lower() == "none" else w for w in words]
    return check(hint, values if several else values[0], name, strict=False)


def _print_help(cls: type, values: dict[str, Any], shown: Collection[str]) -> NoReturn:
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]  # with the -m of a module
    about = (cls.__doc__ or "").partition("\n\n")[0]
    lines = [f"usage: python {' '.join(program)} [OPTIONS]\n\n{about}\n"]
    source = "".join(map(inspect.getsource, cls.__mro__[-2::-1]))
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.M))
    for name, hint in _hints(cls).items():
        if name in shown:
            value = values.get(name, getattr(cls, name))
            default = ",".join(map(str, value)) if isinstance(value, tuple) else value
            kinds = re.findall(r"'[\w.-]+'|\b(?:bool|int|float|str)\b", str(hint))
            kind = "|".join(kinds).replace("'", "").removesuffix("|whole")
            words = f"{comments.get(name, '')} ({kind}; default: {default})"
            lines.append(textwrap.fill(words, 98, initial_indent=f"  --{name:<23} ",
                                       subsequent_indent=" " * 28))  # fmt: skip
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(lines))
    sys.exit(0)


def did_you_mean(word: str, choices: Iterable[str], before: str = "") -> str:
    """ "; did you mean ...?" for a mistyped word, or ""."""
    names = sorted(choices)
    near = difflib.get_close_matches(word, names, 1, 0.7)
    near += [name for name in names if len(word) > 2 and name.startswith(word)]
    return f"; did you mean {before + near[0]!r}?" if near else ""


# --- the config file ---

LARGEST = 2**16  # characters of a file or text, bits of an integer
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
               ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
               ast.Pow: operator.pow}  # fmt: skip
_CALLS: dict[str, Any] = {f.__name__: f for f in (str, int, float, min, max)}
_CALLS["time.time"] = time.time


def parse_config(path: str, known: dict[str, Any], used: set[str]
                 ) -> Iterator[tuple[str, str, Any]]:  # fmt: skip
    """Yield ("path:line", name, value) of each assignment, without executing it; add the names
    that it reads to `used`."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError(f"expected at most {LARGEST:,} characters")
        tree = ast.parse(text)
    except FileNotFoundError:
        near = did_you_mean(f"config/{Path(path).name}", map(str, Path("config").glob("*.py")))
        raise UserError(f"config file {path!r} does not exist{near}") from None
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"config file {path!r} cannot be read ({error})") from None
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    used |= {node.id for node in names if isinstance(node.ctx, ast.Load)}
    for node in tree.body:
        origin = f"{path}:{node.lineno}"
        try:
            match node:
                case ast.Import() | ast.Expr(value=ast.Constant(value=str())):
                    continue
                case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                    known[name] = _evaluate(node.value, known)
                case _:
                    raise ValueError
        except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError):
            what = f"numbers, arithmetic, strings, lists, settings, {', '.join(_CALLS)}"
            got = f"{text.splitlines()[node.lineno - 1]!r:.60}"
            raise UserError(f"{origin}: expected name = value, with {what}; got {got}") from None
        yield origin, name, known[name]


def _evaluate(node: ast.expr | None, names: Mapping[str, object]) -> Any:
    """Raises, among others, ValueError, also for what could exhaust memory."""
    value: Any
    match node:
        case ast.Constant(value=None | str() | int() | float() as value):
            pass
        case ast.Name(id=name):
            value = names[name]
        case ast.Call(func=function, args=args, keywords=[]):
            value = _CALLS[ast.unparse(function)](*[_evaluate(arg, names) for arg in args])
        case ast.List(elts=items) | ast.Tuple(elts=items):
            value = tuple(_evaluate(item, names) for item in items)
        case ast.JoinedStr(values=items) if len(items) < 100:
            value = "".join(str(_evaluate(item, names)) for item in items)
        case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
            value = _evaluate(inner, names)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_evaluate(operand, names)
        case ast.BinOp(left=left, op=op, right=right):
            a = _evaluate(left, names)
            b = _evaluate(right, names)
            numbers = isinstance(a, int | float) and isinstance(b, int | float)
            power = isinstance(op, ast.Pow)
            if not (numbers or isinstance(op, ast.Add)) or (power and abs(b) > 64):
                raise ValueError  # "a" * 9**9, 9**9**9
            value = _ARITHMETIC[type(op)](a, b)
        case _:
            raise ValueError
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) > 1000 or any(isinstance(part, tuple) for part in parts):
        raise ValueError
    sizes = (p.bit_length() if isinstance(p, int) else len(str(p)) for p in parts)
    if sum(sizes) > LARGEST:
        raise ValueError
    return value
