#!/usr/bin/env bash
# run.sh FOLDER MODELS COMMAND...: runs a service of layers.sh as its container would: the folder at /app and the models
# at /models, a read-only root without a compiler or a shell, scratch space at /tmp alone, and no privileges. Python and
# the libraries beneath it are this machine's; PACKAGES adds a folder of packages that layers.sh was told to leave out.
set -euo pipefail
folder=$(realpath "$1") models=$(realpath "$2")
shift 2
prefix=$("${PYTHON:-python3}" -c 'import sys; print(sys.base_prefix)')
libraries=/usr/lib/$(uname -m)-linux-gnu
export folder models prefix libraries packages=${PACKAGES:-$folder}
[ "$(id -u)" = 0 ] && user=() || user=(--user --map-root-user)
# shellcheck disable=SC2016  # the inner shell expands
exec unshare "${user[@]}" --mount --propagation private bash -euc '
    root=$(mktemp -d)
    mount -t tmpfs -o mode=755 tmpfs "$root"
    place() { mkdir -p "$root$2"; mount --bind "$1" "$root$2"; mount -o remount,bind,ro "$root$2"; }
    place "$libraries" "$libraries"
    place "$prefix" /python
    place "$folder" /app
    place "$packages" /packages
    place "$models" /models
    ln -s usr/lib "$root/lib"
    cp -aL /lib64 "$root/lib64"
    mkdir -p "$root"/{proc,dev,etc,tmp}
    mount --rbind /proc "$root/proc"
    for device in null zero urandom; do touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
    cp /etc/passwd /etc/hosts /etc/nsswitch.conf "$root/etc/" 2>/dev/null || true
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    mount -o remount,ro "$root"
    drop=()
    [ "$(awk "{print \$3}" /proc/self/uid_map)" -gt 10001 ] && drop=(--userspec=10001:10001)
    exec env -i PATH=/python/bin HOME=/tmp PYTHONPATH=/app:/packages LD_LIBRARY_PATH=/app/lib:/python/lib \
        PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 XDG_CACHE_HOME=/tmp/cache OMP_NUM_THREADS=1 \
        "$(command -v chroot)" "${drop[@]}" "$root" "$@"
' bash "$@"
