"""The config file and the command line -> one checked, frozen dataclass.

    python train.py config/train_gpt2.py --batch_size=8 --compile=False

An entry point lists its knobs as a frozen dataclass, and the comments there are the help text:

    @dataclass(frozen=True)
    class TrainConfig:
        # --- model ---
        n_layer: int = 12  # transformer blocks
        n_kv_head: int | None = None  # key and value heads (None: as many as n_head)

`read` starts from the defaults, then takes the config files in the order given, then the command
line; what comes later wins. Both go through the same type check, range checks are the dataclass's
own `__post_init__`, and every mistake is a UserError of one sentence. A config file is parsed and
evaluated here, never executed.

Why no command-line library: a setting has to be checked alike in a file, on the command line and
in a checkpoint, remember where it came from, and fail in one sentence. tyro 1.0 reports errors as
multi-line boxes with no public hook to change that, argparse knows neither files nor origins, and
either would need the checker below beside it; what they would then save is one loop.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import math
import operator
import os
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """A mistake of the user's, told in one sentence; the entry points print it and exit with 2."""


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """The settings of a run, and where each of them that was given came from."""

    settings: T
    origins: dict[str, str]  # field name -> "config/x.py:7" or "command line"; the rest are default

    def report(self) -> list[str]:
        """The lines for the start of a run: each setting that is not the default, its origin."""
        default = _defaults(type(self.settings))
        rows = [
            (name, repr(getattr(self.settings, name)), self.origins.get(name, "derived"))
            for name in default
            if getattr(self.settings, name) != default[name]
        ]
        if not rows:
            return ["settings: all at their defaults"]
        wide = max(len(name) for name, _, _ in rows)
        # One long path must not push every origin off the screen.
        deep = max((len(value) for _, value, _ in rows if len(value) <= 32), default=0)
        lines = [f"  {name:<{wide}} = {value:<{deep}}  ({origin})" for name, value, origin in rows]
        return ["settings that are not the default:", *lines]


def read(
    cls: type[T],
    argv: Sequence[str],
    *,
    aliases: Mapping[str, str] | None = None,
    positional: str | None = None,
) -> Loaded[T]:
    """Read config files and `--key=value` arguments into one checked instance of cls.

    argv is sys.argv[1:]; aliases maps another name of a setting to its field. `--key value` and
    dashes for underscores are accepted; `--help` prints every knob and exits.

    Raises: UserError for an unknown key, a wrong type, an unreadable file, or a ValueError of
    the dataclass's own __post_init__ (its sentence unchanged).
    """
    fields = {name: name for name in _defaults(cls)} | dict(aliases or {})
    hints = typing.get_type_hints(cls)
    switches = {name for name, field in fields.items() if hints[field] is bool}
    files, options, wants_help = _split(argv, switches if positional else set())
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    bare = [word for word in files if positional and not word.endswith(".py")]
    files = [word for word in files if word not in bare]
    if len(bare) > 1:
        raise UserError(f"give one {positional}, got {' '.join(bare)}")
    options += [(str(positional), word) for word in bare]
    for path in files:
        for line, name, value in parse_config(path):
            origin = f"{path}:{line}"
            field = _known(name, fields, f"{origin}: ")
            values[field] = _check(hints[field], value, f"{origin}: {name}")
            origins[field] = origin
    if wants_help:
        if _is_rank_0():
            print(help_text(cls, {**_defaults(cls), **values}, files, aliases or {}))
        sys.exit(0)
    for name, text in options:
        field = _known(name.replace("-", "_"), fields, "", "--")
        if text is None and bool in (hints[field], *typing.get_args(hints[field])):
            text = "True"  # a bare --stream
        if text is None:
            wanted = _describe(hints[field])
            raise UserError(f"--{name} needs a value: write --{name}=..., {wanted}")
        values[field] = _check(hints[field], text, f"--{name}", is_text=True)
        origins[field] = "command line"
    return Loaded(_build(cls, values), origins)


def from_dict(
    cls: type[T],
    mapping: Mapping[str, Any],
    origin: str = "settings.json",
    *,
    drop_unknown: bool = False,
) -> T:
    """The instance that dataclasses.asdict, saved as JSON, came from; with the same checks.

    A key that cls does not have (a checkpoint of another version) is an error unless drop_unknown;
    a key that is missing takes its default. Raises: UserError.
    """
    if not isinstance(mapping, Mapping):
        raise UserError(f"{origin} must hold an object of settings, got {_shorten(repr(mapping))}")
    known = _defaults(cls)
    unknown = [name for name in mapping if name not in known]
    if unknown and not drop_unknown:
        names = ", ".join(repr(name) for name in unknown)
        raise UserError(f"{origin} has unknown settings: {names}; it is of another version")
    hints = typing.get_type_hints(cls)
    values = {
        name: _check(hints[name], value, f"{origin}: {name}")
        for name, value in mapping.items()
        if name in known
    }
    return _build(cls, values, f"{origin}: ")


def exit_on_user_error(main: Callable[[], int | None]) -> NoReturn:
    """Run main and exit with its code; a UserError is one line on stderr (rank 0) and code 2."""
    try:
        code = main()
    except UserError as error:
        if _is_rank_0():
            print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


# --- the command line ---


def _split(
    argv: Sequence[str], switches: set[str]
) -> tuple[list[str], list[tuple[str, str | None]], bool]:
    """argv -> config files, (name, text) of each option, whether help was asked for."""
    files: list[str] = []
    options: list[tuple[str, str | None]] = []
    wants_help = False
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            wants_help = True
        elif word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            if equals:
                options.append((name, text))
            elif (
                rest
                and not rest[0].startswith("--")
                and not (name in switches and rest[0].lower() not in _BOOLS)
            ):
                options.append((name, rest.pop(0)))
            else:
                options.append((name, None))
        elif word.startswith("-") or re.match(r"\w+=", word):
            hint = f"--{word.lstrip('-')}"
            raise UserError(f"unknown argument {word!r}; did you mean {hint!r}? {_see_help()}")
        else:
            files.append(word)
    return files, options, wants_help


def _known(name: str, fields: Mapping[str, str], where: str, dashes: str = "") -> str:
    if name in fields:
        return fields[name]
    near = _nearest(name, fields)
    hint = f"; did you mean {dashes + near!r}?" if near else ""
    raise UserError(f"{where}unknown setting {dashes + name!r}{hint} {_see_help()}")


def _nearest(word: str, choices: typing.Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word.lower(), choices, n=1)), None)


def _see_help() -> str:
    return f"(python {Path(sys.argv[0]).name} --help lists them all)"


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


# --- the config file ---

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_ALLOWED = (
    "a config file holds only lines 'name = value' (numbers and arithmetic, strings, True, False,"
    " None, lists, names assigned above)"
)
_TOO_LARGE = (
    "the value is too large or nested too deeply (an integer may have 64 bits, a string 10,000"
    " characters)"
)


def parse_config(path: str) -> list[tuple[int, str, Any]]:
    """Evaluate a file of plain assignments to (line, name, value), in order; nothing is executed.

    Raises: UserError with file and line for anything else in it, or if it cannot be read.
    """
    try:
        body = ast.parse(Path(path).read_bytes().decode("utf-8-sig")).body
    except FileNotFoundError:
        near = _nearest(Path(path).name, [p.name for p in Path(path).parent.glob("*.py")])
        hint = f"; did you mean {str(Path(path).with_name(near))!r}?" if near else ""
        raise UserError(f"config file {path!r} does not exist{hint}") from None
    except OSError as error:
        raise UserError(f"cannot read config file {path!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path!r} is not UTF-8 text (byte {error.start})") from None
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise UserError(f"{path}: {_TOO_LARGE}") from None
    except ValueError as error:  # Python < 3.12 says so of a null byte
        raise UserError(f"config file {path!r}: {error}") from None
    found: list[tuple[int, str, Any]] = []
    names: dict[str, Any] = {}
    for i, node in enumerate(body):
        try:
            match node:
                case ast.Expr(value=ast.Constant(value=str())) if i == 0:
                    pass  # the docstring
                case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                    names[name] = _evaluate(expression, names)
                    found.append((node.lineno, name, names[name]))
                case _:
                    _refuse(node)
        except (OverflowError, RecursionError, MemoryError):
            raise UserError(f"{path}:{node.lineno}: {_TOO_LARGE}") from None
        except (ValueError, ZeroDivisionError) as error:
            raise UserError(f"{path}:{node.lineno}: {error}") from None
    return found


def _refuse(node: ast.AST) -> NoReturn:
    raise ValueError(f"'{_shorten(ast.unparse(node).split(chr(10))[0])}' is refused; {_ALLOWED}")


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression of constants, arithmetic and names; sizes are bounded, so that
    no file can take more time or memory than its length explains."""
    value: Any
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            pass
        case ast.Name(id=name):
            if name not in names:
                raise ValueError(f"{name!r} is not assigned above this line")
            value = names[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            value = _evaluate(operand, names)
            if not _is_number(value):
                _refuse(node)
            value = -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            a, b = _evaluate(left, names), _evaluate(right, names)
            strings = isinstance(a, str) and isinstance(b, str) and isinstance(op, ast.Add)
            if not strings and not (_is_number(a) and _is_number(b)):
                _refuse(node)
            if isinstance(op, ast.Pow) and abs(b) > 64:
                raise ValueError(f"the exponent {b} is out of range (at most 64)")
            value = _ARITHMETIC[type(op)](a, b)
            if isinstance(value, complex):
                _refuse(node)
        case ast.JoinedStr(values=parts):
            value = "".join(str(_evaluate(part, names)) for part in parts)
        case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
            value = _evaluate(inner, names)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            value = tuple(_evaluate(item, names) for item in items)
            if any(isinstance(item, tuple) for item in value):  # nesting could grow without bound
                _refuse(node)
        case _:
            _refuse(node)
    if (type(value) is int and abs(value) >= 2**64) or (type(value) is str and len(value) > 10_000):
        raise OverflowError
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


# --- the checks ---

_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_WORDS = {
    int: "an integer",
    float: "a finite number",
    bool: "True or False",
    str: "a string",
    types.NoneType: "None",
}


def _check(hint: Any, value: Any, what: str, *, is_text: bool = False) -> Any:
    try:
        return _convert(hint, value, is_text)
    except (ValueError, OverflowError):
        message = f"{what} must be {_describe(hint)}, got {_shorten(repr(value))}"
        raise UserError(message) from None


def _convert(hint: Any, value: Any, is_text: bool) -> Any:
    """The value as one of the type `hint`; is_text: as typed on the command line.

    Raises: ValueError or OverflowError where it is not one.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for member in sorted(args, key=lambda m: m is not types.NoneType):  # "none" is None first
            with contextlib.suppress(ValueError, OverflowError):
                return _convert(member, value, is_text)
    elif origin is Literal:
        for choice in args:
            if str(choice) == value if is_text else (type(choice), choice) == (type(value), value):
                return choice
    elif origin is tuple:  # tuple[X, ...], "1,2,3" on the command line, a list in JSON
        items = [part for part in value.split(",") if part] if is_text else value
        if isinstance(items, (tuple, list)):
            return tuple(_convert(args[0], item, is_text) for item in items)
    elif hint is float and (is_text or _is_number(value)):
        if math.isfinite(number := float(value)):
            return number
    elif not is_text:
        if type(value) is hint:  # so True is no int
            return value
    elif hint is int or hint is str:
        return hint(value)
    elif hint is bool and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    elif hint is types.NoneType and value.lower() == "none":
        return None
    raise ValueError


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(member) for member in args)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in args)
    if origin is tuple:
        return f"a list (each {_describe(args[0])})"
    return _WORDS[hint]


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _defaults(cls: type) -> dict[str, Any]:
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(cls)
        if f.init
    }


def _build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{where}{error}") from error


# --- help ---


def help_text(
    cls: type,
    values: Mapping[str, Any],
    files: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
    width: int | None = None,
) -> str:
    """Every knob of cls as it would be typed, with its value and one-line meaning, in groups."""
    width = max(60, min(width or shutil.get_terminal_size().columns, 120))
    left = 36 if width < 100 else 42
    hints = typing.get_type_hints(cls)
    lines = [f"usage: python {Path(sys.argv[0]).name} [config/file.py ...] [--name=value ...]", ""]
    about = inspect.getdoc(cls) or ""
    if not about.startswith(f"{cls.__name__}("):  # what dataclass writes where there is none
        lines += [*textwrap.wrap(about.split("\n\n")[0], width), ""]
    source = f"what {', '.join(files)} set" if files else "the defaults"
    lines += textwrap.wrap(f"The values shown are {source}; the command line wins.", width)
    shown_group = None
    for name, (group, meaning) in _comments(cls).items():
        if group != shown_group:
            lines += ["", f"{group}:"]
            shown_group = group
        notes = [_describe(hints[name])] if typing.get_args(hints[name]) else []
        notes += [f"also --{alias}" for alias, field in (aliases or {}).items() if field == name]
        text = f"{meaning} [{'; '.join(notes)}]" if notes else meaning
        flag = f"  --{name}={_typed(values[name])}"
        flag = flag if len(flag) <= width else flag[: width - 3] + "..."
        wrapped = textwrap.wrap(text, width - left) or [""]
        if len(flag) + 2 > left:
            lines.append(flag)
        else:
            wrapped[0] = flag.ljust(left) + wrapped[0]
            lines.append(wrapped.pop(0))
        lines += [" " * left + line for line in wrapped]
    return "\n".join(line.rstrip() for line in lines)


def _typed(value: Any) -> str:
    """A value as one would type it in a shell."""
    if isinstance(value, tuple):
        return ",".join(_typed(item) for item in value)
    text = str(value)
    return text if re.fullmatch(r"[\w.,:/+-]+", text) else repr(text)


def _comments(cls: type) -> dict[str, tuple[str, str]]:
    """Field name -> (group, meaning), read from the source of the dataclass.

    The meaning is the docstring below a field, else the comment behind it, else the comment lines
    right above it; a comment `# --- name ---` opens a group.
    """
    found = {name: ("settings", "") for name in _defaults(cls)}
    for base in (c for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c)):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # made at a prompt: there is no source to read
            continue
        lines = source.splitlines()
        (tree,) = ast.parse(source).body
        assert isinstance(tree, ast.ClassDef)
        group, name, done = "settings", "", tree.lineno
        for node in tree.body:
            above: list[str] = []
            for line in map(str.strip, lines[done : node.lineno - 1]):
                if heading := re.fullmatch(r"# --+ *(.+?) *-*", line):
                    group = heading[1]
                above = [] if heading or not line else [*above, line.lstrip("#: ")]
            done = node.end_lineno or node.lineno
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)) if name in found:
                    behind = lines[done - 1].encode()[node.end_col_offset :].decode().strip(" #:")
                    found[name] = (group, behind or " ".join(above))
                case ast.Expr(value=ast.Constant(value=str(text))) if name in found:
                    found[name] = (group, " ".join(text.split()))
    return found
