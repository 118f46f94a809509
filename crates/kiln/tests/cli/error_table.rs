//! The table of errors in `docs/errors.md`: every error that a test provokes is in it.
//!
//! `tools/errors.sh` writes the table anew from the errors of all tests.

use std::fs::OpenOptions;
use std::io::Write;

const TABLE: &str = include_str!("../../../../docs/errors.md");

/// Asserts that the table has this error, as the program printed it. `KILN_WRITE_ERRORS` names a file that gets its row
/// instead.
#[track_caller]
pub fn check(error: &str) {
    let Some(row) = row(error) else { return };
    match std::env::var_os("KILN_WRITE_ERRORS") {
        Some(file) => {
            let mut file = OpenOptions::new().append(true).create(true).open(file).unwrap();
            file.write_all(format!("{row}\n").as_bytes()).unwrap();
        }
        None => assert!(
            TABLE.lines().any(|line| line == row),
            "docs/errors.md lacks this error; read it once more, then run tools/errors.sh:\n{row}\n{error}"
        ),
    }
}

/// Returns the row of an error: its message, what the program was doing, and the hint. `None` for errors of the command
/// line's parser, which are many and alike, and for those about GPUs.
fn row(error: &str) -> Option<String> {
    let (error, hint) = error.split_once("\nhint: ")?;
    let (message, doing) = match error.split_once("\n  while ") {
        Some((message, doing)) => (message, doing.replace("\n  while ", "; ")),
        None => (error, String::new()),
    };
    // Machines with a GPU have other errors about it.
    let message = message.strip_prefix("error: ").filter(|message| !message.contains("cuda"))?;
    Some(format!("| {} | {} | {} |", pattern(message), pattern(&doing), pattern(hint.trim_end())))
}

/// Replaces names by `…` and numbers by N, so that equal errors have equal texts.
fn pattern(text: &str) -> String {
    // What follows in further lines, and lists of what there is, depends on the machine.
    let text = text.lines().next().unwrap_or_default();
    let mut out = String::new();
    for (i, part) in text.split('`').enumerate() {
        match i % 2 {
            0 => out.push_str(&numbers(part)),
            _ if is_command(part) => out.push_str(&format!("`{part}`")),
            _ => out.push_str("`…`"),
        }
    }
    let mut out = out.replace('|', "\\|");
    // A list of names, however long.
    while out.contains("`…`, `…`") {
        out = out.replace("`…`, `…`", "`…`");
    }
    match out.split_once(" (os error N)") {
        // Systems word these differently.
        Some((before, after)) => {
            let start = before.rfind(": ").unwrap_or(before.len());
            format!("{}: the system's message{after}", &before[..start])
        }
        None => out,
    }
}

/// Whether a quoted text is a command of Kiln, which a hint tells the reader to run.
fn is_command(text: &str) -> bool {
    text.starts_with("kiln ") && !text.contains('/')
}

/// Replaces every word that is, or starts with, a number, and every path.
fn numbers(text: &str) -> String {
    let is_end = |c: char| c == ' ' || c == ',' || c == '(' || c == ')' || c == '[' || c == ']';
    let mut out = String::new();
    for word in text.split_inclusive(is_end) {
        let (core, end) = match word.chars().last().filter(|c| is_end(*c)) {
            Some(end) => (&word[..word.len() - end.len_utf8()], Some(end)),
            None => (word, None),
        };
        let digits = core.trim_start_matches(['-', '+']);
        if digits.starts_with(|c: char| c.is_ascii_digit()) {
            out.push('N');
            out.extend(core.chars().last().filter(|c| [':', ';', '.'].contains(c)));
        } else if core.starts_with('/') || core.contains("://") {
            out.push('…');
        } else {
            out.push_str(core);
        }
        out.extend(end);
    }
    out
}

#[test]
fn names_numbers_and_paths_are_replaced() {
    let error = "error: tensors `a`, `b`, `c` have shape [2, 3]\n  while loading `/m`\n  while x\nhint: run `kiln models` | 7.5 GiB";
    assert_eq!(
        row(error).unwrap(),
        "| tensors `…` have shape [N, N] | loading `…`; x | run `kiln models` \\| N GiB |"
    );
    assert_eq!(pattern("can't read `a`: No such file (os error 2)"), "can't read `…`: the system's message");
    assert_eq!(row("error: unexpected argument\n\nFor more information, try '--help'."), None);
}
