#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command on RDMA devices made of software (Soft-RoCE), in a virtual machine with a kernel of its own:
#
#   scripts/rdma_vm.sh [OPTION...] MODE [--] COMMAND [ARGUMENT...]
#
#   single   one device, rxe0
#   pair     two devices, rxe0 and rxe1, on the two ends of a veth cable
#   two      two machines with one device each, rxe0, on one wire; both run COMMAND with RDMA_VM_SIDE=1 or 2
#            in their environment, the second until the first has ended
#
#   --limit SECONDS   ends the machines after this time (600)
#   --memory SIZE     of each machine (2G)
#   --cpus N          of each machine (1; with more the emulated kernel may crash while it starts)
#   --out DIR         is writable in the machines, as /out, and keeps what is written there
#   --beside LINE     two: a shell line that machine 2 runs instead of COMMAND
#   --verbose         shows the kernels' messages too
#   --help
#
# COMMAND sees this host's files and environment, runs as root in the current folder, and what it writes outside
# /out is lost.  It needs no KVM and changes nothing of this host but its packages: what is missing of qemu, busybox,
# kmod, iproute2 and libibverbs is installed if apt-get is there and this is root.  The kernel is Debian's, 6.12 if
# apt offers it; it is kept in ${XDG_CACHE_HOME:-~/.cache}/tensorferry/rdma-vm.  RDMA_VM_KERNEL names another version.
#
# The exit status is COMMAND's (two: that of machine 1, or of machine 2 if it fails first); 124 after the time limit;
# 125 if a machine ended without a status; 77 if what it needs cannot be installed here.
set -euo pipefail

limit=600 memory=2G cpus=1 out="" beside="" verbose=""
usage() { sed -n '/^# Runs/,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; }
fail() { printf 'rdma_vm.sh: %s\n' "$2" >&2; exit "$1"; }
while [[ ${1:-} == -* ]]; do
  case $1 in
    --limit) limit=$2; shift 2 ;;
    --memory) memory=$2; shift 2 ;;
    --cpus) cpus=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --beside) beside=$2; shift 2 ;;
    --verbose) verbose=1; shift ;;
    --help) usage; exit ;;
    *) fail 2 "$1 is unknown; see --help" ;;
  esac
done
mode=${1:-}
[[ $mode =~ ^(single|pair|two)$ ]] || fail 2 "the first word is single, pair or two, not '$mode'; see --help"
shift
[[ ${1:-} != -- ]] || shift
[[ $# -gt 0 ]] || fail 2 "there is no command; see --help"
[[ -z $beside || $mode == two ]] || fail 2 "--beside is for two"
[[ $(uname -m) == x86_64 ]] || fail 77 "virtual machines of $(uname -m) are not provided for"
line=$*
[[ $# -eq 1 ]] || printf -v line '%q ' "$@"

PATH=$PATH:/usr/sbin:/sbin
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tensorferry/rdma-vm
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # one preparation at a time

# ---- programs and a kernel ------------------------------------------------------------------------------------

declare -A package=(
  [qemu-system-x86_64]=qemu-system-x86 [busybox]=busybox-static [depmod]=kmod [rdma]=iproute2
  [ibv_devices]=ibverbs-utils
)
updated=""
update() { # once
  [[ $updated ]] || apt-get update -qq >&2 || return 1
  updated=1
}

needed=()
for program in "${!package[@]}"; do
  command -v "$program" >/dev/null || needed+=("${package[$program]}")
done
compgen -G '/usr/lib/*/libibverbs/librxe-*.so' >/dev/null || needed+=(ibverbs-providers)
if [[ ${#needed[@]} -gt 0 ]]; then
  echo "rdma_vm.sh: installing ${needed[*]}" >&2
  if ! update || ! DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${needed[@]}" >&2; then
    fail 77 "missing here and not to be had: ${needed[*]}"
  fi
fi
if ldd "$(command -v busybox)" 2>/dev/null | grep -q '=>'; then
  fail 77 "busybox is not linked statically: install busybox-static"
fi

cached_kernel() {
  local ready
  ready=$(find "$cache" -path '*/boot/ready' -printf '%T@ %P\n' 2>/dev/null | sort -n | tail -n 1)
  ready=${ready#* }
  echo "${ready%%/*}"
}
offered_kernel() {
  local found
  found=$(apt-cache search --names-only '^linux-image-6\.12\.[0-9+.deb-]*-amd64$' | cut -d' ' -f1 | sort -V | tail -n 1)
  [[ $found ]] || found=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: //p' | head -n 1)
  echo "${found#linux-image-}"
}
kernel=${RDMA_VM_KERNEL:-$(cached_kernel)}
if [[ -z $kernel ]]; then
  update || true
  kernel=$(offered_kernel 2>/dev/null || true)
  [[ $kernel ]] || fail 77 "apt offers no kernel"
fi
root=$cache/$kernel
if [[ ! -e $root/boot/ready ]]; then
  echo "rdma_vm.sh: fetching the kernel $kernel" >&2
  fetch=$(mktemp -d "$cache/fetch.XXXXXX")
  (cd "$fetch" && apt-get download -q -o APT::Sandbox::User=root "linux-image-$kernel" >&2) ||
    { rm -r "$fetch"; fail 77 "the kernel $kernel cannot be had"; }
  rm -rf "$root"
  dpkg-deb -x "$fetch"/*.deb "$root"
  rm -r "$fetch"
  depmod -b "$root" "$kernel"
  touch "$root/boot/ready"
fi

# ---- the first file system: modules, and the way to this host's files -----------------------------------------

modules=(
  virtio_pci virtio_console virtio_net virtio_rng 9p 9pnet_virtio overlay crc32_generic crc32_pclmul crc32c_intel
  veth dummy sch_netem ib_core ib_uverbs rdma_cm rdma_ucm rdma_rxe
)
init() {
  cat <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module"; done </modules/order
share="trans=virtio,version=9p2000.L,msize=512000"
mount -t 9p -o "ro,$share,cache=loose" host /host || echo "no files of the host"
mount -t tmpfs -o size=75% tmpfs /written
mkdir /written/upper /written/work
mount -t overlay -o lowerdir=/host,upperdir=/written/upper,workdir=/written/work overlay /root || echo "no overlay"
mkdir -p /root/proc /root/sys /root/dev /root/run /root/out /root/job
for one in proc sys dev; do mount --move "/$one" "/root/$one"; done
mkdir -p /root/dev/pts /root/dev/shm
mount -t devpts devpts /root/dev/pts
for one in dev/shm run; do mount -t tmpfs tmpfs "/root/$one"; done
for one in out job; do mount -t 9p -o "$share,cache=none" "$one" "/root/$one" || echo "no /$one"; done
exec switch_root /root /bin/bash /job/begin
INIT
}
key=$({ init; echo "${modules[*]}"; cat "$root/lib/modules/$kernel/modules.dep"; } | sha256sum | cut -c1-16)
initrd=$root/boot/initrd-$key
if [[ ! -e $initrd ]]; then
  build=$(mktemp -d "$cache/build.XXXXXX")
  mkdir -p "$build"/{bin,proc,sys,dev,host,written,root,modules}
  cp "$(command -v busybox)" "$build/bin/busybox"
  init >"$build/init"
  chmod +x "$build/init"
  for module in "${modules[@]}"; do # what is built into the kernel has no file
    modprobe -d "$root" -S "$kernel" --show-depends "$module" 2>/dev/null | sed -n 's/^insmod \([^ ]*\).*/\1/p' || true
  done | awk '!seen[$0]++' | while read -r file; do
    name=$(basename "${file%.xz}")
    if [[ $file == *.xz ]]; then busybox xzcat "$file"; else cat "$file"; fi >"$build/modules/$name"
    echo "$name" >>"$build/modules/order"
  done
  grep -q rdma_rxe "$build/modules/order" || fail 77 "the kernel $kernel has no Soft-RoCE"
  (cd "$build" && find . | busybox cpio -o -H newc 2>/dev/null) | gzip -1 >"$initrd.new"
  mv "$initrd.new" "$initrd"
  rm -r "$build"
fi
exec 9>&-

# ---- what the machine does, as its first process, once it is on this host's files ------------------------------

begin() {
  cat <<'BEGIN'
{ # read as a whole, since the file may be out of reach at the end
exec </dev/null >/dev/console 2>&1
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb
read -r mode side </job/mode
hostname "rdma-vm-$side"
ulimit -l unlimited
ip link set lo up
for one in all default; do echo 0 >"/proc/sys/net/ipv6/conf/$one/accept_dad"; done # link-local addresses at once

device() { # name of the network device, number of the address, name of the RDMA device
  ip link set "$1" mtu 4200 up
  ip addr add "10.77.0.$2/24" dev "$1"
  rdma link add "$3" type rxe netdev "$1"
}
cable() {
  ip link add veth0 type veth peer name veth1
  # Both ends are this machine's, and what goes from one to the other must leave it by the cable: an address is
  # local only to what came in, or to what is not bound to the other end.
  for i in 0 1; do
    for setting in accept_local=1 rp_filter=0 arp_ignore=1 arp_announce=2; do
      echo "${setting#*=}" >"/proc/sys/net/ipv4/conf/veth$i/${setting%=*}"
    done
    ip rule add pref 10 dev "veth$i" lookup local
    ip rule add pref $((20 + i)) oif "veth$i" lookup $((20 + i))
  done
  echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
  ip rule add pref 30 lookup local
  ip rule del pref 0
  for i in 0 1; do
    device "veth$i" $((i + 1)) "rxe$i"
    ip route add 10.77.0.0/24 dev "veth$i" src "10.77.0.$((i + 1))" table $((20 + i))
  done
}
case $mode in
  single) ip link show dummy0 >/dev/null 2>&1 || ip link add dummy0 type dummy; device dummy0 1 rxe0 ;;
  pair) cable ;;
  two) device eth0 "$side" rxe0 ;;
esac
echo "rdma-vm: $(cut -d' ' -f1 /proc/uptime) s: $(rdma link show | tr '\n' ' ')"

touch /job/ready
for port in /sys/class/virtio-ports/*; do
  [[ $(<"$port/name") != said ]] || said=/dev/${port##*/}
done
(
  source /job/environment
  PATH=$PATH:/usr/sbin:/sbin
  # UCX 1.13 drops what comes to a RoCE device over IPv4 by datagrams, rxe's at least; the first GID is of IPv6.  And it
  # asserts that a device says once that a failed queue pair has ended; rxe says so more often.
  export UCX_IB_GID_INDEX=${UCX_IB_GID_INDEX-0} UCX_IB_ASYNC_EVENTS=${UCX_IB_ASYNC_EVENTS-n}
  export RDMA_VM=$mode RDMA_VM_SIDE=$side
  cd "$(</job/folder)" && exec bash -c "$(</job/line)"
) >"$said" 2>&1
status=$?
dmesg | grep -E 'BUG|WARNING|Oops|lockup|hung task|Call Trace|Out of memory' >/job/trouble
echo "$status" >/job/status
sync
echo o >/proc/sysrq-trigger
read -r -t 60 </dev/console
}
BEGIN
}

# ---- this run -------------------------------------------------------------------------------------------------

umask 077
job=$(mktemp -d "${TMPDIR:-/tmp}/rdma-vm.XXXXXX")
machines=()
# shellcheck disable=SC2329
cleanup() {
  for one in "${machines[@]}"; do kill "$one" 2>/dev/null || true; done
  wait
  rm -rf "$job"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
out=${out:-$job/out}
mkdir -p "$out"

# Starts machine $1 with shell line $2; $! is it.
machine() {
  local side=$1 folder=$job/$1 messages=quiet
  [[ ! $verbose ]] || messages=ignore_loglevel
  mkdir "$folder"
  begin >"$folder/begin"
  echo "$mode $side" >"$folder/mode"
  printf '%s' "$2" >"$folder/line"
  pwd >"$folder/folder"
  export -p | grep -Ev '^declare -x (BASH[A-Z_]*|SHELLOPTS|UID|EUID|PPID|PWD|OLDPWD|SHLVL|_)(=|$)' >"$folder/environment"
  mkfifo "$folder/said"
  if [[ $side == 2 ]]; then sed -u 's/^/2| /' <"$folder/said" & else cat <"$folder/said" & fi
  local qemu=(
    qemu-system-x86_64 -nodefaults -no-user-config -nographic -no-reboot -machine q35 -m "$memory" -smp "$cpus"
    -accel "tcg,thread=multi,tb-size=1024" -cpu "max,la57=off"
    -kernel "$root/boot/vmlinuz-$kernel" -initrd "$initrd"
    -append "console=ttyS0 $messages panic=-1 mitigations=off nowatchdog tsc=reliable no_timer_check audit=0"
    -serial "file:$folder/console"
    -object "rng-random,filename=/dev/urandom,id=rng" -device "virtio-rng-pci,rng=rng"
    -device virtio-serial-pci -chardev "file,id=said,path=$folder/said"
    -device "virtserialport,chardev=said,name=said"
    -fsdev "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"
    -device "virtio-9p-pci,fsdev=host,mount_tag=host"
    -fsdev "local,id=out,path=$out,security_model=none" -device "virtio-9p-pci,fsdev=out,mount_tag=out"
    -fsdev "local,id=job,path=$folder,security_model=none" -device "virtio-9p-pci,fsdev=job,mount_tag=job"
  )
  if [[ $mode == two ]]; then
    local wire="stream,id=wire,addr.type=unix,addr.path=$job/wire" try
    if [[ $side == 1 ]]; then
      wire+=,server=on
    else # a stream loses nothing, but its listener must be there first
      for ((try = 0; try < 100; try++)); do [[ -S $job/wire ]] && break; sleep 0.1; done
      wire+=,server=off
    fi
    qemu+=(
      -netdev "$wire"
      -device "virtio-net-pci,netdev=wire,mac=52:54:00:77:00:0$side,host_mtu=4200,romfile="
    )
  fi
  timeout -k 5 "$limit" "${qemu[@]}" </dev/null >"$folder/qemu" 2>&1 &
}

# Sets $status to that of machine $1, which ended with $2, and says what went wrong with it.
judge() {
  local folder=$job/$1
  status=$(tr -dc 0-9 2>/dev/null <"$folder/status" || true)
  if [[ -z $status ]]; then
    status=125
    [[ $2 -ne 124 && $2 -ne 137 ]] || status=124
  fi
  if [[ $verbose || $status -eq 125 ]]; then
    printf 'rdma_vm.sh: machine %s, status %s; its console:\n' "$1" "$status"
    if [[ $verbose ]]; then cat "$folder/console"; else tail -n 25 "$folder/console"; fi
    cat "$folder/qemu"
  fi >&2
  [[ $status -ne 124 ]] || echo "rdma_vm.sh: machine $1 was ended after $limit s" >&2
  if [[ -s $folder/trouble ]]; then
    echo "rdma_vm.sh: the kernel of machine $1 complained:" >&2
    cat "$folder/trouble" >&2
  fi
}

# Runs the machine or both; sets $status.
attempt() {
  local ended who
  machine 1 "$line"
  machines=($!)
  if [[ $mode == two ]]; then
    machine 2 "${beside:-$line}"
    machines+=($!)
  fi
  while true; do
    ended=0
    wait -n -p who "${machines[@]}" || ended=$?
    if [[ $who == "${machines[0]}" ]]; then
      judge 1 "$ended"
      return
    fi
    judge 2 "$ended"
    [[ $status -eq 0 ]] || return 0
    machines=("${machines[0]}")
  done
}

for try in 1 2 3; do
  attempt
  # An emulated kernel may crash while it starts, and has done nothing then.
  [[ $status -eq 125 && ! -e $job/1/ready && $try -lt 3 ]] || break
  echo "rdma_vm.sh: once more" >&2
  cleanup
  mkdir -p "$job" "$out"
done
exit "$status"
