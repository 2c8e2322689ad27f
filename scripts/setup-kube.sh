#!/bin/sh
# Kubernetes, a real control plane to test against: etcd, the API server, controllers, scheduler and kubectl in one
# program of 140 MB, built with Go from published modules (tests/fakes/kube/program), outside the checkout. 10 minutes of
# CPU, a download of 350 MB, and 5 GB of disk while it is built; done once. Nothing is started. Prints its path.
#
#     scripts/setup-kube.sh           builds it where it is not there
#     scripts/setup-kube.sh --kept    builds nothing; exit code 1 where it is not there
#
# Go checks every module against the sums of go.sum. Where GOCACHE or GOMODCACHE is set, that one is used, and kept.
set -eu
. "$(dirname "$0")/common.sh"

recipe=$(cd "$(dirname "$0")/../tests/fakes/kube/program" && pwd)
version=$(sed -n 's|^\tk8s.io/kubernetes \(v[0-9.]*\)$|\1|p' "$recipe/go.mod")
RECIPE=1 # changes when how it is built does
key=$({ echo "$RECIPE" && cat "$recipe"/*.go "$recipe"/go.mod "$recipe"/go.sum; } | sha256sum | cut -c 1-12)
program=$cache/kube/kube-$version-$key

if [ -x "$program" ]; then
    echo "$program"
    exit
fi
if [ "${1:-}" = --kept ]; then exit 1; fi
if ! command -v go >/dev/null; then
    fail "Kubernetes is built with Go, which is not installed: https://go.dev/dl. What needs it is skipped until then."
fi

compile() {
    minor=${version#v1.}
    about="-X k8s.io/component-base/version"
    cd "$work/source" &&
        CGO_ENABLED=0 GOFLAGS="${GOFLAGS:-} -mod=readonly -modcacherw -buildvcs=false" \
            GOCACHE="${GOCACHE:-$work/cache}" GOMODCACHE="${GOMODCACHE:-$work/modules}" \
            go build -trimpath -o "$work/program" -ldflags \
            "-s -w $about.gitVersion=$version $about.gitMajor=1 $about.gitMinor=${minor%%.*}" .
}

lock "$cache/kube"
if [ ! -x "$program" ]; then # nor has another set-up built it meanwhile
    say "building Kubernetes $version into $program (10 minutes of CPU; once)"
    workplace "$cache/kube"
    mkdir "$work/source"
    cp "$recipe"/* "$work/source"
    try "Kubernetes $version could not be built." "Mend that, then do this again (GOPROXY names another module proxy)." \
        "$cache" compile
    mv "$work/program" "$program"
fi
echo "$program"
