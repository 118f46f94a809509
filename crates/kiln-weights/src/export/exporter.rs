//! Converts the tensors of a file one by one.

use std::collections::BTreeMap;

use super::convert::{ConvertedTensor, convert};
use super::options::Options;
use super::plan::PlannedTensor;
use super::report::{ErrorSums, Report, layer_kind};
use crate::{Error, Result, WeightSource, int8};

/// Called with the number of tensors done and the total; an error, such as [`Error::Cancelled`], ends the export and
/// leaves no file behind.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize) -> Result<()>;

/// Converts one tensor after the other, and reports progress.
pub(super) struct Exporter<'a> {
    source: &'a WeightSource,
    threads: usize,
    /// By the layers' kind and type.
    groups: BTreeMap<(String, &'static str), ErrorSums>,
    layers: BTreeMap<&'static str, usize>,
    changed: BTreeMap<(&'static str, &'static str), usize>,
    done: usize,
    total: usize,
    progress: Progress<'a>,
}

impl<'a> Exporter<'a> {
    pub fn new(
        source: &'a WeightSource,
        options: &Options,
        total: usize,
        progress: Progress<'a>,
    ) -> Exporter<'a> {
        Exporter {
            source,
            threads: options.threads,
            groups: BTreeMap::new(),
            layers: BTreeMap::new(),
            changed: BTreeMap::new(),
            done: 0,
            total,
            progress,
        }
    }

    /// The bytes to write for a tensor.
    pub fn convert(&mut self, planned: &PlannedTensor) -> Result<ConvertedTensor> {
        let converted = convert(self.source, planned, self.threads)?;
        let storage = planned.conversion.storage_name();
        if let Some(squares) = converted.squares {
            if !squares[1].is_finite() {
                let (file, tensor) = (self.source.path().to_owned(), planned.name.clone());
                return Err(Error::NotFinite { file, tensor });
            }
            let name = planned.sources.first().map_or(planned.name.as_str(), |(name, _)| name);
            let sums = self.groups.entry((layer_kind(name), storage)).or_default();
            sums.add(planned.shape.numel() as u64, squares);
        }
        self.count(planned, storage);
        planned.sources.iter().for_each(|(name, _)| self.source.release(name));
        self.done += 1;
        (self.progress)(self.done, self.total)?;
        Ok(converted)
    }

    /// Counts a tensor by the type that it was written in.
    fn count(&mut self, planned: &PlannedTensor, storage: &'static str) {
        if planned.is_quantized_layer {
            *self.layers.entry(storage).or_default() += 1;
            return;
        }
        let stored = |name: &str| {
            if self.source.is_int8(name) { Some(int8::NAME) } else { self.source.storage_name(name) }
        };
        let mut before = planned.sources.iter().filter_map(|(name, _)| stored(name));
        if let Some(before) = before.find(|before| *before != storage) {
            *self.changed.entry((before, storage)).or_default() += 1;
        }
    }

    pub fn report(self, after: u64) -> Report {
        let layers: usize = self.groups.values().map(|g| g.layers).sum();
        let groups = self.groups.into_iter();
        Report {
            groups: groups.map(|((name, storage), sums)| sums.group(name, storage)).collect(),
            layers: self.layers,
            changed: self.changed,
            copied: self.total - layers,
            bytes: [self.source.bytes(), after],
        }
    }
}
