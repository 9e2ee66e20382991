"""Canonical JSON and sealed documents (FORMAT.md, section 3): one value, one text, one digest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from blake3 import blake3

from syckpt.errors import FormatError, IntegrityError, StateError

__all__ = ["MAX_DOCUMENT_NBYTES", "MAX_SAFE_INT", "dumps", "loads", "loads_canonical", "seal", "unseal"]

MAX_DOCUMENT_NBYTES = 256 << 20
MAX_SAFE_INT = 2**53 - 1
_MAX_DEPTH = 512
_MAX_BRACKETS = 1 << 24  # each may be an object of 64 bytes and more; a manifest of a million tensors has a third of it

# A value that contains itself ends in a RecursionError; looking for one at every container costs a seventh.
_encode = json.JSONEncoder(ensure_ascii=True, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """Return the canonical text of a JSON value.

    Raises: StateError for what canonical JSON cannot say (NaN, infinities, integers beyond 2^53, other types).
    """
    try:
        text = _encode(value).encode("ascii")
        if _has_long_integers(text):
            _check_integers(value)
        return text
    except (ValueError, TypeError, RecursionError) as exc:
        raise StateError(f"not a canonical JSON value: {exc}") from exc


_DIGITS = bytes(0x30 if character in b"0123456789" else 0x20 for character in range(256))


def _has_long_integers(text: bytes) -> bool:
    """Whether integers beyond 2^53 may be in a text: only these have sixteen digits in a row, but texts and floats may as well."""
    return b"0" * 16 in text.translate(_DIGITS)


def _check_integers(value: Any) -> None:
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, int) and abs(value) > MAX_SAFE_INT:
        raise ValueError(f"integer {value:x} (hex) is beyond 2^53")
    elif not isinstance(value, list | tuple):
        return
    for part in value:
        _check_integers(part)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _integer(text: str) -> int:
    if len(text) > 17 or abs(value := int(text)) > MAX_SAFE_INT:
        raise ValueError(f"integer {text[:20]} is beyond 2^53")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"float {text[:30]} is not finite")
    return value


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_TOKENS = bytes(set(range(256)) - set(b'[{]}"'))


def _check_size(data: bytes) -> None:
    """Refuse what is too long or too deep, before parsing: the parser recurses, and a hostile file must not reach the end of the stack."""
    if len(data) > MAX_DOCUMENT_NBYTES:
        raise ValueError(f"{len(data)} bytes are more than the {MAX_DOCUMENT_NBYTES} allowed")
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > _MAX_BRACKETS:
        raise ValueError(f"{brackets} opening brackets are more than the {_MAX_BRACKETS} allowed")
    if brackets <= _MAX_DEPTH:
        return
    # Escapes go first, then all but brackets and quotes; most quotes then stand beside their partner, which go in pairs. What is left
    # between two is text. As signed bytes, brackets are the steps of the depth.
    tokens = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_STEPS, _NO_TOKENS).replace(b'""', b"")
    steps = memoryview(b"".join(tokens.split(b'"')[::2])).cast("b")
    if max(accumulate(steps), default=0) > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")


def loads(data: bytes) -> Any:
    """Parse JSON text strictly: no duplicate keys, no NaN, bounded size and depth.

    Raises: ValueError, always, whatever is wrong with the text.
    """
    _check_size(data)
    return json.loads(data.decode("utf-8"), object_pairs_hook=_pairs, parse_int=_integer, parse_float=_float, parse_constant=_refuse)


def loads_canonical(text: bytes) -> Any:
    """Parse canonical JSON. Raises: ValueError for any other text, RecursionError."""
    _check_size(text)
    # Several times as fast as `loads`: what else that refuses does not come back as the same text either. A duplicate key is lost; NaN and
    # infinities are refused.
    decode = _decode_checked if _has_long_integers(text) else _decode
    value, _ = decode(text.decode("ascii"))
    if _encode(value).encode("ascii") != text:
        loads(text)  # says what is wrong, if it is more than its form
        raise ValueError("its body is not canonical JSON")
    return value


_decode = json.JSONDecoder().raw_decode
_decode_checked = json.JSONDecoder(parse_int=_integer).raw_decode


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


def seal(body: dict[str, Any]) -> tuple[bytes, str]:
    """Return the sealed document of a body, and its seal (64 hex digits)."""
    text = dumps(body)
    mark = digest_of(text)
    return b'{"body":' + text + b',"seal":"' + mark.encode() + b'"}\n', mark


def unseal(
    data: bytes, *, key: str, kind: str, seal: str | None = None, parse: Callable[[bytes], Any] = loads_canonical
) -> tuple[dict[str, Any], str]:
    """Check a sealed document and return its body and seal.

    `key` names it in errors; `seal`, when given, is what whoever points here expects. `parse` does as `loads_canonical`.
    Raises: IntegrityError (damaged, or another document than expected), FormatError (a newer version).
    """
    tail = b',"seal":"'
    cut = len(data) - 64 - len(b'"}\n')
    head = cut - len(tail)
    if head < 8 or data[:8] != b'{"body":' or data[head:cut] != tail or data[-3:] != b'"}\n':
        raise IntegrityError(f"{key}: not a sealed document ({len(data)} bytes); run `syckpt verify`")
    text, found = data[8:head], data[cut:-3].decode("latin-1")
    actual = digest_of(text)
    if actual != found:
        raise IntegrityError(f"{key}: damaged: its seal is {found[:16]}.., its bytes digest to {actual[:16]}..")
    if seal is not None and seal != actual:
        raise IntegrityError(f"{key}: another document than expected: seal {actual[:16]}.., expected {seal[:16]}..")
    try:
        body = parse(text)
    except (ValueError, RecursionError) as exc:
        raise IntegrityError(f"{key}: malformed: {exc}") from exc
    if not isinstance(body, dict) or body.get("kind") != kind:
        found_kind = body.get("kind") if isinstance(body, dict) else type(body).__name__
        raise IntegrityError(f"{key}: expected a {kind}, found {found_kind!r}")
    if body.get("version") != 1 or type(body["version"]) is not int:
        raise FormatError(f"{key}: {kind} version {body.get('version')!r}; this syckpt reads version 1: upgrade it")
    return body, actual
