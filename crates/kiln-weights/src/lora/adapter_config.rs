//! PEFT's adapter config: as diffusers stores it in a LoRA's header, one JSON object under `lora_adapter_metadata` with keys
//! such as `transformer.r`; or as PEFT itself does, in `adapter_config.json`.
//!
//! Rank and alpha of a module come from the first pattern, in the order of the file, that matches the module's name or
//! its end after a dot; else from the defaults. Patterns are regular expressions.

use std::collections::BTreeMap;
use std::fmt;

use regex::{Regex, RegexBuilder};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::LoraProblem;

const KEY: &str = "lora_adapter_metadata";
const PREFIX: &str = "transformer.";
/// PEFT's default for `r` and `lora_alpha`.
const PEFT_DEFAULT: f64 = 8.0;

/// The settings that determine a module's scale.
#[derive(Debug)]
pub(super) struct AdapterConfig {
    rank: f64,
    alpha: f64,
    rank_patterns: Vec<(Regex, f64)>,
    alpha_patterns: Vec<(Regex, f64)>,
    /// Divide alpha by the square root of the rank (rank-stabilized LoRA).
    use_rslora: bool,
    /// Whether updates have DoRA magnitudes.
    pub use_dora: bool,
}

impl AdapterConfig {
    /// Reads the config in a header's metadata, else that of PEFT's own file; `None` if there is none for the transformer.
    pub fn read(
        metadata: &BTreeMap<String, String>,
        file: Option<&str>,
    ) -> Result<Option<AdapterConfig>, LoraProblem> {
        let text = metadata.get(KEY).map(String::as_str).or(file).filter(|t| !t.is_empty());
        let Some(text) = text else { return Ok(None) };
        let json: Json = serde_json::from_str(text).map_err(|e| unusable(e.to_string()))?;
        let Json::Object(pairs) = json else { return Err(unusable("it is not an object".into())) };
        // A file saved from the model instead of the pipeline has the same keys without the prefix.
        let prefix = if pairs.iter().any(|(k, _)| k.starts_with(PREFIX)) { PREFIX } else { "" };
        let get = |key: &str| {
            let found = pairs.iter().rfind(|(k, _)| k.strip_prefix(prefix) == Some(key));
            found.map(|(_, v)| v).filter(|v| !matches!(v, Json::Null))
        };
        if get("r").or(get("lora_alpha")).is_none() {
            return Ok(None);
        }
        let flag = |key| matches!(get(key), Some(Json::Bool(true)));
        Ok(Some(AdapterConfig {
            rank: number("r", get("r"))?,
            alpha: number("lora_alpha", get("lora_alpha"))?,
            rank_patterns: patterns("rank_pattern", get("rank_pattern"))?,
            alpha_patterns: patterns("alpha_pattern", get("alpha_pattern"))?,
            use_rslora: flag("use_rslora"),
            use_dora: flag("use_dora"),
        }))
    }

    /// The rank that `module` should have.
    pub fn rank(&self, module: &str) -> f64 {
        first_match(&self.rank_patterns, module).unwrap_or(self.rank)
    }

    /// The alpha of `module`.
    pub fn alpha(&self, module: &str) -> f64 {
        first_match(&self.alpha_patterns, module).unwrap_or(self.alpha)
    }

    /// The scale for this alpha and rank.
    pub fn scale(&self, alpha: f64, rank: usize) -> f64 {
        if self.use_rslora { alpha / (rank as f64).sqrt() } else { alpha / rank as f64 }
    }
}

fn first_match(patterns: &[(Regex, f64)], module: &str) -> Option<f64> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(module)).map(|(_, value)| *value)
}

fn number(key: &str, value: Option<&Json>) -> Result<f64, LoraProblem> {
    match value {
        None => Ok(PEFT_DEFAULT),
        Some(Json::Number(n)) if n.is_finite() => Ok(*n),
        Some(_) => Err(unusable(format!("`{key}` is not a number"))),
    }
}

fn patterns(key: &str, value: Option<&Json>) -> Result<Vec<(Regex, f64)>, LoraProblem> {
    let pairs = match value {
        None => return Ok(Vec::new()),
        Some(Json::Object(pairs)) => pairs,
        Some(_) => return Err(unusable(format!("`{key}` is not an object"))),
    };
    let compile = |(pattern, value): &(String, Json)| {
        let anchored = format!(r"^(?:(?:.*\.)?(?:{pattern})$)");
        // The limit is far above what module names need, and keeps a crafted file from using much memory.
        let regex = RegexBuilder::new(&anchored).size_limit(1 << 20).build();
        let regex = regex.map_err(|e| unusable(format!("pattern `{pattern}` of `{key}`: {e}")))?;
        Ok((regex, number(key, Some(value))?))
    };
    pairs.iter().map(compile).collect()
}

fn unusable(reason: String) -> LoraProblem {
    LoraProblem::Metadata { reason }
}

/// JSON that keeps the order of objects: the first pattern that matches counts.
enum Json {
    Null,
    Bool(bool),
    Number(f64),
    Object(Vec<(String, Json)>),
    /// Strings and lists, which nothing here needs.
    Other,
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Json;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any JSON")
            }

            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
                Ok(Json::Bool(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
                Ok(Json::Number(value as f64))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
                Ok(Json::Number(value as f64))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
                Ok(Json::Number(value))
            }

            fn visit_str<E>(self, _: &str) -> Result<Json, E> {
                Ok(Json::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Json::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Json::Object(pairs))
            }
        }

        deserializer.deserialize_any(Any)
    }
}
