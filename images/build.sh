#!/bin/sh
# images/build.sh [tokenizer] [trainer-cpu] [trainer]: builds with docker, podman or buildah, whichever works here.
#   TOOL=buildah        take this one            REGISTRY=registry.example/dflash   prefix of the names (default localhost)
#   BASE=, TORCH_BASE=  other base images than those of versions.env: any with Python 3.11 will do
# A private certificate authority or index of this machine's pip is lent to the build and does not stay in the image.
set -eu
cd "$(dirname "$0")/.."
pins=$(sed -e '/^#/d' -e '/^$/d' images/versions.env)
for pin in $pins; do # what the environment says wins over versions.env
    name=${pin%%=*}
    eval "[ -n \"\${$name:-}\" ] || $name=\${pin#*=}"
done
works() { command -v "$1" >/dev/null && "$1" info >/dev/null 2>&1; }
if [ -z "${TOOL:-}" ]; then
    for TOOL in docker podman buildah none; do works "$TOOL" && break; done
fi
[ "$TOOL" != none ] || { echo "error: none of docker, podman, buildah works here" >&2; exit 1; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
tar -c --exclude=__pycache__ tokenizer trainer images/requirements-*.txt | tar -x -C "$context"
ca=$(python3 -m pip config get global.cert 2>/dev/null || echo "${PIP_CERT:-}")
set -- "${@:-tokenizer}"
printf '[global]\n' >"$context/pip.conf"
index=$(python3 -m pip config get global.index-url 2>/dev/null || true)
[ -z "$index" ] || printf 'index-url = %s\n' "$index" >>"$context/pip.conf"
[ -z "$ca" ] || printf 'cert = /run/ca.crt\n' >>"$context/pip.conf"
wheels=$(python3 -m pip config get global.find-links 2>/dev/null || true)
lent=
if [ -d "$wheels" ] && [ "$TOOL" != docker ]; then # wheels of this machine's pip, lent like the authority
    lent="--volume $wheels:/run/wheels:ro"
    echo 'find-links = /run/wheels' >>"$context/pip.conf"
fi
secrets="--secret id=pip,src=$context/pip.conf"
[ -z "$ca" ] || secrets="$secrets --secret id=ca,src=$ca"
command=build
[ "$TOOL" != buildah ] || command=bud
for image in "$@"; do
    file=$image base=$BASE
    case $image in
        trainer) base=$CUDA_BASE ;;
        trainer-cpu) file=trainer ;;
    esac
    variant=cpu
    [ "$image" != trainer ] || variant=gpu
    tag=${REGISTRY:-localhost}/dflash-$image:$version
    # shellcheck disable=SC2086 # $lent and $secrets are lists of words
    if ! "$TOOL" $command --network host $lent $secrets -f "images/$file.Containerfile" -t "$tag" --build-arg BASE="$base" \
        --build-arg VARIANT="$variant" --build-arg VERSION="$version" --build-arg REVISION="$revision" \
        --build-arg TORCH="$TORCH" --build-arg FLASH_LINEAR_ATTENTION="$FLASH_LINEAR_ATTENTION" --build-arg CAUSAL_CONV1D="$CAUSAL_CONV1D" \
        "$context"; then
        echo "error: dflash-$image was not built" >&2
        [ "$image" != trainer ] || echo "hint: it needs $base (CUDA_BASE= names another); IMAGES=tokenizer leaves it out" >&2
        exit 1
    fi
    echo "built $tag with $TOOL" >&2
done
