//! The `[serve]` table of the settings file: any option of `kiln serve`, under its long name with `_` for `-`.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::{Table, Value};

use crate::args::serve_options;

/// The name of the table.
pub const TABLE: &str = "serve";

/// An option of `kiln serve` that the file sets.
#[derive(Clone, Debug, PartialEq)]
pub struct ServeOption {
    /// The long name of the option.
    pub name: String,
    /// Its values, as on the command line; of a flag `true` or `false`.
    pub values: Vec<String>,
}

/// Reads the table. The error names the key.
pub fn parse(table: &Table) -> Result<Vec<ServeOption>, String> {
    let options = table.iter().map(|(key, value)| {
        let values = values(value).map_err(|problem| format!("`{TABLE}.{key}` {problem}"))?;
        Ok(ServeOption { name: key.replace('_', "-"), values })
    });
    let options: Vec<ServeOption> = options.collect::<Result<_, String>>()?;
    check(&options)?;
    Ok(options)
}

/// A value as text, or the values of a list.
fn values(value: &Value) -> Result<Vec<String>, String> {
    match value {
        Value::String(text) => Ok(vec![text.clone()]),
        Value::Integer(number) => Ok(vec![number.to_string()]),
        Value::Float(number) => Ok(vec![number.to_string()]),
        Value::Boolean(on) => Ok(vec![on.to_string()]),
        Value::Array(list) => {
            list.iter().map(|value| values(value)?.pop().ok_or("is an empty list".into())).collect()
        }
        other => {
            Err(format!("is a value of the type {}, expected a text, a number or a list", other.type_str()))
        }
    }
}

/// Options that only the command line has.
const NOT_IN_FILE: [&str; 1] = ["config"];

fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let named = |arg: &&Arg| arg.get_long() == Some(name) && !NOT_IN_FILE.contains(&name);
    command.get_arguments().find(named)
}

/// The option as arguments of the command line.
fn arguments(arg: &Arg, option: &ServeOption) -> Result<Vec<OsString>, String> {
    let name = &option.name;
    if !matches!(arg.get_action(), ArgAction::SetTrue) {
        return Ok(option.values.iter().map(|value| format!("--{name}={value}").into()).collect());
    }
    match &option.values[..] {
        [on] if on == "true" => Ok(vec![format!("--{name}").into()]),
        [off] if off == "false" => Ok(Vec::new()),
        _ => Err(format!("`{TABLE}.{}` must be true or false", name.replace('-', "_"))),
    }
}

/// Checks names and values with the parser of the command line. A program without the server leaves the table to one that
/// has it.
fn check(options: &[ServeOption]) -> Result<(), String> {
    let Some(command) = serve_options() else { return Ok(()) };
    let mut all = Vec::new();
    for option in options {
        let arg = find(&command, &option.name).ok_or_else(|| {
            let names = command.get_arguments().filter_map(Arg::get_long);
            let similar = kiln_weights::similar_names(&option.name, names);
            let hint = similar
                .first()
                .map_or(String::new(), |name| format!(", did you mean `{}`?", name.replace('-', "_")));
            format!("there is no setting `{TABLE}.{}`{hint}", option.name.replace('-', "_"))
        })?;
        all.extend(arguments(arg, option)?);
    }
    let parsed = command.try_get_matches_from(all);
    parsed.map(drop).map_err(|error| {
        let text = error.to_string();
        let line = text.lines().next().unwrap_or_default();
        format!("in [{TABLE}]: {}", line.trim_start_matches("error: "))
    })
}

/// The options of the file that neither the command line nor the environment gives, as arguments.
pub fn missing_arguments(options: &[ServeOption], given: &ArgMatches) -> Vec<OsString> {
    let command = serve_options();
    let missing = |option: &ServeOption| {
        let arg = find(command.as_ref()?, &option.name)?;
        let source = given.value_source(arg.get_id().as_str());
        let is_given = matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable));
        if is_given { None } else { arguments(arg, option).ok() }
    };
    options.iter().filter_map(missing).flatten().collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    fn read(text: &str) -> Result<Vec<ServeOption>, String> {
        parse(&text.parse().unwrap())
    }

    #[test]
    fn every_option_of_the_server_can_be_set() {
        if serve_options().is_none() {
            return;
        }
        let text = "port = 7861\nhost = '0.0.0.0'\nallow_host = ['a.example', 'b.example']\nno_recipe = true\n\
                    yes = false\ndevice = 'cpu'\nmax_pixels = '1000000'";
        let options = read(text).unwrap();
        let given = Cli::command().get_matches_from(["kiln", "serve", "--port", "1"]);
        let (_, given) = given.subcommand().unwrap();
        let mut arguments = missing_arguments(&options, given);
        arguments.sort();
        assert_eq!(
            arguments,
            [
                "--allow-host=a.example",
                "--allow-host=b.example",
                "--device=cpu",
                "--host=0.0.0.0",
                "--max-pixels=1000000",
                "--no-recipe"
            ],
            "the command line's port comes first"
        );
    }

    #[test]
    fn errors_name_the_key() {
        if serve_options().is_none() {
            return;
        }
        for (text, words) in [
            ("prot = 1", "there is no setting `serve.prot`, did you mean `port`?"),
            ("config = 'a'", "no setting `serve.config`"),
            ("port = 'many'", "'many' for '--port"),
            ("port = 70000", "70000"),
            ("yes = 'perhaps'", "`serve.yes` must be true or false"),
            ("port = 1.5", "'1.5' for '--port"),
            ("port = 1979-05-27", "`serve.port` is a value of the type datetime"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
