#!/bin/sh
# The packages of images/*/requirements.lock as wheels for the Python of scripts/make-base-image.sh, outside the checkout:
# a test's build takes them from loopback, and asks no index. 100 MB, seconds; done once for each state of these. Prints
# their folder. With --kept nothing is fetched: exit code 1 where they are not there, or not whole.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh

PYTHON=3.11
dir=$cache/image-wheels/$PYTHON-$(cat images/*/requirements.lock | sha256sum | cut -c 1-16)

fetch() {
    for lock in images/*/requirements.lock; do
        pip .venv/bin/python download --quiet --disable-pip-version-check --no-deps --require-hashes \
            --only-binary :all: --python-version "$PYTHON" --dest "$work/wheels" --requirement "$lock" || return
    done
    seal "$work/wheels"
}

if ! whole "$dir"; then
    if [ "${1:-}" = --kept ]; then exit 1; fi
    if [ ! -x .venv/bin/python ]; then
        fail "The packages are fetched with .venv's pip, which \`make setup\` installs: do that first."
    fi
    lock "$cache/image-wheels"
    if ! whole "$dir"; then # nor has another set-up fetched them meanwhile
        say "fetching the images' packages into $dir (100 MB; done once)"
        workplace "$cache/image-wheels"
        try "The images' packages could not be fetched." "Mend that, then do this again." "$cache" fetch
        rm -rf "$dir"
        mv "$work/wheels" "$dir"
    fi
fi
echo "$dir"
