//! Safetensors files built by hand, so that the tests don't depend on the writer and reader that they test.
pub mod flux;
pub mod layouts;

use bytes::Bytes;
use kiln_weights::{LayerShape, Lora, LoraOptions, LoraReport, LoraUpdates, Result, WeightSource};
use serde_json::{Map, Value, json};

/// A file with this header and data, and the correct length of the header.
pub fn file(header: &str, data: &[u8]) -> Bytes {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes.into()
}

/// A valid file of f32 tensors, whose values count up through the whole file, with metadata.
pub fn tensors(shapes: &[(&str, &[usize])], metadata: &[(&str, &str)]) -> Bytes {
    let mut entries = Map::new();
    if !metadata.is_empty() {
        let texts: Map<String, Value> = metadata.iter().map(|(k, v)| ((*k).into(), json!(v))).collect();
        entries.insert("__metadata__".into(), texts.into());
    }
    let mut values = 0;
    for (name, shape) in shapes {
        let end = values + shape.iter().product::<usize>();
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [values * 4, end * 4] });
        assert!(entries.insert((*name).into(), entry).is_none());
        values = end;
    }
    let data: Vec<u8> = (0..values).flat_map(|v| (v as f32).to_le_bytes()).collect();
    file(&Value::Object(entries).to_string(), &data)
}

/// The shapes of a LoRA for modules of given name, rank, rows and cols, in diffusers' naming.
pub fn lora(modules: &[(&str, usize, usize, usize)], metadata: &[(&str, &str)]) -> Bytes {
    let names: Vec<_> = modules
        .iter()
        .flat_map(|&(name, rank, rows, cols)| {
            let key = |ab: &str| format!("transformer.{name}.lora_{ab}.weight");
            [(key("A"), [rank, cols]), (key("B"), [rows, rank])]
        })
        .collect();
    let shapes: Vec<(&str, &[usize])> = names.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect();
    tensors(&shapes, metadata)
}

/// The linear layers of a source: every weight that is a matrix.
pub fn layers(source: &WeightSource) -> Vec<LayerShape> {
    let layer = |name: &str| {
        let &[rows, cols] = source.entry(name)?.1.dims() else { return None };
        Some(LayerShape { name: name.strip_suffix(".weight")?.to_owned(), rows, cols })
    };
    source.names().filter_map(layer).collect()
}

/// Resolves LoRAs against all layers of a source.
pub fn resolve(
    source: &WeightSource,
    loras: impl IntoIterator<Item = (Lora, f32)>,
) -> Result<(LoraUpdates, Vec<LoraReport>)> {
    LoraUpdates::resolve(source, &layers(source), loras, LoraOptions::default())
}

/// Applies one LoRA to all layers of a source.
pub fn apply(source: &WeightSource, lora: Lora, weight: f32) -> LoraUpdates {
    resolve(source, [(lora, weight)]).unwrap().0
}

/// Pseudo-random numbers that are the same on every run.
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}
