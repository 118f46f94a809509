//! JSON fields that hold one value or a list.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// One value or a list of values.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(untagged, expecting = "expected one value or a list of them")]
pub enum OneOrMany<T> {
    /// One value.
    One(T),
    /// A list of values.
    Many(Vec<T>),
}

impl<T> From<OneOrMany<T>> for Vec<T> {
    fn from(values: OneOrMany<T>) -> Vec<T> {
        match values {
            OneOrMany::One(one) => vec![one],
            OneOrMany::Many(many) => many,
        }
    }
}

/// Serializes a single value without a list around it.
pub(super) fn serialize<T: Serialize, S: Serializer>(values: &[T], serializer: S) -> Result<S::Ok, S::Error> {
    match values {
        [one] => one.serialize(serializer),
        many => many.serialize(serializer),
    }
}

pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    // `null` counts as absent.
    Ok(Option::<OneOrMany<T>>::deserialize(deserializer)?.map_or_else(Vec::new, Vec::from))
}
