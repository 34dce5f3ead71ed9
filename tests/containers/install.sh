#!/usr/bin/env bash
# Installs what builds and runs the images without a daemon: Debian's buildah, podman and debootstrap.
set -euo pipefail
missing=()
for tool in buildah podman debootstrap runc; do
    command -v "$tool" >/dev/null || missing+=("$tool")
done
[ ${#missing[@]} = 0 ] && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "install ${missing[*]}, or run this as root on Debian" >&2; exit 1; }
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
