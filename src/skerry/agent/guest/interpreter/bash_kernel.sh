# `bash bash_kernel.sh`: a bash that remembers, for a context. On the descriptor 3 come what to do before, the code, and
# what to do after it, each before a zero byte, and events go back there as lines of JSON. It is closed while code runs,
# so that no program inherits it.

exec 57<&3 3>&-
__skerry_run() {
  trap 'return 130' INT
  eval "$__skerry_code"
}
__skerry_read() {
  IFS= read -r -d '' -u 57 "$1"
}
trap '' INT
printf '{"event":"ready"}\n' >&57
while __skerry_read __skerry_before && __skerry_read __skerry_code && __skerry_read __skerry_after; do
  printf '{"event":"started"}\n' >&57
  eval "$__skerry_before"
  __skerry_run 57>&-
  __skerry_status=$?
  trap '' INT
  eval "$__skerry_after"
  if [ "$__skerry_status" -ne 0 ]; then
    printf '{"event":"error","name":"ExitCode","value":"%d"}\n{"event":"done","status":"error"}\n' \
      "$__skerry_status" >&57
  else
    printf '{"event":"done","status":"ok"}\n' >&57
  fi
done
