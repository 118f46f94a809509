//! LoRAs over models that are stored in few bits: every kind of update must do to the values that a packed weight stands
//! for what it does to the same values written out as f32.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::flux::{File, Matrix, effective};
use common::{Random, over, resolve};
use kiln_tensor::packed::Format;
use kiln_tensor::{HostTensor, LinearMatrix};
use kiln_weights::export::{Container, Names, Options, Storage, export};
use kiln_weights::{Component, Lora, Vars, WeightSource, save};

/// Columns come in the largest block of GGUF, rows in fewer.
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

const MARK: (&str, usize, usize) = ("single_stream_modulation.linear", 3, 1);

/// The model with plain values, as diffusers names them.
fn plain(file: &Path) {
    let mut random = Random(5);
    let mut tensors = Vec::new();
    let mut put = |layer: &str, rows: usize, cols: usize| {
        let values = Matrix::random(&mut random, rows * ROWS, cols * DIM).values;
        let tensor = HostTensor::from_f32([rows * ROWS, cols * DIM], values).unwrap();
        tensors.push((format!("{layer}.weight"), tensor));
    };
    put(MARK.0, MARK.1, MARK.2);
    for (_, rows, cols, layers) in LAYERS {
        layers.iter().for_each(|layer| put(layer, rows / layers.len(), cols));
    }
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    save::save(file, &tensors, &Default::default()).unwrap();
}

/// The model in a form, in the names that files of that form have.
fn stored(folder: &Path, storage: Storage, container: Container, names: Names) -> WeightSource {
    let (from, to) = (folder.join("plain.safetensors"), folder.join("stored"));
    let options = Options { component: Component::Transformer, container, names, storage, threads: 2 };
    export(&WeightSource::open(from).unwrap(), &to, &options, &mut |_, _| Ok(())).unwrap();
    WeightSource::open_component(&to, Component::Transformer).unwrap()
}

/// The same values as f32.
fn widened(source: &WeightSource) -> WeightSource {
    let mut file = File::default();
    for (_, rows, cols, layers) in LAYERS {
        for layer in layers {
            let parts = source.root().linear(layer, rows / layers.len() * ROWS, cols * DIM).unwrap();
            file.put(format!("{layer}.weight"), &effective(&parts));
        }
    }
    WeightSource::from_bytes("wide.safetensors", file.bytes()).unwrap()
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

fn lokr_in_two(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    file.put(format!("{stem}.lokr_w1_a"), &Matrix::random(random, 4, 6));
    file.put(format!("{stem}.lokr_w1_b"), &Matrix::random(random, 6, 8));
    file.put(format!("{stem}.lokr_w2_a"), &Matrix::random(random, rows / 4, 3));
    file.put(format!("{stem}.lokr_w2_b"), &Matrix::random(random, 3, cols / 8));
    file.put_number(format!("{stem}.alpha"), 2.0);
}

/// The left factor in two and the right one whole.
fn lokr_other(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
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

/// Of too high a rank for two thin matrices.
fn thick_loha(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    for part in ["1", "2"] {
        file.put(format!("{stem}.hada_w{part}_a"), &Matrix::random(random, rows, 20));
        file.put(format!("{stem}.hada_w{part}_b"), &Matrix::random(random, 20, cols));
    }
}

fn lengths(file: &mut File, stem: &str, random: &mut Random, rows: usize) {
    let lengths = Matrix::random(random, rows, 1);
    file.put(format!("{stem}.dora_scale"), &Matrix::filled(rows, 1, 6.0).plus(1.0, &lengths));
}

fn dora(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    low_rank(file, stem, random, rows, cols);
    lengths(file, stem, random, rows);
}

fn dora_of_lokr(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    lokr(file, stem, random, rows, cols);
    lengths(file, stem, random, rows);
}

fn difference(file: &mut File, stem: &str, random: &mut Random, rows: usize, cols: usize) {
    file.put(format!("{stem}.diff"), &Matrix::random(random, rows, cols));
}

/// A file for all layers, fused ones in one.
fn fused(stem: impl Fn(&str) -> String, fill: Fill) -> Lora {
    let (mut file, mut random) = (File::default(), Random(9));
    for (name, rows, cols, _) in LAYERS {
        fill(&mut file, &stem(name), &mut random, rows * ROWS, cols * DIM);
    }
    file.lora()
}

/// A file for all layers as diffusers has them.
fn split(stem: impl Fn(&str) -> String, fill: Fill) -> Lora {
    let (mut file, mut random) = (File::default(), Random(9));
    for (_, rows, cols, layers) in LAYERS {
        for layer in layers {
            fill(&mut file, &stem(layer), &mut random, rows / layers.len() * ROWS, cols * DIM);
        }
    }
    file.lora()
}

/// One file of each layout, and of each kind.
fn loras() -> Vec<(&'static str, Lora)> {
    vec![
        ("diffusers", split(|m| format!("transformer.{m}"), low_rank)),
        ("ai-toolkit", fused(|m| format!("diffusion_model.{m}"), low_rank)),
        ("PEFT", fused(|m| format!("base_model.model.{m}"), low_rank)),
        ("kohya", fused(|m| format!("lora_unet_{}", flat(m)), down_up)),
        ("OneTrainer", split(|m| format!("lora_transformer_{}", flat(m)), down_up)),
        ("LyCORIS", split(|m| format!("lycoris_{}", flat(m)), lokr_in_two)),
        ("ai-toolkit LoKr", fused(|m| format!("diffusion_model.{m}"), lokr)),
        ("mixed", split(|m| format!("diffusion_model.{m}"), low_rank)),
        ("LoKr, other factor", fused(|m| format!("diffusion_model.{m}"), lokr_other)),
        ("LoHa", fused(|m| format!("lora_unet_{}", flat(m)), loha)),
        ("LoHa of high rank", split(|m| m.to_owned(), thick_loha)),
        ("DoRA", fused(|m| format!("lora_unet_{}", flat(m)), dora)),
        ("DoRA of a LoKr", fused(|m| format!("lora_unet_{}", flat(m)), dora_of_lokr)),
        ("difference", split(|m| format!("diffusion_model.{m}"), difference)),
    ]
}

fn layers(vars: &Vars<'_>) -> BTreeMap<&'static str, Matrix> {
    let mut out = BTreeMap::new();
    for (_, rows, cols, layers) in LAYERS {
        for layer in layers {
            let parts = vars.linear(layer, rows / layers.len() * ROWS, cols * DIM).unwrap();
            out.insert(*layer, effective(&parts));
        }
    }
    out
}

/// Every LoRA over a model in this form and over its values as f32.
fn compare(what: &str, base: WeightSource) {
    let wide = widened(&base);
    for weight in [1.0, -0.4] {
        for ((name, lora), (_, again)) in loras().into_iter().zip(loras()) {
            let (updates, reports) = resolve(&base, [(lora, weight)]).unwrap();
            let found = layers(&base.root().with_loras(&updates));
            let expected = layers(&wide.root().with_loras(&over(&wide, again, weight)));
            for (layer, found) in &found {
                // Values reach 20; nothing here is rounded but in f32.
                found.assert_near(&expected[layer], 2e-5, &format!("{name} over {what}, {layer}"));
            }
            let report = &reports[0];
            assert_eq!((report.matched, report.unmatched.len()), (report.total, 0), "{name} over {what}");
        }
    }
}

#[test]
fn every_layout_and_kind_goes_over_gguf() {
    let dir = tempfile::tempdir().unwrap();
    plain(&dir.path().join("plain.safetensors"));
    for format in [Format::Q8_0, Format::Q4_0, Format::Q5K, Format::Q4K] {
        let base = stored(dir.path(), Storage::Packed(format), Container::Gguf, Names::Original);
        compare(format.name(), base);
    }
}

#[test]
fn every_layout_and_kind_goes_over_small_floats() {
    let dir = tempfile::tempdir().unwrap();
    plain(&dir.path().join("plain.safetensors"));
    for (format, names) in [
        (Format::F8E4M3, Names::Original),
        (Format::F8E4M3, Names::Diffusers),
        (Format::NvFp4, Names::Original),
        (Format::NvFp4, Names::Diffusers),
    ] {
        let base = stored(dir.path(), Storage::Packed(format), Container::Safetensors, names);
        compare(format.name(), base);
    }
}

#[test]
fn thin_updates_are_the_products_they_stand_for() {
    let (rows, cols) = (ROWS, DIM);
    let layer = "transformer_blocks.0.attn.to_out.0";
    let mut random = Random(11);
    let old = Matrix::random(&mut random, rows, cols);
    let mut base = File::default();
    base.put(format!("{layer}.weight"), &old);
    let base = WeightSource::from_bytes("model.safetensors", base.bytes()).unwrap();
    let fills: [(&str, Fill); 3] = [("in two", lokr_in_two), ("other", lokr_other), ("LoHa", loha)];
    for (what, fill) in fills {
        let mut file = File::default();
        fill(&mut file, layer, &mut random, rows, cols);
        let part = |key: &str| {
            let (shape, values) = &file.tensors[&format!("{layer}.{key}")];
            Matrix { rows: shape[0], cols: shape[1], values: values.clone() }
        };
        let product = |a: &str, b: &str| part(a).times(&part(b));
        let (update, scale) = match what {
            // Alpha 2 over the right factor's rank 3.
            "in two" => {
                (product("lokr_w1_a", "lokr_w1_b").kron(&product("lokr_w2_a", "lokr_w2_b")), 2.0 / 3.0)
            }
            "other" => (product("lokr_w1_a", "lokr_w1_b").kron(&part("lokr_w2")), 1.0),
            _ => {
                let (a, b) = (product("hada_w1_a", "hada_w1_b"), product("hada_w2_a", "hada_w2_b"));
                (Matrix::each(rows, cols, |i, j| a.row(i)[j] * b.row(i)[j]), 1.0)
            }
        };
        let updates = over(&base, file.lora(), 0.5);
        let parts = base.root().with_loras(&updates).linear(layer, rows, cols).unwrap();
        assert!(matches!(parts.matrix(), LinearMatrix::Dense(_)) && parts.deltas().len() == 1, "{what}");
        effective(&parts).assert_near(&old.plus(0.5 * scale, &update), 1e-5, what);
    }
}

#[test]
fn an_update_that_changes_the_weight_leaves_its_bytes_where_they_are() {
    let dir = tempfile::tempdir().unwrap();
    plain(&dir.path().join("plain.safetensors"));
    let base = stored(dir.path(), Storage::Packed(Format::Q8_0), Container::Gguf, Names::Original);
    let layer = |vars: &Vars<'_>| vars.linear("transformer_blocks.0.attn.to_k", ROWS, DIM).unwrap();
    let packed = |vars: &Vars<'_>| match layer(vars).matrix() {
        LinearMatrix::Packed(packed) => packed[0].clone(),
        other => panic!("expected packed matrices, found {other:?}"),
    };
    let bytes = |vars: &Vars<'_>| packed(vars).bytes().as_ptr();
    let before = bytes(&base.root());
    for (name, lora) in loras() {
        let updates = over(&base, lora, 1.0);
        let vars = base.root().with_loras(&updates);
        assert_eq!(bytes(&vars), before, "{name}");
        let thin = !["ai-toolkit LoKr", "LoHa of high rank", "difference", "DoRA of a LoKr"].contains(&name);
        assert_eq!(!layer(&vars).deltas().is_empty(), thin, "{name}");
        assert_eq!(packed(&vars).is_changed(), !thin || name == "DoRA", "{name}");
    }
}
