//! `--preview` on a terminal, a real one: the image appears with the first step, and each step replaces the last.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::process::Stdio;
use std::thread;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::sandbox::Sandbox;

/// Runs `kiln generate` with standard output on a terminal, and standard error, too, unless `quiet`. Returns what the
/// terminal received.
fn on_terminal(sandbox: &Sandbox, args: &[&str], quiet: bool) -> String {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let terminal = OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let mut command = sandbox.command(args);
    for name in ["TERM_PROGRAM", "TMUX", "KITTY_WINDOW_ID", "KONSOLE_VERSION"] {
        command.env_remove(name);
    }
    command.env("TERM", "xterm-256color").stdout(terminal.try_clone().unwrap());
    command.stderr(if quiet { Stdio::null() } else { Stdio::from(terminal.try_clone().unwrap()) });
    let mut child = command.spawn().unwrap();
    drop((command, terminal));
    let reader = thread::spawn(move || {
        let (mut received, mut buffer) = (Vec::new(), [0; 4096]);
        // The system reports an error when the last program closes the terminal.
        while let Ok(count @ 1..) = File::from(master.try_clone().unwrap()).read(&mut buffer) {
            received.extend(&buffer[..count]);
        }
        String::from_utf8_lossy(&received).into_owned()
    });
    assert!(child.wait().unwrap().success());
    reader.join().unwrap()
}

fn generate(sandbox: &Sandbox, preview: &str, quiet: bool) -> String {
    let model = sandbox.model().to_str().unwrap();
    let args = ["generate", "fox", "-m", model, "-W", "64", "-H", "64", "-s", "3", "--max-tokens", "32"];
    let quiet_args: &[&str] = if quiet { &["-q"] } else { &[] };
    on_terminal(sandbox, &[&args, quiet_args, &[preview, "-o", "a.png"]].concat(), quiet)
}

#[test]
fn each_protocol_shows_every_step_and_the_image() {
    let sandbox = Sandbox::new();
    for (protocol, start) in [("kitty", "\x1b_Gf=100"), ("iterm2", "\x1b]1337;"), ("sixel", "\x1bP")] {
        let text = generate(&sandbox, &format!("--preview={protocol}"), true);
        // Two steps, of which the last is the image itself.
        assert_eq!(text.matches(start).count(), 3, "{protocol}");
    }
}

#[test]
fn a_step_replaces_the_one_before_it() {
    let sandbox = Sandbox::new();
    // 80x25: nineteen lines for the image.
    let text = generate(&sandbox, "--preview", true);
    assert!(text.starts_with("\x1b[38;2;"), "{text:?}");
    assert_eq!(text.matches("\r\x1b[19A\x1b[38;2;").count(), 2);
    assert_eq!(text.matches('▀').count(), 3 * 19 * 38);
    // Between the bars, too: the image is redrawn above the lines that came after it, as many as there were by then.
    let text = generate(&sandbox, "--preview=blocks", false);
    let redrawn = (19..=22).any(|lines| text.contains(&format!("\x1b[{lines}A")));
    assert!(redrawn && text.contains("saved `a.png`"), "{text:?}");
}

#[test]
fn pipes_get_nothing() {
    let sandbox = Sandbox::new();
    let ran = sandbox.generate(&["--preview", "fox", "-s", "1", "-o", "a.png"]).ok();
    assert!(
        ran.out.is_empty() && !ran.err.contains('\x1b'),
        "a prompt after --preview is a prompt: {}",
        ran.err
    );
    sandbox.image("a.png");
}
