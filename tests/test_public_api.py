"""The names that users import, and the errors that they catch."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

import syckpt
from syckpt import errors

ROOT = Path(__file__).resolve().parent.parent
ERRORS = [getattr(errors, name) for name in errors.__all__ if name[0].isupper()]


@pytest.mark.parametrize("name", syckpt.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(syckpt, name)
    # An alias has the name of what it stands for.
    assert name in ("__version__", "NestedPath") or value.__name__ == name
    assert name in dir(syckpt)


def test_public_names_are_sorted_and_unique() -> None:
    assert syckpt.__all__ == sorted(set(syckpt.__all__))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'CheckpointManger'"):
        syckpt.CheckpointManger  # noqa: B018


def test_type_checkers_see_the_names_that_are_looked_up_lazily() -> None:
    tree = ast.parse(Path(syckpt.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == syckpt._LAZY


def test_no_public_name_is_hidden_by_a_submodule() -> None:
    folder = Path(syckpt.__file__).parent
    assert not [name for name in syckpt.__all__ if (folder / name).exists() or (folder / f"{name}.py").exists()]


def test_the_version_is_that_of_pyproject() -> None:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    assert syckpt.__version__ == found[1]


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(syckpt.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_pickles_in_its_own_class_with_its_message(kind: type[errors.SyckptError]) -> None:
    again = pickle.loads(pickle.dumps(kind("rank 3: damaged")))
    assert type(again) is kind
    assert str(again) == "rank 3: damaged"


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_travels_to_another_process_in_its_own_class_with_its_message(kind: type[errors.SyckptError]) -> None:
    again = errors.from_wire(errors.to_wire(kind("rank 3: damaged")))
    assert type(again) is kind
    assert str(again) == "rank 3: damaged"


def test_a_foreign_error_travels_as_a_store_error_or_a_plain_one() -> None:
    full = errors.from_wire(errors.to_wire(OSError(28, "No space left on device")))
    assert type(full) is errors.StoreError
    assert str(full) == "OSError: [Errno 28] No space left on device"
    other = errors.from_wire(errors.to_wire(KeyError("weight")))
    assert type(other) is errors.SyckptError
    assert str(other) == "KeyError: 'weight'"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.NotFoundError, LookupError),
        (errors.StoreError, OSError),
        (errors.StateError, ValueError),
        (errors.RankTimeout, TimeoutError),
    ],
)
def test_an_error_is_also_the_builtin_that_users_expect(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.SyckptError)


def test_exit_codes() -> None:
    assert {kind.__name__: errors.exit_code(kind("x")) for kind in ERRORS} == {
        "SyckptError": 1,
        "NotFoundError": 3,
        "ConflictError": 4,
        "IntegrityError": 5,
        "FormatError": 6,
        "StoreError": 7,
        "StateError": 8,
        "CoordinationError": 9,
        "RankFailure": 9,
        "RankTimeout": 9,
        "RestartsExhausted": 9,
        "WriterDied": 9,
    }
