#!/bin/sh
# The packages of images/trainer/requirements.lock as wheels for the Python of scripts/make-base-image.sh, outside the
# checkout: a test's build takes them from loopback, and asks no index. 30 MB, seconds; done once a lock file. Prints
# their folder. With --kept nothing is fetched: exit code 1 where they are not there.
set -eu
cd "$(dirname "$0")/.."

PYTHON=3.11
lock=images/trainer/requirements.lock
dir=${XDG_CACHE_HOME:-$HOME/.cache}/mgpu/image-wheels/$PYTHON-$(sha256sum "$lock" | cut -c 1-16)

if [ ! -e "$dir/.complete" ]; then
    if [ "${1:-}" = --kept ]; then exit 1; fi
    if [ ! -x .venv/bin/python ]; then
        echo "The packages are fetched with .venv's pip, which \`make setup\` installs: do that first." >&2
        exit 1
    fi
    echo "set-up: fetching the training image's packages into $dir (30 MB; done once)" >&2
    mkdir -p "$dir"
    .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
        --only-binary :all: --python-version "$PYTHON" --dest "$dir" --requirement "$lock" >&2
    touch "$dir/.complete"
fi
echo "$dir"
