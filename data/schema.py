"""JSON files of datasets and checkpoints: reading, and the types of their fields."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from core.files import printable
from core.settings import UserError, first_line

Json = dict[str, Any]
Count = Annotated[int, Field(ge=0, le=2**48)]
Id = Annotated[int, Field(ge=0, le=2**32)]
Split = Literal["train", "val"]
Counts = Annotated[dict[Split, Count], Field(min_length=2)]


class TokenizerMeta(TypedDict):
    name: Literal["char", "gpt2", "tokenizer.json"]
    vocabulary: NotRequired[list[str]]
    content: NotRequired[str]
    eot: NotRequired[Id | None]
    ends: NotRequired[list[Id]]  # older datasets lack it, and begin
    begin: NotRequired[list[Id]]


class Shard(TypedDict):
    path: str
    mtime_ns: int
    skip: Count  # bytes
    tokens: Count


Files = Annotated[list[Shard], Field(min_length=1)]
Shards = Annotated[dict[Split, Files], Field(min_length=2)]


class Meta(TypedDict):
    tokenizer: TokenizerMeta
    vocab_size: Id
    tokens: Counts
    dtype: NotRequired[Literal["uint16", "uint32"]]
    bytes: NotRequired[Counts]
    shards: NotRequired[Shards]
    eot_begins: NotRequired[bool]
    options: NotRequired[Json]
    baselines: NotRequired[dict[str, float]]


def read_json(path: Path, kind: object) -> Json:
    """A JSON object of this type. Raises UserError with file, field and value."""
    try:
        return valid(json.loads(path.read_text(encoding="utf-8")), kind, printable(path))
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as e:
        why = getattr(e, "strerror", None) or first_line(e)
        raise UserError(f"{printable(path)}: {printable(why)}") from e


def valid(content: object, kind: object, origin: str) -> Json:
    """`content` if it is of this type. Raises UserError."""
    try:
        _adapter(kind).validate_python(content, strict=True)
    except ValidationError as e:
        first = e.errors()[0]
        field = printable(".".join(map(str, first["loc"])))
        why = f"{first['msg']}, got {first['input']!r:.60}"
        raise UserError(": ".join(filter(None, (origin, field, printable(why))))) from None
    return cast(Json, content)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
