#!/usr/bin/env bash
# Puts Debian's Prometheus and its promtool into build/k8s, without installing them.
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/build/k8s
[ -x "$folder/usr/bin/prometheus" ] && exit 0
mkdir -p "$folder"
cd "$folder"
apt-get download -qq prometheus || { apt-get update -qq; apt-get download -qq prometheus; }
dpkg --extract prometheus_*.deb .
rm prometheus_*.deb
