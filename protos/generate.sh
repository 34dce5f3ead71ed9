#!/usr/bin/env bash
# Regenerates the committed stubs with the pinned generator (grpcio-tools 1.75.1): protos/generate.sh [OUT_DIR]
set -euo pipefail
cd "$(dirname "$0")"
out="${1:-.}"
python="${PYTHON:-python}"
googleapis=$("$python" -c 'import google.rpc, pathlib; print(pathlib.Path(list(google.rpc.__path__)[0]).parents[1])')
"$python" -m grpc_tools.protoc -I . -I "$googleapis" --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
    outrider/v1/common.proto outrider/v1/draft.proto outrider/v1/learning.proto outrider/v1/target.proto outrider/v1/generation.proto
rm -f "$out/outrider/v1/common_pb2_grpc.py"
