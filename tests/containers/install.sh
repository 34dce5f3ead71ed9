#!/usr/bin/env bash
# Installs what builds and runs the images without a daemon: Debian's buildah, podman and debootstrap, and what podman
# wants for pods (the network between them, which it makes by iptables, their names, the process that holds a pod).
set -euo pipefail
PATH=$PATH:/usr/sbin:/usr/lib/podman:/usr/libexec/podman
missing=()
for tool in buildah podman debootstrap runc netavark iptables aardvark-dns catatonit; do
    command -v "$tool" >/dev/null || missing+=("$tool")
done
[ ${#missing[@]} = 0 ] && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "install ${missing[*]}, or run this as root on Debian" >&2; exit 1; }
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
