#!/usr/bin/env bash
# Runs one libFuzzer program over its kept inputs and what it makes of them: the same ones every time, so that a test that
# passed passes again. With UPIPE_FUZZ_SECONDS other ones for as long, from what such runs found before.
# usage: fuzz.sh PROGRAM [-LIBFUZZER_OPTION..] CORPUS_FOLDER..
set -euo pipefail
program=$1
found=$program.found  # where it keeps what it makes: the first folder
if [[ -n ${UPIPE_FUZZ_SECONDS:-} ]]; then
  choice=(-max_total_time="$UPIPE_FUZZ_SECONDS")
else
  choice=(-seed=1 -runs=4000 -max_total_time=20)
  found=$(mktemp -d)
  trap 'rm -rf "$found"' EXIT
fi
mkdir -p "$found"
# Leaks are not looked for, which needs ptrace and so fails in many containers; a process that grows ends at 1 GiB.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
outcome=0
"$program" "${choice[@]}" "$found" -timeout=10 -rss_limit_mb=1024 -detect_leaks=0 \
  -print_final_stats=1 -artifact_prefix="$program." "${@:2}" || outcome=$?
if ((outcome != 0)); then
  echo "Run $program FILE, with the file it wrote, to see it again; keep that file in ${*: -1} with what you change."
fi
exit "$outcome"
