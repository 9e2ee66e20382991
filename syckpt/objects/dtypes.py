"""Element types by torch's names: their size, how the codec sees them, what safetensors calls them."""

from __future__ import annotations

from dataclasses import dataclass

from syckpt.errors import FormatError

__all__ = ["DTYPES", "Dtype", "dtype"]


@dataclass(frozen=True)
class Dtype:
    """`itemsize` in bytes; `width`: bytes of the unsigned integers that the codec splits; `safetensors`: None if unknown there."""

    name: str
    itemsize: int
    width: int
    safetensors: str | None


def _table() -> dict[str, Dtype]:
    rows = [
        ("float64", 8, 8, "F64"),
        ("float32", 4, 4, "F32"),
        ("float16", 2, 2, "F16"),
        ("bfloat16", 2, 2, "BF16"),
        ("float8_e4m3fn", 1, 1, "F8_E4M3"),
        ("float8_e5m2", 1, 1, "F8_E5M2"),
        ("float8_e4m3fnuz", 1, 1, None),
        ("float8_e5m2fnuz", 1, 1, None),
        ("float8_e8m0fnu", 1, 1, None),
        ("float4_e2m1fn_x2", 1, 1, None),
        ("complex32", 4, 2, None),
        ("complex64", 8, 4, None),
        ("complex128", 16, 8, None),
        ("int64", 8, 8, "I64"),
        ("int32", 4, 4, "I32"),
        ("int16", 2, 2, "I16"),
        ("int8", 1, 1, "I8"),
        ("uint64", 8, 8, "U64"),
        ("uint32", 4, 4, "U32"),
        ("uint16", 2, 2, "U16"),
        ("uint8", 1, 1, "U8"),
        ("bool", 1, 1, "BOOL"),
        ("bits8", 1, 1, None),
        ("bits16", 2, 2, None),
        ("bits1x8", 1, 1, None),
        ("bits2x4", 1, 1, None),
        ("bits4x2", 1, 1, None),
        # torch gives each element of a sub-byte integer a byte.
        *((f"{sign}int{size}", 1, 1, None) for sign in ("", "u") for size in range(1, 8)),
    ]
    return {row[0]: Dtype(*row) for row in rows}


DTYPES = _table()


def dtype(name: str) -> Dtype:
    """Return the element type of that name.

    Raises: FormatError for a name that this version does not know.
    """
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise FormatError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}; upgrade syckpt")
    return found
