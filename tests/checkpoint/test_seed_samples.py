"""The tutorials that this library is held to, as a user would type them: every call form, with names from plain `syckpt`, in one process.

Per-item configuration (items, layouts, formats, resharders, root-less managers), then single files. What is asked of several ranks is in
`tests/distributed/test_seed_samples_ranks.py`.
"""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import syckpt
from syckpt import (
    CheckpointManager,
    CheckpointMixin,
    CheckpointReader,
    CheckpointWriter,
    DistributedItemMetadata,
    DTensorResharder,
    ItemSpec,
    JsonSerialization,
    LayoutInfo,
    LoadPlan,
    NestedPath,
    RawSerialization,
    Resharder,
    ReshardingInfo,
    SafetensorsSerialization,
    SerializationFormat,
    ShardingMetadata,
    StateError,
    Storage,
    TorchSerialization,
    validate_checkpoint,
)
from syckpt.checkpoint.content import Content
from syckpt.checkpoint.tree import Tree
from syckpt.cli import main
from syckpt.repo import history
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.stores.base import parse_root

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "04_layouts.py"


class MyCustomDataloaderResharder(Resharder):
    """As a tutorial leaves it: there, and with nothing in it."""

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


class Loader:
    """A data loader as far as a checkpoint sees it."""

    def __init__(self, consumed: int = 0) -> None:
        self.consumed = consumed
        self.shards = [consumed, -consumed]

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed, "shards": list(self.shards)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed, self.shards = state["consumed"], state["shards"]


def parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    if isinstance(state, list):
        return [bits(value) for value in state]
    return (state.dtype, state.tolist()) if isinstance(state, torch.Tensor) else state


def tree(root: Path, rev: str = "HEAD") -> Tree:
    repository = Repository.open(parse_root(root))
    return Tree(Content(Reader(repository), history.resolve(repository, rev)))


def history_of(root: Path) -> list[str]:
    return [commit.id for commit in history.log(Repository.open(parse_root(root)))]


def files(root: Path) -> list[str]:
    return [file.path for file in tree(root).files() if not file.path.startswith("syckpt.")]


def the_example() -> CheckpointManager:
    return CheckpointManager(
        CheckpointManager.Config(
            items={
                "model": ItemSpec(requires_copy=True, resharder=DTensorResharder()),
                "optimizer": ItemSpec(requires_copy=True, resharder=DTensorResharder()),
                "dataloader": ItemSpec(requires_copy=False, resharder=MyCustomDataloaderResharder()),
                "misc_state": ItemSpec(requires_copy=False, layout=LayoutInfo("misc_state_{rank}.json", JsonSerialization())),
            },
        )
    )


# --- the whole example --------------------------------------------------------------


@pytest.mark.parametrize("as_path", [True, False])
def test_the_full_example_saves_payloads_and_restores_into_live_targets(as_path: bool, tmp_path: Path) -> None:
    checkpoint_id: Any = tmp_path / "run" / "step-7" if as_path else f"{tmp_path}/run/step-7"
    model, optimizer = parts(0)
    train(model, optimizer)
    dataloader, step = Loader(7), 7
    manager = the_example()
    manager.save(
        checkpoint_id,
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "dataloader": dataloader.state_dict(),
            "misc_state": {"step": step},
        },
    )
    saved = bits([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer)  # The loop goes on; what was saved stays.

    model, optimizer = parts(1)
    dataloader = Loader()
    memory = [tensor.data_ptr() for tensor in model.state_dict().values()]
    restored = manager.load(
        checkpoint_id,
        into={
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "dataloader": dataloader.state_dict(),
            "misc_state": {"step": 0},
        },
    )
    optimizer.load_state_dict(restored["optimizer"])
    dataloader.load_state_dict(restored["dataloader"])
    step = restored["misc_state"]["step"]
    manager.close()
    assert bits([model.state_dict(), optimizer.state_dict()]) == saved
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == memory
    assert (dataloader.consumed, dataloader.shards, step) == (7, [7, -7], 7)
    assert files(tmp_path / "run") == [
        "dataloader.json",
        "misc_state_0.json",
        "model.json",
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
    ]
    assert json.loads(tree(tmp_path / "run").read("misc_state_0.json")) == {"step": 7}


def test_bare_values_need_no_schema_and_one_item_may_be_overridden(tmp_path: Path) -> None:
    model, _ = parts(0)
    manager = CheckpointManager(CheckpointManager.Config(items={"dataloader": ItemSpec(requires_copy=False)}))
    manager.save(tmp_path / "a", {"model": model.state_dict(), "dataloader": Loader(3).state_dict(), "step": 5})
    other, _ = parts(1)
    found = manager.load(tmp_path / "a", into={"model": other.state_dict(), "step": 0})
    assert manager.load(tmp_path / "a")["dataloader"] == {"consumed": 3, "shards": [3, -3]}
    manager.close()
    assert (set(found), found["step"]) == ({"model", "step"}, 5)
    assert bits(other.state_dict()) == bits(model.state_dict())


# --- what a spec is --------------------------------------------------------------


def test_specs_and_layouts_are_dataclasses_with_these_fields_and_defaults() -> None:
    spec = ItemSpec()
    assert (spec.requires_copy, spec.layout, spec.resharder, spec.required) == (True, None, None, True)
    assert dataclasses.is_dataclass(ItemSpec)
    assert ItemSpec(False, LayoutInfo("a.pt", TorchSerialization()), DTensorResharder(), False).required is False
    layout = LayoutInfo(file_path="state_{rank}.pt", serialization_format=TorchSerialization())
    assert layout == LayoutInfo("state_{rank}.pt", TorchSerialization())
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.file_path = "b"  # type: ignore[misc]
    assert JsonSerialization() == JsonSerialization(cls=None) != JsonSerialization(dict)
    assert SafetensorsSerialization().metadata is None
    assert issubclass(MyCustomDataloaderResharder, Resharder)
    assert all(isinstance(kind, type) for kind in (LoadPlan, ReshardingInfo, SerializationFormat, ShardingMetadata))


def test_keys_are_letters_digits_hyphens_and_underscores(tmp_path: Path) -> None:
    with CheckpointManager() as manager:
        manager.save(tmp_path / "fine", {"model-1_B": 1}, wait=True)
        for key in ("model.pt", "a/b", "a b", "", "é", "a\n"):
            with pytest.raises(ValueError, match="cannot be an item's name"):
                manager.save(tmp_path / "x", {key: 1})
        assert manager.load(tmp_path / "fine") == {"model-1_B": 1}
        with pytest.raises(syckpt.NotFoundError):
            manager.load(tmp_path / "x")


def test_without_a_default_an_unlisted_key_raises(tmp_path: Path) -> None:
    with CheckpointManager(CheckpointManager.Config(items={"model": ItemSpec()}, default=None)) as manager:
        with pytest.raises(StateError, match=r"'epoch' is not listed"):
            manager.save(tmp_path / "a", {"model": 1, "epoch": 2})
        manager.save(tmp_path / "a", {"model": 1})
        assert manager.load(tmp_path / "a", into={"model": 0}) == {"model": 1}


def test_what_is_required_and_missing_fails_fast_and_what_is_optional_stays(tmp_path: Path) -> None:
    with CheckpointManager(CheckpointManager.Config(items={"ema": ItemSpec(required=False)})) as manager:
        manager.save(tmp_path / "a", {"model": torch.ones(2)})
        target = torch.zeros(2)
        found = manager.load(tmp_path / "a", into={"model": target, "ema": {"decay": 0.5}})
        assert (target.tolist(), found["ema"], manager.last_report.skipped) == ([1, 1], {"decay": 0.5}, ["ema (not required)"])
        with pytest.raises(StateError, match="1 missing from the commit: scheduler"):
            manager.load(tmp_path / "a", into={"model": torch.zeros(2), "scheduler": 0})


@pytest.mark.parametrize("requires_copy", [True, False])
def test_the_loop_may_go_on_changing_what_was_saved(requires_copy: bool, tmp_path: Path) -> None:
    weight = torch.zeros(50_000)
    with CheckpointManager(CheckpointManager.Config(items={"model": ItemSpec(requires_copy=requires_copy)})) as manager:
        manager.save(tmp_path / "a", {"model": {"w": weight}})
        if requires_copy:
            weight += 1
        assert manager.load(tmp_path / "a")["model"]["w"].count_nonzero() == 0


# --- layouts and formats --------------------------------------------------------------


def test_each_layout_is_the_file_that_it_names(tmp_path: Path) -> None:
    layouts = {
        "model": LayoutInfo("model_{rank}.pt", TorchSerialization()),
        "optimizer": LayoutInfo("optimizer_{rank}.pt", TorchSerialization()),
        "misc_state": LayoutInfo("rank_{rank}/misc_state.json", JsonSerialization()),
        "flat": LayoutInfo("model_state_{rank}.pt", TorchSerialization()),
        "fixed": LayoutInfo("nested/model.pt", TorchSerialization()),
        "encoded": LayoutInfo("payload.bin", RawSerialization()),
        "weights": LayoutInfo("model_state.safetensors", SafetensorsSerialization(metadata={"format_version": "1"})),
    }
    specs = {name: ItemSpec(requires_copy=name != "misc_state", layout=layout) for name, layout in layouts.items()}
    model, optimizer = parts(0)
    train(model, optimizer)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "misc_state": {"step": 3, "a": [None, True, "x", 1.5]},
        "flat": {"inner": [torch.ones(2), {"n": 1}]},
        "fixed": model.state_dict(),
        "encoded": json.dumps({"already": "encoded"}).encode(),
        "weights": {"block": {"w": torch.ones(2, 2).t(), "list": [torch.zeros(1), torch.ones(1)]}},
    }
    with CheckpointManager(CheckpointManager.Config(items=specs)) as manager:
        manager.save(tmp_path / "run" / "a", state)
        assert bits(manager.load(tmp_path / "run" / "a")) == bits(state)
    assert files(tmp_path / "run") == [
        "model_0.pt",
        "model_state.safetensors",
        "model_state_0.pt",
        "nested/model.pt",
        "optimizer_0.pt",
        "payload.bin",
        "rank_0/misc_state.json",
    ]
    out = tmp_path / "out"
    for path in files(tmp_path / "run"):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_bytes(tree(tmp_path / "run").read(path))
    assert bits(torch.load(out / "model_0.pt", weights_only=True)) == bits(model.state_dict())
    assert bits(torch.load(out / "optimizer_0.pt", weights_only=True)) == bits(optimizer.state_dict())
    assert bits(torch.load(out / "model_state_0.pt", weights_only=True)) == bits(state["flat"])
    assert (out / "rank_0" / "misc_state.json").read_text() == (
        '{\n  "a": [\n    null,\n    true,\n    "x",\n    1.5\n  ],\n  "step": 3\n}\n'
    )
    assert json.loads((out / "payload.bin").read_bytes()) == {"already": "encoded"}
    with safe_open(out / "model_state.safetensors", "pt") as file:
        assert (file.metadata(), sorted(file.keys())) == ({"format_version": "1"}, ["block.list.0", "block.list.1", "block.w"])
        assert file.get_tensor("block.w").tolist() == [[1, 1], [1, 1]]


@dataclasses.dataclass
class Counters:
    step: int
    note: str = "none"


def test_json_records_no_class_and_rebuilds_the_one_that_the_reader_names(tmp_path: Path) -> None:
    def manager(form: SerializationFormat) -> CheckpointManager:
        return CheckpointManager(CheckpointManager.Config(items={"counters": ItemSpec(layout=LayoutInfo("counters.json", form))}))

    with manager(JsonSerialization(cls=Counters)) as one:
        one.save(tmp_path / "a", {"counters": Counters(4)})
        assert one.load(tmp_path / "a") == {"counters": Counters(4)}
    with manager(JsonSerialization()) as other:
        assert other.load(tmp_path / "a") == {"counters": {"step": 4, "note": "none"}}


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (RawSerialization(), "text"),
        (SafetensorsSerialization(), {"w": torch.ones(1), "lr": 0.1}),
        (JsonSerialization(), {"w": torch.ones(1)}),
        (TorchSerialization(), {"f": lambda: 1}),
    ],
)
def test_what_a_format_cannot_write_is_a_value_error_when_it_is_saved(form: SerializationFormat, value: Any, tmp_path: Path) -> None:
    config = CheckpointManager.Config(items={"item": ItemSpec(layout=LayoutInfo("item.bin", form))})
    with CheckpointManager(tmp_path, config, save_on_exit=False) as manager:
        with pytest.raises(ValueError, match=r"^item"):
            manager.save("a", {"item": value})
        assert manager.log() == []


def test_safetensors_items_keep_what_their_target_shows_and_report_what_is_missing(tmp_path: Path) -> None:
    layout = LayoutInfo("w.safetensors", SafetensorsSerialization())
    with CheckpointManager(CheckpointManager.Config(items={"w": ItemSpec(layout=layout)})) as manager:
        manager.save(tmp_path / "a", {"w": {"a": {"x": torch.ones(2)}, "b": (torch.zeros(1), torch.ones(1))}})
        target = {"a": {"x": torch.zeros(2), "y": torch.full((1,), 9.0)}, "b": (torch.ones(1), torch.zeros(1))}
        with pytest.raises(StateError, match="1 missing from the commit: w/a/y"):
            manager.load(tmp_path / "a", into={"w": target})
        found = manager.load(tmp_path / "a", into={"w": target}, strict=False)["w"]
        assert (found["a"]["x"].tolist(), found["a"]["y"].tolist(), [t.tolist() for t in found["b"]]) == ([1, 1], [9], [[0], [1]])
        assert manager.last_report.missing == ["w/a/y"]


# --- single files --------------------------------------------------------------


class Transformer(CheckpointMixin, nn.Module):
    def __init__(self, vocab_size: int, dim: int, num_heads: int, num_layers: int, ffn_dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab_size, dim), nn.Parameter(torch.randn(max_seq_len, dim))
        layer = nn.TransformerEncoderLayer(dim, num_heads, ffn_dim, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)


def test_a_model_is_saved_validated_and_loaded_as_one_file(tmp_path: Path) -> None:
    sizes = {"vocab_size": 100, "dim": 16, "num_heads": 4, "num_layers": 2, "ffn_dim": 32, "max_seq_len": 8}
    model, again = Transformer(**sizes), Transformer(**sizes)
    path = f"{tmp_path}/model.ckpt"
    model.save_checkpoint(path)
    again.load_checkpoint(path)
    assert bits(again.state_dict()) == bits(model.state_dict())
    assert validate_checkpoint(path) == (True, [])
    ok, errors = validate_checkpoint(tmp_path / "other.ckpt")
    assert (ok, len(errors)) == (False, 1)
    data = bytearray(Path(path).read_bytes())
    data[-1] ^= 1
    Path(path).write_bytes(data)
    ok, errors = validate_checkpoint(path)
    assert (ok, len(errors)) == (False, 1)
    with pytest.raises(syckpt.IntegrityError):
        again.load_checkpoint(path)
    assert bits(again.state_dict()) == bits(model.state_dict())


def test_tensors_are_written_and_read_by_name(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "a.ckpt") as writer:
        writer.add("weight", torch.arange(6.0).view(2, 3))
        writer.add("ids", torch.tensor([1, 2], dtype=torch.uint16))
    with CheckpointReader(tmp_path / "a.ckpt") as reader:
        assert list(reader.keys()) == ["weight", "ids"]
        assert bits([reader["weight"], reader["ids"]]) == [(torch.float32, [[0, 1, 2], [3, 4, 5]]), (torch.uint16, [1, 2])]


def test_a_directory_of_checkpoints_and_one_of_them_are_validated(tmp_path: Path) -> None:
    with CheckpointManager() as manager:
        manager.save(tmp_path / "ckpts" / "step-1000", {"model": torch.ones(3)}, wait=True)
    assert validate_checkpoint(tmp_path / "ckpts") == (True, [])
    assert validate_checkpoint(f"{tmp_path}/ckpts/step-1000") == (True, [])
    assert validate_checkpoint(tmp_path / "ckpts", "HEAD") == (True, [])


# --- the example --------------------------------------------------------------


def test_the_example_goes_on_where_it_was_and_its_files_are_read_without_syckpt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--dir", str(tmp_path / "run")])
    for step in (20, 40):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        assert capsys.readouterr().out.splitlines() == [
            f"rank 0 of 1: step {step}, {8 * step} samples; see `syckpt -C {tmp_path}/run ls HEAD --files`",
        ]
    found = CliRunner().invoke(main, ["-C", f"{tmp_path}/run", "checkout", "step-40", "--to", f"{tmp_path}/files"])
    assert (found.exit_code, found.stdout) == (0, f"9 files of commit {history_of(tmp_path / 'run')[0]} in {tmp_path}/files\n")
    model = torch.load(tmp_path / "files" / "model_0.pt", weights_only=True)
    optimizer = torch.load(tmp_path / "files" / "optimizer_0.pt", weights_only=True)
    assert [model["0.weight"].shape, optimizer["state"][0]["step"].item()] == [(64, 32), 40]
    assert torch.equal(load_file(tmp_path / "files" / "release.safetensors")["net.0.weight"], model["0.weight"])
    assert json.loads((tmp_path / "files" / "misc_0.json").read_text()) == {"step": 40, "epoch": 4}
    assert (tmp_path / "files" / "vocabulary.txt").read_text() == "the\nquick\nbrown\nfox"
