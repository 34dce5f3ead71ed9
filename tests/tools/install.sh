#!/usr/bin/env bash
# Makes the environments in build/tools that hold others' libraries and tools, each its own where what they stand on
# quarrels: tests/tools/install.sh [clients] [instructor] [guidellm] [aiperf] [lm_eval] [npm]; all of them by default.
# What is there is kept. vLLM's `bench serve` is in .venv-vllm, which make test-vllm makes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=build/tools
declare -A packages=(
    [clients]="openai>=3,<4 litellm>=1,<2 langchain-openai>=1,<2 pydantic-ai-slim[openai]>=2.60,<3"
    [instructor]="instructor>=1,<2"  # of an older openai
    [guidellm]="guidellm>=0.8,<0.9"
    [aiperf]="aiperf>=0.13,<0.14"
    [lm_eval]="lm_eval[api]>=0.4.13,<0.5 transformers"
    [npm]="ai@7 @ai-sdk/openai-compatible@3 openai@7 zod@4"
)
install() {
    mkdir -p "$1"
    if [ "${1##*/}" = npm ]; then
        npm install --prefix "$1" --no-audit --no-fund --no-package-lock --ignore-scripts --loglevel error "${@:2}"
    else
        [ -x "$1/bin/python" ] || "${PYTHON:-python3}" -m venv "$1"
        "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
    fi
}

versions() {
    if [ "${1##*/}" = npm ]; then
        npm ls --prefix "$1" --depth 0 | sed -n 's/^[├└]── /npm: /p'
    else
        "$1/bin/python" -c 'import re, sys; from importlib.metadata import version
for name in sys.argv[2:]: name = re.match("[a-z_-]+", name)[0]; print(f"{sys.argv[1]}: {name} {version(name)}")' "${1##*/}" "${@:2}"
    fi
}

for name in "${@:-clients instructor guidellm aiperf lm_eval npm}"; do
    for one in $name; do
        [ -n "${packages[$one]:-}" ] || { echo "unknown environment $one: ${!packages[*]}" >&2; exit 2; }
        read -ra wanted <<<"${packages[$one]}"
        [ -f "$folder/$one/.installed" ] || install "$folder/$one" "${wanted[@]}"
        touch "$folder/$one/.installed"
        versions "$folder/$one" "${wanted[@]}"
    done
done
