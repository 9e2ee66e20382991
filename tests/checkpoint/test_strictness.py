"""A load is checked whole before the first tensor is touched, one error lists everything, and the report is there in every case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import syckpt
from syckpt import CheckpointManager
from syckpt.checkpoint.loader import LoadReport, read
from syckpt.checkpoint.source import Source
from syckpt.repo import history
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.stores.base import parse_root


def state(value: float) -> dict[str, Any]:
    return {
        "first": torch.full((3, 2), value),
        "half": torch.full((2,), value, dtype=torch.float16),
        "ints": torch.full((2,), int(value)),
        "list": [torch.full((2,), value), {"deep": torch.full((1,), value)}],
        "array": np.full(3, value),
        "last": torch.full((4,), value),
        "name": f"of {value}",
    }


def tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor | np.ndarray):
        return ["meta" if isinstance(value, torch.Tensor) and value.is_meta else value.tolist()]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [found for item in items for found in tensors(item)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strictness")
    with CheckpointManager(path, save_on_exit=False) as ckpt:
        ckpt.save("ones", {"s": state(1.0), "t": state(1.0)})
    return path


@pytest.fixture(scope="module")
def ckpt(root: Path) -> Any:
    return CheckpointManager(root, auto_resume=False, save_on_exit=False)


def source(root: Path, rev: str = "ones") -> Source:
    repository = Repository.open(parse_root(root))
    return Source(Reader(repository), history.resolve(repository, rev))


# --- every kind of problem, each after a tensor that fits ------------------------------------------------------------------------

PROBLEMS: dict[str, tuple[Any, str]] = {
    "a shape that could be broadcast": ({"last": torch.zeros(1)}, r"s/last: expected float32 \[1\], found float32 \[4\]"),
    "a larger tensor": ({"last": torch.zeros(6)}, r"s/last: expected float32 \[6\], found float32 \[4\]"),
    "a smaller tensor": ({"last": torch.zeros(2)}, r"s/last: expected float32 \[2\], found float32 \[4\]"),
    "another number of dimensions": ({"last": torch.zeros(4, 1)}, r"s/last: expected float32 \[4, 1\], found float32 \[4\]"),
    "another dtype": ({"last": torch.zeros(4, dtype=torch.bfloat16)}, r"s/last: expected bfloat16 \[4\], found float32 \[4\]"),
    "a missing key": ({"more": torch.zeros(1)}, "1 missing from the commit: s/more"),
    "a missing key in a list": ({"list": [torch.zeros(2), {"deep": torch.zeros(1), "more": 1}]}, "missing from the commit: s/list/1/more"),
    "a shorter list": ({"list": [torch.zeros(2)]}, "s/list: expected a list of 1, found a list of 2"),
    "a longer list": ({"list": [torch.zeros(2), {"deep": torch.zeros(1)}, 0]}, "s/list: expected a list of 3, found a list of 2"),
    "an empty dict for a full one": ({"list": [torch.zeros(2), {}]}, "1 unexpected in the commit: s/list/1/deep"),
    "an array for a tensor": ({"last": np.zeros(4, np.float32)}, r"s/last: expected numpy float32 \[4\], found float32 \[4\]"),
    "a tensor for an array": (
        {"array": torch.zeros(3, dtype=torch.float64)},
        r"s/array: expected float64 \[3\], found numpy float64 \[3\]",
    ),
    "a tensor for a text": ({"name": torch.zeros(1)}, r"s/name: expected float32 \[1\], found str"),
    "a mapping for a tensor": ({"last": {"a": torch.zeros(4)}}, r"s/last: expected a dict of 1, found float32 \[4\]"),
    "a target that overlaps itself": ({"last": torch.zeros(1).expand(4)}, "s/last: the target cannot be filled: it overlaps itself"),
    "a target on the meta device": (
        {"last": torch.zeros(4, device="meta")},
        "s/last: the target cannot be filled: a meta tensor",
    ),
    "one tensor for two": ({"list": [(one := torch.zeros(2)), {"deep": one[:1]}], "half": torch.zeros(2)}, "s/half: expected float32"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_whatever_does_not_fit_leaves_every_target_alone_and_is_in_the_report(ckpt: CheckpointManager, name: str) -> None:
    change, why = PROBLEMS[name]
    target = {"s": {**state(0.0), **change}, "t": state(0.0)}
    before = tensors(target)
    kept = {key: value for key, value in target["s"].items() if key not in change}
    with pytest.raises(syckpt.StateError, match=why) as caught:
        ckpt.load("ones", into=target)
    assert "nothing was changed" in str(caught.value)
    assert tensors(target) == before
    loaded = ckpt.load("ones", into=target, strict=False)
    assert tensors(kept) == tensors({key: value for key, value in state(1.0).items() if key in kept})
    assert tensors(loaded["t"]) == tensors(state(1.0))
    report = ckpt.last_report
    assert report.missing + report.unexpected + report.mismatched != []
    assert report.skipped == sorted(report.mismatched)


def test_one_error_lists_the_problems_of_all_items(ckpt: CheckpointManager) -> None:
    target = {"s": {**state(0.0), "last": torch.zeros(5)}, "t": {**state(0.0), "half": torch.zeros(2, dtype=torch.int8)}, "u": {}}
    del target["t"]["first"]
    with pytest.raises(syckpt.StateError) as caught:
        ckpt.load("ones", into=target)
    for text in (
        "1 missing from the commit: u",
        "1 unexpected in the commit: t/first",
        "2 do not fit: s/last: expected float32 [5], found float32 [4]; t/half: expected int8 [2], found float16 [2]",
    ):
        assert text in str(caught.value)
    assert {number for text in map(str, tensors(target)) for number in text if number.isdigit()} == {"0"}


def test_overlapping_targets_are_filled_where_their_values_agree_and_refused_before_the_first_where_not(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.save("agree", {"s": {"a": torch.zeros(2), "left": whole[:8], "right": whole[4:]}})
        ckpt.save("differ", {"s": {"a": torch.zeros(2), "left": whole[:8], "right": whole[3:11].clone()}})
        buffer, other = torch.full((12,), -1.0), torch.full((2,), -1.0)
        target = {"s": {"a": other, "left": buffer[:8], "right": buffer[4:]}}
        with pytest.raises(syckpt.StateError, match="s/left: its target overlaps another one in memory, where the commit has"):
            ckpt.load("differ", into=target)
        assert (buffer.tolist(), other.tolist()) == ([-1.0] * 12, [-1.0] * 2)
        assert ckpt.load("differ", into=target, dry_run=True) == {}
        ckpt.load("agree", into=target)
        assert (buffer.tolist(), other.tolist()) == (whole.tolist(), [0.0, 0.0])


def test_a_blob_that_is_gone_is_found_before_anything_is_touched(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.save("first", {"s": {"a": torch.ones(2)}})
        second = ckpt.save("second", {"s": {"a": torch.ones(2), "b": torch.full((2,), 2.0)}}, wait=True)
        assert second is not None
        (tmp_path / f".syckpt/objects/{second.id}/r00000.safetensors").unlink()
        target = {"a": torch.zeros(2), "b": torch.zeros(2)}
        with pytest.raises(syckpt.IntegrityError, match=f"{second.id}/r00000.safetensors"):
            ckpt.load("second", into={"s": target})
        assert [value.tolist() for value in target.values()] == [[0.0, 0.0], [0.0, 0.0]]


def test_only_values_of_a_lesser_kind_are_cast_and_each_is_reported(ckpt: CheckpointManager) -> None:
    target = {
        **state(0.0),
        "half": torch.zeros(2),
        "ints": torch.zeros(2, dtype=torch.float16),
        "first": torch.zeros(3, 2, dtype=torch.bfloat16),
    }
    ckpt.load("ones", into={"s": target}, cast=True)
    assert [(target[name].dtype, target[name].tolist()) for name in ("half", "ints")] == [
        (torch.float32, [1.0, 1.0]),
        (torch.float16, [1.0, 1.0]),
    ]
    assert sorted(ckpt.last_report.cast) == ["s/first: float32 to bfloat16", "s/half: float16 to float32", "s/ints: int64 to float16"]
    target = {**state(0.0), "first": torch.zeros(3, 2, dtype=torch.int32)}
    with pytest.raises(syckpt.StateError, match=r"s/first: expected int32 \[3, 2\], found float32 \[3, 2\]\n"):
        ckpt.load("ones", into={"s": target}, cast=True)
    assert tensors(target)[0] == [[0, 0]] * 3


def test_a_part_is_filled_whatever_the_rest_of_the_target_looks_like(ckpt: CheckpointManager) -> None:
    target = {**state(0.0), "last": torch.zeros(9), "more": torch.zeros(1)}
    loaded = ckpt.load("ones", into={"s": target}, partial=["s.list", "s.name"])["s"]
    assert tensors(target["list"]) == [[1.0, 1.0], [1.0]]
    assert (loaded["name"], tensors(target["first"]), loaded["last"] is target["last"]) == ("of 1.0", [[[0.0, 0.0]] * 3], True)
    report = ckpt.last_report
    assert (report.missing, report.unexpected, report.mismatched, report.skipped) == ([], [], [], [])
    with pytest.raises(syckpt.StateError, match=r"s/last: expected float32 \[9\], found float32 \[4\]"):
        ckpt.load("ones", into={"s": target}, partial=["s.l*"])


def test_a_dry_run_finds_the_same_problems_touches_nothing_and_reads_nothing(ckpt: CheckpointManager) -> None:
    target = {"s": state(0.0), "t": {**state(0.0), "last": torch.zeros(5)}}
    with pytest.raises(syckpt.StateError, match=r"t/last: expected float32 \[5\]"):
        ckpt.load("ones", into=target, dry_run=True)
    assert ckpt.load("ones", into=target, dry_run=True, strict=False) == {}
    assert (ckpt.last_report.skipped, ckpt.last_report.bytes_read) == (["t/last: expected float32 [5], found float32 [4]"], 0)
    assert tensors(target["s"]) == tensors(state(0.0))
    assert ckpt.load("ones", dry_run=True) == {}


def test_a_report_is_filled_also_by_a_load_that_fails_and_begins_anew_each_time(root: Path) -> None:
    report = LoadReport()
    target = {"s": {**state(0.0), "more": torch.zeros(1)}, "t": {**state(0.0), "last": torch.zeros(5)}}
    opened = source(root)
    for _ in range(2):
        with pytest.raises(syckpt.StateError):
            read(opened, target, report=report)
        assert (report.commit, report.missing, report.bytes_read) == (opened.commit.id, ["s/more"], 0)
        assert report.mismatched == ["t/last: expected float32 [5], found float32 [4]"]
    assert read(opened, {"s": state(0.0)}, report=report)[1] is report
    assert (report.missing, report.mismatched, report.bytes_read > 0) == ([], [], True)


def test_a_fresh_optimizers_state_dict_is_filled_in_what_comes_back_without_a_registered_one(tmp_path: Path) -> None:
    def parts(lr: float) -> tuple[nn.Linear, torch.optim.Adam]:
        net = nn.Linear(2, 1)
        return net, torch.optim.Adam(net.parameters(), lr=lr)

    net, optimizer = parts(0.5)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.save(payload={"optimizer": optimizer.state_dict()})
        fresh = parts(9.0)[1]
        template = fresh.state_dict()
        loaded = ckpt.load(into={"optimizer": template})["optimizer"]
        assert (template["state"], fresh.state) == ({}, {})
        assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]
        assert [value["exp_avg"].tolist() for value in loaded["state"].values()] == [[[pytest.approx(0.1)] * 2], [pytest.approx(0.1)]]
        # Not so where the state is there and differs in form.
        with pytest.raises(syckpt.StateError, match="optimizer/state/0/exp_avg"):
            ckpt.load(into={"optimizer": {**template, "state": {0: {"exp_avg": torch.zeros(3)}}}})


def test_an_optimizer_saved_by_number_is_loaded_beside_registered_items_and_one_saved_by_name_without_them(tmp_path: Path) -> None:
    def parts() -> tuple[nn.Linear, torch.optim.Adam]:
        net = nn.Linear(2, 1)
        return net, torch.optim.Adam(net.parameters(), lr=0.5)

    net, optimizer = parts()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    expected = [value["exp_avg"].tolist() for value in optimizer.state_dict()["state"].values()]
    with CheckpointManager(tmp_path, save_on_exit=False) as ckpt:
        ckpt.save("number", {"optimizer": optimizer.state_dict()})
        ckpt.model, ckpt.optimizer = net, optimizer
        ckpt.save("name")
        for rev in ("number", "name"):
            for live in (parts()[1], optimizer):
                loaded = ckpt.load(rev, into={"optimizer": live.state_dict()})["optimizer"]
                assert list(loaded["state"]) == [0, 1]
                assert [value["exp_avg"].tolist() for value in loaded["state"].values()] == expected
        ckpt.unregister("optimizer")
        other, fresh = parts()
        fresh.load_state_dict(ckpt.load("name", into={"optimizer": fresh.state_dict()})["optimizer"])
        assert [fresh.state[p]["exp_avg"].tolist() for p in other.parameters()] == expected


def test_the_managers_report_is_that_of_the_last_load_also_of_one_that_failed(ckpt: CheckpointManager) -> None:
    assert ckpt.load("ones", into={"s": state(0.0)}) != {}
    with pytest.raises(syckpt.StateError):
        ckpt.load("ones", into={"s": {**state(0.0), "more": torch.zeros(1)}})
    assert ckpt.last_report.missing == ["s/more"]
