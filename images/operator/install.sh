#!/bin/sh
# packages   the packages of the lock file, each with its hash
# mgpu       its programs, and the Pulumi engine
# Runs in a stage of the build that is thrown away: what it leaves outside /opt/mgpu and /opt/pulumi is in no layer.
set -eu
cd /build

if [ -e ca.pem ]; then
    cat /etc/ssl/certs/ca-certificates.crt ca.pem > trusted.pem
    export PIP_CERT=/build/trusted.pem SSL_CERT_FILE=/build/trusted.pem
fi
for secret in secrets/*; do
    if [ -e "$secret" ]; then export "${secret#secrets/}=$(cat "$secret")"; fi
done
python=/opt/mgpu/bin/python

if [ "$1" = packages ]; then
    "$PYTHON" -m venv /opt/mgpu
    "$python" -m pip install --no-input --no-cache-dir --disable-pip-version-check --progress-bar off \
        --require-hashes --no-deps --only-binary :all: -r requirements.lock
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo /opt/mgpu/src > "$site/mgpu.pth"
    exit
fi

program() { # name, module: what a wheel's installer would write
    printf '#!%s\nimport sys\nfrom %s import main\nsys.exit(main())\n' "$python" "$2" > "/opt/mgpu/bin/$1"
    chmod 755 "/opt/mgpu/bin/$1"
}
program mgpu mgpu.cli
program pulumi-resource-mgpu mgpu.iac.entry
# nobody can write it when it runs
"$python" -m compileall -q --invalidation-mode unchecked-hash /opt/mgpu/src
export XDG_CACHE_HOME=/build/cache
mkdir -p /opt/pulumi/bin
cp $("$python" -c '
from mgpu.iac.engine import install, sources
found = install.install_engine(print)
print(*({found.pulumi, *(found.host_dir / name for name in sources.FILES[1:])}))' | tail -n 1) /opt/pulumi/bin
