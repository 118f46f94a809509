//! Changing one key in the text of the settings file; comments and other lines stay as they are.

use std::path::Path;

use toml::{Table, Value};

use super::serve::TABLE;
use super::{Key, parse_table};
use crate::error::CliError;

/// Where a setting stands in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Among the keys at the top.
    Top(String),
    /// In the table `[serve]`.
    Serve(String),
}

impl Place {
    /// Finds a setting by name; those of `[serve]` are called `serve.NAME`.
    pub fn find(name: &str) -> Result<Place, CliError> {
        match name.split_once('.') {
            Some((TABLE, name)) => Ok(Place::Serve(name.replace('-', "_"))),
            _ => Key::find(name).map(|key| Place::Top(key.name.to_owned())),
        }
    }

    /// Finds what stands in the file, also if it is no setting.
    pub fn in_file(name: &str, text: &str, file: &Path) -> Result<Place, CliError> {
        let is_there = parse_table(text, file)?.get(name).is_some_and(|value| !value.is_table());
        if is_there { Ok(Place::Top(name.to_owned())) } else { Place::find(name) }
    }

    fn name(&self) -> &str {
        match self {
            Place::Top(name) => name,
            Place::Serve(name) => name,
        }
    }

    /// Whether a line is the header of this place's table.
    fn is_header(&self, line: &str) -> bool {
        matches!(self, Place::Serve(_)) && line.trim() == format!("[{TABLE}]")
    }
}

/// Returns the text with the setting set to a value.
pub fn set(text: &str, file: &Path, place: &Place, value: &str) -> Result<String, CliError> {
    if let Place::Top(name) = place {
        Key::find(name)?.check(value).map_err(|expected| {
            CliError::usage(format!("`{value}` is not a value for the setting `{name}`: {expected}"))
                .hint("`kiln config list` shows all settings and their values")
        })?;
    }
    // A JSON string is a TOML string.
    let line = format!("{} = {}\n", place.name(), serde_json::Value::from(value));
    replace(text, file, place, Some((&line, value)))
}

/// Returns the text without the setting.
pub fn unset(text: &str, file: &Path, place: &Place) -> Result<String, CliError> {
    replace(text, file, place, None)
}

/// Replaces the line of a setting by this one, which sets it to this value, or adds the line.
fn replace(text: &str, file: &Path, place: &Place, new: Option<(&str, &str)>) -> Result<String, CliError> {
    let is_key = |line: &str| line.split_once('=').is_some_and(|(name, _)| name.trim() == place.name());
    let mut line = new.map(|(line, _)| line);
    let mut inside = matches!(place, Place::Top(_));
    let mut out = String::new();
    for old in text.lines() {
        if inside && is_key(old) {
            out.push_str(line.take().unwrap_or_default());
            continue;
        }
        if old.trim_start().starts_with('[') {
            // The end of the part that the setting belongs to.
            if inside {
                out.push_str(line.take().unwrap_or_default());
            }
            inside = place.is_header(old);
        }
        out.push_str(old);
        out.push('\n');
    }
    if let Some(line) = line {
        if !inside {
            out.push_str(&format!("[{TABLE}]\n"));
        }
        out.push_str(line);
    }
    let expected = changed(parse_table(text, file)?, place, new.map(|(_, value)| value));
    // A value over several lines, or a quoted key: legal, and nothing that lines can tell.
    if parse_table(&out, file).ok() != Some(expected) {
        return Err(CliError::new(format!(
            "can't change `{}` in `{}`: the file has an unusual form",
            place.name(),
            file.display()
        ))
        .hint("change it with an editor"));
    }
    // Another setting that is wrong must not prevent it: then two would never be repaired.
    if let (Place::Serve(name), Some((_, value))) = (place, new) {
        super::serve::parse(&Table::from_iter([(name.clone(), Value::from(value))])).map_err(|problem| {
            CliError::usage(problem).hint("`kiln serve --help` describes the values of every option")
        })?;
    }
    Ok(out)
}

/// The settings with one changed.
fn changed(mut all: Table, place: &Place, value: Option<&str>) -> Table {
    let table = match place {
        Place::Top(_) => Some(&mut all),
        Place::Serve(_) if value.is_none() => all.get_mut(TABLE).and_then(Value::as_table_mut),
        Place::Serve(_) => all.entry(TABLE).or_insert_with(|| Table::new().into()).as_table_mut(),
    };
    match (table, value) {
        (Some(table), Some(value)) => drop(table.insert(place.name().into(), value.into())),
        (Some(table), None) => drop(table.remove(place.name())),
        (None, _) => {}
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(text: &str, key: &str, value: Option<&str>) -> Result<String, CliError> {
        let (file, key) = (Path::new("config.toml"), &Place::find(key).unwrap());
        match value {
            Some(value) => set(text, file, key, value),
            None => unset(text, file, key),
        }
    }

    #[test]
    fn only_the_line_of_the_key_changes() {
        let text = "# mine\nmodel = \"a\"\n\ndtype = \"f32\" # exact";
        let set = changed(text, "model", Some("b \"c\"")).unwrap();
        assert_eq!(set, "# mine\nmodel = \"b \\\"c\\\"\"\n\ndtype = \"f32\" # exact\n");
        assert_eq!(changed(text, "threads", Some("4")).unwrap(), format!("{text}\nthreads = \"4\"\n"));
        assert_eq!(changed(text, "model", None).unwrap(), "# mine\n\ndtype = \"f32\" # exact\n");
        assert_eq!(changed("", "device", None).unwrap(), "");
    }

    #[test]
    fn settings_of_the_server_go_into_their_table() {
        if crate::args::serve_options().is_none() {
            return;
        }
        let one = changed("model = \"a\"\n", "serve.port", Some("7861")).unwrap();
        assert_eq!(one, "model = \"a\"\n[serve]\nport = \"7861\"\n");
        let two = changed(&one, "serve.max-side", Some("512")).unwrap();
        assert_eq!(two, "model = \"a\"\n[serve]\nport = \"7861\"\nmax_side = \"512\"\n");
        let three = changed(&two, "dtype", Some("f32")).unwrap();
        assert!(three.starts_with("model = \"a\"\ndtype = \"f32\"\n[serve]\n"), "{three}");
        assert_eq!(changed(&two, "serve.max_side", None).unwrap(), one);
        let error = changed(&one, "serve.prot", Some("1")).unwrap_err().to_string();
        assert!(error.contains("`serve.prot`") && error.contains("`port`"), "{error}");
    }

    #[test]
    fn a_file_that_lines_can_not_change_is_left_alone() {
        for text in ["model = \"\"\"\na\"\"\"", "\"model\" = \"a\""] {
            let error = changed(text, "model", Some("b")).unwrap_err().to_string();
            assert!(error.contains("`config.toml`") && error.contains("editor"), "{error}");
        }
        assert!(changed("", "dtype", Some("f64")).unwrap_err().to_string().contains("`dtype`"));
    }
}
