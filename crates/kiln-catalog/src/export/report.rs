//! The report of an export as properties.

use std::collections::BTreeMap;
use std::path::Path;

use kiln_tensor::packed::Format;
use kiln_weights::export::{LayerGroup, Report};

use crate::properties::Properties;
use crate::values::{bytes, count};

/// Returns the report's properties; `asked` is the type that the layers were to be quantized to.
pub fn report_properties(out: &Path, report: &Report, asked: Option<&str>) -> Properties {
    let [before, after] = report.bytes;
    let changed: usize = report.changed.values().sum();
    let mut properties = Properties::default()
        .with("path", out.display().to_string())
        .with_amount("bytes_before", before, bytes(before))
        .with_amount("bytes_after", after, bytes(after))
        .with("tensors_kept", report.copied - changed);
    if changed > 0 {
        let lines = report.changed.iter();
        let lines = lines.fold(Properties::verbatim(), |lines, ((from, to), count)| {
            lines.with(format!("{} to {}", type_name(from), type_name(to)), count)
        });
        properties = properties.with_group("tensors_changed", lines);
    }
    if let Some(asked) = asked {
        let layers = report.layers.iter();
        let layers = layers.fold(Properties::verbatim(), |all, (storage, n)| all.with(type_name(storage), n));
        properties = properties.with("asked_for", asked).with_group("layers", layers);
    }
    let mut groups = BTreeMap::<&str, Properties>::new();
    for LayerGroup { name, storage, layers, weights, error } in &report.groups {
        let layers = Properties::default()
            .with("layers", layers)
            .with_amount("weights", *weights, count(*weights))
            .with("relative_error", (error * 1e6).round() / 1e6);
        let group = groups.entry(type_name(storage)).or_insert_with(Properties::verbatim_group);
        let before = std::mem::replace(group, Properties::verbatim_group());
        *group = before.with_group(name, layers);
    }
    groups.into_iter().fold(properties, |properties, (name, group)| properties.with_group(name, group))
}

/// Returns the name of a storage type on the command line.
fn type_name(storage: &str) -> &str {
    if storage == Format::F8E4M3.name() { "fp8" } else { storage }
}
