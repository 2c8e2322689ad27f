#!/bin/sh
# A base for the training image where there is no registry to pull one from: Debian's smallest, with Python and an SSH
# server, by debootstrap; as root. Made once (a minute) and kept outside the checkout; what is kept is
# only taken while its checksum is still the one it was made with. Prints its path:
#
#     docker import "$(scripts/make-base-image.sh)" mgpu-base:bookworm
#
# With --kept nothing is made: exit code 1 where it is not there.
#
# Debian's signature on the list of packages is checked, and of every package the checksum in that list. The same mirror
# on the same day makes the same file; MGPU_DEBIAN_MIRROR=https://snapshot.debian.org/archive/debian/<time> for ever.
set -eu
. "$(dirname "$0")/common.sh"

SUITE=bookworm
PACKAGES=ca-certificates,g++,ibverbs-providers,libhwloc15,libibverbs1,librdmacm1
PACKAGES=$PACKAGES,openssh-server,python3,python3-dev,python3-pip,python3-venv
RECIPE=1 # changes when what is done below does
mirror=${MGPU_DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
PATH=$PATH:/usr/sbin:/sbin

key=$(printf '%s\n' "$SUITE" "$PACKAGES" "$RECIPE" "$mirror" "$(dpkg --print-architecture)" | sha256sum | cut -c 1-16)
base=$cache/base-image/$SUITE-$key.tar.gz

there() { [ -e "$base.sha256" ] && (cd "$cache/base-image" && sha256sum --check --status "$base.sha256"); }

if there; then
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

# What debootstrap mounts is seen by nothing else, and goes with the last process, also when all of them are killed.
if [ -z "${MGPU_OWN_MOUNTS:-}" ] && unshare --mount true 2>/dev/null; then
    export MGPU_OWN_MOUNTS=1
    exec unshare --mount --propagation private sh "$0" "$@"
fi

mounts() { # what is mounted under the folder of work, the deepest first
    sed -n "s|^[^ ]* \(${folder_of_work:?}/[^ ]*\) .*|\1|p" /proc/self/mounts | sort -r
}

clean_up() { # never through a mount: that would remove what is mounted
    mounts | while read -r point; do umount "$point" || umount --lazy "$point" || true; done
    if [ -n "$(mounts)" ]; then
        say "$folder_of_work is left: this is still mounted there: $(mounts | tr '\n' ' ')"
    else
        rm -rf --one-file-system "${folder_of_work:?}"
    fi
    rm -rf "${work:-}"
}

lock "$cache/base-image"
if there; then # another set-up has made it meanwhile
    echo "$base"
    exit
fi
# Not in the cache, which people copy and clear with what is mounted in it; not in /tmp, where many a system allows no
# device files.
folder_of_work=$(mktemp -d "${TMPDIR:-/var/tmp}/mgpu-base-image-XXXXXX")
folder_of_work=$(cd "$folder_of_work" && pwd -P)
case $folder_of_work in
*[!A-Za-z0-9/._-]*) # the kernel's list of mounts would name it in another way
    rmdir "$folder_of_work"
    fail "$folder_of_work has an odd character." "What is mounted there could not be found again." \
        "Set TMPDIR to another folder, then do this again."
    ;;
esac
workplace "$cache/base-image"
trap clean_up EXIT

say "making $base with debootstrap (a minute; done once)"
try "debootstrap has failed." "Mend that, then do this again (MGPU_DEBIAN_MIRROR names another mirror)." "$folder_of_work" \
    env LC_ALL=C debootstrap --variant=minbase --keyring="$keyring" --include="$PACKAGES" "$SUITE" \
    "$folder_of_work/root" "$mirror"
for point in $(mounts); do umount "$point"; done # else it would be packed

# what differs from one time to the next, and what the image needs only to install packages
cd "$folder_of_work/root"
rm -rf var/cache/apt/* var/lib/apt/lists/* var/log/* var/cache/ldconfig/aux-cache etc/ssh/ssh_host_* tmp/*
: >etc/machine-id
rm -f etc/hostname etc/resolv.conf
find . -name __pycache__ -prune -exec rm -rf {} +
pack() {
    tar --create --file "$work/base" --use-compress-program 'gzip --no-name -6' \
        --one-file-system --exclude='./dev/*' --sort=name --mtime=@0 --numeric-owner .
}
try "The base image could not be packed." "Mend that, then do this again." "$cache" pack
(cd "$work" && sha256sum base | sed "s|base$|${base##*/}|" >sum)
mv "$work/base" "$base"
mv "$work/sum" "$base.sha256"
echo "$base"
