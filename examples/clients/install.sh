#!/usr/bin/env bash
# Installs Debian's packages for the clients: examples/clients/install.sh [go] [cpp] [ruby]; all of them by default.
# Node needs node and npm; build.sh fetches its two libraries.
set -euo pipefail
packages=(protobuf-compiler)
for language in "${@:-go cpp ruby}"; do
    for one in $language; do
        case "$one" in
            go) packages+=(golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev protoc-gen-go protoc-gen-go-grpc) ;;
            cpp) packages+=(g++ pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc) ;;
            ruby) packages+=(ruby ruby-grpc ruby-googleapis-common-protos-types protobuf-compiler-grpc) ;;
            node) ;;
            *) echo "unknown language $one: go, cpp, ruby or node" >&2; exit 2 ;;
        esac
    done
done
installed=$(dpkg-query -W -f '${Package} ${Status}\n' "${packages[@]}" 2>/dev/null | awk '/ installed$/ {print $1}') || true
missing=$(comm -13 <(sort -u <<<"$installed") <(printf '%s\n' "${packages[@]}" | sort -u))
[ -z "$missing" ] && exit 0
as_root=$([ "$(id -u)" = 0 ] || echo sudo)
$as_root apt-get update -qq
# shellcheck disable=SC2086  # one word for each package
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends --no-remove $missing
