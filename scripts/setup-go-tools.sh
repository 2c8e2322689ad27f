#!/bin/sh
# Programs that tests and benches need and packages do not bring, built with Go outside the checkout: versitygw, a real S3
# server on the file system; s5cmd, the fastest S3 client that people use; docker-buildx, by which BuildKit is spoken to
# (Debian's Docker comes without it). Two minutes each, s5cmd seconds; done once.
#
#     scripts/setup-go-tools.sh NAME...       prints the path of each
#     scripts/setup-go-tools.sh --kept NAME   builds nothing; exit code 1 where it is not there
set -eu
. "$(dirname "$0")/common.sh"

tools=$cache/go-tools
kept=
if [ "${1:-}" = --kept ]; then kept=1 && shift; fi

build() { # name, version, import path, its variable of the version
    program=$tools/$1-$2
    if [ ! -x "$program" ]; then
        if [ "$kept" ]; then exit 1; fi
        if ! command -v go >/dev/null; then
            fail "$1 is built with Go, which is not installed: https://go.dev/dl. What needs $1 is skipped until then."
        fi
        lock "$tools"
    fi
    if [ ! -x "$program" ]; then # nor has another set-up built it meanwhile
        say "building $1 $2 into $program (once)"
        workplace "$tools"
        try "$1 $2 could not be built." "Mend that, then do this again (GOPROXY names another module proxy)." \
            "$tools" compile "$@"
        mv "$work/program" "$program"
        rm -rf "$work"
    fi
    echo "$program"
}

compile() { # in a module of its own, whose checksums Go verifies; `go install` would not take every version
    cd "$work" && go mod init build && go get "$3@$2" &&
        go build -trimpath -ldflags "-s -w ${4:+-X $4=$2}" -o "$work/program" "$3"
}

for name in "$@"; do
    case $name in
    versitygw) build versitygw v1.8.0 github.com/versity/versitygw/cmd/versitygw ;;
    s5cmd) build s5cmd v2.3.0 github.com/peak/s5cmd/v2 ;;
    docker-buildx)
        build docker-buildx v0.19.3 github.com/docker/buildx/cmd/buildx github.com/docker/buildx/version.Version
        ;;
    *) fail "no tool $name; there are versitygw, s5cmd and docker-buildx" ;;
    esac
done
