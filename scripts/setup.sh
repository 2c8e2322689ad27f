#!/bin/sh
# All set-up of a checkout: Python, uv, the packages of uv.lock, the Pulumi engine, .mgpu/env. `make setup` calls it.
# A fresh machine needs Python 3.11+, git and make. What is there already is left alone: a second call takes no time.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh

stamp=.venv/.mgpu-stamp

synced() { [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; }

sync() {
    here=$(pwd -P)
    wanted=$(printf '%s\n' "$here" && cksum uv.lock pyproject.toml train/pyproject.toml)
    if synced; then return; fi
    lock .mgpu
    if synced; then return; fi # another set-up has done it meanwhile
    python=$(find_python)
    sh scripts/uv.sh --version >/dev/null
    # an environment has the path of its folder in it: a copy would run the code of the checkout that it was copied from
    if [ -x .venv/bin/python ] && [ -f .venv/pyvenv.cfg ] && [ "$(head -n 1 "$stamp" 2>/dev/null)" = "$here" ]; then
        say "bringing .venv to what uv.lock says"
    else
        say "installing the Python packages of uv.lock into .venv: 5.5 GB on disk, nearly all of it PyTorch with CUDA"
        say "(seconds from uv's cache, else minutes; \`pip install mgpu\`, to use it alone, is 130 MB and has no PyTorch)"
        try "The environment .venv could not be made." "Mend that, then do this again." "$PWD" \
            sh scripts/uv.sh venv --quiet --clear --python "$python" .venv
    fi
    # before anything changes: with the lock of before, what is changed by half would count as done
    printf '%s\n' "$here" >"$stamp"
    try "The Python packages could not be installed: 5.5 GB." \
        "Mend that, then do this again; it goes on where it stopped." "$PWD" sh scripts/uv.sh sync --quiet --frozen
    compile
    printf '%s\n' "$wanted" >"$stamp"
}

# Bytecode of just the modules that commands and ranks import: all of PyTorch's would take three times as long. Done here
# because many a CI image forbids Python to write bytecode by itself; it saves every rank 2 s. Nothing depends on it.
compile() {
    say "compiling what commands, ranks and tests import (about 10 s)"
    for modules in "click, grpc, paramiko, pulumi.automation, pulumi.provider.experimental.server, pydantic, rich.console, yaml" \
        "asyncssh, boto3" "accelerate, lightning_fabric, safetensors.torch" "torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.run"; do
        PYTHONDONTWRITEBYTECODE='' .venv/bin/python -c "import $modules" 2>/dev/null || true
    done
    PYTHONDONTWRITEBYTECODE='' .venv/bin/python -m compileall -q mgpu train/mgpu_train || true
    # pytest compiles itself, its plug-ins and tests in a way of its own
    PYTHONDONTWRITEBYTECODE='' .venv/bin/python -m pytest --collect-only tests/unit/plan/test_plan.py >/dev/null 2>&1 || true
}

sync
exec .venv/bin/python -m mgpu.iac.engine.install --project .
