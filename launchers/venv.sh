# shellcheck shell=bash
# Sourced by the launchers. Makes the checkout's virtual environment .venv/, or re-uses it, and puts it first in PATH.
#
#   ensure_venv core    the library and what it needs
#   ensure_venv dev     the tools of ./launchers/test as well
#
# PYTHON names the interpreter to make it with (default python3).

[[ -t 0 ]] || exec </dev/null # CI may give no standard input at all

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv

# The tests and examples run several processes on few cores; torch's default of one thread a core each would thrash.
export OMP_NUM_THREADS=1
# With a shared rendezvous store a restarted worker meets the keys of the round before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

section() { printf '\n== %s\n' "$*"; }

# Runs a command and shows its output only if it fails.
quietly() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 || status=$?
    if ((status)); then
        cat "$log" >&2
        printf 'failed with status %d: %s\n' "$status" "$*" >&2
    fi
    rm -f "$log"
    return "$status"
}

# What the environment was made from; the checkout's path too, since an editable install and scripts point into it.
venv_key() {
    "$1" - "$root" <<'PY'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(repr((sys.version, sys.base_prefix, str(root))).encode())
for name in ("pyproject.toml", "constraints.txt"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PY
}

ensure_venv() {
    local kind=$1 python=${PYTHON:-python3} key torch
    if ! command -v "$python" >/dev/null; then
        printf 'syckpt needs Python 3.10 or newer: no %s found; name one by PYTHON=...\n' "$python" >&2
        return 1
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        printf 'syckpt needs Python 3.10 or newer: %s is %s; name another by PYTHON=...\n' "$python" "$("$python" -V 2>&1)" >&2
        return 1
    fi
    # Out of an activated environment, which may be .venv itself and about to be deleted.
    python=$("$python" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)')
    key=$(venv_key "$python")

    # Two launchers started at once must not install into one folder. Without flock (macOS) start one after the other.
    if command -v flock >/dev/null; then
        exec 9>"$root/.venv.lock"
        flock 9
    fi
    # A stamp is written last, so an installation cut short counts as none. dev includes core.
    if [[ $(cat "$venv/stamp-$kind" 2>/dev/null) != "$key" && $(cat "$venv/stamp-dev" 2>/dev/null) != "$key" ]]; then
        if [[ $(cat "$venv/stamp-core" 2>/dev/null) != "$key" ]]; then
            section "new environment .venv ($("$python" -V))"
            rm -rf "$venv"
            quietly "$python" -m venv "$venv"
        fi
        section "install ($kind)"
        local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input -c "$root/constraints.txt")
        # First and as exactly this version: asked for by range, pip would weigh other builds and may fetch gigabytes of CUDA.
        torch=$(grep '^torch==' "$root/constraints.txt")
        quietly "${pip[@]}" "$torch"
        # The build tool from the constraints too, so that no unpinned copy is fetched for an isolated build.
        quietly "${pip[@]}" setuptools
        if [[ $kind == dev ]]; then
            quietly "${pip[@]}" --no-build-isolation -e "$root[dev]"
        else
            quietly "${pip[@]}" --no-build-isolation -e "$root"
        fi
        printf '%s\n' "$key" >"$venv/stamp-$kind"
    fi
    exec 9>&- # children must not inherit the lock

    unset PYTHONHOME
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
}
