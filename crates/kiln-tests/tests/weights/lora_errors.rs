//! LoRAs that don't fit the model, or are damaged: errors that name both sides, never a panic.

use crate::common::flux::{DIM, File, Matrix, loaded, model, weights};
use crate::common::layouts::{AB, all_layouts, low_rank, updates_fused};
use crate::common::{Random, layers};
use kiln_weights::{LayerShape, Lora, LoraOptions, LoraReport, LoraUpdates, WeightSource};

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
