"""HyperConfig: one value by three spellings, typed equality, and no change once frozen."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import math
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syckpt.errors import StateError
from syckpt.hyperparams.config import ConfigDiff, HyperConfig

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=10,
)
configs = st.dictionaries(st.text(max_size=4), values, max_size=4)


@given(configs)
def test_a_dict_comes_back_as_it_was(source: dict[str, Any]) -> None:
    config = HyperConfig.from_dict(source)
    assert repr(config.to_dict()) == repr(source)
    assert config == source
    assert HyperConfig(config.to_dict()) == config
    assert not config.diff(source)


@given(configs)
def test_copies_and_pickles_are_equal_and_hash_alike(source: dict[str, Any]) -> None:
    config = HyperConfig(source).freeze()
    for twin in (config.copy(), pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert twin == config
        assert twin.hash() == config.hash()
    assert pickle.loads(pickle.dumps(config)).frozen
    assert not config.copy().frozen


@given(configs, configs)
def test_two_configs_are_equal_exactly_if_nothing_differs(a: dict[str, Any], b: dict[str, Any]) -> None:
    ours, theirs = HyperConfig(a), HyperConfig(b)
    assert (ours == theirs) == (not ours.diff(theirs)) == (ours.hash() == theirs.hash())


@given(configs)
def test_every_flat_path_leads_to_its_value(source: dict[str, Any]) -> None:
    config = HyperConfig(source)
    for path, value in config.flatten().items():
        if path in config and not path.startswith("["):
            assert HyperConfig({"v": config[path]}) == {"v": value}


def test_items_dotted_paths_and_attributes_are_one_value() -> None:
    config = HyperConfig({"model": {"width": 64}})
    assert config["model"]["width"] == config["model.width"] == config.model.width == 64
    config["model.depth"] = 3
    config.model.heads = 4
    config["model"]["bias"] = False
    config["optimizer.name"] = "adamw"
    assert config == {"model": {"width": 64, "depth": 3, "heads": 4, "bias": False}, "optimizer": {"name": "adamw"}}
    del config["model.depth"]
    del config.model.heads
    del config["model"]["bias"]
    assert config.model == {"width": 64}
    assert "model.width" in config
    assert "model.depth" not in config
    assert 3 not in config
    assert list(config) == ["model", "optimizer"]
    assert len(config) == 2


def test_missing_values_are_reported_as_mappings_and_objects_do() -> None:
    config = HyperConfig({"a": {"b": 1}})
    with pytest.raises(KeyError):
        config["a.c"]
    with pytest.raises(KeyError):
        del config["c"]
    with pytest.raises(AttributeError, match="no hyperparameter 'c'"):
        config.a.c  # noqa: B018
    with pytest.raises(AttributeError):
        del config.c
    assert config.get("a.c", 5) == 5
    assert config.get("a.b") == 1


def test_a_key_with_a_dot_goes_before_the_path_of_that_spelling() -> None:
    config = HyperConfig({"a.b": 1, "a": {"b": 2, "x.y": 3}})
    assert config["a.b"] == 1
    assert config["a"]["b"] == 2
    assert config["a.x.y"] == 3
    config["a.b"] = 5
    assert config.to_dict() == {"a.b": 5, "a": {"b": 2, "x.y": 3}}
    assert config.flatten() == {'["a.b"]': 5, '["a","b"]': 2, "a.x.y": 3}


def test_flatten_keeps_lists_and_empty_sections_as_values() -> None:
    assert HyperConfig({"a": {"b": [1, 2], "c": {}}, "d": (3,)}).flatten() == {"a.b": [1, 2], "a.c": {}, "d": (3,)}


def test_setting_below_a_value_names_what_is_in_the_way() -> None:
    config = HyperConfig({"lr": 0.1})
    with pytest.raises(StateError, match="'lr' is a float, not a section"):
        config["lr.max"] = 1
    with pytest.raises(StateError, match="both sides of a dot"):
        config["a..b"] = 1
    with pytest.raises(StateError, match=r"a\.b: a complex cannot"):
        config["a.b"] = 1j
    assert config == {"lr": 0.1}


def test_names_of_methods_are_reached_by_item_only() -> None:
    config = HyperConfig({"items": 3, "copy": True})
    assert config["items"] == 3
    assert list(config.items()) == [("items", 3), ("copy", True)]
    with pytest.raises(StateError, match=r"use config\['copy'\]"):
        config.copy = False  # type: ignore[method-assign, assignment]
    config["copy"] = False
    assert config.to_dict() == {"items": 3, "copy": False}


def test_containers_are_copied_in_and_out() -> None:
    source = {"a": {"b": [1]}}
    config = HyperConfig(source)
    source["a"]["b"].append(2)
    config.to_dict()["a"]["b"].append(3)
    config.flatten()["a.b"].append(4)
    assert config == {"a": {"b": [1]}}
    config.a.b.append(5)
    assert config == {"a": {"b": [1, 5]}}


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, 1.0), (1, True), (0, False), (0.0, -0.0), ([1], (1,)), ("1", 1), (b"a", "a"), (None, {}), (2**70, "1180591620717411303424")],
)
def test_values_of_different_types_differ(a: Any, b: Any) -> None:
    assert HyperConfig({"x": a}) != {"x": b}
    assert HyperConfig({"x": a}).diff({"x": b}).changed == {"x": (a, b)}


def test_nan_equals_nan() -> None:
    assert HyperConfig({"x": math.nan}) == {"x": math.nan}
    assert HyperConfig({"x": math.nan}) != {"x": math.inf}


def test_a_config_equals_no_mapping_that_it_could_not_hold() -> None:
    assert HyperConfig({"x": 1}) != {"x": {1, 2}}
    assert HyperConfig({"x": 1}) != 1


def test_diff_tells_what_was_added_removed_and_changed() -> None:
    before = HyperConfig({"lr": 0.1, "model": {"width": 64, "depth": 2}, "seed": 1})
    found = before.diff({"lr": 0.2, "model": {"width": 64, "heads": 4}, "seed": 1})
    assert found == ConfigDiff(added={"model.heads": 4}, removed={"model.depth": 2}, changed={"lr": (0.1, 0.2)})
    assert str(found) == "~ lr: 0.1 -> 0.2\n- model.depth: 2\n+ model.heads: 4"
    assert found
    assert not before.diff(before)


def test_a_frozen_config_refuses_every_change() -> None:
    config = HyperConfig({"a": {"b": 1}, "sections": [{"x": 1}], "list": [1]})
    assert config.freeze() is config
    changes = [
        lambda: config.update({"c": 1}),
        lambda: config.__setitem__("a.b", 2),
        lambda: config.__delitem__("a"),
        lambda: setattr(config, "a", 2),
        lambda: delattr(config, "a"),
        lambda: setattr(config.a, "b", 2),
        lambda: config.a.__delitem__("b"),
        lambda: config.sections[0].__setitem__("x", 2),
        lambda: config.a.__setitem__("new.section", 2),
        config.clear,
    ]
    for change in changes:
        with pytest.raises(StateError, match=r"frozen once saved: change a copy\(\) of it"):
            change()
    config.list.append(2)
    assert config == {"a": {"b": 1}, "sections": [{"x": 1}], "list": [1]}
    twin = config.copy()
    twin.a.b = 2
    twin.list.append(2)
    assert twin == {"a": {"b": 2}, "sections": [{"x": 1}], "list": [1, 2]}


def test_a_section_that_is_frozen_alone_refuses_changes_through_its_parent() -> None:
    config = HyperConfig({"a": {"b": 1}})
    config.a.freeze()
    with pytest.raises(StateError, match="frozen"):
        config["a.b"] = 2
    with pytest.raises(StateError, match="frozen"):
        config["a.c"] = 2
    with pytest.raises(StateError, match="frozen"):
        del config["a.b"]
    config.c = 3
    assert config == {"a": {"b": 1}, "c": 3}


def test_what_was_put_into_a_list_is_checked_when_it_is_frozen() -> None:
    config = HyperConfig({"layers": [1]})
    config.layers.append({"width": 2})
    assert config == {"layers": [1, {"width": 2}]}
    assert config.to_dict() == {"layers": [1, {"width": 2}]}
    config.layers.append(object())
    with pytest.raises(StateError, match=r"layers\.2: a object cannot be a hyperparameter"):
        config.freeze()


def test_only_a_frozen_config_has_a_hash() -> None:
    config = HyperConfig({"b": 1, "a": 2.0})
    with pytest.raises(TypeError, match="freeze"):
        hash(config)
    config.freeze()
    assert {config: 1}[HyperConfig({"a": 2.0, "b": 1}).freeze()] == 1
    assert config.hash() == "4e1eaa1b41daa850b449c8df663dc22f"
    assert hash(config) != hash(HyperConfig({"b": 1, "a": 2}).freeze())


def test_mapping_methods_work() -> None:
    config = HyperConfig({"a": 1})
    config.update({"b.c": 2}, d=3)
    assert config.setdefault("a", 9) == 1
    assert config.pop("d") == 3
    assert dict(config) == {"a": 1, "b": {"c": 2}}
    assert list(config.values()) == [1, HyperConfig({"c": 2})]
    assert "a" in dir(config)
    assert repr(config) == "HyperConfig({'a': 1, 'b': {'c': 2}})"


def test_namespaces_and_dataclasses_are_sources() -> None:
    @dataclasses.dataclass
    class Inner:
        width: int = 3

    @dataclasses.dataclass
    class Outer:
        lr: float
        inner: Inner

    assert HyperConfig(argparse.Namespace(lr=0.1, tags=["a"])) == {"lr": 0.1, "tags": ["a"]}
    assert HyperConfig(Outer(0.5, Inner())) == {"lr": 0.5, "inner": {"width": 3}}
    with pytest.raises(StateError, match="found int"):
        HyperConfig(5)
    with pytest.raises(StateError, match="found type"):
        HyperConfig(Outer)


def test_scalars_are_stored_as_plain_python_values() -> None:
    class Size(enum.IntEnum):
        SMALL = 7

    class Kind(str, enum.Enum):
        MLP = "mlp"

    numpy_values = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.str_("x"), "g": np.float64(2)}
    config = HyperConfig({**numpy_values, "e": Size.SMALL, "f": Kind.MLP})
    assert [(type(value), value) for value in config.values()] == [
        (float, 0.5),
        (int, 3),
        (bool, True),
        (str, "x"),
        (float, 2.0),
        (int, 7),
        (str, "mlp"),
    ]


@pytest.mark.parametrize(
    "value", [{1, 2}, 1j, object(), pathlib.PurePath("x"), np.zeros(2), np.complex64(1), np.datetime64("2020-01-01"), len]
)
def test_other_values_are_refused_by_path_with_the_way_out(value: Any) -> None:
    with pytest.raises(StateError, match=r"^model\.layers\.1: a \w+ cannot be a hyperparameter; .* for example str\(value\)$"):
        HyperConfig({"model": {"layers": [1, value]}})


def test_keys_that_are_no_strings_are_refused() -> None:
    with pytest.raises(StateError, match=r"a: the keys of a HyperConfig are strings, found 1: use '1'"):
        HyperConfig({"a": {1: 2}})
    with pytest.raises(StateError, match="are strings, found None"):
        HyperConfig()[None] = 1  # type: ignore[index]


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="does it hold itself"):
        HyperConfig({"loop": loop})


def test_configs_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from syckpt.hyperparams.config import HyperConfig; from syckpt.hyperparams.fingerprint import fingerprint; "
        "fingerprint(HyperConfig({'a': 1.5})); print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
