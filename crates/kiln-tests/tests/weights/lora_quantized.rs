//! LoRAs on quantized models: every kind of update must change a packed weight exactly as it changes the dequantized f32
//! weight.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::flux::{File, Matrix, effective};
use crate::common::{Random, apply, resolve};
use kiln_tensor::packed::Format;
use kiln_tensor::{HostTensor, LinearWeight};
use kiln_weights::export::{Container, Options, Storage, TensorNames, export};
use kiln_weights::{Component, Lora, Vars, WeightSource, save};

/// Columns are a multiple of GGUF's largest block; rows are fewer.
const DIM: usize = 256;
const ROWS: usize = 32;

/// Layers in Black Forest Labs' naming, with rows and columns in these units, and the model's names.
const LAYERS: [(&str, usize, usize, &[&str]); 5] = [
    (
        "double_blocks.0.img_attn.qkv",
        3,
        1,
        &[
            "transformer_blocks.0.attn.to_q",
            "transformer_blocks.0.attn.to_k",
            "transformer_blocks.0.attn.to_v",
        ],
    ),
    ("double_blocks.0.img_attn.proj", 1, 1, &["transformer_blocks.0.attn.to_out.0"]),
    ("single_blocks.0.linear1", 9, 1, &["single_transformer_blocks.0.attn.to_qkv_mlp_proj"]),
    ("single_blocks.0.linear2", 1, 2, &["single_transformer_blocks.0.attn.to_out"]),
    ("final_layer.adaLN_modulation.1", 2, 1, &["norm_out.linear"]),
];

/// The tensor by which a transformer is recognized.
const ANCHOR: (&str, usize, usize) = ("single_stream_modulation.linear", 3, 1);

/// Writes the model in f32, in diffusers' naming.
fn save_dense(file: &Path) {
    let mut random = Random(5);
    let mut tensors = Vec::new();
    let mut put = |layer: &str, rows: usize, cols: usize| {
        let values = Matrix::random(&mut random, rows * ROWS, cols * DIM).values;
        let tensor = HostTensor::from_f32([rows * ROWS, cols * DIM], values).unwrap();
        tensors.push((format!("{layer}.weight"), tensor));
    };
    put(ANCHOR.0, ANCHOR.1, ANCHOR.2);
    for (_, rows, cols, layers) in LAYERS {
        layers.iter().for_each(|layer| put(layer, rows / layers.len(), cols));
    }
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    save::save(file, &tensors, &Default::default()).unwrap();
}

/// Converts the model, and opens the result.
fn converted(folder: &Path, storage: Storage, container: Container, names: TensorNames) -> WeightSource {
    let (from, to) = (folder.join("plain.safetensors"), folder.join("stored"));
    let options = Options { component: Component::Transformer, container, names, storage, threads: 2 };
    export(&WeightSource::open(from).unwrap(), &to, &options, &mut |_, _| Ok(())).unwrap();
    WeightSource::open_component(&to, Component::Transformer).unwrap()
}

/// The same model, dequantized to f32.
fn dequantized(source: &WeightSource) -> WeightSource {
    let mut file = File::default();
    for (_, rows, cols, layers) in LAYERS {
        for layer in layers {
            let linear = source.root().linear(layer, rows / layers.len() * ROWS, cols * DIM).unwrap();
            file.put(format!("{layer}.weight"), &effective(&linear));
        }
    }
    WeightSource::from_bytes("dequantized.safetensors", file.bytes()).unwrap()
}

fn flat(name: &str) -> String {
    name.replace('.', "_")
}

type Fill = fn(&mut File, &str, &mut Random, usize, usize);

fn low_rank(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    file.put(format!("{stem}.lora_A.weight"), &Matrix::random(random, 4, cols));
    file.put(format!("{stem}.lora_B.weight"), &Matrix::random(random, rows, 4));
}

fn down_up(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    file.put(format!("{stem}.lora_down.weight"), &Matrix::random(random, 2, cols));
    file.put(format!("{stem}.lora_up.weight"), &Matrix::random(random, rows, 2));
    file.put_number(format!("{stem}.alpha"), 1.0);
}

fn lokr(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    file.put(format!("{stem}.lokr_w1"), &Matrix::random(random, 8, 16));
    file.put(format!("{stem}.lokr_w2"), &Matrix::random(random, rows / 8, cols / 16));
}

fn lokr_products(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    file.put(format!("{stem}.lokr_w1_a"), &Matrix::random(random, 4, 6));
    file.put(format!("{stem}.lokr_w1_b"), &Matrix::random(random, 6, 8));
    file.put(format!("{stem}.lokr_w2_a"), &Matrix::random(random, rows / 4, 3));
    file.put(format!("{stem}.lokr_w2_b"), &Matrix::random(random, 3, cols / 8));
    file.put_number(format!("{stem}.alpha"), 2.0);
}

/// The left factor as a product and the right one as one matrix.
fn lokr_left_product(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    file.put(format!("{stem}.lokr_w1_a"), &Matrix::random(random, rows / 8, 2));
    file.put(format!("{stem}.lokr_w1_b"), &Matrix::random(random, 2, cols / 4));
    file.put(format!("{stem}.lokr_w2"), &Matrix::random(random, 8, 4));
}

fn loha(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    for part in ["1", "2"] {
        file.put(format!("{stem}.hada_w{part}_a"), &Matrix::random(random, rows, 3));
        file.put(format!("{stem}.hada_w{part}_b"), &Matrix::random(random, 3, cols));
    }
}

/// Of too high a rank for an expansion to two low-rank matrices.
fn high_rank_loha(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    for part in ["1", "2"] {
        file.put(format!("{stem}.hada_w{part}_a"), &Matrix::random(random, rows, 20));
        file.put(format!("{stem}.hada_w{part}_b"), &Matrix::random(random, 20, cols));
    }
}

fn magnitudes(file: &mut File, stem: &str, random: &mut Random, rows: usize) {
    let magnitudes = Matrix::random(random, rows, 1);
    file.put(format!("{stem}.dora_scale"), &Matrix::filled(rows, 1, 6.0).plus(1.0, &magnitudes));
}

fn dora(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    low_rank(file, stem, random, rows, cols);
    magnitudes(file, stem, random, rows);
}

fn dora_of_lokr(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    lokr(file, stem, random, rows, cols);
    magnitudes(file, stem, random, rows);
}

fn difference(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    file.put(format!("{stem}.diff"), &Matrix::random(random, rows, cols));
}

/// A LoRA for all layers in Black Forest Labs' naming.
fn fused(stem: impl Fn(&str) -> String, fill: Fill) -> Lora {
    let (mut file, mut random) = (File::default(), Random(9));
    for (name, rows, cols, _) in LAYERS {
        fill(&mut file, &stem(name), &mut random, rows * ROWS, cols * DIM);
    }
    file.lora()
}

/// A LoRA for all layers in diffusers' naming.
fn split(stem: impl Fn(&str) -> String, fill: Fill) -> Lora {
    let (mut file, mut random) = (File::default(), Random(9));
    for (_, rows, cols, layers) in LAYERS {
        for layer in layers {
            fill(&mut file, &stem(layer), &mut random, rows / layers.len() * ROWS, cols * DIM);
        }
    }
    file.lora()
}

/// A LoRA of each layout and of each kind.
fn loras() -> Vec<(&'static str, Lora)> {
    vec![
        ("diffusers", split(|m| format!("transformer.{m}"), low_rank)),
        ("ai-toolkit", fused(|m| format!("diffusion_model.{m}"), low_rank)),
        ("PEFT", fused(|m| format!("base_model.model.{m}"), low_rank)),
        ("kohya", fused(|m| format!("lora_unet_{}", flat(m)), down_up)),
        ("OneTrainer", split(|m| format!("lora_transformer_{}", flat(m)), down_up)),
        ("LyCORIS", split(|m| format!("lycoris_{}", flat(m)), lokr_products)),
        ("ai-toolkit LoKr", fused(|m| format!("diffusion_model.{m}"), lokr)),
        ("mixed", split(|m| format!("diffusion_model.{m}"), low_rank)),
        ("LoKr, left factor a product", fused(|m| format!("diffusion_model.{m}"), lokr_left_product)),
        ("LoHa", fused(|m| format!("lora_unet_{}", flat(m)), loha)),
        ("LoHa of high rank", split(|m| m.to_owned(), high_rank_loha)),
        ("DoRA", fused(|m| format!("lora_unet_{}", flat(m)), dora)),
        ("DoRA of a LoKr", fused(|m| format!("lora_unet_{}", flat(m)), dora_of_lokr)),
        ("difference", split(|m| format!("diffusion_model.{m}"), difference)),
    ]
}

fn layers(vars: &Vars<'_>) -> BTreeMap<&'static str, Matrix> {
    let mut out = BTreeMap::new();
    for (_, rows, cols, layers) in LAYERS {
        for layer in layers {
            let linear = vars.linear(layer, rows / layers.len() * ROWS, cols * DIM).unwrap();
            out.insert(*layer, effective(&linear));
        }
    }
    out
}

/// Compares every LoRA on a quantized model and on the dequantized one.
fn compare(what: &str, base: WeightSource) {
    let dequantized = dequantized(&base);
    for weight in [1.0, -0.4] {
        for ((name, lora), (_, again)) in loras().into_iter().zip(loras()) {
            let (updates, reports) = resolve(&base, [(lora, weight)]).unwrap();
            let found = layers(&base.root().with_loras(&updates));
            let expected = layers(&dequantized.root().with_loras(&apply(&dequantized, again, weight)));
            for (layer, found) in &found {
                // Values reach 20; all rounding is that of f32.
                found.assert_near(&expected[layer], 2e-5, &format!("{name} on {what}, {layer}"));
            }
            let report = &reports[0];
            assert_eq!((report.matched, report.unmatched.len()), (report.total, 0), "{name} on {what}");
        }
    }
}

#[test]
fn every_layout_and_kind_works_on_gguf() {
    let dir = tempfile::tempdir().unwrap();
    save_dense(&dir.path().join("plain.safetensors"));
    for format in [Format::Q8_0, Format::Q4_0, Format::Q5K, Format::Q4K] {
        let base = converted(dir.path(), Storage::Quantized(format), Container::Gguf, TensorNames::Original);
        compare(format.name(), base);
    }
}

#[test]
fn every_layout_and_kind_works_on_fp8_and_nvfp4() {
    let dir = tempfile::tempdir().unwrap();
    save_dense(&dir.path().join("plain.safetensors"));
    for (format, names) in [
        (Format::F8E4M3, TensorNames::Original),
        (Format::F8E4M3, TensorNames::Diffusers),
        (Format::NvFp4, TensorNames::Original),
        (Format::NvFp4, TensorNames::Diffusers),
    ] {
        let base = converted(dir.path(), Storage::Quantized(format), Container::Safetensors, names);
        compare(format.name(), base);
    }
}

#[test]
fn expanded_updates_equal_their_definition() {
    let (rows, cols) = (ROWS, DIM);
    let layer = "transformer_blocks.0.attn.to_out.0";
    let mut random = Random(11);
    let old = Matrix::random(&mut random, rows, cols);
    let mut base = File::default();
    base.put(format!("{layer}.weight"), &old);
    let base = WeightSource::from_bytes("model.safetensors", base.bytes()).unwrap();
    let fills: [(&str, Fill); 3] =
        [("products", lokr_products), ("left product", lokr_left_product), ("LoHa", loha)];
    for (what, fill) in fills {
        let mut file = File::default();
        fill(&mut file, layer, &mut random, rows, cols);
        let tensor = |key: &str| {
            let (shape, values) = &file.tensors[&format!("{layer}.{key}")];
            Matrix { rows: shape[0], cols: shape[1], values: values.clone() }
        };
        let product = |a: &str, b: &str| tensor(a).times(&tensor(b));
        let (update, scale) = match what {
            // Alpha 2 over the right factor's rank 3.
            "products" => {
                (product("lokr_w1_a", "lokr_w1_b").kron(&product("lokr_w2_a", "lokr_w2_b")), 2.0 / 3.0)
            }
            "left product" => (product("lokr_w1_a", "lokr_w1_b").kron(&tensor("lokr_w2")), 1.0),
            _ => {
                let (a, b) = (product("hada_w1_a", "hada_w1_b"), product("hada_w2_a", "hada_w2_b"));
                (Matrix::from_fn(rows, cols, |i, j| a.row(i)[j] * b.row(i)[j]), 1.0)
            }
        };
        let updates = apply(&base, file.lora(), 0.5);
        let linear = base.root().with_loras(&updates).linear(layer, rows, cols).unwrap();
        assert!(matches!(linear.weight(), LinearWeight::Dense(_)) && linear.deltas().len() == 1, "{what}");
        effective(&linear).assert_near(&old.plus(0.5 * scale, &update), 1e-5, what);
    }
}

#[test]
fn a_patched_weight_is_not_copied() {
    let dir = tempfile::tempdir().unwrap();
    save_dense(&dir.path().join("plain.safetensors"));
    let base =
        converted(dir.path(), Storage::Quantized(Format::Q8_0), Container::Gguf, TensorNames::Original);
    let layer = |vars: &Vars<'_>| vars.linear("transformer_blocks.0.attn.to_k", ROWS, DIM).unwrap();
    let packed = |vars: &Vars<'_>| match layer(vars).weight() {
        LinearWeight::Packed(packed) => packed[0].clone(),
        other => panic!("expected packed matrices, found {other:?}"),
    };
    let bytes = |vars: &Vars<'_>| packed(vars).bytes().as_ptr();
    let before = bytes(&base.root());
    for (name, lora) in loras() {
        let updates = apply(&base, lora, 1.0);
        let vars = base.root().with_loras(&updates);
        assert_eq!(bytes(&vars), before, "{name}");
        let low_rank =
            !["ai-toolkit LoKr", "LoHa of high rank", "difference", "DoRA of a LoKr"].contains(&name);
        assert_eq!(!layer(&vars).deltas().is_empty(), low_rank, "{name}");
        assert_eq!(packed(&vars).is_patched(), !low_rank || name == "DoRA", "{name}");
    }
}
