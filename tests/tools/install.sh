#!/usr/bin/env bash
# Makes the environments in build/tools that hold others' libraries and tools, each its own where what they stand on
# quarrels: tests/tools/install.sh [clients] [guidellm] [aiperf] [lm_eval] [npm]; all of them by default. What is there
# is kept. vLLM's `bench serve` is in .venv-vllm, which make test-vllm makes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=build/tools
declare -A packages=(
    [clients]="openai>=3,<4 litellm>=1,<2 langchain-openai>=1,<2 pydantic-ai-slim[openai]>=2,<3 instructor>=1,<2"
    [guidellm]="guidellm>=0.8,<0.9"
    [aiperf]="aiperf>=0.13,<0.14"
    [lm_eval]="lm_eval[api]>=0.4.13,<0.5 transformers"
    [npm]="ai@7 @ai-sdk/openai-compatible@3 openai@7 zod@4"
)
for name in "${@:-clients guidellm aiperf lm_eval npm}"; do
    for one in $name; do
        [ -n "${packages[$one]:-}" ] || { echo "unknown environment $one: ${!packages[*]}" >&2; exit 2; }
        [ -f "$folder/$one/.installed" ] && continue
        mkdir -p "$folder/$one"
        read -ra wanted <<<"${packages[$one]}"
        if [ "$one" = npm ]; then
            npm install --prefix "$folder/npm" --no-audit --no-fund --no-package-lock --ignore-scripts --loglevel error "${wanted[@]}"
        else
            [ -x "$folder/$one/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder/$one"
            "$folder/$one/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
        fi
        touch "$folder/$one/.installed"
    done
done
