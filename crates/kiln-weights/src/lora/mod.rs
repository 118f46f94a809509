//! LoRA files, in the layouts and kinds that trainers write.
//!
//! A module has two matrices, `lora_A` of `[rank, cols]` and `lora_B` of `[rows, rank]` (or `lora_down`, `lora_up`), and adds
//! `weight · scale · (x · Aᵀ) · Bᵀ` to its layer's output ([`scale`] says which scale). Or it has the factors of a LoKr or
//! LoHa, the full difference, or, with any of these, the magnitudes of a DoRA. What [`low_rank`] can expand to two low-rank
//! matrices is also added to the output; everything else patches the weight itself, where it is read ([`patch`]).
//!
//! [`keys`] parses the keys of a file, and [`unused`] tells which of them the transformer can't use; [`targets`] maps modules
//! to the model's layers and their rows.
//!
//! Merging a LoRA into klein 4B would copy 7.3 GiB of weights that are used from their mapped file, to save 0.5 % of a step's
//! operations at rank 16 and 2.4 % at rank 64: less than can be measured.

mod adapter_config;
mod adapter_file;
mod alpha;
mod applied;
mod base;
mod dora;
mod fit;
mod json;
mod keys;
mod low_rank;
mod options;
mod patch;
mod problem;
mod report;
mod scale;
mod settings;
mod targets;
mod unused;
mod update;
mod updates;
mod write;

use std::collections::BTreeSet;
use std::path::Path;

use bytes::Bytes;

use crate::similar::quoted;
use crate::{Error, Result, WeightSource, fingerprint};
use adapter_config::{AdapterConfig, ModuleName};
use adapter_file::AdapterFile;
pub use base::LoraBase;
pub use keys::LoraLayout;
use keys::{ModuleKeys, TensorRole};
pub use options::{DoraRule, LayerShape, LoraOptions};
pub(crate) use patch::WeightPatch;
pub use problem::{LoraProblem, SettingsPlace};
pub use report::LoraReport;
use scale::Scale;
use targets::{LayerTarget, RowMapping};
use unused::{UnusedKey, UnusedKind};
use update::{KeyedTensor, Update};
pub use updates::LoraUpdates;
pub use write::{LoraContents, LoraNaming, TrainedModule, lora_contents};

/// A LoRA for the transformer, checked to be consistent; [`LoraUpdates::resolve`] checks it against a model.
#[derive(Debug)]
pub struct Lora {
    source: WeightSource,
    modules: Vec<LoraModule>,
    /// The layers that modules change, each with its module's index, sorted by layer.
    targets: Vec<(LayerTarget, usize)>,
    /// Keys that the transformer can't use, sorted by kind and name.
    unused: Vec<UnusedKey>,
    /// What its settings leave open.
    notes: Vec<String>,
}

/// The update of one layer, or of several that the file fuses.
#[derive(Debug)]
struct LoraModule {
    /// Its name in the file, with the prefix.
    stem: String,
    /// Its name without the prefix.
    name: String,
    layout: LoraLayout,
    /// The layers of the model that it changes.
    layers: Vec<String>,
    /// Whether FLUX.2 has such a module.
    is_known: bool,
    update: Update,
    /// DoRA's magnitudes of rows or columns.
    magnitude: Option<KeyedTensor>,
    /// From alpha and rank, without the user's factor.
    scale: Scale,
}

impl LoraModule {
    /// Whether its update can be added to the layer's output; otherwise it patches the weight.
    fn is_low_rank(&self) -> bool {
        matches!(self.update, Update::LowRank { .. }) || low_rank::expanded_rank(&self.update).is_some()
    }

    /// Whether any of it patches the weight itself.
    fn patches_weight(&self) -> bool {
        self.magnitude.is_some() || !self.is_low_rank()
    }
}

impl Lora {
    /// Opens a LoRA file, or a folder with one. PEFT's `adapter_config.json` is read, too, if it is certain to be the
    /// LoRA's.
    pub fn open(path: impl AsRef<Path>) -> Result<Lora> {
        let source = WeightSource::open(path)?;
        let config = AdapterFile::find(&source)?;
        Lora::new(source, &config)
    }

    /// Whether a file is a LoRA, or another kind of adapter, by the names of its tensors.
    pub fn is_lora(source: &WeightSource) -> bool {
        let other_kind = |key| keys::unsupported_kind(key).is_some() || UnusedKind::is_lora_key(key);
        // Parts of a model may have such names, too.
        source.names().any(keys::is_lora_key)
            || source.components().is_empty() && source.names().any(other_kind)
    }

    /// Reads a LoRA file that is already in memory; `name` stands for its path in messages.
    pub fn from_bytes(name: impl AsRef<Path>, data: Bytes) -> Result<Lora> {
        Lora::new(WeightSource::from_bytes(name, data)?, &AdapterFile::Missing)
    }

    fn new(source: WeightSource, config_file: &AdapterFile) -> Result<Lora> {
        let problem = |p| Error::Lora { file: source.path().to_owned(), problem: Box::new(p) };
        if !Lora::is_lora(&source) && !source.components().is_empty() {
            return Err(problem(LoraProblem::WholeModel { found: source.describe() }));
        }
        let config = AdapterConfig::read(&source, config_file).map_err(problem)?;
        let names: Vec<&str> = source.names().collect();
        let keys = keys::classify(&names).map_err(problem)?;
        let mut unused = keys.unused;
        let (mut modules, mut targets) = (Vec::<LoraModule>::new(), Vec::new());
        for module in &keys.modules {
            if let Some(kind) = update::unused_kind(&source, module) {
                unused.extend(module.tensors.values().map(|key| UnusedKey::new(kind, key)));
                continue;
            }
            let (is_known, module_targets) = module_targets(module);
            let layers = module_targets.iter().map(|target| target.layer.clone()).collect();
            targets.extend(module_targets.into_iter().map(|target| (target, modules.len())));
            modules.push(LoraModule { is_known, ..read_module(&source, module, layers, config.as_ref())? });
        }
        if modules.is_empty() {
            let unusable = unused::problem(&unused).map(|found| LoraProblem::NothingElse(Box::new(found)));
            return Err(problem(unusable.unwrap_or(LoraProblem::Empty)));
        }
        let stems: BTreeSet<&str> = modules.iter().map(|module| module.stem.as_str()).collect();
        unused::check_modules(&unused, &stems).map_err(problem)?;
        if let Some(config) = &config {
            config.check_dora(modules.iter().map(|m| m.magnitude.is_some())).map_err(problem)?;
        }
        let notes = notes(&modules, config.as_ref(), config_file);
        unused.sort();
        targets.sort_by(|(a, _), (b, _)| a.layer.cmp(&b.layer));
        let lora = Lora { source, modules, targets, unused, notes };
        lora.check_overlaps()?;
        Ok(lora)
    }

    /// Rejects two modules for the same rows, which would be ambiguous.
    fn check_overlaps(&self) -> Result<()> {
        for same in self.targets.chunk_by(|(a, _), (b, _)| a.layer == b.layer) {
            for (i, (target, module)) in same.iter().enumerate() {
                let other = same[i + 1..].iter().find(|(other, _)| target.mapping.overlaps(other.mapping));
                if let Some((_, other)) = other {
                    let key = |module: &usize| self.modules[*module].update.keys()[1].to_owned();
                    let (first, second) = (key(module), key(other));
                    return Err(self.error(LoraProblem::Duplicate { first, second }));
                }
            }
        }
        Ok(())
    }

    /// The file or folder that was opened.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// The names of its modules in the file, without the prefix; sorted.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.modules.iter().map(|m| m.name.as_str())
    }

    /// The layers of FLUX.2 that it changes, sorted.
    pub fn layers(&self) -> impl Iterator<Item = &str> {
        let known = self.targets.iter().filter(|(_, module)| self.modules[*module].is_known);
        known.map(|(target, _)| target.layer.as_str()).collect::<BTreeSet<_>>().into_iter()
    }

    /// The largest rank of its modules; 0 if all are full-rank.
    pub fn rank(&self) -> usize {
        self.ranks().last().copied().unwrap_or(0)
    }

    /// All ranks that its modules have, sorted.
    pub fn ranks(&self) -> Vec<usize> {
        sorted(self.modules.iter().filter_map(|m| m.update.rank()))
    }

    /// The kinds of its updates, as trainers call them: `LoRA`, `LoKr`, `LoHa`, `difference`, and additionally `DoRA`.
    pub fn kinds(&self) -> Vec<&'static str> {
        let dora = self.modules.iter().any(|m| m.magnitude.is_some()).then_some("DoRA");
        sorted(self.modules.iter().map(|m| m.update.kind()).chain(dora))
    }

    /// The layouts of its keys; one, unless the file was merged from several.
    pub fn layouts(&self) -> Vec<LoraLayout> {
        sorted(self.modules.iter().map(|m| m.layout))
    }

    /// The model it was made for, as far as names and shapes tell.
    pub fn base(&self) -> Option<LoraBase> {
        let modules = self.modules.iter().filter_map(|m| Some((keys::flatten(&m.name), m.update.size()?)));
        let modules: Vec<_> = modules.collect();
        LoraBase::guess(modules.iter().map(|(name, size)| (name.as_str(), *size)))
    }

    /// The memory that applying this LoRA takes: none for a plain LoRA, which is used as it is in its file; for others
    /// their expanded factors in elements of `element_size` bytes, and with `int8` the layers that have to be quantized
    /// again, one byte per element.
    pub fn extra_bytes(&self, element_size: usize, int8: bool) -> u64 {
        let area = |[rows, cols]: [usize; 2]| (rows as u64).saturating_mul(cols as u64);
        let bytes = self.modules.iter().map(|module| {
            let pair = low_rank::expanded_rank(&module.update).zip(module.update.size());
            let pair = pair.map_or(0, |(rank, [rows, cols])| area([rank, rows.saturating_add(cols)]));
            let requantized = if int8 && module.patches_weight() { module.update.size() } else { None };
            pair.saturating_mul(element_size as u64).saturating_add(requantized.map_or(0, area))
        });
        bytes.fold(0u64, u64::saturating_add)
    }

    /// Keys that are not used: those for anything but the transformer's matrices, and those that are not LoRA keys.
    pub fn unused_keys(&self) -> impl Iterator<Item = &str> {
        self.unused.iter().map(|unused| unused.key.as_str())
    }

    /// What the file does not tell for certain: how it was read, and what else it might mean.
    pub fn notes(&self) -> Vec<String> {
        let scales = scale::notes(self.modules.iter().map(|m| &m.scale));
        scales.into_iter().chain(self.notes.iter().cloned()).collect()
    }

    /// The scale that the file gives to `module`: 1 without an alpha.
    pub fn scale(&self, module: &str) -> Option<f64> {
        self.modules.iter().find(|m| m.name == module).map(|m| m.scale.value)
    }

    /// The file as plain tensors.
    pub fn source(&self) -> &WeightSource {
        &self.source
    }

    /// The SHA-256, in hex, of the tensors as in [`WeightSource::fingerprint`] and of the scales.
    pub fn fingerprint(&self) -> Result<String> {
        let scales = self.modules.iter().map(|m| m.scale.value);
        Ok(fingerprint::with_scales(&self.source.fingerprint()?, scales))
    }
}

fn sorted<T: Ord>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut values: Vec<T> = values.collect();
    values.sort();
    values.dedup();
    values
}

/// What settings and values leave open.
fn notes(modules: &[LoraModule], config: Option<&AdapterConfig>, file: &AdapterFile) -> Vec<String> {
    let names: Vec<_> = modules.iter().map(|m| ModuleName { name: &m.name, layers: &m.layers }).collect();
    let patterns = config.map(|config| config.unmatched_patterns(&names)).unwrap_or_default();
    let patterns = (!patterns.is_empty())
        .then(|| format!("patterns of its settings match none of its modules: {}", quoted(&patterns)));
    let unclear = matches!(file, AdapterFile::Unclear) && config.is_none();
    let unclear = unclear.then(|| {
        "the adapter_config.json beside it is not used, since there are other weights there; if it is this LoRA's, \
         put both into a folder of their own"
            .to_owned()
    });
    let zeros = modules.iter().flat_map(|m| m.update.tensors()).filter(|tensor| tensor.is_zero);
    let zeros: Vec<String> = zeros.map(|tensor| tensor.key.clone()).collect();
    let zeros = (!zeros.is_empty()).then(|| format!("its scales make these zero: {}", quoted(&zeros)));
    patterns.into_iter().chain(unclear).chain(zeros).collect()
}

/// The layers that a module changes, and whether FLUX.2 has such a module. A dotted name that it doesn't have is taken for a
/// layer's name.
fn module_targets(module: &ModuleKeys<'_>) -> (bool, Vec<LayerTarget>) {
    let flat = matches!(module.layout, LoraLayout::Kohya | LoraLayout::Lycoris)
        || module.layout == LoraLayout::OneTrainer && !module.name.contains('.');
    match targets::layer_targets(&keys::flatten(module.name)) {
        Some(targets) => (true, targets),
        None if flat => (false, Vec::new()),
        None => (false, vec![LayerTarget { layer: module.name.to_owned(), mapping: RowMapping::Whole }]),
    }
}

fn read_module(
    source: &WeightSource,
    keys: &ModuleKeys<'_>,
    layers: Vec<String>,
    config: Option<&AdapterConfig>,
) -> Result<LoraModule> {
    let problem = |p| Error::Lora { file: source.path().to_owned(), problem: Box::new(p) };
    let update = Update::read(source, keys)?;
    let alpha =
        keys.tensors.get(&TensorRole::Alpha).map(|key| alpha::Alpha::read(source, key)).transpose()?;
    let magnitude = keys.tensors.get(&TensorRole::Magnitude);
    let name = ModuleName { name: keys.name, layers: &layers };
    Ok(LoraModule {
        stem: keys.stem.to_owned(),
        name: keys.name.to_owned(),
        layout: keys.layout,
        is_known: true,
        scale: Scale::new(config, name, &update, alpha).map_err(problem)?,
        layers,
        magnitude: magnitude.map(|key| KeyedTensor::read(source, key)).transpose()?,
        update,
    })
}
