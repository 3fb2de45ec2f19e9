#!/usr/bin/env bash
# Remove what the project's own commands made: environment, caches, the demo's files, containers and their volume.
# The image, wheelhouse/ and data/shards stay, since they take long to get again.
set -euo pipefail
cd "$(dirname "$0")/.."

if docker compose version >/dev/null 2>&1 && docker info >/dev/null 2>&1; then
  docker compose down --volumes --remove-orphans
fi
rm -rf -- "${VENV:-.venv}" data/run .pytest_cache .mypy_cache .ruff_cache
find app tests benchmarks -name __pycache__ -type d -prune -exec rm -rf -- {} +
