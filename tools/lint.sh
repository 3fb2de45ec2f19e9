#!/usr/bin/env bash
# All checks that need no test run. Prints each as it starts; stops at the first that fails.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${VENV:-.venv}/bin
run() {
  echo "lint: $*"
  "$@"
}

mapfile -t shell_files < <(grep -lE '^#!.*\b(ba)?sh$' -r .ci docker tools)
run "$bin/ruff" check .
run "$bin/ruff" format --check .
run "$bin/mypy"
run "$bin/shellcheck" "${shell_files[@]}"
run "$bin/hadolint" docker/Dockerfile
run "$bin/yamllint" --strict .
if docker compose version >/dev/null 2>&1; then
  run docker compose --file compose.yaml config --quiet
  run docker compose --file compose.multinode.yaml --profile master --profile worker config --quiet
else
  echo "lint: compose files not checked: no \`docker compose\` here"
fi
