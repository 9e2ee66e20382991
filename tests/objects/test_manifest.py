"""Manifests: content alone, read without trust."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syckpt.errors import FormatError, IntegrityError, SyckptError
from syckpt.objects import canonical, nodes
from syckpt.objects.box import Box
from syckpt.objects.dtypes import DTYPES
from syckpt.objects.manifest import Alike, Entry, Manifest

path_keys = st.text(max_size=5) | st.integers(-5, 5) | st.builds(lambda text: {"key": text}, st.text(max_size=5))
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    shape = draw(shapes)
    box = None
    if draw(st.booleans()):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        box = Box(offsets, tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)))
    path = tuple(draw(st.lists(path_keys, min_size=1, max_size=4)))
    return Entry(path, draw(st.sampled_from(sorted(DTYPES))), shape, box, draw(st.binary(min_size=32, max_size=32)))


manifests = st.builds(
    Manifest,
    rank=st.integers(0, 3),
    world_size=st.integers(1, 4),
    # Entries of one path are boxes of one tensor, or they are refused.
    entries=st.lists(entries(), max_size=6, unique_by=lambda entry: repr(entry.path)).map(tuple),
    items=st.dictionaries(st.text(max_size=3), st.none() | st.integers(0, 9)),
    rng=st.none(),
)


@given(manifests)
def test_a_manifest_comes_back_through_its_body(manifest):
    body = canonical.loads(canonical.dumps(manifest.to_body()))
    assert Manifest.from_body(body, where="m") == manifest


ENTRY = Entry(("model", 0, {"key": "null"}), "bfloat16", (4, 6), Box((1, 2), (3, 4)), bytes(range(32)))
WHOLE = Entry(("model", "b"), "float64", (5,), None, bytes(32))


def test_the_body_is_columns_and_neither_place_nor_time():
    assert Manifest(1, 2, (ENTRY, WHOLE), {"model": {"dict": []}}, None).to_body() == {
        "kind": "manifest",
        "version": 1,
        "rank": 1,
        "world_size": 2,
        "tensors": {
            "path": [["model", 0, {"key": "null"}], ["model", "b"]],
            "dtype": ["bfloat16", "float64"],
            "shape": [[4, 6], [5]],
            "box": [[[1, 2], [3, 4]], None],
            "address": ["AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"],
        },
        "items": {"model": {"dict": []}},
        "rng": None,
    }
    assert (ENTRY.sizes, ENTRY.nbytes, WHOLE.sizes, WHOLE.nbytes) == ((3, 4), 24, (5,), 40)


def test_distinct_addresses_are_counted_by_first_appearance():
    a, b = bytes(32), bytes([1]) * 32
    made = [Entry(("x", i), "int8", (1,), None, address) for i, address in enumerate((b, a, b, a, a))]
    assert Manifest(0, 1, tuple(made), {}, None).distinct() == [b, a]


def body_with(**changes: Any) -> dict[str, Any]:
    body = copy.deepcopy(Manifest(0, 1, (ENTRY, WHOLE), {}, None).to_body())
    for key, value in changes.items():
        table = body["tensors"] if key in body["tensors"] else body
        table[key] = value
    return body


HUGE = 2**53 - 1


@pytest.mark.parametrize(
    "changes",
    [
        {"path": [["a"]]},  # columns of different lengths
        {"path": [["a"], []]},
        {"path": [["a"], [None]]},
        {"path": [["a"], [True]]},
        {"path": [["a"], [1.5]]},
        {"path": [["a"], [{"key": 1}]]},
        {"path": [["a"], [{"other": "x"}]]},
        {"path": [["a"], "b"]},
        {"path": "ab"},
        {"shape": [[4, 6], [-1]]},
        {"shape": [[4, 6], [True]]},
        {"shape": [[4, 6], [1.0]]},
        {"shape": [[4, 6], [HUGE]]},
        {"shape": [[4, 6], [2**30, 2**30]]},
        {"shape": [[4, 6], [0, HUGE, HUGE]]},
        {"shape": [[4, 6], [1] * 65]},
        {"shape": [[4, 6], 5]},
        {"shape": [[4, 6], {"0": 5}]},
        {"box": [[[1, 2], [4, 4]], None]},  # beyond the shape
        {"box": [[[-1, 2], [3, 4]], None]},
        {"box": [[[1], [3]], None]},
        {"box": [[[1, 2]], None]},
        {"box": [7, None]},
        {"box": [{"a": 1, "b": 2}, None]},
        {"address": ["AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8", "AAAA"]},
        {"address": [None, "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"]},  # a box that nobody stores
        {"address": ["AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8", 0]},
        {"address": ["AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh9", "A" * 43]},  # a bit beyond the digest
        {"address": ["ä" * 43, "A" * 43]},
        {"rank": -1},
        {"rank": "0"},
        {"world_size": 0},
        {"items": []},
        {"tensors": []},
        {"tensors": {}},
    ],
)
def test_a_malformed_body_is_an_integrity_error_that_names_the_document(changes):
    with pytest.raises(IntegrityError, match=r"^where: "):
        Manifest.from_body(body_with(**changes), where="where")


@pytest.mark.parametrize("missing", ["rank", "world_size", "tensors", "items", "rng"])
def test_a_missing_field_is_named(missing):
    body = body_with()
    del body[missing]
    with pytest.raises(IntegrityError, match=f"no field '{missing}'"):
        Manifest.from_body(body, where="where")


@pytest.mark.parametrize("name", ["float33", "", None, 3, ["float32"]])
def test_an_unknown_dtype_says_upgrade(name):
    with pytest.raises(FormatError, match=r"unknown dtype .*upgrade"):
        Manifest.from_body(body_with(dtype=["bfloat16", name]), where="where")


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["path", "dtype", "shape", "box", "address", "rank", "world_size", "tensors", "items"]), junk, st.booleans())
def test_no_junk_in_any_field_raises_anything_but_a_syckpt_error(field, value, nested):
    changes = {field: [value, value] if nested else value}
    try:
        Manifest.from_body(body_with(**changes), where="where")
    except SyckptError:
        pass


LAYOUTS = {"model": ["model_{rank}.pt", "torch", {}], "weights": ["a/b.safetensors", "safetensors", {"metadata": {"k": "v"}}]}


def test_layouts_are_kept_and_a_manifest_without_any_does_not_mention_them():
    body = canonical.loads(canonical.dumps(Manifest(0, 1, (), {}, None, layouts=LAYOUTS).to_body()))
    assert body["layouts"] == LAYOUTS
    assert Manifest.from_body(body, where="m").layouts == LAYOUTS
    assert "layouts" not in Manifest(0, 1, (), {}, None).to_body()
    assert Manifest.from_body(body_with(), where="m").layouts == {}


@pytest.mark.parametrize(
    "layout",
    [
        None,
        [],
        ["x.pt", "torch"],
        ["x.pt", "torch", []],
        [3, "torch", {}],
        ["/etc/x", "torch", {}],
        ["../x", "torch", {}],
        ["a\x1bb", "torch", {}],
    ],
)
def test_a_malformed_layout_is_an_integrity_error(layout):
    with pytest.raises(IntegrityError, match="'layouts' is not one of items to"):
        Manifest.from_body(body_with(layouts={"model": layout}), where="m")


def test_many_tensors_are_read_quickly():
    made = tuple(Entry(("model", f"layer.{i}.weight"), "float32", (1024, 1024), None, i.to_bytes(32, "big")) for i in range(10_000))
    body = canonical.loads(canonical.dumps(Manifest(0, 1, made, {}, None).to_body()))
    started = time.process_time()
    assert Manifest.from_body(body, where="m").entries == made
    assert time.process_time() - started < 2


def test_entries_of_one_path_are_boxes_of_one_tensor():
    halves = [Entry(("a",), "uint8", (4,), Box((at,), (2,)), bytes([at]) * 32) for at in (0, 2)]
    good = Manifest(0, 1, tuple(halves), {"m": {"tensor": 0}}, None)
    assert Manifest.from_body(good.to_body(), where="m") == good
    for other in (Entry(("a",), "int8", (4,), halves[1].box, b"x" * 32), Entry(("a",), "uint8", (5,), halves[1].box, b"x" * 32)):
        with pytest.raises(IntegrityError, match="several tensors at"):
            Manifest.from_body(Manifest(0, 1, (halves[0], other), {}, None).to_body(), where="m")
    whole = Entry(("a",), "uint8", (4,), None, b"x" * 32)
    with pytest.raises(IntegrityError, match="several tensors at"):
        Manifest.from_body(Manifest(0, 1, (whole, whole), {}, None).to_body(), where="m")


@pytest.mark.parametrize(
    "node", [{"tensor": 1}, {"list": [{"ndarray": [5, "<f4", "C"]}]}, {"encoded": ["raw", 1]}, {"generator": ["torch", {"tensor": 1}]}]
)
def test_nodes_name_entries_of_their_manifest(node):
    entry = Entry(("a",), "uint8", (4,), None, b"x" * 32)
    with pytest.raises(IntegrityError, match=r"m: malformed node .*: names entry [15] of 1"):
        Manifest.from_body(Manifest(0, 1, (entry,), {"m": node}, None).to_body(), where="m")


def test_a_manifest_has_no_values_of_several_ranks():
    with pytest.raises(IntegrityError, match="values of several ranks"):
        Manifest.from_body(Manifest(0, 2, (), {"m": {"list": [{"perrank": [[0, 1], [1, 2]]}]}}, None).to_body(), where="m")


def test_nodes_nested_too_deep_are_refused_before_anything_recurses_into_them():
    node = None
    for _ in range(210):
        node = {"list": [node]}
    with pytest.raises(IntegrityError, match="nested deeper than 200"):
        Manifest.from_body(Manifest(0, 1, (), {"m": node}, None).to_body(), where="m")


def read_alike(alike: Alike, manifest: Manifest) -> Manifest:
    return Manifest.from_body(alike.parse(canonical.dumps(manifest.to_body())), where="m", alike=alike)


def test_what_the_next_manifest_says_again_is_looked_at_and_kept_once(monkeypatch):
    entry = Entry(("a",), "uint8", (4,), None, b"x" * 32)
    node = {"dict": [["a", {"tensor": 0}], ["n", 1]]}
    alike = Alike()

    def read(rank: int, items: dict[str, Any], rng: Any = None, entries: tuple[Entry, ...] = (entry,)) -> Manifest:
        return read_alike(alike, Manifest(rank, 9, entries, items, rng))

    looked_at: list[Any] = []
    check = nodes.check
    monkeypatch.setattr(nodes, "check", lambda node, *, entries: (looked_at.append(node), check(node, entries=entries)))
    first = read(0, {"m": node})
    second = read(1, {"m": node}, rng=5, entries=(entry._replace(dtype="int8", address=b"y" * 32),))
    assert looked_at == [None, node, 5]
    assert (second.rank, second.rng, second.entries[0][1:]) == (1, 5, ("int8", (4,), None, b"y" * 32))
    assert second.items is first.items
    assert second.entries[0].path is first.entries[0].path
    # To Python 1 and True are equal, and an entry may be there no more.
    assert read(2, {"m": {"dict": [["a", {"tensor": 0}], ["n", True]]}}).items["m"]["dict"][1][1] is True
    assert len(looked_at) == 5
    with pytest.raises(IntegrityError, match="malformed node tensor"):
        read(3, {"m": {"dict": [["a", {"tensor": False}], ["n", True]]}})
    with pytest.raises(IntegrityError, match="names entry 0 of 0"):
        read(4, {"m": node}, entries=())
    with pytest.raises(IntegrityError, match="malformed node list: 3"):
        read(5, {"m": node}, rng={"list": 3})
    with pytest.raises(IntegrityError, match="is not within"):
        read(6, {"m": {"dict": [["a", {"tensor": 0}], ["n", True]]}}, entries=(entry._replace(box=Box((3,), (2,))),))


@given(st.lists(manifests, min_size=2, max_size=3), st.lists(st.integers(0, 2), max_size=6), st.lists(entries(), max_size=3))
def test_manifests_that_are_read_one_after_the_other_are_what_they_are_alone(some, order, others):
    alike = Alike()
    for number in order:
        manifest = some[number % len(some)]
        # Now and then of the same paths and shapes, with other values.
        mine = tuple(
            entry._replace(address=other.address, dtype=other.dtype) for entry, other in zip(manifest.entries, others, strict=False)
        )
        manifest = replace(manifest, entries=(*mine, *manifest.entries[len(mine) :]), local=frozenset(range(len(mine))))
        read = read_alike(alike, manifest)
        assert read == manifest
        assert canonical.dumps(read.to_body()) == canonical.dumps(manifest.to_body())


HEAD = b'{"items":{"m":{"tensor":0}},'
MIDDLE = b'"kind":"manifest","rank":1,"rng":null,"tensors":{"address":["' + b"A" * 43 + b'"],"box":[null],"dtype":["uint8"]'
TAIL = b',"path":[["a"]],"shape":[[4]]},"version":1,"world_size":2}'


def known() -> Alike:
    """Return what was learnt from a manifest that begins with HEAD and ends with TAIL."""
    alike = Alike()
    read = read_alike(alike, Manifest(0, 2, (Entry(("a",), "uint8", (4,), None, bytes(32)),), {"m": {"tensor": 0}}, None))
    assert canonical.dumps(replace(read, rank=1).to_body()) == HEAD + MIDDLE + TAIL
    return alike


@pytest.mark.parametrize(
    "middle",
    [
        b"",
        b'"tensors":{"address":[]',
        MIDDLE.replace(b'"kind"', b'"items":{},"kind"'),  # a key twice
        MIDDLE.replace(b'"kind"', b'"a":0,"kind"'),  # keys not sorted
        MIDDLE.replace(b'"rank"', b'"u":{},"rank"'),
        MIDDLE.replace(b'"rank":1,"rng":null', b'"rng":null,"rank":1'),
        MIDDLE.replace(b'"tensors":{', b'"tensors":{},"tensors2":{'),  # other columns
        MIDDLE.replace(b'"tensors":{', b'"tensors":[{'),
        MIDDLE.replace(b'"dtype"', b'"path":[["b"]],"dtype"'),
        MIDDLE + b',"path":[["b"]]',
        MIDDLE + b',"q":0',
        MIDDLE + b"}",
        MIDDLE + b'},"u":{"v":0',
        MIDDLE + b',"e":{"f":0',
        MIDDLE + b',"e":"',
        MIDDLE + b',"e":[0',
        MIDDLE[:-1],
        MIDDLE + b",",
        MIDDLE + b" ",
        MIDDLE.replace(b'{"address":["' + b"A" * 43 + b'"],"box":[null],"dtype":["uint8"]', b"{"),
        MIDDLE.replace(b'"rank":1', b'"rank":9007199254740993'),
        MIDDLE.replace(b'"rank":1', b'"rank":01'),
        MIDDLE.replace(b'"rng":null', b'"rng":' + b"[" * 600 + b"]" * 600),
        MIDDLE.replace(b'"kind":"manifest",', b""),
        MIDDLE.replace(b'"rng":null', b'"rng":1.0'),
        MIDDLE.replace(b'"dtype":["uint8"]', b'"dtype":["uint8"],"local":[0]'),
    ],
)
def test_between_what_is_known_nothing_passes_that_would_not_pass_alone(middle):
    text = HEAD + middle + TAIL

    def outcome(parse: Callable[[bytes], Any]) -> Any:
        try:
            return canonical.dumps(parse(text))
        except ValueError:
            return "refused"

    assert outcome(known().parse) == outcome(canonical.loads_canonical)


def test_what_resharders_declared_stands_in_the_body_only_where_there_is_some():
    rows = {"table": [[["rows"], [8, 3], {"dtype": "float32"}, [[[2, 0], [2, 3]]], {"dict": []}]]}
    manifest = Manifest(1, 2, (WHOLE,), {}, None, sharding=rows)
    assert manifest.to_body()["sharding"] == rows
    assert Manifest.from_body(canonical.loads(canonical.dumps(manifest.to_body())), where="m") == manifest
    assert "sharding" not in Manifest(1, 2, (WHOLE,), {}, None).to_body()


@pytest.mark.parametrize("sharding", [[], {"table": {}}, {"table": [1]}, {"table": [[["rows"], [8], None, []]]}, None])
def test_a_malformed_declaration_is_damage(sharding):
    with pytest.raises(IntegrityError, match="'sharding' is not"):
        Manifest.from_body(body_with(sharding=sharding), where="m")


# --- structures --------------------------------------------------------------------------------------------------------------------


def of_rank(rank: int, *entries: Entry, items: dict[str, Any] | None = None, **fields: Any) -> Manifest:
    return Manifest(rank, 2, entries, {"m": {"list": [{"tensor": 0}, {"tensor": 1}]}, "n": 3} if items is None else items, None, **fields)


def part(name: str, box: Box | None, address: bytes = b"", shape: tuple[int, ...] = (4, 2)) -> Entry:
    return Entry(("m", name), "float32", shape, box, address)


def test_ranks_that_store_other_parts_of_one_state_have_one_structure() -> None:
    upper, lower, middle = Box((0, 0), (1, 2)), Box((3, 0), (1, 2)), Box((1, 0), (2, 2))
    stream = Entry(("<rng>",), "uint8", (8,), None, b"3" * 32)
    first = of_rank(0, part("a", upper, b"1" * 32), part("b", None), stream, local=frozenset({2}))
    second = of_rank(1, part("a", middle, b"4" * 32), part("b", None, b"5" * 32), part("a", lower, b"6" * 32), sharding={"n": []})
    assert first.structures() == second.structures()
    assert set(first.structures()) == {"m", "n"}


def test_another_value_key_tensor_or_file_is_another_structure_of_that_item() -> None:
    mine = of_rank(0, part("a", None), part("b", None)).structures()
    other = of_rank(1, part("a", None), part("b", None), items={"m": {"list": [{"tensor": 0}, {"tensor": 1}]}, "n": 3.0}).structures()
    assert (other["m"] == mine["m"], other["n"] == mine["n"]) == (True, False)
    moved = of_rank(1, part("a", None), part("b", None), layouts={"n": ["n.json", "json", {}]}).structures()
    assert (moved["m"] == mine["m"], moved["n"] == mine["n"]) == (True, False)
    for second in (part("c", None), part("b", None, shape=(4, 3)), Entry(("m", "b"), "int32", (4, 2), None, b"")):
        assert of_rank(1, part("a", None), second).structures()["m"] != mine["m"]
        assert of_rank(1, part("a", None), second).structures()["n"] == mine["n"]
    kept = of_rank(1, part("a", None), part("b", None), local=frozenset({1})).structures()
    assert (kept["m"] == mine["m"], kept["n"] == mine["n"]) == (False, True)


def test_what_one_item_has_more_does_not_change_another_item_behind_it() -> None:
    entries = (part("a", None), part("b", None))
    own = Entry(("early", "t"), "int8", (1,), None, b"")
    mine = of_rank(0, *entries).structures()["m"]
    items = {"early": {"tensor": 0}, "m": {"list": [{"tensor": 1}, {"tensor": 2}]}, "tie": {"ndarray": [2, "<f4", "C"]}}
    assert of_rank(1, own, *entries, items=items).structures()["m"] == mine
    items["m"] = {"list": [{"tensor": 2}, {"tensor": 1}]}
    assert of_rank(1, own, *entries, items=items).structures()["m"] != mine


# --- broadcast buffers -----------------------------------------------------------------------------------------------------------


def test_what_is_sent_from_rank_0_comes_back_and_only_if_there_is_any() -> None:
    made = of_rank(0, part("a", None), part("b", None), sent={"m": ["m/a", "m/b"]})
    assert made.to_body()["sent"] == {"m": ["m/a", "m/b"]}
    assert Manifest.from_body(made.to_body(), where="m") == made
    assert "sent" not in of_rank(0, part("a", None), part("b", None)).to_body()


@pytest.mark.parametrize("sent", [[], {"m": "m/a"}, {"m": [1]}, {"m": ["m/b", "m/a"]}, {"m": ["m/a", "m/a"]}])
def test_malformed_paths_of_what_is_sent_are_damage(sent: Any) -> None:
    with pytest.raises(IntegrityError, match="'sent' is not"):
        Manifest.from_body(body_with(sent=sent), where="m")
