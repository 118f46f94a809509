//! The adapters of all layers, with what their passes keep.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use kiln_ops::TrainingBackend;

use crate::AdapterKind;

/// A trainable tensor and its gradient.
pub(crate) struct Param<B: TrainingBackend> {
    /// PEFT's name, without the layer.
    pub(crate) name: &'static str,
    pub(crate) value: B::Tensor,
    /// Its gradient of this step so far.
    pub(crate) grad: Option<B::Tensor>,
}

/// The adapter of one layer.
pub(crate) struct LayerAdapter<B: TrainingBackend> {
    pub(crate) rank: usize,
    pub(crate) alpha: f32,
    pub(crate) params: Vec<Param<B>>,
    /// Sizes of a LoKr's factors.
    pub(super) lokr: Option<Lokr>,
}

impl<B: TrainingBackend> LayerAdapter<B> {
    pub(super) fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }
}

/// The adapters of all layers.
pub(crate) struct AdapterSet<B: TrainingBackend> {
    pub(super) kind: AdapterKind,
    pub(super) dropout: f32,
    pub(super) layers: BTreeMap<String, LayerAdapter<B>>,
    /// Seed of this batch's dropout; `None` drops nothing.
    pub(crate) dropout_seed: Option<u64>,
    /// DoRA's factors, by the first part of the layer; they change with the weights.
    pub(super) dora: RefCell<HashMap<String, DoraScale<B>>>,
}

/// What the forward pass of a layer keeps.
pub(crate) enum Saved<B: TrainingBackend> {
    Lora(LoraSaved<B>),
    Lokr,
}

/// What the forward pass of a LoRA keeps.
pub(crate) struct LoraSaved<B: TrainingBackend> {
    /// `x' · Aᵀ` of each part.
    pub(super) inner: Vec<B::Tensor>,
    /// DoRA: the outputs before their factors.
    pub(super) unscaled: Option<B::Tensor>,
}

/// DoRA's numbers for one layer, one per output.
pub(crate) struct DoraScale<B: TrainingBackend> {
    /// `magnitude / norm`; 1 for parts without an adapter.
    pub(super) factor: B::Tensor,
    /// `1 / norm`.
    pub(super) inverse_norm: B::Tensor,
    pub(super) zeros: B::Tensor,
}

impl<B: TrainingBackend> Clone for DoraScale<B> {
    fn clone(&self) -> Self {
        let (factor, inverse_norm) = (self.factor.clone(), self.inverse_norm.clone());
        DoraScale { factor, inverse_norm, zeros: self.zeros.clone() }
    }
}

/// The sizes of a LoKr's factors.
pub(crate) struct Lokr {
    /// `[l, m]` of `w1`.
    pub(crate) outer: [usize; 2],
    /// `[k, n]` of `w2`.
    pub(crate) inner: [usize; 2],
    /// Whether `w2 = w2_a · w2_b`.
    pub(crate) low_rank: bool,
}
