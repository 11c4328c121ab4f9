# Sourced by the launch scripts, from the repository's folder, before they start the run in $run_dir.
state() { cat "$run_dir/run_state.json" 2>/dev/null || true; }
state_before=$(state)

# ended CODE [ARGUMENT ...]: prints the exit code of this start, whose launcher ended with CODE: 75 if the same command
# continues the run, and 0 only if the run is done. Launchers do not always pass on what happened: deepspeed ends with 0
# when its own middle process is killed. A start that was refused may have written no state: the file then still says
# how an earlier one ended. No two written states are equal.
ended() {
    state_now=$(state)
    written=$state_now
    [ "$state_now" != "$state_before" ] || written=""
    case "$1 $written" in
        [2345]\ *) echo "$1" ;;
        # The second is written when training begins: a start that was killed had no time to write another.
        *'"stopped, resume me"'* | *'"training; resume me if killed"'* | 0*'"trained; its certificate is not written"'*)
            echo 75 ;;
        0*) case "$state_now $*" in
                *'"status": "done"'* | *\ --dry-run*) echo 0 ;;
                *) echo "error: the launcher ended with 0, but $run_dir/run_state.json does not say done" >&2; echo 1 ;;
            esac ;;
        *) echo "$1" ;;
    esac
}
