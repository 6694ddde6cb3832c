# shellcheck shell=bash
# Progress of a step of the set-up, read from the log that the step writes. On a terminal it is one line, redrawn every
# second; in a pipe or a file a line for each change, and after QUIET_S seconds without one.

QUIET_S=8

# Shows the progress of one step until it is killed, or the shell that started it is gone.
show_progress() {  # TITLE LOG
  local title=$1 log=$2 began=$SECONDS said_at=$SECONDS said= at
  while sleep 1 >&- 2>&- && kill -0 $$ 2>/dev/null; do
    at=$(progress_in "$log" "$(packages_since "$log")")
    if [[ -t 2 ]]; then
      redraw "$title${at:+: $at}, $((SECONDS - began)) s"
    elif ((SECONDS - said_at >= QUIET_S)) || { [[ $at != "$said" ]] && ((SECONDS - said_at >= 2)); }; then
      echo "$title${at:+: $at}, $((SECONDS - began)) s" >&2
      said=$at said_at=$SECONDS
    fi
  done
}

redraw() { printf '\r\e[K\e[?7l%s\e[?7h' "$1" >&2; }  # ?7l: the terminal cuts a long line instead of wrapping it
clear_line() { [[ ! -t 2 ]] || printf '\r\e[K' >&2; }

# How many packages pip has installed since the log was begun: it writes a package's .dist-info last.
packages_since() {  # LOG
  find "$VENV"/lib/python3.*/site-packages -maxdepth 1 -name '*.dist-info' -newer "${1%.log}.began" 2>/dev/null | wc -l
}

# The last thing that pip, CMake, ninja or setuptools says it does in a log.
progress_in() {  # LOG [PACKAGES INSTALLED]
  awk -v installed="${2:-0}" '
    function package(file,  part) {  # "pyarrow 26.0.1" of pyarrow-26.0.1-cp311-cp311-manylinux_2_28_x86_64.whl
      sub(/.*\//, "", file)
      sub(/\.(tar\.gz|zip|whl).*/, "", file)
      split(file, part, "-")
      return part[1] " " part[2]
    }
    function size() { return match($0, /\([0-9.]+ [kMG]?B\)/) ? " " substr($0, RSTART, RLENGTH) : "" }
    /^ *Collecting /                     { at = "looking for " $2 }
    /^ *(Downloading|Using cached) .*\.metadata/ { next }
    /^ *Downloading /                    { named = package($2); at = fetched = "downloading " named size() }
    /^ *Using cached /                   { named = package($3); at = "taking " named " from the cache of pip" size() }
    /^ *Processing /                     { named = package($2); at = (/\.whl$/ ? "taking " : "preparing ") named }
    /^Progress [0-9]+ of [0-9]+/         {
      at = $2 == $4 ? "downloaded " named : fetched sprintf(", %.0f %%", $4 ? 100 * $2 / $4 : 0)
    }
    /^ *[^ ]+ [0-9.]+\/[0-9.]+ [kMG]?B .* 0:00:00/ { at = "downloaded " named }  # the whole bar, of older versions of pip
    /^ *Preparing metadata /             { at = "preparing " named }
    /^ *Building (wheel|editable) for /  { at = "building " $4 }
    /^ *-- /                             { at = "configuring" }
    /^ *[0-9]+ files to compile$/        { files = $1 }
    /^ *[^ ]*(cc|\+\+|clang)[^ ]* (.* )?-c / {
      for (i = 1; i <= NF; i++) if ($i ~ /\.(c|cpp|cu)$/) file = $i
      at = "compiling [" ++compiled (files ? "/" files : "") "] " file
    }
    /^ *\[[0-9]+\/[0-9]+\] /             {
      file = $NF
      sub(/.*\//, "", file)
      sub(/\.o$/, "", file)
      at = $2 == "Linking" ? "linking" : "compiling " $1 " " file
    }
    /^ *Installing collected packages: / {
      count = split(substr($0, index($0, ": ") + 2), names, ", ")
      now = installed < count ? installed + 1 : count
      at = count == 1 ? "installing" : "installing " names[now] " [" now "/" count "]"
    }
    /^ *Successfully (built|installed|downloaded) / { at = "" }
    END                                  { print at }' "$1" 2>/dev/null
}
