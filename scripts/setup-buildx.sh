#!/bin/sh
# Docker's buildx, by which BuildKit is spoken to, built with Go outside the checkout: Debian's Docker comes without it, and
# a test builds the training image with BuildKit, too. Two minutes; done once. Prints its path. With --kept nothing is
# built: exit code 1 where it is not there.
set -eu

VERSION=v0.19.3
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mgpu/buildx
program=$cache/docker-buildx-$VERSION

if [ ! -x "$program" ]; then
    if [ "${1:-}" = --kept ]; then exit 1; fi
    if ! command -v go >/dev/null; then
        echo "buildx is built with Go, which is not installed: https://go.dev/dl. Its test is skipped until then." >&2
        exit 1
    fi
    echo "set-up: building buildx $VERSION into $program (once)" >&2
    mkdir -p "$cache"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' INT TERM HUP
    # a module of its own, whose checksums Go verifies
    if ! (
        cd "$work" && go mod init build && go get "github.com/docker/buildx/cmd/buildx@$VERSION" &&
            go build -trimpath -ldflags "-s -w -X github.com/docker/buildx/version.Version=$VERSION" \
                -o "$program.new" github.com/docker/buildx/cmd/buildx
    ) >"$work/log" 2>&1; then
        tail -n 20 "$work/log" >&2
        printf '%s\n' "buildx $VERSION could not be built." "The lines above say why: most often Go's module proxy" \
            "cannot be reached. Mend that (GOPROXY names another), then do this again." >&2
        exit 1
    fi
    mv "$program.new" "$program"
fi
echo "$program"
