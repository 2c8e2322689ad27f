#!/bin/sh
# What the object store is tested and measured against, built with Go outside the checkout: versitygw, a real S3 server
# on the file system, and s5cmd, the fastest client that people use. Two minutes for the first, seconds for the other;
# done once. `setup-store-tools.sh NAME...` builds those alone. Prints nothing where all is there.
set -eu
cd "$(dirname "$0")/.."

cache=${XDG_CACHE_HOME:-$HOME/.cache}/mgpu/store-tools

build() { # name, module, version, import path
    program=$cache/$1-$3
    if [ -x "$program" ]; then return; fi
    if ! command -v go >/dev/null; then
        echo "$1 is built with Go, which is not installed: https://go.dev/dl. What needs $1 is skipped until then." >&2
        return
    fi
    echo "set-up: building $1 $3 into $program (once)" >&2
    mkdir -p "$cache"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' INT TERM HUP
    # a module of its own, whose checksums Go verifies; `go install` would not take every version
    if ! (
        cd "$work" && go mod init build && go get "$4@$3" &&
            go build -trimpath -ldflags "-s -w" -o "$program.new" "$4"
    ) >"$work/log" 2>&1; then
        tail -n 20 "$work/log" >&2
        printf '%s\n' "$1 $3 could not be built." "The lines above say why: most often Go's module proxy" \
            "cannot be reached. Mend that (GOPROXY names another), then do this again." >&2
        exit 1
    fi
    mv "$program.new" "$program"
    rm -rf "$work"
}

for name in ${*:-versitygw s5cmd}; do
    case $name in
    versitygw) build versitygw github.com/versity/versitygw v1.8.0 github.com/versity/versitygw/cmd/versitygw ;;
    s5cmd) build s5cmd github.com/peak/s5cmd/v2 v2.3.0 github.com/peak/s5cmd/v2 ;;
    *)
        echo "no tool $name; there are versitygw and s5cmd" >&2
        exit 2
        ;;
    esac
done
