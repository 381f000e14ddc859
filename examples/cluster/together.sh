#!/bin/bash
# One training on many hosts, over ssh: together.sh PORT HOST... -- dovetail run CONFIG --out FOLDER [OPTIONS]
#
# Process 0 runs on the first host and listens on PORT there; FOLDER must be the same on all hosts (a shared file system),
# and so must the data. If a host fails, the processes that are left are ended, and all begin again from the last
# checkpoint, at most RETRIES times (default 3), on the next port each time. REMOTE is what reaches a host (default ssh);
# ADDRESS is that of the first host where its name is not.
set -u
port=$1 && shift
hosts=()
while [ "$1" != -- ]; do hosts+=("$1") && shift; done
shift
command=("$@") folder=
for ((i = 0; i < $#; i++)); do [ "${command[i]}" = --out ] && folder=${command[i + 1]}; done
[ -n "$folder" ] || { echo "expected --out FOLDER in the command, got: $*" >&2; exit 2; }

for ((try = 0; try <= ${RETRIES:-3}; try++)); do
  began=()
  for rank in "${!hosts[@]}"; do
    words=("${command[@]}" --coordinator "${ADDRESS:-${hosts[0]}}:$((port + try))" --processes ${#hosts[@]} --process-id "$rank")
    [ -e "$folder/checkpoint.npz" ] && words+=(--resume)
    ${REMOTE:-ssh} "${hosts[rank]}" bash -s <<<"cd $(printf %q "$PWD") && exec $(printf '%q ' "${words[@]}")" &
    began+=($!)
  done
  failed=0
  for _ in "${hosts[@]}"; do wait -n || { failed=1 && break; }; done
  [ $failed = 0 ] && exit 0
  echo "a process failed; those that are left are ended" >&2
  kill "${began[@]}" 2>/dev/null
  wait
  [ -e "$folder/privacy.json" ] && exit 0
done
echo "gave up after $try attempts; the last checkpoint is in $folder" >&2
exit 1
