//! `kiln doctor --report`: what a bug report needs, in one file. It names no user and holds no secret.

use std::path::Path;

use kiln_base::folders;
use kiln_catalog::ModelLocation;
use kiln_catalog::properties::Properties;
use kiln_engine::{Model, ModelComponent};

use crate::error::CliError;
use crate::values::bytes;
use crate::{models, origin, output, settings};

/// The file of `--report` without a name.
pub const DEFAULT_FILE: &str = "kiln-report.txt";

/// Beginnings of the variables that change what Kiln does.
const VARIABLES: [&str; 6] = ["KILN_", "HF_", "CUDA_", "NVIDIA_", "XDG_", "RUST_"];

/// Writes what was found out about the machine, and the user's settings and models, to `file`; `-` is standard output.
pub fn write(machine: Properties, file: &Path, json: bool) -> Result<(), CliError> {
    let home = folders::home().map(|home| home.display().to_string()).unwrap_or_default();
    let report = machine
        .with("installed", origin::of_program().map(|(_, origin)| format!("{origin:?}").to_lowercase()))
        .with_group("settings", user_settings())
        .with("variables", variables())
        .with_group("models_found", found_models())
        .map_texts(&|text| anonymous(text, &home));
    let text = if json { report.to_json() } else { report.to_text() };
    if file == Path::new("-") {
        return output::print(text.as_bytes());
    }
    let other_file = |error: CliError| error.hint("choose another file with --report");
    output::check_writable(output::parent_folder(file)).map_err(other_file)?;
    kiln_base::write_atomic(file, text.as_bytes())
        .map_err(|error| other_file(CliError::new(format!("can't write `{}`: {error}", file.display()))))?;
    let done = format!(
        "wrote `{}`: read it, then attach it to the bug report with the command and its output",
        file.display()
    );
    crate::terminal::tell(&done);
    Ok(())
}

/// The settings of the file. Options of the server may be keys and addresses with passwords: only their names are told.
fn user_settings() -> Properties {
    let Some(file) = settings::file() else { return Properties::default() };
    let text = settings::read_text(&file).unwrap_or_default();
    let keys = settings::parse(&text, &file).unwrap_or_default();
    let server = settings::parse_serve(&text, &file).unwrap_or_default();
    let server: Vec<String> = server.into_iter().map(|option| option.name).collect();
    keys.into_iter()
        .fold(Properties::default(), |properties, (key, value)| properties.with(key.name, value))
        .with("serve", server)
}

/// The names of variables that are set, without their values.
fn variables() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut names: Vec<String> =
        names.filter(|name| VARIABLES.iter().any(|start| name.starts_with(start))).collect();
    names.sort();
    names
}

/// The models that have a name: what they are, how their weights are stored, and their size.
fn found_models() -> Properties {
    let all = models::folders().all().into_iter();
    all.fold(Properties::verbatim(), |properties, (name, location)| {
        properties.with(name, describe(&location))
    })
}

fn describe(location: &ModelLocation) -> String {
    match location.open() {
        Ok(model) => format!("{}; {}", model.described_variant(), components(&model).join("; ")),
        Err(error) => format!("can't be opened: {error}"),
    }
}

fn components(model: &Model) -> Vec<String> {
    fn component<C>(name: &str, component: Option<&ModelComponent<C>>) -> String {
        match component.map(|component| component.weights()) {
            None => format!("no {name}"),
            Some(Err(error)) => format!("{name}: {error}"),
            Some(Ok(weights)) => {
                let types: Vec<&str> = weights.elements_by_storage().into_keys().collect();
                format!("{name} {}, {}", types.join(" and "), bytes(weights.bytes()))
            }
        }
    }
    vec![
        component("transformer", Some(&model.transformer)),
        component("text encoder", model.text_encoder.as_ref()),
        component("autoencoder", model.vae.as_ref()),
    ]
}

/// Replaces the home folder by `~`, and the names of users in other paths: that of this user, and whatever stands where it does
/// in the home folder, such as the short name in `C:\Users\ANNSMI~1`.
fn anonymous(text: &str, home: &str) -> String {
    let is_separator = |c: char| c == '/' || c == '\\';
    let same = |a: char, b: char| {
        a == b || is_separator(a) && is_separator(b) || a.to_lowercase().eq(b.to_lowercase())
    };
    // The bytes of `text` that are `start`, by the rules of Windows.
    let length = |text: &str, start: &str| {
        let mut rest = text.chars();
        let fits = start.chars().all(|c| rest.next().is_some_and(|other| same(c, other)));
        (fits && !start.is_empty()).then(|| text.len() - rest.as_str().len())
    };
    let is_name = |c: char| c.is_alphanumeric() || "._-".contains(c);
    let home = home.trim_end_matches(is_separator);
    let user_start = home.rfind(is_separator).map_or(home.len(), |at| at + 1);
    let (users, user) = home.split_at(user_start);
    // The root holds more than users.
    let users = if users.len() > 1 { users } else { "" };
    let mut out = String::new();
    let (mut rest, mut follows_separator) = (text, false);
    while let Some(first) = rest.chars().next() {
        let ends = |at: usize| !rest[at..].starts_with(is_name);
        let (shown, taken) = if let Some(at) = length(rest, home).filter(|at| ends(*at)) {
            ("~", at)
        } else if let Some(at) = length(rest, users) {
            let of_name = |c: char| is_name(c) || c == '~';
            let name = rest[at..].find(|c| !of_name(c)).unwrap_or(rest.len() - at);
            out += &rest[..at];
            (if name > 0 { "USER" } else { "" }, at + name)
        } else if let Some(at) = length(rest, user).filter(|at| follows_separator && ends(*at)) {
            ("USER", at)
        } else {
            (&rest[..first.len_utf8()], first.len_utf8())
        };
        out += shown;
        follows_separator = rest[..taken].ends_with(is_separator);
        rest = &rest[taken..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_no_user() {
        let unix = |text: &str| anonymous(text, "/home/ann");
        assert_eq!(unix("/home/ann/.cache/kiln (writable)"), "~/.cache/kiln (writable)");
        assert_eq!(unix("/mnt/disk/ann/models, /mnt/annex"), "/mnt/disk/USER/models, /mnt/annex");
        assert_eq!(unix("`/media/ann`"), "`/media/USER`");
        assert_eq!(unix("ann is no path"), "ann is no path");
        let windows = |text: &str| anonymous(text, r"C:\Users\Ann");
        assert_eq!(windows(r"C:\Users\Ann\AppData (writable)"), r"~\AppData (writable)");
        assert_eq!(windows(r"c:\users\ann\AppData"), r"~\AppData");
        assert_eq!(windows(r"\\?\C:\Users\Ann\a, D:/Ann/models"), r"\\?\~\a, D:/USER/models");
        assert_eq!(windows(r"C:\Users\Public, C:\Users\Anna\a"), r"C:\Users\USER, C:\Users\USER\a");
        let spaced = |text: &str| anonymous(text, r"C:\Users\Jürgen Groß");
        assert_eq!(spaced(r"C:\Users\JÜRGEN groß\x (writable)"), r"~\x (writable)");
        assert_eq!(spaced(r"C:\Users\JRGENG~1\AppData\Local\Temp"), r"C:\Users\USER\AppData\Local\Temp");
        assert_eq!(spaced(r"`D:\Jürgen Groß`"), "`D:\\USER`");
        assert_eq!(anonymous("/root/x, /opt/x", "/root"), "~/x, /opt/x");
        assert_eq!(anonymous("/srv/x", ""), "/srv/x");
    }
}
