"""Settings of a command: config files and the command line -> one checked, frozen dataclass.

    python train.py config/train_gpt2.py --batch_size=8 --compile=False

A command declares its settings as a frozen dataclass. tyro parses the command line; the comment
after a field is its help text; pydantic's annotations give the range:

    n_layer: PositiveInt = 12  # transformer blocks

Later values win: defaults, config files in the order given, command line. Every mistake is a
UserError (exit code 2). A config file is parsed, never executed.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar

import tyro
from pydantic import ConfigDict, TypeAdapter, ValidationError
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

T = TypeVar("T")
Texts = Annotated[tuple[str, ...], "whole"]  # --start="Well, well" is not split at its comma
SEPARATOR = "\0"  # joins the parts of a tuple for tyro


class UserError(ValueError):
    """A mistake of the user, in one sentence; commands print it and exit with code 2."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """The settings of a run, and the origin of each given value."""

    settings: T
    origins: dict[str, str]  # field -> "config/x.py:7" or "command line"; defaults are absent

    def report(self) -> list[str]:
        """Return one line for each setting that is not the default, with its origin."""
        rows = [
            (field.name, repr(value), self.origins.get(field.name, "derived"))
            for field in dataclasses.fields(self.settings)  # type: ignore[arg-type]
            if (value := getattr(self.settings, field.name)) != field.default
        ]
        if not rows:
            return ["settings: all at their defaults"]
        wide = max(len(name) for name, _, _ in rows)
        # A long path must not push the origins off the screen.
        deep = max((len(value) for _, value, _ in rows if len(value) <= 32), default=0)
        lines = [f"  {name:<{wide}} = {value:<{deep}}  ({origin})" for name, value, origin in rows]
        return ["settings that are not the default:", *lines]


def read(cls: type[T], argv: Sequence[str], **options: Any) -> Loaded[T]:
    """Return one checked instance of cls from sys.argv[1:]; for `options` see gather()."""
    given, origins = gather(cls, argv, **options)
    return Loaded(_build(cls, given), origins)


def read_early(cls: type, argv: Sequence[str], **options: Any) -> None:
    """Handle --help and mistakes before the slow imports; read() comes after them.

    cls.__post_init__, which may need those imports, does not run here.
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
    """Return the given values and their origins, without making an instance.

    Args:
        aliases: other name -> field.
        positional: the field that bare words set. Without it they are config files; `--config=FILE`
            names one in any case.
    """
    hints = _hints(cls)
    files, texts = _split(argv, hints, aliases, positional)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in files:
        for line, name, value in parse_config(path):
            field = aliases.get(name, name)
            if field not in hints:
                near = did_you_mean(name, {n: n for n in (*hints, *aliases)})
                raise UserError(f"{path}:{line}: unknown setting {name!r}{near}")
            values[field] = check(hints[field], value, f"{path}:{line}: {name}")
            origins[field] = f"{path}:{line}"
    # Without __post_init__, which checks again and may need imports that are not made yet.
    about = (cls.__doc__ or "").split("\n\n")[0]
    changes = {"__post_init__": lambda self: None, "__doc__": about, "__module__": cls.__module__}
    plain = type(cls.__name__, (cls,), changes)
    try:
        parsed = tyro.cli(
            plain,
            prog=f"python {program()}",
            args=[f"--{n}" if text is None else f"--{n}={text}" for n, text in texts.items()],
            default=plain(**values),
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
            registry=_LISTS,
            console_outputs=_is_rank_0(),
        )
    except BrokenPipeError:  # --help | head
        sys.exit(1)
    for name in texts:
        values[name] = check(hints[name], getattr(parsed, name), f"--{name}")
        origins[name] = "command line"
    return values, origins


def from_dict(cls: type[T], mapping: Mapping[str, Any], origin: str = "settings.json") -> T:
    """Return the instance that a saved dataclasses.asdict() came from, with the same checks.

    A missing key takes its default; an unknown key is an error.
    """
    if not isinstance(mapping, Mapping):
        raise UserError(f"{origin}: expected an object of settings, got {str(mapping)[:60]}")
    hints = _hints(cls)
    if unknown := ", ".join(repr(name) for name in mapping if name not in hints):
        raise UserError(f"{origin}: unknown settings {unknown} (written by another version?)")
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


# --- types and ranges ---


def check(hint: Any, value: Any, name: str) -> Any:
    """Return the value if it has the type and range of `hint`; else raise UserError.

    A list is accepted for a tuple, an integer for a float; True is not a number.
    """
    value = tuple(value) if isinstance(value, list) else value  # JSON has only lists
    try:
        return _adapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        why = error.errors()[0]["msg"].lower()
        raise UserError(f"{name}: {why}, got {str(repr(value))[:60]}") from None


def check_fields(settings: Any) -> None:
    """Check every field of a dataclass by its annotation; call it in __post_init__."""
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


# --- the command line ---

_LISTS = ConstructorRegistry()


@_LISTS.primitive_rule
def _list_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Comma-separated lists: tyro itself takes them with spaces."""
    if typing.get_origin(info.type) is not tuple:
        return None

    no_value = types.NoneType in typing.get_args(typing.get_args(info.type)[0])

    def parse(args: list[str]) -> tuple[Any, ...]:
        words = filter(None, args[0].split(SEPARATOR))
        parts = tuple(None if no_value and word == "none" else word for word in words)
        try:
            return _adapter(typing.cast(Any, info.type)).validate_python(parts, strict=False)
        except ValidationError as error:
            first = error.errors()[0]
            why = f"{first['msg'].lower()}, got {first['input']!r}"
            raise ValueError(f"expected a comma-separated list; {why}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B,...",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


def _split(
    argv: Sequence[str], hints: Mapping[str, Any], aliases: Mapping[str, str], bare: str | None
) -> tuple[list[str], dict[str, str | None]]:
    """Return the config files, and {option: text} in the spelling that tyro reads."""
    files: list[str] = []
    texts: dict[str, str | None] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") and bare is None:
            files.append(word)
            continue
        if word in ("-h", "--help"):
            texts["help"] = None
            continue
        if word.startswith("-"):
            name, equals, text = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
        else:
            name, equals, text = str(bare), "=", word
        name = aliases.get(name, name)
        hint = hints.get(name)
        if not equals:
            switch = hint in (bool, bool | None)
            follows = bool(rest) and not rest[0].startswith("--")
            if switch and not (follows and rest[0].lower() in ("true", "false", "none", "0", "1")):
                text = "True"  # a bare --stream
            elif follows:
                text = rest.pop(0)
            elif hint is not None:
                raise UserError(f"--{name}: expected a value, write --{name}=...")
        if name == "config":
            files.append(text)
            continue
        if name in texts and name == bare and not _is_tuple(hint):
            raise UserError(f"expected one {bare}, got {texts[name]} and {text}")
        if hint in (bool, bool | None):
            text = {"1": "True", "0": "False"}.get(text, text.capitalize())
        elif text.lower() == "none" and types.NoneType in typing.get_args(hint):
            text = "None"
        elif _is_tuple(hint):
            text = text if hint == Texts else text.replace(",", SEPARATOR)
            text = SEPARATOR.join(filter(None, (texts.get(name), text)))  # repeated: add to it
        texts[name] = text
    return files, texts


def did_you_mean(word: str, choices: Mapping[str, str]) -> str:
    """Return "; did you mean ...?" for a mistyped word, or ""; choices: name -> what to type."""
    word, close = word.lower(), difflib.get_close_matches
    starts = [name for name in choices if len(word) > 2 and name.startswith(word)]
    near = close(word, choices, 1, 0.85) or starts or close(word, choices, 1)
    return f"; did you mean {choices[near[0]]!r}?" if near else ""


def program() -> str:
    """Return what follows `python` on the command line: "train.py", or "-m attention"."""
    spec = sys.modules["__main__"].__spec__
    if spec and spec.origin == sys.argv[0]:
        return f"-m {spec.name.removesuffix('.__main__')}"
    return Path(sys.argv[0]).name


# --- the config file ---

_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
               ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
               ast.Pow: operator.pow}  # fmt: skip


def parse_config(path: str) -> list[tuple[int, str, Any]]:
    """Return (line, name, value) of each assignment in a config file; anything else is an error."""
    try:
        tree = ast.parse(Path(path).read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        siblings = {p.name: str(p) for p in Path(path).parent.glob("*.py")}
        near = did_you_mean(Path(path).name, siblings)
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
    """Evaluate a constant, a list, or arithmetic on numbers within 64 bits."""
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
        f"unsupported: {ast.unparse(node).splitlines()[0][:60]!r}; expected lines 'name = value' "
        "with numbers (and arithmetic within 64 bits), strings, True, False, None or lists"
    )
