//! The gradients of `Reference` against central differences: for a random direction `u` and weights `r`, the derivative of
//! `Σ r · f(x + t · u)` by `t` is `Σ u · df(r)`.

use kiln_ops::training::{AdamWStep, AdamWTensor, CodeBook, LowRank, Quantized8, QuantizedAdamWTensor};
use kiln_ops::{
    AttentionMask, AttentionSpec, Backend, Reference, Residency, Result, RopeLayout, RopeTable, RowGroups,
    TrainingBackend,
};
use kiln_tensor::rng::TorchCpu;
use kiln_tensor::{DType, HostLinear, HostTensor};

const B: Reference = Reference::new();

fn randn(seed: u64, shape: impl Into<kiln_tensor::Shape>) -> HostTensor {
    let shape = shape.into();
    HostTensor::from_f32(shape.clone(), TorchCpu::new(seed).randn(shape.numel())).unwrap()
}

fn dot(a: &HostTensor, b: &HostTensor) -> f64 {
    assert_eq!(a.shape(), b.shape());
    a.to_f32()
        .unwrap()
        .iter()
        .zip(b.to_f32().unwrap().iter())
        .map(|(a, b)| f64::from(*a) * f64::from(*b))
        .sum()
}

/// Compares the gradient `df(r)` of `f` at `x` with differences along three directions.
fn check(
    what: &str,
    x: &HostTensor,
    f: impl Fn(&HostTensor) -> Result<HostTensor>,
    df: impl Fn(&HostTensor) -> Result<HostTensor>,
) {
    let step = 1e-2;
    let r = randn(1000, f(x).unwrap().shape().clone());
    let gradient = df(&r).unwrap();
    for seed in 0..3 {
        let u = randn(2000 + seed, x.shape().clone());
        let at = |t: f32| dot(&r, &f(&B.add_scaled(x, &u, t).unwrap()).unwrap());
        let expected = (at(step) - at(-step)) / f64::from(2.0 * step);
        let found = dot(&gradient, &u);
        let size = expected.abs().max(dot(&gradient, &gradient).sqrt());
        assert!((found - expected).abs() < 2e-3 * size, "{what}: {found}, by differences {expected}");
    }
}

fn rope(tokens: usize, half: usize, pairs: RopeLayout) -> RopeTable<HostTensor> {
    let angles = randn(5, [tokens, half]).to_f32().unwrap().into_owned();
    let of = |f: fn(f32) -> f32| {
        HostTensor::from_f32([tokens, half], angles.iter().map(|a| f(*a)).collect()).unwrap()
    };
    RopeTable { cos: of(f32::cos), sin: of(f32::sin), pairs }
}

#[test]
fn gradients_of_products_agree_with_differences() {
    let (w, a, add) = (randn(1, [7, 5]), randn(2, [7, 5]), randn(3, [4, 5]));
    let x = randn(4, [4, 5]);
    let weight = B.load_weight(HostLinear::dense(vec![w]).unwrap(), Residency::Device).unwrap();
    check("linear", &x, |x| B.linear(x, &weight), |r| B.linear_backward(&[r], &weight, None));
    check("matmul_nt by x", &x, |x| B.matmul_nt(x, &a, 0.7, None), |r| B.matmul_nn(r, &a, 0.7, None));
    check("matmul_nt by w", &a, |a| B.matmul_nt(&x, a, 0.7, None), |r| B.matmul_tn(r, &x, 0.7, None));
    let r = randn(9, [4, 7]);
    let split = B.split_columns(&r, &[3, 4]).unwrap();
    let whole = B.linear_backward(&[&r], &weight, Some(&add)).unwrap();
    let parts = B.linear_backward(&[&split[0], &split[1]], &weight, Some(&add)).unwrap();
    assert_eq!(whole, parts);
    // Rounded once, not twice.
    let twice = B.add(&B.linear_backward(&[&r], &weight, None).unwrap(), &add).unwrap();
    let rest = B.add_scaled(&whole, &twice, -1.0).unwrap();
    assert!(dot(&rest, &rest) < 1e-12 * dot(&whole, &whole));
}

#[test]
fn gradients_of_low_rank_updates_agree_with_differences() {
    let weight = HostLinear::dense(vec![randn(1, [9, 5])]).unwrap();
    let weight = B.load_weight(weight, Residency::Device).unwrap();
    let x = randn(4, [4, 5]);
    // Two updates of columns 0..3 and 3..9, the second over two tensors of the result.
    let factors = [(0, randn(5, [2, 5]), randn(6, [3, 2])), (3, randn(7, [3, 5]), randn(8, [6, 3]))];
    let update =
        |i: usize, down: &HostTensor, up: &HostTensor, f: &mut dyn FnMut(&[LowRank<'_, HostTensor>])| {
            let mut all: Vec<LowRank<'_, HostTensor>> = factors
                .iter()
                .map(|(first, down, up)| LowRank { first: *first, down, up, scale: 0.5, input: None })
                .collect();
            all[i] = LowRank { first: factors[i].0, down, up, scale: 0.5, input: None };
            f(&all);
        };
    let widths = [3, 2, 4];
    let forward = |i: usize, down: &HostTensor, up: &HostTensor| {
        let mut y = None;
        update(i, down, up, &mut |all| {
            let ys = B.linear_low_rank(&x, &weight, all, &widths).unwrap().ys;
            y = Some(B.concat_columns(&ys.iter().collect::<Vec<_>>()).unwrap());
        });
        Ok(y.unwrap())
    };
    for i in 0..2 {
        let (_, down, up) = &factors[i];
        let gradient = |r: &HostTensor, of_up: bool| {
            let mut found = None;
            update(i, down, up, &mut |all| {
                let output = B.linear_low_rank(&x, &weight, all, &widths).unwrap();
                let dys = B.split_columns(r, &widths).unwrap();
                let dys: Vec<&HostTensor> = dys.iter().collect();
                let gradients = B.low_rank_backward(&dys, &x, all, &output.inner, &[None, None]).unwrap();
                found = Some(if of_up { gradients[i].up.clone() } else { gradients[i].down.clone() });
            });
            Ok(found.unwrap())
        };
        check("down", down, |down| forward(i, down, up), |r| gradient(r, false));
        check("up", up, |up| forward(i, down, up), |r| gradient(r, true));
    }
}

#[test]
fn gradients_of_mixed_rows_agree_with_differences() {
    let (a, x) = (randn(1, [3, 2]), randn(2, [8, 5]));
    check("mix_rows by x", &x, |x| B.mix_rows(x, &a, false), |r| B.mix_rows(r, &a, true));
    check(
        "mix_rows by a",
        &a,
        |a| B.mix_rows(&x, a, false),
        |r| B.mix_rows_gradient(r, &x, [3, 2], 1.0, None),
    );
}

#[test]
fn gradients_of_norms_and_activations_agree_with_differences() {
    let groups = RowGroups::from_lengths(&[3, 2]);
    let (scale, shift) = (randn(1, [2, 6]), randn(2, [2, 6]));
    let x = randn(3, [5, 6]);
    check(
        "ada_layer_norm",
        &x,
        |x| B.ada_layer_norm(x, &scale, &shift, &groups, 1e-3),
        |r| B.ada_layer_norm_backward(r, &x, &scale, &groups, 1e-3, None),
    );
    check("gate_rows", &x, |x| B.gate_rows(x, &scale, &groups), |r| B.gate_rows(r, &scale, &groups));
    check("swiglu", &x, |x| B.swiglu(x), |r| B.swiglu_backward(r, &x));
    check("dropout", &x, |x| B.dropout(x, 0.3, 7), |r| B.dropout(r, 0.3, 7));
    let weight = randn(4, [4]);
    let x = randn(5, [3, 8]);
    for pairs in [RopeLayout::Interleaved, RopeLayout::HalfSplit] {
        let rope = rope(3, 2, pairs);
        for weight in [Some(&weight), None] {
            check(
                "norm_rope",
                &x,
                |x| B.norm_rope(x, weight, &rope, 1e-3),
                |r| B.norm_rope_backward(r, &x, weight, &rope, 1e-3),
            );
        }
    }
}

#[test]
fn gradients_of_attention_agree_with_differences() {
    let x = [randn(1, [5, 8]), randn(2, [5, 4]), randn(3, [5, 4])];
    for mask in
        [AttentionMask::None, AttentionMask::Causal { valid: 4 }, AttentionMask::Isolated { rows: 1..3 }]
    {
        let spec = AttentionSpec::new(4, 2, mask);
        let [out, lse] = B.attention_lse(&[&x[0]], &[&x[1]], &[&x[2]], &spec).unwrap();
        assert_eq!(out, B.attention(&[&x[0]], &[&x[1]], &[&x[2]], &spec).unwrap());
        for i in 0..3 {
            let f = |t: &HostTensor| {
                let mut x = [&x[0], &x[1], &x[2]];
                x[i] = t;
                B.attention(&[x[0]], &[x[1]], &[x[2]], &spec)
            };
            let df = |r: &HostTensor| {
                // In two row blocks.
                let (top, rest) = (B.slice_rows(r, 0..2)?, B.slice_rows(r, 2..5)?);
                let all =
                    B.attention_backward(&[&top, &rest], &[&x[0]], &[&x[1]], &[&x[2]], &out, &lse, &spec)?;
                Ok(all[i].clone())
            };
            check("attention", &x[i], f, df);
        }
    }
}

#[test]
fn the_loss_has_the_gradient_of_a_mean_square() {
    let (x, y) = (randn(1, [3, 4]), randn(2, [3, 4]));
    let [loss, dx] = B.squared_error(&x, &y, 0.25).unwrap();
    let difference = B.add_scaled(&x, &y, -1.0).unwrap();
    assert!((f64::from(loss.to_f32().unwrap()[0]) - 0.25 * dot(&difference, &difference)).abs() < 1e-5);
    let expected: Vec<f32> = difference.to_f32().unwrap().iter().map(|d| 0.5 * d).collect();
    assert_eq!(dx.to_f32().unwrap().as_ref(), expected);
}

#[test]
fn row_norms_are_those_of_the_updated_weight() {
    let (w, down, up) = (randn(1, [6, 4]), randn(2, [2, 4]), randn(3, [3, 2]));
    let weight = B.load_weight(HostLinear::dense(vec![w.clone()]).unwrap(), Residency::Device).unwrap();
    let update = LowRank { first: 2, down: &down, up: &up, scale: 2.0, input: None };
    let found = B.row_norms(&weight, &[update]).unwrap();
    let change = B.matmul_nn(&up, &down, 2.0, None).unwrap();
    let middle = B.add(&w.rows(2..5).unwrap(), &change).unwrap();
    let updated = B.concat_rows(&[&w.rows(0..2).unwrap(), &middle, &w.rows(5..6).unwrap()]).unwrap();
    for (row, found) in updated.to_f32().unwrap().chunks(4).zip(found.to_f32().unwrap().iter()) {
        let expected = row.iter().map(|v| v * v).sum::<f32>().sqrt();
        assert!((found - expected).abs() < 1e-5, "{found}, expected {expected}");
    }
}

#[test]
fn eight_bit_state_stays_close_to_full_state() {
    let grads: Vec<HostTensor> = (0..20).map(|i| randn(50 + i, [300])).collect();
    let start = randn(1, [300]);
    let (mut full, mut m, mut v) = (start.clone(), HostTensor::zeros([300]), HostTensor::zeros([300]));
    let mut small = start.clone();
    let mut m8 = Quantized8::zeros(300, CodeBook::signed().code(0.0));
    let mut v8 = Quantized8::zeros(300, CodeBook::unsigned().code(0.0));
    for (i, grad) in grads.iter().enumerate() {
        let step = AdamWStep {
            lr: 1e-2,
            betas: [0.9, 0.999],
            eps: 1e-8,
            decay: 0.01,
            step: i as u64 + 1,
            grad_scale: 1.0,
        };
        B.adamw(&mut [AdamWTensor { param: &mut full, grad, m: &mut m, v: &mut v }], &step).unwrap();
        let tensor = QuantizedAdamWTensor { param: &mut small, grad, m: &mut m8, v: &mut v8 };
        B.adamw_8bit(&mut [tensor], &step).unwrap();
    }
    let distance = |a: &HostTensor, b: &HostTensor| {
        let d = B.add_scaled(a, b, -1.0).unwrap();
        dot(&d, &d).sqrt()
    };
    let moved = distance(&full, &start);
    assert!(moved > 0.1 && distance(&full, &small) < 0.1 * moved, "{} of {moved}", distance(&full, &small));
    assert_eq!(B.zeros([2, 3].into(), DType::BF16).unwrap().dtype(), DType::BF16);
}

/// Takes 8-bit AdamW steps on these gradients, with a learning rate of 0.01; returns the parameters.
fn steps_8bit(start: &HostTensor, gradients: impl IntoIterator<Item = HostTensor>) -> HostTensor {
    let count = start.shape().numel();
    let mut param = start.clone();
    let mut m = Quantized8::zeros(count, CodeBook::signed().code(0.0));
    let mut v = Quantized8::zeros(count, CodeBook::unsigned().code(0.0));
    for (step, grad) in (1..).zip(gradients) {
        let step = AdamWStep { lr: 1e-2, betas: [0.9, 0.999], eps: 1e-8, decay: 0.01, step, grad_scale: 1.0 };
        let tensor = QuantizedAdamWTensor { param: &mut param, grad: &grad, m: &mut m, v: &mut v };
        B.adamw_8bit(&mut [tensor], &step).unwrap();
    }
    param
}

/// `scale(i)` times draws of a magnitude of at least a half.
fn gradient(seed: u64, count: usize, scale: impl Fn(usize) -> f64) -> HostTensor {
    let draws = TorchCpu::new(seed).randn(count);
    let value = |(i, draw): (usize, f32)| scale(i) as f32 * draw.signum() * (0.5 + draw.abs());
    HostTensor::from_f32([count], draws.into_iter().enumerate().map(value).collect()).unwrap()
}

/// The numbers are those of bitsandbytes 0.50.2: `tools/golden/adamw8bit.py`.
#[test]
fn eight_bit_steps_are_those_of_bitsandbytes() {
    let scale = |i: usize| 10f64.powf(-((i * 37 % 101) as f64) / 50.0);
    let found = steps_8bit(&randn(7, [1024]), (1..=20).map(|step| gradient(100 + step, 1024, scale)));
    let expected = [
        -0.754_944_9,
        0.141_579_5,
        0.507_542_1,
        -0.326_283_2,
        -0.037_206_8,
        -1.572_497_6,
        0.568_815_4,
        -0.425_149_1,
        0.391_007_5,
        -1.473_750_8,
        1.586_745_4,
        0.059_596_6,
        -1.331_970_7,
        -1.973_021,
        0.218_301_1,
        1.684_407_7,
    ];
    let found: Vec<f32> = found.to_f32().unwrap().iter().copied().step_by(64).collect();
    for (found, expected) in found.iter().zip(expected) {
        // A value halfway between two codes may get either: at most a few percent of a step, which is 0.01.
        assert!((found - expected).abs() < 2e-4, "{found}, expected {expected}");
    }
}

#[test]
fn no_weight_is_thrown_where_gradients_of_a_block_differ_by_decades() {
    let scale =
        |i: usize| if i.is_multiple_of(9) { 0.0 } else { 10f64.powf(-((i * 37 % 101) as f64) / 20.0) };
    let start = HostTensor::zeros([1024]);
    let mut before = vec![0.0; 1024];
    for steps in 1..=8 {
        let found = steps_8bit(&start, (1..=steps).map(|step| gradient(100 + step, 1024, scale)));
        let found = found.to_f32().unwrap().into_owned();
        for (i, (found, before)) in found.iter().zip(&before).enumerate() {
            assert!((found - before).abs() < 0.03, "step {steps}, weight {i}: {before}, then {found}");
            assert!(!i.is_multiple_of(9) || *found == 0.0, "weight {i} has no gradient, and is {found}");
        }
        before = found;
    }
}
