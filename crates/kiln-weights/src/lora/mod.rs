//! LoRA files, in the layouts and kinds that trainers write.
//!
//! A module `M` has two matrices, `lora_A` of `[rank, cols]` and `lora_B` of `[rows, rank]` (or `lora_down`, `lora_up`), and
//! its output changes by `weight · scale · (x · Aᵀ) · Bᵀ`, where `scale` is alpha / rank, with alpha from the module's
//! `.alpha` tensor, else from PEFT's settings; a file without either has scale 1. Or it has the factors of a LoKr or LoHa,
//! the difference itself, or, beside any of these, the lengths of a DoRA. What [`thin`] can write as two thin matrices is
//! added to the output as well; of anything else the weight itself is changed, where it is read ([`merge`]).
//!
//! [`names`] knows what modules are called and which rows of which layers they mean; [`keys`] what stands around them.

mod adapter;
mod applied;
mod base;
mod dora;
mod fit;
mod keys;
mod merge;
mod names;
mod problem;
mod report;
mod thin;
mod update;
mod updates;

use std::path::Path;

use bytes::Bytes;
use kiln_tensor::{DType, HostTensor};

use crate::{Error, Result, WeightSource, fingerprint};
use adapter::Adapter;
pub use base::LoraBase;
use dora::Base;
pub use keys::LoraLayout;
use keys::{Group, Part};
pub(crate) use merge::Merged;
use names::{Place, Target};
pub use problem::LoraProblem;
pub use report::LoraReport;
use update::{Keyed, Update, check_float};
pub use updates::{LayerShape, LoraOptions, LoraUpdates};

/// A LoRA for the transformer, checked in itself; [`LoraUpdates::resolve`] checks it against a model.
#[derive(Debug)]
pub struct Lora {
    source: WeightSource,
    modules: Vec<Module>,
    /// What the modules change, sorted by layer, each with its module's number.
    targets: Vec<(Target, usize)>,
    /// Keys for the text encoder.
    text: Vec<String>,
    /// Keys that are no LoRA keys.
    unknown: Vec<String>,
}

/// The update of one layer, or of some that the file has as one.
#[derive(Debug)]
struct Module {
    /// As the file calls it, with what stands before it.
    stem: String,
    /// Without that.
    name: String,
    layout: LoraLayout,
    update: Update,
    /// DoRA's lengths of rows or columns.
    magnitude: Option<Keyed>,
    /// From alpha and rank; the user's factor comes on top.
    scale: f64,
}

impl Module {
    /// Whether its update can be added to the layer's output; otherwise it has to go into the weight.
    fn is_thin(&self) -> bool {
        matches!(self.update, Update::LowRank { .. }) || thin::rank(&self.update).is_some()
    }

    /// Whether nothing of it changes the weight itself.
    fn leaves_weight(&self) -> bool {
        self.magnitude.is_none() && self.is_thin()
    }
}

impl Lora {
    /// Opens a LoRA file, or a folder with one. PEFT's settings in an `adapter_config.json` beside an `adapter_model`
    /// count.
    pub fn open(path: impl AsRef<Path>) -> Result<Lora> {
        let source = WeightSource::open(path)?;
        let settings = source.files().next().filter(|f| f.file_stem().is_some_and(|s| s == "adapter_model"));
        let settings = settings.map(|file| file.with_file_name("adapter_config.json"));
        let settings = settings.and_then(|file| std::fs::read_to_string(file).ok());
        Lora::new(source, settings.as_deref())
    }

    /// Reads a LoRA file that is already in memory; `name` stands for its path in messages.
    pub fn from_bytes(name: impl AsRef<Path>, data: Bytes) -> Result<Lora> {
        Lora::new(WeightSource::from_bytes(name, data)?, None)
    }

    fn new(source: WeightSource, settings: Option<&str>) -> Result<Lora> {
        let problem = |p| Error::Lora { file: source.path().to_owned(), problem: Box::new(p) };
        let names: Vec<&str> = source.names().collect();
        let keys = keys::sort(&names).map_err(problem)?;
        let owned = |keys: &[&str]| keys.iter().map(|&key| key.to_owned()).collect::<Vec<_>>();
        if keys.groups.is_empty() {
            return Err(problem(match (keys.text.first(), keys.unknown.is_empty()) {
                (Some(key), _) => LoraProblem::TextEncoder { key: (*key).to_owned() },
                (None, false) => LoraProblem::UnknownKeys { keys: owned(&keys.unknown) },
                (None, true) => LoraProblem::Empty,
            }));
        }
        let adapter = Adapter::read(source.metadata(), settings).map_err(problem)?;
        let mut modules = Vec::with_capacity(keys.groups.len());
        let mut targets = Vec::with_capacity(keys.groups.len());
        for group in &keys.groups {
            targets.extend(targets_of(group).into_iter().map(|target| (target, modules.len())));
            modules.push(read_module(&source, group, adapter.as_ref())?);
        }
        if adapter.is_some_and(|a| a.dora) && modules.iter().all(|m| m.magnitude.is_none()) {
            return Err(problem(LoraProblem::DoraWithoutLengths));
        }
        targets.sort_by(|(a, _), (b, _)| a.layer.cmp(&b.layer));
        let (text, unknown) = (owned(&keys.text), owned(&keys.unknown));
        let lora = Lora { source, modules, targets, text, unknown };
        lora.refuse_overlaps()?;
        Ok(lora)
    }

    /// Two modules for the same rows: nobody can say which is meant.
    fn refuse_overlaps(&self) -> Result<()> {
        for same in self.targets.chunk_by(|(a, _), (b, _)| a.layer == b.layer) {
            for (i, (target, module)) in same.iter().enumerate() {
                let other = same[i + 1..].iter().find(|(other, _)| target.place.overlaps(other.place));
                if let Some((_, other)) = other {
                    let key = |module: &usize| self.modules[*module].update.keys()[1].to_owned();
                    let (first, second) = (key(module), key(other));
                    return Err(self.error(LoraProblem::Twice { first, second }));
                }
            }
        }
        Ok(())
    }

    /// The file or folder that was opened.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// Its modules, as the file names them but for what stands before all of them; sorted.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.modules.iter().map(|m| m.name.as_str())
    }

    /// The layers of the model that it changes, sorted.
    pub fn layers(&self) -> impl Iterator<Item = &str> {
        self.targets.chunk_by(|(a, _), (b, _)| a.layer == b.layer).map(|same| same[0].0.layer.as_str())
    }

    /// The largest rank of its modules; 0 when they are whole matrices.
    pub fn rank(&self) -> usize {
        self.ranks().last().copied().unwrap_or(0)
    }

    /// All ranks that its modules have, sorted.
    pub fn ranks(&self) -> Vec<usize> {
        sorted(self.modules.iter().filter_map(|m| m.update.rank()))
    }

    /// The kinds of updates in it, in the trainers' words: `LoRA`, `LoKr`, `LoHa`, `difference`, and `DoRA` beside one.
    pub fn kinds(&self) -> Vec<&'static str> {
        let dora = self.modules.iter().any(|m| m.magnitude.is_some()).then_some("DoRA");
        sorted(self.modules.iter().map(|m| m.update.kind()).chain(dora))
    }

    /// The layouts that its keys have; one, unless someone has put files together.
    pub fn layouts(&self) -> Vec<LoraLayout> {
        sorted(self.modules.iter().map(|m| m.layout))
    }

    /// The model it was made for, as far as names and shapes tell.
    pub fn base(&self) -> Option<LoraBase> {
        let modules = self.modules.iter().filter_map(|m| Some((keys::flatten(&m.name), m.update.size()?)));
        let modules: Vec<_> = modules.collect();
        LoraBase::guess(modules.iter().map(|(name, size)| (name.as_str(), *size)))
    }

    /// Bytes that it takes to lay this LoRA over a model: none for a plain LoRA, which is used as it is in its file; for
    /// others their factors in elements of `size` bytes, and with `rounded` the layers that have to be rounded again, a
    /// byte an element.
    pub fn extra_bytes(&self, size: usize, rounded: bool) -> u64 {
        let area = |[rows, cols]: [usize; 2]| (rows as u64).saturating_mul(cols as u64);
        let bytes = self.modules.iter().map(|module| {
            let thin = thin::rank(&module.update).zip(module.update.size());
            let thin = thin.map_or(0, |(rank, [rows, cols])| area([rank, rows.saturating_add(cols)]));
            let again = if rounded && !module.leaves_weight() { module.update.size() } else { None };
            thin.saturating_mul(size as u64).saturating_add(again.map_or(0, area))
        });
        bytes.fold(0u64, u64::saturating_add)
    }

    /// Keys that are of no use here: for the text encoder, or no LoRA keys.
    pub fn unused_keys(&self) -> impl Iterator<Item = &str> {
        self.text.iter().chain(&self.unknown).map(String::as_str)
    }

    /// The factor that the file itself gives to `module`: 1 without an alpha.
    pub fn scale(&self, module: &str) -> Option<f64> {
        self.modules.iter().find(|m| m.name == module).map(|m| m.scale)
    }

    /// The file as plain tensors.
    pub fn source(&self) -> &WeightSource {
        &self.source
    }

    /// A SHA-256 in hex of what this LoRA does: of the tensors as in [`WeightSource::fingerprint`], and the scales.
    pub fn fingerprint(&self) -> Result<String> {
        let scales = self.modules.iter().map(|m| m.scale);
        Ok(fingerprint::with_scales(&self.source.fingerprint()?, scales))
    }
}

fn sorted<T: Ord>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut values: Vec<T> = values.collect();
    values.sort();
    values.dedup();
    values
}

/// The layers that a module changes. A dotted name that FLUX.2 doesn't have is taken as it is.
fn targets_of(group: &Group<'_>) -> Vec<Target> {
    let flat = matches!(group.layout, LoraLayout::Kohya | LoraLayout::Lycoris)
        || group.layout == LoraLayout::OneTrainer && !group.name.contains('.');
    names::targets(&keys::flatten(group.name)).unwrap_or_else(|| match flat {
        true => Vec::new(),
        false => vec![Target { layer: group.name.to_owned(), place: Place::Whole }],
    })
}

fn read_module(source: &WeightSource, group: &Group<'_>, adapter: Option<&Adapter>) -> Result<Module> {
    let problem = |p| Error::Lora { file: source.path().to_owned(), problem: Box::new(p) };
    let update = Update::read(source, group)?;
    let part =
        |part| group.parts.get(&part).map(|key| Ok::<_, Error>((*key, source.tensor(key)?))).transpose();
    let alpha = part(Part::Alpha)?.map(|(key, tensor)| number(key, &tensor)).transpose().map_err(problem)?;
    let magnitude = part(Part::Magnitude)?.map(|(key, tensor)| {
        check_float(key, &tensor)?;
        Ok(Keyed { key: key.to_owned(), tensor })
    });
    Ok(Module {
        stem: group.stem.to_owned(),
        name: group.name.to_owned(),
        layout: group.layout,
        scale: scale(adapter, group.name, &update, alpha).map_err(problem)?,
        magnitude: magnitude.transpose().map_err(problem)?,
        update,
    })
}

/// The one number in an `.alpha` tensor.
fn number(key: &str, tensor: &HostTensor) -> Result<f64, LoraProblem> {
    let key = key.to_owned();
    if tensor.numel() != 1 {
        return Err(LoraProblem::NotThatShape { key, found: tensor.shape().clone(), expected: "one number" });
    }
    if matches!(tensor.dtype(), DType::I64 | DType::I32) {
        return Ok(tensor.to_i64().ok().and_then(|values| values.first().copied()).unwrap_or(0) as f64);
    }
    check_float(&key, tensor)?;
    match tensor.to_f32().ok().and_then(|values| values.first().copied()) {
        Some(value) if value.is_finite() => Ok(value.into()),
        found => Err(LoraProblem::Alpha { key, found: found.unwrap_or(f32::NAN) }),
    }
}

/// The factor of one module: its own alpha before the settings', and 1 without either. Of whole matrices nothing divides
/// an alpha, and trainers ignore it.
fn scale(
    adapter: Option<&Adapter>,
    module: &str,
    update: &Update,
    alpha: Option<f64>,
) -> Result<f64, LoraProblem> {
    let Some(rank) = update.rank() else { return Ok(1.0) };
    let Some(adapter) = adapter.filter(|_| matches!(update, Update::LowRank { .. })) else {
        return Ok(alpha.map_or(1.0, |alpha| alpha / rank as f64));
    };
    let expected = adapter.rank(module);
    if expected != rank as f64 {
        let (module, key) = (module.to_owned(), update.keys()[1].to_owned());
        return Err(LoraProblem::MetadataRank { module, expected, key, found: rank });
    }
    Ok(adapter.scale(alpha.unwrap_or_else(|| adapter.alpha(module)), rank))
}
