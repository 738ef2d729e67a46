#!/bin/sh
# Installs what the benchmarks compare with, next to what is there: none of them may change a version of ours.
# Usage: sh benchmarks/peers.sh [PYTHON]
set -eu
exec "${1:-python}" -m pip install --no-deps dflash==0.1.0 specforge==0.2.0 speculators==0.9.0 trl==1.16.0
