#!/usr/bin/env bash
# Build the trainer's image. Base: BASE_IMAGE if set, else the local one of `make base-image` if there, else the public
# one. Wheels: wheelhouse/ if `make wheels` filled it (then the build runs without any network), else the indexes.
set -euo pipefail
cd "$(dirname "$0")/.."

image=${LANTRAIN_IMAGE:-lantrain:latest}
local_base=lantrain-base:bookworm
local_build=lantrain-build:bookworm
public_base=python:3.11-slim-bookworm

docker version >/dev/null 2>&1 || {
  echo "error: no Docker engine answers (mend: install and start Docker, or use \`make demo\`, which needs none)" >&2
  exit 2
}
docker buildx version >/dev/null 2>&1 || {
  echo "error: docker has no buildx plugin (mend: sudo apt install docker-buildx, or docker-buildx-plugin)" >&2
  exit 2
}

if [ -n "${BASE_IMAGE:-}" ]; then
  base=$BASE_IMAGE
elif docker image inspect "$local_base" >/dev/null 2>&1; then
  base=$local_base
else
  base=$public_base
fi

# The C++ operations are compiled where g++ is: in BUILD_IMAGE, the local one of `make base-image`, or one that the build
# itself fetches from Debian.
compiler=$base
if [ -n "${BUILD_IMAGE:-}" ]; then
  compiler=$BUILD_IMAGE
elif docker image inspect "$local_build" >/dev/null 2>&1; then
  compiler=$local_build
fi

network=()
wheels="the package index"
if compgen -G 'wheelhouse/torch-*.whl' >/dev/null; then
  wheels="wheelhouse/"
  if [ "$compiler" != "$base" ]; then
    network=(--network none)
    wheels="wheelhouse/, no network"
  fi
fi

version=$(sed -nE 's/^__version__ = "(.*)"/\1/p' app/lantrain/__init__.py)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain -- app data docker pyproject.toml 2>/dev/null)" ] || revision=$revision-dirty

echo "image: $image $version from $base; packages from $wheels"
DOCKER_BUILDKIT=1 docker build --file docker/Dockerfile --tag "$image" "${network[@]}" --progress "${PROGRESS:-auto}" \
  --build-arg "BASE_IMAGE=$base" --build-arg "BUILD_IMAGE=$compiler" --build-arg "LANTRAIN_VERSION=$version" --build-arg "LANTRAIN_REVISION=$revision" . || {
  echo "error: the image could not be built (mend: with no registry or index here, \`make base-image wheels\`; docs/offline.md)" >&2
  exit 2
}
# What this build replaced has no name any more, and would fill the disk one gigabyte at a time.
docker image prune --force --filter label=org.opencontainers.image.title=lantrain >/dev/null
docker image inspect --format "image: $image, {{.Size}} bytes, revision $revision" "$image"
