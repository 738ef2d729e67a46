#!/bin/sh
# images/push.sh [tokenizer] [trainer]: pushes what images/build.sh built and records the digests that the registry gave
# in images/digests.env, with the lines for dflash.toml on stdout. REGISTRY names the registry.
set -eu
cd "$(dirname "$0")/.."
[ -n "${REGISTRY:-}" ] || { echo "error: REGISTRY is not set, e.g. REGISTRY=registry.example/dflash make push" >&2; exit 2; }
works() { command -v "$1" >/dev/null && "$1" info >/dev/null 2>&1; }
if [ -z "${TOOL:-}" ]; then
    for TOOL in docker podman buildah none; do works "$TOOL" && break; done
fi
[ "$TOOL" != none ] || { echo "error: none of docker, podman, buildah works here" >&2; exit 1; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
file=$(mktemp)
trap 'rm -f "$file"' EXIT
for image in "${@:-tokenizer}"; do
    tag=$REGISTRY/dflash-$image:$version
    if [ "$TOOL" = docker ]; then
        docker push "$tag" >&2
        digest=$(docker inspect --format '{{index .RepoDigests 0}}' "$tag")
        digest=${digest##*@}
    else
        "$TOOL" push ${TLS_VERIFY:+--tls-verify="$TLS_VERIFY"} --digestfile "$file" "$tag" >&2
        digest=$(cat "$file")
    fi
    touch images/digests.env
    sed -i "/^$image=/d" images/digests.env
    echo "$image=$REGISTRY/dflash-$image@$digest" >>images/digests.env
    echo "image = \"$REGISTRY/dflash-$image@$digest\""
done
