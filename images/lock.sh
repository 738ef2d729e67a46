#!/bin/sh
# Writes the hashed locks of the images anew from images/*.in under constraints.txt; needs uv. torch is left out of the
# trainer's: which build of it (CUDA, CPU) is the variant's choice, its version stands in versions.env. FIND_LINKS names
# a folder with a CPU build of torch, so that the CUDA libraries of the other one are not locked for both.
set -eu
cd "$(dirname "$0")/.."
for image in tokenizer trainer; do
    uv pip compile -q --generate-hashes --no-header --no-annotate --python-version 3.11 \
        --python-platform x86_64-manylinux_2_28 -c constraints.txt "images/$image.in" --no-emit-package torch \
        --no-emit-package triton ${FIND_LINKS:+--find-links "$FIND_LINKS"} -o "images/requirements-$image.txt"
done
