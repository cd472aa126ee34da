"""The config file and the command line -> one checked, frozen dataclass.

    python train.py config/train_gpt2.py --batch_size=8 --compile=False

A command lists its settings as a frozen dataclass. The annotation of a field is what pydantic
checks its values by, and the comment behind it is its help text:

    @dataclass(frozen=True)
    class TrainConfig:
        # --- model ---
        n_layer: PositiveInt = 12  # transformer blocks
        n_kv_head: PositiveInt | None = None  # key and value heads; none: n_head

`read` starts from the defaults, then takes the config files in the order given, then the command
line; what comes later wins. Every mistake is a UserError of one sentence. A config file is parsed,
never executed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from core.help import describe, help_text, program

T = TypeVar("T")

Texts = Annotated[tuple[str, ...], "whole"]  # --start="Well, well" is not cut at its comma


class UserError(ValueError):
    """A mistake of the user's, told in one sentence; the commands print it and exit with 2."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, to quote it in one sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """The settings of a run, and where each of them that was given came from."""

    settings: T
    origins: dict[str, str]  # field name -> "config/x.py:7" or "command line"; the rest are default

    def report(self) -> list[str]:
        """The lines for the start of a run: each setting that is not the default, its origin."""
        rows = [
            (field.name, repr(value), self.origins.get(field.name, "derived"))
            for field in dataclasses.fields(self.settings)  # type: ignore[arg-type]
            if (value := getattr(self.settings, field.name)) != field.default
        ]
        if not rows:
            return ["settings: all at their defaults"]
        wide = max(len(name) for name, _, _ in rows)
        # One long path must not push every origin off the screen.
        deep = max((len(value) for _, value, _ in rows if len(value) <= 32), default=0)
        lines = [f"  {name:<{wide}} = {value:<{deep}}  ({origin})" for name, value, origin in rows]
        return ["settings that are not the default:", *lines]


def read(cls: type[T], argv: Sequence[str], **options: Any) -> Loaded[T]:
    """One checked instance of cls from sys.argv[1:]; for `options` see gather().

    A ValueError of the dataclass's own __post_init__ becomes a UserError of the same words.
    """
    given, origins = gather(cls, argv, **options)
    return Loaded(_build(cls, given), origins)


def read_early(cls: type, argv: Sequence[str], **options: Any) -> None:
    """Answer --help and mistakes before the imports that take seconds; read() follows them.

    The dataclass's own __post_init__, which may need those imports, is left to read().
    """
    try:
        gather(cls, argv, **options)
    except UserError as error:
        _fail(error)


def gather(
    cls: type,
    argv: Sequence[str],
    *,
    aliases: Mapping[str, str] = {},
    positional: str | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of each field that was given, and its origin: read() without making an instance.

    `--key value` and dashes for underscores are accepted, a switch needs no value, and an option
    of a tuple adds to it each time that it is given. `--help` prints every setting and exits.

    Args:
        aliases: other name -> field.
        positional: the field that bare words set, one word or a tuple of them. Without it they are
            config files; `--config=FILE` names one in any case.
    """
    hints = _hints(cls)
    fields = {name: name for name in hints} | dict(aliases)
    switches = {name for name, field in fields.items() if hints[field] in (bool, bool | None)}
    options = _split(argv, switches, positional or "config")
    files = [text for name, text in options if name == "config" and text]
    words = [text for name, text in options if name == positional and text]
    if positional and len(words) > 1 and not _is_tuple(hints[positional]):
        raise UserError(f"give one {positional}, got {' '.join(words)}")

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in files:
        for line, name, value in parse_config(path):
            field = _known(name, fields, f"{path}:{line}: ")
            values[field] = check(hints[field], value, f"{path}:{line}: {name}")
            origins[field] = f"{path}:{line}"
    if {"-h", "--help"} & set(argv):
        if _is_rank_0():
            with contextlib.suppress(BrokenPipeError):  # --help | head
                print(help_text(cls, values, files, aliases, positional), flush=True)
        sys.exit(0)
    for name, text in options:
        if name == "config" and text:
            continue
        field = _known(name, fields, "", "--")
        if text is None:
            raise UserError(f"--{name} needs a value: write --{name}=..., {describe(hints[field])}")
        value = check(hints[field], text, f"--{name}", typed=True)
        again = _is_tuple(hints[field]) and origins.get(field) == "command line"
        values[field] = values[field] + value if again else value
        origins[field] = "command line"
    return values, origins


def from_dict(cls: type[T], mapping: Mapping[str, Any], origin: str = "settings.json") -> T:
    """The instance that dataclasses.asdict, saved as JSON, came from; with the same checks.

    A key that is missing takes its default, one that cls does not have is refused.
    """
    if not isinstance(mapping, Mapping):
        raise UserError(f"{origin} must hold an object of settings, got {_shorten(repr(mapping))}")
    hints = _hints(cls)
    if unknown := ", ".join(repr(name) for name in mapping if name not in hints):
        raise UserError(f"{origin} has unknown settings: {unknown}; it is of another version")
    given = {k: check(hints[k], value, f"{origin}: {k}") for k, value in mapping.items()}
    return _build(cls, given, f"{origin}: ")


def exit_on_user_error(main: Callable[[], int | None]) -> NoReturn:
    """Run main and exit with its code; a UserError is one line on stderr (rank 0) and code 2."""
    try:
        sys.exit(main())
    except UserError as error:
        _fail(error)


def _fail(error: UserError) -> NoReturn:
    if _is_rank_0():
        print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{where}{error}") from error


# --- the types and ranges of values ---

_LIMITS = {"greater_than_equal": "at least {ge:.15g}", "greater_than": "more than {gt:.15g}",
           "less_than_equal": "at most {le:.15g}", "less_than": "below {lt:.15g}"}  # fmt: skip


def check(hint: Any, given: Any, name: str, *, typed: bool = False) -> Any:
    """The value, if it is of the type `hint` and in its range; a list passes for a tuple, an
    integer for a float, but True for no number. Text `typed` on the command line is converted."""
    given = tuple(given) if isinstance(given, list) else given  # JSON has lists only
    value = _from_text(hint, given) if typed else given
    try:
        return _adapter(hint).validate_python(value, strict=not typed)
    except ValidationError as error:
        first = error.errors()[0]
    wanted, got = describe(hint), repr(given)
    if limit := _LIMITS.get(first["type"]):
        wanted, got = limit.format(**first["ctx"]), str(given)
        if type(first["ctx"].get("gt")) is int:
            wanted = "at least 1"  # as people say "more than 0" of whole numbers
    raise UserError(f"{name} must be {wanted}, got {_shorten(got)}")


def _from_text(hint: Any, text: str) -> Any:
    """None and tuples as they are typed; the rest stays a string, which pydantic converts."""
    if text.lower() == "none" and types.NoneType in typing.get_args(hint):
        return None
    if hint == Texts:
        return (text,)
    if _is_tuple(hint):
        return tuple(_from_text(typing.get_args(hint)[0], part) for part in text.split(",") if part)
    return text


def check_fields(settings: Any) -> None:
    """Check every field of a dataclass by its annotation; for its __post_init__, which so holds
    for an instance that no command line made."""
    for name, hint in _hints(type(settings)).items():
        check(hint, getattr(settings, name), name)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple or hint == Texts


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


# --- the command line ---


def _split(argv: Sequence[str], switches: set[str], bare: str) -> list[tuple[str, str | None]]:
    """The name and the text (or None) of each option; a bare word has the name `bare`."""
    options: list[tuple[str, str | None]] = []
    rest = [word for word in argv if word not in ("-h", "--help")]
    while rest:
        word = rest.pop(0)
        if re.match(r"-(?!-)|\w+=", word):
            hint = f"--{word.lstrip('-')}"
            raise UserError(f"unknown argument {word!r}; did you mean {hint!r}? {_see_help()}")
        if not word.startswith("--"):
            options.append((bare, word))
            continue
        name, equals, value = word[2:].partition("=")
        name, text = name.replace("-", "_"), value if equals else None
        if text is None and name in switches:  # a bare --stream is True
            given = rest and rest[0].lower() in ("true", "false", "1", "0", "none")
            text = rest.pop(0) if given else "True"
        elif text is None and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        options.append((name, text))
    return options


def _known(name: str, fields: Mapping[str, str], where: str, dashes: str = "") -> str:
    if name in fields:
        return fields[name]
    near = did_you_mean(name, {field: dashes + field for field in fields})
    raise UserError(f"{where}unknown setting {dashes + name!r}{near} {_see_help()}")


def did_you_mean(word: str, choices: Mapping[str, str]) -> str:
    """The end of a sentence about a mistyped word; choices: name -> what to type."""
    word, close = word.lower(), difflib.get_close_matches
    begun = [name for name in choices if len(word) > 2 and name.startswith(word)]
    near = close(word, choices, 1, 0.85) or begun or close(word, choices, 1)
    return f"; did you mean {choices[near[0]]!r}?" if near else ""


def _see_help() -> str:
    return f"(python {program()} --help lists them all)"


# --- the config file ---

_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
               ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
               ast.Pow: operator.pow}  # fmt: skip


def parse_config(path: str) -> list[tuple[int, str, Any]]:
    """The (line, name, value) of each assignment in a config file; anything else is refused."""
    try:
        tree = ast.parse(Path(path).read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        beside = {p.name: str(p) for p in Path(path).parent.glob("*.py")}
        near = did_you_mean(Path(path).name, beside)
        raise UserError(f"config file {path!r} does not exist{near}") from None
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"config file {path!r} cannot be read ({error})") from None
    found = []
    for node in tree.body[ast.get_docstring(tree, clean=False) is not None :]:
        try:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                    found.append((node.lineno, name, _evaluate(expression)))
                case _:
                    _refuse(node)
        except (ValueError, ArithmeticError, RecursionError) as error:
            raise UserError(f"{path}:{node.lineno}: {error}") from None
    return found


def _evaluate(node: ast.expr) -> Any:
    """The value of a constant, of a list, or of arithmetic on numbers, bounded so that it ends."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(map(_evaluate, items))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            a, op, b = -1, operator.mul, _evaluate(operand)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _ARITHMETIC:
            a, op, b = _evaluate(left), _ARITHMETIC[type(kind)], _evaluate(right)
        case _:
            _refuse(node)
    if {type(a), type(b)} <= {int, float} and not (op is operator.pow and abs(b) > 64):
        value = op(a, b)
        if type(value) is float or (type(value) is int and abs(value) < 2**64):
            return value
    _refuse(node)


def _refuse(node: ast.AST) -> NoReturn:
    raise ValueError(
        f"'{_shorten(ast.unparse(node).splitlines()[0])}' is refused; a config file holds only "
        "lines 'name = value' (numbers and arithmetic on them within 64 bits, strings, True, "
        "False, None, lists)"
    )
