#!/usr/bin/env bash
# build.sh FOLDER: builds every image of k8s/images with buildah, as k8s/images says, into the storage that
# CONTAINERS_STORAGE_CONF names. In FOLDER, which it keeps for the next time, lie a copy of the project, a wheelhouse, and
# Debian's Python in a root, which stands in for python:3.11 and python:3.11-slim where no registry can be reached.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3}

base() {  # base NAME PACKAGES: an image of Debian with these
    buildah images --quiet "localhost/$1" >/dev/null 2>&1 && return
    local root=$folder/$1
    rm -rf "$root"
    debootstrap --variant=minbase --include="$2" bookworm "$root" >"$folder/$1.log"
    ln -s python3 "$root/usr/bin/python"
    local container
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$root" / >/dev/null
    buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah commit --quiet --rm "$container" "localhost/$1" >/dev/null
    rm -rf "$root"
}
base outrider-test-python python3,python3-pip,gcc,libc6-dev
base outrider-test-runtime python3

# The committed lock is for PyPI's own torch, gigabytes for GPUs: here one of what this machine's pip takes.
rm -rf "$folder/project"
mkdir "$folder/project"
cd "$repository"
git ls-files -z --cached -- ':!tests' ':!outrider-bench/results' | tar --null --files-from - --create | tar -x -C "$folder/project"
cd "$folder/project"
if [ ! -d "$folder/wheelhouse" ]; then
    "$python" k8s/images/lock.py gateway,target,draft
    PYTHON=$python k8s/images/wheelhouse.sh gateway,target,draft "$folder/wheelhouse"
fi
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder/wheelhouse" .

build() {  # build NAME ARGUMENTS...
    buildah build --quiet --network none --layers=false --file "k8s/images/$1.Dockerfile" \
        --tag "localhost/outrider-$1:dev" "${@:2}" . >/dev/null
}
for service in target draft gateway; do
    build "$service" --build-context "wheelhouse=$folder/wheelhouse" \
        --build-arg PYTHON=localhost/outrider-test-python --build-arg RUNTIME=localhost/outrider-test-runtime
done
build models
