#!/bin/sh
# LocalStack, a second imitation of AWS to test against, in an environment of its own outside the checkout: it wants
# other versions of what mgpu uses. 600 MB, a minute; done once. Prints nothing where all is there.
set -eu
cd "$(dirname "$0")/.."

VERSION=4.6.0
NOTHING_NEWER=2025-07-15 # its dependencies have no upper limits, and it does not run with today's
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mgpu
dir=$cache/localstack/$VERSION

if [ -e "$dir/.complete" ]; then exit 0; fi

uv=$(command -v uv || true)
for each in "$cache"/uv/*/bin/uv; do # as set-up has installed it
    if [ -z "$uv" ] && [ -x "$each" ]; then uv=$each; fi
done
if [ -z "$uv" ]; then
    echo "LocalStack needs uv, which \`make setup\` installs: do that first." >&2
    exit 1
fi

echo "set-up: installing LocalStack $VERSION into $dir (600 MB, a minute; done once)" >&2
mkdir -p "$cache/localstack"
"$uv" venv --quiet --clear --python 3.11 "$dir"
VIRTUAL_ENV=$dir "$uv" pip install --quiet --exclude-newer "$NOTHING_NEWER" "localstack-core[runtime]==$VERSION"
touch "$dir/.complete"
