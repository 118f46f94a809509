//! The files that a request names: images, weights, LoRAs.

use std::path::PathBuf;

use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The name of a file; in a recipe also its hash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileRef {
    /// A path, or a name that the [`InputResolver`](crate::InputResolver) understands.
    pub path: PathBuf,
    /// The file's SHA-256 in hex, or the fingerprint of its weights, when an image was generated from it.
    pub sha256: Option<String>,
}

/// A LoRA and its weight.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct LoraRef {
    /// Its name, as in `/v1/loras`, or its path.
    #[serde(rename = "name", alias = "path")]
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: PathBuf,
    /// Its weight; may be negative.
    #[serde(default = "default_weight", deserialize_with = "super::finite::number")]
    pub weight: f32,
    /// Its fingerprint, in a recipe.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(ignore))]
    pub sha256: Option<String>,
}

fn default_weight() -> f32 {
    1.0
}

impl From<&str> for FileRef {
    fn from(path: &str) -> FileRef {
        FileRef { path: path.into(), sha256: None }
    }
}

impl From<String> for FileRef {
    fn from(path: String) -> FileRef {
        FileRef { path: path.into(), sha256: None }
    }
}

impl From<PathBuf> for FileRef {
    fn from(path: PathBuf) -> FileRef {
        FileRef { path, sha256: None }
    }
}

impl From<std::ffi::OsString> for FileRef {
    fn from(path: std::ffi::OsString) -> FileRef {
        FileRef { path: path.into(), sha256: None }
    }
}

impl Serialize for FileRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let path = self.path.to_string_lossy();
        let Some(sha256) = &self.sha256 else { return serializer.serialize_str(&path) };
        let mut map = serializer.serialize_map(Some(2))?;
        map.serialize_entry("path", &path)?;
        map.serialize_entry("sha256", sha256)?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for FileRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FileRef, D::Error> {
        /// In older recipes the object has more fields.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum NameOrObject {
            Name(PathBuf),
            Object { path: PathBuf, sha256: Option<String> },
        }
        Ok(match NameOrObject::deserialize(deserializer)? {
            NameOrObject::Name(path) => FileRef { path, sha256: None },
            NameOrObject::Object { path, sha256 } => FileRef { path, sha256 },
        })
    }
}

impl Serialize for LoraRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let path = self.path.to_string_lossy();
        let mut map = serializer.serialize_map(None)?;
        match &self.sha256 {
            None => map.serialize_entry("name", &path)?,
            Some(sha256) => {
                map.serialize_entry("path", &path)?;
                map.serialize_entry("sha256", sha256)?;
            }
        }
        map.serialize_entry("weight", &self.weight)?;
        map.end()
    }
}

impl LoraRef {
    /// Parses `FILE[:WEIGHT]`. File names and drives may contain colons, so the text after the last colon is a weight only
    /// if it is a number and the whole text is not a file itself. After an existing file it must be a weight.
    pub fn parse(text: &str) -> Result<LoraRef, String> {
        use std::path::Path;
        let lora = |path: &str, weight| LoraRef { path: path.into(), weight, sha256: None };
        let weight = |number: &str| number.parse::<f32>().ok().filter(|w| w.is_finite());
        Ok(match text.rsplit_once(':') {
            _ if text.is_empty() => return Err("expected a file".into()),
            Some((path, number)) if !path.is_empty() && !Path::new(text).exists() => match weight(number) {
                Some(weight) => lora(path, weight),
                None if Path::new(path).is_file() => {
                    let found = if number.is_empty() { "nothing".into() } else { format!("`{number}`") };
                    return Err(format!(
                        "`{path}` and a colon are followed by {found}, expected a finite number as its weight"
                    ));
                }
                None => lora(text, 1.0),
            },
            _ => lora(text, 1.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lora(text: &str) -> (String, f32) {
        let lora = LoraRef::parse(text).unwrap();
        (lora.path.display().to_string(), lora.weight)
    }

    #[test]
    fn a_lora_weight_is_what_follows_the_last_colon_if_it_is_a_number() {
        assert_eq!(lora("ink.safetensors"), ("ink.safetensors".into(), 1.0));
        assert_eq!(lora("ink.safetensors:0.5"), ("ink.safetensors".into(), 0.5));
        assert_eq!(lora("ink.safetensors:-1"), ("ink.safetensors".into(), -1.0));
        assert_eq!(lora(r"C:\ink.safetensors"), (r"C:\ink.safetensors".into(), 1.0));
        assert_eq!(lora(r"C:\ink.safetensors:2e-1"), (r"C:\ink.safetensors".into(), 0.2));
        assert_eq!(lora("a:b:3"), ("a:b".into(), 3.0));
        assert_eq!(lora("ink:nan"), ("ink:nan".into(), 1.0));
        assert_eq!(lora(":3"), (":3".into(), 1.0));
        assert!(LoraRef::parse("").is_err());
    }

    #[test]
    fn a_file_whose_name_ends_like_a_weight_is_taken_as_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ink:2");
        std::fs::write(&path, b"").unwrap();
        assert_eq!(lora(path.to_str().unwrap()), (path.display().to_string(), 1.0));
    }

    #[test]
    fn a_weight_that_is_not_a_number_is_refused_after_a_file_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (wrong, found) in [("nan", "`nan`"), ("inf", "`inf`"), ("abc", "`abc`"), ("", "nothing")] {
            let message = LoraRef::parse(&format!("{}:{wrong}", file.path().display())).unwrap_err();
            assert!(message.contains(&format!("{found}, expected a finite number")), "{message}");
        }
    }
}
