#!/bin/sh
# Sees to it that Chromium is here, for the tests that look at the audit's report in a real browser (marker browser).
# Outside CI nothing is installed: those tests are then skipped, by name. In CI it comes from the system's packages,
# and it is an error when it cannot be had.
set -eu

have() {
	for name in chromium chromium-browser google-chrome; do
		command -v "$name" >/dev/null 2>&1 && return 0
	done
	return 1
}

missing() {
	echo "make: Chromium is required in CI, for the tests that look at the report: $1" >&2
	exit 1
}

have && exit 0
if [ -z "${CI:-}" ]; then
	echo "chromium is not here: the tests that look at the report in a browser will be skipped"
	exit 0
fi
command -v apt-get >/dev/null 2>&1 || missing "install it; there is no apt-get to do it with"
[ "$(id -u)" -eq 0 ] || missing "install it; only root may do it with apt-get"

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
options="-o DPkg::Lock::Timeout=120 -o Acquire::Retries=2"
install() {
	# shellcheck disable=SC2086 # the options are words
	timeout -k 10 600 apt-get $options install -y --no-install-recommends chromium >>"$log" 2>&1 </dev/null
}

echo "installing chromium (a package of the system)"
# The lists of a fresh machine are empty or old: they are fetched only when it does not work without.
# shellcheck disable=SC2086
install || { timeout -k 10 180 apt-get $options update >>"$log" 2>&1 </dev/null && install; } || {
	tail -n 20 "$log" >&2
	missing "apt-get could not install it"
}
have || missing "apt-get installed it, but it is not on the PATH"
