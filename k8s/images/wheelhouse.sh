#!/usr/bin/env bash
# wheelhouse.sh [EXTRAS FOLDER]: fills build/wheelhouse with the project's wheel, kernels compiled, and all that the three
# services ask for. Needs a package index, and a C compiler; the images are then built without either. On Linux an index's
# own torch is the one for CUDA: PIP_EXTRA_INDEX_URL or PIP_CONSTRAINT choose another.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
"${PYTHON:-python3}" -m pip wheel --wheel-dir "${2:-build/wheelhouse}" ".[${1:-gateway,target,draft}]"
