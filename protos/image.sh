#!/usr/bin/env bash
# Renews image.binpb, which later protos have to stay compatible with: protos/image.sh [--break]
# What breaks the image of before is refused, unless --break says that no peer of that protocol is left.
set -euo pipefail
source "$(dirname "$0")/workspace.sh"
if [ "${1:-}" != --break ]; then
    check_breaking
fi
buf build --exclude-source-info --output "$image"
