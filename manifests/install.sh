#!/bin/sh
# The pip steps of the image, in one place: the Dockerfile runs them, and so can you in a clean virtual environment:
#
#   python3.11 -m venv /tmp/venv && PATH=/tmp/venv/bin:$PATH sh manifests/install.sh dependencies
#   PATH=/tmp/venv/bin:$PATH sh manifests/install.sh project && /tmp/venv/bin/loopmesh doctor
#
# `dependencies` needs pyproject.toml and constraints.txt alone, so that a change of code keeps that layer of the image.
# TORCH_INDEX names the index that torch comes from: https://download.pytorch.org/whl/cpu has builds without CUDA; empty
# takes pip's own, whose builds for Linux bring CUDA along. constraints.txt pins every package; torch itself pins what
# its CUDA builds need on top (triton and nvidia-*).
set -eu

checkout=$(cd "$(dirname "$0")/.." && pwd)
pip() { python -m pip --disable-pip-version-check "$@"; }

case "${1:-}" in
dependencies)
    torch=$(grep '^torch==' "$checkout/constraints.txt")
    pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
    requirements=$(mktemp)
    trap 'rm -f "$requirements"' EXIT
    python - "$checkout/pyproject.toml" >"$requirements" <<'EOF'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["dependencies"]))
EOF
    pip install --no-cache-dir --constraint "$checkout/constraints.txt" --requirement "$requirements"
    ;;
project)
    pip install --no-cache-dir --no-deps "$checkout"
    pip check
    ;;
*)
    echo "usage: install.sh dependencies | project" >&2
    exit 2
    ;;
esac
