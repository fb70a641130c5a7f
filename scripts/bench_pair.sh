#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tensorferry bench between two hosts, beside ucx_perftest, with one report of both:
#
#   scripts/bench_pair.sh [--dry-run] [--out DIR] [--launcher ssh|srun] HOST_A HOST_B [OPTION...]
#
# Producers run on HOST_A, which HOST_B must reach by that name or address, consumers on HOST_B; OPTIONs are those
# of `tensorferry bench client`.  The UCX_* of this environment hold on both.  Both have tensorferry on their PATH,
# or TENSORFERRY says how to call it, and UCX_PERFTEST how to call ucx_perftest.  Ports BENCH_PORT (18950) and the
# one after it must be free on HOST_A.  --dry-run only says what would be done.
set -euo pipefail

dry="" out="bench-$(date +%Y%m%d-%H%M%S)" launcher=ssh
while [[ ${1:-} == --* ]]; do
  case $1 in
    --dry-run) dry=1; shift ;;
    --out) out=$2; shift 2 ;;
    --launcher) launcher=$2; shift 2 ;;
    *) echo "bench_pair.sh: $1 is unknown; options of the benchmark come after the hosts" >&2; exit 2 ;;
  esac
done
if [[ $# -lt 2 || ! $launcher =~ ^(ssh|srun)$ ]]; then
  sed -n 's/^#   //p' "$0" >&2
  exit 2
fi
a=$1 b=$2
shift 2

tensorferry=${TENSORFERRY:-tensorferry} perftest=${UCX_PERFTEST:-ucx_perftest} port=${BENCH_PORT:-18950}
remote=/tmp/tensorferry-bench-$$
sizes=(8 4096 65536 1048576 16777216 268435456)
settings=""
for name in $(compgen -e UCX_); do
  [[ $name == UCX_PERFTEST ]] || settings+="export $name=$(printf %q "${!name}"); "
done

# Runs a command line on a host, or says so.
on() {
  local host=$1 line=$settings$2
  if [[ $dry ]]; then
    printf '%s: %s\n' "$host" "$line" >&3
  elif [[ $launcher == srun ]]; then
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" bash -c "$line" </dev/null
  else
    ssh -o BatchMode=yes "$host" "$line" </dev/null
  fi
}
exec 3>&1

# The server of a test serves one client, which may be there before it listens.
perftest_of() {
  local size=$1 count=$2 server
  on "$a" "timeout 120 $perftest -p $((port + 1))" >/dev/null 2>&1 &
  server=$!
  [[ ! $dry ]] || wait "$server"
  local test="timeout 100 $perftest $a -p $((port + 1)) -t ucp_get -s $size -n $count -w 10"
  on "$b" "for try in 1 2 3 4 5; do $test && exit; sleep 1; done; exit 1" 2>&1 ||
    echo "ucx_perftest with $size bytes failed; is it on the PATH of both hosts?"
  kill "$server" 2>/dev/null || true
  wait "$server" || true
}

benchmark() {
  local options="" status=0 server
  [[ $# -eq 0 ]] || options=$(printf '%q ' "$@")
  options+="--json $remote/bench.json --markdown $remote/bench.md --plots $remote/plots"
  on "$a" "$tensorferry bench server --listen $a:$port" >"$out/server.log" 2>&1 &
  server=$!
  [[ ! $dry ]] || wait "$server"
  on "$b" "mkdir -p $remote && $tensorferry bench client $a:$port $options" || status=1
  on "$b" "tar -C $remote -cf - . && rm -r $remote" >"$out/bench.tar"
  [[ $dry ]] || tar -C "$out" -xf "$out/bench.tar"
  rm "$out/bench.tar"
  if [[ $status -ne 0 ]]; then
    kill "$server" 2>/dev/null || true
    cat "$out/server.log" >&2
  fi
  wait "$server" || status=1
  return "$status"
}

[[ ! $dry ]] || out=$(mktemp -d)
mkdir -p "$out"
status=0
benchmark "$@" || status=1
for size in "${sizes[@]}"; do
  perftest_of "$size" $((size > 1048576 ? 50 : 2000))
done | tee "$out/ucx_perftest.txt"
if [[ $dry ]]; then
  rm -r "$out"
  exit
fi
{
  printf '# %s and %s\n\n' "$a" "$b"
  cat "$out/bench.md" 2>/dev/null || echo "The benchmark came to no result."
  printf '\n### ucx_perftest, ucp_get\n\n```\n'
  cat "$out/ucx_perftest.txt"
  echo '```'
} >"$out/report.md"
echo "$out/report.md"
exit "$status"
