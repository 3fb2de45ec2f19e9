#!/usr/bin/env bash
# Build the base images from Debian packages, for sites where no container registry can be reached.
# Uses this machine's own apt sources when it runs Debian bookworm, so a local mirror is used as configured.
set -euo pipefail
cd "$(dirname "$0")/.."

tag=${1:-lantrain-base:bookworm}
build_tag=${2:-lantrain-build:bookworm}
suite=bookworm
command -v mmdebstrap >/dev/null || {
  echo "error: mmdebstrap not found (mend: sudo apt install mmdebstrap)" >&2
  exit 2
}

mirror=()
sources=/etc/apt/sources.list.d/debian.sources
if [ -r "$sources" ] && grep -q "^Suites:.*\b$suite\b" "$sources"; then
  mirror=("$sources")
fi

# Documentation, manuals and translations are a third of a minimal Debian. The Python sources stay: they are the
# sample corpus. Package lists and caches go, the image installs nothing later.
make_image() {
  local tag=$1 packages=$2
  echo "base-image: Debian $suite with $packages, into $tag"
  # merged-usr and usr-is-merged keep usrmerge and its 50 MB of Perl out. $1 in the hook is mmdebstrap's.
  # shellcheck disable=SC2016
  mmdebstrap --variant=minbase --include="$packages,usr-is-merged" \
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --customize-hook='chroot "$1" sh -c "rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/cache/* /var/log/*"' \
    --quiet "$suite" - "${mirror[@]}" |
    docker import --change 'CMD ["python3"]' \
      --change 'LABEL org.opencontainers.image.title=lantrain-base' - "$tag" >/dev/null
  docker image inspect --format "base-image: $tag, {{.Size}} bytes" "$tag"
}

make_image "$tag" python3,python3-venv,ca-certificates
# A second one compiles the C++ operations during the build of the image, and is no part of it.
make_image "$build_tag" python3,g++
