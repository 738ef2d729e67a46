#!/bin/sh
# The base image of the image tests where no registry can be reached: Debian's Python, through debootstrap. Prints its
# name. Made once (about 100 s), then found in the local storage, or imported from .cache/base.tar (5 s).
set -eu
cd "$(dirname "$0")/.."
name=localhost/dflash-base:bookworm
mkdir -p .cache
exec 9>.cache/base.lock # two test processes may want it at once
flock 9
podman image exists "$name" && { echo "$name"; exit 0; }
tar=.cache/base.tar
if [ ! -f "$tar" ]; then
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv,python3-distutils \
        bookworm "$root" >&2
    rm -f "$root"/usr/lib/python3.11/EXTERNALLY-MANAGED "$root"/var/cache/apt/archives/*.deb
    ln -sf /usr/bin/python3 "$root/usr/local/bin/python"
    ln -sf /usr/bin/pip3 "$root/usr/local/bin/pip"
    tar -C "$root" -cf "$tar.part" .
    mv "$tar.part" "$tar"
fi
podman import -q "$tar" "$name" >/dev/null
echo "$name"
