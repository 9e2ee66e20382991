"""The names, arguments and defaults that users type, each as it is promised; what later releases bring is listed as not there yet."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import click
import pytest

import syckpt
from syckpt.cli import main

pytest.importorskip("torch")

NOT_THERE_YET = {"CheckpointCoordinator", "HeartbeatMonitor", "FaultToleranceManager", "ElasticTrainer", "PreemptionGuard"}
COMMANDS = {
    *("log", "show", "ls", "cat", "status", "diff", "branch", "tag", "reflog", "best", "similar"),
    *("verify", "retain", "gc", "repack", "du", "export", "checkout", "sign", "keygen", "help"),
}
COMMANDS_NOT_THERE_YET = {"import", "push", "pull", "clone", "remote", "doctor", "bench"}

MANAGER = (
    "root=None, config=None, *, max_to_keep=None, keep=None, maximize=False, auto_resume=True, run_mode='append', branch=None, base=None,"
    " async_save=True, when_busy='wait', on_error='raise', save_on_exit=True, save_every=None, rng=True, coordinator=None, timeout_s=600,"
    " signer=None, trusted_keys=None"
)
CONFIG = (
    "items={}, default=syckpt.ItemSpec(), compression='fast', keyframe_every=8, read='ranged', check_replicas='sampled',"
    " pre_finalize_callback=None, finalize_callback=None, on_stats=None"
)
LOAD = "into=None, *, strict=True, cast=False, partial=None, map_location=None, dry_run=False"

FUNCTIONS = {
    "load": "root, rev='HEAD', items=None, into=None",
    "save_checkpoint": "model, path",
    "load_checkpoint": "model, path",
    "validate_checkpoint": "path, rev=None",
    "dataloader.seeded": "dataset",
    "CheckpointManager.Config": CONFIG,
    "Retention": "last=None, best=None, every_steps=None, every=None",
    "ItemSpec": "requires_copy=True, layout=None, resharder=None, required=True, on_world_change=None",
    "LayoutInfo": "file_path, serialization_format",
    "TorchSerialization": "weights_only=True",
    "JsonSerialization": "cls=None",
    "RawSerialization": "",
    "SafetensorsSerialization": "metadata=None",
    "DTensorResharder": "",
    "ShardingMetadata": "global_shape, dtype, boxes, extra={}",
    "StatefulRandomSampler": "data_source, batch_size, *, seed=42, shuffle=True, drop_last=False",
    "dataloader.StatefulRandomSampler": "data_source, batch_size, *, seed=42, shuffle=True, drop_last=False",
    "StatefulDistributedSampler": "data_source, batch_size, *, num_replicas=None, rank=None, seed=42, shuffle=True, drop_last=False",
    "CheckpointWriter": "path, signer=None",
    "CheckpointReader": "path, trusted_keys=None",
}
METHODS = {
    "CheckpointManager": {
        "__init__": MANAGER,
        "__enter__": "",
        "register": "name, obj",
        "unregister": "name",
        "restore": "",
        "loop": "epochs=None",
        "batches": "loader, accumulate=1",
        "step_up": "n=1, *, batches=None",
        "save": "checkpoint_id=None, payload=None, *, metric=None, message='', tags=(), epoch_end=None, wait=False",
        "load": f"rev='HEAD', {LOAD}",
        "goto": "rev",
        "create_branch": "name, at='HEAD'",
        "checkout_branch": "name",
        "delete_branch": "name",
        "list_branches": "",
        "tag": "name, rev",
        "log": "n=None",
        "diff": "a, b",
        "similar": "config=None, k=5",
        "print_tree": "",
        "retain": "*, dry_run=False",
        "gc": "*, dry_run=False",
        "verify": "rev",
        "export_ckpt": "rev, path",
        "wait": "",
        "close": "",
        "prewarm": "",
    },
    "PendingCommit": {"__str__": "", "done": "", "result": "timeout=None"},
    "Resharder": {
        "extract_sharding_metadata": "item_key, item_value",
        "load": "source_path, item_key, target_metadata, source_metadata, target, storage",
    },
    "Storage": {"read_value": "source_metadata, rank, path", "read_box": "source_metadata, path, offsets, sizes"},
    "SerializationFormat": {"encode": "value", "decode": "data"},
    "CheckpointWriter": {"add": "name, tensor", "__enter__": ""},
    "CheckpointReader": {"keys": "", "__getitem__": "name", "__enter__": ""},
    "CheckpointMixin": {"save_checkpoint": "path", "load_checkpoint": "path"},
    "StatefulRandomSampler": {"set_epoch": "epoch", "__len__": "", "state_dict": "", "load_state_dict": "state_dict"},
    "StatefulDistributedSampler": {"set_epoch": "epoch", "__len__": "", "state_dict": "", "load_state_dict": "state_dict"},
}
ATTRIBUTES = {
    "CheckpointManager": "step epoch batch_idx metric branch hash resumed last_report config",
    "Commit": "id parents branch step epoch batch_idx metric message config created world_size tags stats dropped preempted",
    "LoadReport": "missing unexpected resharded cast per_rank bytes_read rng_exact skipped",
    "VerifyReport": "ok errors",
    "Diff": "config tensors",
    "DistributedItemMetadata": "world_size by_rank",
    "SerializationFormat": "name",
}
OPTIONS = {
    "log": {"--graph", "--all"},
    "gc": {"--dry-run"},
    "retain": {"--dry-run"},
    "export": {"--to"},
    "checkout": {"--to"},
    "sign": {"--key"},
    "verify": {"--trusted-key"},
    "diff": {"--quiet"},
}


def promised(text: str) -> list[inspect.Parameter]:
    """Return the parameters that a text such as `a, *, b=1` stands for."""
    namespace: dict[str, Any] = {"syckpt": syckpt}
    return list(inspect.signature(eval(f"lambda {text}: None", namespace)).parameters.values())


def found(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a callable without `self`; a default that a dataclass makes stands as what it makes."""
    parameters = inspect.signature(function).parameters
    made = {}
    if dataclasses.is_dataclass(function):
        factories = {field.name: field.default_factory for field in dataclasses.fields(function)}
        made = {name: factory() for name, factory in factories.items() if not isinstance(factory, dataclasses._MISSING_TYPE)}
    return {
        name: parameter.replace(default=made[name]) if name in made else parameter
        for name, parameter in parameters.items()
        if name != "self"
    }


def assert_takes(function: Callable[..., Any], text: str) -> None:
    """What is promised is taken, at its place and with its default; what is taken besides is optional and comes behind it."""
    there = found(function)
    wanted = promised(text)
    positional = [p.name for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(there)[: len(positional)] == positional
    for parameter in wanted:
        mine = there[parameter.name]
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert mine.kind is parameter.kind, parameter.name
        if parameter.default is not parameter.empty:
            assert mine.default == parameter.default, parameter.name
    beyond = [name for name in there if name not in {p.name for p in wanted}]
    assert [name for name in beyond if there[name].default is inspect.Parameter.empty] == []


def resolved(dotted: str) -> Any:
    value: Any = syckpt
    for part in dotted.split("."):
        value = __import__("syckpt.dataloader", fromlist=[part]) if part == "dataloader" else getattr(value, part)
    return value


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_or_class_takes_what_is_promised(name: str) -> None:
    assert_takes(resolved(name), FUNCTIONS[name])


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, methods in METHODS.items() for name in methods])
def test_a_method_takes_what_is_promised(owner: str, name: str) -> None:
    assert_takes(inspect.getattr_static(resolved(owner), name), METHODS[owner][name])


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in ATTRIBUTES.items() for name in names.split()])
def test_an_attribute_is_there(owner: str, name: str) -> None:
    kind = resolved(owner)
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    assert hasattr(kind, name) or name in fields or name in kind.__annotations__


def test_load_fills_targets_by_the_same_words_with_and_without_a_manager() -> None:
    by_word = {p.name for p in promised(LOAD)}
    assert by_word <= found(syckpt.load).keys()
    assert by_word <= found(syckpt.CheckpointManager.load).keys()


def test_no_api_name_can_be_an_item_and_no_item_hides_one() -> None:
    names = {name for name in METHODS["CheckpointManager"] if not name.startswith("_")} | set(ATTRIBUTES["CheckpointManager"].split())
    assert {name for name in vars(syckpt.CheckpointManager) if not name.startswith("_")} == {*names, "Config"}


def test_what_later_releases_bring_is_not_there_yet() -> None:
    assert [name for name in sorted(NOT_THERE_YET) if name in syckpt.__all__] == []


def test_the_commands_are_those_promised_so_far() -> None:
    context = click.Context(main)
    assert set(main.list_commands(context)) == COMMANDS
    assert not COMMANDS & COMMANDS_NOT_THERE_YET


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_has_its_options_and_prints_json(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    options = {option for parameter in command.params for option in parameter.opts}
    assert OPTIONS.get(name, set()) <= options
    assert "--json" in options


def test_an_export_takes_the_forms_promised_so_far() -> None:
    command = main.get_command(click.Context(main), "export")
    assert command is not None
    (form,) = [parameter for parameter in command.params if parameter.name == "form"]
    assert isinstance(form.type, click.Choice)
    assert set(form.type.choices) == {"torch", "safetensors", "dir"}  # `hf` and `dcp` are not there yet
