#!/bin/sh
# The Python of Pulumi's language host. Before each operation the host asks it for all installed packages, to learn
# which plug-ins they need. pip takes half a second and more for the answer, which our own module has in a tenth of that.
case "$*" in
"-m pip list -v --format json") exec "${MGPU_PYTHON:-python3}" -P -m mgpu.iac.engine.packages ;;
esac
exec "${MGPU_PYTHON:-python3}" "$@"
