//! One update in the layout of each trainer: every file must change every layer in the same way.

use std::collections::BTreeMap;

use crate::common::flux::{DIM, File, LAYERS, Matrix, assert_same, effective, loaded, model, split, weights};
use crate::common::{Random, apply, layers, resolve};
use kiln_weights::{
    LayerShape, LinearPrecision, Lora, LoraBase, LoraLayout, LoraOptions, LoraReport, LoraUpdates,
    WeightSource,
};

const RANK: usize = 3;
const ALPHA: f32 = 6.0;

/// Down and up matrices of every layer in Black Forest Labs' naming; the update is `ALPHA / RANK` times their product.
fn updates_fused() -> BTreeMap<&'static str, [Matrix; 2]> {
    let mut random = Random(7);
    let pair = |&(name, rows, cols, _): &(&'static str, usize, usize, &[&str])| {
        let down = Matrix::random(&mut random, RANK, cols);
        (name, [down, Matrix::random(&mut random, rows, RANK)])
    };
    LAYERS.iter().map(pair).collect()
}

/// The same for diffusers' layers: q, k and v separately, and the halves of the adaLN swapped.
fn updates_split() -> BTreeMap<&'static str, [Matrix; 2]> {
    let ups = updates_fused().into_iter().map(|(name, [_, up])| (name, up)).collect();
    let mut ups = split(&ups);
    let mut out = BTreeMap::new();
    for (name, [down, _]) in updates_fused() {
        let (_, _, _, layers) = LAYERS.iter().find(|layer| layer.0 == name).unwrap();
        out.extend(layers.iter().map(|layer| (*layer, [down.clone(), ups.remove(layer).unwrap()])));
    }
    out
}

fn expected(weight: f32) -> BTreeMap<&'static str, Matrix> {
    let mut layers = split(&weights(1));
    for (layer, [down, up]) in updates_split() {
        let changed = layers[layer].plus(weight * ALPHA / RANK as f32, &up.times(&down));
        layers.insert(layer, changed);
    }
    layers
}

type StemOf = fn(&str) -> String;

fn flat(name: &str) -> String {
    name.replace('.', "_")
}

/// Down and up matrices for each module, and its alpha.
fn low_rank(modules: BTreeMap<&'static str, [Matrix; 2]>, name: StemOf, [down, up]: [&str; 2]) -> File {
    let mut file = File::default();
    for (module, matrices) in modules {
        let stem = name(module);
        file.put(format!("{stem}{down}"), &matrices[0]);
        file.put(format!("{stem}{up}"), &matrices[1]);
        file.put_number(format!("{stem}.alpha"), ALPHA);
    }
    file
}

const AB: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];
const DOWN_UP: [&str; 2] = [".lora_down.weight", ".lora_up.weight"];

/// OneTrainer's layout, with slices of fused layers: q, k, v, and the MLP of a single block.
fn onetrainer() -> File {
    let mut modules = BTreeMap::new();
    for (module, [down, up]) in updates_fused() {
        let name = format!("transformer.{module}");
        let slices: &[usize] = match module {
            _ if module.ends_with(".qkv") => &[DIM, DIM, DIM],
            _ if module.ends_with(".linear1") => &[DIM, DIM, DIM, 6 * DIM],
            _ => &[],
        };
        let mut from = 0;
        for (i, rows) in slices.iter().enumerate() {
            modules.insert(format!("{name}.{i}"), [down.clone(), up.take(from, *rows)]);
            from += rows;
        }
        if slices.is_empty() {
            modules.insert(name, [down, up]);
        }
    }
    let mut file = File::default();
    for (stem, [down, up]) in modules {
        file.put(format!("{stem}.lora_down.weight"), &down);
        file.put(format!("{stem}.lora_up.weight"), &up);
        file.put_number(format!("{stem}.alpha"), ALPHA);
    }
    file
}

/// OneTrainer's own names, which are diffusers' except for q, k and v in one module.
fn onetrainer_fused() -> File {
    let mut modules = updates_split();
    for (fused, layers, name) in [
        ("double_blocks.0.img_attn.qkv", ["to_q", "to_k", "to_v"], "transformer_blocks.0.attn.qkv"),
        (
            "double_blocks.0.txt_attn.qkv",
            ["add_q_proj", "add_k_proj", "add_v_proj"],
            "transformer_blocks.0.attn.added_qkv",
        ),
    ] {
        for layer in layers {
            assert!(modules.remove(format!("transformer_blocks.0.attn.{layer}").as_str()).is_some());
        }
        modules.insert(name, updates_fused().remove(fused).unwrap());
    }
    low_rank(modules, |m| format!("transformer.{m}"), DOWN_UP)
}

/// diffusers' layout with alpha in the metadata.
fn diffusers_with_metadata() -> File {
    let mut file = low_rank(updates_split(), |m| format!("transformer.{m}"), AB);
    file.tensors.retain(|key, _| !key.ends_with(".alpha"));
    let settings = format!(r#"{{"transformer.r":{RANK},"transformer.lora_alpha":{ALPHA}}}"#);
    file.metadata.insert("lora_adapter_metadata".into(), settings);
    file
}

/// The same update as a LoKr, with the second factor as one matrix or as a product.
fn lokr(modules: BTreeMap<&'static str, [Matrix; 2]>, name: StemOf, product: bool) -> File {
    let mut file = File::default();
    for (module, [down, up]) in modules {
        let stem = name(module);
        file.put_number(format!("{stem}.alpha"), ALPHA);
        if product {
            file.put(format!("{stem}.lokr_w1"), &Matrix::filled(1, 1, 1.0));
            file.put(format!("{stem}.lokr_w2_a"), &up);
            file.put(format!("{stem}.lokr_w2_b"), &down);
        } else {
            // Without a rank, alpha is ignored.
            file.put(format!("{stem}.lokr_w1"), &Matrix::filled(1, 1, ALPHA / RANK as f32));
            file.put(format!("{stem}.lokr_w2"), &up.times(&down));
        }
    }
    file
}

fn loha(modules: BTreeMap<&'static str, [Matrix; 2]>, name: StemOf) -> File {
    let mut file = File::default();
    for (module, [down, up]) in modules {
        let stem = name(module);
        file.put_number(format!("{stem}.alpha"), ALPHA);
        file.put(format!("{stem}.hada_w2_a"), &Matrix::filled(up.rows, 2, 0.5));
        file.put(format!("{stem}.hada_w2_b"), &Matrix::filled(2, down.cols, 1.0));
        file.put(format!("{stem}.hada_w1_a"), &up);
        file.put(format!("{stem}.hada_w1_b"), &down);
    }
    file
}

fn differences() -> File {
    let mut file = File::default();
    for (module, [down, up]) in updates_fused() {
        let scaled = Matrix::filled(up.rows, down.cols, 0.0).plus(ALPHA / RANK as f32, &up.times(&down));
        file.put(format!("diffusion_model.{module}.diff"), &scaled);
    }
    file
}

fn all_layouts() -> Vec<(&'static str, LoraLayout, File)> {
    use LoraLayout::*;
    let sformer: StemOf = |m| match m.strip_prefix("transformer_blocks.") {
        Some(rest) => format!("diffusion_model.sformer_blocks.{rest}"),
        None => format!("diffusion_model.{m}"),
    };
    vec![
        ("diffusers", Diffusers, low_rank(updates_split(), |m| format!("transformer.{m}"), AB)),
        (
            "diffusers, down and up",
            Diffusers,
            low_rank(updates_split(), |m| format!("transformer.{m}"), DOWN_UP),
        ),
        ("diffusers, metadata", Diffusers, diffusers_with_metadata()),
        ("ai-toolkit", Original, low_rank(updates_fused(), |m| format!("diffusion_model.{m}"), AB)),
        (
            "ai-toolkit, down and up",
            Original,
            low_rank(updates_fused(), |m| format!("diffusion_model.{m}"), DOWN_UP),
        ),
        ("ComfyUI", Original, low_rank(updates_fused(), |m| format!("model.diffusion_model.{m}"), DOWN_UP)),
        ("fal", Peft, low_rank(updates_fused(), |m| format!("base_model.model.{m}"), AB)),
        (
            "PEFT, adapter named",
            Peft,
            low_rank(
                updates_split(),
                |m| format!("base_model.model.{m}"),
                [".lora_A.default.weight", ".lora_B.default.weight"],
            ),
        ),
        (
            "PEFT, adapter of another name",
            Peft,
            low_rank(
                updates_split(),
                |m| format!("base_model.model.{m}"),
                [".lora_A.default_0.weight", ".lora_B.default_0.weight"],
            ),
        ),
        ("UNet's prefix", Unet, low_rank(updates_split(), |m| format!("unet.{m}"), AB)),
        ("UNet's prefix, original names", Unet, low_rank(updates_fused(), |m| format!("unet.{m}"), AB)),
        (
            "UNet's and PEFT's prefix",
            Unet,
            low_rank(updates_split(), |m| format!("unet.base_model.model.{m}"), AB),
        ),
        ("OneTrainer, fused", Diffusers, onetrainer_fused()),
        ("kohya", Kohya, low_rank(updates_fused(), |m| format!("lora_unet_{}", flat(m)), DOWN_UP)),
        ("OneTrainer, slices", OneTrainer, onetrainer()),
        (
            "OneTrainer, flat",
            OneTrainer,
            low_rank(updates_split(), |m| format!("lora_transformer_{}", flat(m)), DOWN_UP),
        ),
        ("LyCORIS LoKr", Lycoris, lokr(updates_split(), |m| format!("lycoris_{}", flat(m)), true)),
        ("bare LoKr", Bare, lokr(updates_split(), |m| m.to_owned(), false)),
        ("ai-toolkit LoKr", Original, lokr(updates_fused(), |m| format!("diffusion_model.{m}"), true)),
        (
            "ai-toolkit LoKr, one matrix",
            Original,
            lokr(updates_fused(), |m| format!("diffusion_model.{m}"), false),
        ),
        ("LoHa", Lycoris, loha(updates_split(), |m| format!("lycoris_{}", flat(m)))),
        ("LoHa on fused layers", Kohya, loha(updates_fused(), |m| format!("lora_unet_{}", flat(m)))),
        ("mixed", Mixed, low_rank(updates_split(), |m| format!("diffusion_model.{m}"), AB)),
        ("sformer", Mixed, low_rank(updates_split(), sformer, AB)),
        ("bare", Bare, low_rank(updates_split(), |m| m.to_owned(), AB)),
        ("bare, original names", Bare, low_rank(updates_fused(), |m| m.to_owned(), AB)),
        ("differences", Original, differences()),
    ]
}

#[test]
fn every_layout_changes_every_layer_in_the_same_way() {
    for (what, layout, file) in all_layouts() {
        for weight in [1.0, -0.5] {
            let base = model(&weights(1));
            let lora = file.lora();
            assert_eq!(lora.layouts(), [layout], "{what}");
            assert_eq!(lora.base(), Some(LoraBase::Flux2 { dim: DIM }), "{what}");
            let (updates, reports) = resolve(&base, [(lora, weight)]).unwrap();
            assert_same(&loaded(&base.root().with_loras(&updates)), &expected(weight), 2e-5, what);
            let report = &reports[0];
            assert_eq!((report.matched, report.unmatched.len()), (report.total, 0), "{what}: {report}");
        }
    }
}

#[test]
fn a_fused_update_of_a_stack_is_one_product() {
    let base = model(&weights(1));
    let updates = apply(&base, low_rank(updates_fused(), |m| format!("diffusion_model.{m}"), AB).lora(), 1.0);
    let stack = ["to_q", "to_k", "to_v"].map(|leaf| (leaf, DIM));
    let attn = base.root().with_loras(&updates).at("transformer_blocks").at(0).at("attn");
    let qkv = attn.linear_stack(&stack, DIM).unwrap();
    assert_eq!(qkv.deltas().iter().map(|d| (d.row, d.rows())).collect::<Vec<_>>(), [(0, 3 * DIM)]);
    // In another order of rows, the update can't be one product.
    let reordered = attn.linear_stack(&["to_v", "to_q"].map(|leaf| (leaf, DIM)), DIM).unwrap();
    assert_eq!(
        reordered.deltas().iter().map(|d| (d.row, d.rows())).collect::<Vec<_>>(),
        [(0, DIM), (DIM, DIM)]
    );
    let all = expected(1.0);
    let rows = |layer: &str| all[format!("transformer_blocks.0.attn.{layer}").as_str()].clone();
    effective(&qkv).assert_near(&rows("to_q").stack(&rows("to_k")).stack(&rows("to_v")), 2e-5, "qkv");
    effective(&reordered).assert_near(&rows("to_v").stack(&rows("to_q")), 2e-5, "vq");
}

#[test]
fn a_kronecker_product_may_span_q_k_and_v() {
    let mut random = Random(3);
    // 18 rows as 2 times 9: the factor's blocks end in the middle of k.
    let (left, right) = (Matrix::random(&mut random, 2, 3), Matrix::random(&mut random, 9, 2));
    let mut file = File::default();
    let stem = "diffusion_model.double_blocks.0.img_attn.qkv";
    file.put(format!("{stem}.lokr_w1"), &left);
    file.put(format!("{stem}.lokr_w2"), &right);
    let base = model(&weights(1));
    let (updates, reports) = resolve(&base, [(file.lora(), 0.75)]).unwrap();
    let mut fused = weights(1);
    let changed = fused["double_blocks.0.img_attn.qkv"].plus(0.75, &left.kron(&right));
    fused.insert("double_blocks.0.img_attn.qkv", changed);
    assert_same(&loaded(&base.root().with_loras(&updates)), &split(&fused), 1e-6, "LoKr");
    assert_eq!(reports[0].to_string(), "lora style.safetensors: 1 of 1 modules, LoKr, weight 0.75");
}

#[test]
fn alpha_counts_only_if_a_factor_of_a_lokr_is_a_product() {
    let mut random = Random(4);
    let factors = |file: &mut File, w1: &[(&str, [usize; 2])], random: &mut Random| -> Vec<Matrix> {
        let mut put = |&(key, [rows, cols]): &(&str, [usize; 2])| {
            let matrix = Matrix::random(random, rows, cols);
            file.put(format!("lycoris_proj_out.{key}"), &matrix);
            matrix
        };
        w1.iter().map(&mut put).collect()
    };
    let scale = |keys: &[(&str, [usize; 2])], random: &mut Random| {
        let mut file = File::default();
        factors(&mut file, keys, random);
        file.put_number("lycoris_proj_out.alpha", 4.0);
        file.lora().scale("proj_out").unwrap()
    };
    let (w1, w2) = (("lokr_w1", [2, 2]), ("lokr_w2", [2, 3]));
    let (w1_a, w1_b) = (("lokr_w1_a", [2, 8]), ("lokr_w1_b", [8, 2]));
    let (w2_a, w2_b) = (("lokr_w2_a", [2, 2]), ("lokr_w2_b", [2, 3]));
    assert_eq!(scale(&[w1, w2], &mut random), 1.0);
    assert_eq!(scale(&[w1, w2_a, w2_b], &mut random), 2.0);
    assert_eq!(scale(&[w1_a, w1_b, w2], &mut random), 0.5);
    // The second factor's rank counts if both are products.
    assert_eq!(scale(&[w1_a, w1_b, w2_a, w2_b], &mut random), 2.0);
}

/// `magnitude / ‖W + ΔW‖ · (W + ΔW)`, row by row.
fn with_magnitudes(sum: &Matrix, magnitudes: &[f32]) -> Matrix {
    Matrix::from_fn(sum.rows, sum.cols, |i, j| {
        let norm = sum.row(i).iter().map(|v| v * v).sum::<f32>().sqrt();
        magnitudes[i] / norm * sum.row(i)[j]
    })
}

#[test]
fn a_dora_gives_the_rows_of_the_sum_their_magnitudes() {
    for (name, magnitude, shape) in [
        (None, ".lora_magnitude_vector", vec![3 * DIM]),
        (None, ".lora_magnitude_vector.default.weight", vec![3 * DIM]),
        (Some("lora_unet_"), ".dora_scale", vec![3 * DIM, 1]),
    ] {
        let fused = "double_blocks.0.txt_attn.qkv";
        let stem = match name {
            Some(start) => format!("{start}{}", flat(fused)),
            None => format!("base_model.model.{fused}"),
        };
        let [down, up] = updates_fused()[fused].clone();
        let magnitudes: Vec<f32> = (0..3 * DIM).map(|i| 0.5 + i as f32 / 10.0).collect();
        let mut file = File::default();
        file.put(format!("{stem}.lora_A.weight"), &down);
        file.put(format!("{stem}.lora_B.weight"), &up);
        file.tensors.insert(format!("{stem}{magnitude}"), (shape, magnitudes.clone()));
        for weight in [1.0, 0.5, -1.0, 0.0] {
            let base = model(&weights(1));
            let updates = apply(&base, file.lora(), weight);
            let mut layers = weights(1);
            let old = &layers[fused];
            let new = with_magnitudes(&old.plus(1.0, &up.times(&down)), &magnitudes);
            // Other weights interpolate, so that 0 is off.
            let changed = old.plus(weight, &new.plus(-1.0, old));
            layers.insert(fused, changed);
            let found = loaded(&base.root().with_loras(&updates));
            assert_same(&found, &split(&layers), 1e-5, magnitude);
        }
    }
}

#[test]
fn a_dora_of_columns_has_norms_of_columns() {
    let (layer, original) = ("proj_out", "final_layer.linear");
    let [down, up] = updates_fused()[original].clone();
    let magnitudes: Vec<f32> = (0..DIM).map(|i| 1.0 + i as f32).collect();
    let mut file = File::default();
    file.put(format!("{layer}.lora_A.weight"), &down);
    file.put(format!("{layer}.lora_B.weight"), &up);
    file.tensors.insert(format!("{layer}.dora_scale"), (vec![1, DIM], magnitudes.clone()));
    let base = model(&weights(1));
    let updates = apply(&base, file.lora(), 1.0);
    let sum = weights(1)[original].plus(1.0, &up.times(&down));
    let new = Matrix::from_fn(sum.rows, sum.cols, |i, j| {
        let norm = (0..sum.rows).map(|i| sum.row(i)[j].powi(2)).sum::<f32>().sqrt();
        magnitudes[j] / norm * sum.row(i)[j]
    });
    let found = base.root().with_loras(&updates).linear(layer, 4, DIM).unwrap();
    effective(&found).assert_near(&new, 1e-5, "columns");
}

#[test]
fn every_kind_works_on_int8() {
    let precision = LinearPrecision::Int8 { threads: 2 };
    for (what, _, file) in all_layouts() {
        let base = model(&weights(1));
        let updates = apply(&base, file.lora(), 1.0);
        let found = loaded(&base.root().with_precision(precision).with_loras(&updates));
        // Merged weights reach 10; half a step of 127.
        assert_same(&found, &expected(1.0), 0.08, what);
    }
}

#[test]
fn extra_bytes_of_a_lora() {
    let elements: u64 = LAYERS.iter().map(|(_, rows, cols, _)| (rows * cols) as u64).sum();
    for (what, _, file) in all_layouts() {
        let lora = file.lora();
        // A plain LoRA takes nothing, a full-rank update only the layers that are quantized again.
        let expected = match &lora.kinds()[..] {
            ["LoRA"] => Some([0, 0]),
            ["LoKr"] if lora.rank() == 0 => Some([0, elements]),
            ["difference"] => Some([0, elements]),
            _ => None,
        };
        let found = [false, true].map(|int8| lora.extra_bytes(2, int8));
        assert!(expected.is_none_or(|expected| expected == found), "{what}: {found:?}");
    }
    // Two matrices of rank 2 · 3 instead of one of 20 × 30.
    let mut file = File::default();
    file.put("proj_out.lokr_w1", &Matrix::filled(2, 3, 1.0));
    file.put("proj_out.lokr_w2_a", &Matrix::filled(10, 3, 1.0));
    file.put("proj_out.lokr_w2_b", &Matrix::filled(3, 10, 1.0));
    assert_eq!(file.lora().extra_bytes(2, true), 2 * 6 * (20 + 30));
}

#[test]
fn kinds_add_up() {
    let base = model(&weights(1));
    let loras = [
        (onetrainer().lora(), 0.5),
        (lokr(updates_fused(), |m| format!("diffusion_model.{m}"), true).lora(), 0.25),
        (loha(updates_split(), |m| format!("lycoris_{}", flat(m))).lora(), -1.0),
    ];
    let (updates, _) = resolve(&base, loras).unwrap();
    assert_same(&loaded(&base.root().with_loras(&updates)), &expected(-0.25), 2e-5, "sum");
}

#[test]
fn loras_do_not_change_the_source() {
    let base = model(&weights(1));
    let updates = apply(&base, differences().lora(), 1.0);
    assert_same(&loaded(&base.root().with_loras(&updates)), &expected(1.0), 2e-5, "on");
    assert_eq!(loaded(&base.root()), split(&weights(1)));
    let (none, reports) = resolve(&base, []).unwrap();
    assert_eq!(loaded(&base.root().with_loras(&none)), split(&weights(1)));
    assert!(reports.is_empty());
}

#[test]
fn the_adapter_config_beside_the_file_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = low_rank(updates_split(), |m| format!("base_model.model.{m}"), AB);
    file.tensors.retain(|key, _| !key.ends_with(".alpha"));
    std::fs::write(dir.path().join("adapter_model.safetensors"), file.bytes()).unwrap();
    let scale = |settings: &str| {
        std::fs::write(dir.path().join("adapter_config.json"), settings).unwrap();
        Lora::open(dir.path()).map(|lora| lora.scale("proj_out").unwrap())
    };
    assert_eq!(scale(r#"{"peft_type":"LORA","r":3,"lora_alpha":6}"#).unwrap(), 2.0);
    assert_eq!(scale(r#"{"r":3,"lora_alpha":3,"use_rslora":true}"#).unwrap(), 3.0 / 3f64.sqrt());
    assert!(scale(r#"{"r":3,"use_dora":true}"#).unwrap_err().to_string().contains("lora_magnitude_vector"));
    assert!(scale("[").is_err());
}

/// A LoRA for a module of full size; rank 1, so that the file is small.
fn made_for(module: &str, rows: usize, cols: usize) -> File {
    let mut file = File::default();
    file.put(format!("diffusion_model.{module}.lora_A.weight"), &Matrix::filled(1, cols, 0.0));
    file.put(format!("diffusion_model.{module}.lora_B.weight"), &Matrix::filled(rows, 1, 0.0));
    file
}

/// Applies what fits of a LoRA to one block of a model of this width.
fn apply_to_width(dim: usize, file: File) -> kiln_weights::Result<LoraReport> {
    let layer = |name: &str, rows, cols| LayerShape { name: name.into(), rows, cols };
    let qkv =
        ["to_q", "to_k", "to_v"].map(|leaf| layer(&format!("transformer_blocks.4.attn.{leaf}"), dim, dim));
    let layers = [&qkv[..], &[layer("x_embedder", dim, 1)]].concat();
    let options = LoraOptions { partial: true, ..LoraOptions::default() };
    let source = WeightSource::synthetic(0);
    Ok(LoraUpdates::resolve(&source, &layers, [(file.lora(), 1.0)], options)?.1.remove(0))
}

#[test]
fn a_lora_for_another_model_is_an_error_with_both() {
    for (module, rows, cols, dim, words) in [
        (
            "double_blocks.0.img_attn.qkv",
            12288,
            4096,
            3072,
            "made for FLUX.2 klein 9B, and this model is FLUX.2 klein 4B",
        ),
        (
            "single_blocks.3.linear2",
            3072,
            12288,
            4096,
            "made for FLUX.2 klein 4B, and this model is FLUX.2 klein 9B",
        ),
        ("double_blocks.7.txt_attn.qkv", 18432, 6144, 3072, "made for FLUX.2 dev, and"),
        (
            "double_blocks.0.img_mod.lin",
            18432,
            3072,
            3072,
            "made for FLUX.1, and this model is FLUX.2 klein 4B",
        ),
        ("double_blocks.18.img_attn.qkv", 9216, 3072, 3072, "made for FLUX.1, and"),
        ("single_blocks.0.linear1", 21504, 3072, 3072, "made for FLUX.1, and"),
    ] {
        let message = apply_to_width(dim, made_for(module, rows, cols)).unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }
    let report = apply_to_width(3072, made_for("double_blocks.4.img_attn.qkv", 9216, 3072)).unwrap();
    assert_eq!(report.matched, 1);
}

/// Applies a LoRA to one layer of a model of unknown width.
fn apply_to_proj_out(lora: Lora) -> kiln_weights::Result<LoraUpdates> {
    let layers = [LayerShape { name: "proj_out".into(), rows: 4, cols: DIM }];
    let base = model(&weights(1));
    Ok(LoraUpdates::resolve(&base, &layers, [(lora, 1.0)], LoraOptions::default())?.0)
}

#[test]
fn factors_that_do_not_fit_are_an_error() {
    let error = |keys: &[(&str, usize, usize)]| {
        let mut file = File::default();
        keys.iter().for_each(|&(key, rows, cols)| {
            file.put(format!("proj_out.{key}"), &Matrix::filled(rows, cols, 1.0))
        });
        Lora::from_bytes("a", file.bytes()).and_then(apply_to_proj_out).unwrap_err().to_string()
    };
    for (keys, words) in [
        (&[("lokr_w1", 2, 2)][..], "`proj_out.lokr_w1` has no `proj_out.lokr_w2` beside it"),
        (
            &[("lokr_w1", 2, 2), ("lokr_w2", 2, 2)],
            "has shape [4, 4], but for `proj_out` of 4 by 6 it must be [4, 6]",
        ),
        (&[("lokr_w1", 1, 1), ("lokr_w2_a", 4, 2)], "has no `proj_out.lokr_w2_b` beside it"),
        (&[("lokr_w1", 1, 1), ("lokr_w2_a", 4, 2), ("lokr_w2_b", 3, 6)], "has rank 3"),
        (
            &[("lokr_w1", 1, 1), ("lokr_w2", 4, 6), ("lokr_w2_a", 4, 1), ("lokr_w2_b", 1, 6)],
            "are for one module",
        ),
        (
            &[("hada_w1_a", 4, 2), ("hada_w1_b", 2, 6), ("hada_w2_a", 4, 2), ("hada_w2_b", 2, 5)],
            "as many columns",
        ),
        (&[("hada_w1_a", 4, 2)], "beside it"),
        (&[("diff", 4, 5)], "it must be [4, 6]"),
        (&[("diff", 4, 6), ("lora_A.weight", 1, 6), ("lora_B.weight", 4, 1)], "are for one module"),
        (
            &[("lora_A.weight", 1, 6), ("lora_B.weight", 4, 1), ("dora_scale", 3, 1)],
            "a magnitude for every row",
        ),
    ] {
        let message = error(keys);
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn a_huge_kronecker_product_is_an_error_before_it_is_computed() {
    // 40 KB for a matrix of 10¹⁰ elements.
    let mut file = File::default();
    for (key, rows, cols) in
        [("lokr_w1_a", 2500, 1), ("lokr_w1_b", 1, 2500), ("lokr_w2_a", 40, 1), ("lokr_w2_b", 1, 40)]
    {
        file.put(format!("proj_out.{key}"), &Matrix::filled(rows, cols, 1.0));
    }
    let message = apply_to_proj_out(file.lora()).unwrap_err().to_string();
    assert!(message.contains("[100000, 100000]"), "{message}");
}

#[test]
fn any_rank_works_even_one_beyond_the_layer() {
    for rank in [1, 2, 7, 61] {
        let mut random = Random(rank as u64);
        let (down, up) = (Matrix::random(&mut random, rank, DIM), Matrix::random(&mut random, 3 * DIM, rank));
        let mut file = File::default();
        file.put("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", &down);
        file.put("lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight", &up);
        file.put_number("lora_unet_double_blocks_0_img_attn_qkv.alpha", 1.0);
        let base = model(&weights(1));
        let (updates, reports) = resolve(&base, [(file.lora(), 1.0)]).unwrap();
        let mut fused = weights(1);
        let changed = fused["double_blocks.0.img_attn.qkv"].plus(1.0 / rank as f32, &up.times(&down));
        fused.insert("double_blocks.0.img_attn.qkv", changed);
        assert_same(&loaded(&base.root().with_loras(&updates)), &split(&fused), 1e-5, "rank");
        assert_eq!(reports[0].rank, rank);
    }
}

/// A file with a tensor removed, renamed or of another shape.
fn damaged(file: &File, random: &mut Random) -> File {
    const SUFFIXES: [&str; 6] = ["lora_A.weight", "lokr_w1", "hada_w2_b", "dora_scale", "diff", "alpha"];
    let mut file = file.clone();
    let keys: Vec<String> = file.tensors.keys().cloned().collect();
    let key = &keys[random.below(keys.len())];
    let (mut shape, values) = file.tensors.remove(key).unwrap();
    match random.below(4) {
        0 => return file,
        1 => shape.reverse(),
        2 => shape = vec![values.len()],
        _ => {}
    }
    let stem = key.split('.').next().unwrap_or(key);
    let name = match random.below(4) {
        0 => format!("{stem}.{}", SUFFIXES[random.below(6)]),
        1 => key.replace('0', "7"),
        _ => key.clone(),
    };
    file.tensors.insert(name, (shape, values));
    file
}

#[test]
fn damaged_files_never_panic() {
    let mut random = Random(11);
    let (mut read, mut rejected) = (0, 0);
    for (_, _, file) in all_layouts() {
        for round in 0..60 {
            let mut bytes = damaged(&file, &mut random).bytes().to_vec();
            if round % 6 == 0 {
                let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
                bytes[8 + random.below(header)] = b"019.,:[]{}\"_abwxABlok"[random.below(21)];
            }
            if round % 10 == 0 {
                bytes.truncate(random.below(bytes.len()));
            }
            let Ok(lora) = Lora::from_bytes("a", bytes.into()) else {
                rejected += 1;
                continue;
            };
            read += 1;
            let base = model(&weights(1));
            let options = LoraOptions { partial: random.below(2) == 0, ..LoraOptions::default() };
            if let Ok((updates, _)) = LoraUpdates::resolve(&base, &layers(&base), [(lora, 1.0)], options) {
                loaded(&base.root().with_loras(&updates));
            }
        }
    }
    assert!(
        read > 100 && rejected > 100,
        "{read} read, {rejected} rejected: the damage is too weak or too strong"
    );
}

#[test]
fn alpha_must_be_finite() {
    for value in [f32::NAN, f32::INFINITY] {
        let mut file = low_rank(updates_fused(), |m| format!("diffusion_model.{m}"), AB);
        file.put_number("diffusion_model.img_in.alpha", value);
        let message = Lora::from_bytes("a", file.bytes()).unwrap_err().to_string();
        assert!(
            message.contains("`diffusion_model.img_in.alpha`") && message.contains("finite"),
            "{message}"
        );
    }
}
