"""Messages as frozen dataclasses: their JSON encoding and their documentation are derived from their fields.

A message is a JSON object with its kind and its fields. The kind is the class variable ``wire`` or, without one, the
name of the class in snake case; a field has its own name, or the one given with ``wire_name``. The type hint of a field
says which values are valid. It may be int, float (finite), str, bool, an enum (by value), a literal or another
dataclass. ``X | None``, ``tuple[X, ...]`` and ``dict[str, X]`` are made of these; ``Any`` is JSON that nobody reads.

Unknown fields are ignored, and missing fields get their default. So adjacent versions understand each other if new
fields have defaults, and fields without a default are never removed. Everything else that is wrong raises
``ProtocolError``: an unknown kind or enum value, a missing field, a value of another type.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

KIND = "kind"
JsonMessage = dict[str, Any]
"""A JSON object."""

Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]
"""Raises ``_Wrong``."""


@dataclass(frozen=True, slots=True)
class Member:
    """A launcher: the name of its node and where it listens.

    ``address`` is a host name or an IP address, as listed for the run. ``listens`` is the IP address that the launcher
    itself has found for it, "" where it is not known. ``domain`` is the NVLink domain that its node shares with others,
    as the driver there says; "" where it says none. A launcher tells both when it connects; claims do not have them.
    """

    name: str
    address: str
    port: int
    domain: str = field(default="", compare=False)
    listens: str = field(default="", compare=False)

    @property
    def host(self) -> str:
        """Where to reach it: its IP address if that is known, else what is listed."""
        return self.listens or self.address


def member_to_json(member: Member) -> list[str | int]:
    """``[name, address, port]``."""
    return [member.name, member.address, member.port]


def member_from_json(raw: Any) -> Member:
    """The member. Raises TypeError or ValueError."""
    name, address, port = raw
    return Member(str(name), str(address), int(port))


class ProtocolError(ValueError):
    """A message of an unknown kind, or one that does not match its kind; one sentence that names both."""


class _Wrong(Exception):
    """A value does not have the expected type: where below the field, and what was expected."""

    def __init__(self, expected: str, *path: str) -> None:
        super().__init__(expected)
        self.expected, self.path = expected, path

    def within(self, step: str) -> _Wrong:
        return _Wrong(self.expected, step, *self.path)


class Codec:
    """Encodes and decodes messages of ``kinds``. Raises TypeError if one of them is not suitable."""

    def __init__(self, kinds: Sequence[type]) -> None:
        self._by_class = {kind: (kind_name(kind), _Shape(kind)) for kind in kinds}
        self._by_name = dict(self._by_class.values())
        if len(self._by_name) < len(kinds):
            raise TypeError("two kinds of messages have the same name")
        for kind in kinds:
            if any(field.name == KIND for field in fields(kind)):
                raise TypeError(f"{kind.__name__}.{KIND}: the name is taken")

    def encode(self, message: object) -> dict[str, Any]:
        """The message as a JSON object. Raises KeyError for an unknown kind."""
        name, shape = self._by_class[type(message)]
        return {KIND: name, **shape.encode(message)}

    def decode(self, raw: Mapping[str, Any]) -> Any:
        """The message. Raises ProtocolError."""
        name = raw.get(KIND)
        shape = self._by_name.get(name) if isinstance(name, str) else None
        if shape is None:
            raise ProtocolError(f"a message of the unknown kind {name!r:.80}")
        try:
            return shape.decode(raw)
        except _Wrong as wrong:
            raise ProtocolError(f"a message {name!r} whose {'.'.join(wrong.path)} is not {wrong.expected}") from None
        except ValueError as error:
            raise ProtocolError(f"a message {name!r} that makes no sense: {error}") from error


def kind_name(kind: type) -> str:
    """The name under which a message is sent: ``GoOn`` is ``go_on``, unless it has a class variable ``wire``."""
    return getattr(kind, "wire", "") or re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def rows(kinds: Sequence[type]) -> Iterator[tuple[str, str, str, str]]:
    """For the documentation, of each kind: name, ``direction`` (a class variable), fields, first sentence."""
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        said = re.split(r"(?<=\.) ", " ".join((kind.__doc__ or "").split()))[0]
        described = ", ".join(
            f"`{_wire_name(field)}`{'' if _required(field) else '='}: {_shown(hints[field.name])}"
            for field in fields(kind)
        )
        yield f"`{kind_name(kind)}`", str(getattr(kind, "direction", "")), described, said


class _Shape:
    """The fields of a dataclass with their encoders and decoders."""

    def __init__(self, cls: type) -> None:
        parameters = getattr(cls, "__dataclass_params__", None)
        if parameters is None or not parameters.frozen:
            raise TypeError(f"{cls!r} is not a frozen dataclass")
        self._cls: Callable[..., Any] = cls
        hints = typing.get_type_hints(cls)
        self._fields = [
            (field.name, _wire_name(field), _required(field), *_pair(hints[field.name])) for field in fields(cls)
        ]

    def encode(self, value: Any) -> dict[str, Any]:
        return {wire: encode(getattr(value, name)) for name, wire, _, encode, _ in self._fields}

    def decode(self, raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise _Wrong("an object")
        found = {}
        for name, wire, required, _, decode in self._fields:
            if wire in raw:
                try:
                    found[name] = decode(raw[wire])
                except _Wrong as wrong:
                    raise wrong.within(wire) from None
            elif required:
                raise _Wrong("there", wire)
        return self._cls(**found)


def wire_name(name: str) -> dict[str, str]:
    """The ``metadata`` of a field that is sent under another name than its own."""
    return {"wire": name}


def _wire_name(field: Field[Any]) -> str:
    return str(field.metadata.get("wire", field.name))


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _pair(hint: Any) -> tuple[Encode, Decode]:
    """Encoder and decoder for values of the type ``hint``. Raises TypeError for an unsupported type."""
    if hint is Any:
        return _same, _same
    if hint in _PLAIN:
        return _same, _PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _value, partial(_enum, hint)
    if isinstance(hint, type) and is_dataclass(hint):
        shape = _Shape(hint)
        return shape.encode, shape.decode
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return _same, partial(_literal, arguments)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        encode, decode = _pair(next(each for each in arguments if each is not type(None)))
        return partial(_unless_none, encode), partial(_unless_none, decode)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        encode, decode = _pair(arguments[0])
        return (lambda items: [encode(item) for item in items]), partial(_tuple, decode)
    if origin in (dict, Mapping) and arguments[0] is str:
        encode, decode = _pair(arguments[1])
        return (lambda items: {key: encode(item) for key, item in items.items()}), partial(_dict, decode)
    raise TypeError(f"messages cannot carry {hint!r}")


def _same(value: Any) -> Any:
    return value


def _value(value: Enum) -> Any:
    return value.value


def _unless_none(convert: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else convert(value)


def _int(raw: Any) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool):
        raise _Wrong("a whole number")
    return raw


def _float(raw: Any) -> float:
    try:
        value = float(raw) if isinstance(raw, (int, float)) and not isinstance(raw, bool) else math.nan
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise _Wrong("a finite number")
    return value


def _str(raw: Any) -> str:
    if not isinstance(raw, str):
        raise _Wrong("a text")
    return raw


def _bool(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise _Wrong("true or false")
    return raw


def _enum(cls: type[Enum], raw: Any) -> Enum:
    for member in cls:
        if type(raw) is type(member.value) and raw == member.value:
            return member
    raise _Wrong(f"one of {', '.join(str(member.value) for member in cls)}")


def _literal(values: tuple[Any, ...], raw: Any) -> Any:
    if raw not in values:
        raise _Wrong(f"one of {', '.join(map(str, values))}")
    return raw


def _tuple(decode: Decode, raw: Any) -> tuple[Any, ...]:
    if not isinstance(raw, (list, tuple)):
        raise _Wrong("a list")
    found: list[Any] = []
    try:
        for item in raw:
            found.append(decode(item))
    except _Wrong as wrong:
        raise wrong.within(str(len(found))) from None
    return tuple(found)


def _dict(decode: Decode, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise _Wrong("an object")
    found = {}
    for key, item in raw.items():
        try:
            found[_str(key)] = decode(item)
        except _Wrong as wrong:
            raise wrong.within(str(key)) from None
    return found


_PLAIN: dict[Any, Decode] = {int: _int, float: _float, str: _str, bool: _bool}


def _shown(hint: Any) -> str:
    if hint is Any:
        return "JSON"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(f"`{member.value}`" for member in hint)
    if is_dataclass(hint):
        inner = typing.get_type_hints(hint)
        return "{" + ", ".join(f"{field.name}: {_shown(inner[field.name])}" for field in fields(hint)) + "}"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return f"{_shown(next(each for each in arguments if each is not type(None)))}, or null"
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_shown(arguments[0])}"
    if origin in (dict, Mapping):
        return f"object of {_shown(arguments[1])}"
    return str(hint.__name__)
