//! The adapters of a transformer's layers: their weights, their gradients, and what they add to a layer.
//!
//! One module per kind has the forward and backward pass: `lora.rs` (also DoRA) and `lokr.rs`. Weights and names are
//! PEFT's. Layers that the transformer stacks, such as q, k and v, have an adapter each.

mod init;
mod lokr;
mod lora;
mod set;
mod targets;

use std::cell::RefCell;
use std::collections::BTreeMap;

use kiln_nn::transformer::training::{Adapters, LayerStack};
use kiln_ops::{Tensor as _, TrainingBackend};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::TrainedModule;

use crate::{AdapterKind, AdapterSettings, Error, Result};
pub(crate) use init::derive;
use set::Lokr;
pub(crate) use set::{AdapterSet, LayerAdapter, Param, Saved};
pub use targets::{TargetLayer, target_layers};

impl<B: TrainingBackend> AdapterSet<B> {
    /// Adapters with initial weights, as PEFT initializes them: they change nothing. DoRA's magnitudes are set when the
    /// weights are known ([`AdapterSet::initialize_magnitudes`]).
    pub(crate) fn new(b: &B, targets: &[TargetLayer], settings: &AdapterSettings, seed: u64) -> Result<Self> {
        let mut layers = BTreeMap::new();
        for target in targets {
            let lokr = match settings.kind {
                AdapterKind::Lokr => Some(Lokr::new(target, settings.factor)),
                _ => None,
            };
            let mut params = Vec::new();
            for (name, shape, bound) in init::parameters(target, settings.kind, lokr.as_ref()) {
                let host = init::uniform(seed, &format!("{}.{name}", target.layer.name), shape, bound)?;
                params.push(Param { name, value: b.upload(&host, DType::F32)?, grad: None });
            }
            let alpha = settings.alpha.unwrap_or(target.rank as f32);
            let adapter = LayerAdapter { rank: target.rank, alpha, params, lokr };
            layers.insert(target.layer.name.clone(), adapter);
        }
        Ok(AdapterSet {
            kind: settings.kind,
            dropout: settings.dropout,
            layers,
            dropout_seed: None,
            dora: RefCell::default(),
        })
    }

    /// All parameters with their full names, in a fixed order. Changing them requires [`AdapterSet::changed`].
    pub(crate) fn params(&self) -> impl Iterator<Item = (String, &Param<B>)> {
        self.layers.iter().flat_map(|(layer, adapter)| {
            adapter.params.iter().map(move |param| (format!("{layer}.{}", param.name), param))
        })
    }

    pub(crate) fn params_mut(&mut self) -> impl Iterator<Item = (String, &mut Param<B>)> {
        self.layers.iter_mut().flat_map(|(layer, adapter)| {
            adapter.params.iter_mut().map(move |param| (format!("{layer}.{}", param.name), param))
        })
    }

    /// Forgets what was computed from earlier weights.
    pub(crate) fn changed(&mut self) {
        self.dora.get_mut().clear();
    }

    /// Forgets all gradients.
    pub(crate) fn clear_gradients(&mut self) {
        self.params_mut().for_each(|(_, param)| param.grad = None);
    }

    /// The weights, or those of `values` (in the order of [`AdapterSet::params`]).
    pub(crate) fn modules(&self, b: &B, values: Option<&[B::Tensor]>) -> Result<Vec<TrainedModule>> {
        let mut values = values.map(|values| values.iter());
        let mut modules = Vec::with_capacity(self.layers.len());
        for (layer, adapter) in &self.layers {
            let mut tensors = BTreeMap::new();
            for param in &adapter.params {
                let value = values.as_mut().and_then(Iterator::next).unwrap_or(&param.value);
                tensors.insert(param.name.to_owned(), b.download(value)?);
            }
            let (rank, alpha) = (adapter.rank, adapter.alpha);
            modules.push(TrainedModule { layer: layer.clone(), rank, alpha, tensors });
        }
        Ok(modules)
    }

    /// Replaces a parameter's value.
    pub(crate) fn set(&mut self, b: &B, name: &str, host: &HostTensor) -> Result<()> {
        let Some((_, param)) = self.params_mut().find(|(full, _)| full == name) else {
            return Err(Error::State(format!("the adapter has no tensor `{name}`")));
        };
        if param.value.shape() != host.shape() {
            let (found, expected) = (host.shape(), param.value.shape());
            return Err(Error::State(format!("`{name}` has shape {found}, expected {expected}")));
        }
        param.value = b.upload(host, DType::F32)?;
        self.changed();
        Ok(())
    }

    /// The adapters of a layer's parts, each with its first output.
    fn parts<'a>(
        &'a self,
        layer: &'a LayerStack,
    ) -> impl Iterator<Item = (usize, &'a str, &'a LayerAdapter<B>)> {
        let mut first = 0;
        layer.iter().filter_map(move |(name, rows)| {
            let start = first;
            first += rows;
            self.layers.get(name).map(|adapter| (start, name.as_str(), adapter))
        })
    }
}

impl<B: TrainingBackend> Adapters<B> for AdapterSet<B> {
    type Saved = Saved<B>;

    fn is_adapted(&self, layer: &LayerStack) -> bool {
        layer.iter().any(|(name, _)| self.layers.contains_key(name))
    }

    fn forward(
        &self,
        b: &B,
        layer: &LayerStack,
        w: &B::Weight,
        x: &B::Tensor,
        widths: &[usize],
    ) -> kiln_nn::Result<(Vec<B::Tensor>, Saved<B>)> {
        Ok(match self.kind {
            AdapterKind::Lora | AdapterKind::Dora => {
                let (ys, saved) = self.lora_forward(b, layer, w, x, widths)?;
                (ys, Saved::Lora(saved))
            }
            AdapterKind::Lokr => (self.lokr_forward(b, layer, w, x, widths)?, Saved::Lokr),
        })
    }

    fn backward(
        &mut self,
        b: &B,
        layer: &LayerStack,
        w: &B::Weight,
        x: &B::Tensor,
        saved: Saved<B>,
        dys: &[&B::Tensor],
        needs_dx: bool,
    ) -> kiln_nn::Result<Option<B::Tensor>> {
        Ok(match saved {
            Saved::Lora(saved) => self.lora_backward(b, layer, w, x, saved, dys, needs_dx)?,
            Saved::Lokr => self.lokr_backward(b, layer, w, x, dys, needs_dx)?,
        })
    }
}
