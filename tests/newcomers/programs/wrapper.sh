#!/bin/bash
set -eu
cd "$(dirname "$0")"
echo "given $1"
python -c 'print("hello")'
