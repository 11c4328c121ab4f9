# Sourced by the launch scripts, from the repository's folder, before they start the run in $run_dir.
state() { cat "$run_dir/run_state.json" 2>/dev/null || true; }
state_before=$(state)

# resume_me CODE: whether this start of the run ended in such a way that the same command continues it. A start that was
# refused may have written no state: the file then still says how an earlier one ended. No two written states are equal.
resume_me() {
    case "$1" in 0 | 2 | 3 | 4 | 5) return 1 ;; esac
    state_now=$(state)
    [ "$state_now" != "$state_before" ] || return 1
    # The second is written when training begins: a start that was killed had no time to write another.
    case "$state_now" in *'"stopped, resume me"'* | *'"training; resume me if killed"'*) return 0 ;; esac
    return 1
}
