#!/usr/bin/env bash
# gpu_check_script_test.sh PROGRAM SCRIPT: the script packs an archive that runs by itself.
set -euo pipefail
program=$1
script=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

check() {
  echo "FAILED: $*" >&2
  exit 1
}

"$script" --binary "$program" --pack "$folder/check.tar.gz" | grep -q ' bytes, commit ' || check "--pack says no size"
tar -C "$folder" -xzf "$folder/check.tar.gz"
cd "$folder"
listing=$(gpu_check/gpu_check.sh --dry 2> /dev/null) || check "the archive does not list its parts"
# Every part's own time is within that of the whole, and something is to spare.
read -r own whole <<< "$(sed -nE 's/^[0-9]+ parts, ([0-9]+) s of at most ([0-9]+) s$/\1 \2/p' <<< "$listing")"
((own * 100 <= whole * 97)) || check "the parts may take $own s of $whole: $listing"
grep -q '17825792 tokens, window 4096' <<< "$listing" || check "the listing has no sizes: $listing"
gpu_check/gpu_check.sh --backend cpu --small --only elementwise > out 2> err || check "a part did not run: $(cat out err)"
grep -q 'of copy bandwidth' out || check "no numbers: $(cat out)"
grep -q '"part": "elementwise"' gpu_check.json || check "no JSON"
# Without the machine's C library, as where it is older.
LD_LIBRARY_PATH='' gpu_check/glibc/ld-linux-x86-64.so.2 --library-path gpu_check/glibc:gpu_check/lib \
  gpu_check/bin/upipe-gpu-check --help > /dev/null || check "the archive's own C library does not do"
if gpu_check/gpu_check.sh --only nothing > out 2> err; then check "a part that there is not was run"; fi
grep -q 'no part is named nothing' err || check "no word about the unknown part: $(cat err)"
if "$script" --pack > /dev/null 2> err; then check "--pack without a file"; fi
grep -q 'needs a file' err || check "no word about the file: $(cat err)"
