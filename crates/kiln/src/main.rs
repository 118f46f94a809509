//! The `kiln` program: pictures from words with FLUX.2 \[klein\].
//!
//! Pictures go to files or standard output, words to standard error. Exit codes: 0 done, 1 failed, 2 wrong usage,
//! 130 stopped by Ctrl-C.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod cache;
mod cancel;
mod convert;
mod doctor;
mod ember;
mod failure;
mod generate;
mod hints;
mod hub;
mod info;
mod models;
mod output;
mod preview;
mod progress;
mod quantize;
#[cfg(feature = "serve")]
mod serve;
mod sheet;
mod values;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Cli, Command};
use failure::Failure;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Generate(args) => generate::run(*args),
        Command::Pull(args) => tell(hub::pull::run(&args)),
        Command::Models(args) => tell(hub::list::run(&args)),
        Command::Rm(args) => tell(hub::remove::run(&args)),
        Command::Convert(args) => tell(convert::run(&args)),
        Command::Quantize(args) => tell(quantize::run(&args)),
        Command::Info(args) => tell(info::run(&args)),
        Command::Doctor(args) => tell(doctor::run(&args)),
        Command::Bench(args) => tell(bench::run(&args)),
        #[cfg(feature = "serve")]
        Command::Serve(args) => tell(serve::run(*args)),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "kiln", &mut script);
            tell(print(&script))
        }
    };
    result.map_or_else(|failure| failure.exit_code(), |()| ExitCode::SUCCESS)
}

fn tell(result: Result<(), Failure>) -> Result<(), Failure> {
    if let Err(failure) = &result {
        let _ = writeln!(std::io::stderr(), "{failure}");
    }
    result
}

/// Writes to standard output. A reader that has seen enough (`| head`) is no failure.
fn print(text: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(output::stdout_failed("the text", &e)),
        _ => Ok(()),
    }
}
