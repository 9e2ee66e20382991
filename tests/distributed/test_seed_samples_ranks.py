"""The tutorials' multi-rank forms on two gloo ranks: payloads and live targets, layouts a rank, a resharder that deals loader progress out
anew, callbacks, managers of paths. One launch; `seed_ranks.py` is what the ranks run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import syckpt
from syckpt.checkpoint.checkout import checkout
from syckpt.checkpoint.content import Content
from syckpt.checkpoint.tree import Tree
from syckpt.repo import history
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.stores.base import parse_root
from syckpt.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("seed_samples")

RANKS = Path(__file__).parent / "seed_ranks.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location(RANKS.stem, RANKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[RANKS.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A single process saves, two ranks load that, save, and do the rest; a single process loads what they saved."""
    folder = tmp_path_factory.mktemp("seeds")
    ranks = script()
    one = ranks.save(f"{folder}/run/one", 0, 1)
    argv = sys.argv
    ranks.example(f"{folder}/example")
    sys.argv = argv
    two = [result.value for result in run_ranks(RANKS, "on_two", str(folder), world_size=2, timeout_s=300)]
    return {"folder": folder, "one": one, "two": two, "back": ranks.restore(f"{folder}/run/two", 0, 1)}


def each(ran: dict[str, Any], *keys: str) -> list[Any]:
    found = ran["two"]
    for key in keys:
        found = [mine[key] for mine in found]
    return found


def test_the_full_example_goes_from_one_process_to_two_ranks_and_back(ran: dict[str, Any]) -> None:
    assert each(ran, "one to two", "state") == [ran["one"]] * 2
    assert each(ran, "two to two", "state") == each(ran, "saved")
    assert ran["back"]["state"] == ran["two"][0]["saved"]


def test_the_resharder_deals_loader_progress_out_anew_and_only_where_the_layout_changed(ran: dict[str, Any]) -> None:
    parts = [
        {"rank": 0, "ranks": 2, "consumed": 4, "queue": list(range(16))},
        {"rank": 1, "ranks": 2, "consumed": 3, "queue": list(range(16, 32))},
    ]
    assert each(ran, "one to two", "dataloader") == each(ran, "two to two", "dataloader") == parts
    assert ran["back"]["dataloader"] == {"rank": 0, "ranks": 1, "consumed": 7, "queue": list(range(32))}
    handled = {"dataloader": ["dataloader/consumed", "dataloader/queue", "dataloader/rank", "dataloader/ranks"], "unwritten": []}
    assert each(ran, "one to two", "handled") == [handled] * 2
    assert each(ran, "two to two", "handled") == [{}] * 2
    assert ran["back"]["handled"] == handled


def test_a_resharder_with_nothing_in_it_leaves_all_to_the_default_which_is_reported(ran: dict[str, Any]) -> None:
    note = "unwritten: its resharder handled nothing; it was loaded the default way"
    assert each(ran, "one to two", "unwritten") == [[{"consumed": 7}, [note]]] * 2
    assert each(ran, "two to two", "unwritten") == [[{"consumed": 7}, []], [{"consumed": 8}, []]]
    assert ran["back"]["unwritten"] == [{"consumed": 7}, [note]]  # rank 0's, of ranks that differ
    assert "unwritten/consumed" in ran["back"]["per_rank"]


def test_each_rank_reads_its_own_small_state(ran: dict[str, Any]) -> None:
    assert each(ran, "two to two", "misc_state") == [{"step": 7, "rank": 0}, {"step": 7, "rank": 1}]
    assert each(ran, "one to two", "misc_state") == [{"step": 7, "rank": 0}] * 2


def test_files_a_rank_hold_what_the_rank_had_and_others_the_whole(ran: dict[str, Any], tmp_path: Path) -> None:
    repository = Repository.open(parse_root(ran["folder"] / "run"))
    checkout(Tree(Content(Reader(repository), history.resolve(repository, "two"))), tmp_path / "files")
    out = tmp_path / "files"
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith("syckpt.")) == [
        "dataloader.json",
        "dataloader.safetensors",
        "misc_state_0.json",
        "misc_state_1.json",
        "model.json",
        "model.safetensors",
        "model_state_0.pt",
        "model_state_1.pt",
        "optimizer.json",
        "optimizer.safetensors",
        "unwritten.json",
        "weights_0.safetensors",
        "weights_1.safetensors",
        "whole.pt",
    ]
    model, _ = ran["two"][0]["saved"]
    flat = [torch.load(out / f"model_state_{rank}.pt", weights_only=True) for rank in range(2)]
    assert [part["w"].shape for part in flat] == [(3, 4), (3, 4)]
    assert torch.cat([part["w"] for part in flat]).tolist() == model["0.weight"]
    assert [(part["mine"].tolist(), part["same"].tolist()) for part in flat] == [([0, 0], [1, 1, 1]), ([1, 1], [1, 1, 1])]
    weights = [load_file(out / f"weights_{rank}.safetensors")["block.w"] for rank in range(2)]
    assert torch.cat(weights).tolist() == model["1.weight"]
    whole = torch.load(out / "whole.pt", weights_only=True)
    assert (whole["w"].tolist(), whole["step"]) == (model["0.weight"], 7)


def test_one_file_of_all_ranks_holds_full_tensors_and_plain_numbering(ran: dict[str, Any]) -> None:
    found = torch.load(ran["folder"] / "export/made/all.pt", weights_only=True)
    ranks = script()
    assert [ranks.plain(found["model"]), ranks.plain(found["optimizer"])] == ran["two"][0]["export"][:2]
    assert found["mine"] == {0: 0, 1: 1}
    assert all(mine[2][0] == "ConflictError" and "is not a regular file" in mine[2][1] for mine in each(ran, "export"))


def test_the_example_goes_on_with_two_ranks(ran: dict[str, Any]) -> None:
    first, second = (syckpt.load(ran["folder"] / "example", name) for name in ("step-20", "step-40"))
    assert first["loader"] == {"rank": 0, "ranks": 1, "consumed": 160}
    assert second["loader"] == {"rank": {0: 0, 1: 1}, "ranks": 2, "consumed": 240}
    assert (second["misc"]["step"], second["optimizer"]["state"][0]["step"].item()) == (40, 40)


# --- callbacks --------------------------------------------------------------


def test_callbacks_come_in_order_on_every_rank(ran: dict[str, Any]) -> None:
    assert [mine[0] for mine in each(ran, "callbacks", "told")] == [True, True], each(ran, "callbacks", "told")
    for kind, text in each(ran, "callbacks", "unequal prewarm"):
        assert kind == "CoordinationError"
        assert "'x' is not on rank(s) 0, 'y' is not on rank(s) 1" in text


@pytest.mark.parametrize("at", [0, 1])
def test_a_callback_that_raises_on_one_rank_gives_the_save_up_on_all_and_the_job_goes_on(at: int, ran: dict[str, Any]) -> None:
    mine, other = (ran["two"][rank]["callbacks"] for rank in (at, 1 - at))
    assert mine[f"fails on {at}"] == ["RuntimeError", f"not on rank {at}"]
    assert other[f"fails on {at}"][0] == "RankFailure"
    assert f"not on rank {at}" in other[f"fails on {at}"][1]
    assert [found["callbacks"][f"then, {at}"][0] for found in ran["two"]] == ["", ""]
    assert each(ran, "callbacks", "log") == [True, True]


def test_what_a_callback_raises_after_a_save_is_raised_by_the_next_one_on_all_ranks(ran: dict[str, Any]) -> None:
    zero, one = each(ran, "callbacks", "fails after")
    assert one == ["RuntimeError", "after, on rank 1"]
    assert (zero[0], "after, on rank 1" in zero[1]) == ("RankFailure", True)
    assert [kind for kind, _ in each(ran, "callbacks", "then, after")] == ["", ""]
    assert each(ran, "callbacks", "log") == [True, True]


# --- paths --------------------------------------------------------------


def test_managers_of_paths_agree_on_folder_and_name(ran: dict[str, Any]) -> None:
    for found in each(ran, "paths"):
        assert found["other folders"][0] == "CoordinationError", found
        assert found["other names"][0] == "CoordinationError", found
        assert found["one file"][0] == "StateError", found
        assert "ranks 0 and 1 both claim the file whole.pt" in found["one file"][1]
        assert found["goes on"] == ["", "x"]
        assert found["prewarm"] == ["", None]
        assert found["other layouts"][0] == "StateError"
        assert "ranks 0 and 1 save item 'n' under other layouts (n_{rank}.json as json; n.json as json)" in found["other layouts"][1]
        assert found["without it"] == ["", "a"]


def test_a_skipped_save_is_none_on_all_ranks_and_leaves_no_name(ran: dict[str, Any]) -> None:
    skipped = each(ran, "paths", "skipped")
    assert skipped[0] == skipped[1]
    assert not any(skipped[0][:2])
    for kept in each(ran, "paths", "kept"):
        assert [found == ["", float(n)] for n, found in enumerate(kept)] == [not none for none in skipped[0]]
        assert {found[0] for found, none in zip(kept, skipped[0], strict=True) if none} <= {"NotFoundError"}
