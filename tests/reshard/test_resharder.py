"""Resharders of the user's, end to end: what they declare, when they run, and that nothing of an item is lost on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import syckpt
from syckpt import CheckpointManager, DTensorResharder, ItemSpec, ShardingMetadata
from syckpt.errors import IntegrityError, StateError
from syckpt.objects import canonical
from syckpt.objects.box import Box
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.reshard.resharder import decode_sharding, encode_sharding, is_custom
from syckpt.stores.base import parse_root
from syckpt.testing.ranks import run_ranks

RANKS = Path(__file__).parent / "resharder_ranks.py"


def job(function: str, *args: Any, world_size: int) -> list[Any]:
    return [result.value for result in run_ranks(RANKS, function, *args, world_size=world_size, timeout_s=240)]


def test_boxes_are_given_as_pairs_or_boxes_and_taken_apart_as_pairs() -> None:
    metadata = ShardingMetadata([8, 3], torch.float32, [((0, 0), (4, 3)), Box((4, 0), (4, 3))])
    assert metadata.global_shape == (8, 3)
    assert metadata.boxes == (Box((0, 0), (4, 3)), Box((4, 0), (4, 3)))
    offsets, sizes = metadata.boxes[1]
    assert (offsets, sizes) == ((4, 0), (4, 3))
    assert metadata.extra == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((8,), "float32", [((5,), (4,))]), "are not all within the global shape"),
        (((8,), "float32", [((0, 0), (4, 1))]), "are not all within the global shape"),
        (((-1,), "float32"), "are not all within the global shape"),
        (((8,), "float32", [4]), r"boxes as \(offsets, sizes\)"),
        (((8,), 7), "expected torch's, its name, or None"),
        (((8,), None, (), 3), "expected a mapping"),
    ],
)
def test_metadata_that_means_nothing_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(StateError, match=message):
        ShardingMetadata(*arguments)


keys = st.text(max_size=3) | st.integers(-3, 3) | st.tuples(st.integers(0, 3)) | st.none()
extras = st.dictionaries(st.text(max_size=3), st.integers() | st.floats(allow_nan=False) | st.lists(st.text(max_size=3)), max_size=2)


@st.composite
def metadatas(draw: st.DrawFn) -> ShardingMetadata:
    shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    boxes = []
    for _ in range(draw(st.integers(0, 2))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        boxes.append((offsets, tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))))
    return ShardingMetadata(shape, draw(st.sampled_from([torch.bfloat16, "float32", None])), tuple(boxes), draw(extras))


@given(st.dictionaries(st.lists(keys, max_size=3).map(tuple), metadatas(), max_size=4))
def test_what_is_declared_comes_back_from_a_manifest_as_it_was(declared: dict[Any, ShardingMetadata]) -> None:
    rows = canonical.loads(canonical.dumps(encode_sharding("item", declared)))
    found = decode_sharding(rows, where="m")
    assert found == declared
    assert [[type(key) for key in path] for path in sorted(found, key=repr)] == [
        [type(k) for k in path] for path in sorted(declared, key=repr)
    ]


@pytest.mark.parametrize(
    "row", [[], [1, 2, 3, 4, 5], [["a"], [2], None, [[[0], [3]]], {"dict": []}], [["a"], [2], None, [], {"tensor": 0}]]
)
def test_a_malformed_declaration_on_disk_is_damage(row: list[Any]) -> None:
    with pytest.raises(IntegrityError, match="rank 3: malformed sharding"):
        decode_sharding([row], where="rank 3")


def test_extra_holds_no_tensors() -> None:
    declared = {("a",): ShardingMetadata((2,), "float32", (), {"w": torch.ones(2)})}
    with pytest.raises(StateError, match="item/a"):
        encode_sharding("item", declared)


def test_a_spec_takes_instances_of_resharders_only() -> None:
    assert not is_custom(DTensorResharder())
    assert not is_custom(None)
    ItemSpec(resharder=DTensorResharder())
    with pytest.raises(StateError, match="expected an instance of a Resharder"):
        ItemSpec(resharder=DTensorResharder)


def test_the_default_by_its_name_changes_nothing(tmp_path: Path) -> None:
    config = CheckpointManager.Config(items={"model": ItemSpec(resharder=DTensorResharder())})
    with CheckpointManager(tmp_path, config) as ckpt:
        ckpt.save("a", {"model": {"w": torch.ones(3)}}, wait=True)
        target = {"w": torch.zeros(3)}
        ckpt.load("a", into={"model": target})
    assert target["w"].tolist() == [1.0, 1.0, 1.0]
    repository = Repository.open(parse_root(tmp_path))
    (commit,) = [repository.read_commit(record.commit) for record in [repository.refs.head("names/a")] if record and record.commit]
    assert Reader(repository).snapshot(commit).manifest.sharding == {}


def test_values_on_their_way_to_another_dtype_are_copied_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syckpt.checkpoint.source._BETWEEN_NBYTES", 16)
    values = {str(number): torch.full((3,), float(number)) for number in range(5)}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save("a", {"w": values}, wait=True)
        target = {name: torch.zeros(3, dtype=torch.float64) for name in values}
        ckpt.load("a", into={"w": target}, cast=True)
        assert {name: value.tolist() for name, value in target.items()} == {name: value.tolist() for name, value in values.items()}
        assert sorted(ckpt.last_report.cast) == [f'w/"{number}": float32 to float64' for number in range(5)]


def test_the_full_example_of_the_tutorial_runs(tmp_path: Path) -> None:
    from syckpt import DistributedItemMetadata, JsonSerialization, LayoutInfo, NestedPath, Resharder, Storage

    class MyCustomDataloaderResharder(Resharder):
        def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[NestedPath, ShardingMetadata]: ...

        def load(
            self,
            source_path: Path,
            item_key: str,
            target_metadata: dict[NestedPath, ShardingMetadata],
            source_metadata: DistributedItemMetadata,
            target: Any,
            storage: Storage,
        ) -> list[NestedPath]: ...

    manager = CheckpointManager(
        CheckpointManager.Config(
            items={
                "model": ItemSpec(requires_copy=True, resharder=DTensorResharder()),
                "optimizer": ItemSpec(requires_copy=True, resharder=DTensorResharder()),
                "dataloader": ItemSpec(requires_copy=False, resharder=MyCustomDataloaderResharder()),
                "misc_state": ItemSpec(requires_copy=False, layout=LayoutInfo("misc_state_{rank}.json", JsonSerialization())),
            },
        )
    )
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    expected = model.weight.tolist()
    checkpoint_id = str(tmp_path / "run" / "step_10")
    dataloader = {"position": 7}
    manager.save(
        checkpoint_id,
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "dataloader": dataloader, "misc_state": {"step": 10}},
    )
    with torch.no_grad():
        model.weight.zero_()
    again = torch.optim.AdamW(model.parameters())
    restored = manager.load(
        checkpoint_id,
        into={"model": model.state_dict(), "optimizer": again.state_dict(), "dataloader": {"position": 0}, "misc_state": {"step": 0}},
    )
    again.load_state_dict(restored["optimizer"])
    manager.close()
    assert model.weight.tolist() == expected
    assert again.state_dict()["state"][0]["exp_avg"].tolist() == optimizer.state_dict()["state"][0]["exp_avg"].tolist()
    assert restored["dataloader"] == {"position": 7}
    assert restored["misc_state"]["step"] == 10


def test_loader_progress_and_plain_sharded_tensors_go_from_four_ranks_to_two_and_three(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    four = job("on_four", root, world_size=4)
    assert [each["same"] for each in four] == [[True, True, rank, 0, []] for rank in range(4)]
    assert [each["without"] for each in four] == [[True, rank] for rank in range(4)]
    assert all(each["moved"] for each in four)
    messages = {
        "overlap": ("StateError", "table/rows", "do not make the global tensor"),
        "hole": ("StateError", "table/rows", "no saved piece covers [8:9, 0:3]"),
        "shape": ("StateError", "table/rows", "declare one tensor alike"),
        "copies": ("StateError", "table/rows", "with values that differ"),
        "dtype": ("StateError", "table/rows", "declared dtype float64, the tensor has float32"),
        "no_mapping": ("StateError", "'table'", "expected a dict of paths"),
    }
    for name, (kind, *texts) in messages.items():
        found = [each["refused"][name] for each in four]
        assert [each[0] for each in found] == [kind] * 4, found
        assert all(text in each[1] for text in texts for each in found), found
    assert [each["refused"][name] for each in four for name in ("good", "good_copies")] == [["", ""]] * 8

    # A plain process reads the table whole, and what each rank kept, by rank.
    plain = syckpt.load(root, "four")
    assert torch.equal(plain["table"]["rows"], torch.arange(30, dtype=torch.float32).reshape(10, 3))
    assert dict(plain["table"]["mine"]) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert {rank: len(part) for rank, part in plain["dataloader"]["waiting"].items()} == {0: 8, 1: 6, 2: 5, 3: 4}

    two = job("on_two", root, world_size=2)
    slices = [
        [[0, [0, 0], [4, 3]], [2, [4, 0], [1, 3]]],
        [[2, [5, 0], [4, 3]], [3, [9, 0], [1, 3]]],
    ]
    for rank, each in enumerate(two):
        assert each["dry"] == [{"dataloader": [], "table": []}, [10, 3], [[[rank * 5, 0], [5, 3]]], slices[rank], 0.0, 0]
        handled = {"dataloader": ["dataloader/place", "dataloader/waiting"], "table": []}
        note = "table: its resharder handled nothing; it was loaded the default way"
        assert each["loaded"] == [True, True, rank, handled, ["table/mine"], ["table/rows"], [note]]
        assert each["epoch"] == 3
        assert each["columns"] == [True, rank]
        assert each["kept"] == [[-1.0], 7]
    assert two[1]["broken"] == ["KeyError", "'my own mistake'"]
    assert two[0]["broken"][0] == "RankFailure"
    assert "rank(s) 1" in two[0]["broken"][1]

    three = job("on_three", root, world_size=3)
    for rank, each in enumerate(three):
        assert each["rows"]
        assert each["mine"] == rank % 2
        assert each["handled"] == {"dataloader": ["dataloader/place", "dataloader/waiting"], "table": []}
        assert "my own mistake" in each["broken"][1]
    assert [each["broken"][0] for each in three] == ["RankFailure", "KeyError", "RankFailure"]

    taken = [sample for ranks in (four, two, three) for each in ranks for sample in each["taken"]]
    assert sorted(taken) == list(range(41))
    assert verify(Repository.open(parse_root(root))).ok
