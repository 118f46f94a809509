//! One update in the layout of each trainer: every file must change every layer in the same way.

use crate::common::flux::{DIM, File, LAYERS, Matrix, assert_same, effective, loaded, model, split, weights};
use crate::common::layouts::*;
use crate::common::{Random, apply, resolve};
use kiln_weights::{LinearPrecision, Lora, LoraBase};

#[test]
fn every_layout_changes_every_layer_in_the_same_way() {
    for (what, layout, file) in all_layouts() {
        for weight in [1.0, -0.5] {
            let base = model(&weights(1));
            let lora = file.lora();
            assert_eq!(lora.layouts(), [layout], "{what}");
            assert_eq!(lora.base(), Some(LoraBase::Width(DIM)), "{what}");
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
