"""Twenty JSON schemas of bounded size, so that every answer can be complete: the kinds that people ask for."""

from __future__ import annotations

from typing import Any

_WORD: dict[str, Any] = {"type": "string", "maxLength": 12}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 999}


def _object(_required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if _required is None else _required,
        "additionalProperties": False,
    }


def _list(item: Any, most: int = 3, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "person": _object(name=_WORD, age={"type": "integer", "minimum": 0, "maximum": 130}),
    "optional fields": _object(["name"], name=_WORD, nick=_WORD, age=_COUNT),
    "choice": _object(sentiment={"enum": ["positive", "neutral", "negative"]}),
    "constant": _object(kind={"const": "answer"}, value=_COUNT),
    "flags": _object(open={"type": "boolean"}, paid={"type": "boolean"}, late={"type": "boolean"}),
    "nothing or a word": _object(value={"anyOf": [_WORD, {"type": "null"}]}),
    "type list": _object(value={"type": ["boolean", "null"]}),
    "list of words": _list(_WORD, 4, 1),
    "list of numbers": _list(_COUNT, 5, 2),
    "list of objects": _list(_object(x=_COUNT, y=_COUNT), 2, 1),
    "nested": _object(outer=_object(inner=_object(value=_COUNT))),
    "matrix": _list(_list(_COUNT, 2, 2), 2, 2),
    "pair": {"type": "array", "prefixItems": [_WORD, _COUNT], "items": False, "minItems": 2},
    "two kinds": {"anyOf": [_object(kind={"const": "a"}, n=_COUNT), _object(kind={"const": "b"}, s=_WORD)]},
    "reference": {
        "$defs": {"point": _object(x=_COUNT, y=_COUNT)},
        **_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "pattern": _object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "date": _object(day={"type": "string", "format": "date"}),
    "a word": {"type": "string", "minLength": 1, "maxLength": 10},
    "a number": {"type": "integer", "minimum": -50, "maximum": 50},
    "a choice of values": {"enum": [1, "two", None, True, {"three": [3]}]},
}
"""Name -> schema."""


def response_format(name: str) -> dict[str, Any]:
    """What a request sends for a schema."""
    return {
        "type": "json_schema",
        "json_schema": {"name": name.replace(" ", "_"), "strict": True, "schema": SCHEMAS[name]},
    }
