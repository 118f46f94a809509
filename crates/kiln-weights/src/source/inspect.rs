//! What a source holds: how its tensors are stored, their number and size, the components they belong to.

use std::collections::BTreeMap;

use kiln_tensor::DType;
use kiln_tensor::packed::Format;

use super::WeightSource;
use crate::file::WeightFile;
use crate::fingerprint::fingerprint;
use crate::layout::{self, Component};
use crate::source_tensor::SourceTensor;
use crate::{Error, Result, int8};

impl WeightSource {
    /// The packed format of a tensor; `None` if it is dense.
    pub fn packed_format(&self, name: &str) -> Option<Format> {
        let entry = &self.tensors.get(name)?.entry;
        entry.encoding.format(entry.dtype)
    }

    /// The name of a tensor's packed format, else of its dtype.
    pub fn storage_name(&self, name: &str) -> Option<&'static str> {
        let format = self.packed_format(name).map(Format::name);
        format.or_else(|| self.entry(name).map(|(dtype, _)| dtype.name()))
    }

    /// Number of elements by [`storage_name`](WeightSource::storage_name).
    pub fn elements_by_storage(&self) -> BTreeMap<&'static str, u64> {
        let mut counts = BTreeMap::new();
        for (name, tensor) in &*self.tensors {
            *counts.entry(self.storage_name(name).unwrap_or_default()).or_default() +=
                tensor.shape.numel() as u64;
        }
        counts
    }

    /// Whether it is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        self.files.iter().any(WeightFile::is_gguf)
    }

    /// Number of elements of all tensors, without the scales of int8 rows and a tokenizer's bytes.
    pub fn parameters(&self) -> u64 {
        let is_scale = |name: &str| {
            let weight = name.strip_suffix(int8::SCALE).and_then(|weight| self.entry(weight));
            weight.is_some_and(|(dtype, _)| dtype == DType::I8)
        };
        let counted = self.tensors.iter().filter(|(name, _)| !is_scale(name) && *name != layout::TEKKEN);
        counted.map(|(_, tensor)| tensor.shape.numel() as u64).sum()
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.range().len() as u64).sum()
    }

    /// The error for the first float tensor that holds NaN or infinity, if there is one. Reads all of them.
    pub fn not_finite(&self) -> Option<Error> {
        let is_float = |dtype: DType| matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16);
        let floats = self.names().filter(|name| self.entry(name).is_some_and(|(dtype, _)| is_float(dtype)));
        let holds_other = |name: &&str| {
            let tensor = self.tensor(name).ok();
            let values = tensor.as_ref().and_then(|tensor| tensor.to_f32().ok());
            values.is_some_and(|values| values.iter().any(|value| !value.is_finite()))
        };
        let tensor = floats.into_iter().find(holds_other)?.to_owned();
        Some(Error::NotFinite { file: self.path().to_owned(), tensor })
    }

    /// Number of elements per dtype.
    pub fn dtypes(&self) -> BTreeMap<DType, u64> {
        let mut counts = BTreeMap::new();
        for SourceTensor { entry, shape, .. } in self.tensors.values() {
            *counts.entry(entry.dtype).or_default() += shape.numel() as u64;
        }
        counts
    }

    /// Average bytes per weight on a device that keeps matrices as stored: 2 for bf16, 0.5625 for Q4_K.
    pub fn bytes_per_weight(&self) -> f64 {
        if let Some(synthetic) = &self.synthetic {
            return synthetic.bytes_per_weight();
        }
        let matrices = || self.tensors.values().filter(|tensor| tensor.shape.rank() == 2);
        let bytes = |tensor: &SourceTensor| match tensor.entry.dtype {
            // No value takes more than f32.
            DType::F64 => 4 * tensor.shape.numel(),
            _ => tensor.range().len(),
        };
        let (bytes, weights) =
            matrices().fold((0, 0), |(all, count), m| (all + bytes(m), count + m.shape.numel()));
        if weights == 0 { 0.0 } else { bytes as f64 / weights as f64 }
    }

    /// The components of a model that it has, with the name of their naming scheme.
    pub fn components(&self) -> Vec<(Component, &'static str)> {
        layout::detect(self.names()).iter().map(|found| (found.scheme.component, found.scheme.name)).collect()
    }

    /// What the tensors belong to, for errors about a missing component.
    pub fn describe(&self) -> String {
        let components: Vec<String> =
            self.components().iter().map(|(component, _)| component.to_string()).collect();
        if let Some(model) = layout::related_model(self.names()) {
            format!("its tensors are those of {model}")
        } else if components.is_empty() {
            let some: Vec<&str> = self.names().take(3).collect();
            format!("its tensors are of another kind, such as `{}`", some.join("`, `"))
        } else {
            format!("it has a {}", components.join(" and a "))
        }
    }

    /// A SHA-256, in hex, that identifies these weights in recipes; fast also for files of many gigabytes.
    ///
    /// It covers the name, dtype, shape and length of every tensor, in the order of names, and its data: all of it up to
    /// 16 KiB, else four blocks of 4 KiB, the first, the last and two evenly between. It doesn't cover file names, the
    /// division into shards, the order in the file, or `__metadata__`. So a model saved again keeps its fingerprint and any
    /// training or conversion changes it, but a few bytes changed in the middle of a large tensor may go unnoticed: it is no
    /// proof of integrity, and no key of a cache (see [`content_hash`](WeightSource::content_hash)). In safetensors files it
    /// doesn't cover what a text encoder has beside its layers, either.
    pub fn fingerprint(&self) -> Result<String> {
        let contents = self.fingerprinted().flat_map(|(name, tensor)| {
            let SourceTensor { entry, shape, .. } = tensor;
            let data = &self.file_of(tensor).all()[tensor.range()];
            let scales = entry.encoding.scales().map(|scale| {
                let bytes = self.files[scale.file].bytes(&scale.entry);
                (scale.name.as_str(), scale.entry.dtype, &scale.entry.shape, bytes)
            });
            std::iter::once((name, entry.dtype, shape, data)).chain(scales)
        });
        Ok(fingerprint(contents))
    }

    /// The tensors that a fingerprint covers, by name.
    pub(crate) fn fingerprinted(&self) -> impl Iterator<Item = (&str, &SourceTensor)> {
        let covered = |name: &str| self.is_gguf() || !layout::is_beside_layers(name);
        let tensors = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        tensors.filter(move |(name, _)| covered(name))
    }
}
