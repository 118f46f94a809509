//! The fields of a request by their names in JSON, for what follows from all of them. A list of names says only which
//! are left out, so that a new field can't be forgotten.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde_json::{Map, Value};

use super::Request;

/// What images that are generated in one batch may differ in.
const VARY_IN_A_BATCH: [&str; 11] = [
    "prompt",
    "original_prompt",
    "negative_prompt",
    "n",
    "seed",
    "one_generator",
    "rng",
    "mask_padding",
    "output_format",
    "output_compression",
    "png",
];

impl Request {
    /// Fields about files of the machine, which clients of a server can't set.
    pub const LOCAL_FIELDS: [&str; 3] = ["embeds", "noise", "lora_partial"];

    /// The first of [`Request::LOCAL_FIELDS`] that is given.
    pub fn local_field(&self) -> Option<&'static str> {
        let given = [self.embeds.is_some(), self.noise.is_some(), self.lora_partial];
        Request::LOCAL_FIELDS.into_iter().zip(given).find_map(|(field, given)| given.then_some(field))
    }

    /// Returns the fields that are given.
    pub fn fields(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            _ => Map::new(),
        }
    }

    /// Returns it with other values of these fields. Its own numbers must be finite: JSON has no others.
    pub fn with_fields(&self, changes: Map<String, Value>) -> serde_json::Result<Request> {
        let mut fields = self.fields();
        fields.extend(changes);
        serde_json::from_value(fields.into())
    }

    /// Returns the names of all fields, and the other names that some can be given by.
    pub fn field_names() -> &'static [&'static str] {
        match Request::deserialize(NamesOnly) {
            Err(Names(names)) => names,
            Ok(_) => &[],
        }
    }

    /// Returns a text that is equal for two requests whose images can be generated in one batch, as far as the requests
    /// tell: of input images it knows the number.
    pub fn batch_key(&self) -> String {
        let mut fields = self.fields();
        fields.retain(|name, _| !VARY_IN_A_BATCH.contains(&name.as_str()));
        for name in ["references", "init", "mask"] {
            if let Some(files) = fields.get_mut(name) {
                *files = files.as_array().map_or(1, Vec::len).into();
            }
        }
        Value::Object(fields).to_string()
    }
}

/// Asks a structure for the names of its fields.
struct NamesOnly;

/// The answer, which has to be an error: no value is read.
#[derive(Debug)]
struct Names(&'static [&'static str]);

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl std::error::Error for Names {}

impl de::Error for Names {
    fn custom<T: fmt::Display>(_: T) -> Names {
        Names(&[])
    }
}

impl<'de> Deserializer<'de> for NamesOnly {
    type Error = Names;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Names> {
        Err(Names(fields))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Names> {
        Err(Names(&[]))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_names_hold_fields_only() {
        let names = Request::field_names();
        assert!(names.contains(&"prompt") && names.contains(&"negative"), "{names:?}");
        for name in VARY_IN_A_BATCH.iter().chain(&Request::LOCAL_FIELDS) {
            assert!(names.contains(name), "{name}");
        }
    }

    #[test]
    fn requests_that_differ_in_a_field_that_a_batch_shares_have_different_keys() {
        let request = |json: &str| serde_json::from_str::<Request>(json).unwrap();
        let key = |json: &str| request(json).batch_key();
        let fox = key(r#"{"prompt":"a fox","seed":1,"references":["input:1"]}"#);
        assert_eq!(fox, key(r#"{"prompt":"an owl","seed":2,"n":3,"png":"small","references":["input:2"]}"#));
        assert_ne!(fox, key(r#"{"prompt":"a fox","seed":1,"references":["input:1","input:2"]}"#));
        assert_ne!(fox, key(r#"{"prompt":"a fox","seed":1,"references":["input:1"],"upscale":2}"#));
        assert_eq!(request(r#"{"lora_partial":true}"#).local_field(), Some("lora_partial"));
    }
}
