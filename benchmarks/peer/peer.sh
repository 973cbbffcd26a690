#!/usr/bin/env bash
# ./dev bench peer: makes the peer's virtual environment (PyTorch), packs text for both sides and runs peer_bench.py.
# Uses what ./dev built; options go to peer_bench.py, e.g. --quick.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

WANTED=benchmarks/peer/requirements.txt
VENV=build/venv-peer
WORK=out/bench-peer
TEXT=/usr/include   # as ./dev demo trains on

say() { printf '\n== %s\n' "$*"; }
die() { printf 'bench peer: %s\n' "$*" >&2; exit 1; }

# A copy of the list that was installed lies in the environment once all of it is there.
make_environment() {
  cmp -s "$WANTED" "$VENV/installed.txt" && return
  say "installing PyTorch into build/venv-peer (some gigabytes)"
  rm -rf "$VENV"
  /usr/bin/python3 -m venv "$VENV" || die "cannot make a virtual environment; is python3-venv installed?"
  "$VENV/bin/pip" install --disable-pip-version-check --retries 1 -r "$WANTED" >build/venv-peer.log 2>&1 ||
    die "pip could not install PyTorch (build/venv-peer.log says why); this benchmark needs a package index in reach"
  cp "$WANTED" "$VENV/installed.txt"
}

stop_service() {
  [[ -d $WORK/state ]] && XDG_STATE_HOME=$PWD/$WORK/state build/bin/upipe local down >/dev/null 2>&1
  return 0
}

main() {
  make_environment
  stop_service   # one that a killed run left
  rm -rf "$WORK"
  mkdir -p "$WORK"
  trap stop_service EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  build/bin/upipe-data pack "$TEXT" --output "$WORK/data" --max-bytes 8MiB
  "$VENV/bin/python" benchmarks/peer/peer_bench.py --bin-dir build/bin --work-dir "$WORK" --data "$WORK/data" "$@"
}

main "$@"
