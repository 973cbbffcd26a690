#!/usr/bin/env bash
# Runs the steps of deploy/docker/Dockerfile, or of Dockerfile.cuda, without a container engine: each stage's RUN lines in a
# minimal Debian root, then every program of the image and a small training as the image's user.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

FILE=deploy/docker/Dockerfile
STEPS=tests/deploy/homes/dockerfile.py
bin=${UPIPE_BIN_DIR:-$PWD/build/bin}
build=false
toolkit=
roots=()

usage() {
  cat <<'END'
usage: deploy/docker/try_image.sh [--build | --cuda FOLDER]

  --build   run the build stage too, which compiles all programs (ten minutes on two cores); without it those of
            UPIPE_BIN_DIR or build/bin take its place
  --cuda FOLDER   both stages of Dockerfile.cuda; the toolkit in FOLDER, cuDNN and NCCL in it, stands at /usr/local/cuda of
            both roots, as in an image that has CUDA (a quarter of an hour on two cores)

Needs root, and Debian's archive as tools/fresh_machine.sh does; the roots are removed at the end.
END
}

say() { printf '\n== %s\n' "$*"; }

finish() {
  local outcome=$? root
  trap - EXIT
  for root in "${roots[@]}"; do
    umount "$root/proc" 2>/dev/null || true
    umount "$root/usr/local/cuda" 2>/dev/null || true
    if mountpoint -q "$root/proc" || mountpoint -q "$root/usr/local/cuda"; then
      outcome=1
    else
      rm -rf --one-file-system "$root"
    fi
  done
  exit "$outcome"
}

# A minimal Debian with HEAD in /usr/src/upipe.
make_root() {
  roots+=("$1")
  tools/fresh_machine.sh --root "$1" --no-run
  mount -t proc proc "$1/proc"
  [[ -z $toolkit ]] || give_cuda "$1"
}

# What the images that Dockerfile.cuda builds on have beside Debian.
give_cuda() {
  mkdir "$1/usr/local/cuda"
  mount --bind -o ro "$toolkit" "$1/usr/local/cuda"
  echo /usr/local/cuda/lib64 >"$1/etc/ld.so.conf.d/cuda.conf"
  chroot "$1" /sbin/ldconfig
}

# inside ROOT USER FOLDER COMMAND: with nothing of this machine but how it reaches the archive.
inside() {
  local root=$1 user=$2 folder=$3
  shift 3
  env -i PATH=/opt/upipe/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/ DEBIAN_FRONTEND=noninteractive \
    ${http_proxy:+http_proxy=$http_proxy} ${https_proxy:+https_proxy=$https_proxy} \
    chroot "--userspec=$user" "$root" /bin/sh -euc "cd $folder && $*"
}

# run_stage ROOT STAGE FOLDER: its RUN lines, as they stand in the file.
run_stage() {
  local root=$1 stage=$2 folder=$3 command
  while IFS= read -r command; do
    say "RUN $command"
    inside "$root" 0:0 "$folder" "$command"
  done < <(python3 -B "$STEPS" "$FILE" "$stage" RUN)
}

main() {
  case ${1:-} in
    --build) build=true ;;
    --cuda) build=true FILE+=.cuda toolkit=$(realpath "${2:?--cuda needs a folder}") ;;
    '') ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
  trap finish EXIT
  local image=$PWD/out/image-root user
  make_root "$image"
  run_stage "$image" -1 /
  if $build; then
    local builder=$PWD/out/image-build-root
    make_root "$builder"
    run_stage "$builder" 0 /usr/src/upipe
    cp -r "$builder/opt/upipe" "$image/opt/"
  else
    deploy/docker/install.sh "$bin" "$image/opt/upipe"
  fi
  user=$(python3 -B "$STEPS" "$FILE" -1 USER)
  say "as user $user"
  local program
  for program in "$image"/opt/upipe/bin/*; do
    program=$(basename "$program")
    [[ $program == upipe-trainer ]] || inside "$image" "$user" / "$program --help >/dev/null"
  done
  inside "$image" "$user" / "upipe run /opt/upipe/share/samples/tiny.yaml --set data.path=/opt/upipe/share/corpus | tail -n 3"
  say "the image without Debian's base: $(du -sh "$image/opt/upipe" | cut -f1); $SECONDS s"
}

main "$@"
