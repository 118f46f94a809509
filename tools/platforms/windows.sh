#!/usr/bin/env bash
# Windows x86-64: its programs, built with mingw-w64, run in Wine.   windows.sh [SUITE…]
# Needs Debian's mingw-w64 and wine; for the page Node.js and Chromium, for the console Python.
# WINE_LIBRARIES is a folder of libraries that are copied beside every program: Wine before 9 has no bcryptprimitives.dll.
# shellcheck disable=SC2034
platform="windows"
# shellcheck source=tools/platforms/common.sh
source "$(dirname "$0")/common.sh"
target=x86_64-pc-windows-gnu
need x86_64-w64-mingw32-gcc wine
need_target "$target"
export CC_x86_64_pc_windows_gnu=x86_64-w64-mingw32-gcc CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=wine
WINEPREFIX=${WINEPREFIX:-$(realpath -m "$target_folder/wine")}
export WINEPREFIX WINEDEBUG=-all
programs=$target_folder/$target/debug
chosen=" $* "

wanted() {
    [[ $chosen == "  " || $chosen == *" $1 "* ]]
}

# What is left out, and why: except SUITE REASON TEST…
declare -A skips reasons
except() {
    local suite=$1 reason=$2 test
    shift 2
    for test; do
        skips[$suite]+=" --skip $test"
    done
    reasons[$suite]+="${reasons[$suite]:+; }$reason ($#)"
}

except unit "Wine 8 replaces no file that is open" a_file_that_is_being_read_is_replaced \
    a_file_of_the_same_size_and_time_under_the_same_name
except conformance "they replace a file that is mapped, which Windows refuses" an_all_in_one_checkpoint_is_a_model \
    nan_latents_of_a_reference_image_are_an_error a_gap_in_the_block_numbers_is_an_error \
    a_tensor_that_nobody_reads_is_an_error_that_names_it every_changed_set_of_tensors_is_noticed \
    leftovers_of_training_are_noted_and_counters_are_not
except engine "they replace a file that is mapped, which Windows refuses" \
    a_lora_that_is_replaced_while_the_model_is_loaded a_vae_that_is_replaced_while_the_model_is_loaded
# They send Ctrl-Break to one program, as consoles of Windows can: they have not run anywhere yet. The suite `console` sends Ctrl-C.
except CLI "Wine sends no event to another program's console" cancel:: the_first_ctrl_c_ends_a_stalled_download \
    an_interrupted_pull_of_dev a_training_that_is_killed_or_cancelled a_signal_stops_the_server

# tests NAME ARGUMENT…: the tests of a suite, without the exceptions
tests() {
    local name=$1
    shift
    wanted "$name" || return 0
    read -ra skip <<<"${skips[$name]:-}"
    suite "$name" "${reasons[$name]:-}" "${cargo[@]}" "$@" -- --quiet "${skip[@]}"
}

cargo=(cargo test "${cargo_args[@]}" --target "$target" --workspace --no-fail-fast)
suite "build" "" "${cargo[@]}" --no-run
if [[ -n ${WINE_LIBRARIES:-} ]]; then
    for folder in "$programs" "$programs/deps"; do
        cp "$WINE_LIBRARIES"/*.dll "$folder"
    done
fi

# Its library is loaded by Python, which is not there.
reasons[unit]+="; no Python for Windows (kiln-python)"
tests "unit" --lib --exclude kiln-python
tests "conformance" --test conformance --test consistency --test golden --test oracles
tests "golden" --test cpu --test replayed
tests "files" --test images --test tensor --test weights --test suite
tests "hub" --test pull --test companions
tests "engine" --test engine --test decoded_once --test opened_once --test check
tests "training" --test train
tests "CLI" --test cli
tests "server" --test server
if wanted "console"; then
    suite "console" "" tools/platforms/console.py "$programs/kiln.exe"
fi
if wanted "page"; then
    mkdir -p "$target_folder/platforms"
    printf '#!/bin/sh\nexec wine "%s" "$@"\n' "$(realpath "$programs/kiln.exe")" >"$target_folder/platforms/kiln-windows"
    chmod +x "$target_folder/platforms/kiln-windows"
    suite "page" "" tools/page-tests/run.sh "$target_folder/platforms/kiln-windows"
fi
if wanted "image"; then
    same_image "Wine" wine "$programs/kiln.exe"
fi
exit "$failed"
