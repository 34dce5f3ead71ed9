#!/usr/bin/env bash
# Renders every overlay into k8s/rendered, which is committed: what a change does is seen without a cluster.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
for overlay in overlays/*/; do
    [ -e "$overlay/kustomization.yaml" ] || continue
    kubectl kustomize "$overlay" >"rendered/$(basename "$overlay").yaml"
done
