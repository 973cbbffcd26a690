#!/usr/bin/env bash
# Proves the README on a machine that has nothing: makes a minimal Debian 12 root, clones HEAD into it, runs the README's
# two commands there, and leaves docs/fresh-machine.log. Run it after every change of dev's PACKAGES; a tidy test asks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SUITE=bookworm
LOG=$PWD/docs/fresh-machine.log
SOURCE=/usr/src/upipe   # of the clone, inside the root
TAIL_LINES=40
root=$PWD/out/fresh-machine
keep=false
run=true
made=false              # the root is ours to remove
child=
scratch=

usage() {
  cat <<'END'
usage: tools/fresh_machine.sh [--root DIR] [--keep] [--no-run]

  --root DIR   where to make the root; must not exist (default: out/fresh-machine)
  --keep       leave it there
  --no-run     only make it, with the clone, and leave it there

Needs root; installs debootstrap when it is missing, and takes the mirror from this machine's own apt sources. Takes as
long as a first build and the whole test suite. Writes docs/fresh-machine.log when both commands succeed.
END
}

say() { printf '\n== %s\n' "$*"; }
die() { printf 'fresh_machine: %s\n' "$*" >&2; exit 1; }

parse() {
  while (($#)); do
    case $1 in
      --root) root=${2:?--root needs a folder}; shift 2 ;;
      --keep) keep=true; shift ;;
      --no-run) run=false; keep=true; shift ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; exit 2 ;;
    esac
  done
  ((EUID == 0)) || die "needs root: it makes a root file system and mounts into it"
  [[ ! -e $root ]] || die "$root exists; remove it, or name another folder with --root"
  root=$(realpath -m "$root")
}

# In the background and waited for, so that a signal to this script is acted on at once.
attend() {
  "$@" &
  child=$!
  local outcome=0
  wait "$child" || outcome=$?
  child=
  return "$outcome"
}

mounts_below() { awk -v root="$root/" 'index($2 "/", root) == 1 { print $2 }' /proc/self/mounts; }

# What runs inside the root, started by whoever.
kill_inside() {
  local process
  for process in /proc/[0-9]*; do
    if [[ $(readlink "$process/root" 2>/dev/null) == "$root" ]]; then
      kill -KILL "${process#/proc/}" 2>/dev/null || true
    fi
  done
}

unmount_all() {
  local mount
  while read -r mount; do
    umount --recursive "$mount" 2>/dev/null || umount --recursive --lazy "$mount" 2>/dev/null || true
  done < <(mounts_below | sort -r)
  [[ -z $(mounts_below) ]]
}

finish() {
  local outcome=$?
  trap - EXIT
  trap '' INT TERM HUP
  if [[ -n $child ]]; then
    kill "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  if $made; then
    kill_inside
    if ! unmount_all; then
      # Removing the root now could reach through a mount into this machine.
      printf 'fresh_machine: still mounted, left in place: %s\n' "$(mounts_below | xargs)" >&2
      outcome=1
    elif ! $keep; then
      rm -rf --one-file-system "$root"
    fi
  fi
  [[ -z $scratch ]] || rm -rf "$scratch"
  exit "$outcome"
}

# The archive this machine itself installs from: the first source that offers its Debian.
mirror() {
  local found
  found=$(cat /etc/apt/sources.list.d/*.sources 2>/dev/null | awk '
    function done_stanza() { if (uri != "" && suites ~ /(^| )(bookworm|stable|trixie)( |$)/) { print uri; exit } }
    /^URIs:/ { uri = $2 } /^Suites:/ { $1 = ""; suites = $0 " " } /^$/ { done_stanza(); uri = suites = "" }
    END { done_stanza() }')
  [[ -n $found ]] || found=$(awk '$1 == "deb" { i = $2 ~ /^\[/ ? 3 : 2; print $i; exit }' /etc/apt/sources.list 2>/dev/null)
  [[ -n $found ]] || die "no archive found: neither a URIs: line in /etc/apt/sources.list.d nor a deb line in sources.list"
  head -n 1 <<<"$found"
}

make_root() {
  command -v debootstrap >/dev/null || {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap
  }
  mkdir -p "$(dirname "$root")"
  made=true
  attend debootstrap --variant=minbase "$SUITE" "$root" "$(mirror)" >"$scratch/debootstrap.log" 2>&1 ||
    { tail -n 20 "$scratch/debootstrap.log" >&2; die "debootstrap failed"; }
  # How this machine reaches its archive, if not directly.
  apt-config dump | grep -E '^Acquire::https?::Proxy' >"$root/etc/apt/apt.conf.d/proxy" || true
  # And by whose word it trusts package indexes: the package ca-certificates takes these in when it is installed.
  mkdir -p "$root/usr/local/share/ca-certificates"
  cp -r /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
  git clone --quiet --no-hardlinks "$PWD" "$root$SOURCE"
  git -C "$root$SOURCE" remote remove origin
}

mount_kernel() {
  # A mount of its own, as a machine's root is: what runs inside may make mount namespaces.
  mount --bind "$root" "$root"
  mount --make-private "$root"
  mount -t proc proc "$root/proc"
  local folder
  for folder in dev sys; do
    mount --rbind --make-rslave "/$folder" "$root/$folder"
  done
}

# With nothing of this machine's environment but how to reach the archive.
inside() {
  local names=(http_proxy https_proxy no_proxy) kept=() name
  for name in "${names[@]}"; do
    if [[ -n ${!name:-} ]]; then kept+=("$name=${!name}"); fi
  done
  env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
    "${kept[@]}" chroot "$root" /bin/bash -c "cd $SOURCE && $1"
}

# The fenced block below the README's "Two commands".
readme_commands() {
  awk '/^## Two commands/ { here = 1 } here && /^```/ { if (fenced) exit; fenced = 1; next } fenced' <(git show HEAD:README.md)
}

# Without colours, carriage returns, addresses, host names and paths of one machine.
clean() {
  local host
  host=$(hostname)
  [[ $host != localhost && $host != debian ]] || host=$'\x01'   # such a name tells nothing
  sed -E -e 's/\x1b\[[0-9;?]*[A-Za-z]//g' -e 's/.*\r([^\r])/\1/; s/\r//g' -e "s/\b$host\b/HOST/g" \
    -e 's#[a-z]+://[^ ]*#ADDRESS#g' -e 's#/(tmp|root|home|work)/#/.../#g' -e 's/[[:space:]]+$//'
}

package_versions() {
  local packages=()
  mapfile -t packages < <(sed -n '/^PACKAGES=(/,/)/p' "$root$SOURCE/dev" | sed 's/^PACKAGES=(//; s/)//' | xargs -n 1)
  inside "dpkg-query -W -f='  \${Package} \${Version}\n' ${packages[*]}"
}

# What is known so far, to the file $1.
write_log() {
  {
    echo "# The README's two commands in a minimal Debian root, by tools/fresh_machine.sh."
    echo "date     $(date -u +%Y-%m-%d)"
    echo "commit   $(git -C "$root$SOURCE" rev-parse HEAD)"
    echo "debian   $(cat "$root/etc/debian_version"), $(nproc) CPUs"
    printf '\n## Phases\n'
    cat "$scratch/phases"
    printf '\n## Packages that dev installed\n'
    package_versions
    local number=0 command
    for command in "${commands[@]}"; do
      [[ -f $scratch/output.$number ]] || break
      printf '\n## The last %s lines of: %s\n' "$TAIL_LINES" "$command"
      tail -n "$TAIL_LINES" "$scratch/output.$((number++))"
    done
  } | clean >"$1"
}

note_phase() { printf '  %6d s  %s\n' $((SECONDS - phase_began)) "$1" >>"$scratch/phases"; phase_began=$SECONDS; }

main() {
  parse "$@"
  mapfile -t commands < <(readme_commands)
  ((${#commands[@]} == 2)) || die "README.md has ${#commands[@]} lines of code below \"Two commands\", not 2"
  [[ -z $(git status --porcelain) ]] || say "uncommitted changes are not part of what is run: HEAD is"
  scratch=$(mktemp -d)
  trap finish EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  phase_began=$SECONDS

  say "making a minimal Debian root at $root"
  make_root
  note_phase "debootstrap and clone"
  if ! $run; then
    say "made $root; its clone is at $root$SOURCE"
    return
  fi
  mount_kernel
  local number=0 command
  for command in "${commands[@]}"; do
    say "$command"
    attend inside "$command" >"$scratch/output.$number" 2>&1 ||
      { tail -n "$TAIL_LINES" "$scratch/output.$number" >&2; die "$command failed"; }
    note_phase "$command"
    number=$((number + 1))
    # Into the clone: the tests that follow look there for what was installed.
    write_log "$root$SOURCE/docs/fresh-machine.log"
  done
  cp "$root$SOURCE/docs/fresh-machine.log" "$LOG"
  say "wrote ${LOG#"$PWD"/}"
}

main "$@"
