//! Lists of images: `metadata.jsonl` and `metadata.csv`, as the `datasets` library and other trainers write them.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::csv;
use super::items::{Item, Listing};
use crate::{Error, Result};

/// Names of the column with the image's path, relative to the list.
const IMAGE: [&str; 5] = ["file_name", "image", "image_path", "file", "target"];
/// Names of the column with the caption.
const CAPTION: [&str; 4] = ["text", "caption", "prompt", "instruction"];
/// Names of the column with the images that an edit starts from.
const REFERENCES: [&str; 5] = ["references", "reference", "source", "before", "control"];
/// Separates several references in a CSV field.
const SEPARATOR: char = ';';

/// Reads a list of JSON objects, one per line.
pub(super) fn read_jsonl(path: &Path) -> Result<Listing> {
    let text = fs::read(path).and_then(kiln_base::decode_text).map_err(Error::io("read", path))?;
    let mut items = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let row: Map<String, Value> = serde_json::from_str(line)
            .map_err(|error| wrong(path, i + 1, &format!("it is not a JSON object: {error}")))?;
        items.push(item(path, i + 1, |name| Ok(row.get(name).cloned()))?);
    }
    Ok(Listing { items, ignored: Vec::new() })
}

/// Reads a CSV file whose first line names the columns.
pub(super) fn read_csv(path: &Path) -> Result<Listing> {
    let text = fs::read(path).and_then(kiln_base::decode_text).map_err(Error::io("read", path))?;
    let records =
        csv::records(&text).map_err(|line| wrong(path, line, "a quote is opened here and not closed"))?;
    let Some((columns, rows)) = records.split_first() else {
        return Err(Error::data(format!("`{}` is empty", path.display())));
    };
    let mut items = Vec::new();
    for (i, row) in rows.iter().enumerate() {
        if row.len() > columns.len() {
            let problem = format!("it has {} fields, the first line names {}", row.len(), columns.len());
            return Err(wrong(path, i + 2, &problem).with_hint("put captions with commas into double quotes"));
        }
        let field = |name: &str| {
            let at = columns.iter().position(|column| column.trim().eq_ignore_ascii_case(name));
            let value = at.and_then(|at| row.get(at)).filter(|value| !value.trim().is_empty());
            let several = |value: &String| {
                value.split(SEPARATOR).map(|part| Value::from(part.trim())).collect::<Vec<_>>().into()
            };
            let is_list = REFERENCES.contains(&name);
            Ok(value.map(|value| if is_list { several(value) } else { Value::from(value.trim()) }))
        };
        items.push(item(path, i + 2, field)?);
    }
    Ok(Listing { items, ignored: Vec::new() })
}

/// Makes an item of the fields of one row.
fn item(list: &Path, line: usize, field: impl Fn(&str) -> Result<Option<Value>>) -> Result<Item> {
    let first = |names: &[&str]| -> Result<Option<Value>> {
        for name in names {
            if let Some(value) = field(name)?.filter(|value| !value.is_null()) {
                return Ok(Some(value));
            }
        }
        Ok(None)
    };
    let folder = list.parent().unwrap_or(Path::new(""));
    let path = |value: &Value| {
        let text = value.as_str().filter(|text| !text.trim().is_empty());
        let text = text.ok_or_else(|| wrong(list, line, &format!("{value} is not the path of an image")))?;
        Ok::<_, Error>(folder.join(text))
    };
    let image = first(&IMAGE)?.ok_or_else(|| {
        wrong(list, line, "it names no image")
            .with_hint(format!("the column of the image is called {}", IMAGE.join(", ")))
    })?;
    let caption = match first(&CAPTION)? {
        None => None,
        Some(Value::String(text)) => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
        Some(other) => return Err(wrong(list, line, &format!("the caption {other} is not a text"))),
    };
    let references = match first(&REFERENCES)? {
        None => Vec::new(),
        Some(Value::Array(values)) => values.iter().map(path).collect::<Result<_>>()?,
        Some(value) => vec![path(&value)?],
    };
    let repeats = match field("repeats")? {
        None => 1,
        Some(value) => {
            let number = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok());
            let number = number.filter(|number| (1..=10_000).contains(number));
            let problem = || wrong(list, line, &format!("`repeats` is {value}, expected a number from 1"));
            number.ok_or_else(problem)? as usize
        }
    };
    Ok(Item { image: path(&image)?, caption, references, repeats })
}

fn wrong(list: &Path, line: usize, problem: &str) -> Error {
    Error::data(format!("line {line} of `{}` can't be used: {problem}", list.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn write(name: &str, text: impl AsRef<[u8]>) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        (folder, path)
    }

    #[test]
    fn jsonl_and_csv_give_the_same_items() {
        let jsonl = concat!(
            r#"{"file_name": "a.png", "text": "a fox, red", "references": ["x.png", "y.png"]}"#,
            "\n\n",
            r#"{"image": "b.png", "prompt": "", "repeats": 3}"#,
        );
        let csv = "file_name,caption,references,repeats\na.png,\"a fox, red\",x.png; y.png,\nb.png,,,3\n";
        let (folder, path) = write("metadata.jsonl", jsonl);
        let mut listed = read_jsonl(&path).unwrap().items;
        assert_eq!(listed[0].references, ["x.png", "y.png"].map(|name| folder.path().join(name)));
        assert_eq!((listed[1].caption.clone(), listed[1].repeats), (None, 3));
        let (other, path) = write("metadata.csv", csv);
        let from_csv = read_csv(&path).unwrap().items;
        for item in &mut listed {
            let paths = std::iter::once(&mut item.image).chain(&mut item.references);
            paths.for_each(|p| *p = other.path().join(p.file_name().unwrap()));
        }
        assert_eq!(listed, from_csv);
    }

    #[test]
    fn lists_of_excel_and_powershell_are_read() {
        let csv = "file_name,text\r\na.png,Käfer\r\n";
        let jsonl = "{\"file_name\": \"a.png\", \"text\": \"Käfer\"}\r\n";
        for (name, text, read) in [("a.csv", csv, read_csv as fn(&Path) -> _), ("a.jsonl", jsonl, read_jsonl)]
        {
            let marked = format!("\u{feff}{text}");
            let utf16: Vec<u8> = marked.encode_utf16().flat_map(u16::to_le_bytes).collect();
            for bytes in [marked.into_bytes(), utf16] {
                let (_folder, path) = write(name, bytes);
                let items = read(&path).unwrap().items;
                assert_eq!(items[0].caption.as_deref(), Some("Käfer"), "{name}");
            }
        }
    }

    #[test]
    fn wrong_rows_are_named_by_line() {
        for (name, text, expected) in [
            ("m.jsonl", "{\"file_name\": \"a.png\"}\n{", "line 2"),
            ("m.jsonl", "{\"text\": \"a\"}", "names no image"),
            ("m.jsonl", "{\"file_name\": \"a.png\", \"text\": 3}", "is not a text"),
            ("m.jsonl", "{\"file_name\": \"a.png\", \"repeats\": 0}", "`repeats` is 0"),
            ("m.csv", "file_name,text\na.png,b,c", "3 fields"),
            ("m.csv", "file_name,text\na.png,\"b", "line 2"),
            ("m.csv", "", "is empty"),
        ] {
            let (_folder, path) = write(name, text);
            let result = if name.ends_with("csv") { read_csv(&path) } else { read_jsonl(&path) };
            let message = result.unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
