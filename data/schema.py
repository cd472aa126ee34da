"""JSON files of datasets and checkpoints: reading, and the types of their fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from core.files import printable
from core.settings import UserError, first_line

Json = dict[str, Any]
_adapter = cache(TypeAdapter)


def record(optional: Mapping[str, Any] = {}, **required: object) -> Any:
    """The type of a JSON object; other fields are free."""
    fields = required | {name: NotRequired[kind] for name, kind in optional.items()}
    return TypedDict("JSON object", fields)  # type: ignore[operator]


Count = Annotated[int, Field(ge=0, le=2**48)]
Id = Annotated[int, Field(ge=0, le=2**32)]
Text = Annotated[str, Field(min_length=0)]  # any constraint refuses halves of surrogate pairs
TokenizerMeta = record(
    name=Literal["char", "gpt2", "tokenizer.json"],  # older datasets lack ends and begin
    optional={"vocabulary": Annotated[list[Text], Field(min_length=1)], "content": Text,
              "eot": Id | None, "ends": list[Id], "begin": list[Id]})  # fmt: skip
Shard = record(path=str, mtime_ns=int, skip=Count, tokens=Count)  # skip: bytes
Shards = Annotated[list[Shard], Field(min_length=1)]  # type: ignore[valid-type]
Meta = record(
    tokenizer=TokenizerMeta, vocab_size=Id, tokens=record(train=Count, val=Count),
    optional={"dtype": Literal["uint16", "uint32"], "bytes": dict[Literal["train", "val"], Count],
              "shards": record(train=Shards, val=Shards), "eot_begins": bool, "options": Json,
              "baselines": dict[str, float]})  # fmt: skip


class FileError(UserError):
    """A mistake in a file or its name, in printable characters."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Raise FileError for a file that cannot be read."""
    try:
        yield
    except FileError:
        raise
    except (OSError, ValueError, RecursionError) as e:
        named = getattr(e, "filename", None) or path
        raise FileError(f"{named}: {getattr(e, 'strerror', None) or first_line(e)}") from e


def read_json(path: Path, kind: object) -> Json:
    """A JSON object of this type. Raises FileError with file, field and value."""
    with reading(path):
        return valid(json.loads(path.read_text(encoding="utf-8")), kind, str(path))


def valid(content: object, kind: object, origin: str) -> Json:
    """`content` if it is of this type. Raises FileError."""
    try:
        _adapter(kind).validate_python(content, strict=True)
    except ValidationError as e:
        first = e.errors()[0]
        field = ": ".join(map(str, (origin, *first["loc"])))
        raise FileError(f"{field}: {first['msg']}, got {first['input']!r:.60}") from None
    return cast(Json, content)


def well_formed(text: str) -> str:
    """Replace unpaired surrogates, which UTF-8 lacks, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
