"""A JSON schema as a regular expression, for inference/constrain.py.

What the expression matches is valid by the schema, always: a keyword is honoured or refused, never
dropped. It does not match all that is valid: an object has its properties in the schema's order and
no others, numbers have up to 15 digits, white space is single spaces.

Known are
    any     type (or a list of types), enum, const, anyOf, $ref within the schema, not recursive
    string  minLength and maxLength; or pattern, which the whole string then matches, and which must
            not match characters that JSON escapes; or format: date, time, date-time, uuid
    integer minimum, maximum, exclusiveMinimum, exclusiveMaximum
    array   items, minItems, maxItems
    object  properties, required, additionalProperties
and what only describes (title, description, default, ...) is skipped. Refused are, among others,
oneOf, allOf, not, if, and what may be any value: a finite automaton cannot count brackets, so that
values nest only as deeply as the schema does.

JSON: RFC 8259. JSON schema: draft 2020-12, "Core" and "Validation".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from core.settings import UserError
from inference import constrain

_SPACE = " ?"  # where JSON allows white space, one space at most: some models never stop
# A character of a string: no control character, and quotation mark and backslash escaped.
_CHARACTER = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'
_DIGITS = 15  # as many as a double holds exactly
_DATE = (
    r"(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-"
    r"(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)  # the Gregorian calendar, leap years included
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)  # RFC 3339, section 5.6; no leap second
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
_KEYWORDS: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_NOTES = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
    "examples", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip


def to_regex(schema: str | dict[str, Any]) -> str:
    """The regular expression of JSON values that a schema describes, given as JSON or parsed.

    Raises:
        UserError: it is not JSON, has another keyword, or describes nothing.
    """
    try:
        root = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        json.dumps(root, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise UserError(f"the JSON schema is not JSON ({e})") from e
    return _Schema(root).value(root, "#", ())


@dataclass(frozen=True)
class _Schema:
    root: Any

    def value(self, schema: Any, where: str, refs: tuple[str, ...]) -> str:
        """The regular expression of one (sub)schema, in a group.

        Args:
            where: its place, for messages.
            refs: the references that led here.
        """
        if not isinstance(schema, dict):
            raise UserError(f"JSON schema, {where}: expected an object, got {json.dumps(schema)}")
        keys = set(schema) - _NOTES
        if "$ref" in keys:
            self._known(keys, {"$ref"}, "$ref", where)
            ref = schema["$ref"]
            if ref in refs:
                raise UserError(f"JSON schema, {where}: {ref} recurs, which is not supported")
            return self.value(self._resolve(ref, where), str(ref), (*refs, ref))
        if "anyOf" in keys:
            self._known(keys, {"anyOf"}, "anyOf", where)
            return _any(
                self.value(one, f"{where}/anyOf/{i}", refs)
                for i, one in enumerate(_list(schema, "anyOf", where))
            )
        if keys & {"enum", "const"}:
            self._known(keys, {"enum", "const", "type"}, "enum or const", where)
            return self._constants(schema, where)
        types = self._type_names(schema, where)
        known_keys = {"type"}.union(*(_KEYWORDS[t] for t in types))
        self._known(keys, known_keys, " or ".join(types), where)
        return _any(getattr(self, f"_{t}")(schema, where, refs) for t in types)

    def _known(self, keys: set[str], known: set[str], beside: str, where: str) -> None:
        if unknown := sorted(keys - known):
            raise UserError(
                f"JSON schema, {where}: the keyword {unknown[0]!r} is not supported for {beside}; "
                f"supported: {', '.join(sorted(known | {'type'}))}"
            )

    def _type_names(self, schema: dict[str, Any], where: str) -> list[str]:
        inferred = "object" if "properties" in schema else "array" if "items" in schema else None
        types = schema.get("type", inferred)
        types = types if isinstance(types, list) else [types]
        if not types or not all(isinstance(t, str) and t in _KEYWORDS for t in types):
            got = json.dumps(schema.get("type"))
            known = ", ".join(_KEYWORDS)
            raise UserError(f"JSON schema, {where}: type must be one of {known}, got {got}")
        return types

    def _resolve(self, ref: Any, where: str) -> Any:
        """What a JSON pointer (RFC 6901) within this schema points to."""
        at = self.root
        try:
            if not ref.startswith("#"):
                raise KeyError
            for name in ref.removeprefix("#").split("/")[1:]:
                at = at[name.replace("~1", "/").replace("~0", "~")]
        except (AttributeError, KeyError, TypeError):
            got = json.dumps(ref)
            raise UserError(
                f"JSON schema, {where}: $ref must point to a place in the schema, got {got}"
            ) from None
        return at

    def _constants(self, schema: dict[str, Any], where: str) -> str:
        values = _list(schema, "enum", where) if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [v for v in values if json.dumps(v) == json.dumps(schema["const"])]
        if "type" in schema:
            types = self._type_names(schema, where)
            values = [v for v in values if any(t in _types(v) for t in types)]
        if not values:
            raise UserError(f"JSON schema, {where}: no value fits")
        return _any(_literal(json.dumps(v, ensure_ascii=False)) for v in values)

    def _string(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> str:
        lengths, others = schema.keys() & {"minLength", "maxLength"}, {"pattern", "format"}
        if (lengths and schema.keys() & others) or others <= schema.keys():
            raise UserError(
                f"JSON schema, {where}: pattern, format and lengths cannot be combined; "
                "put the length into the pattern"
            )
        if "format" in schema:
            if schema["format"] not in list(_FORMATS):
                raise UserError(
                    f"JSON schema, {where}: format must be one of {', '.join(_FORMATS)}, "
                    f"got {json.dumps(schema['format'])}"
                )
            return f'"{_FORMATS[schema["format"]]}"'
        if "pattern" in schema:
            return f'"{_safe_pattern(schema["pattern"], where)}"'
        return f'"{_CHARACTER}{_repeat(*_bounds(schema, "minLength", "maxLength", where))}"'

    def _integer(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> str:
        lows, highs = [], []
        for key in schema.keys() & _KEYWORDS["integer"]:
            bound = schema[key]
            if not _types(bound) & {"number"}:
                raise UserError(
                    f"JSON schema, {where}: {key} must be a number, got {json.dumps(bound)}"
                )
            if "inimum" in key:
                lows.append(math.floor(bound) + 1 if "exclusive" in key else math.ceil(bound))
            else:
                highs.append(math.ceil(bound) - 1 if "exclusive" in key else math.floor(bound))
        if not lows and not highs:
            return f"(?:0|-?[1-9][0-9]{{0,{_DIGITS - 1}}})"
        most = 10 ** max(_DIGITS, *(len(str(abs(n))) for n in lows + highs)) - 1
        low, high = max(lows, default=-most), min(highs, default=most)
        if low > high:
            raise UserError(f"JSON schema, {where}: no integer is in the range")
        parts = []
        if low < 0:
            parts += [f"-{part}" for part in _range(max(1, -high), -low)]
        if high >= 0:
            parts += _range(max(0, low), high)
        return _any(parts)

    def _number(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> str:
        whole = f"-?(?:0|[1-9][0-9]{{0,{_DIGITS - 1}}})"
        return rf"{whole}(?:\.[0-9]{{1,{_DIGITS}}})?(?:[eE][+-]?[0-9]{{1,2}})?"

    def _boolean(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> str:
        return "(?:true|false)"

    def _null(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> str:
        return "null"

    def _array(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> str:
        if "items" not in schema:
            raise UserError(f"JSON schema, {where}: an array needs items")
        low, high = _bounds(schema, "minItems", "maxItems", where)
        if high == 0:
            return r"\[\]"
        item = self.value(schema["items"], f"{where}/items", refs)
        more = _repeat(max(low - 1, 0), None if high is None else high - 1)
        items = f"{item}(?:{_SPACE},{_SPACE}{item}){more}"
        return rf"\[{_SPACE}(?:{items}{_SPACE}){'' if low else '?'}\]"

    def _object(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties:
            raise UserError(f"JSON schema, {where}: an object needs properties")
        required = _list(schema, "required", where) if schema.get("required") else []
        if missing := [name for name in required if name not in list(properties)]:
            raise UserError(
                f"JSON schema, {where}: {json.dumps(missing[0])} is required, "
                "and is not among the properties"
            )
        members = [
            f"{_literal(json.dumps(name, ensure_ascii=False))}{_SPACE}:{_SPACE}"
            + self.value(one, f"{where}/properties/{name}", refs)
            for name, one in properties.items()
        ]
        must = [name in required for name in properties]
        # rest[i]: members from i on, each with a comma before it. The first member that is there
        # has none: it is any of those up to the first that must be there.
        rest = [""]
        for member, needed in zip(reversed(members), reversed(must)):
            one = f"(?:{_SPACE},{_SPACE}{member}){'' if needed else '?'}"
            rest.insert(0, one + rest[0])
        firsts = must.index(True) + 1 if any(must) else len(members)
        inside = _any(members[i] + rest[i + 1] for i in range(firsts))
        return rf"\{{{_SPACE}(?:{inside}{_SPACE}){'' if any(must) else '?'}\}}"


def _any(parts: Iterable[str]) -> str:
    return f"(?:{'|'.join(parts)})"


def _literal(text: str) -> str:
    """A pattern of just this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _repeat(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _list(schema: dict[str, Any], key: str, where: str) -> list[Any]:
    if not isinstance(schema[key], list) or not schema[key]:
        got = json.dumps(schema[key])
        raise UserError(f"JSON schema, {where}: {key} must be a list of one or more, got {got}")
    return schema[key]


def _bounds(schema: dict[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    """Two keywords that count something: how many at least, and at most."""
    least, most = schema.get(low, 0), schema.get(high)
    for key, n in ((low, least), (high, most)):
        if n is not None and (type(n) is not int or n < 0):
            raise UserError(
                f"JSON schema, {where}: {key} must be an integer of at least 0, got {json.dumps(n)}"
            )
    if most is not None and most < least:
        raise UserError(f"JSON schema, {where}: {low} is {least} and {high} only {most}")
    return least, most


def _types(value: Any) -> set[str]:
    """The names of the JSON types that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def _range(low: int, high: int) -> list[str]:
    """Patterns of the integers from low to high, 0 <= low <= high, without leading zeros."""
    parts = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        parts += _same_length(str(first), str(min(high, 10**digits - 1)))
    return parts


def _same_length(low: str, high: str) -> list[str]:
    """Patterns of the numbers from low to high, which have equally many digits."""
    if not low:
        return [""]
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return [f"[{low[0]}-{high[0]}][0-9]{{{rest}}}"]
    if low[0] == high[0]:
        return [low[0] + part for part in _same_length(low[1:], high[1:])]
    parts = [low[0] + part for part in _same_length(low[1:], "9" * rest)]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    return parts + [high[0] + part for part in _same_length("0" * rest, high[1:])]


def _safe_pattern(pattern: Any, where: str) -> str:
    """A pattern for the characters of a JSON string as they are, none of them escaped."""
    if not isinstance(pattern, str):
        raise UserError(
            f"JSON schema, {where}: pattern must be a string, got {json.dumps(pattern)}"
        )
    automaton = constrain.compiled(pattern)
    escaped = [*range(0x20), ord('"'), ord("\\")]
    if (automaton.table[:, escaped] < len(automaton.table) - 1).any():
        raise UserError(
            f"JSON schema, {where}: the pattern {pattern!r} matches strings with a quotation mark, "
            "a backslash or a control character, which JSON would escape; exclude them, as in "
            r'[^"\\\x00-\x1f]'
        )
    return f"(?:{constrain.unanchored(pattern)})"
