# Gives the node's SSH server a host key that nobody else has seen. Run by POSIX sh as root:
#   prepare FILE OLD    a new key, aside; prints its public half. The same one again when it is run again.
#   install FILE NEW    the new key in FILE's place; the server reads it. Harmless when it is done already.
# FILE is the server's private host key; OLD and NEW are public halves, `<type> <base64>`.
set -eu

public() { # without the comment
    set -- $(ssh-keygen -y -f "$1")
    echo "$1 $2"
}

make() {
    [ ! -s "$1" ] || return 0
    aside=$(mktemp -d "$1.XXXXXX")
    ssh-keygen -q -t ed25519 -N '' -C '' -f "$aside/key"
    mv "$aside/key" "$1" # in one step: half a key is never taken for one
    rm -rf "$aside"
}

listener() { # the pid of the server that this connection came through: the uppermost among our own ancestors
    pid=$$ found=
    while [ "$pid" -gt 0 ]; do
        case $(cat "/proc/$pid/comm") in sshd*) found=$pid ;; esac
        while read -r name value; do
            [ "$name" != PPid: ] || parent=$value
        done < "/proc/$pid/status"
        pid=$parent
    done
    echo "${found:?no SSH server is above this process}"
}

what=$1 file=$2 key=$3
case $what in
prepare)
    if [ "$(public "$file")" != "$key" ]; then
        public "$file" # an earlier call has installed it, and the server has not read it yet
    else
        make "$file.next"
        public "$file.next"
    fi
    ;;
install)
    # some servers read the file at each connection: it holds no key that nobody has heard of, not for a moment
    if [ -s "$file.next" ] && [ "$(public "$file.next")" = "$key" ]; then
        public "$file.next" > "$file.pub.next"
        mv "$file.pub.next" "$file.pub"
        mv "$file.next" "$file"
    fi
    [ "$(public "$file")" = "$key" ]
    kill -HUP "$(listener)"
    ;;
esac
