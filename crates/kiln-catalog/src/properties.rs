//! Named values in a fixed order, printed as aligned text or as JSON.

use std::fmt;

use kiln_base::{printable, printable_line};
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::error::Error;

/// An ordered list of named values and groups of them. A `serde_json` map would sort them by name.
///
/// Names are JSON's: `default_size`; text output writes them as words: `default size`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Properties(Vec<(String, Entry)>, Names);

/// How text output writes the names.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Names {
    #[default]
    Words,
    /// As they are: names of tensors, of metadata.
    Verbatim,
    /// As they are, and so is the name of the group.
    VerbatimGroup,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Entry {
    Group(Properties),
    Value(Value),
    /// A number, and how text output shows it.
    #[serde(skip)]
    Amount(u64, String),
}

impl Properties {
    /// Creates an empty list whose names are data, which text output doesn't change.
    pub fn verbatim() -> Properties {
        Properties(Vec::new(), Names::Verbatim)
    }

    /// Creates an empty group whose names and whose own name are data.
    pub fn verbatim_group() -> Properties {
        Properties(Vec::new(), Names::VerbatimGroup)
    }

    fn label(&self, name: &str, entry: &Entry) -> String {
        let own = matches!(entry, Entry::Group(Properties(_, Names::VerbatimGroup)));
        if own || self.1 != Names::Words { name.to_owned() } else { name.replace('_', " ") }
    }

    /// Adds a value; null is left out.
    pub fn with(mut self, name: impl Into<String>, value: impl Serialize) -> Properties {
        match serde_json::to_value(value).unwrap_or_default() {
            Value::Null => {}
            value => self.0.push((name.into(), Entry::Value(value))),
        }
        self
    }

    /// Adds a number that text output shows as `text`.
    pub fn with_amount(mut self, name: impl Into<String>, amount: u64, text: String) -> Properties {
        self.0.push((name.into(), Entry::Amount(amount, text)));
        self
    }

    /// Adds a named group.
    pub fn with_group(mut self, name: impl Into<String>, group: Properties) -> Properties {
        self.0.push((name.into(), Entry::Group(group)));
        self
    }

    /// Appends all properties of `other`.
    pub fn and(mut self, other: Properties) -> Properties {
        self.0.extend(other.0);
        self
    }

    /// Changes all texts among the values.
    pub fn map_texts(mut self, change: &dyn Fn(&str) -> String) -> Properties {
        for (_, entry) in &mut self.0 {
            match entry {
                Entry::Group(group) => *group = std::mem::take(group).map_texts(change),
                Entry::Value(value) => change_texts(value, change),
                Entry::Amount(..) => {}
            }
        }
        self
    }

    /// Formats as indented JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Formats as aligned lines, with groups indented below their name. Names and values can't control the terminal.
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        self.write_lines(&mut out, 0);
        printable(&out).into_owned()
    }

    fn write_lines(&self, out: &mut String, indent: usize) {
        let values = self.0.iter().filter(|(_, entry)| !matches!(entry, Entry::Group(_)));
        let width = values.map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, entry) in &self.0 {
            let name = self.label(name, entry);
            let name = printable_line(&name);
            let text = match entry {
                Entry::Group(properties) => {
                    out.push_str(&format!("{:indent$}{name}\n", ""));
                    properties.write_lines(out, indent + 2);
                    continue;
                }
                Entry::Value(value) => text(value),
                Entry::Amount(_, text) => text.clone(),
            };
            // Align the further lines of a text with its first.
            let text = text.replace('\n', &format!("\n{:1$}", "", indent + width + 2));
            out.push_str(&format!("{:indent$}{name:width$}  {text}\n", ""));
        }
    }
}

fn change_texts(value: &mut Value, change: &dyn Fn(&str) -> String) {
    match value {
        Value::String(text) => *text = change(text),
        Value::Array(items) => items.iter_mut().for_each(|item| change_texts(item, change)),
        Value::Object(fields) => fields.values_mut().for_each(|field| change_texts(field, change)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(yes) => (if *yes { "yes" } else { "no" }).into(),
        Value::Array(items) if items.is_empty() => "none".into(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            let pair =
                |(name, value): (&String, &Value)| format!("{} {}", name.replace('_', " "), text(value));
            fields.iter().map(pair).collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    }
}

impl Serialize for Properties {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, entry) in &self.0 {
            map.serialize_entry(name, entry)?;
        }
        map.end()
    }
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Entry::Group(properties) => properties.serialize(serializer),
            Entry::Value(value) => value.serialize(serializer),
            Entry::Amount(amount, _) => serializer.serialize_u64(*amount),
        }
    }
}

impl<'de> Deserialize<'de> for Properties {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Properties;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Properties, A::Error> {
                let mut properties = Properties::default();
                while let Some(entry) = map.next_entry()? {
                    properties.0.push(entry);
                }
                Ok(properties)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// A description, and an error if it is incomplete.
#[derive(Debug)]
pub struct Description {
    /// What is known.
    pub properties: Properties,
    /// Why it is incomplete.
    pub problem: Option<Error>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_aligned_and_groups_indented() {
        let group = Properties::default().with("vae", true).with("list", [1, 2]).with("nothing", Value::Null);
        let properties =
            Properties::default().with("kind", "model").with("head_dim", 128).with_group("group", group);
        let properties = properties.with_amount("size", 2048, "2.0 KiB".into());
        assert_eq!(Properties::default().with("card", "one\ntwo").to_text(), "card  one\n      two\n");
        assert!(properties.to_json().ends_with("\"size\": 2048\n}\n"));
        assert_eq!(
            properties.to_text(),
            "kind      model\nhead dim  128\ngroup\n  vae   yes\n  list  1, 2\nsize      2.0 KiB\n"
        );
    }

    #[test]
    fn names_that_are_data_stay() {
        let tensors = Properties::verbatim_group().with("q_norm.weight", 1);
        assert_eq!(Properties::default().with_group("q8_0", tensors).to_text(), "q8_0\n  q_norm.weight  1\n");
    }

    #[test]
    fn names_and_values_do_not_control_the_terminal() {
        let properties = Properties::default().with("a\nb", "one\u{1b}[2J\r\ntwo");
        assert_eq!(properties.to_text(), "a\\u{a}b  one\\u{1b}[2J\n     two\n");
    }

    #[test]
    fn json_keeps_the_order_both_ways() {
        let json = r#"{"z":1,"a":{"y":18446744073709551615,"b":[{"q":1.5}]}}"#;
        let properties: Properties = serde_json::from_str(json).unwrap();
        assert_eq!(serde_json::to_string(&properties).unwrap(), json);
        assert_eq!(properties.to_text(), "z  1\na\n  y  18446744073709551615\n  b  q 1.5\n");
    }
}
