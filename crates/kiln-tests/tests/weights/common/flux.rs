//! A small FLUX.2 model, and files of tensors for it.
use std::collections::BTreeMap;

use bytes::Bytes;
use kiln_tensor::{HostLinear, HostTensor, LinearWeight};
use kiln_weights::{Lora, Vars, WeightSource};
use serde_json::{Map, Value, json};

use super::Random;

pub const DIM: usize = 6;

/// An f32 matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub values: Vec<f32>,
}

impl Matrix {
    pub fn random(random: &mut Random, rows: usize, cols: usize) -> Matrix {
        let values = (0..rows * cols).map(|_| random.below(2001) as f32 / 1000.0 - 1.0).collect();
        Matrix { rows, cols, values }
    }

    pub fn filled(rows: usize, cols: usize, value: f32) -> Matrix {
        Matrix { rows, cols, values: vec![value; rows * cols] }
    }

    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    pub fn take(&self, from: usize, count: usize) -> Matrix {
        let values = self.values[from * self.cols..(from + count) * self.cols].to_vec();
        Matrix { rows: count, cols: self.cols, values }
    }

    pub fn stack(&self, other: &Matrix) -> Matrix {
        let values = [&self.values[..], &other.values].concat();
        Matrix { rows: self.rows + other.rows, cols: self.cols, values }
    }

    pub fn swap_halves(&self) -> Matrix {
        self.take(self.rows / 2, self.rows / 2).stack(&self.take(0, self.rows / 2))
    }

    pub fn from_fn(rows: usize, cols: usize, value: impl Fn(usize, usize) -> f32) -> Matrix {
        let values = (0..rows * cols).map(|i| value(i / cols, i % cols)).collect();
        Matrix { rows, cols, values }
    }

    pub fn times(&self, other: &Matrix) -> Matrix {
        Matrix::from_fn(self.rows, other.cols, |i, j| {
            (0..self.cols).map(|k| self.row(i)[k] * other.row(k)[j]).sum()
        })
    }

    pub fn kron(&self, other: &Matrix) -> Matrix {
        Matrix::from_fn(self.rows * other.rows, self.cols * other.cols, |i, j| {
            self.row(i / other.rows)[j / other.cols] * other.row(i % other.rows)[j % other.cols]
        })
    }

    pub fn plus(&self, factor: f32, other: &Matrix) -> Matrix {
        assert_eq!((self.rows, self.cols), (other.rows, other.cols));
        Matrix::from_fn(self.rows, self.cols, |i, j| self.row(i)[j] + factor * other.row(i)[j])
    }

    #[track_caller]
    pub fn assert_near(&self, other: &Matrix, tolerance: f32, what: &str) {
        assert_eq!((self.rows, self.cols), (other.rows, other.cols), "{what}");
        for (i, (a, b)) in self.values.iter().zip(&other.values).enumerate() {
            assert!((a - b).abs() <= tolerance, "{what}, row {}: {a}, expected {b}", i / self.cols);
        }
    }
}

/// Layers in Black Forest Labs' naming, with their sizes and their diffusers names, q, k and v separately.
pub const LAYERS: [(&str, usize, usize, &[&str]); 20] = [
    ("img_in", DIM, 4, &["x_embedder"]),
    ("txt_in", DIM, 9, &["context_embedder"]),
    ("time_in.in_layer", DIM, 8, &["time_guidance_embed.timestep_embedder.linear_1"]),
    ("time_in.out_layer", DIM, DIM, &["time_guidance_embed.timestep_embedder.linear_2"]),
    ("double_stream_modulation_img.lin", 6 * DIM, DIM, &["double_stream_modulation_img.linear"]),
    ("double_stream_modulation_txt.lin", 6 * DIM, DIM, &["double_stream_modulation_txt.linear"]),
    ("single_stream_modulation.lin", 3 * DIM, DIM, &["single_stream_modulation.linear"]),
    ("final_layer.linear", 4, DIM, &["proj_out"]),
    ("final_layer.adaLN_modulation.1", 2 * DIM, DIM, &["norm_out.linear"]),
    ("double_blocks.0.img_attn.proj", DIM, DIM, &["transformer_blocks.0.attn.to_out.0"]),
    ("double_blocks.0.txt_attn.proj", DIM, DIM, &["transformer_blocks.0.attn.to_add_out"]),
    ("double_blocks.0.img_mlp.0", 6 * DIM, DIM, &["transformer_blocks.0.ff.linear_in"]),
    ("double_blocks.0.img_mlp.2", DIM, 3 * DIM, &["transformer_blocks.0.ff.linear_out"]),
    ("double_blocks.0.txt_mlp.0", 6 * DIM, DIM, &["transformer_blocks.0.ff_context.linear_in"]),
    ("double_blocks.0.txt_mlp.2", DIM, 3 * DIM, &["transformer_blocks.0.ff_context.linear_out"]),
    ("single_blocks.0.linear1", 9 * DIM, DIM, &["single_transformer_blocks.0.attn.to_qkv_mlp_proj"]),
    ("single_blocks.0.linear2", DIM, 4 * DIM, &["single_transformer_blocks.0.attn.to_out"]),
    ("single_blocks.11.linear2", DIM, 4 * DIM, &["single_transformer_blocks.11.attn.to_out"]),
    (
        "double_blocks.0.img_attn.qkv",
        3 * DIM,
        DIM,
        &[
            "transformer_blocks.0.attn.to_q",
            "transformer_blocks.0.attn.to_k",
            "transformer_blocks.0.attn.to_v",
        ],
    ),
    (
        "double_blocks.0.txt_attn.qkv",
        3 * DIM,
        DIM,
        &[
            "transformer_blocks.0.attn.add_q_proj",
            "transformer_blocks.0.attn.add_k_proj",
            "transformer_blocks.0.attn.add_v_proj",
        ],
    ),
];

/// A file of tensors.
#[derive(Clone, Default)]
pub struct File {
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    pub metadata: BTreeMap<String, String>,
}

impl File {
    pub fn put(&mut self, key: impl Into<String>, matrix: &Matrix) {
        self.tensors.insert(key.into(), (vec![matrix.rows, matrix.cols], matrix.values.clone()));
    }

    pub fn put_number(&mut self, key: impl Into<String>, value: f32) {
        self.tensors.insert(key.into(), (Vec::new(), vec![value]));
    }

    pub fn bytes(&self) -> Bytes {
        let mut header = Map::new();
        if !self.metadata.is_empty() {
            header.insert("__metadata__".into(), json!(self.metadata));
        }
        let mut data = Vec::new();
        for (key, (shape, values)) in &self.tensors {
            let start = data.len();
            data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
            header.insert(key.clone(), entry);
        }
        super::file(&Value::Object(header).to_string(), &data)
    }

    pub fn lora(&self) -> Lora {
        Lora::from_bytes("style.safetensors", self.bytes()).unwrap()
    }
}

/// The weights of all layers in Black Forest Labs' naming.
pub fn weights(seed: u64) -> BTreeMap<&'static str, Matrix> {
    let mut random = Random(seed);
    LAYERS.iter().map(|&(name, rows, cols, _)| (name, Matrix::random(&mut random, rows, cols))).collect()
}

/// The layers in diffusers' naming, q, k and v separately.
pub fn split(weights: &BTreeMap<&'static str, Matrix>) -> BTreeMap<&'static str, Matrix> {
    let mut out = BTreeMap::new();
    for (name, _, _, layers) in &LAYERS {
        let Some(weight) = weights.get(name) else { continue };
        let weight = if name.contains("adaLN") { weight.swap_halves() } else { weight.clone() };
        let rows = weight.rows / layers.len();
        out.extend(layers.iter().enumerate().map(|(i, layer)| (*layer, weight.take(i * rows, rows))));
    }
    out
}

/// A model of these weights.
pub fn model(weights: &BTreeMap<&'static str, Matrix>) -> WeightSource {
    let mut file = File::default();
    for (layer, weight) in split(weights) {
        file.put(format!("{layer}.weight"), &weight);
    }
    WeightSource::from_bytes("model.safetensors", file.bytes()).unwrap()
}

/// The effective weight of a layer, with LoRAs.
pub fn effective(layer: &HostLinear) -> Matrix {
    let cols = layer.cols();
    let mut values = Vec::new();
    match layer.weight() {
        LinearWeight::Dense(dense) => {
            dense.iter().for_each(|dense| values.extend_from_slice(&dense.to_f32().unwrap()));
        }
        LinearWeight::Int8 { rows, scales, rotation } => {
            for (rows, scales) in rows.iter().zip(scales) {
                let scales = scales.to_f32().unwrap();
                let integers = rows.bytes().iter().enumerate();
                values.extend(integers.map(|(at, &b)| f32::from(b as i8) * scales[at / cols]));
            }
            rotation.rotate(&mut values);
        }
        LinearWeight::Packed(packed) => {
            for matrix in packed {
                values.extend_from_slice(&matrix.to_f32().unwrap().to_f32().unwrap());
            }
        }
    }
    let mut all = Matrix { rows: layer.rows(), cols, values };
    let host = |t: &HostTensor| Matrix {
        rows: t.shape().rows(),
        cols: t.shape().last(),
        values: t.to_f32().unwrap().into_owned(),
    };
    for delta in layer.deltas() {
        let change = host(&delta.up).times(&host(&delta.down));
        for (at, value) in change.values.iter().enumerate() {
            all.values[delta.row * cols + at] += delta.scale * value;
        }
    }
    all
}

/// Loads all layers below a cursor, each by itself.
pub fn loaded(vars: &Vars<'_>) -> BTreeMap<&'static str, Matrix> {
    let mut out = BTreeMap::new();
    for (_, rows, cols, layers) in &LAYERS {
        for layer in *layers {
            let linear = vars.linear(layer, rows / layers.len(), *cols).unwrap();
            out.insert(*layer, effective(&linear));
        }
    }
    out
}

#[track_caller]
pub fn assert_same(
    found: &BTreeMap<&'static str, Matrix>,
    expected: &BTreeMap<&'static str, Matrix>,
    tolerance: f32,
    what: &str,
) {
    assert_eq!(found.len(), expected.len());
    for (layer, expected) in expected {
        found[layer].assert_near(expected, tolerance, &format!("{what}: {layer}"));
    }
}
