"""Commits, ref records, intents and leases: read without trust."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syckpt.errors import IntegrityError, SyckptError
from syckpt.objects import canonical
from syckpt.objects.commit import Commit
from syckpt.objects.refs import Intent, Lease, Owner, RefRecord

ID, PARENT = "0badc0de-0000000000000002", "0badc0de-0000000000000001"
OWNER = Owner("host", "boot", "pid:[1]", 12, 34)
RECORD = RefRecord("heads/main", 3, ID, "ab" * 32, PARENT, 2, "run", "save", 1_700_000_000_123_456_789)
INTENT = Intent(ID, "main", 2, "run", (PARENT,), OWNER)
LEASE = Lease("main", "run", 2, "token", OWNER, None, 1_700_000_030_000_000_001)
COMMIT = Commit(
    id=ID,
    parents=(PARENT,),
    parent_seals=("cd" * 32,),
    manifests=((0, "ef" * 32),),
    branch="main",
    step=7,
    epoch=1,
    batch_idx=3,
    epoch_done=False,
    entered=True,
    metric=0.5,
    message="grüße",
    config={"lr": 0.1, "layers": [1, 2], "none": None},
    created_ns=1_700_000_000_123_456_789,
    world_size=1,
    tags=("v1",),
    name=None,
    fingerprint="0badc0de",
    writer="syckpt 0.1.0",
    run_id="run",
    generation=2,
    sequence=5,
    rng_exact=True,
    stats={"stall_s": 0.25},
    seal="12" * 32,
)


def read(kind: type, body: dict[str, Any]) -> Any:
    return Commit.from_body(body, seal=COMMIT.seal, where="where") if kind is Commit else kind.from_body(body, where="where")


@pytest.mark.parametrize("value", [COMMIT, RECORD, INTENT, LEASE], ids=lambda value: type(value).__name__)
def test_records_come_back_through_their_bodies(value):
    body = canonical.loads(canonical.dumps(value.to_body()))
    assert read(type(value), body) == value


def test_a_commit_reads_as_the_format_says():
    body = COMMIT.to_body()
    assert body["parents"] == [[PARENT, "cd" * 32]]
    assert body["manifests"] == [[0, "ef" * 32]]
    assert body["run"] == ["run", 2, 5]
    assert body["created_ns"] == "1700000000123456789"
    assert body["config"] == {"dict": [["lr", 0.1], ["layers", {"list": [1, 2]}], ["none", None]]}
    assert read(Commit, {**body, "metric": {"float": "7ff8000000000000"}}).metric != 0
    assert math.isnan(read(Commit, {**body, "metric": {"float": "7ff8000000000000"}}).metric)
    assert COMMIT.created.isoformat() == "2023-11-14T22:13:20.123457+00:00"
    assert str(COMMIT) == ID


@pytest.mark.parametrize(
    "changes",
    [
        *[{"parents": [["main", "s"]]}, {"parents": [[PARENT]]}, {"parents": [[PARENT, 1]]}, {"parents": PARENT}, {"parents": None}],
        *[{"run": ["run"]}, {"run": None}, {"run": ["run", "x", 1]}, {"config": []}, {"config": {"list": []}}, {"config": {"dict": 1}}],
        *[{"metric": 1}, {"metric": "0.5"}, {"metric": {"float": "x"}}, {"step": -1}, {"step": 1.0}, {"step": True}, {"world_size": 0}],
        *[
            {"created_ns": 5},
            {"created_ns": "-5"},
            {"created_ns": "1e5"},
            {"created_ns": "٣"},
            {"created_ns": "9" * 30},
            {"created_ns": ""},
        ],
        *[{"tags": "v1"}, {"tags": [1]}, {"stats": []}, {"rng_exact": 1}, {"epoch_done": None}, {"manifests": [[0]]}, {"manifests": 3}],
        *[{"id": None}, {"branch": 3}, {"message": None}, {"name": 1}],
    ],
)
def test_a_malformed_commit_is_an_integrity_error_that_names_the_document(changes):
    with pytest.raises(IntegrityError, match=r"^where: "):
        read(Commit, {**COMMIT.to_body(), **changes})


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([COMMIT, RECORD, INTENT, LEASE]), st.data())
def test_no_junk_in_any_field_raises_anything_but_a_syckpt_error(value, data):
    body = copy.deepcopy(value.to_body())
    field = data.draw(st.sampled_from(sorted(body)))
    body[field] = data.draw(junk | junk.map(lambda inner: [inner, inner]))
    if data.draw(st.booleans()):
        del body[field]
    try:
        found = read(type(value), body)
    except SyckptError:
        return
    if isinstance(found, Commit):
        found.created, str(found), hash(found.id)
