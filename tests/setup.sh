#!/usr/bin/env bash
# tests/setup.sh [vm]
# Installs what the tests and the demo need on Debian 12+ or Ubuntu 24.04+ (as root), with "vm" also what the virtual machines need:
# missing Debian packages, and Python environments outside the checkout. Says first what it installs, installs only what
# is missing, and may be run again at any time, also after an interruption.
#
# Result, in ${SPARKOPS_CACHE:-$HOME/.cache/sparkops-inference}:
#   venv           on the system's Python: Ansible 12 (core 2.19) with Python 3.11, else Ansible 14 (core 2.21)
#   venv-newest    Ansible 14 (core 2.21) on a Python 3.12+, where one can be found
#   tools          promtool, out of Debian's package prometheus without its service and its web pages
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cache="${SPARKOPS_CACHE:-$HOME/.cache/sparkops-inference}"
system_python=/usr/bin/python3
virtual_machines="${1:-}"

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# --- Debian packages -------------------------------------------------------------------------------------------------

check_machine() {
    local ID='' VERSION_ID=0
    # shellcheck source=/dev/null
    . /etc/os-release
    case "$ID:${VERSION_ID%%.*}" in
        debian:1[2-9] | ubuntu:2[4-9]) ;;
        *) say "not tested on $ID $VERSION_ID (Debian 12+ and Ubuntu 24.04+ are); going on" ;;
    esac
    [ "$(id -u)" = 0 ] || die "needs root: it installs packages and the lab makes networks and containers"
    command -v apt-get >/dev/null || die "needs apt-get"
}

missing=()

# need PROGRAM PACKAGE: names the package when the program is missing (looks where Debian has daemons, too)
need() {
    PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null || missing+=("$2")
}

find_missing_packages() {
    local browser
    need ip iproute2
    need iptables iptables
    need ping iputils-ping
    need ssh openssh-client
    need rsync rsync
    need git git
    need make make
    need perl perl
    need shellcheck shellcheck
    need mmdebstrap mmdebstrap
    need docker-registry docker-registry
    need curl curl
    # A browser for the pages: the smallest one that there is (100 MB to fetch). Ubuntu has none as a package; the stage then says so.
    if ! command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null; then
        for browser in chromium-headless-shell chromium; do
            if apt-cache show "$browser" >/dev/null 2>&1; then
                missing+=("$browser")
                break
            fi
        done
    fi
    [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
    "$system_python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
    if [ "$virtual_machines" = vm ]; then
        need qemu-system-x86_64 qemu-system-x86
        need qemu-img qemu-utils
        need mkfs.ext4 e2fsprogs
    fi
    # An engine that answers is used as it is; else the lab starts one itself, so a dockerd must be there.
    if ! docker info >/dev/null 2>&1; then
        need dockerd docker.io
        # Since Debian 13 the client is a package of its own.
        if ! command -v docker >/dev/null && apt-cache show docker-cli >/dev/null 2>&1; then
            missing+=(docker-cli)
        fi
    fi
}

# Services that come with the packages are not to start: the lab runs its own engine and registries, on the same ports.
policy=/usr/sbin/policy-rc.d
forbid_services() {
    [ -e "$policy" ] && return
    printf '#!/bin/sh\n# Written by tests/setup.sh for the time of an installation.\nexit 101\n' >"$policy"
    chmod 0755 "$policy"
}

allow_services() {
    if grep -qs 'Written by tests/setup.sh' "$policy"; then rm -f "$policy"; fi
}

run_apt() {
    if ! "$@" >"$cache/apt.log" 2>&1; then
        tail -20 "$cache/apt.log" >&2
        die "failed: $* (the whole log is $cache/apt.log)"
    fi
}

# Finishes what an interrupted installation has left, also one that still goes on without its parent.
finish_dpkg() {
    local try
    for try in $(seq 150); do
        if dpkg --configure -a >"$cache/apt.log" 2>&1; then return; fi
        grep -q 'locked by another process' "$cache/apt.log" || break
        [ "$try" != 1 ] || say "waiting for another installation"
        sleep 2
    done
    tail -20 "$cache/apt.log" >&2
    die "dpkg --configure -a failed (the whole log is $cache/apt.log)"
}

install_packages() {
    allow_services # a rule left by a killed run
    find_missing_packages
    if [ "${#missing[@]}" = 0 ] && [ -z "$(dpkg --audit)" ]; then
        say "Debian packages: nothing is missing"
        return
    fi
    say "installing Debian packages: ${missing[*]:-(finishing an interrupted installation)}"
    export DEBIAN_FRONTEND=noninteractive
    trap allow_services EXIT
    forbid_services
    finish_dpkg
    run_apt apt-get -o DPkg::Lock::Timeout=300 update
    missing=()
    find_missing_packages # once more: the package lists are new
    if [ "${#missing[@]}" != 0 ]; then
        run_apt apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${missing[@]}"
    fi
    if [[ " ${missing[*]} " == *" docker-registry "* ]]; then
        systemctl disable docker-registry.service >/dev/null 2>&1 || true # nor at the next boot
    fi
    allow_services
}

# The program alone: its package is 330 MB with all that it depends on, and brings a service.
fetch_promtool() {
    local work
    [ ! -x "$cache/tools/promtool" ] || return 0
    say "taking promtool out of Debian's package prometheus (19 MB)"
    apt-cache show prometheus >/dev/null 2>&1 || run_apt apt-get -o DPkg::Lock::Timeout=300 update
    work="$(mktemp -d)"
    mkdir -p "$cache/tools"
    (cd "$work" && run_apt apt-get -o APT::Sandbox::User=root download prometheus)
    dpkg-deb --fsys-tarfile "$work"/prometheus_*.deb | tar -x -C "$work" ./usr/bin/promtool
    mv "$work/usr/bin/promtool" "$cache/tools/promtool"
    rm -rf "$work"
}

# --- Python environments ---------------------------------------------------------------------------------------------

# version PYTHON: prints "3.12" when that program runs, has venv and is a Python that Ansible's newest line takes
version() {
    "$1" -c 'import sys, ensurepip, venv
major, minor = sys.version_info[:2]
sys.exit(1) if (major, minor) < (3, 12) or (major, minor) > (3, 14) else print(f"{major}.{minor}")' 2>/dev/null
}

# Prints the newest usable Python, or nothing. Every candidate is really run: a version manager's shim may be on PATH for
# a version that is not installed.
find_newest_python() {
    local name candidate found='' best='' prefix installed
    local candidates=()
    for name in python3.14 python3.13 python3.12; do
        while read -r candidate; do
            candidates+=("$candidate")
        done < <(type -aP "$name" || true)
    done
    if command -v pyenv >/dev/null && installed="$(pyenv versions --bare 2>/dev/null)"; then
        for name in $installed; do
            prefix="$(pyenv prefix "$name" 2>/dev/null)" && candidates+=("$prefix/bin/python3")
        done
    fi
    for candidate in "${candidates[@]}"; do
        found="$(version "$candidate")" || continue
        if [ -z "$best" ] || [ "$(printf '%s\n%s\n' "${best%% *}" "$found" | sort -V | tail -1)" != "${best%% *}" ]; then
            best="$found $("$candidate" -c 'import sys; print(sys.executable)')"
        fi
    done
    printf '%s' "${best#* }"
}

# make_environment LINK PYTHON REQUIREMENTS: an environment per hash of the requirements, and a link to it
make_environment() {
    local link="$1" python="$2" requirements="$here/$3"
    local hash folder old
    hash="$({
        "$python" -c 'import sys; print(sys.version, sys.executable)'
        cat "$requirements" "$here/requirements.txt"
    } | sha256sum | cut -c1-12)"
    folder="$cache/environments/$link-$hash"
    if [ ! -e "$folder/.complete" ]; then
        say "making $link with $("$python" --version) and $(grep -c '==' "$here/requirements.txt") tools, $(grep '^ansible==' "$requirements") (about a minute)"
        rm -rf "$folder"
        "$python" -m venv "$folder"
        if ! "$folder/bin/python" -m pip install --disable-pip-version-check --requirement "$requirements" >"$cache/pip.log" 2>&1; then
            tail -20 "$cache/pip.log" >&2
            die "pip failed; the whole log is $cache/pip.log"
        fi
        touch "$folder/.complete"
    else
        say "$link is up to date: $(grep '^ansible==' "$requirements") on $("$folder/bin/python" --version)"
    fi
    ln -sfn "environments/$link-$hash" "$cache/$link"
    for old in "$cache/environments/$link"-????????????; do
        [ "$old" = "$folder" ] || rm -rf "$old"
    done
    prepare_ansible_test "$folder"
}

# prepare_ansible_test ENVIRONMENT: ansible-test fetches get-pip from the Ansible project's file host before it installs
# its tools from PyPI. Where that host is out of reach, a script at the place of its download does the same without it.
prepare_ansible_test() {
    local pip target
    pip="$(sed -n "s/^ *pip='\([0-9.]*\)',.*/\1/p" "$1"/lib/python3*/site-packages/ansible_test/_internal/python_requirements.py | head -1)"
    [ -n "$pip" ] || die "ansible-test in $1 names no version of pip; has python_requirements.py changed?"
    target="$HOME/.ansible/test/cache/get_pip_${pip//./_}.py"
    [ ! -e "$target" ] || return 0
    say "writing $target"
    mkdir -p "$(dirname "$target")"
    cat >"$target.new" <<'SCRIPT'
"""Stands in for get-pip: brings pip into an environment with what Python itself ships. Written by tests/setup.sh."""

import subprocess
import sys

arguments = [word for word in sys.argv[1:] if word not in ("--no-setuptools", "--no-wheel")]
subprocess.check_call([sys.executable, "-m", "ensurepip", "--upgrade"])
if any(not word.startswith("-") for word in arguments):
    subprocess.check_call([sys.executable, "-m", "pip", "install", *arguments])
SCRIPT
    mv "$target.new" "$target"
}

make_environments() {
    local newest system_version
    mkdir -p "$cache/environments"
    exec 9>"$cache/.lock"
    flock -n 9 || { say "waiting for another setup"; flock 9; }
    if system_version="$(version "$system_python")"; then
        say "the system's Python $system_version runs the newest line of Ansible; no second environment is needed"
        make_environment venv "$system_python" requirements-newest.txt
        ln -sfn venv "$cache/venv-newest"
        return
    fi
    make_environment venv "$system_python" requirements-py311.txt
    newest="$(find_newest_python)"
    if [ -n "$newest" ]; then
        make_environment venv-newest "$newest" requirements-newest.txt
    else
        say "no Python 3.12 or newer was found: the newest line of Ansible is left out"
        rm -f "$cache/venv-newest"
    fi
}

mkdir -p "$cache"
check_machine
install_packages
fetch_promtool
make_environments
say "ready: $cache/venv ($("$cache/venv/bin/ansible" --version | sed -n 1p))"
