"""A JSON schema as a regular expression, for inference/constrain.py.

A match is always valid. Not all valid values match: properties come in the schema's order and no
others, numbers have up to 15 digits, white space is single spaces. Other keywords, recursion and
untyped values are errors.

JSON: RFC 8259. JSON schema: draft 2020-12, "Core" and "Validation".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from core.settings import UserError

Schema = dict[str, Any]
SPACE, COMMA = " ?", " ?, ?"
CHARACTER = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\])'  # of a string
PLAIN = {  # types without further keywords
    "integer": "(?:0|-?[1-9][0-9]{0,14})",  # 15 digits: as many as a double holds exactly
    "number": r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?(?:[eE][+-]?[0-9]{1,2})?",
    "boolean": "(?:true|false)",
    "null": "null",
}

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
KEYWORDS: dict[str, dict[str, type]] = {  # allowed with each type
    "string": {"minLength": int, "maxLength": int},
    "array": {"items": dict, "minItems": int, "maxItems": int},
    "object": {"properties": dict, "required": list, "additionalProperties": object},
    "enum": {"enum": list},
    "const": {"const": object},
    "anyOf": {"anyOf": list},
    "$ref": {"$ref": str},
}
NOTES = re.compile(  # keywords that do not restrict values
    r"\$(schema|id|comment|defs)|definitions|title|description|default|examples|deprecated|"
    "readOnly|writeOnly"
)
NAMES = {int: "an integer", str: "a string", list: "a list", dict: "an object"}


def to_regex(schema: str | Schema) -> str:
    """The regular expression of a schema's values, the schema given as JSON or parsed.

    Raises:
        UserError: it is not JSON, has an unsupported keyword, or describes no value.
    """
    try:
        root = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        json.dumps(root, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise UserError(f"the JSON schema is not JSON ({e})") from e
    return _value(root, "#", root, ())


def _value(schema: object, where: str, root: object, refs: tuple[str, ...]) -> str:
    def part(name: str, inner: object) -> str:
        return _value(inner, f"{where}/{name}", root, refs)

    if not isinstance(schema, dict):
        raise _wrong(where, "expected an object", schema)
    schema = {key: value for key, value in schema.items() if not NOTES.fullmatch(key)}
    special = next((key for key in ("$ref", "anyOf", "enum", "const") if key in schema), None)
    types = schema.get("type", "object" if "properties" in schema else None)
    types = types if isinstance(types, list) else [types]
    known = types and all(t in list(TYPES) for t in types)
    if not known and ("type" in schema or special is None):
        raise _wrong(where, f"type must be one of {', '.join(TYPES)}", schema.get("type"))
    if len(types) > 1:
        return _either(_value({**schema, "type": t}, where, root, refs) for t in types)
    kind = special or types[0]
    _check_keywords(schema, kind, where)

    match kind:
        case "$ref":
            ref = schema["$ref"]
            if ref in refs:
                raise _wrong(where, f"{ref} is recursive")
            return _value(_target(ref, where, root), ref, root, (*refs, ref))
        case "anyOf":
            return _either(part(f"anyOf/{i}", s) for i, s in enumerate(schema["anyOf"]))
        case "enum" | "const":
            values = schema["enum"] if kind == "enum" else [schema["const"]]
            if "type" in schema:
                values = [v for v in values if type(v) in TYPES[types[0]]]
            if not values:
                raise _wrong(where, "no value fits")
            return _either(re.escape(json.dumps(v, ensure_ascii=False)) for v in values)
        case "string":
            low, high = _counts(schema, "Length", where)
            return f'"{CHARACTER}{{{low},{"" if high is None else high}}}"'
        case "array":
            item, (low, high) = part("items", schema["items"]), _counts(schema, "Items", where)
            if high == 0:
                return rf"\[{SPACE}\]"
            more = f"{{{max(0, low - 1)},{'' if high is None else high - 1}}}"
            items = f"(?:{item}(?:{COMMA}{item}){more}{SPACE})"
            return rf"\[{SPACE}{items}{'' if low else '?'}\]"
        case "object":
            required = schema.get("required", [])
            if missing := [name for name in required if name not in list(schema["properties"])]:
                raise _wrong(where, "required, but not a property", missing[0])
            pairs = []
            for name, inner in schema["properties"].items():
                key, value = re.escape(json.dumps(name, ensure_ascii=False)), f"properties/{name}"
                pairs.append((f"{key}{SPACE}:{SPACE}{part(value, inner)}", name in required))
            return _object(pairs)
    return PLAIN[kind]


def _object(pairs: Sequence[tuple[str, bool]]) -> str:
    """An object of these properties: (pattern of "name": value, required)."""
    # One alternative for each property that can be the first: a comma precedes the others.
    ways = []
    for i, (first, needed) in enumerate(pairs):
        rest = (f"(?:{COMMA}{pair})" + "?" * (not must) for pair, must in pairs[i + 1 :])
        ways.append(first + "".join(rest) + SPACE)
        if needed:
            break
    else:
        ways.append("")
    return rf"\{{{SPACE}{_either(ways)}\}}"


def _either(patterns: Iterable[str]) -> str:
    return f"(?:{'|'.join(patterns)})"


def _counts(schema: Schema, what: str, where: str) -> tuple[int, int | None]:
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if low < 0 or (high is not None and low > high):
        raise _wrong(where, f"min{what} is {low} and max{what} {high}")
    return low, high


def _wrong(where: str, what: str, *got: object) -> UserError:
    shown = f", got {json.dumps(got[0])}" if got else ""
    return UserError(f"JSON schema, {where}: {what}{shown}")


def _check_keywords(schema: Schema, kind: str, where: str) -> None:
    """Raise UserError for an unsupported keyword, or a value of a wrong type."""
    known = KEYWORDS.get(kind, {}) | ({} if kind in ("anyOf", "$ref") else {"type": object})
    for key, value in sorted(schema.items()):
        if key not in known:
            what = f"the keyword {key!r} is not supported for {kind}; supported: "
            raise _wrong(where, what + ", ".join(sorted(known)))
        if known[key] is not object and type(value) is not known[key]:
            raise _wrong(where, f"{key} must be {NAMES[known[key]]}", value)
        if key in ("anyOf", "enum", "properties") and not value:
            raise _wrong(where, f"{key} must be {NAMES[known[key]]} of one or more", value)
    needed = {"array": "items", "object": "properties"}.get(kind)
    if needed and needed not in schema:
        raise _wrong(where, f"an {kind} needs {needed}")


def _target(ref: str, where: str, at: Any) -> object:
    """The target of a JSON pointer (RFC 6901) within the schema."""
    try:
        if not ref.startswith("#"):
            raise KeyError
        for name in ref.split("/")[1:]:
            at = at[name.replace("~1", "/").replace("~0", "~")]
    except (KeyError, TypeError):
        raise _wrong(where, "$ref must point to a place in the schema", ref) from None
    return at
