#!/usr/bin/env bash
# Everything that needs a GPU to be proven, as one command on a machine that has one. It needs bash, the driver, and of
# CUDA 13 cuBLASLt, NVRTC and (for attention by cuDNN) cuDNN 9, in the toolkit or in Python wheels (nvidia/*/lib); NCCL
# is used where there is one. The program is the one beside it in an archive, the one of the build folder, or is built
# here with nvcc. docs/gpus.md says what is checked.
#
#   tools/gpu_check/gpu_check.sh [OPTION..]              run it; options go to the program (--help)
#   tools/gpu_check/gpu_check.sh --pack FILE.tar.gz      an archive for a bare machine: unpack, run gpu_check/gpu_check.sh
#   tools/gpu_check/gpu_check.sh --binary PROGRAM ..     with that program
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
readonly here root
readonly seconds_most=480           # of a run, however it goes
readonly archive_bytes_most=$((64 * 1024 * 1024))
readonly driver_or_cuda='lib(cuda|cublas|cudnn|nccl|nvrtc|nvJitLink|nvidia)[^/]*\.so'
readonly of_glibc='^(ld-linux-x86-64|libc|libm|libdl|libpthread|librt)\.so'

fail() {
  echo "gpu_check: $*" >&2
  exit 2
}

# Folders that may hold NVIDIA's libraries, one a line: the toolkit's, then those of Python wheels.
library_folders() {
  local folder
  for folder in "${CUDA_HOME:-/usr/local/cuda}"/lib64 /usr/local/cuda*/lib64 /usr/local/cuda*/targets/x86_64-linux/lib; do
    [[ -d $folder ]] && echo "$folder"
  done
  for python in python3 python; do
    command -v "$python" > /dev/null || continue
    "$python" - << 'PYTHON' || true
import glob, site, sys
places = list(sys.path) + site.getsitepackages() + [site.getusersitepackages()]
for place in dict.fromkeys(places):
    for folder in sorted(glob.glob(place + "/nvidia/*/lib")):
        print(folder)
PYTHON
    return
  done
}

# The first of the folders that holds the file, or nothing.
folder_of() {
  local file=$1 folder
  while read -r folder; do
    if [[ -e $folder/$file ]]; then
      echo "$folder"
      return
    fi
  done <<< "$folders"
}

# Where the system's own search finds a library, or nothing.
system_folder_of() {
  local path
  path=$({ ldconfig -p 2> /dev/null || /sbin/ldconfig -p 2> /dev/null; } | awk -v file="$1" '$1 == file {print $NF; exit}')
  [[ -z $path ]] || dirname "$path"
}

find_program() {
  local candidate
  for candidate in "$here/bin/upipe-gpu-check" "$root/build-cuda/bin/upipe-gpu-check"; do
    if [[ -x $candidate ]]; then
      echo "$candidate"
      return
    fi
  done
}

build() {
  [[ -f $root/CMakePresets.json ]] || fail "no program beside this script, and no sources to build one from"
  for tool in cmake ninja; do
    command -v "$tool" > /dev/null || fail "no program is built, and there is no $tool to build it; pack one elsewhere"
  done
  local folder prefixes=
  while read -r folder; do prefixes+=${prefixes:+;}${folder%/*}; done <<< "$folders"
  (cd "$root" && cmake --preset cuda -DCMAKE_PREFIX_PATH="$prefixes" &&
    cmake --build --preset cuda --target upipe-gpu-check) >&2 || fail "the program could not be built"
}

commit() {
  if [[ -f $here/COMMIT ]]; then
    cat "$here/COMMIT"
  else
    git -C "$root" rev-parse --short HEAD 2> /dev/null || echo unknown
  fi
}

# Functions of NCCL that the program names: none is called here, but without any it would not start.
make_nccl_stand_in() {
  local program=$1 out=$2
  { nm -D --undefined-only "$program" | awk '$2 ~ /^p?nccl/ {sub(/@.*/, "", $2); print "int " $2 "(void) { return 1; }"}'; } |
    "${CC:-cc}" -shared -Wl,-soname,libnccl.so.2 -x c -o "$out" -
}

pack() {
  local program=$1 archive=$2 bytes name path
  pack_folder=$(mktemp -d)
  trap 'rm -rf "$pack_folder"' EXIT
  local to=$pack_folder/gpu_check
  mkdir -p "$to/bin" "$to/lib" "$to/glibc" "$to/stand_in"
  cp "$here/gpu_check.sh" "$to/"
  commit > "$to/COMMIT"
  cp "$program" "$to/bin/upipe-gpu-check"
  strip "$to/bin/upipe-gpu-check"
  make_nccl_stand_in "$program" "$to/stand_in/libnccl.so.2"
  while read -r name path; do
    if [[ $name =~ $driver_or_cuda ]]; then continue; fi
    if [[ $name =~ $of_glibc ]]; then cp -L "$path" "$to/glibc/"; else cp -L "$path" "$to/lib/"; fi
  done < <(ldd "$program" | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3} $1 ~ /^\// {n = split($1, a, "/"); print a[n], $1}')
  tar -C "$pack_folder" -czf "$archive" gpu_check
  bytes=$(stat -c %s "$archive")
  if ((bytes > archive_bytes_most)); then
    fail "$archive has $bytes bytes, more than $archive_bytes_most"
  fi
  echo "$archive: $bytes bytes, commit $(commit)"
}

run() {
  local program=$1 file found libraries=()
  shift
  for file in libcublasLt.so.13 libcudnn.so.9 libnvrtc.so.13 libnccl.so.2; do
    found=$(folder_of "$file")
    [[ -n $found ]] || found=$(system_folder_of "$file")
    if [[ -n $found ]]; then
      libraries+=("$found")
    elif [[ $file == libnccl.so.2 && -d $here/stand_in ]]; then
      libraries+=("$here/stand_in")
    else
      echo "gpu_check: $file is neither in the toolkit nor in Python wheels (nvidia/*/lib)" >&2
    fi
  done
  local path
  path=$(printf '%s\n' "${libraries[@]}" | awk 'NF && !seen[$0]++' | paste -sd : -)
  [[ ! -d $here/lib ]] || path=$here/lib:$path
  export UCX_HANDLE_ERRORS=none  # a crash is told by the program, not by a library's handler
  local command=("$program")
  export LD_LIBRARY_PATH=$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  # A C library older than the one the program was built with: the archive brings that one along.
  if [[ -d $here/glibc ]] && ! "$program" --help > /dev/null 2>&1; then
    local driver
    driver=$(system_folder_of libcuda.so.1)
    command=("$here/glibc/ld-linux-x86-64.so.2" --library-path
      "$here/glibc:$LD_LIBRARY_PATH${driver:+:$driver}" "$program")
    unset LD_LIBRARY_PATH
  fi
  exec timeout --kill-after=5 "$seconds_most" "${command[@]}" --commit "$(commit)" "$@"
}

archive=
program=
while (($# > 0)); do
  case $1 in
    --pack | --binary)
      [[ $# -ge 2 ]] || fail "$1 needs a file"
      if [[ $1 == --pack ]]; then archive=$2; else program=$2; fi
      shift 2
      ;;
    *) break ;;
  esac
done
folders=$(library_folders)
[[ -n $program ]] || program=$(find_program)
if [[ -z $program ]]; then
  build
  program=$(find_program)
fi
[[ -x $program ]] || fail "$program is no program"
if [[ -n $archive ]]; then
  (($# == 0)) || fail "--pack takes no other options: $*"
  pack "$program" "$archive"
else
  run "$program" "$@"
fi
