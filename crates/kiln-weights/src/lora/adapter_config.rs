//! PEFT's adapter config: as diffusers stores it in a LoRA's header, one JSON object under `lora_adapter_metadata` with keys
//! such as `transformer.r`; or as PEFT itself does, in `adapter_config.json`.
//!
//! Rank and alpha of a module come from the first pattern, in the order of the file, that matches the module's name or
//! its end after a dot; else from the defaults. Patterns are regular expressions. A LoRA has its alpha in `lora_alpha`, a
//! LoKr or LoHa in `alpha`.

use std::collections::BTreeMap;
use std::fmt;

use regex::{Regex, RegexBuilder};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::LoraProblem;
use super::update::Update;

const KEY: &str = "lora_adapter_metadata";
const PREFIX: &str = "transformer.";
/// PEFT's default for `r`, `lora_alpha` and `alpha`.
const PEFT_DEFAULT: f64 = 8.0;

/// Settings with which PEFT computes something else than the matrices alone tell.
const UNSUPPORTED: [&str; 10] = [
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
];

/// Initializations that leave the model's weights as they are. Others, such as PiSSA and OLoRA, subtract the initial update
/// from the weights, and the file updates the result.
const INITS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

const LORA: &[&str] = &["LoRA"];

/// The settings that determine a module's scale.
#[derive(Debug)]
pub(super) struct AdapterConfig {
    rank: f64,
    alpha: f64,
    rank_patterns: Vec<(Regex, f64)>,
    alpha_patterns: Vec<(Regex, f64)>,
    /// Divide alpha by the square root of the rank (rank-stabilized LoRA).
    use_rslora: bool,
    /// Whether updates have DoRA magnitudes, if it says.
    pub use_dora: Option<bool>,
    /// The kinds that its updates may have, as in [`Update::kind`].
    kinds: &'static [&'static str],
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
        Settings::new(&pairs).config()
    }

    /// The rank that `module` should have.
    fn rank(&self, module: &str) -> f64 {
        first_match(&self.rank_patterns, module).unwrap_or(self.rank)
    }

    /// The alpha of `module`.
    fn alpha(&self, module: &str) -> f64 {
        first_match(&self.alpha_patterns, module).unwrap_or(self.alpha)
    }

    /// The scale of a module, whose own `alpha` comes first. PEFT scales a LoKr also if both of its factors are full.
    pub fn scale(&self, module: &str, update: &Update, alpha: Option<f64>) -> Result<f64, LoraProblem> {
        let (key, rank) = (|| update.keys()[1].to_owned(), self.rank(module));
        if !self.kinds.contains(&update.kind()) {
            let expected = self.kinds.join(" or ");
            return Err(LoraProblem::MetadataKind { expected, key: key(), found: update.kind() });
        }
        if let Some(found) = update.rank().filter(|found| *found as f64 != rank) {
            let module = module.to_owned();
            return Err(LoraProblem::MetadataRank { module, expected: rank, key: key(), found });
        }
        if rank <= 0.0 {
            return Err(unusable(format!("the rank of `{module}` is {rank}")));
        }
        let alpha = alpha.filter(|_| update.rank().is_some()).unwrap_or_else(|| self.alpha(module));
        Ok(alpha / if self.use_rslora { rank.sqrt() } else { rank })
    }
}

/// The settings for the transformer.
struct Settings<'j> {
    pairs: &'j [(String, Json)],
    prefix: &'static str,
}

impl Settings<'_> {
    /// A file saved from the model instead of the pipeline has the same keys without the prefix.
    fn new(pairs: &[(String, Json)]) -> Settings<'_> {
        let prefix = if pairs.iter().any(|(k, _)| k.starts_with(PREFIX)) { PREFIX } else { "" };
        Settings { pairs, prefix }
    }

    fn get(&self, key: &str) -> Option<&Json> {
        let found = self.pairs.iter().rfind(|(k, _)| k.strip_prefix(self.prefix) == Some(key));
        found.map(|(_, v)| v).filter(|v| !matches!(v, Json::Null))
    }

    fn flag(&self, key: &str) -> Option<bool> {
        match self.get(key) {
            Some(Json::Bool(flag)) => Some(*flag),
            _ => None,
        }
    }

    fn config(&self) -> Result<Option<AdapterConfig>, LoraProblem> {
        let kinds = self.kinds()?;
        self.check_supported()?;
        if ["r", "lora_alpha", "alpha"].iter().all(|key| self.get(key).is_none()) {
            return Ok(None);
        }
        let alpha = if kinds == LORA { "lora_alpha" } else { "alpha" };
        Ok(Some(AdapterConfig {
            rank: number("r", self.get("r"))?,
            alpha: number(alpha, self.get(alpha))?,
            rank_patterns: patterns("rank_pattern", self.get("rank_pattern"))?,
            alpha_patterns: patterns("alpha_pattern", self.get("alpha_pattern"))?,
            use_rslora: self.flag("use_rslora") == Some(true),
            use_dora: self.flag("use_dora"),
            kinds,
        }))
    }

    /// The kinds that updates may have. Settings written by hand may lack the type.
    fn kinds(&self) -> Result<&'static [&'static str], LoraProblem> {
        match self.get("peft_type") {
            Some(Json::String(kind)) => match kind.to_ascii_uppercase().as_str() {
                "LORA" => Ok(LORA),
                "LOKR" => Ok(&["LoKr"]),
                "LOHA" => Ok(&["LoHa"]),
                _ => Err(LoraProblem::Setting { setting: "peft_type", value: kind.clone() }),
            },
            Some(_) => Err(unusable("`peft_type` is not a string".into())),
            None => match (self.get("lora_alpha"), self.get("alpha")) {
                (Some(_), None) => Ok(LORA),
                (None, Some(_)) => Ok(&["LoKr", "LoHa"]),
                (None, None) => Ok(&["LoRA", "LoKr", "LoHa"]),
                (Some(_), Some(_)) => {
                    Err(unusable("it has both `alpha` and `lora_alpha`, and no `peft_type`".into()))
                }
            },
        }
    }

    fn check_supported(&self) -> Result<(), LoraProblem> {
        let problem = |setting, value| Err(LoraProblem::Setting { setting, value });
        for setting in UNSUPPORTED {
            match self.get(setting) {
                None | Some(Json::Bool(false) | Json::Empty) => {}
                Some(_) => return problem(setting, "set".into()),
            }
        }
        match self.get("init_lora_weights") {
            Some(Json::String(init)) if !INITS.contains(&init.to_ascii_lowercase().as_str()) => {
                problem("init_lora_weights", init.clone())
            }
            _ => Ok(()),
        }
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
    String(String),
    Object(Vec<(String, Json)>),
    /// An empty list.
    Empty,
    /// A list, whose elements nothing here needs.
    List,
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

            fn visit_str<E>(self, value: &str) -> Result<Json, E> {
                Ok(Json::String(value.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
                let mut list = Json::Empty;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    list = Json::List;
                }
                Ok(list)
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
