#!/usr/bin/env bash
# Resolve pyproject.toml into the two locked requirement files, with hashes for every platform (maintainers only).
# torch stays out of them: its CPU wheel comes from another index than the rest, so its version is pinned in
# pyproject.toml and its own CUDA-only dependencies (nvidia-*, cuda-*, triton) must never be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

UV=${UV:-uv}
command -v "$UV" >/dev/null || { echo "error: uv not found (mend: pip install uv, or UV=/path/to/uv $0)" >&2; exit 2; }

# One version of each package for all Python versions, so that everybody's venv is the image's.
compile() {
  "$UV" pip compile pyproject.toml --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
    --no-emit-package torch --no-header --quiet "$@"
}

gpu_only=()
while read -r name; do
  gpu_only+=(--no-emit-package "$name")
done < <(compile --extra dev --no-annotate --no-emit-index-url | sed -nE 's/^((nvidia|cuda|triton)[a-z0-9-]*)==.*/\1/p')

note="# Made by docker/lock.sh from pyproject.toml: do not edit. torch is pinned in pyproject.toml."
write() {
  local out=$1
  shift
  # uv keeps the versions that the file has, where they still fit; UV_UPGRADE=1 takes the newest.
  compile "${gpu_only[@]}" "$@" --output-file "$out" >/dev/null
  { echo "$note"; cat "$out"; } >"$out.tmp"
  mv "$out.tmp" "$out"
  echo "$out: $(grep -c '==' "$out") packages"
}
write docker/requirements.txt
write docker/requirements-dev.txt --extra dev
