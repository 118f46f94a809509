//! Arbitrary names as the keys of a LoRA, applied to a small FLUX.2 with layers of such names. Each line of the input is a
//! key; its first two bytes are the dimensions of its tensor.
#![no_main]

use std::collections::BTreeMap;

use kiln_weights::{LayerShape, Lora, LoraOptions, LoraUpdates, WeightSource};
use libfuzzer_sys::fuzz_target;

/// The layers, with their rows and columns.
const LAYERS: [(&str, usize, usize); 6] = [
    ("x_embedder", 2, 3),
    ("norm_out.linear", 4, 2),
    ("transformer_blocks.0.attn.to_q", 2, 2),
    ("transformer_blocks.0.attn.to_k", 2, 2),
    ("transformer_blocks.0.attn.to_v", 2, 2),
    ("single_transformer_blocks.0.attn.to_qkv_mlp_proj", 18, 2),
];

fn file<'k>(tensors: impl IntoIterator<Item = (&'k str, [usize; 2])>) -> Vec<u8> {
    let (mut entries, mut end) = (Vec::new(), 0);
    for (name, [rows, cols]) in tensors {
        let start = end;
        end += 4 * rows * cols;
        entries.push(format!(r#""{name}":{{"dtype":"F32","shape":[{rows},{cols}],"data_offsets":[{start},{end}]}}"#));
    }
    let header = format!("{{{}}}", entries.join(","));
    let data = (0..end).map(|i| if i % 4 == 3 { 0x3f } else { i as u8 });
    (header.len() as u64).to_le_bytes().into_iter().chain(header.into_bytes()).chain(data).collect()
}

fuzz_target!(|data: &[u8]| {
    let mut keys = BTreeMap::new();
    for line in data.split(|b| *b == b'\n') {
        let [rows, cols, key @ ..] = line else { continue };
        let Ok(key) = std::str::from_utf8(key) else { continue };
        if !key.is_empty() && !key.contains(['"', '\\']) && !key.contains(char::is_control) {
            keys.insert(key, [usize::from(rows % 32), usize::from(cols % 32)]);
        }
    }
    let Ok(lora) = Lora::from_bytes("fuzz", file(keys).into()) else { return };
    let names: Vec<String> = LAYERS.iter().map(|(name, ..)| format!("{name}.weight")).collect();
    let base = file(names.iter().zip(&LAYERS).map(|(name, (_, rows, cols))| (name.as_str(), [*rows, *cols])));
    let base = WeightSource::from_bytes("base", base).expect("the base is valid");
    let layers = LAYERS.map(|(name, rows, cols)| LayerShape { name: name.into(), rows, cols });
    let options = LoraOptions { partial: true, ..LoraOptions::default() };
    let Ok((updates, _)) = LoraUpdates::resolve(&base, &layers, [(lora, -0.5)], options) else { return };
    for (name, rows, cols) in LAYERS {
        let layer = base.root().with_loras(&updates).linear(name, rows, cols);
        let layer = layer.expect("a resolved LoRA can be applied to its layer");
        assert_eq!((layer.rows(), layer.cols()), (rows, cols));
    }
});
