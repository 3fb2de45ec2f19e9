#!/usr/bin/env bash
# Continue $1 with the newest checkpoint: the compose volume's where there is one, else what `make demo` trained.
set -euo pipefail
cd "$(dirname "$0")/.."

prompt=$1
project=${COMPOSE_PROJECT_NAME:-lantrain}
if docker info >/dev/null 2>&1 && [ -n "$(docker volume ls --quiet --filter "label=com.docker.compose.project=$project")" ]; then
  exec docker compose run --rm --no-deps --no-TTY master python -m scripts.sample --prompt="$prompt"
fi
if [ -x "${VENV:-.venv}/bin/python" ] && [ -d "$NANOCHAT_BASE_DIR/base_checkpoints" ]; then
  python=$(cd "$(dirname "${VENV:-.venv}/bin/python")" && pwd)/python
  cd app
  exec "$python" -m scripts.sample --prompt="$prompt"
fi
echo "error: no model has been trained here (mend: make demo, or make up)" >&2
exit 2
