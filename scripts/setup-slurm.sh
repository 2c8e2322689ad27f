#!/bin/sh
# Slurm, a real one to test against: Debian's packages, 40 MB, 20 s; nothing is started. Where it is there already, or
# where this user may install nothing, nothing is done: exit code 1 where it is not there afterwards.
set -eu

there() { PATH=$PATH:/usr/sbin type slurmctld slurmd munged squeue >/dev/null 2>&1; }

if ! there && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge >/dev/null
fi
there
