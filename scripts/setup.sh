#!/bin/sh
# All set-up of a checkout: Python, uv, the packages of uv.lock, the Pulumi engine, .mgpu/env. `make setup` calls it.
# A fresh machine needs Python 3.11+, git and make. What is there already is left alone: a second call takes no time.
set -eu
cd "$(dirname "$0")/.."

UV_MINIMUM=0.8.0
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mgpu
stamp=.venv/.mgpu-stamp

say() { echo "set-up: $*" >&2; }

fail() { # what, why, next
    printf '%s\n' "$@" >&2
    exit 1
}

find_python() {
    for name in python3 python3.13 python3.12 python3.11 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "No Python 3.11 or newer was found on PATH." \
        "mgpu and its tools are written in it; python3 is: $(python3 --version 2>&1 || true)" \
        "Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python), then do this again."
}

new_enough() { # a version of uv
    [ "$(printf '%s\n' "$1" "$UV_MINIMUM" | sort -V | head -n 1)" = "$UV_MINIMUM" ]
}

find_uv() { # sets $uv; the user's own, else one of ours outside the checkout
    uv=$(command -v uv || true)
    if [ -n "$uv" ] && new_enough "$("$uv" --version 2>/dev/null | cut -d ' ' -f 2)"; then return; fi
    uv=$cache/uv/$(sed -n 's/^uv==\([^ ]*\).*/\1/p' scripts/uv.txt)/bin/uv
    if [ -x "$uv" ]; then return; fi
    say "installing uv, which installs the rest (about 25 MB, seconds; done once, into ${uv%/bin/uv})"
    install_uv "${uv%/bin/uv}" || fail "uv could not be installed." \
        "The lines above say why: Python's pip or venv is missing, or the package index cannot be reached." \
        "Install uv by hand (https://docs.astral.sh/uv/), or pip (Debian, Ubuntu: apt install python3-pip), then do this again."
}

install_uv() { # Debian takes pip and venv out of Python, each into a package of its own: either will do
    mkdir -p "${1%/*}"
    rm -rf "$1.new"
    set -- "$1" --quiet --disable-pip-version-check --root-user-action ignore --require-hashes --only-binary :all: -r scripts/uv.txt
    target=$1
    shift
    if "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip install --target "$target.new" "$@"
    else
        "$python" -m venv "$target.new" && "$target.new/bin/python" -m pip install "$@"
    fi && rm -rf "$target" && mv "$target.new" "$target"
}

sync() {
    wanted=$(cksum uv.lock pyproject.toml train/pyproject.toml)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
    python=$(find_python)
    find_uv
    if [ -x .venv/bin/python ]; then
        say "bringing .venv to what uv.lock says"
    else
        say "installing the Python packages of uv.lock into .venv: 5.5 GB on disk, nearly all of it PyTorch with CUDA"
        say "(seconds from uv's cache, else minutes; \`pip install mgpu\`, to use it alone, is 130 MB and has no PyTorch)"
        "$uv" venv --quiet --python "$python" .venv
    fi
    "$uv" sync --quiet --frozen || fail "The Python packages could not be installed." \
        "The lines above say why: most often the package index cannot be reached, or the disk is full (5.5 GB are needed)." \
        "Mend that, then do this again; it goes on where it stopped."
    compile
    printf '%s\n' "$wanted" >"$stamp"
}

# Bytecode of just the modules that commands and ranks import: all of PyTorch's would take three times as long. Done here
# because many a CI image forbids Python to write bytecode by itself; it saves every rank 2 s. Nothing depends on it.
compile() {
    say "compiling what commands and ranks import (about 10 s)"
    for modules in "click, grpc, paramiko, pulumi.automation, pulumi.provider.experimental.server, pydantic, rich.console, yaml" \
        "asyncssh, boto3" "accelerate, lightning_fabric, safetensors.torch" "torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.run"; do
        PYTHONDONTWRITEBYTECODE='' .venv/bin/python -c "import $modules" 2>/dev/null || true
    done
    PYTHONDONTWRITEBYTECODE='' .venv/bin/python -m compileall -q mgpu train/mgpu_train || true
}

sync
exec .venv/bin/python -m mgpu.iac.install --project .
