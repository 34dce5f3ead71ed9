#!/usr/bin/env bash
# Installs what the tests of k8s/ need beside the project into build/k8s: kubectl where it is missing, Debian's
# Prometheus, and from npm the schemas of custom resources.
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/build/k8s
packages=(@kubernetes-models/keda@0.4.2 @kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/gateway-api@2.0.0
    @kubernetes-models/cert-manager@6.0.0)
"$(dirname "${BASH_SOURCE[0]}")/kubectl.sh"
"$(dirname "${BASH_SOURCE[0]}")/prometheus.sh"
marker=$folder/.installed
[ "$(cat "$marker" 2>/dev/null)" = "${packages[*]}" ] && exit 0
mkdir -p "$folder"
npm install --prefix "$folder" --no-save --no-audit --no-fund --silent "${packages[@]}"
echo "${packages[*]}" >"$marker"
