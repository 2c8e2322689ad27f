#!/bin/sh
# The packages of images/trainer/requirements.lock as wheels for the Python of scripts/make-base-image.sh, outside the
# checkout: a test's build takes them from loopback, and asks no index. 30 MB, seconds; done once a lock file. Prints
# their folder. With --kept nothing is fetched: exit code 1 where they are not there, or not whole.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh

PYTHON=3.11
lock=images/trainer/requirements.lock
dir=$cache/image-wheels/$PYTHON-$(sha256sum "$lock" | cut -c 1-16)

fetch() {
    pip .venv/bin/python download --quiet --disable-pip-version-check --no-deps --require-hashes \
        --only-binary :all: --python-version "$PYTHON" --dest "$work/wheels" --requirement "$lock" && seal "$work/wheels"
}

if ! whole "$dir"; then
    if [ "${1:-}" = --kept ]; then exit 1; fi
    if [ ! -x .venv/bin/python ]; then
        fail "The packages are fetched with .venv's pip, which \`make setup\` installs: do that first."
    fi
    lock "$cache/image-wheels"
    if ! whole "$dir"; then # nor has another set-up fetched them meanwhile
        say "fetching the training image's packages into $dir (30 MB; done once)"
        workplace "$cache/image-wheels"
        try "The training image's packages could not be fetched." "Mend that, then do this again." "$cache" fetch
        rm -rf "$dir"
        mv "$work/wheels" "$dir"
    fi
fi
echo "$dir"
