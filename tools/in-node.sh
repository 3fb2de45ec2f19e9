#!/usr/bin/env bash
# `status` or `end` in this machine's container of a run over several machines. `end` is the master's: every node of
# the run stops at the next step, with a checkpoint; elsewhere it does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

node_container() {
  docker ps --quiet --filter "label=com.docker.compose.project=${COMPOSE_PROJECT_NAME:-lantrain}" \
    --filter "label=lantrain.node${1:+=$1}" | head -n 1
}

case $1 in
  status)
    container=$(node_container "")
    if [ -z "$container" ]; then
      echo "error: no node runs on this machine (mend: make up-master, or make up-worker HOST=...)" >&2
      exit 1
    fi
    exec docker exec "$container" python -m scripts.node status
    ;;
  end)
    container=$(node_container master)
    # The command may be killed with its container, which ends by itself once all have heard: then its code tells.
    [ -z "$container" ] || docker exec "$container" python -m scripts.node end ||
      [ "$(docker inspect --format '{{.State.Status}} {{.State.ExitCode}}' "$container" 2>&1)" = "exited 0" ] ||
      echo "the other machines could not be told; they wait for this one to return (on each: make down)" >&2
    ;;
esac
