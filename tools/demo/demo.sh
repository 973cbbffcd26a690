#!/usr/bin/env bash
# ./dev demo: a coordinator, two workers and four trainers on this machine's loopback train a small model on real text;
# ends with a report. Uses what ./dev build made; stops everything it started, however it ends. A test names other places
# for programs and results in UPIPE_BIN_DIR and UPIPE_DEMO_OUT.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SAMPLE=deploy/samples/demo.yaml
MARGIN=0.3    # nats the held-out loss must end under the unigram entropy
OUT=${UPIPE_DEMO_OUT:-$PWD/out/demo}
BIN=${UPIPE_BIN_DIR:-$PWD/build/bin}
data=/usr/include
steps=
keep=false
child=

usage() {
  cat <<'END'
usage: ./dev demo [--data PATH] [--steps N] [--keep]

  --data PATH   text file or folder to train on (default: /usr/include)
  --steps N     optimizer steps (default: those of deploy/samples/demo.yaml); fewer than that are too few to
                demand that the loss passes the unigram entropy
  --keep        keep the packed text, the logs and the daemons' state as well

Leaves out/demo/summary.json and out/demo/report.html.
END
}

say() { printf '\n== %s\n' "$*"; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

# In the background and waited for, so that a signal to this script is acted on at once.
attend() {
  "$@" &
  child=$!
  local outcome=0
  wait "$child" || outcome=$?
  child=
  return "$outcome"
}

stop_everything() {
  local outcome=$?
  trap - EXIT
  trap '' INT TERM HUP   # nothing hurries the cleaning up
  if [[ -n $child ]]; then
    kill "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  if [[ -d $OUT/state ]]; then
    "$BIN/upipe" local down >"$OUT/down.log" 2>&1 || { cat "$OUT/down.log" >&2; outcome=1; }
  fi
  if ((outcome == 0)) && ! $keep; then
    rm -rf "$OUT/state" "$OUT/data" "$OUT/down.log" "$OUT/ulysses.yaml" "$OUT/ulysses.jsonl"
  elif ((outcome != 0)) && [[ -d $OUT ]]; then
    printf '\ndemo: stopped (exit code %s); what it left is in %s\n' "$outcome" "$OUT" >&2
  fi
  exit "$outcome"
}

parse() {
  while (($#)); do
    case $1 in
      --data) data=${2:?--data needs a path}; shift 2 ;;
      --steps) steps=${2:?--steps needs a number}; shift 2 ;;
      --keep) keep=true; shift ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; exit 2 ;;
    esac
  done
  [[ -z $steps || $steps =~ ^[1-9][0-9]{0,8}$ ]] || die "--steps $steps is no positive number"
  [[ -r $data ]] || die "cannot read $data"
  data=$(realpath "$data")
}

# The steps that the sample asks for.
sample_steps() { awk '$1 == "steps:" { print $2 }' "$SAMPLE"; }

# `upipe submit` has told the cause and the rank's last lines; this adds what the daemons say.
show_failure() {
  "$BIN/upipe" describe demo >"$OUT/job.txt" 2>&1 || true
  local log
  for log in "$OUT"/state/upipe/local/logs/*; do
    [[ -s $log ]] && { printf '\n-- %s\n' "$log"; tail -n 15 "$log"; } >&2
  done
}

# The same model for one step with all heads in one stage, in this process: what Ulysses really takes.
measure_ulysses() {
  sed '/heads_per_stage:/d' "$SAMPLE" >"$OUT/ulysses.yaml"
  attend "$BIN/upipe-run" "$OUT/ulysses.yaml" --quiet --metrics "$OUT/ulysses.jsonl" \
    --set "data.path=$OUT/data" --set parallel.method=ulysses --set train.steps=1
}

main() {
  parse "$@"
  local started=$SECONDS outcome=0 demanded=()
  [[ -z $steps || $steps -ge $(sample_steps) ]] && demanded=(--margin "$MARGIN")
  rm -rf "$OUT"
  mkdir -p "$OUT/state"
  export XDG_STATE_HOME=$OUT/state
  unset UPIPE_COORDINATOR
  trap stop_everything EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP

  say "packing $data"
  attend "$BIN/upipe-data" pack "$data" --output "$OUT/data"

  say "starting a coordinator and two workers with two ranks each"
  attend "$BIN/upipe" local up --workers 2 --ranks-per-worker 2

  say "training $SAMPLE"
  attend "$BIN/upipe" submit "$SAMPLE" --set "data.path=$OUT/data" ${steps:+--set "train.steps=$steps"} --watch ||
    outcome=$?
  ((outcome == 0)) || { show_failure; die "the job did not succeed (exit code $outcome)"; }
  "$BIN/upipe" describe demo -o json >"$OUT/job.json"
  "$BIN/upipe" local down >/dev/null

  say "comparing with DeepSpeed-Ulysses and writing the report"
  measure_ulysses
  "$BIN/upipe-report" --job "$OUT/job.json" --state-dir "$OUT/state" --data "$OUT/data" --output "$OUT" \
    --ulysses-metrics "$OUT/ulysses.jsonl" --commit "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" \
    "${demanded[@]}"
  printf '\n%s/report.html and summary.json are written; the demo took %d s.\n' "$OUT" $((SECONDS - started))
}

main "$@"
