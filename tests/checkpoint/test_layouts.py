"""Items' layouts and formats from save to load: presentation only, checked at save, read by the caller's own spec."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from syckpt import (
    CheckpointManager,
    ItemSpec,
    JsonSerialization,
    LayoutInfo,
    RawSerialization,
    SafetensorsSerialization,
    SerializationFormat,
    StateError,
    TorchSerialization,
    load,
)
from syckpt.checkpoint.content import Content
from syckpt.checkpoint.loader import LoadReport, read
from syckpt.checkpoint.share import Sharing
from syckpt.checkpoint.source import Source
from syckpt.checkpoint.specs import Config
from syckpt.checkpoint.tree import Tree
from syckpt.repo import history
from syckpt.repo.reader import Reader
from syckpt.repo.repository import Repository
from syckpt.state.flatten import flatten
from syckpt.stores.base import parse_root
from syckpt.testing.commits import make_commit
from syckpt.testing.scenes import same

WEIGHT = torch.arange(6.0).reshape(3, 2)


@dataclass
class Progress:
    step: int
    name: str = "run"


@dataclass
class Other:
    step: int
    name: str


class Odd:
    def __init__(self, value: int) -> None:
        self.value = value


class Tokens:
    """A value that only its format understands."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)


class Lines(SerializationFormat):
    name = "lines"

    def encode(self, value: Any) -> bytes:
        return "\n".join(value.texts).encode()

    def decode(self, data: bytes) -> Any:
        return Tokens(data.decode().split("\n"))


TRUSTED = TorchSerialization(weights_only=False)


def config(**layouts: LayoutInfo) -> Config:
    return Config(items={name: ItemSpec(layout=layout) for name, layout in layouts.items()})


def source_of(root: Path, specs: Config | None = None) -> Source:
    repository = Repository.open(parse_root(root))
    return Source(Reader(repository), history.resolve(repository, "HEAD"), config=specs)


def reading(root: Path, specs: Config | None = None, into: Any = None, **how: Any) -> tuple[dict[str, Any], LoadReport]:
    return read(source_of(root, specs), into, **how)


# --- presentation only --------------------------------------------------------------


def test_a_layout_changes_nothing_of_what_is_stored_and_loaded(tmp_path: Path) -> None:
    state = {"model": {"w": WEIGHT, "t": (1, None)}, "list": [WEIGHT * 2], "misc": {"step": 3}}
    layouts = config(
        model=LayoutInfo("model_{rank}.pt", TorchSerialization()),
        list=LayoutInfo("list.safetensors", SafetensorsSerialization()),
        misc=LayoutInfo("misc.json", JsonSerialization()),
    )
    manifests = []
    for name, specs in (("plain", None), ("shown", layouts)):
        repository = make_commit(tmp_path / name, state, specs=specs)
        manifests.append(repository.read_manifest(history.resolve(repository, "HEAD"), 0))
        assert same(load(tmp_path / name), {key: state[key] for key in sorted(state)})
    assert (manifests[0].entries, manifests[0].items) == (manifests[1].entries, manifests[1].items)
    assert manifests[1].layouts == {
        "list": ["list.safetensors", "safetensors", {}],
        "misc": ["misc.json", "json", {}],
        "model": ["model_{rank}.pt", "torch", {}],
    }
    assert "layouts" not in manifests[0].to_body()


def test_a_torch_item_fills_live_targets_and_shards_like_any_other(tmp_path: Path) -> None:
    specs = config(model=LayoutInfo("model_{rank}.pt", TorchSerialization()))
    make_commit(tmp_path, *[{"model": {"w": WEIGHT}}] * 2, shards={"model/w": 0}, specs=specs)
    target = torch.zeros(3, 2)
    found = load(tmp_path, into={"model": {"w": target}})
    assert found["model"]["w"] is target
    assert torch.equal(target, WEIGHT)


def test_bytes_of_a_custom_format_are_stored_once(tmp_path: Path) -> None:
    specs = config(tokens=LayoutInfo("tokens.txt", Lines()))
    repository = make_commit(tmp_path, {"tokens": Tokens(["a", "b"] * 5000)}, specs=specs)
    make_commit(tmp_path, {"tokens": Tokens(["a", "b"] * 5000)}, specs=specs)
    snapshot = Reader(repository).snapshot(history.resolve(repository, "HEAD"))
    (place,) = [place for _, _, place in snapshot.stored()]
    assert place.owner[0] == history.resolve(repository, "HEAD~1").id


# --- formats are the caller's --------------------------------------------------------------


def test_a_custom_format_works_from_save_to_load_without_touching_syckpt(tmp_path: Path) -> None:
    specs = config(tokens=LayoutInfo("tokens.txt", Lines()))
    make_commit(tmp_path, {"tokens": Tokens(["a", "b"])}, specs=specs)
    found, report = reading(tmp_path, specs)
    assert (type(found["tokens"]), found["tokens"].texts, report.notes) == (Tokens, ["a", "b"], [])


def test_without_its_format_a_value_is_its_bytes_and_the_report_says_so(tmp_path: Path) -> None:
    make_commit(tmp_path, {"tokens": Tokens(["a", "b"])}, specs=config(tokens=LayoutInfo("tokens.txt", Lines())))
    found, report = reading(tmp_path)
    assert found == {"tokens": b"a\nb"}
    assert report.notes == ["tokens: saved in the format 'lines', which the item's spec does not name: it is its bytes"]


def test_a_live_value_in_the_target_does_not_keep_a_custom_one_from_being_read(tmp_path: Path) -> None:
    specs = config(tokens=LayoutInfo("tokens.txt", Lines()), raw=LayoutInfo("raw.bin", RawSerialization()))
    make_commit(tmp_path, {"tokens": Tokens(["a"]), "raw": b"new"}, specs=specs)
    found, _ = reading(tmp_path, specs, {"tokens": Tokens(["old"]), "raw": b"old"})
    assert (found["tokens"].texts, found["raw"]) == (["a"], b"new")


def test_a_decoder_that_fails_names_the_item(tmp_path: Path) -> None:
    class Broken(Lines):
        def decode(self, data: bytes) -> Any:
            raise KeyError("version")

    make_commit(tmp_path, {"tokens": Tokens(["a"])}, specs=config(tokens=LayoutInfo("tokens.txt", Lines())))
    with pytest.raises(StateError, match="tokens: Broken cannot decode it: 'version'"):
        reading(tmp_path, config(tokens=LayoutInfo("tokens.txt", Broken())))


def test_json_becomes_the_class_that_the_caller_names_and_never_the_one_that_was_saved(tmp_path: Path) -> None:
    def named(cls: type | None) -> Config:
        return config(progress=LayoutInfo("progress.json", JsonSerialization(cls)))

    make_commit(tmp_path, {"progress": Progress(3)}, specs=named(Progress))
    assert reading(tmp_path, named(Progress))[0] == {"progress": Progress(3)}
    assert reading(tmp_path, named(Other))[0] == {"progress": Other(3, "run")}
    assert reading(tmp_path, named(None))[0] == reading(tmp_path)[0] == {"progress": {"step": 3, "name": "run"}}
    assert reading(tmp_path, named(Progress), {"progress": Progress(0)})[0] == {"progress": Progress(3)}
    assert json.loads(Tree(Content(*source_parts(tmp_path))).read("progress.json")) == {"step": 3, "name": "run"}


def source_parts(root: Path) -> tuple[Reader, Any]:
    repository = Repository.open(parse_root(root))
    return Reader(repository), history.resolve(repository, "HEAD")


def test_a_class_that_does_not_fit_is_told_before_any_tensor_is_touched(tmp_path: Path) -> None:
    make_commit(tmp_path, {"model": {"w": WEIGHT}, "progress": {"steps": 3}})
    target = torch.zeros(3, 2)
    specs = config(progress=LayoutInfo("progress.json", JsonSerialization(Progress)))
    with pytest.raises(StateError, match="progress: does not fit Progress: steps is not a field of it; step was not saved"):
        reading(tmp_path, specs, {"model": {"w": target}, "progress": None})
    with pytest.raises(StateError, match="model: holds tensors, and its spec says JsonSerialization"):
        reading(tmp_path, config(model=LayoutInfo("model.json", JsonSerialization(Progress))), {"model": None})
    assert torch.equal(target, torch.zeros(3, 2))


# --- pickle --------------------------------------------------------------


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pickled")
    state = {"odd": {"w": WEIGHT, "inner": [Odd(7)]}, "misc": 1}
    make_commit(root, state, specs=config(odd=LayoutInfo("odd.pt", TRUSTED)))
    return root


def test_pickled_values_are_read_only_by_a_caller_who_says_so(pickled: Path) -> None:
    found = load(pickled, config=config(odd=LayoutInfo("odd.pt", TRUSTED)))
    assert (found["odd"]["inner"][0].value, torch.equal(found["odd"]["w"], WEIGHT)) == (7, True)


@pytest.mark.parametrize("specs", [None, config(odd=LayoutInfo("odd.pt", TorchSerialization())), config(odd=LayoutInfo("odd.pt", Lines()))])
def test_any_other_load_names_the_path_and_the_fix_and_touches_nothing(specs: Config | None, pickled: Path) -> None:
    target = torch.zeros(3, 2)
    for into in (None, {"odd": {"w": target, "inner": [None]}}):
        with pytest.raises(StateError, match=r"odd/inner/0: was pickled.*TorchSerialization\(weights_only=False\)"):
            reading(pickled, specs, into)
    assert torch.equal(target, torch.zeros(3, 2))


def test_the_rest_of_a_commit_is_read_without_it(pickled: Path) -> None:
    assert load(pickled, items=["misc"]) == {"misc": 1}
    target = torch.zeros(3, 2)
    load(pickled, into={"odd": {"w": target, "inner": [None]}}, partial=["odd.w"])
    assert torch.equal(target, WEIGHT)
    found, report = reading(pickled, None, {"odd": {"w": torch.zeros(3, 2), "inner": [5]}, "misc": 0}, strict=False)
    assert same(found, {"odd": {"w": torch.zeros(3, 2), "inner": [5]}, "misc": 1})
    assert [text.partition(":")[0] for text in report.skipped] == ["odd/inner/0"]


# --- what need not be there --------------------------------------------------------------


def test_an_item_that_is_not_required_may_be_missing_or_not_fit_and_is_never_part_filled(tmp_path: Path) -> None:
    make_commit(tmp_path, {"model": {"w": WEIGHT}, "ema": {"w": WEIGHT, "b": torch.ones(2)}})
    specs = Config(items={"ema": ItemSpec(required=False), "late": ItemSpec(required=False)})
    targets = {"w": torch.zeros(3, 2), "b": torch.zeros(7)}
    model = torch.zeros(3, 2)
    found, report = reading(tmp_path, specs, {"model": {"w": model}, "ema": targets, "late": 5})
    assert torch.equal(model, WEIGHT)
    assert same(targets, {"w": torch.zeros(3, 2), "b": torch.zeros(7)})
    assert found["ema"] is targets
    assert found["late"] == 5
    assert report.skipped == ["ema/b: expected float32 [7], found float32 [2] (not required)", "late (not required)"]
    with pytest.raises(StateError, match="ema/b"):
        reading(tmp_path, None, {"ema": targets})
    with pytest.raises(StateError, match="1 missing from the commit: late"):
        reading(tmp_path, None, {"late": 5})


def test_an_item_that_is_not_required_and_fits_is_read(tmp_path: Path) -> None:
    make_commit(tmp_path, {"ema": {"w": WEIGHT}})
    target = torch.zeros(3, 2)
    _, report = reading(tmp_path, Config(items={"ema": ItemSpec(required=False)}), {"ema": {"w": target}})
    assert torch.equal(target, WEIGHT)
    assert report.skipped == []


# --- strict names --------------------------------------------------------------


def test_without_a_default_a_key_that_is_not_listed_raises(tmp_path: Path) -> None:
    make_commit(tmp_path, {"model": {"w": WEIGHT}, "misc": 1})
    specs = Config(items={"model": ItemSpec()}, default=None)
    with pytest.raises(StateError, match=r"item 'misc' is not listed in Config\.items and Config\.default is None; listed: model"):
        reading(tmp_path, specs, {"misc": 0})
    with pytest.raises(StateError, match="item 'misc' is not listed"):
        specs.formats(["misc"])
    # What nobody names is no one's mistake.
    assert set(reading(tmp_path, specs)[0]) == {"model", "misc"}


@pytest.mark.parametrize("name", ["a.b", "a/b", "", "a b", "ä"])
def test_names_of_items_are_plain(name: str) -> None:
    with pytest.raises(StateError, match="letters, digits, - and _ only"):
        Config(items={name: ItemSpec()})


def test_two_listed_items_cannot_be_one_file() -> None:
    with pytest.raises(StateError, match=r"item 'b' cannot be the file x\.pt: item 'a' stands there"):
        config(a=LayoutInfo("x.pt", TorchSerialization()), b=LayoutInfo("x.pt", JsonSerialization()))


def test_a_default_layout_for_two_items_is_told_when_both_are_saved() -> None:
    specs = Config(default=ItemSpec(layout=LayoutInfo("all.pt", TorchSerialization())))
    assert specs.layouts(["a"]) == {"a": ["all.pt", "torch", {}]}
    with pytest.raises(StateError, match="item 'b' cannot be the file"):
        specs.layouts(["a", "b"])


# --- one file of several ranks --------------------------------------------------------------


class _Pair:
    """Two ranks that agree, on threads of one process."""

    world_size = 2

    def __init__(self) -> None:
        self._told: dict[str, list[Any]] = {}
        self._barrier = threading.Barrier(2)

    def of(self, rank: int) -> Any:
        pair = self

        class Side:
            world_size = 2

            def __init__(self) -> None:
                self.rank = rank

            def agree(self, name: str, value: Any, decide: Callable[[Any], Any], *, at: str) -> Any:
                pair._told.setdefault(name, [None, None])[rank] = value
                pair._barrier.wait(60)
                return decide(pair._told[name])

        return Side()


def share(*states: Any, path: str) -> list[Exception | None]:
    """Share the item `misc` of two ranks; return what each raised."""
    pair, errors = _Pair(), [None, None]
    specs = config(misc=LayoutInfo(path, TorchSerialization()))
    flats = [flatten({"misc": state}) for state in states]
    sharing = [Sharing(pair.of(rank), one_file=specs.one_file) for rank in range(2)]
    facts = [sharing[rank].facts(flats[rank], "<rng>") for rank in range(2)]
    replicas = [sharing[rank].replicas(flats[rank], facts[rank], "<rng>") for rank in range(2)]
    same_replicas = replicas[0].summary == replicas[1].summary
    same_schema = facts[0].schema == facts[1].schema

    def run(rank: int) -> None:
        try:
            same: dict[str, Any] = {"same_schema": same_schema, "same_replicas": same_replicas, "tellers": [] if same_schema else [0, 1]}
            sharing[rank].share(flats[rank], facts[rank], replicas[rank], own="<rng>", at="", **same)
        except StateError as exc:
            errors[rank] = exc  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize(
    ("states", "where"),
    [
        (({"step": 1}, {"step": 2}), "misc/step"),
        (({"w": torch.zeros(2)}, {"w": torch.ones(2)}), "misc/w"),
        (({"t": (1, [2])}, {"t": (1, [3])}), "misc/t/1/0"),
    ],
)
def test_a_save_in_which_two_ranks_fill_one_file_differently_names_both(states: Any, where: str) -> None:
    for error in share(*states, path="misc.pt"):
        assert str(error).startswith(f"ranks 0 and 1 both claim the file misc.pt, with values of {where} that differ: put {{rank}} into")
    assert share(*states, path="misc_{rank}.pt") == [None, None]


@pytest.mark.parametrize("states", [({"w": WEIGHT, "n": 1}, {"w": WEIGHT, "n": 1}), ({"a": WEIGHT}, {"b": WEIGHT, "n": 1})])
def test_a_save_in_which_one_file_is_the_same_or_a_union_goes_through(states: Any) -> None:
    assert share(*states, path="misc.pt") == [None, None]


# --- through the manager --------------------------------------------------------------


def every_format() -> Config:
    return CheckpointManager.Config(
        items={
            "model": ItemSpec(layout=LayoutInfo("model_{rank}.pt", TorchSerialization())),
            "misc": ItemSpec(requires_copy=False, layout=LayoutInfo("rank_{rank}/misc.json", JsonSerialization())),
            "progress": ItemSpec(layout=LayoutInfo("progress.json", JsonSerialization(Progress))),
            "weights": ItemSpec(layout=LayoutInfo("weights.safetensors", SafetensorsSerialization({"v": "1"}))),
            "raw": ItemSpec(layout=LayoutInfo("raw.bin", RawSerialization())),
            "tokens": ItemSpec(layout=LayoutInfo("tokens.txt", Lines())),
            "odd": ItemSpec(layout=LayoutInfo("odd.pt", TRUSTED)),
            "ema": ItemSpec(required=False),
        }
    )


def test_every_format_goes_through_a_manager_and_is_resumed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with CheckpointManager(tmp_path, every_format()) as ckpt:
        ckpt.model, ckpt.misc, ckpt.progress, ckpt.raw = model, {"step": 3}, Progress(3), b"raw"
        ckpt.weights, ckpt.tokens, ckpt.odd, ckpt.ema = {"a": {"w": WEIGHT}}, Tokens(["a", "b"]), Odd(7), {"w": WEIGHT}
        ckpt.save(wait=True)
        found = ckpt.load("HEAD")
        assert (found["progress"], found["raw"], found["tokens"].texts, found["odd"].value) == (Progress(3), b"raw", ["a", "b"], 7)
    with CheckpointManager(tmp_path, every_format()) as ckpt:
        again = torch.nn.Linear(3, 2)
        ckpt.model, ckpt.misc, ckpt.progress, ckpt.raw = again, {"step": 0}, Progress(0), b""
        ckpt.weights, ckpt.tokens, ckpt.odd, ckpt.ema = {"a": {"w": WEIGHT * 0}}, Tokens([]), Odd(0), {"w": torch.zeros(9)}
        assert same(dict(again.state_dict()), dict(model.state_dict()))
        assert (ckpt.misc, ckpt.progress, ckpt.raw, ckpt.tokens.texts, ckpt.odd.value) == ({"step": 3}, Progress(3), b"raw", ["a", "b"], 7)
        assert torch.equal(ckpt.weights["a"]["w"], WEIGHT)
    tree = Tree(Content(*source_parts(tmp_path)))
    assert [file.path for file in tree.files() if not file.path.startswith("syckpt.")] == [
        "ema.json",
        "ema.safetensors",
        "model_0.pt",
        "odd.pt",
        "progress.json",
        "rank_0/misc.json",
        "raw.bin",
        "tokens.txt",
        "weights.safetensors",
    ]


def test_what_a_format_cannot_carry_raises_at_save_as_a_value_error(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        "raw": "text",
        "misc": {"rate": float("nan")},
        "weights": {"w": WEIGHT, "lr": 0.1},
        "progress": {"step": 3},
        "model": {"odd": Odd(1)},
    }
    with CheckpointManager(tmp_path, every_format()) as ckpt:
        for name, value in wrong.items():
            with pytest.raises(ValueError, match=f"{name}.*:"):
                ckpt.save(None, {name: value})
        assert ckpt.log() == []


def test_a_manager_without_a_default_takes_listed_names_only(tmp_path: Path) -> None:
    settings = CheckpointManager.Config(items={"model": ItemSpec()}, default=None)
    with CheckpointManager(tmp_path, settings, save_on_exit=False) as ckpt:
        with pytest.raises(StateError, match="item 'seen' is not listed"):
            ckpt.seen = 3
        with pytest.raises(StateError, match="item 'step' is not listed"):
            ckpt.save(None, {"model": {"w": WEIGHT}, "step": 3})
        ckpt.save("a", {"model": {"w": WEIGHT}}, wait=True)
        with pytest.raises(StateError, match="item 'step' is not listed"):
            ckpt.load("a", into={"step": 0})


def test_what_an_item_that_is_not_required_raises_while_it_takes_its_state_is_never_called_left_as_it_is(tmp_path: Path) -> None:
    class History:
        def __init__(self) -> None:
            self.seen: list[int] = [1]

        def state_dict(self) -> dict[str, list[int]]:
            return {"seen": list(self.seen)}

        def load_state_dict(self, state: dict[str, list[int]]) -> None:
            self.seen = []
            raise StateError("a history of another run")

    optional = CheckpointManager.Config(items={"history": ItemSpec(required=False)})
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.history = History()
        ckpt.save(wait=True)
    with CheckpointManager(tmp_path, optional, save_on_exit=False) as ckpt:
        history = History()
        with pytest.raises(StateError, match="a history of another run"):
            ckpt.history = history
        assert history.seen == []


def test_an_item_that_is_not_required_and_does_not_fit_is_left_alone_by_a_resume(tmp_path: Path) -> None:
    def parts(size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(size, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1 * size)

    with CheckpointManager(tmp_path) as ckpt:
        ckpt.ema, ckpt.opt = parts(3)
        ckpt.save(wait=True)
    optional = ItemSpec(required=False)
    with CheckpointManager(tmp_path, CheckpointManager.Config(items={"ema": optional, "opt": optional}), save_on_exit=False) as ckpt:
        ema, _ = parts(5)
        opt = torch.optim.AdamW(ema.parameters(), lr=0.5)
        before = ema.weight.detach().clone()
        ckpt.ema, ckpt.opt = ema, opt
        assert torch.equal(ema.weight, before)
        assert opt.param_groups[0]["lr"] == 0.5
        notes = ckpt.restore().notes
        assert notes[0] == "ema was left as it is: ema/weight: expected float32 [2, 5], found float32 [2, 3] (not required)"
        assert notes[1].startswith("opt was left as it is: item 'opt' is a AdamW with")
