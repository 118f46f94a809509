//! The `kiln` program: text to image with FLUX.2 \[klein\].
//!
//! Images go to files or standard output, messages to standard error. Exit codes: 0 success, 1 failure, 2 wrong usage,
//! 130 cancelled with Ctrl-C,
//! 143 with SIGTERM.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod cancel;
mod config;
mod convert;
mod credentials;
mod doctor;
mod error;
mod export;
mod generate;
mod hub;
mod info;
mod man;
mod models;
mod options;
mod origin;
mod output;
mod preview;
mod progress;
mod quantize;
#[cfg_attr(not(feature = "serve"), path = "no_serve.rs")]
mod serve;
mod settings;
mod terminal;
mod train;
mod uninstall;
mod update;
mod upsample;
mod values;
mod verify;
mod welcome;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches};

use args::{Cli, Command};
use error::CliError;

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    let mut args: Vec<OsString> = std::env::args_os().collect();
    let is_double_click = cfg!(feature = "serve") && args.len() <= 1 && terminal::has_own_window();
    if is_double_click {
        args = ["kiln", "serve", "--open"].map(OsString::from).into();
        terminal::ignore_clicks();
        terminal::tell("this window is Kiln's server; closing it ends Kiln");
    }
    if !is_double_click {
        return ExitCode::from(main_with(args));
    }
    // The window, and what it says, vanish with the process.
    let code = std::panic::catch_unwind(|| main_with(args)).unwrap_or(101);
    if code != 0 {
        terminal::wait_for_enter();
    }
    ExitCode::from(code)
}

/// Runs the program with these arguments, the first of which is its name, and returns its exit code.
pub fn main_with(args: Vec<OsString>) -> u8 {
    // Before anything is printed.
    terminal::has_escapes();
    understand(&args).unwrap_or_else(|error| {
        let _ = error.print();
        error.exit_code() as u8
    })
}

/// Runs the program as [`main_with`] does. The error is that of a wrong command line, or the help that was asked for.
fn understand(args: &[OsString]) -> Result<u8, clap::Error> {
    let given = Cli::parser().try_get_matches_from(args)?;
    let command = parse(&given)?.command;
    let result = match (report(load_settings(command.as_ref())), command) {
        (Err(error), _) => Err(error),
        (Ok(()), Some(command)) => run(with_settings(command, &given, args)?),
        (Ok(()), None) => report(welcome::run()),
    };
    Ok(result.map_or_else(|error| error.exit_code(), |()| 0))
}

fn parse(given: &ArgMatches) -> Result<Cli, clap::Error> {
    Cli::from_arg_matches(given).map_err(|error| error.format(&mut Cli::command()))
}

/// Reads the settings file. The commands that repair it, and those that use no settings, work without.
fn load_settings(command: Option<&Command>) -> Result<(), CliError> {
    match command {
        Some(Command::Config(_) | Command::Completions { .. } | Command::Man { .. }) => Ok(()),
        Some(Command::Serve(command)) => settings::load(command.config()),
        _ => settings::load(None),
    }
}

/// The command, with the options of the settings file's table `[serve]` if it is `serve`.
fn with_settings(command: Command, given: &ArgMatches, args: &[OsString]) -> Result<Command, clap::Error> {
    let Some(("serve", of_serve)) = given.subcommand() else { return Ok(command) };
    let more = settings::missing_arguments(&settings::get().serve, of_serve);
    // Before those of the command line, which replace them.
    let given = args.iter().skip(2).cloned();
    let all = ["kiln".into(), "serve".into()].into_iter().chain(more).chain(given);
    Ok(parse(&Cli::parser().try_get_matches_from(all)?)?.command.unwrap_or(command))
}

/// Runs a command. A returned error is already reported.
fn run(command: Command) -> Result<(), CliError> {
    match command {
        Command::Train(args) => report(train::run(*args)),
        Command::Generate(args) => generate::run(*args),
        Command::Upscale(args) => generate::run_upscale(*args),
        Command::Pull(args) => report(hub::pull::run(&args)),
        Command::Models(args) => report(hub::models::run(&args)),
        Command::Rm(args) => report(hub::rm::run(&args)),
        Command::Convert(args) => report(convert::run(&args)),
        Command::Quantize(args) => report(quantize::run(&args)),
        Command::Info(args) => report(info::run(&args)),
        Command::Config(args) => report(config::run(&args)),
        Command::Verify(args) => verify::run(&args),
        Command::Credentials(args) => report(credentials::run(&args)),
        Command::Doctor(args) => report(doctor::run(&args)),
        Command::Update(args) => report(update::run(&args)),
        Command::Uninstall(args) => report(uninstall::run(&args)),
        Command::Bench(args) => report(serve::bench(&args).unwrap_or_else(|| bench::run(&args))),
        Command::Serve(command) => report(serve::run(command)),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "kiln", &mut script);
            report(output::print(&script))
        }
        Command::Man { folder } => report(man::run(&folder)),
    }
}

/// Prints an error to standard error and returns the result unchanged.
fn report(result: Result<(), CliError>) -> Result<(), CliError> {
    let result = result.map_err(CliError::or_general_hint);
    if let Err(error) = &result {
        terminal::tell(&error.to_string());
    }
    result
}
