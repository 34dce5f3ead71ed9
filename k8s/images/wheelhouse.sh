#!/usr/bin/env bash
# wheelhouse.sh [EXTRAS FOLDER]: fills build/wheelhouse with the wheels of the services, kernels compiled, and all that the three
# services ask for, as the lock of these extras for this platform names it: a wheel of another content is refused. Needs
# a package index, and a C compiler; the images are then built without either. On Linux an index's own torch is the one
# for CUDA: with PIP_EXTRA_INDEX_URL or PIP_CONSTRAINT choosing another, make a lock of it first (lock.py EXTRAS).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3} extras=${1:-gateway,target,draft} folder=${2:-build/wheelhouse}
lock=$("$python" k8s/images/lock.py --path "$extras")
[ -f "$lock" ] || { echo "there is no $lock: make it with $python k8s/images/lock.py $extras" >&2; exit 1; }
"$python" -m pip download --require-hashes --only-binary :all: --no-deps --dest "$folder" --requirement "$lock"
"$python" -m pip wheel --no-deps --wheel-dir "$folder" . ./outrider-vllm
