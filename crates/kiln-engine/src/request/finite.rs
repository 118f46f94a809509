//! Numbers of a request that f32 can hold. JSON has no NaN or infinity, but numbers such as 1e99, which would become infinite
//! and be lost when a recipe is written.

use serde::de::{Deserialize, Deserializer, Error};

/// Reads a number; for `deserialize_with`.
pub fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    Finite::deserialize(deserializer).map(|Finite(number)| number)
}

/// Reads a number or nothing; for `deserialize_with`.
pub fn option<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f32>, D::Error> {
    Ok(Option::<Finite>::deserialize(deserializer)?.map(|Finite(number)| number))
}

/// Reads a list of numbers; for `deserialize_with`.
pub fn list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
    Ok(Vec::<Finite>::deserialize(deserializer)?.into_iter().map(|Finite(number)| number).collect())
}

struct Finite(f32);

impl<'de> Deserialize<'de> for Finite {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Finite, D::Error> {
        let number = f64::deserialize(deserializer)?;
        let small = number as f32;
        if small.is_finite() {
            return Ok(Finite(small));
        }
        Err(D::Error::custom(format!(
            "the number {number:e} is out of range, expected at most {:e}",
            f32::MAX
        )))
    }
}
