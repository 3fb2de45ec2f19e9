#!/bin/sh
# Inside the image build: put the locked packages and CPU torch into the virtual environment $1, then drop what only
# a compiler would need. Takes wheels from the wheelhouse when it is filled (no network), else from the indexes.
set -eu

venv=$1
mnt=$(dirname "$0")
cpu_index=https://download.pytorch.org/whl/cpu
torch=$(sed -nE 's/^ *"(torch==[^"]+)".*/\1/p' "$mnt/pyproject.toml")

if ls "$mnt"/wheelhouse/torch-*.whl >/dev/null 2>&1; then
  echo "packages: from wheelhouse/, no network"
  set -- --no-index --find-links "$mnt/wheelhouse"
  torch_from=
else
  echo "packages: from the package index, torch from $cpu_index"
  set --
  torch_from="--index-url $cpu_index"
fi
# --no-deps: the lock file holds all that the CPU build of torch needs; nvidia and triton packages must not come.
"$venv/bin/pip" install --no-deps --require-hashes "$@" -r "$mnt/requirements.txt"
# shellcheck disable=SC2086 # two words or none
"$venv/bin/pip" install --no-deps "$@" $torch_from "$torch"

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# What only extensions compiled against torch and pyarrow need, network services that pyarrow can talk to, and the
# packages' own tests: 250 MB that nothing in the image uses. torch/bin keeps torch_shm_manager, which shared-memory
# tensors start; numpy keeps its tests, since numpy.testing imports from them.
rm -rf "$site"/torch/include "$site"/torch/share "$site"/torch/test "$site"/pyarrow/include
rm -f "$site"/pyarrow/libarrow_flight.* "$site"/pyarrow/libarrow_python_flight.* "$site"/pyarrow/_flight.* \
  "$site"/pyarrow/libarrow_s3.* "$site"/pyarrow/_s3fs.*
find "$site/torch/bin" -type f ! -name torch_shm_manager -delete
find "$site/torch/lib" "$site/pyarrow" -name '*.a' -delete
find "$site" -type d -name tests ! -path "$site/numpy/*" -prune -exec rm -rf {} +
# The image is finished: what installs packages is not needed any more, and is one thing less to patch.
"$venv/bin/pip" uninstall --yes pip
"$venv/bin/python" - <<'PY'
import matplotlib.pyplot
import numpy.testing
import pyarrow.parquet
import torch
import torch.distributed.run

assert torch.distributed.is_gloo_available() and torch.version.cuda is None
PY
