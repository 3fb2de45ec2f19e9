#!/usr/bin/env bash
# Make or refresh .venv: CPU torch and the locked packages; `tools/venv.sh dev` adds what the tests and lint need.
# Does nothing when the virtual environment already has what the lock files ask for.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=${1:-run}
venv=${VENV:-.venv}
cpu_index=https://download.pytorch.org/whl/cpu
# 3.14 is the newest Python that torch 2.13 has wheels for.
suits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'

fail() {
  echo "error: $1 (mend: $2)" >&2
  exit 2
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    "$PYTHON" -c "$suits" 2>/dev/null || fail "PYTHON=$PYTHON is not a Python 3.11 to 3.14" "unset PYTHON, or point it at one"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.11 python3.12 python3.13 python3.14 python; do
    if command -v "$candidate" >/dev/null && "$candidate" -c "$suits" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 to 3.14 on the PATH" "install one, e.g. sudo apt install python3 python3-venv, or make PYTHON=/path/to/python3 demo"
}

create_venv() {
  local python
  python=$(find_python)
  # Debian and Ubuntu ship venv and ensurepip in a package of their own; without it `-m venv` leaves half an environment.
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments" "sudo apt install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  echo "venv: making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
}

torch_version() { sed -nE 's/^ *"(torch==[^"]+)".*/\1/p' pyproject.toml; }

stamp_for() {
  "$venv/bin/python" - "$@" <<'PY'
import hashlib, sys
print(hashlib.sha256("\n".join([sys.version, sys.argv[1], *(open(f).read() for f in sys.argv[2:])]).encode()).hexdigest())
PY
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# The answer must come within five seconds, name resolution included, or we go on without the index.
cpu_index_answers() {
  "$venv/bin/python" - "$cpu_index/torch/" <<'PY' 2>/dev/null
import os, sys, threading, urllib.request
threading.Timer(5, os._exit, [1]).start()
try:
    request = urllib.request.Request(sys.argv[1], method="HEAD")
    os._exit(0 if urllib.request.urlopen(request, timeout=4).status == 200 else 1)
except OSError:
    os._exit(1)
PY
}

install_locked() {
  local lock=$1
  if compgen -G 'wheelhouse/*.whl' >/dev/null && [ "$lock" = docker/requirements.txt ]; then
    echo "venv: installing $lock from wheelhouse/"
    if pip install --quiet --no-index --find-links wheelhouse --no-deps --require-hashes -r "$lock" 2>/dev/null; then return; fi
    echo "venv: wheelhouse/ does not fit this Python or the lock file; using the package index"
  fi
  echo "venv: installing $lock from the package index"
  pip install --quiet --no-deps --require-hashes -r "$lock" ||
    fail "the packages of $lock could not be installed" "check the network, or fill wheelhouse/ on another machine: docs/offline.md"
}

# --no-deps: everything that the CPU build needs is in the lock file, and the nvidia packages must not come.
install_torch() {
  local torch
  torch=$(torch_version)
  if compgen -G "wheelhouse/torch-*.whl" >/dev/null &&
    pip install --quiet --no-index --find-links wheelhouse --no-deps "$torch" 2>/dev/null; then
    echo "venv: $torch from wheelhouse/"
  elif cpu_index_answers; then
    echo "venv: $torch from $cpu_index (about 200 MB)"
    pip install --quiet --no-deps --index-url "$cpu_index" "$torch" ||
      fail "$torch could not be installed from $cpu_index" "try again, or fill wheelhouse/: docs/offline.md"
  else
    echo "venv: $cpu_index does not answer; $torch from the configured package index"
    pip install --quiet "$torch" || fail "$torch could not be installed" "check the network, or fill wheelhouse/: docs/offline.md"
  fi
  "$venv/bin/python" -c 'import torch; print("venv: torch", torch.__version__, "" if torch.version.cuda is None else "(a CUDA build: the CPU index did not answer; it works, but is large)")'
}

case $profile in
  run) locks=(docker/requirements.txt) ;;
  dev) locks=(docker/requirements.txt docker/requirements-dev.txt) ;;
  *) fail "unknown profile $profile" "tools/venv.sh [run|dev]" ;;
esac

"$venv/bin/python" -c "$suits" 2>/dev/null || create_venv
for lock in "${locks[@]}"; do
  want=$(stamp_for "$(torch_version)" "$lock")
  stamp=$venv/.stamp-$(basename "$lock" .txt)
  [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && continue
  rm -f "$stamp"
  install_locked "$lock"
  [ "$lock" != docker/requirements.txt ] || install_torch
  echo "$want" >"$stamp"
done

# The C++ operations, for this machine's kinds of CPU; without g++ the trainer uses PyTorch's operators and says so.
kernels=app/lantrain/model/kernels
if [ -z "$(find "$kernels/lib" -name '*.so' 2>/dev/null)" ] ||
  [ -n "$(find "$kernels" -maxdepth 1 -type f -newer "$(find "$kernels/lib" -name '*.so' | head -n 1)")" ]; then
  "$venv/bin/python" "$kernels/build.py" || echo "venv: the C++ operations could not be compiled; PyTorch's are used"
fi
