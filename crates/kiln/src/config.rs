//! `kiln config`: shows and changes the settings file.

use std::path::{Path, PathBuf};

use crate::args::{ConfigArgs, ConfigCommand};
use crate::error::CliError;
use crate::output;
use crate::settings::edit::{self, Place};
use crate::settings::{self, KEYS, Key, ServeOption};
use kiln_catalog::properties::Properties;

pub fn run(args: &ConfigArgs) -> Result<(), CliError> {
    let file = settings::file().ok_or_else(|| {
        CliError::new("there is no folder for settings").hint("set KILN_CONFIG to the path of a file")
    })?;
    match args.command.as_ref().unwrap_or(&ConfigCommand::List { json: false }) {
        ConfigCommand::List { json } => list(&file, *json),
        ConfigCommand::Get { key } => {
            let text = match Place::find(key)? {
                Place::Top(name) => Effective::of(Key::find(&name)?, &values(&file)?).text,
                Place::Serve(name) => {
                    let name = name.replace('_', "-");
                    let option = serve_values(&file)?.into_iter().find(|option| option.name == name);
                    option.map_or(String::new(), |option| option.values.join(","))
                }
            };
            crate::output::print(format!("{text}\n").as_bytes())
        }
        ConfigCommand::Set { key, value } => {
            let place = Place::find(key)?;
            let text = edit::set(&settings::read_text(&file)?, &file, &place, &absolute(value))?;
            write(&file, &text)
        }
        ConfigCommand::Unset { key } => {
            let text = settings::read_text(&file)?;
            let new = edit::unset(&text, &file, &Place::in_file(key, &text, &file)?)?;
            if new == text { Ok(()) } else { write(&file, &new) }
        }
        ConfigCommand::Path => crate::output::print(format!("{}\n", file.display()).as_bytes()),
    }
}

/// The value of a setting that commands use, and where it comes from.
struct Effective {
    text: String,
    source: String,
}

impl Effective {
    fn of(key: &Key, in_file: &[(&Key, String)]) -> Effective {
        if let Some(variable) = key.variable
            && let Some(value) = kiln_base::folders::from_env(variable)
        {
            return Effective { text: value.display().to_string(), source: variable.into() };
        }
        match in_file.iter().find(|(other, _)| other.name == key.name) {
            Some((_, text)) => Effective { text: text.clone(), source: "file".into() },
            None => Effective { text: (key.default)(), source: "default".into() },
        }
    }
}

fn values(file: &Path) -> Result<Vec<(&'static Key, String)>, CliError> {
    settings::parse(&settings::read_text(file)?, file)
}

fn serve_values(file: &Path) -> Result<Vec<ServeOption>, CliError> {
    settings::parse_serve(&settings::read_text(file)?, file)
}

fn list(file: &Path, json: bool) -> Result<(), CliError> {
    let values = values(file)?;
    let of_server: Vec<(String, String)> = serve_values(file)?
        .into_iter()
        .map(|option| (format!("serve.{}", option.name.replace('-', "_")), option.values.join(",")))
        .collect();
    let properties = KEYS.iter().fold(Properties::default(), |properties, key| {
        let Effective { text, source } = Effective::of(key, &values);
        let value = Properties::default().with("value", &text).with("source", &source);
        properties.with_group(key.name, value)
    });
    let properties = of_server.iter().fold(properties, |properties, (name, text)| {
        properties.with_group(name, Properties::default().with("value", text).with("source", "file"))
    });
    if json {
        return crate::output::print(properties.to_json().as_bytes());
    }
    let effective: Vec<Effective> = KEYS.iter().map(|key| Effective::of(key, &values)).collect();
    let width = effective.iter().map(|value| value.text.chars().count()).max().unwrap_or(0);
    let line = |(key, value): (&Key, &Effective)| {
        let text = if value.text.is_empty() { "-" } else { &value.text };
        format!("{:13}  {text:width$}  {:10}  {}\n", key.name, value.source, key.about)
    };
    let of_server = of_server
        .iter()
        .map(|(name, text)| format!("{name:13}  {text:width$}  {:10}  option of `kiln serve`\n", "file"));
    let lines: String = KEYS.iter().zip(&effective).map(line).chain(of_server).collect();
    crate::output::print(lines.as_bytes())
}

/// A relative path that exists becomes absolute: the file means the same in every folder.
fn absolute(value: &str) -> String {
    let path = Path::new(value);
    let is_path = value.contains(std::path::is_separator) && path.is_relative() && path.exists();
    let full: Option<PathBuf> = is_path.then(|| std::path::absolute(path).ok()).flatten();
    full.and_then(|path| path.to_str().map(str::to_owned)).unwrap_or_else(|| value.to_owned())
}

fn write(file: &Path, text: &str) -> Result<(), CliError> {
    let folder = file.parent().unwrap_or(Path::new("."));
    // Settings files are often links into a folder under version control.
    let target = output::resolve_links(file)?;
    let written =
        std::fs::create_dir_all(folder).and_then(|()| kiln_base::write_atomic(&target, text.as_bytes()));
    written.map_err(|error| {
        CliError::new(format!("can't write the settings file `{}`: {error}", file.display()))
            .hint("check that its folder is writable, or name another file with KILN_CONFIG")
    })
}
