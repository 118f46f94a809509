//! One update in the layout of each trainer.

use std::collections::BTreeMap;

use kiln_weights::LoraLayout;

use super::Random;
use super::flux::{DIM, File, LAYERS, Matrix, split, weights};

pub const RANK: usize = 3;
pub const ALPHA: f32 = 6.0;

/// Down and up matrices of every layer in Black Forest Labs' naming; the update is `ALPHA / RANK` times their product.
pub fn updates_fused() -> BTreeMap<&'static str, [Matrix; 2]> {
    let mut random = Random(7);
    let pair = |&(name, rows, cols, _): &(&'static str, usize, usize, &[&str])| {
        let down = Matrix::random(&mut random, RANK, cols);
        (name, [down, Matrix::random(&mut random, rows, RANK)])
    };
    LAYERS.iter().map(pair).collect()
}

/// The same for diffusers' layers: q, k and v separately, and the halves of the adaLN swapped.
pub fn updates_split() -> BTreeMap<&'static str, [Matrix; 2]> {
    let ups = updates_fused().into_iter().map(|(name, [_, up])| (name, up)).collect();
    let mut ups = split(&ups);
    let mut out = BTreeMap::new();
    for (name, [down, _]) in updates_fused() {
        let (_, _, _, layers) = LAYERS.iter().find(|layer| layer.0 == name).unwrap();
        out.extend(layers.iter().map(|layer| (*layer, [down.clone(), ups.remove(layer).unwrap()])));
    }
    out
}

pub fn expected(weight: f32) -> BTreeMap<&'static str, Matrix> {
    let mut layers = split(&weights(1));
    for (layer, [down, up]) in updates_split() {
        let changed = layers[layer].plus(weight * ALPHA / RANK as f32, &up.times(&down));
        layers.insert(layer, changed);
    }
    layers
}

pub type StemOf = fn(&str) -> String;

pub fn flat(name: &str) -> String {
    name.replace('.', "_")
}

/// Down and up matrices for each module, and its alpha.
pub fn low_rank(modules: BTreeMap<&'static str, [Matrix; 2]>, name: StemOf, [down, up]: [&str; 2]) -> File {
    let mut file = File::default();
    for (module, matrices) in modules {
        let stem = name(module);
        file.put(format!("{stem}{down}"), &matrices[0]);
        file.put(format!("{stem}{up}"), &matrices[1]);
        file.put_number(format!("{stem}.alpha"), ALPHA);
    }
    file
}

pub const AB: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];
pub const DOWN_UP: [&str; 2] = [".lora_down.weight", ".lora_up.weight"];

/// OneTrainer's layout, with slices of fused layers: q, k, v, and the MLP of a single block.
pub fn onetrainer() -> File {
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
pub fn onetrainer_fused() -> File {
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
pub fn diffusers_with_metadata() -> File {
    let mut file = low_rank(updates_split(), |m| format!("transformer.{m}"), AB);
    file.tensors.retain(|key, _| !key.ends_with(".alpha"));
    let settings = format!(r#"{{"transformer.r":{RANK},"transformer.lora_alpha":{ALPHA}}}"#);
    file.metadata.insert("lora_adapter_metadata".into(), settings);
    file
}

/// The same update as a LoKr, with the second factor as one matrix or as a product.
pub fn lokr(modules: BTreeMap<&'static str, [Matrix; 2]>, name: StemOf, product: bool) -> File {
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

pub fn loha(modules: BTreeMap<&'static str, [Matrix; 2]>, name: StemOf) -> File {
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

pub fn differences() -> File {
    let mut file = File::default();
    for (module, [down, up]) in updates_fused() {
        let scaled = Matrix::filled(up.rows, down.cols, 0.0).plus(ALPHA / RANK as f32, &up.times(&down));
        file.put(format!("diffusion_model.{module}.diff"), &scaled);
    }
    file
}

pub fn all_layouts() -> Vec<(&'static str, LoraLayout, File)> {
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
