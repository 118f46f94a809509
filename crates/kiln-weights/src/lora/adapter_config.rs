//! PEFT's adapter config: as diffusers stores it in a LoRA's header, one JSON object under `lora_adapter_metadata` with keys
//! such as `transformer.r`; or as PEFT itself does, in `adapter_config.json`. Of llama.cpp's GGUF files, the alpha in the
//! header.
//!
//! Rank and alpha of a module come from the first pattern, in the order of the file, that matches the module's name or
//! its end after a dot; else from the defaults. Patterns are regular expressions. A converter may have renamed the
//! modules, so a pattern that does not match a module's name may match the model's names of its layers. A LoRA has its
//! alpha in `lora_alpha`, a LoKr or LoHa in `alpha`.

use super::adapter_file::AdapterFile;
use super::alpha::Alpha;
use super::json::Json;
use super::settings::{LORA, Pattern, Settings};
use super::update::Update;
use super::{LoraProblem, SettingsPlace};
use crate::WeightSource;

const HEADER: &str = "lora_adapter_metadata";
const GGUF_TYPE: &str = "adapter.type";
const GGUF_ALPHA: &str = "adapter.lora.alpha";

/// The names by which patterns know a module.
#[derive(Clone, Copy)]
pub(super) struct ModuleName<'m> {
    /// In the file, without the prefix.
    pub name: &'m str,
    /// The model's names of the layers that it changes.
    pub layers: &'m [String],
}

/// The settings that determine a module's scale.
#[derive(Debug)]
pub(super) struct AdapterConfig {
    place: SettingsPlace,
    /// `None` if that of the matrices counts.
    rank: Option<f64>,
    alpha: f64,
    /// Whether it states the alpha, instead of leaving it at PEFT's default.
    states_alpha: bool,
    rank_patterns: Vec<Pattern>,
    alpha_patterns: Vec<Pattern>,
    /// Divide alpha by the square root of the rank (rank-stabilized LoRA).
    use_rslora: bool,
    /// Whether updates have DoRA magnitudes, if it says.
    use_dora: Option<bool>,
    /// The kinds that its updates may have, as in [`Update::kind`].
    kinds: &'static [&'static str],
}

impl AdapterConfig {
    /// Reads the config in a file's header, else that of PEFT's own file; `None` if there is none for the transformer.
    pub fn read(source: &WeightSource, file: &AdapterFile) -> Result<Option<AdapterConfig>, LoraProblem> {
        let header = source.metadata().get(HEADER).map(|text| text.trim()).filter(|text| !text.is_empty());
        let header =
            header.map(|text| AdapterConfig::parse(SettingsPlace::Header, text)).transpose()?.flatten();
        let gguf = AdapterConfig::of_gguf(source)?;
        match (header, gguf, file) {
            (Some(_), Some(_), _) => Err(unusable(
                &SettingsPlace::Header,
                format!("there is {GGUF_ALPHA} beside it; expected one"),
            )),
            (Some(config), None, _) | (None, Some(config), _) => Ok(Some(config)),
            (None, None, AdapterFile::Read(path, text)) => {
                let place = SettingsPlace::File(path.clone());
                let config = AdapterConfig::parse(place.clone(), text)?;
                Ok(Some(config.ok_or_else(|| unusable(&place, "it has no settings".into()))?))
            }
            (None, None, _) => Ok(None),
        }
    }

    fn parse(place: SettingsPlace, text: &str) -> Result<Option<AdapterConfig>, LoraProblem> {
        if text.trim().is_empty() {
            return Err(unusable(&place, "it is empty".into()));
        }
        let json: Json = serde_json::from_str(text).map_err(|e| unusable(&place, e.to_string()))?;
        let Some(settings) = Settings::new(place.clone(), &json)? else { return Ok(None) };
        let kinds = settings.kinds()?;
        settings.check_supported()?;
        let alpha = if kinds == LORA { "lora_alpha" } else { "alpha" };
        Ok(Some(AdapterConfig {
            place,
            rank: Some(settings.number("r")?),
            alpha: settings.number(alpha)?,
            states_alpha: settings.given_number(alpha)?.is_some(),
            rank_patterns: settings.patterns("rank_pattern")?,
            alpha_patterns: settings.patterns("alpha_pattern")?,
            use_rslora: settings.flag("use_rslora")? == Some(true),
            use_dora: settings.flag("use_dora")?,
            kinds,
        }))
    }

    /// The alpha for all modules that llama.cpp's converter writes.
    fn of_gguf(source: &WeightSource) -> Result<Option<AdapterConfig>, LoraProblem> {
        let place = SettingsPlace::Gguf;
        let get = |key| source.metadata().get(key).filter(|_| source.is_gguf());
        if let Some(kind) = get(GGUF_TYPE).filter(|kind| !kind.eq_ignore_ascii_case("lora")) {
            return Err(LoraProblem::Setting { settings: place, setting: GGUF_TYPE, value: kind.clone() });
        }
        let Some(alpha) = get(GGUF_ALPHA) else { return Ok(None) };
        let parsed = alpha.parse::<f64>().ok().filter(|alpha| alpha.is_finite());
        let alpha = parsed.ok_or_else(|| unusable(&place, format!("{GGUF_ALPHA} is {alpha}")))?;
        Ok(Some(AdapterConfig {
            place,
            rank: None,
            alpha,
            states_alpha: true,
            rank_patterns: Vec::new(),
            alpha_patterns: Vec::new(),
            use_rslora: false,
            use_dora: None,
            kinds: LORA,
        }))
    }

    /// The scale of a module, whose own `alpha` must be that of the settings, if both are there: programs differ in which of
    /// them they read. PEFT scales a LoKr also if both of its factors are full.
    pub fn scale(
        &self,
        module: ModuleName<'_>,
        update: &Update,
        alpha: Option<&Alpha<'_>>,
    ) -> Result<f64, LoraProblem> {
        let (key, name) = (|| update.keys()[1].to_owned(), module.name);
        if !self.kinds.contains(&update.kind()) {
            let (settings, expected) = (self.place.clone(), self.kinds.join(" or "));
            return Err(LoraProblem::MetadataKind { settings, expected, key: key(), found: update.kind() });
        }
        let found = update.rank();
        let rank = match self.rank {
            Some(rank) => self.value(&self.rank_patterns, rank, module)?,
            None => found.unwrap_or(0) as f64,
        };
        if let Some(found) = found.filter(|found| *found as f64 != rank) {
            let (settings, module) = (self.place.clone(), name.to_owned());
            return Err(LoraProblem::MetadataRank { settings, module, expected: rank, key: key(), found });
        }
        if rank <= 0.0 {
            return Err(unusable(&self.place, format!("the rank of `{name}` is {rank}")));
        }
        let stated = self.value(&self.alpha_patterns, self.alpha, module)?;
        let alpha = match alpha.filter(|_| found.is_some()) {
            Some(own) => {
                let states = self.states_alpha || stated != self.alpha;
                if states && !own.could_be(stated) {
                    let (settings, key, found) = (self.place.clone(), own.key().to_owned(), own.usable()?);
                    return Err(LoraProblem::MetadataAlpha { settings, key, found, stated });
                }
                own.usable()?
            }
            None => stated,
        };
        // As in an `.alpha` tensor: it means no update to some programs, and no alpha to others.
        if alpha == 0.0 {
            return Err(unusable(&self.place, format!("the alpha of `{name}` is 0")));
        }
        Ok(alpha / if self.use_rslora { rank.sqrt() } else { rank })
    }

    /// The value of the first pattern that matches a module, else of those that match its layers, else the default.
    fn value(&self, patterns: &[Pattern], default: f64, module: ModuleName<'_>) -> Result<f64, LoraProblem> {
        let of = |name: &str| patterns.iter().find(|pattern| pattern.is_match(name)).map(|p| p.value);
        if let Some(value) = of(module.name) {
            return Ok(value);
        }
        let mut values = module.layers.iter().map(|layer| of(layer).unwrap_or(default));
        let first = values.next().unwrap_or(default);
        if values.any(|value| value != first) {
            let reason = format!("its patterns differ for the layers that `{}` fuses", module.name);
            return Err(unusable(&self.place, reason));
        }
        Ok(first)
    }

    /// Rejects updates that have magnitudes against `use_dora`, or the other way round.
    pub fn check_dora(&self, mut has_magnitude: impl Iterator<Item = bool>) -> Result<(), LoraProblem> {
        let settings = self.place.clone();
        match self.use_dora {
            Some(true) if has_magnitude.any(|has| !has) => {
                Err(LoraProblem::DoraWithoutMagnitude { settings })
            }
            Some(false) if has_magnitude.any(|has| has) => {
                Err(LoraProblem::MagnitudeWithoutDora { settings })
            }
            _ => Ok(()),
        }
    }

    /// The patterns that match none of these modules, which may be misspelt or for other names.
    pub fn unmatched_patterns(&self, modules: &[ModuleName<'_>]) -> Vec<String> {
        let is_used = |pattern: &Pattern| {
            let mut names = modules.iter().flat_map(|m| m.layers.iter().map(String::as_str).chain([m.name]));
            names.any(|name| pattern.is_match(name))
        };
        let all = self.rank_patterns.iter().chain(&self.alpha_patterns);
        all.filter(|pattern| !is_used(pattern)).map(|pattern| pattern.text.clone()).collect()
    }
}

fn unusable(place: &SettingsPlace, reason: String) -> LoraProblem {
    LoraProblem::Metadata { settings: place.clone(), reason }
}
