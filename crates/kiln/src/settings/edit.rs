//! Changing one key in the text of the settings file; comments and other lines stay as they are.

use std::path::Path;

use super::{Key, parse};
use crate::error::CliError;

/// Returns the text with the key set to a value.
pub fn set(text: &str, file: &Path, key: &Key, value: &str) -> Result<String, CliError> {
    key.check(value).map_err(|expected| {
        CliError::usage(format!("`{value}` is not a value for the setting `{}`: {expected}", key.name))
            .hint("`kiln config list` shows all settings and their values")
    })?;
    // A JSON string is a TOML string.
    let line = format!("{} = {}\n", key.name, serde_json::Value::from(value));
    replace(text, file, key, Some(&line), Some(value))
}

/// Returns the text without the key.
pub fn unset(text: &str, file: &Path, key: &Key) -> Result<String, CliError> {
    replace(text, file, key, None, None)
}

/// Replaces the line of a key, or appends it. `value` is what the key must have afterwards.
fn replace(
    text: &str,
    file: &Path,
    key: &Key,
    line: Option<&str>,
    value: Option<&str>,
) -> Result<String, CliError> {
    let is_key = |line: &str| line.split_once('=').is_some_and(|(name, _)| name.trim() == key.name);
    let mut new = String::new();
    let mut place = line;
    for old in text.lines() {
        if is_key(old) {
            new.push_str(place.take().unwrap_or_default());
        } else {
            new.push_str(old);
            new.push('\n');
        }
    }
    new.push_str(place.unwrap_or_default());
    let mut expected = parse(text, file)?;
    expected.retain(|(other, _)| other.name != key.name);
    let same = |found: &[(&Key, String)]| {
        let of_key = found.iter().find(|(other, _)| other.name == key.name).map(|(_, text)| text.as_str());
        let others = found.iter().filter(|(other, _)| other.name != key.name);
        of_key == value
            && others
                .map(|(key, text)| (key.name, text))
                .eq(expected.iter().map(|(key, text)| (key.name, text)))
    };
    // A value over several lines, or a quoted key: legal, and nothing that lines can tell.
    match parse(&new, file) {
        Ok(found) if same(&found) => Ok(new),
        _ => Err(CliError::new(format!(
            "can't change `{}` in `{}`: the file has an unusual form",
            key.name,
            file.display()
        ))
        .hint("change it with an editor")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(text: &str, key: &str, value: Option<&str>) -> Result<String, CliError> {
        let (file, key) = (Path::new("config.toml"), Key::find(key).unwrap());
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
    fn a_file_that_lines_can_not_change_is_left_alone() {
        for text in ["model = \"\"\"\na\"\"\"", "\"model\" = \"a\""] {
            let error = changed(text, "model", Some("b")).unwrap_err().to_string();
            assert!(error.contains("`config.toml`") && error.contains("editor"), "{error}");
        }
        assert!(changed("", "dtype", Some("f64")).unwrap_err().to_string().contains("`dtype`"));
    }
}
