#!/bin/sh
# Run a daemon, kill it half-way, and have Spark say message by message whether anything was lost.
# Needs the `dmq` of this project's environment on the PATH, Java 17 or newer, and half a minute.
#
#     examples/audit.sh [ADDRESS [FOLDER]]     the report goes to FOLDER, by default ./audit-report
set -eu
address=${1:-127.0.0.1:18081}
report=${2:-audit-report}
folder=$(mktemp -d)

clean_up() {
    kill "$daemon" 2>/dev/null && wait "$daemon" || true
    rm -rf "$folder"
}
trap clean_up EXIT

serve() {
    dmq serve --data "$folder/data" --listen "$address" --metrics-listen off --log-level error &
    daemon=$!
    until dmq status --address "$address" >/dev/null 2>&1; do sleep 0.2; done
}

serve
for number in 1 2 3 4 5; do
    dmq msg send orders "order $number" --delay 1s --address "$address" >/dev/null
done
kill -9 "$daemon"
wait "$daemon" 2>/dev/null || true
serve

dmq audit run --trail "$folder/data/trail" --out "$report" --address "$address"
