# What the scripts of set-up share; each reads it in first. POSIX sh, Linux.

# A service of systemd's, and many a container, have none; uv and Go ask for it, too.
if [ -z "${HOME:-}" ]; then
    who=$(id -un 2>/dev/null) || who=
    case $(eval echo "~$who") in # a user without a name has none
    /*) export HOME="$(eval echo "~$who")" ;;
    esac
fi

case ${XDG_CACHE_HOME:-} in # a relative one is ignored, as the specification wants it and mgpu/paths.py does
/*) cache=$XDG_CACHE_HOME/mgpu ;;
*) cache=$HOME/.cache/mgpu ;;
esac

# The certificates that this machine trusts. uv and many a pip bring a list of their own, which lacks what a company's
# proxy signs with. A machine without a store of its own is left to those lists.
certificates=
for each in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt \
    /etc/ssl/ca-bundle.pem /etc/ssl/cert.pem; do
    if [ -s "$each" ]; then
        certificates=$each
        export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS-1}" UV_NATIVE_TLS="${UV_NATIVE_TLS-1}" # the latter is for old uv
        break
    fi
done

say() { echo "set-up: $*" >&2; }

fail() { # what, why, next
    printf '%s\n' "$@" >&2
    exit 1
}

# Runs a command; where it fails, its last words and the error. Its output is kept in memory: the disk may be full.
try() { # what has failed then, what to do next, the folder that it writes to, command...
    what=$1 next=$2 folder=$3
    shift 3
    if words=$("$@" 2>&1); then return; fi
    printf '%s\n' "$words" | tail -n 20 >&2
    fail "$what" "$(cause "$words" "$folder")" "$next"
}

# What the words of a program that has failed show of the cause. Where they show none, nothing is guessed: a wrong guess
# sends people the wrong way.
cause() { # words, the folder that was written to
    if shows "$1" 'no space left on device|disk quota exceeded|os error (28|122)\b'; then
        echo "A disk is full, or a quota is used up. Free now: $(room "$2")."
    elif shows "$1" 'unknownissuer|certificate.verify.failed|x509: |invalid peer certificate|unable to get local issuer|self.signed certificate'; then
        echo "The server's certificate is signed by nobody whom this machine trusts (${certificates:-it has no certificates})." \
            "Behind a proxy that signs anew, add the proxy's certificate there, or set SSL_CERT_FILE to a file that has it."
    elif shows "$1" 'no such host|name resolution|name or service not known|failed to lookup address|could not resolve|dns error|nameresolutionerror'; then
        echo "The name of a server could not be resolved; the lines above say which."
    elif shows "$1" 'connection refused|connection reset|network is unreachable|no route to host|timed out|i/o timeout'; then
        echo "A server could not be reached; the lines above say which."
    elif shows "$1" 'permission denied|read-only file system'; then
        echo "A file or folder may not be written by $(id -un); the lines above say which."
    else
        echo "The lines above say why. Free now: $(room "$2")."
    fi
}

shows() { # words, pattern
    printf '%s\n' "$1" | grep -qiE "$2"
}

room() { # the folder that was written to; programs write to the folder of temporary files, too
    for each in "$1" "${TMPDIR:-/tmp}"; do
        at=$each
        while [ ! -e "$at" ]; do at=$(dirname "$at"); done
        set -- $(stat -f -c '%a %S' "$at")
        printf '%s%s MiB in %s' "${both:-}" "$(($1 * $2 / 1048576))" "$each"
        both=', '
    done
}

# One set-up at a time from here on, until this script and all that it has started have ended.
lock() { # folder, which is made
    mkdir -p "$1"
    exec 9>"$1/.lock"
    code=0
    words=$(flock -n 9 2>&1) || code=$?
    case $code in
    0) ;;
    1)
        say "waiting for another set-up on this machine to finish with $1"
        flock 9
        ;;
    *) say "$1 cannot be locked (${words:-exit code $code}): begin no second set-up before this one has ended" ;;
    esac
}

# Sets $work: a folder beside what is made, so that `mv` is one step and what is half made never has the name of the
# whole. What a killed set-up left goes: the caller has the lock.
workplace() { # folder
    rm -rf "$1"/.new-*
    work=$(mktemp -d "$1/.new-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' INT TERM HUP
}

# A folder that is made in many steps has a seal: written last, and true only of exactly these files.
seal() { # folder
    contents "$1" >"$1/.complete"
}

whole() { # folder
    [ -s "$1/.complete" ] && [ "$(contents "$1")" = "$(cat "$1/.complete")" ]
}

contents() { # folder; without bytecode, which comes with use
    find "$1" -name __pycache__ -prune -o -type f ! -name .complete -printf '%P %s\n' | LC_ALL=C sort | cksum
}

find_python() {
    for name in python3 python3.13 python3.12 python3.11 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "No Python 3.11 or newer was found on PATH." \
        "mgpu and its tools are written in it; python3 is: $(python3 --version 2>&1 || true)" \
        "Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python), then do this again."
}

pip() { # python, arguments...; its own certificates where the user has given it some
    if [ "$certificates" ] && ! "$1" -m pip config list 2>/dev/null | grep -q '\.cert='; then
        PIP_CERT=$certificates
        export PIP_CERT
    fi
    with=$1
    shift
    "$with" -m pip "$@"
}
