#!/bin/sh
# uv, as all of the checkout calls it: `sh scripts/uv.sh ARGUMENTS...`. It is the user's own where that is new enough, else
# one outside the checkout, installed on first use (25 MB, seconds). It trusts the certificates that this machine trusts.
set -eu
here=$(dirname "$0")
. "$here/common.sh"

MINIMUM=0.8.0

new_enough() { # a version of uv
    [ "$(printf '%s\n' "$1" "$MINIMUM" | sort -V | head -n 1)" = "$MINIMUM" ]
}

install_uv() { # Debian takes pip and venv out of Python, each into a package of its own: either will do
    set -- install --quiet --disable-pip-version-check --root-user-action ignore --require-hashes --only-binary :all: \
        -r "$here/uv.txt"
    if "$python" -m pip --version >/dev/null 2>&1; then
        pip "$python" "$@" --target "$work/uv"
    else
        "$python" -m venv "$work/uv" && pip "$work/uv/bin/python" "$@"
    fi && [ -x "$work/uv/bin/uv" ]
}

uv=$(command -v uv || true)
if [ -n "$uv" ] && new_enough "$("$uv" --version 2>/dev/null | cut -d ' ' -f 2)"; then exec "$uv" "$@"; fi

uv=$cache/uv/$(sed -n 's/^uv==\([^ ]*\).*/\1/p' "$here/uv.txt")
if [ ! -x "$uv/bin/uv" ]; then
    python=$(find_python)
    lock "$cache/uv"
fi
if [ ! -x "$uv/bin/uv" ]; then # nor has another set-up made it meanwhile
    say "installing uv, which installs the rest (about 25 MB, seconds; done once, into $uv)"
    workplace "$cache/uv"
    try "uv could not be installed." \
        "Mend that, or install uv by hand (https://docs.astral.sh/uv/); pip is wanted for it (Debian, Ubuntu: apt install python3-pip). Then do this again." \
        "$cache" install_uv
    rm -rf "$uv"
    mv "$work/uv" "$uv"
    rm -rf "$work"
fi
exec "$uv/bin/uv" "$@" 9>&-
