"""Who may know whom (ARCHITECTURE.md), held by reading the syntax tree of every module and by looking at sys.modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "syckpt"

# A room imports only from the rooms before it and from itself. `reshard` and `interop` come with later releases.
ROOMS = (
    "errors",
    "objects",
    "codecs",
    "stores",
    "hyperparams",
    "repo",
    "state",
    "dist",
    "reshard",
    "files",
    "dataloader",
    "checkpoint",
    "interop",
    "cli",
    "testing",
)
TORCH_ROOMS = frozenset(ROOMS[ROOMS.index("state") :])
READS_ENVIRONMENT = ("dist/topology.py", "cli/")
PICKLES = frozenset({"_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})

MODULES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    lazy: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING:`


def name_of(path: Path) -> str:
    """Return the dotted name of a module of the package."""
    parts = ("syckpt", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the room of a dotted name inside syckpt; "" for the package's own `__init__` and what it re-exports."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def where(path: Path, node: ast.AST | Import) -> str:
    line = node.line if isinstance(node, Import) else getattr(node, "lineno", 0)
    return f"{path.relative_to(PACKAGE.parent)}:{line}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def imports_of(path: Path) -> list[Import]:
    """Return every import of a module, `from a import b` as `a.b` when that is a module and as `a` otherwise."""
    found: list[Import] = []
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, (*package.split(".")[: len(package.split(".")) - node.level + 1], base)))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full == "syckpt.__version__" or (full.startswith("syckpt.") and full in NAMES)
                found.append(Import(full if is_module else base, node.lineno, lazy, typing_only))
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for name, field in ast.iter_fields(node):
            typing_branch = is_type_checking(node) and name == "body"
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    visit(child, lazy or inside, typing_only or typing_branch)

    visit(tree_of(path), False, False)
    return found


NAMES = {name_of(path): path for path in MODULES}


def each_import(*, of: frozenset[str] | None = None) -> Iterator[tuple[Path, str, Import]]:
    for path in MODULES:
        room = room_of(name_of(path))
        for item in imports_of(path):
            if of is None or item.module.split(".")[0] in of:
                yield path, room, item


def test_every_module_lives_in_a_room() -> None:
    top = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert top <= {*ROOMS, "__init__", "__main__"}


def test_architecture_lists_the_rooms_in_this_order() -> None:
    rows = re.findall(r"^\| `(\w+)(?:\.py|/)` \|", (PACKAGE / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [room for room in ROOMS if room in rows]
    present = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES} & set(ROOMS)
    assert present <= set(rows)


def test_a_room_imports_only_from_rooms_above_it() -> None:
    wrong = []
    for path, room, item in each_import(of=frozenset({"syckpt"})):
        other = room_of(item.module)
        if not room:  # the package's own __init__: errors at once, everything else lazily or for type checkers
            ok = item.lazy or item.typing_only or other == "errors" or path.name == "__main__.py"
        elif not other:  # a public name leads anywhere, so only those at the bottom may use it
            ok = item.module == "syckpt.__version__" or room in {"cli", "testing"}
        else:
            ok = ROOMS.index(other) <= ROOMS.index(room)
        if not ok:
            wrong.append(f"{where(path, item)}: {room or 'syckpt'} imports {item.module}")
    assert not wrong, "\n".join(wrong)


def test_nothing_but_itself_imports_testing() -> None:
    assert not [where(path, item) for path, room, item in each_import() if room != "testing" and room_of(item.module) == "testing"]


def test_torch_is_imported_from_state_on() -> None:
    wrong = [where(path, item) for path, room, item in each_import(of=frozenset({"torch"})) if room not in TORCH_ROOMS]
    assert not wrong, "\n".join(wrong)


def test_cli_imports_torch_rooms_only_inside_functions() -> None:
    wrong = []
    for path, room, item in each_import(of=frozenset({"syckpt", "torch"})):
        heavy = item.module.startswith("torch") or room_of(item.module) in TORCH_ROOMS - {"cli"}
        if room == "cli" and heavy and not (item.lazy or item.typing_only):
            wrong.append(f"{where(path, item)}: {item.module}")
    assert not wrong, "\n".join(wrong)


def closure_of(module: str) -> dict[str, list[str]]:
    """Return the modules that importing `module` may run, each with the chain that leads to it."""
    reached: dict[str, list[str]] = {}
    todo = [(module, [module])]
    while todo:
        name, chain = todo.pop()
        if name in reached:
            continue
        reached[name] = chain
        path = NAMES.get(name)
        if path is None:
            continue
        parents = [name.rpartition(".")[0]] if "." in name else []  # importing a.b runs a's __init__
        for other in parents + [item.module for item in imports_of(path) if not item.typing_only]:
            todo.append((other, [*chain, other]))
    return reached


def test_the_writer_knows_neither_state_nor_torch() -> None:
    if "syckpt.checkpoint.writer" not in NAMES:
        pytest.skip("no writer yet")
    wrong = [
        " -> ".join(chain)
        for name, chain in closure_of("syckpt.checkpoint.writer").items()
        if name.split(".")[0] == "torch" or room_of(name) in TORCH_ROOMS - {"checkpoint"}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_environment_is_read_in_topology_and_cli_alone() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    wrong = []
    for path in MODULES:
        if path.relative_to(PACKAGE).as_posix().startswith(READS_ENVIRONMENT):
            continue
        for node in ast.walk(tree_of(path)):
            attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
            imported = isinstance(node, ast.ImportFrom) and node.module == "os" and any(alias.name in names for alias in node.names)
            if attribute or imported:
                wrong.append(where(path, node))
    assert not wrong, "\n".join(wrong)


def guarded_calls() -> set[ast.Call]:
    """Return the one call that may unpickle: it stands behind the check that the caller's own spec asks for it, in the same function."""
    path = PACKAGE / "state" / "formats.py"
    (function,) = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef) and node.name == "unpickle"]
    statements = [line for line in function.body[1:] if not isinstance(line, ast.Import)]
    assert ast.unparse(statements[0]) == "require_trust(form, path)"
    calls = [node for line in statements[1:] for node in ast.walk(line) if isinstance(node, ast.Call)]
    found = {call for call in calls if ast.unparse(call.func) == "torch.load"}
    assert len(found) == 1
    return found


def full_names(tree: ast.AST) -> dict[str, str]:
    """Return what each name that a module imports, anywhere, stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def runs_code(full: str) -> bool:
    """Whether something of that full name may run what it reads, or what another process sends."""
    first, _, last = full.rpartition(".")
    base = full.split(".")[0]
    return (
        full in {"__import__", "builtins.__import__", "eval", "exec", "builtins.eval", "builtins.exec", "torch.load", "numpy.load"}
        or base in PICKLES
        or full.startswith(("torch.package", "torch.hub", "torch.jit.load", "torch.serialization"))
        or (base == "torch" and last == "load")
        or last.endswith(("_object_list", "gather_object", "_unpickle"))
        or (last in {"Connection", "Pipe", "Queue"} and "multiprocessing" in first)
    )


def unsafe_in(tree: ast.AST, guarded: Set[ast.Call] = frozenset()) -> list[ast.AST]:
    """Return whatever may run code from a checkpoint: calls, and names that somebody could call."""
    names = full_names(tree)
    wrong: list[ast.AST] = []
    fine: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            wrong += [node] * any(runs_code(f"{module}.{alias.name}" if module else alias.name) for alias in node.names)
        if not isinstance(node, ast.Call):
            continue
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if node in guarded or (ast.unparse(node.func) == "torch.load" and said.get("weights_only") == "True"):
            fine.add(node.func)
            continue
        if said.get("weights_only", "True") != "True" or said.get("allow_pickle", "False") != "False":
            wrong.append(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and node not in fine:
            text = ast.unparse(node)
            head, dot, rest = text.partition(".")
            if runs_code(names.get(head, head) + dot + rest):
                wrong.append(node)
    return wrong


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch\nread = torch.load",
        "from torch import load\nload(f)",
        "from torch import load as read",
        "from torch.serialization import load",
        "import torch as t\nt.load(f, weights_only=True)",
        "import torch\ntorch.jit.load(f)",
        "import torch\ntorch.hub.load(f)",
        "import torch.package",
        "import torch.distributed as dist\ndist.broadcast_object_list(found)",
        "from torch.distributed import all_gather_object",
        "import numpy as np\nnp.load(f)",
        "import numpy as np\nread(f, allow_pickle=True)",
        "eval(text)",
        "from builtins import exec",
        "from multiprocessing.connection import Connection",
    ],
)
def test_what_could_run_code_is_found_however_it_is_spelt(planted: str) -> None:
    assert unsafe_in(ast.parse(planted)) != []


def test_what_reads_tensors_only_is_not_taken_for_it() -> None:
    assert unsafe_in(ast.parse("import torch\ntorch.load(f, weights_only=True)\nself.load(f)\nmodel.load_state_dict(s)")) == []


def test_nothing_can_run_code_from_a_checkpoint() -> None:
    guarded = guarded_calls()
    wrong = [f"{where(path, node)}: {ast.unparse(node)}" for path in MODULES for node in unsafe_in(tree_of(path), guarded)]
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            # A package's __init__ may import lazily by a table of its own: it never sees what is stored.
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module" and path.name != "__init__.py":
                wrong.append(f"{where(path, node)}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_no_error_is_swallowed_unnamed() -> None:
    wrong = []
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = "" if node.type is None else ast.unparse(node.type)
            broad = bool(re.search(r"\b(Base)?Exception\b", caught))
            silent = all(isinstance(line, ast.Pass) or ast.unparse(line) == "..." for line in node.body)
            if not caught or (broad and silent):
                wrong.append(where(path, node))
    assert not wrong, "\n".join(wrong)


def run_python(code: str, *arguments: str, cwd: Path | None = None) -> None:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


NO_TORCH = "import sys; assert 'torch' not in sys.modules, 'torch was imported'"


def test_import_syckpt_leaves_torch_out() -> None:
    run_python(f"import syckpt; syckpt.SyckptError; dir(syckpt); {NO_TORCH}")


@pytest.mark.parametrize("name", ["Commit", "HyperConfig", "Retention", "VerifyReport"])
def test_values_of_torch_free_rooms_leave_torch_out(name: str) -> None:
    run_python(f"import syckpt; syckpt.{name}; {NO_TORCH}")


@pytest.mark.skipif("syckpt.checkpoint.writer" not in NAMES, reason="no writer yet")
def test_the_writer_process_leaves_torch_out() -> None:
    run_python(f"import syckpt.checkpoint.writer; {NO_TORCH}")


def command_group() -> click.Group | None:
    """Return the group behind the console script `syckpt`, if it exists yet."""
    import syckpt.cli

    candidates = [getattr(syckpt.cli, "main", None), *vars(syckpt.cli).values()]
    return next((value for value in candidates if isinstance(value, click.Group)), None)


def command_names() -> list[str]:
    group = command_group()
    return [] if group is None else sorted(group.list_commands(click.Context(group)))


RUN_COMMAND = """
import sys
sys.argv = ["syckpt", *sys.argv[1:]]
from syckpt.cli import main
try:
    main()
except SystemExit as end:
    print("status", end.code)
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in command_names())], ids=" ".join)
def test_the_command_line_leaves_torch_out(arguments: list[str], tmp_path: Path) -> None:
    if command_group() is None:
        pytest.skip("no command line yet")
    run_python(RUN_COMMAND, *arguments, cwd=tmp_path)


@pytest.mark.parametrize("name", command_names())
def test_a_command_without_a_repository_leaves_torch_out(name: str, tmp_path: Path) -> None:
    run_python(RUN_COMMAND, name, cwd=tmp_path)


def test_a_stranger_finds_every_module_in_the_table_of_rooms() -> None:
    text = (PACKAGE / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = {room: set(re.findall(r"`([a-z_]+)`", row)) for room, row in re.findall(r"^\| `([a-z]+)/` \|(.*)$", text, re.MULTILINE)}
    there = {room: {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"} for room in named if room != "cli"}
    assert {room: sorted(found ^ named[room]) for room, found in there.items() if found != named[room]} == {}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(named)
