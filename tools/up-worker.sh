#!/usr/bin/env bash
# Start a worker of the master at HOST. HOST is looked at before anything is started: what runs in the background can
# only say in its log that the address was wrong.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${HOST//[[:space:]\"\']/}" ]; then
  echo "error: HOST is missing (mend: give the master's address: make up-worker HOST=192.168.1.36)" >&2
  exit 2
fi
docker/build.sh
multinode=(docker compose --file compose.multinode.yaml)
"${multinode[@]}" run --rm --no-deps --no-TTY worker python -m scripts.node check || exit 2
"${multinode[@]}" --profile worker up --detach --no-build --force-recreate worker
echo "running: \`make logs\` follows it, \`make status\` shows all nodes, \`make down\` leaves the run"
