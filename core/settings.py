"""Settings of a command: config files and the command line -> one checked, frozen dataclass.

    python train.py config/train_gpt2.py --batch_size=8 --compile=False

A command declares its settings as a frozen dataclass. --help prints the comment after a field;
pydantic reads and checks the values:

    n_layer: PositiveInt = 12  # transformer blocks

Later values win: defaults, config files in order, command line. A config file is parsed, never
executed. Every mistake is a UserError (exit code 2).
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from core import terminal
from core.threads import wait_passively

T = TypeVar("T")
Values = dict[str, Any]  # field -> value
Texts = Annotated[tuple[str, ...], "whole"]  # --start="Well, well" is not split at its comma
SWITCH_WORDS = {*["true", "false", "1", "0", "on", "off", "yes", "no", "t", "f", "y", "n", "none"]}
Size = Annotated[int, Field(gt=0, lt=2**31)]


class UserError(ValueError):
    """A mistake of the user, in one sentence; commands print it and exit with code 2."""


class LaunchError(UserError):
    """Wrong variables of a launcher: every process prints it."""


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """The settings of a run, and the origin of each given value."""

    settings: T
    origins: dict[str, str]  # field -> "config/x.py:7" or "command line"; defaults are absent
    notes: tuple[str, ...] = ()  # on names that are accepted and ignored

    def report(self) -> list[str]:
        """Return one line for each setting that is not the default, with its origin."""
        rows = [
            (field.name, repr(value), self.origins.get(field.name, "derived"))
            for field in dataclasses.fields(self.settings)  # type: ignore[arg-type]
            if (value := getattr(self.settings, field.name)) != field.default
        ]
        if not rows:
            return ["settings: all at their defaults", *self.notes]
        wide = max(len(name) for name, _, _ in rows)
        lines = [f"  {name:<{wide}} = {value:<10}  ({origin})" for name, value, origin in rows]
        return ["settings that are not the default:", *lines, *self.notes]


def read(
    cls: type[T],
    argv: Sequence[str],
    *,
    ignored: Mapping[str, str] = {},
    further: Callable[[T], object] = id,
    **options: Any,
) -> Loaded[T]:
    """Return one checked instance of cls from sys.argv[1:]; for the options see gather().
    `further` is a check that needs slow imports; its ValueError is the user's mistake."""
    values, origins = gather(cls, argv, ignored=ignored, **options)
    found = {name: origins.pop(name) for name in [*origins] if name not in _hints(cls)}
    why = "neither a setting nor used by one"
    notes = [f"{name} is ignored ({at}): {ignored.get(name, why)}" for name, at in found.items()]
    settings = _user_error(lambda: cls(**values))
    _user_error(lambda: further(settings))
    return Loaded(settings, origins, tuple(notes))


def read_early(cls: type, argv: Sequence[str], **options: Any) -> None:
    """Handle --help, mistakes, signals and a busy machine before imports and __post_init__."""
    end_at_once()
    terminal.prepare("stderr")
    try:
        gather(cls, argv, **options)
    except UserError as error:
        _fail(error)
    wait_passively()


def end_at_once() -> None:
    """Until exit_on_user_error() SIGNALS end the process in one line, without a trace of the slow
    imports, of which some lose a KeyboardInterrupt."""
    terminal.on_signals(lambda number, _: os._exit(terminal.interrupted(number)))


def gather(
    cls: type,
    argv: Sequence[str],
    *,
    aliases: Mapping[str, str] = {},
    ignored: Mapping[str, str] = {},
    positional: str | None = None,
    shown: Collection[str] | None = None,
) -> tuple[Values, dict[str, str]]:
    """Return the given values and their origins, without making an instance.

    Args:
        aliases: other name -> field; ignored: other program's setting -> why it has no value here.
        positional: the field that bare words set, else config files, as `--config=FILE` always.
        shown: the fields in the help; None: all.
    """
    hints = _hints(cls)
    fields = {name: name for name in hints} | dict(aliases)
    switches = {name for name, field in fields.items() if hints[field] in (bool, bool | None)}
    files, options = _split(argv, switches | {"h", "help"}, positional)
    values: Values = {}
    origins: dict[str, str] = {}
    helpers: dict[str, str] = {}  # variables of the files that are no settings
    used: set[str] = set()
    seen = _defaults(cls)
    for path in files:
        for line, name, value in parse_config(path, seen, used):
            origin, near = f"{path}:{line}", [*fields, *ignored]
            seen[name] = value
            if name not in fields:
                if name not in {*ignored, *used} and difflib.get_close_matches(name, near, 1, 0.8):
                    why = did_you_mean(name, fields)
                    raise UserError(f"{origin}: unknown setting {name!r}{why}")
                helpers[name] = origin
                continue
            field = fields[name]
            seen[field] = values[field] = check(hints[field], value, f"{origin}: {name}")
            origins[field] = origin
    origins |= {n: at for n, at in helpers.items() if n in ignored or n not in used}
    if {"-h", "--help"} & {*argv}:
        _print_help(cls, values, shown)
    for name, text in options:
        if name in ignored:
            origins[name] = "command line"
            continue
        if name not in fields:
            raise UserError(f"unknown option --{name}{did_you_mean(name, fields, '--')}")
        field = fields[name]
        value = _parse(hints[field], text, f"--{name}")
        if origins.get(field) == "command line" and _is_tuple(hints[field]):
            value = values[field] + value  # a repeated list is added to
        elif origins.get(field) == "command line" and field == positional:
            raise UserError(f"expected one {field}, got {values[field]} and {value}")
        values[field], origins[field] = value, "command line"
    for name, origin in origins.items():  # Path("") would be the current folder
        if values.get(name) == "" and hints[name] in (str, str | None):
            where = f"--{name}" if origin == "command line" else f"{origin}: {name}"
            raise UserError(f"{where}: expected a text, got '' (an unset variable of the shell?)")
    return values, origins


def from_dict(cls: type[T], mapping: Mapping[str, object], origin: str = "settings.json") -> T:
    """Return the checked instance of a saved dataclasses.asdict(); missing keys take defaults."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"{origin}: expected an object of settings, got {str(mapping)[:60]}")
    hints = _hints(cls)
    if unknown := ", ".join(repr(name) for name in mapping if name not in hints):
        raise UserError(f"{origin}: unknown settings {unknown} (written by another version?)")
    values = {k: check(hints[k], value, f"{origin}: {k}") for k, value in mapping.items()}
    return _user_error(lambda: cls(**values), f"{origin}: ")


def exit_on_user_error(main: Callable[[], int | None], lasting: bool = False) -> NoReturn:
    """Run main and exit with its code.

    A UserError is one line on stderr (rank 0) and code 2. Ctrl-C, SIGTERM and SIGHUP raise a
    KeyboardInterrupt with the exit code: one line, and 130, 143 or 129. A closed pipe or a full
    disk under stdout ends main too, unless lasting=True, where stdout is only a log.
    """
    terminal.prepare("stderr", *["stdout"] * lasting)
    try:
        terminal.on_signals(terminal.interrupt)
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except UserError as error:
        _fail(error)
    except OSError as error:  # while writing: a closed pipe (... | head), or a full disk
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and (lasting or error.errno != errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more
        sys.exit(_fail(UserError(f"cannot write ({error})")) if full else 1)
    except KeyboardInterrupt as error:
        sys.exit(terminal.interrupted(error.args[0] - 128 if error.args else signal.SIGINT))


def _fail(error: UserError) -> NoReturn:
    if os.environ.get("RANK", "0") == "0" or isinstance(error, LaunchError):
        text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(error))
        print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def _user_error(make: Callable[[], T], where: str = "") -> T:
    try:
        return make()
    except ValueError as error:
        raise UserError(f"{where}{error}") from error


# --- types and ranges ---


def check(hint: object, value: object, name: str, strict: bool = True) -> Any:
    """Return the value if it has the type and range of `hint`; else raise UserError.

    An integer is accepted for a float; True is not a number. strict=False converts from text.
    """
    value = tuple(value) if isinstance(value, list) else value  # JSON has only lists
    if isinstance(value, str) and hint in (str, str | None):
        value = os.path.expanduser(value)  # a shell leaves --out_dir=~/runs alone
    if _is_tuple(hint) and not isinstance(value, tuple):
        value = (value,)
    try:
        return _adapter(hint).validate_python(value, strict=strict)
    except ValidationError as error:
        errors = error.errors()
        why = " or ".join(dict.fromkeys(e["msg"] for e in errors)) + " or none" * _may_be_none(hint)
        raise UserError(f"{name}: {why}, got {errors[0]['input']!r:.60}") from None


def check_fields(settings: object) -> None:
    """Check every field of a dataclass by its annotation; call it in __post_init__. A list, or one
    value in place of a tuple, becomes a tuple."""
    for name, hint in _hints(type(settings)).items():
        value = check(hint, getattr(settings, name), name)
        if isinstance(value, tuple):
            object.__setattr__(settings, name, value)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[object]:
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


def _hints(cls: type) -> dict[str, object]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _defaults(cls: type) -> Values:
    return {field.name: field.default for field in dataclasses.fields(cls)}


def _is_tuple(hint: object) -> bool:
    return typing.get_origin(hint) is tuple or hint == Texts


def _may_be_none(hint: object) -> bool:
    return types.NoneType in typing.get_args(typing.get_args(hint)[0] if _is_tuple(hint) else hint)


# --- the command line ---


def _split(
    argv: Sequence[str], switches: Collection[str], positional: str | None
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the config files, and (name, text) of each option."""
    files: list[str] = []
    options: list[tuple[str, str]] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("-"):
            name, text = positional or "config", word
        elif not equals and name in switches:
            text = rest.pop(0) if rest and rest[0].lower() in SWITCH_WORDS else "True"
        elif not equals:
            if not rest:
                raise UserError(f"--{name}: expected a value, write --{name}=...")
            text = rest.pop(0)
        if name == "config":
            files.append(text)
        elif name not in ("h", "help"):
            options.append((name, text))
    return files, options


def _parse(hint: object, text: str, name: str) -> Any:
    if hint == Texts:
        return (text,)
    words = (text.split(",") if text else []) if _is_tuple(hint) else [text]
    if _is_tuple(hint) and "" in words:
        raise UserError(f"{name}: expected a value before and after each comma, got {text!r}")
    if _is_tuple(hint) and any(re.match(r"\s*[-+]?0\d", word) for word in words):
        raise UserError(f"{name}: expected numbers without leading zeros, got {text!r}")
    values = [None if _may_be_none(hint) and word.lower() == "none" else word for word in words]
    return check(hint, values if _is_tuple(hint) else values[0], name, strict=False)


def _print_help(
    cls: type, values: Mapping[str, object], shown: Collection[str] | None = None
) -> NoReturn:
    """Print the fields, the comments after them, and `values` as the defaults; end the process."""
    spec = sys.modules["__main__"].__spec__  # of python -m
    name = Path(sys.argv[0]).name if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    about = (cls.__doc__ or "").split("\n\n")[0]
    lines = [f"usage: python {name} [OPTIONS]\n\n{about}\n"]
    source = "".join(map(inspect.getsource, cls.__mro__[:-1]))
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.M))
    for field, hint in _hints(cls).items():
        if shown is None or field in shown:
            value = values.get(field, _defaults(cls)[field])
            default = ",".join(map(str, value)) if isinstance(value, tuple) else value
            kinds = re.findall(r"'[\w.-]+'|\b(?:bool|int|float|str)\b", str(hint))
            kind = "|".join(kinds).replace("'", "").removesuffix("|whole")
            words = f"{comments.get(field, '')} ({kind}; default: {default})"
            option = f"  --{field:<22}"
            lines.append(
                textwrap.fill(words, 98, initial_indent=option, subsequent_indent=" " * 26)
            )
    try:
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(lines), flush=True)
    except BrokenPipeError:  # --help | head
        os._exit(1)  # Python would flush once more
    sys.exit(0)


def did_you_mean(word: str, choices: Iterable[str], before: str = "") -> str:
    """Return "; did you mean ...?" for a mistyped word, with `before` each name, or ""."""
    names, close = sorted(choices), difflib.get_close_matches
    starts = [name for name in names if len(word) > 2 and name.startswith(word)]
    near = close(word, names, 1, 0.85) or starts or close(word, names, 1, 0.7)
    return f"; did you mean {before + near[0]!r}?" if near else ""


# --- the config file ---

_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
               ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
               ast.Pow: operator.pow}  # fmt: skip
LARGEST = 2**16  # characters of a text, or bits of an integer
_CALLS: Values = {f.__name__: f for f in (str, int, float, round, min, max)}
_CALLS["time.time"] = time.time


def parse_config(
    path: str, names: Mapping[str, object], used: set[str]
) -> list[tuple[int, str, object]]:
    """Return (line, name, value) of each assignment in a config file; anything else is an error.
    Expressions may refer to `names` and to earlier lines, and the names in them are added to
    `used`. Nothing is executed; imports, and texts between the lines, are skipped.
    """
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        # Its folder is often left out, or the command run from elsewhere.
        folders = Path("config"), Path(path).parent, Path(sys.argv[0]).parent / "config"
        files = {f.name: str(f) for folder in reversed(folders) for f in folder.glob("*.py")}
        near = difflib.get_close_matches(Path(path).name, files, 1, 0.7)
        hint = f"; did you mean {files[near[0]]!r}?" if near else ""
        raise UserError(f"config file {path!r} does not exist{hint}") from None
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"config file {path!r} cannot be read ({error})") from None
    found: list[tuple[int, str, object]] = []
    known = dict(names)
    used |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and type(n.ctx) is ast.Load}
    for node in tree.body:
        try:
            match node:
                case ast.Import() | ast.Expr(value=ast.Constant(value=str())):
                    continue
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    known[name] = _evaluate(value, known)
                    if not _is_small(known[name]):
                        raise ValueError
                    found.append((node.lineno, name, known[name]))
                case _:
                    raise ValueError
        except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError):
            raise UserError(
                f"{path}:{node.lineno}: unsupported: {ast.unparse(node)!r:.60}; expected name = "
                "value, with numbers, arithmetic, strings, True, False, None, lists, settings, "
                f"{', '.join(_CALLS)}; write the value itself"
            ) from None
    return found


def _is_small(value: object) -> bool:
    """False for a value that grows in each line until it takes all memory."""
    if isinstance(value, tuple):
        return all(not isinstance(part, tuple) and _is_small(part) for part in value)
    return (value.bit_length() if isinstance(value, int) else len(str(value))) <= LARGEST


def _evaluate(node: ast.expr, names: Mapping[str, object]) -> Any:
    match node:
        case ast.Name(id=name):
            return names[name]
        case ast.Call(func=function, args=args, keywords=[]):
            return _CALLS[ast.unparse(function)](*[_evaluate(arg, names) for arg in args])
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return tuple(_evaluate(part, names) for part in parts)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, names)
        case ast.JoinedStr(values=parts):
            return "".join(str(_evaluate(part, names)) for part in parts)
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return _evaluate(value, names)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluate(left, names), _evaluate(right, names)
            both = isinstance(a, str) and isinstance(b, str) and isinstance(op, ast.Add)
            if not both and not (isinstance(a, int | float) and isinstance(b, int | float)):
                raise ValueError
            # 9**9**9 would take all memory.
            if isinstance(op, ast.Pow) and (abs(b) > 64 or abs(a) > 2**64):
                raise ValueError
            return _ARITHMETIC[type(op)](a, b)
    return ast.literal_eval(node)


if sys.argv[:1] == ["-m"]:  # `python -m PACKAGE` imports the package, before its __main__.py
    end_at_once()
