#!/usr/bin/env bash
# pod_root.sh FOLDER USER SHARE [MOUNT..] -- COMMAND..: runs COMMAND as a container of the image would run: this machine's
# /usr and SHARE/image below a root of its own that cannot be written, as USER without any capability. MOUNT is
# HOST:PATH, or SIZE:PATH for memory. In a mount and a process namespace of its own; needs root.
set -euo pipefail
root=$1 user=$2 share=$3
shift 3
mount --make-rprivate /
mount -t tmpfs -o mode=755 root "$root"
mkdir -p "$root"/{usr,etc,proc,sys,dev,run,opt/upipe}
for name in bin lib lib64 sbin; do ln -s "usr/$name" "$root/$name"; done
cp /etc/ld.so.cache "$root/etc/"
cp -L "$share/hosts" "$root/etc/hosts"
read_only() {
  mount --bind "$1" "$2"
  mount -o remount,bind,ro "$2"
}
read_only /usr "$root/usr"
read_only "$share/image" "$root/opt/upipe"
[[ ! -e /etc/alternatives ]] || { mkdir "$root/etc/alternatives"; read_only /etc/alternatives "$root/etc/alternatives"; }
mount -t proc proc "$root/proc"
read_only /sys "$root/sys"
for device in null zero full random urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
while [[ $1 != -- ]]; do
  source=${1%%:*} target=$root${1#*:}
  mkdir -p "$target"
  if [[ $source == /* ]]; then mount --bind "$source" "$target"; else
    mount -t tmpfs -o "size=$source,mode=1777" shm "$target"
  fi
  shift
done
shift
mount -o remount,ro "$root"
cd "$root"
exec chroot "$root" setpriv --pdeathsig KILL --reuid "$user" --regid "$user" --groups "$user" \
  --bounding-set=-all --inh-caps=-all --no-new-privs -- "$@"
