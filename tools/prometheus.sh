#!/bin/sh
# Fetches Prometheus, for the tests of the alert rules and of the Grafana board: the two programs of Debian's package, without
# its service, into the cache of the tests. Outside CI nothing is fetched: those tests are skipped by name. In CI a failure
# is an error.
set -eu

cd "$(dirname "$0")/.."
cache=tests/clients/prometheus/.cache

command -v promtool >/dev/null 2>&1 && command -v prometheus >/dev/null 2>&1 && exit 0
[ -x "$cache/promtool" ] && [ -x "$cache/prometheus" ] && exit 0
if [ -z "${CI:-}" ]; then
	echo "promtool is not installed: the tests of the alert rules will be skipped"
	exit 0
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
missing() {
	tail -n 20 "$folder/log" >&2 || true
	echo "make: Prometheus is required in CI, for the tests of the alert rules: $1" >&2
	exit 1
}

command -v apt-get >/dev/null 2>&1 || missing "install it; there is no apt-get"
options="-o DPkg::Lock::Timeout=120 -o Acquire::Retries=2 -o APT::Sandbox::User=root"
fetch() {
	# shellcheck disable=SC2086 # the options are words
	(cd "$folder" && timeout -k 10 300 apt-get $options download prometheus >>log 2>&1 </dev/null)
}

echo "fetching prometheus (a package of the system)"
# The lists of a fresh machine are empty or old: they are updated only if the download fails without.
# shellcheck disable=SC2086
fetch || { timeout -k 10 180 apt-get $options update >>"$folder/log" 2>&1 </dev/null && fetch; } ||
	missing "apt-get could not fetch it"
mkdir -p "$cache"
dpkg-deb --fsys-tarfile "$folder"/prometheus_*.deb |
	tar -x -C "$folder" ./usr/bin/promtool ./usr/bin/prometheus || missing "its package has other files"
mv "$folder/usr/bin/promtool" "$folder/usr/bin/prometheus" "$cache/"
