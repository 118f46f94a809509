//! The check that a component has no tensor that nobody reads: such a tensor would have changed the image.
//!
//! A model lists its tensors as [`KnownTensors`]. Any other tensor of the component is an error, such as the bias of a layer
//! without one, an unknown scale beside a weight, or a block after a gap in the block numbers. The exceptions are leftovers
//! of training, which are reported in a note.

use std::collections::{BTreeMap, BTreeSet};

use kiln_base::{is_or_are, plural};
use kiln_tensor::{DType, Shape};

use crate::similar::quoted;
use crate::source::Unclaimed;
use crate::{Component, Error, Result, WeightSource};
use crate::{encoding, layout};

/// The tensors of a component, under the model's names.
#[derive(Clone, Debug, Default)]
pub struct KnownTensors(BTreeMap<String, (Shape, TensorUse)>);

/// What loading does with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TensorUse {
    /// Reads it.
    Required,
    /// Reads it if it is there.
    Optional,
    /// Does not read it.
    Unread,
}

impl KnownTensors {
    /// Adds a tensor that the component must have.
    pub fn add(&mut self, name: impl Into<String>, shape: impl Into<Shape>) {
        self.0.insert(name.into(), (shape.into(), TensorUse::Required));
    }

    /// Adds a linear layer: a weight of `[rows, cols]`, and a bias if the file has one.
    pub fn add_linear(&mut self, module: &str, [rows, cols]: [usize; 2]) {
        self.add(format!("{module}.weight"), [rows, cols]);
        self.0.insert(format!("{module}.bias"), ([rows].into(), TensorUse::Optional));
    }

    /// Adds a layer that has a weight of this shape, and a bias for each of its rows.
    pub fn add_biased<const N: usize>(&mut self, module: &str, weight: [usize; N]) {
        self.add(format!("{module}.bias"), &weight[..1]);
        self.add(format!("{module}.weight"), weight);
    }

    /// Adds the required tensors of `others`, layers that the image does not depend on.
    pub fn add_unread(&mut self, others: KnownTensors) {
        let required = others.0.into_iter().filter(|(_, (_, tensor))| *tensor == TensorUse::Required);
        self.0.extend(required.map(|(name, (shape, _))| (name, (shape, TensorUse::Unread))));
    }
}

/// Whether a tensor may change an image. Counters don't, nor buffers that follow from the configuration, nor what a text
/// encoder has beside its layers.
fn has_effect(component: Component, name: &str) -> bool {
    match component {
        Component::Transformer => true,
        Component::TextEncoder => {
            !(layout::is_beside_layers(name)
                || name.ends_with("lm_head.weight")
                || name.ends_with("rotary_emb.inv_freq"))
        }
        Component::Vae => !name.ends_with("bn.num_batches_tracked"),
    }
}

impl WeightSource {
    /// Checks that this component, from [`WeightSource::component`], has all tensors that the model reads, in their shapes,
    /// and none that it does not know. Returns a note about tensors that are left out or not needed, if there are any.
    pub fn check_tensors(&self, component: Component, known: &KnownTensors) -> Result<Option<String>> {
        for (name, (shape, tensor)) in &known.0 {
            if *tensor == TensorUse::Required || *tensor == TensorUse::Optional && self.contains(name) {
                self.find_with_shape(name, shape.clone())?;
                self.check_dtype(name)?;
            }
        }
        let (left_out, unused) = self.unknown_tensors(component, known);
        if !unused.is_empty() {
            return Err(self.unused(component, unused));
        }
        let remark = |what: &str, names: &[String]| {
            let (count, are) = (plural(names.len(), "tensor"), is_or_are(names.len()));
            (!names.is_empty()).then(|| format!("{count} {are} {what}: {}", quoted(names)))
        };
        let missing = self.partly_missing(known);
        let remarks = [remark("not used", &left_out), remark("missing, but not needed", &missing)];
        let remarks: Vec<String> = remarks.into_iter().flatten().collect();
        Ok((!remarks.is_empty()).then(|| format!("`{}`: {}", self.path().display(), remarks.join("; "))))
    }

    /// Checks that every tensor of the file belongs to one of its components.
    pub fn check_claimed(&self, component: Component) -> Result<()> {
        let Unclaimed { names, .. } = self.unclaimed();
        if names.is_empty() {
            return Ok(());
        }
        Err(self.unused(component, names.clone()))
    }

    fn unused(&self, component: Component, names: Vec<String>) -> Error {
        Error::UnusedTensors { file: self.path().to_owned(), family: self.family().name, component, names }
    }

    /// Rejects a tensor whose values are not floats in any encoding.
    fn check_dtype(&self, name: &str) -> Result<()> {
        let Some((dtype, _)) = self.entry(name) else { return Ok(()) };
        let is_float = dtype.is_fp8() || matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64);
        if is_float || self.packed_format(name).is_some() || self.is_int8(name) {
            return Ok(());
        }
        let problem = match dtype {
            DType::I8 | DType::U8 => encoding::unknown_bytes(dtype),
            _ => format!("is stored as {dtype}, expected floats"),
        };
        let (file, module) = (self.path().to_owned(), name.to_owned());
        Err(Error::UnsupportedQuantization { file, module, problem })
    }

    /// The tensors that are not read and missing, without those of blocks that the file leaves out as a whole.
    fn partly_missing(&self, known: &KnownTensors) -> Vec<String> {
        fn block(name: &str) -> &str {
            let mut end = 0;
            for word in name.split('.') {
                end += word.len();
                if word.parse::<usize>().is_ok() {
                    return &name[..end];
                }
                end += 1;
            }
            name
        }
        let unread = known.0.iter().filter(|(_, (_, tensor))| *tensor == TensorUse::Unread);
        let (present, missing): (Vec<&str>, Vec<&str>) =
            unread.map(|(name, _)| name.as_str()).partition(|name| self.contains(name));
        let present: BTreeSet<&str> = present.into_iter().map(block).collect();
        missing.into_iter().filter(|name| present.contains(block(name))).map(str::to_owned).collect()
    }

    /// The tensors that the model does not know: those that may be left out, and the others.
    fn unknown_tensors(&self, component: Component, known: &KnownTensors) -> (Vec<String>, Vec<String>) {
        let own = self.names().filter(|name| !known.0.contains_key(*name) && !self.is_row_scale(name));
        let own = own
            .filter(|name| has_effect(component, name))
            .map(|name| (name, layout::is_training_leftover(name)));
        // A file of several components may hold more than FLUX.2 needs, but not a second transformer, say.
        let Unclaimed { names, several_components } = self.unclaimed();
        let may_leave = |name: &str| {
            layout::is_training_leftover(name) || *several_components && !layout::is_anchor(name)
        };
        let unclaimed = names.iter().filter(|name| Component::ALL.iter().all(|c| has_effect(*c, name)));
        let unclaimed = unclaimed.map(|name| (name.as_str(), may_leave(name)));
        let (left_out, unused): (Vec<_>, Vec<_>) = own.chain(unclaimed).partition(|(_, leave)| *leave);
        let names =
            |tensors: Vec<(&str, bool)>| tensors.into_iter().map(|(name, _)| name.to_owned()).collect();
        (names(left_out), names(unused))
    }
}
