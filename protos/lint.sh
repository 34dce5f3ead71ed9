#!/usr/bin/env bash
# Lints and format-checks the protos with buf, and checks that whoever speaks the protocol of image.binpb is understood.
set -euo pipefail
source "$(dirname "$0")/workspace.sh"
buf lint
buf format --diff --exit-code protos
check_breaking
