//! What a source holds: how its tensors are stored, how many and how large they are, what they belong to.

use std::collections::BTreeMap;

use kiln_tensor::DType;
use kiln_tensor::packed::Format;

use super::WeightSource;
use crate::file::WeightFile;
use crate::fingerprint::fingerprint;
use crate::layout::{self, Component};
use crate::placed::Placed;
use crate::{Result, int8};

impl WeightSource {
    /// How a tensor is packed; `None` for plain ones. [`WeightSource::entry`] has its shape, and bytes for its type or the
    /// small floats that are scaled.
    pub fn packing(&self, name: &str) -> Option<Format> {
        let entry = &self.tensors.get(name)?.entry;
        entry.coding.format(entry.dtype)
    }

    /// The name of how a tensor is stored: its packing, or its dtype.
    pub fn storage(&self, name: &str) -> Option<&'static str> {
        let packing = self.packing(name).map(Format::name);
        packing.or_else(|| self.entry(name).map(|(dtype, _)| dtype.name()))
    }

    /// Number of elements by how they are stored.
    pub fn storages(&self) -> BTreeMap<&'static str, u64> {
        let mut counts = BTreeMap::new();
        for (name, placed) in &*self.tensors {
            *counts.entry(self.storage(name).unwrap_or_default()).or_default() += placed.shape.numel() as u64;
        }
        counts
    }

    /// Whether a GGUF file is read.
    pub fn is_gguf(&self) -> bool {
        self.files.iter().any(WeightFile::is_gguf)
    }

    /// Number of elements of all tensors together, without the scales of 8-bit ones.
    pub fn parameters(&self) -> u64 {
        let is_scale = |name: &str| {
            let weight = name.strip_suffix(int8::SCALE).and_then(|weight| self.entry(weight));
            weight.is_some_and(|(dtype, _)| dtype == DType::I8)
        };
        let counted = self.tensors.iter().filter(|(name, _)| !is_scale(name));
        counted.map(|(_, placed)| placed.shape.numel() as u64).sum()
    }

    /// Bytes of all tensors together.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|placed| placed.range().len() as u64).sum()
    }

    /// Number of elements per dtype.
    pub fn dtypes(&self) -> BTreeMap<DType, u64> {
        let mut counts = BTreeMap::new();
        for Placed { entry, shape, .. } in self.tensors.values() {
            *counts.entry(entry.dtype).or_default() += shape.numel() as u64;
        }
        counts
    }

    /// Bytes that a weight takes on average where a device keeps matrices as they are stored: 2 for bf16, 0.5625 for Q4_K.
    pub fn bytes_per_weight(&self) -> f64 {
        let matrices = || self.tensors.values().filter(|placed| placed.shape.rank() == 2);
        let bytes = |placed: &Placed| match placed.entry.dtype {
            // Rows with scales become the bf16 values they stand for, and nothing is longer than f32.
            DType::I8 if !placed.is_packed() => 2 * placed.shape.numel(),
            DType::F64 => 4 * placed.shape.numel(),
            _ => placed.range().len(),
        };
        let (bytes, weights) =
            matrices().fold((0, 0), |(all, count), m| (all + bytes(m), count + m.shape.numel()));
        if weights == 0 { 0.0 } else { bytes as f64 / weights as f64 }
    }

    /// The parts of a model that it has, and whose names they have.
    pub fn components(&self) -> Vec<(Component, &'static str)> {
        layout::find(self.names()).iter().map(|found| (found.naming.component, found.naming.name)).collect()
    }

    /// What the tensors are, for messages about what they are not.
    pub fn describe(&self) -> String {
        let parts: Vec<String> = self.components().iter().map(|(part, _)| part.to_string()).collect();
        match (layout::relative(self.names()), &parts[..]) {
            (Some(relative), _) => format!("its tensors are those of {relative}"),
            (None, []) => {
                let some: Vec<&str> = self.names().take(3).collect();
                format!("its tensors are of another kind, such as `{}`", some.join("`, `"))
            }
            (None, parts) => format!("it has a {}", parts.join(" and a ")),
        }
    }

    /// A SHA-256 in hex that stands for these weights in recipes, quick enough for files of many gigabytes.
    ///
    /// It covers the name, dtype, shape and length of every tensor, in the order of names, and of the data all of a
    /// tensor up to 16 KiB and four blocks of 4 KiB of a larger one: its first, its last and two evenly between.
    /// It doesn't cover file names, the division into shards, the order in the file, `__metadata__`. So a
    /// model saved again keeps its fingerprint, any training or conversion changes it, and a few bytes changed in
    /// the middle of a large tensor may go unnoticed: it identifies a file, it doesn't vouch for one.
    pub fn fingerprint(&self) -> Result<String> {
        let parts = self.tensors.iter().flat_map(|(name, placed)| {
            let Placed { entry, shape, .. } = placed;
            let data = &self.file_of(placed).all()[placed.range()];
            let scales = entry.coding.scales().map(|scale| {
                let bytes = self.files[scale.file].bytes(&scale.entry);
                (scale.name.as_str(), scale.entry.dtype, &scale.entry.shape, bytes)
            });
            std::iter::once((name.as_str(), entry.dtype, shape, data)).chain(scales)
        });
        Ok(fingerprint(parts))
    }
}
