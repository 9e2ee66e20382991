"""A commit as a tree of files: which files there are, and that they hold all that was saved, for every rank."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from syckpt import (
    ConflictError,
    IntegrityError,
    ItemSpec,
    JsonSerialization,
    LayoutInfo,
    NotFoundError,
    RawSerialization,
    SafetensorsSerialization,
    SerializationFormat,
    StateError,
    StoreError,
    TorchSerialization,
)
from syckpt.checkpoint.checkout import checkout, write_whole
from syckpt.checkpoint.content import Content
from syckpt.checkpoint.export import export, exported
from syckpt.checkpoint.paths import claim, refuse_collisions, refuse_differing
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.specs import Config
from syckpt.checkpoint.tree import Tree
from syckpt.objects import nodes
from syckpt.objects.entries import renumber
from syckpt.repo import history
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.state.flatten import unflatten
from syckpt.testing.commits import make_commit
from syckpt.testing.scenes import same

WEIGHT = torch.arange(10.0).reshape(5, 2)


class Reversed(SerializationFormat):
    name = "reversed"

    def encode(self, value: Any) -> bytes:
        return bytes(value)[::-1]

    def decode(self, data: bytes) -> Any:
        return data[::-1]


def config(**layouts: LayoutInfo) -> Config:
    return Config(items={name: ItemSpec(layout=layout) for name, layout in layouts.items()})


def tree_of(repository: Repository, rev: str = "HEAD") -> Tree:
    return Tree(Content(Reader(repository), history.resolve(repository, rev)))


def paths_of(tree: Tree) -> list[str]:
    return [file.path for file in tree.files()]


def value_of(tree: Tree, item: str) -> Any:
    """Put an item together from its two files, by what FORMAT.md says of them."""
    document = json.loads(tree.read(f"{item}.json"))
    stored = load_safetensors(tree.read(f"{item}.safetensors")) if f"{item}.safetensors" in paths_of(tree) else {}
    tensors = []
    for name, dtype, shape in document["tensors"]:
        tensors.append(stored[name].reshape(-1).view(torch.uint8).view(getattr(torch, dtype)).reshape(shape))
    return unflatten(document["value"], lambda index: tensors[index])


# --- items without a layout ------------------------------------------------------------------------------------------------------------


def test_an_item_without_a_layout_is_its_tensors_and_a_document_faithful_to_type(tmp_path: Path) -> None:
    state = {
        "model": {"w": WEIGHT, "a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), 3: torch.ones(1, dtype=torch.bfloat16)},
        "notes": {"t": (1, None), 3: "x", "nan": float("nan"), "s": {1}},
        "odd": [torch.ones(2, dtype=torch.complex128), np.arange(3, dtype=np.int16), torch.empty(0, 3), torch.tensor(2.5)],
        "one": torch.ones(2),
    }
    state["model"]["tied"] = state["model"]["w"]
    tree = tree_of(make_commit(tmp_path, state))
    assert paths_of(tree) == [
        "model.json",
        "model.safetensors",
        "notes.json",
        "odd.json",
        "odd.safetensors",
        "one.json",
        "one.safetensors",
        "syckpt.commit.json",
    ]
    assert set(load_safetensors(tree.read("model.safetensors"))) == {"w", "a.b", "a.b#2", "3"}
    assert set(load_safetensors(tree.read("one.safetensors"))) == {"one"}
    for item in ("model", "notes", "one"):
        assert same(value_of(tree, item), state[item])
    found = value_of(tree, "odd")
    assert same([found[0], found[2], found[3]], [state["odd"][0], state["odd"][2], state["odd"][3]])
    assert (found[1].dtype, found[1].tolist()) == (np.int16, [0, 1, 2])
    model = value_of(tree, "model")
    assert model["tied"] is model["w"]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([torch.float32, torch.bool, torch.bfloat16, torch.complex128]).map(lambda kind: torch.ones(2, 1).to(kind)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 2), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=15, deadline=None)
@given(VALUES, VALUES)
def test_any_value_can_be_put_together_from_its_files(first: Any, second: Any) -> None:
    with tempfile.TemporaryDirectory() as root:
        tree = tree_of(make_commit(root, {"a": first, "b": second}))
        assert same(value_of(tree, "a"), first)
        assert same(value_of(tree, "b"), second)


def test_a_tensor_of_two_items_has_in_each_file_the_name_that_it_has_there(tmp_path: Path) -> None:
    tree = tree_of(make_commit(tmp_path, {"ema": {"shadow": WEIGHT}, "model": {"w": WEIGHT}, "one": WEIGHT}))
    assert [set(load_safetensors(tree.read(f"{item}.safetensors"))) for item in ("ema", "model", "one")] == [{"shadow"}, {"w"}, {"one"}]


def test_sizes_that_are_told_are_those_of_the_files(tmp_path: Path) -> None:
    tree = tree_of(make_commit(tmp_path, {"model": {"w": WEIGHT, "h": torch.ones(3, dtype=torch.int8)}}))
    told = {file.path: file.nbytes for file in tree.files()}
    assert {path: nbytes is None or len(tree.read(path)) == nbytes for path, nbytes in told.items()} == dict.fromkeys(told, True)
    assert told["model.safetensors"] is not None


def test_the_commits_facts_are_a_file(tmp_path: Path) -> None:
    facts = json.loads(tree_of(make_commit(tmp_path, {"a": 1}, message="hello")).read("syckpt.commit.json"))
    assert (facts["id"], facts["message"], facts["step"]) == ("00000000-0000000100000000", "hello", 10)


def test_files_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    repository = make_commit(
        tmp_path, {"model": {"w": WEIGHT}, "m": {"w": WEIGHT, "x": 1.5}}, specs=config(m=LayoutInfo("m.pt", TorchSerialization()))
    )
    first, second = tree_of(repository), tree_of(repository)
    assert [first.read(path) for path in paths_of(first)] == [second.read(path) for path in paths_of(second)]


def test_a_file_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no file 'b\.json'; it has a\.json, syckpt\.commit\.json"):
        tree_of(make_commit(tmp_path, {"a": 1})).read("b.json")


# --- several ranks ----------------------------------------------------------------------------------------------------------------------


def two_ranks(root: Path, **layouts: LayoutInfo) -> Tree:
    states = [{"model": {"w": WEIGHT, "b": torch.full((2,), 7.0)}, "misc": {"rank": rank, "step": 3}} for rank in range(2)]
    rng = [{"torch": torch.full((4,), rank, dtype=torch.uint8)} for rank in range(2)]
    return tree_of(make_commit(root, *states, shards={"model/w": 0}, rng=rng, specs=config(**layouts)))


def test_a_file_of_all_ranks_holds_full_tensors(tmp_path: Path) -> None:
    assert same(value_of(two_ranks(tmp_path), "model"), {"w": WEIGHT, "b": torch.full((2,), 7.0)})


def test_where_ranks_differ_the_document_has_each(tmp_path: Path) -> None:
    document = json.loads(two_ranks(tmp_path).read("misc.json"))
    assert document["value"] == {"dict": [["rank", {"perrank": [[0, 0], [1, 1]]}], ["step", 3]]}


def test_tensors_that_ranks_kept_each_stand_side_by_side(tmp_path: Path) -> None:
    tree = tree_of(make_commit(tmp_path, {"m": {"b": torch.zeros(1)}}, {"m": {"b": torch.ones(1)}}))
    assert value_of(tree, "m") == {"b": {0: torch.zeros(1), 1: torch.ones(1)}}
    assert type(value_of(tree, "m")["b"]) is nodes.PerRank
    assert set(load_safetensors(tree.read("m.safetensors"))) == {"b.0", "b.1"}


def test_random_streams_are_a_file_for_each_rank(tmp_path: Path) -> None:
    tree = two_ranks(tmp_path)
    assert [path for path in paths_of(tree) if "rng" in path] == [
        f"syckpt.rng.{rank}.{end}" for rank in (0, 1) for end in ("json", "safetensors")
    ]
    assert value_of(tree, "syckpt.rng.1")["torch"].tolist() == [1] * 4


@pytest.mark.parametrize("form", [TorchSerialization(), SafetensorsSerialization()])
def test_a_file_of_one_rank_holds_what_that_rank_had(form: SerializationFormat, tmp_path: Path) -> None:
    tree = two_ranks(tmp_path, model=LayoutInfo("rank_{rank}/model.bin", form), misc=LayoutInfo("misc_{rank}.json", JsonSerialization()))
    assert [json.loads(tree.read(f"misc_{rank}.json")) for rank in range(2)] == [{"rank": 0, "step": 3}, {"rank": 1, "step": 3}]
    read = load_safetensors if form == SafetensorsSerialization() else lambda data: torch.load(io.BytesIO(data), weights_only=True)
    for rank, part in enumerate((WEIGHT[:3], WEIGHT[3:])):
        found = read(tree.read(f"rank_{rank}/model.bin"))
        assert same(dict(sorted(found.items())), {"b": torch.full((2,), 7.0), "w": part})
    assert [(file.rank, file.item) for file in tree.files() if file.path == "rank_1/model.bin"] == [(1, "model")]


def test_a_rank_that_stored_nothing_of_a_tensor_in_parts_shows_all_of_it(tmp_path: Path) -> None:
    layout = config(model=LayoutInfo("model_{rank}.pt", TorchSerialization()))
    tree = tree_of(make_commit(tmp_path, *[{"model": {"w": WEIGHT[:2]}}] * 3, shards={"model/w": 0}, specs=layout))
    found = [torch.load(io.BytesIO(tree.read(f"model_{rank}.pt")), weights_only=True)["w"] for rank in range(3)]
    assert [value.tolist() for value in found] == [[[0.0, 1.0]], [[2.0, 3.0]], [[0.0, 1.0], [2.0, 3.0]]]


def test_a_file_without_rank_holds_the_union_of_keys_and_full_tensors(tmp_path: Path) -> None:
    states = [{"model": {"w": WEIGHT, f"stage{rank}": torch.full((1,), float(rank))}} for rank in range(2)]
    layout = config(model=LayoutInfo("model.pt", TorchSerialization()))
    tree = tree_of(make_commit(tmp_path, *states, shards={"model/w": 1}, specs=layout))
    found = torch.load(io.BytesIO(tree.read("model.pt")), weights_only=True)
    assert same(found, {"w": WEIGHT, "stage0": torch.zeros(1), "stage1": torch.ones(1)})


def test_a_file_that_two_ranks_would_fill_differently_names_both(tmp_path: Path) -> None:
    tree = two_ranks(tmp_path, misc=LayoutInfo("misc.json", JsonSerialization()))
    assert "misc.json" in paths_of(tree)
    with pytest.raises(StateError, match=r"misc\.json: misc/rank differs between ranks 0 and 1.*put \{rank\} into its path"):
        tree.read("misc.json")


def test_ranks_that_claim_one_file_with_other_values_are_refused() -> None:
    files = {"misc": "misc.json", "model": "model.pt"}
    first = claim({"misc": {"dict": [["step", 3], ["t", {"tensor": 4}]]}, "free": 1}, files.get)
    same_content = claim({"misc": {"dict": [["step", 3], ["t", {"tensor": 9}]]}, "free": 2}, files.get)
    other = claim({"misc": {"dict": [["step", 4], ["mine", 1]]}}, files.get)
    refuse_differing([first, same_content], [{}, {}])
    refuse_differing([first, claim({"misc": {"dict": [["mine", 1]]}}, files.get)], [{}, {}])
    with pytest.raises(StateError, match=r"ranks 0 and 2 both claim the file misc\.json, with values of misc/step that differ.*\{rank\}"):
        refuse_differing([first, same_content, other], [{}, {}, {}])
    with pytest.raises(StateError, match=r"ranks 0 and 1 both claim the file misc\.json, with values of misc/t"):
        refuse_differing([first, same_content], [{"misc/t": "a"}, {"misc/t": "b"}])
    refuse_differing([first, same_content], [{"misc2/t": "a"}, {"misc2/t": "b"}])


# --- items with a layout ---------------------------------------------------------------------------------------------------------------


def test_each_format_makes_its_file(tmp_path: Path) -> None:
    layouts = config(
        model=LayoutInfo("a/model.pt", TorchSerialization()),
        weights=LayoutInfo("weights.safetensors", SafetensorsSerialization({"format_version": "1"})),
        misc=LayoutInfo("misc.json", JsonSerialization()),
        raw=LayoutInfo("raw.bin", RawSerialization()),
        own=LayoutInfo("own.txt", Reversed()),
    )
    state = {
        "model": {"w": WEIGHT, "n": np.arange(2), "lr": 0.5},
        "weights": {"net": {"w": WEIGHT}, "list": [torch.ones(1)]},
        "misc": {"step": 3, "names": ["ä"]},
        "raw": b"\0raw",
        "own": b"abc",
    }
    tree = tree_of(make_commit(tmp_path, state, specs=layouts))
    model = torch.load(io.BytesIO(tree.read("a/model.pt")), weights_only=True)
    assert same(model, {"w": WEIGHT, "n": torch.arange(2), "lr": 0.5})
    weights = load_safetensors(tree.read("weights.safetensors"))
    assert {name: value.tolist() for name, value in weights.items()} == {"net.w": WEIGHT.tolist(), "list.0": [1.0]}
    assert b'"__metadata__":{"format_version":"1"}' in tree.read("weights.safetensors")
    assert tree.read("misc.json") == b'{\n  "names": [\n    "\\u00e4"\n  ],\n  "step": 3\n}\n'
    assert (tree.read("raw.bin"), tree.read("own.txt")) == (b"\0raw", b"cba")
    assert {file.item: file.form for file in tree.files()} == {
        "model": "torch",
        "weights": "safetensors",
        "misc": "json",
        "raw": "raw",
        "own": "reversed",
        None: "json",
    }


@pytest.mark.parametrize("other", ["a.json", "a.json/b", "dir", "dir/x", "syckpt.commit.json", "syckpt.rng.1.json"])
def test_two_items_cannot_be_one_file_or_a_file_and_its_folder(other: str) -> None:
    layouts = {"c": ["dir/x", "raw", {}]} if other != "dir/x" else {"c": ["dir", "raw", {}]}
    with pytest.raises(StateError, match="item 'b' cannot be the file"):
        refuse_collisions(["a", "c", "b"], {**layouts, "b": [other, "raw", {}]}, world_size=2)


def test_files_of_ranks_collide_by_their_real_paths() -> None:
    refuse_collisions(["a", "b"], {"a": ["x_{rank}", "raw", {}], "b": ["x_2", "raw", {}]}, world_size=2)
    with pytest.raises(StateError, match="item 'b' cannot be the file x_1: item 'a' stands there"):
        refuse_collisions(["a", "b"], {"a": ["x_{rank}", "raw", {}], "b": ["x_1", "raw", {}]}, world_size=2)


def test_damage_in_a_tensor_is_never_written_as_a_whole_file(tmp_path: Path) -> None:
    repository = make_commit(tmp_path, {"model": {"w": torch.randn(200, 200)}})
    blob = next((tmp_path / ".syckpt/objects").rglob("*.safetensors"))
    data = bytearray(blob.read_bytes())
    data[-100] ^= 1
    blob.unlink()
    blob.write_bytes(data)
    tree = tree_of(repository)
    with pytest.raises(IntegrityError):
        tree.read("model.safetensors")
    with pytest.raises(IntegrityError):
        checkout(tree, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".syckpt"]


@pytest.mark.parametrize(
    ("node", "layout"),
    [
        ({"list": [1]}, ["x", "safetensors", {}]),
        ({"tensor": 0}, ["x", "safetensors", {"metadata": 3}]),
        ({"tensor": 0}, ["x", "json", {}]),
        ({"bytes": "AA"}, ["x", "raw", {}]),
        ({"encoded": ["other", 0]}, ["x", "own", {}]),
        (1, ["x", "own", {}]),
    ],
)
def test_an_item_that_is_not_what_its_layout_says_fails_alone(node: Any, layout: list[Any], tmp_path: Path) -> None:
    repository = make_commit(tmp_path, {"m": {"w": torch.zeros(2, dtype=torch.uint8)}, "other": 1})
    content = Content(Reader(repository), history.resolve(repository, "HEAD"))
    content.items[0]["m"], content.layouts["m"] = node, layout
    tree = Tree(content)
    assert "x" in paths_of(tree)
    with pytest.raises((IntegrityError, StateError)):
        tree.read("x")
    assert json.loads(tree.read("other.json"))["value"] == 1


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../../b", "x\x1b[2J", "y" * 300])
def test_no_name_in_a_commit_leads_out_of_a_checkout(name: str, tmp_path: Path) -> None:
    repository = make_commit(tmp_path, {"m": 1})
    content = Content(Reader(repository), history.resolve(repository, "HEAD"))
    content.items[0][name] = 1
    with pytest.raises(IntegrityError, match="cannot be a file's path"):
        Tree(content)


# --- outside of the repository ----------------------------------------------------------------------------------------------------------


def test_checkout_writes_every_file(tmp_path: Path) -> None:
    tree = two_ranks(tmp_path, misc=LayoutInfo("rank_{rank}/misc.json", JsonSerialization()))
    seen: list[str] = []
    checkout(tree, tmp_path / "x/out", on_file=lambda file: seen.append(file.path))
    found = {
        path.relative_to(tmp_path / "x/out").as_posix(): path.read_bytes() for path in (tmp_path / "x/out").rglob("*") if path.is_file()
    }
    assert found == {path: tree.read(path) for path in paths_of(tree)}
    assert seen == paths_of(tree)
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["out"]


def test_checkout_takes_an_empty_directory_and_refuses_one_that_is_not(tmp_path: Path) -> None:
    tree = tree_of(make_commit(tmp_path, {"a": 1}))
    (tmp_path / "empty").mkdir()
    checkout(tree, tmp_path / "empty")
    assert (tmp_path / "empty/a.json").exists()
    (tmp_path / "file").write_text("mine")
    for taken in ("empty", "file"):
        with pytest.raises(ConflictError, match="is not an empty directory: nothing was written"):
            checkout(tree, tmp_path / taken)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_checkout_that_fails_leaves_nothing(tmp_path: Path) -> None:
    tree = two_ranks(tmp_path, misc=LayoutInfo("z.json", JsonSerialization()))
    with pytest.raises(StateError, match="misc/rank differs"):
        checkout(tree, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [".syckpt"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(out: Any) -> None:
        out.write(b"half")
        raise StateError("no")

    write_whole(tmp_path / "a/b", lambda out: out.write(b"old"))
    with pytest.raises(StateError, match="no"):
        write_whole(tmp_path / "a/b", fail)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == {"b": b"old"}
    (tmp_path / "like").write_bytes(b"")
    assert (tmp_path / "a/b").stat().st_mode == (tmp_path / "like").stat().st_mode


def test_a_file_below_a_file_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        write_whole(tmp_path / "file/x", lambda out: out.write(b""))


def test_all_tensors_in_one_file_with_the_structure_in_its_metadata(tmp_path: Path) -> None:
    tree = two_ranks(tmp_path)
    out = io.BytesIO()
    tree.write_tensors(out)
    found = load_safetensors(out.getvalue())
    assert {name: value.tolist() for name, value in found.items()} == {"model.w": WEIGHT.tolist(), "model.b": [7.0, 7.0]}
    size = int.from_bytes(out.getvalue()[:8], "little")
    facts = json.loads(json.loads(out.getvalue()[8 : 8 + size])["__metadata__"]["syckpt"])
    assert facts["items"]["model"]["tensors"] == [["model.w", "float32", [5, 2]], ["model.b", "float32", [2]]]
    assert facts["commit"]["step"] == 10


# --- export ------------------------------------------------------------------------------------------------------------------------------


def optimizer_state(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    optimizer = torch.optim.AdamW([{"params": [model.bias]}, {"params": [model.weight], "lr": 0.5}])  # type: ignore[list-item]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer, optimizer.state_dict()


def test_an_exported_file_loads_in_plain_torch(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer, state = optimizer_state(model)
    names = {0: "model.bias", 1: "model.weight"}
    saved = {
        "state": {names[key]: value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": [names[key] for key in group["params"]]} for group in state["param_groups"]],
    }
    repository = make_commit(
        tmp_path, {"model": model.state_dict(), "optimizer": saved, "n": np.arange(3)}, metric=0.5, config={"lr": (1, 2)}
    )
    export(Source(Reader(repository), history.resolve(repository, "HEAD")), tmp_path / "new/deep/file.pt")
    found = torch.load(tmp_path / "new/deep/file.pt", weights_only=True)
    again = torch.nn.Linear(3, 2)
    again.load_state_dict(found["model"])
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(found["optimizer"], state)
    other = torch.optim.AdamW([{"params": [again.bias]}, {"params": [again.weight], "lr": 0.1}])
    other.load_state_dict(found["optimizer"])
    assert same(other.state_dict(), optimizer.state_dict())
    assert found["syckpt"]["converted"] == ["n: numpy array as tensor"]
    facts = {key: found["syckpt"][key] for key in ("id", "step", "metric", "config", "world_size", "branch")}
    assert facts == {
        "id": "00000000-0000000100000000",
        "step": 10,
        "metric": 0.5,
        "config": {"lr": (1, 2)},
        "world_size": 1,
        "branch": "main",
    }


def test_an_exported_file_keeps_ties_and_has_full_tensors(tmp_path: Path) -> None:
    repository = make_commit(tmp_path, *[{"m": {"w": WEIGHT, "tied": WEIGHT, "r": rank}} for rank in range(2)], shards={"m/w": 0})
    export(Source(Reader(repository), history.resolve(repository, "HEAD")), tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(found["m"]["w"], WEIGHT)
    assert found["m"]["w"].data_ptr() == found["m"]["tied"].data_ptr()
    assert found["m"]["r"] == {0: 0, 1: 1}
    assert found["syckpt"]["converted"] == ["m/r: value that differs between ranks as dict by rank"]


def test_an_item_called_as_the_facts_are_is_refused(tmp_path: Path) -> None:
    repository = make_commit(tmp_path, {"syckpt": 1})
    with pytest.raises(StateError, match="an item is called 'syckpt'"):
        exported(Source(Reader(repository), history.resolve(repository, "HEAD")))


def test_numbers_of_entries_in_a_document_are_its_own() -> None:
    assert renumber({"list": [{"encoded": ["raw", 7]}, {"tensor": 2}]}, {7: 0, 2: 1}) == {"list": [{"encoded": ["raw", 0]}, {"tensor": 1}]}


def test_an_empty_directory_stays_the_one_that_it_is_and_a_link_a_link(tmp_path: Path) -> None:
    tree = two_ranks(tmp_path, misc=LayoutInfo("rank_{rank}/misc.json", JsonSerialization()))
    (tmp_path / "empty").mkdir(mode=0o750)
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "new").symlink_to("made")
    before = (tmp_path / "empty").stat()
    for name in ("link", "new"):
        checkout(tree, tmp_path / name)
        assert (tmp_path / name).is_symlink()
    after = (tmp_path / "empty").stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    for name in ("empty", "made"):
        folder = tmp_path / name
        assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == paths_of(tree)
    write_whole(tmp_path / "empty/file", lambda out: out.write(b"1"))
    (tmp_path / "to_file").symlink_to("empty/file")
    write_whole(tmp_path / "to_file", lambda out: out.write(b"2"))
    assert ((tmp_path / "to_file").is_symlink(), (tmp_path / "empty/file").read_bytes()) == (True, b"2")


def test_a_checkout_into_an_empty_directory_that_fails_leaves_it_empty(tmp_path: Path) -> None:
    tree = two_ranks(tmp_path, misc=LayoutInfo("z.json", JsonSerialization()))
    (tmp_path / "empty").mkdir()
    with pytest.raises(StateError, match="misc/rank differs"):
        checkout(tree, tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ConflictError, match="is not a regular file: nothing was written"):
            write_whole(tmp_path / name, lambda out: out.write(b""))
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_nothing_is_written_into_a_repository(tmp_path: Path) -> None:
    repository = make_commit(tmp_path, {"a": 1})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConflictError, match="inside of a repository"):
        checkout(tree_of(repository), tmp_path / ".syckpt/objects/out")
    with pytest.raises(ConflictError, match="inside of a repository"):
        write_whole(tmp_path / ".syckpt/a.pt", lambda out: out.write(b""))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("length", [240, 255])
def test_a_name_may_be_as_long_as_the_file_system_has_it(length: int, tmp_path: Path) -> None:
    write_whole(tmp_path / ("x" * length), lambda out: out.write(b"1"))
    checkout(tree_of(make_commit(tmp_path, {"a": 1})), tmp_path / ("y" * length))


def test_a_disk_that_is_full_is_a_store_error_also_within_torch_save(tmp_path: Path) -> None:
    make_commit(tmp_path / "run", {"a": torch.ones(20_000)})
    (tmp_path / "a.pt").write_bytes(b"old")
    code = (
        "import resource, sys; from click.testing import CliRunner; from syckpt.cli import main; import torch;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000));"
        "call = lambda *to: CliRunner().invoke(main, ['-C', sys.argv[1] + '/run', 'export', 'HEAD', *to]);"
        "found = [call(sys.argv[1] + '/a.pt'), call(sys.argv[1] + '/b', '--to', 'safetensors'), call(sys.argv[1] + '/c', '--to', 'dir')];"
        "print([(each.exit_code, 'cannot be written' in each.stderr) for each in found])"
    )
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert told.stdout == f"{[(7, True)] * 3}\n", told
    assert ((tmp_path / "a.pt").read_bytes(), sorted(os.listdir(tmp_path))) == (b"old", ["a.pt", "run"])


@pytest.mark.parametrize("path", ["other.json/x", "syckpt.commit.json/x/y"])
def test_a_file_that_is_also_a_directory_is_damage(path: str, tmp_path: Path) -> None:
    repository = make_commit(tmp_path, {"m": 1, "other": 1})
    content = Content(Reader(repository), history.resolve(repository, "HEAD"))
    content.layouts["m"] = [path, "json", {}]
    with pytest.raises(IntegrityError, match=f"is a file, and a directory of the file {path}"):
        Tree(content)


@pytest.mark.parametrize("path", ["/".join("a" * 33), ".syckpt/format.json", "a/.Syckpt", "a/.syckpt/b"])
def test_no_file_makes_a_checkout_look_like_a_repository(path: str) -> None:
    with pytest.raises(StateError, match=r"'\.syckpt'"):
        LayoutInfo(path, TorchSerialization())
