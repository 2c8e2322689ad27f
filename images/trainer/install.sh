#!/bin/sh
# The packages of the lock files, each with its hash. Runs in a stage of the build that is thrown away: what it leaves
# outside /opt/mgpu and /opt/torch, /build above all, is in no layer of the image.
set -eu
cd /build

if [ -e ca.pem ]; then
    cat /etc/ssl/certs/ca-certificates.crt ca.pem > trusted.pem
    export PIP_CERT=/build/trusted.pem SSL_CERT_FILE=/build/trusted.pem
fi
for secret in secrets/*; do
    if [ -e "$secret" ]; then export "${secret#secrets/}=$(cat "$secret")"; fi
done

"$PYTHON" -m venv /opt/mgpu
python=/opt/mgpu/bin/python
install() {
    "$python" -m pip install --no-input --no-cache-dir --disable-pip-version-check --progress-bar off \
        --require-hashes --no-deps --only-binary :all: "$@"
}
install -r requirements.lock
# a folder of its own: the largest layer changes with torch alone, and the folder can be mounted instead
mkdir /opt/torch
if [ -n "$TORCH" ]; then install --target /opt/torch -r torch.lock; fi
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' /opt/mgpu/src /opt/torch > "$site/mgpu.pth"
for extra in $EXTRAS; do # DeepSpeed is a source package: torch's setuptools build it, not an older one of the venv
    PYTHONPATH=/opt/torch install --no-binary deepspeed --no-build-isolation --use-pep517 -r "extras/$extra.lock"
done
"$python" labels.py
