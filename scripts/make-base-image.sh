#!/bin/sh
# A base for the training image where there is no registry to pull one from: Debian's smallest, with Python and an SSH
# server, by debootstrap; as root. Made once (a minute, 73 MB) and kept outside the checkout; what is kept is
# only taken while its checksum is still the one it was made with. Prints its path:
#
#     docker import "$(scripts/make-base-image.sh)" mgpu-base:bookworm
#
# With --kept nothing is made: exit code 1 where it is not there.
#
# Debian's signature on the list of packages is checked, and of every package the checksum in that list. The same mirror
# on the same day makes the same file; MGPU_DEBIAN_MIRROR=https://snapshot.debian.org/archive/debian/<time> for ever.
set -eu

SUITE=bookworm
PACKAGES=ca-certificates,openssh-server,python3,python3-pip,python3-venv
RECIPE=1 # changes when what is done below does
mirror=${MGPU_DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
PATH=$PATH:/usr/sbin:/sbin

key=$(printf '%s\n' "$SUITE" "$PACKAGES" "$RECIPE" "$mirror" "$(dpkg --print-architecture)" | sha256sum | cut -c 1-16)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mgpu/base-image
base=$cache/$SUITE-$key.tar.gz

fail() { # what, why, next
    printf '%s\n' "$@" >&2
    exit 1
}

if [ -e "$base.sha256" ] && (cd "$cache" && sha256sum --check --status "$base.sha256"); then
    echo "$base"
    exit
fi
if [ "${1:-}" = --kept ]; then exit 1; fi

for program in debootstrap sha256sum tar; do
    command -v "$program" >/dev/null || fail "There is no program $program." "It makes the base image." \
        "Install it (Debian, Ubuntu: apt install debootstrap), then do this again."
done
[ "$(id -u)" = 0 ] || fail "debootstrap needs root." "It unpacks a system with its owners." "Run this as root."
[ -e "$keyring" ] || fail "There is no $keyring." "Debian's signature is checked with it." \
    "Install it (Debian, Ubuntu: apt install debian-archive-keyring), then do this again."

mkdir -p "$cache"
work=$(mktemp -d "$cache/.new-XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 1' INT TERM HUP

echo "set-up: making $base with debootstrap (a minute; done once)" >&2
set -- --variant=minbase --keyring="$keyring" --include="$PACKAGES" "$SUITE" "$work/root" "$mirror"
if ! debootstrap "$@" >"$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    fail "debootstrap has failed." "The lines above say why." "Check the network, or set MGPU_DEBIAN_MIRROR."
fi

# what differs from one time to the next, and what the image needs only to install packages
cd "$work/root"
rm -rf var/cache/apt/* var/lib/apt/lists/* var/log/* var/cache/ldconfig/aux-cache etc/ssh/ssh_host_* tmp/*
: >etc/machine-id
rm -f etc/hostname etc/resolv.conf
find . -name __pycache__ -prune -exec rm -rf {} +
tar --create --file "$work/base" --use-compress-program 'gzip --no-name -6' \
    --one-file-system --exclude='./dev/*' --sort=name --mtime=@0 --numeric-owner .
mv "$work/base" "$base"
(cd "$cache" && sha256sum "${base##*/}" >"$work/sum" && mv "$work/sum" "$base.sha256")
echo "$base"
