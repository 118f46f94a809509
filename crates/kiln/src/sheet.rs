//! Names and values in a chosen order: lines for people, JSON for programs.

use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// A description. `serde_json`'s own maps would sort it by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sheet(Vec<(String, Entry)>);

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Entry {
    Sheet(Sheet),
    Value(Value),
    /// A number for programs and how it reads best.
    #[serde(skip)]
    Amount(u64, String),
}

impl Sheet {
    /// Adds a value; null is left out.
    pub fn with(mut self, name: impl Into<String>, value: impl Serialize) -> Sheet {
        match serde_json::to_value(value).unwrap_or_default() {
            Value::Null => {}
            value => self.0.push((name.into(), Entry::Value(value))),
        }
        self
    }

    /// Adds a number that people read as `text`.
    pub fn with_amount(mut self, name: impl Into<String>, amount: u64, text: String) -> Sheet {
        self.0.push((name.into(), Entry::Amount(amount, text)));
        self
    }

    /// Adds a sheet below a name.
    pub fn with_sheet(mut self, name: impl Into<String>, sheet: Sheet) -> Sheet {
        self.0.push((name.into(), Entry::Sheet(sheet)));
        self
    }

    /// Adds all of another sheet.
    pub fn and(mut self, other: Sheet) -> Sheet {
        self.0.extend(other.0);
        self
    }

    /// As indented JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// As aligned lines, sheets indented below their name.
    pub fn to_lines(&self) -> String {
        let mut out = String::new();
        self.write_lines(&mut out, 0);
        out
    }

    fn write_lines(&self, out: &mut String, indent: usize) {
        let values = self.0.iter().filter(|(_, entry)| !matches!(entry, Entry::Sheet(_)));
        let width = values.map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, entry) in &self.0 {
            let text = match entry {
                Entry::Sheet(sheet) => {
                    out.push_str(&format!("{:indent$}{name}\n", ""));
                    sheet.write_lines(out, indent + 2);
                    continue;
                }
                Entry::Value(value) => text(value),
                Entry::Amount(_, text) => text.clone(),
            };
            // Further lines of a text stand below its first.
            let text = text.replace('\n', &format!("\n{:1$}", "", indent + width + 2));
            out.push_str(&format!("{:indent$}{name:width$}  {text}\n", ""));
        }
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(yes) => (if *yes { "yes" } else { "no" }).into(),
        Value::Array(items) if items.is_empty() => "none".into(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            let pair = |(name, value): (&String, &Value)| format!("{name} {}", text(value));
            fields.iter().map(pair).collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    }
}

impl Serialize for Sheet {
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
            Entry::Sheet(sheet) => sheet.serialize(serializer),
            Entry::Value(value) => value.serialize(serializer),
            Entry::Amount(amount, _) => serializer.serialize_u64(*amount),
        }
    }
}

impl<'de> Deserialize<'de> for Sheet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Sheet;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Sheet, A::Error> {
                let mut sheet = Sheet::default();
                while let Some(entry) = map.next_entry()? {
                    sheet.0.push(entry);
                }
                Ok(sheet)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_aligned_and_sheets_indented() {
        let parts = Sheet::default().with("vae", true).with("list", [1, 2]).with("nothing", Value::Null);
        let sheet = Sheet::default().with("kind", "model").with("head_dim", 128).with_sheet("parts", parts);
        let sheet = sheet.with_amount("size", 2048, "2.0 KiB".into());
        assert_eq!(Sheet::default().with("card", "one\ntwo").to_lines(), "card  one\n      two\n");
        assert!(sheet.to_json().ends_with("\"size\": 2048\n}\n"));
        assert_eq!(
            sheet.to_lines(),
            "kind      model\nhead_dim  128\nparts\n  vae   yes\n  list  1, 2\nsize      2.0 KiB\n"
        );
    }

    #[test]
    fn json_keeps_the_order_both_ways() {
        let json = r#"{"z":1,"a":{"y":18446744073709551615,"b":[{"q":1.5}]}}"#;
        let sheet: Sheet = serde_json::from_str(json).unwrap();
        assert_eq!(serde_json::to_string(&sheet).unwrap(), json);
        assert_eq!(sheet.to_lines(), "z  1\na\n  y  18446744073709551615\n  b  q 1.5\n");
    }
}
