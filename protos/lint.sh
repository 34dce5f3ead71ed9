#!/usr/bin/env bash
# Lints and format-checks the protos with buf, offline: google/rpc/status.proto comes from the installed googleapis package.
set -euo pipefail
cd "$(dirname "$0")"
python="${PYTHON:-python}"
googleapis=$("$python" -c 'import google.rpc, pathlib; print(pathlib.Path(list(google.rpc.__path__)[0]).parents[1])')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/protos/outrider/v1" "$work/googleapis/google/rpc"
cp outrider/v1/*.proto "$work/protos/outrider/v1/"
cp "$googleapis/google/rpc/status.proto" "$work/googleapis/google/rpc/"
cat > "$work/buf.yaml" <<'YAML'
version: v2
modules:
  - path: protos
    lint:
      use: [STANDARD, COMMENTS]
  - path: googleapis
    lint:
      use: [SYNTAX_SPECIFIED]
YAML
cd "$work"
buf lint
buf format --diff --exit-code protos
