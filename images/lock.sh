#!/bin/sh
# Writes the hashed locks of the images anew from images/*.in under constraints.txt; needs uv.
set -eu
cd "$(dirname "$0")/.."
for image in tokenizer; do
    uv pip compile -q --generate-hashes --no-header --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        -c constraints.txt "images/$image.in" -o "images/requirements-$image.txt"
done
