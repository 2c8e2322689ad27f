#!/bin/sh
# LocalStack, a second imitation of AWS to test against, in an environment of its own outside the checkout: it wants
# other versions of what mgpu uses. 600 MB, a minute; done once. Prints the environment's folder. With --kept nothing is
# installed: exit code 1 where it is not there, or not whole.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh

VERSION=4.6.0
NOTHING_NEWER=2025-07-15 # its dependencies have no upper limits, and it does not run with today's
dir=$cache/localstack/$VERSION

there() { [ -x "$dir/bin/python" ] && whole "$dir"; }

install() {
    sh scripts/uv.sh venv --quiet --relocatable --python 3.11 "$work/env" &&
        VIRTUAL_ENV=$work/env sh scripts/uv.sh pip install --quiet --exclude-newer "$NOTHING_NEWER" \
            "localstack-core[runtime]==$VERSION" &&
        "$work/env/bin/python" -c 'import localstack.runtime.main' && seal "$work/env"
}

if ! there; then
    if [ "${1:-}" = --kept ]; then exit 1; fi
    sh scripts/uv.sh --version >/dev/null
    lock "$cache/localstack"
    if ! there; then # nor has another set-up made it meanwhile
        say "installing LocalStack $VERSION into $dir (600 MB, a minute; done once)"
        workplace "$cache/localstack"
        try "LocalStack $VERSION could not be installed: 600 MB." "Mend that, then do this again." "$cache" install
        rm -rf "$dir"
        mv "$work/env" "$dir"
    fi
fi
echo "$dir"
