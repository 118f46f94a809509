//! The settings in an adapter config that are the transformer's.
//!
//! Writers differ in how they say which part of a model a setting is for: `r` alone, `transformer.r`, `unet.r`,
//! `base_model.model.r`, or `r` in an object `transformer` or `default`.

use regex::{Regex, RegexBuilder};

use super::json::Json;
use super::{LoraProblem, SettingsPlace};

/// PEFT's default for `r`, `lora_alpha` and `alpha`.
const PEFT_DEFAULT: f64 = 8.0;

const TRANSFORMER: &str = "transformer";

/// Settings that alone tell a scale.
const SCALE: [&str; 3] = ["r", "lora_alpha", "alpha"];

/// Other settings that are heeded.
const OTHERS: [&str; 6] =
    ["rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "peft_type", "init_lora_weights"];

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

pub(super) const LORA: &[&str] = &["LoRA"];

/// A regular expression for modules' names, as written, and its value.
#[derive(Debug)]
pub(super) struct Pattern {
    pub text: String,
    regex: Regex,
    pub value: f64,
}

impl Pattern {
    pub fn is_match(&self, module: &str) -> bool {
        self.regex.is_match(module)
    }
}

/// A setting, and the part of the model that it is for.
#[derive(Debug)]
struct Setting<'j> {
    part: String,
    name: &'j str,
    value: &'j Json,
}

/// The settings for the transformer.
pub(super) struct Settings<'j> {
    place: SettingsPlace,
    settings: Vec<Setting<'j>>,
}

impl<'j> Settings<'j> {
    /// The settings for the transformer among all; `None` if there are none, or only those of text encoders.
    pub fn new(place: SettingsPlace, json: &'j Json) -> Result<Option<Settings<'j>>, LoraProblem> {
        let unusable =
            |reason: &str| Err(LoraProblem::Metadata { settings: place.clone(), reason: reason.to_owned() });
        let Json::Object(pairs) = json else { return unusable("it is not an object") };
        let mut all = Vec::new();
        flatten("", pairs, &mut all);
        all.retain(|setting| !is_other_component(&setting.part));
        if all.is_empty() {
            return Ok(None);
        }
        let mut parts: Vec<&str> =
            all.iter().filter(|s| is_heeded(s.name)).map(|s| s.part.as_str()).collect();
        parts.sort_unstable();
        parts.dedup();
        let is_complete = all.iter().any(|s| s.part == TRANSFORMER && SCALE.contains(&s.name));
        let part = match parts[..] {
            [] => return unusable("it has none of PEFT's settings, such as r and lora_alpha"),
            [part] => part.to_owned(),
            _ if is_complete => TRANSFORMER.to_owned(),
            [first, second, ..] => {
                let name = |part: &str| if part.is_empty() { "no part".into() } else { format!("`{part}`") };
                let (first, second) = (name(first), name(second));
                return unusable(&format!("it has settings for {first} and for {second}; expected one"));
            }
        };
        all.retain(|setting| setting.part == part);
        Ok(Some(Settings { place, settings: all }))
    }

    pub fn unusable(&self, reason: String) -> LoraProblem {
        LoraProblem::Metadata { settings: self.place.clone(), reason }
    }

    fn get(&self, name: &str) -> Option<&'j Json> {
        let found = self.settings.iter().rfind(|setting| setting.name == name);
        found.map(|setting| setting.value).filter(|value| !matches!(value, Json::Null))
    }

    /// Whether it has this setting, be it null.
    fn names(&self, name: &str) -> bool {
        self.settings.iter().any(|setting| setting.name == name)
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>, LoraProblem> {
        match self.get(name) {
            None => Ok(None),
            Some(Json::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.unusable(format!("`{name}` is neither true nor false"))),
        }
    }

    /// A number, if it is given. PEFT fails on null, so that it is not a way to leave it out.
    pub fn given_number(&self, name: &str) -> Result<Option<f64>, LoraProblem> {
        let found = self.settings.iter().rfind(|setting| setting.name == name);
        found.map(|setting| self.to_number(name, setting.value)).transpose()
    }

    /// A number, or PEFT's default.
    pub fn number(&self, name: &str) -> Result<f64, LoraProblem> {
        Ok(self.given_number(name)?.unwrap_or(PEFT_DEFAULT))
    }

    fn to_number(&self, name: &str, value: &Json) -> Result<f64, LoraProblem> {
        match value {
            Json::Number(n) if n.is_finite() => Ok(*n),
            Json::Null => Err(self.unusable(format!("`{name}` is null, expected a number"))),
            _ => Err(self.unusable(format!("`{name}` is not a number"))),
        }
    }

    pub fn patterns(&self, name: &str) -> Result<Vec<Pattern>, LoraProblem> {
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Json::Object(pairs)) => {
                pairs.iter().map(|(text, value)| self.pattern(name, text, value)).collect()
            }
            Some(_) => Err(self.unusable(format!("`{name}` is not an object"))),
        }
    }

    fn pattern(&self, name: &str, text: &str, value: &Json) -> Result<Pattern, LoraProblem> {
        let anchored = format!(r"^(?:(?:.*\.)?(?:{text})$)");
        // The limit is far above what module names need, and keeps a crafted file from using much memory.
        let regex = RegexBuilder::new(&anchored).size_limit(1 << 20).build().map_err(|e| {
            let reason = match e.to_string() {
                e if e.contains("look-around") => "look-around is not supported; write the names out".into(),
                e => e,
            };
            self.unusable(format!("pattern `{text}` of `{name}`: {reason}"))
        })?;
        Ok(Pattern { text: text.to_owned(), regex, value: self.to_number(name, value)? })
    }

    /// The kinds that updates may have. Settings written by hand may lack the type.
    pub fn kinds(&self) -> Result<&'static [&'static str], LoraProblem> {
        match self.get("peft_type") {
            Some(Json::String(kind)) => match kind.to_ascii_uppercase().as_str() {
                "LORA" => Ok(LORA),
                "LOKR" => Ok(&["LoKr"]),
                "LOHA" => Ok(&["LoHa"]),
                _ => Err(self.unsupported("peft_type", kind.clone())),
            },
            Some(_) => Err(self.unusable("`peft_type` is not a string".into())),
            None => match (self.names("lora_alpha"), self.names("alpha")) {
                (true, false) => Ok(LORA),
                (false, true) => Ok(&["LoKr", "LoHa"]),
                (false, false) => Ok(&["LoRA", "LoKr", "LoHa"]),
                (true, true) => {
                    Err(self.unusable("it has both `alpha` and `lora_alpha`, and no `peft_type`".into()))
                }
            },
        }
    }

    fn unsupported(&self, setting: &'static str, value: String) -> LoraProblem {
        LoraProblem::Setting { settings: self.place.clone(), setting, value }
    }

    /// Rejects settings that change the result in ways that are not supported.
    pub fn check_supported(&self) -> Result<(), LoraProblem> {
        for setting in UNSUPPORTED {
            match self.get(setting) {
                None | Some(Json::Bool(false) | Json::Empty) => {}
                Some(_) => return Err(self.unsupported(setting, "set".into())),
            }
        }
        match self.get("init_lora_weights") {
            Some(Json::String(init)) if !INITS.contains(&init.to_ascii_lowercase().as_str()) => {
                Err(self.unsupported("init_lora_weights", init.clone()))
            }
            _ => Ok(()),
        }
    }
}

fn is_heeded(name: &str) -> bool {
    SCALE.contains(&name) || OTHERS.contains(&name) || UNSUPPORTED.contains(&name)
}

/// Lists settings with their parts. Objects that hold settings are parts.
fn flatten<'j>(part: &str, pairs: &'j [(String, Json)], all: &mut Vec<Setting<'j>>) {
    for (key, value) in pairs {
        let (inner, name) = split_part(key);
        let part = join(part, inner);
        match value {
            Json::Object(pairs) if is_part(name, pairs) => flatten(&join(&part, name), pairs, all),
            _ => all.push(Setting { part, name, value }),
        }
    }
}

/// Whether an object of this name is a part of the model rather than a setting.
fn is_part(name: &str, pairs: &[(String, Json)]) -> bool {
    let is_setting = is_heeded(name) || name.ends_with("_config") || name.ends_with("_pattern");
    let holds_settings = |(key, value): &(String, Json)| {
        let (_, name) = split_part(key);
        is_heeded(name) || matches!(value, Json::Object(pairs) if is_part(name, pairs))
    };
    !is_setting && pairs.iter().any(holds_settings)
}

fn split_part(key: &str) -> (&str, &str) {
    key.rsplit_once('.').unwrap_or(("", key))
}

fn join(part: &str, inner: &str) -> String {
    let parts: Vec<&str> = [part, inner].into_iter().filter(|part| !part.is_empty()).collect();
    parts.join(".")
}

/// Whether it is another component than the transformer.
fn is_other_component(part: &str) -> bool {
    part.split('.').any(|part| part.starts_with("text_encoder") || part == "vae")
}
