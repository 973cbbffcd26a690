#!/usr/bin/env bash
# install.sh FROM TO: the programs of a build folder's bin, stripped, into TO/bin; samples and a packed text, which the
# chart's check trains on, into TO/share. install.sh --list: the programs, which are build targets too.
set -euo pipefail
PROGRAMS=(upipe upipe-calibrate upipe-coordinator upipe-data upipe-plan upipe-report upipe-run upipe-selfcheck
  upipe-trainer upipe-verify upipe-worker)

if [[ ${1:-} == --list ]]; then
  echo "${PROGRAMS[@]}"
  exit
fi
from=${1:?install.sh needs a folder with the programs} to=${2:?install.sh needs a folder to install into}
source=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
install -d "$to/bin" "$to/share"
install --strip -m 755 -t "$to/bin" "${PROGRAMS[@]/#/$from/}"
cp -r "$source/deploy/samples" "$source/proto" "$to/share/"
"$to/bin/upipe-data" pack "$source/docs/operations.md" "$source/docs/methods.md" --output "$to/share/corpus" >/dev/null
chmod -R a+rX "$to"
