//! Updates that are not a product of two matrices: Kronecker products and magnitudes.

use crate::common::flux::{DIM, File, Matrix, assert_same, effective, loaded, model, split, weights};
use crate::common::layouts::{flat, updates_fused};
use crate::common::{Random, apply, resolve};

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
