#!/usr/bin/env bash
# install.sh WHEELHOUSE FOLDER: README's installation without a clone, from the wheels in WHEELHOUSE and a package index,
# into the new environment FOLDER, in which no compiler is to be found; then check.py there.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
wheelhouse=$(cd "$1" && pwd)
python=${PYTHON:-python3}
[ -n "$(ls "$wheelhouse"/outrider_pair_python-*.whl 2>/dev/null)" ] ||
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheelhouse" "$here/../../outrider-pair-python"
"$python" -m venv "$2"
bin=$(cd "$2/bin" && pwd)
alone() { env -u PYTHONPATH PATH="$bin" CC=/nonexistent PIP_FIND_LINKS="$wheelhouse ${PIP_FIND_LINKS:-}" "$@"; }
alone pip install --quiet --only-binary :all: 'outrider[llm]' outrider-pair-python
alone python "$here/check.py"
