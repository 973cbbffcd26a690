#!/usr/bin/env bash
# make_python.sh FOLDER: a Python virtual environment with requirements.txt, made once and again when that changes.
set -euo pipefail
folder=$1
requirements=$(dirname "${BASH_SOURCE[0]}")/requirements.txt
wanted=$(sha256sum <"$requirements")
[[ $(cat "$folder/made-from" 2>/dev/null) != "$wanted" ]] || exit 0
rm -rf "$folder"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { /usr/bin/python3 -m venv "$folder" &&
  "$folder/bin/pip" install --quiet --disable-pip-version-check --requirement "$requirements"; } >"$log" 2>&1; then
  tail -n 5 "$log" >&2
  echo "the deploy tests need PyPI and Debian's python3-venv to make $folder from $requirements: see above" >&2
  exit 1
fi
echo "$wanted" >"$folder/made-from"
