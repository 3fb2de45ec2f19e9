#!/usr/bin/env bash
# For CI on Debian or Ubuntu, as root: install and start what the container tests need, and nothing that is there.
# Engine, buildx and compose, mmdebstrap for the base image, iproute2 and iptables for networks.
set -euo pipefail

say() { echo "docker: $*"; }

apt_updated=
apt_install() {
  [ -n "$apt_updated" ] || apt-get update -qq
  apt_updated=yes
  say "installing $*"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need dockerd docker.io
need docker docker.io
need iptables iptables
need ip iproute2
need mmdebstrap mmdebstrap
need git git
[ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}"
command -v docker >/dev/null || apt_install docker-cli # Debian 13 has the client in a package of its own

# Debian 12 has neither buildx nor compose 2; Debian 13's packages run on it (they need libc6 >= 2.34 and nothing else).
# They are unpacked by hand from an apt state of our own, so that no newer release enters this machine's sources.
plugins_from_trixie() {
  local work sources uri key apt package
  # No trap RETURN: it would fire again in every caller.
  work=$(mktemp -d)
  chmod 755 "$work"
  sources=/etc/apt/sources.list.d/debian.sources
  [ -r "$sources" ] || sources=/etc/apt/sources.list
  uri=$(awk '/^URIs:/ {print $2; exit} /^deb / {for (i = 2; i <= NF; i++) if ($i ~ /^[a-z]+:/) {print $i; exit}}' "$sources")
  key=$(awk '/^Signed-By:/ {print $2; exit}' "$sources")
  printf 'Types: deb\nURIs: %s\nSuites: trixie\nComponents: main\nSigned-By: %s\n' \
    "$uri" "${key:-/usr/share/keyrings/debian-archive-keyring.gpg}" >"$work/trixie.sources"
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
  apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/trixie.sources" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
  (
    cd "$work"
    "${apt[@]}" update
    "${apt[@]}" download docker-buildx docker-compose
    for package in ./*.deb; do dpkg -x "$package" unpacked; done
  )
  install_plugins "$work"/unpacked/usr/libexec/docker/cli-plugins/*
  rm -rf "$work"
}

install_plugins() { install -D --mode 755 --target-directory /usr/local/lib/docker/cli-plugins "$@"; }

plugins_work() { docker buildx version >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; }

if ! plugins_work; then
  if apt-cache show docker-buildx 2>/dev/null | grep -q .; then
    apt_install docker-buildx docker-compose
  else
    say "installing buildx and compose"
    plugins_from_trixie
  fi
fi
plugins_work || { say "no working buildx and compose plugins" >&2; exit 1; }

# A killed engine leaves a pid file that stops the next one, and its containerd makes the first start time out; the
# second start then works. Never start a second engine beside a living one: it would take its bridge down.
answers() { timeout 5 docker info >/dev/null 2>&1; }
for try in 1 2 3; do
  answers && break
  pid=$(cat /var/run/docker.pid 2>/dev/null || true)
  if [ -z "$pid" ] || [ "$(cat "/proc/$pid/comm" 2>/dev/null)" != dockerd ]; then
    rm -f /var/run/docker.pid
    say "starting the engine (try $try)"
    setsid dockerd >"/var/log/dockerd.$try.log" 2>&1 </dev/null &
  fi
  for _ in $(seq 120); do
    answers && break
    sleep 0.25
  done
done
answers || { tail -n 20 /var/log/dockerd.*.log >&2; exit 1; }
say "engine $(docker version --format '{{.Server.Version}}'), $(docker compose version | head -n 1)"
