#!/usr/bin/env bash
# The demo as a person runs it, two steps long: a report that holds together, nothing left running; and when it is
# interrupted, nothing left running either.
set -euo pipefail

demo=$UPIPE_SOURCE_DIR/tools/demo/demo.sh
scratch=$(mktemp -d)
export UPIPE_DEMO_OUT=$scratch/out
demo_pid=

finish() {
  [[ -z $demo_pid ]] || kill "$demo_pid" 2>/dev/null || true
  wait
  left_running | while read -r pid _; do kill -9 "$pid" 2>/dev/null || true; done
  rm -rf "$scratch"
}
trap finish EXIT

fail() {
  printf 'demo_test: %s\n' "$*" >&2
  tail -n 30 "$scratch"/*.log >&2
  exit 1
}

# Programs of this test's clusters, trainers included: their environment names its folder.
left_running() {
  local process
  for process in /proc/[0-9]*; do
    if grep -qzF "=$UPIPE_DEMO_OUT/state" "$process/environ" 2>/dev/null; then
      printf '%s %s\n' "${process#/proc/}" "$(readlink "$process/exe" 2>/dev/null || true)"
    fi
  done
}

succeeds() {
  "$demo" --data "$UPIPE_SOURCE_DIR/engine" --steps 2 >"$scratch/short.log" 2>&1 || fail "the demo failed"
  grep -q '"ok": true' "$UPIPE_DEMO_OUT/summary.json" || fail "summary.json says the run is not as it should be"
  grep -q '"as_planned_to_the_byte": true' "$UPIPE_DEMO_OUT/summary.json" || fail "memory is not as planned"
  grep -q 'Loss by position' "$UPIPE_DEMO_OUT/report.html" || fail "report.html lacks the loss by position"
  grep -q '<svg' "$UPIPE_DEMO_OUT/report.html" || fail "report.html has no picture"
  ! grep -qE 'https?://|<script|<link|src=' "$UPIPE_DEMO_OUT/report.html" || fail "report.html is not self-contained"
  [[ ! -e $UPIPE_DEMO_OUT/state ]] || fail "the daemons' state was left without --keep"
  [[ -z $(left_running) ]] || fail "left running: $(left_running)"
}

is_interrupted() {
  "$demo" --data "$UPIPE_SOURCE_DIR/engine" --steps 1000 >"$scratch/long.log" 2>&1 &
  demo_pid=$!
  local deadline=$((SECONDS + 60))
  until grep -q '^step [0-9]' "$scratch/long.log"; do
    ((SECONDS < deadline)) || fail "no step within 60 s"
    kill -0 "$demo_pid" 2>/dev/null || fail "the demo ended before its first step"
    read -rt 0.02 <> <(:) || true
  done
  (($(left_running | grep -c trainer) == 4)) || fail "of four trainers this check sees: $(left_running)"
  kill -TERM "$demo_pid"
  local outcome=0
  wait "$demo_pid" || outcome=$?
  demo_pid=
  ((outcome == 143)) || fail "interrupted, the demo exits with $outcome and not 143"
  [[ -z $(left_running) ]] || fail "left running: $(left_running)"
}

succeeds
is_interrupted
