#!/usr/bin/env bash
# Download the locked wheels for the image (Linux, Python 3.11, this machine's architecture) into wheelhouse/, so that
# `make image` needs no network. Copy the folder to machines that have none.
set -euo pipefail
cd "$(dirname "$0")/.."

# VENV's Python has a pip that knows --platform; any other pip does as well.
python=${VENV:-.venv}/bin/python
[ -x "$python" ] || python=python3
cpu_index=https://download.pytorch.org/whl/cpu
torch=$(sed -nE 's/^ *"(torch==[^"]+)".*/\1/p' pyproject.toml)
arch=$(uname -m)
[ "$arch" = arm64 ] && arch=aarch64

target=(--only-binary :all: --implementation cp --python-version 3.11 --abi cp311 --abi abi3 --abi none)
for glibc in manylinux_2_36 manylinux_2_35 manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_26 \
  manylinux_2_24 manylinux_2_17 manylinux2014 manylinux2010 manylinux_2_12 manylinux_2_5 manylinux1 linux; do
  target+=(--platform "${glibc}_${arch}")
done

stamp=$(cat docker/requirements.txt <(echo "$torch $arch") | sha256sum | cut -d ' ' -f 1)
if [ "$(cat wheelhouse/.complete 2>/dev/null)" = "$stamp" ]; then
  echo "wheels: wheelhouse/ has what the lock file asks for"
  exit
fi
rm -f wheelhouse/.complete
find wheelhouse -name '*.whl' -delete
echo "wheels: the packages of docker/requirements.txt"
"$python" -m pip download --quiet --no-deps --require-hashes "${target[@]}" --dest wheelhouse -r docker/requirements.txt
echo "wheels: $torch"
# The index of CPU builds first. Where it cannot be reached, a configured index may hold the CPU build as well.
"$python" -m pip --retries 1 --timeout 10 download --quiet --no-deps "${target[@]}" --dest wheelhouse \
  --index-url "$cpu_index" "$torch" 2>/dev/null ||
  "$python" -m pip download --quiet --no-deps "${target[@]}" --dest wheelhouse "$torch"
case $(echo wheelhouse/torch-*.whl) in
  *+cpu-* | *_aarch64.whl) ;;
  *)
    rm -f wheelhouse/torch-*.whl
    echo "error: only a CUDA build of $torch can be had here (mend: make $cpu_index reachable, or copy wheelhouse/ from elsewhere)" >&2
    exit 2
    ;;
esac
echo "$stamp" >wheelhouse/.complete
echo "wheels: $(find wheelhouse -name '*.whl' | wc -l) files, $(du -sh wheelhouse | cut -f1) in wheelhouse/"
