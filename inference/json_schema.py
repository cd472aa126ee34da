"""A JSON schema as a regular expression, for inference/constrain.py.

outlines-core translates schemas, but drops keywords that it does not know (a minimum, not), and is
wrong about some that it does (docs/CONSTRAINTS.md). So a schema is checked first, and what would go
wrong is replaced by a marker, for which a pattern of our own is put into the result. What that
matches is then valid by the schema, always: a keyword is honoured or refused, never dropped.

It does not match all that is valid: an object has its properties in the schema's order and no
others, numbers have up to 15 digits, white space is single spaces, a pattern is for the whole
string. Refused are, among others, oneOf, allOf, not, a $ref that recurs, and what may be any value:
a finite automaton cannot count brackets, so that values nest only as deeply as the schema does.

JSON: RFC 8259. JSON schema: draft 2020-12, "Core" and "Validation".
"""

from __future__ import annotations

import json
import math
from typing import Any

from core.settings import UserError
from inference import constrain

INTEGER = "(?:0|-?[1-9][0-9]{0,14})"  # 15 digits: as many as a double holds exactly
NUMBER = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?(?:[eE][+-]?[0-9]{1,2})?"
DATE = (  # of the Gregorian calendar, leap years included
    r"(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-"
    r"(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
HOUR = "(?:[01][0-9]|2[0-3])"
TIME = rf"{HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{HOUR}:[0-5][0-9])"  # RFC 3339
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
FORMATS = {"date": DATE, "time": TIME, "date-time": f"{DATE}T{TIME}", "uuid": UUID}

COUNT = "an integer of at least 0", lambda n: type(n) is int and n >= 0
BOUND = "a number", lambda n: type(n) in (int, float)
ITEMS = "a list of one or more", lambda x: isinstance(x, list) and x
KEYWORDS: dict[str, dict[str, Any]] = {  # of each type: what it must be, and whether it is
    "string": {
        "minLength": COUNT,
        "maxLength": COUNT,
        "pattern": ("a string", lambda s: isinstance(s, str)),
        "format": (f"one of {', '.join(FORMATS)}", lambda s: s in list(FORMATS)),
    },
    "integer": dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), BOUND),
    "number": {},
    "boolean": {},
    "null": {},
    "array": {"items": None, "minItems": COUNT, "maxItems": COUNT},
    "object": {
        "properties": ("an object of one property or more", lambda x: isinstance(x, dict) and x),
        "required": ("a list", lambda x: isinstance(x, list)),
        "additionalProperties": None,
    },
}
NOTES = {  # which only describe, and are skipped
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
    "examples", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip


def compile_schema(
    schema: str | dict[str, Any], tokenizer: constrain.Tokens
) -> constrain.Automaton:
    """JSON values that a schema describes. Raises: UserError, as to_regex() and regex() do."""
    return constrain.over_tokens(constrain.compiled(to_regex(schema)), tokenizer, "the JSON schema")


def to_regex(schema: str | dict[str, Any]) -> str:
    """The regular expression of JSON values that a schema describes, given as JSON or parsed.

    Raises:
        UserError: it is not JSON, has another keyword, or describes nothing.
    """
    try:
        root = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        text = json.dumps(root, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise UserError(f"the JSON schema is not JSON ({e})") from e
    own: dict[str, str] = {}  # pattern -> marker, which is in no text of the schema
    prefix = next(f"own{n}x" for n in range(len(text)) if f"own{n}x" not in text)
    checked = _checked(root, "#", root, (), lambda p: own.setdefault(p, f"{prefix}{len(own)}x"))
    pattern = constrain.library().json_schema.build_regex_from_schema(json.dumps(checked))
    for one, marker in own.items():
        pattern = pattern.replace(f'"{marker}"', f"(?:{one})")
    return pattern


def _wrong(where: str, what: str, *got: Any) -> UserError:
    shown = f", got {json.dumps(got[0])}" if got else ""
    return UserError(f"JSON schema, {where}: {what}{shown}")


def _check(schema: dict[str, Any], known: dict[str, Any], beside: str, where: str) -> None:
    """Every keyword is known, and its value is what it must be."""
    for key in sorted(schema):
        if key not in known:
            supported = ", ".join(sorted({*known, "type"}))
            what = f"the keyword {key!r} is not supported for {beside}; supported: {supported}"
            raise _wrong(where, what)
        if known[key] is not None and not known[key][1](schema[key]):
            raise _wrong(where, f"{key} must be {known[key][0]}", schema[key])


def _checked(schema: Any, where: str, root: Any, refs: tuple[str, ...], by: Any) -> dict[str, Any]:
    """A schema that outlines-core translates rightly.

    Args:
        where: its place, for messages; root: the whole schema; refs: those that led here.
        by: gives a marker for a pattern.
    """
    if not isinstance(schema, dict):
        raise _wrong(where, "expected an object", schema)
    schema = {key: value for key, value in schema.items() if key not in NOTES}

    def part(name: str, inner: Any) -> dict[str, Any]:
        return _checked(inner, f"{where}/{name}", root, refs, by)

    if "$ref" in schema:
        _check(schema, {"$ref": None}, "$ref", where)
        ref = schema["$ref"]
        if ref in refs:
            raise _wrong(where, f"{ref} recurs, which is not supported")
        return _checked(_target(ref, where, root), str(ref), root, (*refs, ref), by)
    if "anyOf" in schema:
        _check(schema, {"anyOf": ITEMS}, "anyOf", where)
        return {"anyOf": [part(f"anyOf/{i}", s) for i, s in enumerate(schema["anyOf"])]}
    types = schema.get("type", "object" if "properties" in schema else None)
    types = types if isinstance(types, list) else [types]
    constant = schema.keys() & {"enum", "const"}
    ok = types and all(isinstance(t, str) and t in KEYWORDS for t in types)
    if not ok and ("type" in schema or not constant):
        raise _wrong(where, f"type must be one of {', '.join(KEYWORDS)}", schema.get("type"))
    if constant:
        _check(schema, {"enum": ITEMS, "const": None, "type": None}, "enum or const", where)
        values = [
            v
            for v in schema.get("enum", [schema.get("const")])
            if types == [None] or _types(v) & {*types}
        ]
        if not values or len(constant) > 1:
            raise _wrong(where, "no value fits")
        return {"enum": values}
    known: dict[str, Any] = {"type": None}
    for t in types:
        known |= KEYWORDS[t]
    _check(schema, known, " or ".join(types), where)
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems")):
        if schema.get(low, 0) > schema.get(high, math.inf):
            raise _wrong(where, f"{low} is {schema[low]} and {high} only {schema[high]}")
    parts: list[dict[str, Any]] = []
    for t in types:
        own = {key: schema[key] for key in schema if key in KEYWORDS[t]}
        if t == "number" or t == "integer":
            parts.append({"const": by(NUMBER if t == "number" else _integers(own, where))})
            continue
        if own.keys() & {"pattern", "format"}:
            parts.append({"const": by(_string(own, where))})
            continue
        if t == "array":
            if "items" not in own:
                raise _wrong(where, "an array needs items")
            own["items"] = part("items", own["items"])
        if t == "object":
            if "properties" not in own:
                raise _wrong(where, "an object needs properties")
            inner = own["properties"].items()
            properties = {by(_literal(n)): part(f"properties/{n}", s) for n, s in inner}
            if missing := [n for n in own.get("required", ()) if n not in list(own["properties"])]:
                what = f"{json.dumps(missing[0])} is required, and is not among the properties"
                raise _wrong(where, what)
            required = [by(_literal(n)) for n in own.get("required", ())]
            own = {"properties": properties, "required": required}
        parts.append({"type": t, **own})
    return {"anyOf": parts} if len(parts) > 1 else parts[0]


def _literal(text: str) -> str:
    """A pattern of a JSON string: the library does not escape the names of properties."""
    text = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _target(ref: Any, where: str, root: Any) -> Any:
    """What a JSON pointer (RFC 6901) within the schema points to."""
    try:
        if not ref.startswith("#"):
            raise KeyError
        for name in ref.split("/")[1:]:
            root = root[name.replace("~1", "/").replace("~0", "~")]
    except (AttributeError, KeyError, TypeError):
        raise _wrong(where, "$ref must point to a place in the schema", ref) from None
    return root


def _types(value: Any) -> set[str]:
    """The names of the JSON types that a value has."""
    names = {bool: "boolean", str: "string", list: "array", dict: "object", int: "integer"}
    name = names.get(type(value), "null")
    if type(value) is float:
        name = "integer" if value.is_integer() else "number"
    return {name, "number"} if name == "integer" else {name}


def _string(schema: dict[str, Any], where: str) -> str:
    """A string by its pattern or its format."""
    if len(schema) > 1:
        what = "pattern, format and lengths cannot be combined; put the length into the pattern"
        raise _wrong(where, what)
    if "format" in schema:
        return f'"{FORMATS[schema["format"]]}"'
    pattern = schema["pattern"]  # for the characters as they are, none of them escaped
    table = constrain.compiled(pattern).table
    if (table[:, [*range(0x20), ord('"'), ord("\\")]] < len(table) - 1).any():
        what = f"the pattern {pattern!r} matches strings with a quotation mark, a backslash or a "
        what += "control character, which JSON would escape; exclude them, as in "
        raise _wrong(where, what + r'[^"\\\x00-\x1f]')
    return f'"(?:{constrain.unanchored(pattern)})"'


def _integers(bounds: dict[str, float], where: str) -> str:
    """The integers between bounds."""
    if not bounds:
        return INTEGER
    lows = [math.ceil(n) for k, n in bounds.items() if k == "minimum"]
    lows += [math.floor(n) + 1 for k, n in bounds.items() if k == "exclusiveMinimum"]
    highs = [math.floor(n) for k, n in bounds.items() if k == "maximum"]
    highs += [math.ceil(n) - 1 for k, n in bounds.items() if k == "exclusiveMaximum"]
    limit = 10 ** max(15, *(len(str(abs(n))) for n in lows + highs)) - 1
    low, high = max(lows, default=-limit), min(highs, default=limit)
    if low > high:
        raise _wrong(where, "no integer is in the range")
    negative = [f"-{n}" for n in _range(max(1, -high), -low)] if low < 0 else []
    return "|".join(negative + (_range(max(0, low), high) if high >= 0 else []))


def _range(low: int, high: int) -> list[str]:
    """Patterns of the integers from low to high, 0 <= low <= high, without leading zeros."""
    tens, last_tens = low // 10, high // 10
    if tens == last_tens:
        return [f"{tens or ''}[{low % 10}-{high % 10}]"]
    # The rest of the first ten, all of those between, a part of the last.
    between = [f"{n}[0-9]" for n in _range(tens + 1, last_tens - 1)] if tens + 1 < last_tens else []
    return [f"{tens or ''}[{low % 10}-9]", *between, f"{last_tens}[0-{high % 10}]"]
